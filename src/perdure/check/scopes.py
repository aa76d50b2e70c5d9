"""Scopes: which name is bound where, found in one walk over a file.

The walk uses a list and no recursion: the code of a file may be nested more deeply than Python's stack allows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["import", "function", "class", "assign", "with", "param", "other"]
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OWNERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)
_LEAVES = (ast.Name, ast.Constant)
_MARKS = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)


class Binding(NamedTuple):
    """One place that binds a name."""

    kind: Kind
    node: ast.AST
    scope: Scope  # the scope in which Python evaluates `value` and `annotation`
    value: ast.expr | None = None
    annotation: ast.expr | None = None
    means: str = ""  # only for an import: the dotted name of what is imported


class Scope:
    """A module, class, function, lambda or comprehension, and the names bound in it."""

    def __init__(self, node: ast.AST, parent: Scope | None) -> None:
        self.node = node
        self.parent = parent
        self.bound: dict[str, list[Binding]] = {}
        self.foreign: dict[str, Scope] = {}  # name declared `global` or `nonlocal` → the scope that binds it

    @property
    def function(self) -> ast.AST:
        """The function, class or module of this scope. A lambda or comprehension belongs to the scope around it."""
        at = self
        while at.parent is not None and isinstance(at.node, (ast.Lambda, *_COMPREHENSIONS)):
            at = at.parent
        return at.node

    def home(self, name: str) -> Scope | None:
        """The scope that binds a name which code in this scope uses; None for a builtin or an unknown name."""
        at: Scope | None = self
        while at is not None:
            if name in at.foreign:
                return at.foreign[name]
            if name in at.bound and (at is self or not isinstance(at.node, ast.ClassDef)):
                return at
            at = at.parent
        return None


class Binder:
    """Walks a file once, and collects the file's scopes, functions and calls, and the parent of every node."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.top = Scope(tree, None)
        self.scopes: dict[ast.AST, Scope] = {tree: self.top}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.functions: list[tuple[Function, Scope]] = []  # (function, the scope that declares it)
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.starred: list[str] = []  # modules of `from module import *`
        self._values: dict[ast.AST, Binding] = {}
        self._nonlocal: dict[tuple[Scope, str], list[Binding]] = {}  # see `_settle_nonlocals`
        self._walk()
        self._settle_nonlocals()

    def _walk(self) -> None:
        todo: list[tuple[ast.AST, Scope]] = [(self.tree, self.top)]
        while todo:
            node, scope = todo.pop()
            self._bind(node, scope)
            below = children(node)
            for child in below:
                self.parents[child] = node
            todo += within(node, reversed(below), scope, self.scopes)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, _OWNERS):
            self._open(node, scope)
        match node:
            case ast.Call():
                self.calls.append((node, scope))
            case ast.Name(id=name, ctx=ast.Store()):
                self._add(name, self._values.pop(node, Binding("other", node, scope)), scope)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._give(target, value, scope)
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                self._values[target] = Binding("assign", target, scope, value, annotation)
            case ast.NamedExpr(target=target, value=value):
                self._values[target] = Binding("assign", target, scope, value)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    if item.optional_vars is not None:
                        self._values[item.optional_vars] = Binding("with", item.optional_vars, scope, item.context_expr)
            case ast.arg(arg=name, annotation=annotation):
                self._add(name, Binding("param", node, scope.parent or scope, None, annotation), scope)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self._add(name, Binding("other", node, scope), scope)
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.Global(names=names):
                scope.foreign.update(dict.fromkeys(names, self.top))
            case ast.Nonlocal(names=names):
                for name in names:
                    self._nonlocal.setdefault((scope, name), [])
            case _:
                pass

    def _open(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = Scope(node, scope)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.append((node, scope))
            self._add(node.name, Binding("function", node, scope), scope)
        elif isinstance(node, ast.ClassDef):
            self._add(node.name, Binding("class", node, scope), scope)

    def _give(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            self._values[target] = Binding("assign", target, scope, value)
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._give(one, part, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                if alias.name == "*":
                    self.starred.append(module)
                    continue
                self._add(alias.asname or alias.name, Binding("import", node, scope, means=f"{module}.{alias.name}"), scope)
            else:
                top = alias.name.partition(".")[0]
                self._add(alias.asname or top, Binding("import", node, scope, means=alias.name if alias.asname else top), scope)

    def _add(self, name: str, binding: Binding, scope: Scope) -> None:
        if isinstance(binding.node, ast.Name) and isinstance(self.parents.get(binding.node), ast.NamedExpr):
            while scope.parent is not None and isinstance(scope.node, _COMPREHENSIONS):
                scope = scope.parent  # `:=` in a comprehension binds the name in the scope around the comprehension
        if (scope, name) in self._nonlocal:
            self._nonlocal[scope, name].append(binding)
        else:
            scope.foreign.get(name, scope).bound.setdefault(name, []).append(binding)

    def _settle_nonlocals(self) -> None:
        """Add the bindings of `nonlocal` names to the scopes that they belong to, which are known after the walk."""
        for (scope, name), bindings in self._nonlocal.items():  # in the order of the walk: outer scopes first
            home = (scope.parent.home(name) if scope.parent is not None else None) or self.top
            scope.foreign[name] = home
            home.bound.setdefault(name, []).extend(bindings)


def children(node: ast.AST) -> list[ast.AST]:
    """The child nodes, in order. Contexts and operators (Load, Add, …) are left out: no rule needs these nodes."""
    if isinstance(node, _LEAVES):
        return []
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, _MARKS)]


def within(node: ast.AST, parts: Iterable[ast.AST], scope: Scope, scopes: Mapping[ast.AST, Scope]) -> list[tuple[ast.AST, Scope]]:
    """These parts of a node, each with the scope of the part. `scope` is the scope of the node."""
    if not isinstance(node, _OWNERS):
        return [(part, scope) for part in parts]
    outside = set(map(id, evaluated_outside(node)))
    return [(part, scope if id(part) in outside else scopes[node]) for part in parts]


def evaluated_outside(node: ast.AST) -> list[ast.AST]:
    """The parts of a function or class that Python evaluates in the scope around the function or class."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return []
