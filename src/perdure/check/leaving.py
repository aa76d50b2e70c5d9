"""Which way a cancellation leaves the handler that has caught it: raised again on every path, or not.

A test that tells a cancellation from other errors, `if isinstance(error, asyncio.CancelledError): raise`, is understood; of any other
one both ways are taken.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Literal

from perdure.check.names import Names
from perdure.check.scopes import Scope

# again: raised again. other: another error in its place. lost: the handler is left, or may be, without one. through: it goes on below.
Way = Literal["again", "other", "lost", "through"]
EVERYTHING = frozenset(("builtins.BaseException",))
CANCELLED = frozenset(("asyncio.CancelledError", "asyncio.exceptions.CancelledError"))
_WORST: tuple[Way, ...] = ("lost", "other", "through", "again")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Leaving:
    """One handler, as a cancellation goes through it."""

    def __init__(self, names: Names, scope: Scope, handler: ast.ExceptHandler) -> None:
        self._names = names
        self._scope = scope
        self._caught = handler.name
        self.way = self._block(handler.body)

    def _block(self, body: Sequence[ast.stmt]) -> Way:
        ways = map(self._statement, body)
        return next((way for way in ways if way != "through"), "through")

    def _statement(self, node: ast.stmt) -> Way:
        match node:
            case ast.Raise(exc=raised):
                return "again" if self._is_again(raised) else "other"
            case ast.Return() | ast.Break() | ast.Continue():
                return "lost"
            case ast.If(test=test, body=body, orelse=orelse):
                return self._if(test, body, orelse)
            case ast.With(body=body) | ast.AsyncWith(body=body):
                return self._block(body)
            case ast.Try() | ast.TryStar():
                return self._try(node)
            case ast.Match(cases=cases):
                return _worst([*(self._block(case.body) for case in cases), "through"])
            case ast.For() | ast.AsyncFor() | ast.While():
                return "lost" if _returns(node.body) else self._block(node.orelse)
        return "through"

    def _if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> Way:
        match self._is_true(test):
            case True:
                return self._block(body)
            case False:
                return self._block(orelse)
        return _worst([self._block(body), self._block(orelse)])

    def _try(self, node: ast.Try | ast.TryStar) -> Way:
        """Its own handlers are about errors of the clean-up: only one that leaves without any loses the cancellation."""
        last = self._block(node.finalbody)
        if last != "through":
            return last
        way = self._block([*node.body, *node.orelse])
        return "lost" if any(self._block(handler.body) == "lost" for handler in node.handlers) else way

    def _is_again(self, raised: ast.expr | None) -> bool:
        """Whether this raises what was caught. Of what a function or a variable gives nobody can tell, and nothing is said."""
        if isinstance(raised, ast.Call):
            raised = raised.func
        if raised is None or self._names.dotted(raised, self._scope) in CANCELLED:
            return True
        if isinstance(raised, ast.Attribute) and raised.attr == "with_traceback":
            return True
        name = raised.attr if isinstance(raised, ast.Attribute) else raised.id if isinstance(raised, ast.Name) else ""
        return name == self._caught or not name[:1].isupper()

    def _is_true(self, test: ast.expr) -> bool | None:
        """What the test says about a cancellation; None if the file does not tell."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                said = self._is_true(operand)
                return None if said is None else not said
            case ast.BoolOp(op=op, values=values):
                all_said = [self._is_true(value) for value in values]
                decides = isinstance(op, ast.Or)  # one true thing decides an `or`, one false thing an `and`
                return decides if decides in all_said else None if None in all_said else not decides
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]) if name == self._caught:
                asked = [self._names.dotted(one, self._scope) for one in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds])]
                if any(one in CANCELLED or one in EVERYTHING for one in asked):
                    return True
                return False if all(one.startswith("builtins.") for one in asked) else None
        return None


def _worst(ways: list[Way]) -> Way:
    return next(way for way in _WORST if way in ways)


def _returns(body: Sequence[ast.AST]) -> bool:
    todo = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return):
            return True
        if not isinstance(node, _INNER):
            todo += ast.iter_child_nodes(node)
    return False
