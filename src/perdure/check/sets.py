"""What is a set, as far as the file tells, and whether its order is left to chance.

Sets of numbers and of tasks are walked in the same order everywhere: a number's hash is the number, and an agent's tasks hash by theirs.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from perdure.check.names import Names, plain_annotation
from perdure.check.reach import Node
from perdure.check.scopes import Binding, Scope

_TASKS = frozenset(("asyncio.create_task", "asyncio.ensure_future"))
_CALM = frozenset("builtins.int builtins.float builtins.bool asyncio.Task asyncio.Future asyncio.tasks.Task".split())
_SETS = frozenset(
    "builtins.set builtins.frozenset typing.Set typing.FrozenSet typing.AbstractSet collections.abc.Set collections.abc.MutableSet".split()
)
_STAYS_A_SET = frozenset("union intersection difference symmetric_difference copy".split())
_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
_FOLLOWED = 6


class Sets:
    """Tells unordered values in the code of one function."""

    def __init__(self, names: Names, code: Sequence[Node]) -> None:
        self._names = names
        self._calm_added: dict[tuple[Scope, str], bool] = {}  # whether all that is put into each set by name is calm
        for node, scope in code:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="add"), args=[given]):
                    self._put(name, scope, calm=self._is_calm(given, scope))
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "symmetric_difference_update"), args=many):
                    self._put(name, scope, calm=all(self._holds_calm(given, scope) for given in many))
                case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr() | ast.BitXor(), value=given):
                    self._put(name, scope, calm=self._holds_calm(given, scope))

    def _put(self, name: str, scope: Scope, *, calm: bool) -> None:
        home = scope.home(name)
        if home is not None:
            self._calm_added[home, name] = calm and self._calm_added.get((home, name), True)

    def is_unordered(self, node: ast.AST | None, scope: Scope, deep: int = _FOLLOWED) -> bool:
        """Whether this is a set whose order is another one in every process."""
        if deep == 0 or node is None:
            return False
        match node:
            case ast.Set(elts=elements):
                return len(elements) > 1 and not all(self._is_calm(one, scope) for one in elements)
            case ast.SetComp(elt=element):
                return not self._is_calm(element, self._names.scopes[node])
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
                return any(_is_keys(side) or self.is_unordered(side, scope, deep - 1) for side in (left, right))
            case ast.IfExp(body=left, orelse=right):
                return self.is_unordered(left, scope, deep - 1) or self.is_unordered(right, scope, deep - 1)
            case ast.BoolOp(values=values):
                return any(self.is_unordered(value, scope, deep - 1) for value in values)
            case ast.NamedExpr(value=value):
                return self.is_unordered(value, scope, deep - 1)
            case ast.Call():
                return self._is_made(node, scope, deep)
            case ast.Name(id=name):
                found = self._names.bindings(name, scope)
                return bool(found) and any(self._is_bound(binding, name, scope, deep) for binding in found)
        return False

    def _is_made(self, node: ast.Call, scope: Scope, deep: int) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _STAYS_A_SET and self.is_unordered(node.func.value, scope, deep - 1):
            return True
        if self._names.dotted(node.func, scope) not in ("builtins.set", "builtins.frozenset"):
            return False
        return bool(node.args) and not self._holds_calm(node.args[0], scope)

    def _is_bound(self, binding: Binding, name: str, scope: Scope, deep: int) -> bool:
        if (by_annotation := self._by_annotation(binding)) is not None:
            return by_annotation
        if binding.kind != "assign" or binding.value is None:
            return False
        made = self._names.dotted(binding.value.func, binding.scope) if isinstance(binding.value, ast.Call) else ""
        is_set = made in _SETS or isinstance(binding.value, (ast.Set, ast.SetComp))
        return (is_set and self._is_filled(name, scope)) or self.is_unordered(binding.value, binding.scope, deep - 1)

    def _is_filled(self, name: str, scope: Scope) -> bool:
        """`seen = set()`: whatever is put into it decides as well."""
        home = scope.home(name)
        return home is not None and not self._calm_added.get((home, name), True)

    def _by_annotation(self, binding: Binding) -> bool | None:
        """Whether the annotation says that it is an unordered set; None if it does not say."""
        annotation = plain_annotation(binding.annotation)
        holds = annotation.slice if isinstance(annotation, ast.Subscript) else None
        if annotation is None or self._names.annotated(binding) not in _SETS:
            return None
        return holds is None or not self._is_calm_type(holds, binding.scope)

    def _is_calm_type(self, annotation: ast.expr, scope: Scope) -> bool:
        plain = plain_annotation(annotation)
        plain = plain.value if isinstance(plain, ast.Subscript) else plain
        return plain is not None and self._names.dotted(plain, scope) in _CALM

    def _holds_calm(self, node: ast.expr, scope: Scope, deep: int = _FOLLOWED) -> bool:
        """Whether the elements of this are numbers or tasks."""
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return all(self._is_calm(one, scope) for one in elements)
            case ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.GeneratorExp(elt=element):
                return self._is_calm(element, self._names.scopes[node])
            case ast.Call(func=func):
                return self._names.dotted(func, scope) == "builtins.range"
            case ast.Name(id=name) if deep and (binding := self._names.only(name, scope)) is not None:
                annotation = plain_annotation(binding.annotation)
                if isinstance(annotation, ast.Subscript):
                    return self._is_calm_type(annotation.slice, binding.scope)
                return binding.value is not None and self._holds_calm(binding.value, binding.scope, deep - 1)
        return False

    def _is_calm(self, node: ast.expr, scope: Scope, deep: int = _FOLLOWED) -> bool:
        match node:
            case ast.Constant(value=int() | float() | None):
                return True
            case ast.UnaryOp(operand=operand):
                return self._is_calm(operand, scope)
            case ast.Call(func=func):
                made = self._names.dotted(func, scope)
                return (
                    made in _TASKS
                    or made in ("builtins.int", "builtins.len")
                    or (isinstance(func, ast.Attribute) and func.attr == "create_task")
                )
            case ast.Name(id=name) if deep and (binding := self._names.only(name, scope)) is not None:
                if (annotation := plain_annotation(binding.annotation)) is not None:
                    return self._is_calm_type(annotation, binding.scope)
                if binding.value is not None and binding.kind == "assign":
                    return self._is_calm(binding.value, binding.scope, deep - 1)
                return self._is_element(binding)
        return False

    def _is_element(self, binding: Binding) -> bool:
        """A loop's variable is calm if what the loop walks holds calm things."""
        around = self._names.parents.get(binding.node)
        if isinstance(around, (ast.For, ast.comprehension)) and around.target is binding.node:
            return self._holds_calm(around.iter, binding.scope)
        return False


def _is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys" and not node.args
