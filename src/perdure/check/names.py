"""Names: which module, function, class or value each name of a file means. Only this file is read, not its imports."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from perdure.check.scopes import Binder, Binding, Function, Scope, children, within

_BUILTINS = frozenset(dir(builtins))
_FOLLOWED = 8  # at most this many assignments from name to name are followed


class BoundNames:
    """The names of a file, and the code that runs with each function."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        bound = Binder(tree)
        self.scopes, self.parents = bound.scopes, bound.parents
        self.functions, self.calls = bound.functions, bound.calls
        self.starred = bound.starred
        self._methods: dict[ast.ClassDef, dict[str, Function]] = {}

    # -- what a name refers to ----------------------------------------------------------------------------------------
    def bindings(self, name: str, scope: Scope) -> list[Binding]:
        """Every place that binds the name, as code in this scope sees it."""
        home = scope.home(name)
        return [] if home is None else home.bound.get(name, [])

    def only(self, name: str, scope: Scope) -> Binding | None:
        """The place that binds the name, if there is exactly one such place; else None."""
        found = self.bindings(name, scope)
        return found[0] if len(found) == 1 else None

    def dotted(self, node: ast.AST, scope: Scope, deep: int = _FOLLOWED) -> str:
        """The full dotted name, such as `datetime.datetime.now`, for any form of import; "" if it is not known."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        root = self._root(node, scope, deep) if isinstance(node, ast.Name) else self._imported(node, scope, deep)
        return ".".join((root, *reversed(attributes))) if root else ""

    def _imported(self, node: ast.AST, scope: Scope, deep: int) -> str:
        """The module that `__import__("time")` or `importlib.import_module("time")` returns; "" for any other node."""
        if not isinstance(node, ast.Call) or not deep or not node.args:
            return ""
        first = node.args[0]
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or isinstance(node.func, ast.Call):
            return ""
        match self.dotted(node.func, scope, deep - 1):
            case "builtins.__import__":  # __import__("os.path") returns os, unless the call has a fromlist
                return first.value if len(node.args) > 3 or node.keywords else first.value.partition(".")[0]
            case "importlib.import_module":
                return first.value
        return ""

    def _root(self, node: ast.Name, scope: Scope, deep: int) -> str:
        found = self.bindings(node.id, scope)
        if not found:
            if scope.home(node.id) is None and node.id in _BUILTINS:
                return f"builtins.{node.id}"
            return f"{self.starred[-1]}.{node.id}" if self.starred else ""
        imported = next((binding.means for binding in found if binding.kind == "import"), "")
        if imported or len(found) > 1 or deep == 0:
            return imported
        [binding] = found
        if binding.kind == "assign" and isinstance(binding.value, (ast.Name, ast.Attribute, ast.Call)):
            value = binding.value
            return (
                self._imported(value, binding.scope, deep) if isinstance(value, ast.Call) else self.dotted(value, binding.scope, deep - 1)
            )
        return ""

    def made_by(self, node: ast.AST | None, scope: Scope, deep: int = _FOLLOWED) -> str:
        """The dotted name of the call that made this value, or of the value's annotated class; "" if not known."""
        while isinstance(node, (ast.Await, ast.NamedExpr)):
            node = node.value
        if isinstance(node, ast.Call):
            return self.dotted(node.func, scope)
        if not isinstance(node, ast.Name) or deep == 0:
            return ""
        binding = self.only(node.id, scope)
        if binding is None:
            return ""
        return self.made_by(binding.value, binding.scope, deep - 1) or self.annotated(binding)

    def annotated(self, binding: Binding) -> str:
        """The dotted name of the annotated class; the same for `Path`, `"Path"`, `Path | None`, `Optional[Path]`."""
        annotation = plain_annotation(binding.annotation)
        if isinstance(annotation, ast.Subscript):
            annotation = annotation.value
        return "" if annotation is None else self.dotted(annotation, binding.scope)

    def function_called(self, node: ast.AST, scope: Scope) -> Function | None:
        """The function of this file that this name means; None if the name means anything else."""
        binding = self._defined(node, scope)
        return binding.node if binding is not None and isinstance(binding.node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

    def class_called(self, node: ast.AST, scope: Scope) -> ast.ClassDef | None:
        """The class of this file that this name means; None if the name means anything else."""
        binding = self._defined(node, scope)
        return binding.node if binding is not None and isinstance(binding.node, ast.ClassDef) else None

    def class_of(self, node: ast.AST | None, scope: Scope, deep: int = _FOLLOWED) -> ast.ClassDef | None:
        """The class of this value, if the class is declared in this file; None if the class is not known.

        The class is known for `self`, for `Thing()`, for a name that is assigned such a value, and for a variable that
        is annotated with the class.
        """
        while isinstance(node, (ast.Await, ast.NamedExpr)):
            node = node.value
        if isinstance(node, ast.Call):
            return self.class_called(node.func, scope)
        if not isinstance(node, ast.Name) or deep == 0 or (binding := self.only(node.id, scope)) is None:
            return None
        if binding.kind == "param" and (owner := self.first_parameter_of(binding)) is not None:
            return owner
        annotation = plain_annotation(binding.annotation)
        by_annotation = None if annotation is None else self.class_called(annotation, binding.scope)
        return by_annotation or self.class_of(binding.value, binding.scope, deep - 1)

    def first_parameter_of(self, binding: Binding) -> ast.ClassDef | None:
        """The class, if this binding is the first parameter (`self`, `cls`) of a method of the class; else None."""
        function = self.parents.get(self.parents.get(binding.node, self.tree))
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        owner = self.parents[function]
        taken = [*function.args.posonlyargs, *function.args.args]
        static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
        return owner if isinstance(owner, ast.ClassDef) and taken and taken[0] is binding.node and not static else None

    def method(self, owner: ast.ClassDef, name: str, deep: int = _FOLLOWED) -> Function | None:
        """The method with this name, of the class or of a base class in this file; None if there is no such method."""
        if owner not in self._methods:
            own = [one for one in owner.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
            self._methods[owner] = {one.name: one for one in reversed(own)}
        if name in self._methods[owner]:
            return self._methods[owner][name]
        scope = self.scopes[owner].parent
        assert scope is not None
        bases = (self.class_called(base, scope) for base in owner.bases)
        return next((found for base in bases if base and deep and (found := self.method(base, name, deep - 1))), None)

    def _defined(self, node: ast.AST, scope: Scope, deep: int = _FOLLOWED) -> Binding | None:
        if not isinstance(node, ast.Name) or (binding := self.only(node.id, scope)) is None:
            return None
        if binding.kind == "assign" and deep and binding.value is not None:
            return self._defined(binding.value, binding.scope, deep - 1)
        return binding

    # -- walking code -------------------------------------------------------------------------------------------------
    def code(self, roots: list[ast.AST], scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        """Every node that runs when the roots run, in order, each node with its scope.

        Inner functions are not entered. Annotations are left out: an annotation does not run with the code.
        """
        todo = [(root, scope) for root in reversed(roots)]
        while todo:
            node, scope = todo.pop()
            yield node, scope
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parts: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)]
                todo += [(part, scope) for part in reversed(parts)]
                continue
            parts = children(node)
            if isinstance(node, (ast.AnnAssign, ast.arg)):
                parts = [part for part in parts if part is not node.annotation]
            todo += within(node, reversed(parts), scope, self.scopes)


def plain_annotation(annotation: ast.expr | None) -> ast.expr | None:
    """The class in an annotation, without `| None`, Optional[…], Annotated[…] and quotes."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except (SyntaxError, ValueError):
            return None
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = [side for side in (annotation.left, annotation.right) if not (isinstance(side, ast.Constant) and side.value is None)]
        return plain_annotation(sides[0]) if len(sides) == 1 else None
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, (ast.Name, ast.Attribute)):
        outer = annotation.value.id if isinstance(annotation.value, ast.Name) else annotation.value.attr
        inside = annotation.slice
        if outer == "Optional":
            return plain_annotation(inside)
        if outer in ("Annotated", "Final", "ClassVar"):
            return plain_annotation(inside.elts[0] if isinstance(inside, ast.Tuple) and inside.elts else inside)
    return annotation
