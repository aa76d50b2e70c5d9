"""Which code of a file runs inside an agent or a tool: the declared function, and every function that it reaches."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from perdure.check.declared import Declarations
from perdure.check.names import BoundNames
from perdure.check.scopes import Function, Scope

_MADE = ("__new__", "__init__", "__post_init__")
_ENTERED = ("__enter__", "__exit__", "__aenter__", "__aexit__")
_STEPS = 7  # the report shortens a call path of more steps
Node = tuple[ast.AST, Scope]


class Unit:
    """A function that an agent or a tool reaches, or a class whose objects the agent or tool makes.

    `where` is the call path to the function or class.
    """

    def __init__(self, names: BoundNames, owner: Function | ast.ClassDef, where: str) -> None:
        self.owner = owner
        self.where = where
        self._names = names

    @cached_property
    def code(self) -> list[Node]:
        """Every node that runs when the function is called, in order, each with its scope.

        For a class: every node of a `default_factory`, which runs when an object of the class is made.
        """
        scope = self._names.scopes[self.owner]
        roots: list[ast.AST] = list(self.owner.body) if not isinstance(self.owner, ast.ClassDef) else list(_factories(self.owner))
        return list(self._names.code(roots, scope))


class Root(NamedTuple):
    """A function at which the search begins, and the name of this function in the report."""

    function: Function
    where: str


def reached(names: BoundNames, declared: Declarations, roots: Iterable[Root]) -> list[Unit]:
    """The roots, and every function and class of this file that the roots reach, each once, with its shortest path.

    Agents, tools, hooks and functions with unknown decorators (`declared.taken`) are not entered.
    """
    seen: set[ast.AST] = set()
    units: list[Unit] = []
    todo: deque[tuple[Function | ast.ClassDef, tuple[str, ...]]] = deque((root.function, (root.where,)) for root in roots)
    while todo:
        owner, way = todo.popleft()
        if owner in seen:
            continue
        seen.add(owner)
        unit = Unit(names, owner, " → ".join(way))
        units.append(unit)
        for called in dict.fromkeys(_called(names, unit)):
            if called not in seen and called not in declared.taken:
                todo.append((called, _shortened((*way, _label(names, called)))))
    return units


def _shortened(way: tuple[str, ...]) -> tuple[str, ...]:
    """The call path. From a long path, only the beginning and the end are kept."""
    return way if len(way) <= _STEPS else (*way[:3], "…", *way[-3:])


def _label(names: BoundNames, owner: Function | ast.ClassDef) -> str:
    around = names.parents[owner]
    return f"{around.name}.{owner.name}" if isinstance(around, ast.ClassDef) else owner.name


def _called(names: BoundNames, unit: Unit) -> Iterable[Function | ast.ClassDef]:
    """Functions and classes that the code uses. A function that is only passed to another call counts as called."""
    for node, scope in unit.code:
        match node:
            case ast.Name(ctx=ast.Load()):
                if function := names.function_called(node, scope):
                    yield function
                elif owner := names.class_called(node, scope):
                    if not isinstance(names.parents.get(node), ast.Attribute):
                        yield from _made(names, owner)
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                owner = names.class_called(value, scope) or names.class_of(value, scope)
                if owner is not None and (method := names.method(owner, attr)):
                    yield method
            case ast.withitem(context_expr=entered):
                owner = names.class_of(entered, scope)
                yield from () if owner is None else filter(None, (names.method(owner, name) for name in _ENTERED))
            case _:
                pass


def _made(names: BoundNames, owner: ast.ClassDef) -> Iterable[Function | ast.ClassDef]:
    yield owner
    yield from filter(None, (names.method(owner, name) for name in _MADE))


def _factories(owner: ast.ClassDef) -> Iterable[ast.AST]:
    """The expressions in `field(default_factory=…)`, which Python runs for every new object of the class."""
    for statement in owner.body:
        if isinstance(statement, (ast.AnnAssign, ast.Assign)) and isinstance(statement.value, ast.Call):
            yield from (keyword.value for keyword in statement.value.keywords if keyword.arg == "default_factory")
