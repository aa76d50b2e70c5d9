"""Rule `swallow`: if a handler around an await catches a cancellation, does every path raise the cancellation again?

In a cancelled run, an await raises CancelledError. If a handler swallows this error, the run does not end. The rule
understands a test such as `if isinstance(error, asyncio.CancelledError): raise`. For a test that the rule does not
understand, it follows both branches.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Literal

from perdure.check.file import File
from perdure.check.names import BoundNames
from perdure.check.reach import Unit
from perdure.check.scopes import Scope

# again: the handler raises the cancellation again. other: the handler raises another error instead. lost: the handler
# may end without an error. through: this statement does not end the handler; the code below it decides.
Way = Literal["again", "other", "lost", "through"]
EVERYTHING = frozenset(("builtins.BaseException",))
CANCELLED = frozenset(("asyncio.CancelledError", "asyncio.exceptions.CancelledError"))
_WORST: tuple[Way, ...] = ("lost", "other", "through", "again")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Leaving:
    """The way in which a cancellation leaves one handler."""

    def __init__(self, names: BoundNames, scope: Scope, handler: ast.ExceptHandler) -> None:
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
        """The Way of a `try` statement inside of the handler.

        The `except` blocks of this `try` catch other errors, so they do not raise the cancellation again. But if one of
        them can return, break or continue, the cancellation is lost.
        """
        last = self._block(node.finalbody)
        if last != "through":
            return last
        way = self._block([*node.body, *node.orelse])
        return "lost" if any(self._block(handler.body) == "lost" for handler in node.handlers) else way

    def _is_again(self, raised: ast.expr | None) -> bool:
        """Does `raise` with this expression raise the caught error? The check assumes so for a lower-case name."""
        if isinstance(raised, ast.Call):
            raised = raised.func
        if raised is None or self._names.dotted(raised, self._scope) in CANCELLED:
            return True
        if isinstance(raised, ast.Attribute) and raised.attr == "with_traceback":
            return True
        name = raised.attr if isinstance(raised, ast.Attribute) else raised.id if isinstance(raised, ast.Name) else ""
        return name == self._caught or not name[:1].isupper()

    def _is_true(self, test: ast.expr) -> bool | None:
        """The value of this test when the caught error is a cancellation; None if the rule cannot tell the value."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                said = self._is_true(operand)
                return None if said is None else not said
            case ast.BoolOp(op=op, values=values):
                all_said = [self._is_true(value) for value in values]
                decides = isinstance(op, ast.Or)  # a true operand decides an `or`; a false operand decides an `and`
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


# -- The rule


_CONSEQUENCE: dict[Way, str] = {
    "through": "so that the run cannot be stopped",
    "lost": "so that the run cannot be stopped where the handler does not raise the cancellation again",
    "other": "and raises another error in its place: the run ends as failed",
}
_WAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def look_at_swallowing(file: File, unit: Unit) -> None:
    """Report where the cancellation of a run is swallowed."""
    for node, scope in unit.code:
        if isinstance(node, (ast.Try, ast.TryStar)) and _waits(node.body):
            _handlers(file, unit, node, scope)
        elif isinstance(node, (ast.With, ast.AsyncWith)) and _waits(node.body):
            for item in node.items:
                _suppressed(file, unit, item.context_expr, node.body, scope)


def _handlers(file: File, unit: Unit, node: ast.Try | ast.TryStar, scope: Scope) -> None:
    for handler in node.handlers:
        caught = [file.names.dotted(one, scope) for one in _types(handler.type)]
        everything = handler.type is None or any(name in EVERYTHING for name in caught)
        if not everything and not any(name in CANCELLED for name in caught):
            continue
        way = Leaving(file.names, scope, handler).way
        if everything and way != "again":
            words = "except:" if handler.type is None else f"except {ast.unparse(handler.type)}:"
            message = f"`{words}` around an await catches the cancellation of the run too, {_CONSEQUENCE[way]}"
            file.say(handler, "swallow", unit.where, message, "catch Exception, or raise the same error again at the end of the handler")
        elif way != "again":
            _cancelled(file, unit, handler, node.body)
        return  # the handlers below do not get the cancellation


def _suppressed(file: File, unit: Unit, entered: ast.expr, body: Sequence[ast.stmt], scope: Scope) -> None:
    if not isinstance(entered, ast.Call) or file.names.dotted(entered.func, scope) != "contextlib.suppress":
        return
    caught = [file.names.dotted(one, scope) for one in entered.args]
    if any(name in EVERYTHING for name in caught):
        message = f"`{ast.unparse(entered)}` around an await swallows the cancellation of the run too, so that the run cannot be stopped"
        file.say(entered, "swallow", unit.where, message, "suppress Exception, or what you expect")
    elif any(name in CANCELLED for name in caught):
        _cancelled(file, unit, entered, body)


def _cancelled(file: File, unit: Unit, node: ast.AST, body: Sequence[ast.stmt]) -> None:
    """Report only a note: the code catches CancelledError deliberately.

    There is no note if the code awaits only tasks: the cancellation may be of a task that the code cancelled itself.
    """
    if _waits_for_a_name(body):
        return
    message = "catches CancelledError and does not raise it again: a run that is cancelled here goes on, and may end as succeeded"
    file.say(node, "swallow", unit.where, message, "clean up, then raise", "note")


def _types(node: ast.expr | None) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [] if node is None else [node]


def _walk(body: Sequence[ast.AST]) -> list[ast.AST]:
    """Every node of these statements, but not the inside of functions, lambdas and classes that they declare."""
    found: list[ast.AST] = []
    todo = list(body)
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, _INNER):
            todo += ast.iter_child_nodes(node)
    return found


def _waits(body: Sequence[ast.AST]) -> bool:
    return any(isinstance(node, _WAITS) or (isinstance(node, ast.comprehension) and node.is_async) for node in _walk(body))


def _waits_for_a_name(body: Sequence[ast.stmt]) -> bool:
    """Does this code await only tasks (`await task`, `gather(*tasks)`)? Then the cancellation may be of a task."""
    awaited = [node.value for node in _walk(body) if isinstance(node, ast.Await)]
    return bool(awaited) and all(isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)) or _gathers(one) for one in awaited)


def _gathers(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("gather")
        and all(isinstance(one, (ast.Name, ast.Starred)) for one in node.args)
    )
