"""Catching everything around an await: a cancelled run hears of it there, and must be let go (T23, T29)."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from perdure.check.file import File
from perdure.check.leaving import CANCELLED, EVERYTHING, Leaving, Way
from perdure.check.reach import Unit
from perdure.check.scopes import Scope

_COMES_TO: dict[Way, str] = {
    "through": "so that it cannot be stopped",
    "lost": "so that it cannot be stopped where the handler does not raise it again",
    "other": "and raises another error in its place: the run ends as failed",
}
_WAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def look_at_swallowing(file: File, unit: Unit) -> None:
    """Say where the cancellation of a run gets lost."""
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
            message = f"`{words}` around an await catches the cancellation of the run too, {_COMES_TO[way]}"
            file.say(handler, "swallow", unit.where, message, "catch Exception, or raise again, and the same, at the end of the handler")
        elif way != "again":
            _cancelled(file, unit, handler, node.body)
        return  # whatever stands below does not see a cancellation


def _suppressed(file: File, unit: Unit, entered: ast.expr, body: Sequence[ast.stmt], scope: Scope) -> None:
    if not isinstance(entered, ast.Call) or file.names.dotted(entered.func, scope) != "contextlib.suppress":
        return
    caught = [file.names.dotted(one, scope) for one in entered.args]
    if any(name in EVERYTHING for name in caught):
        message = f"`{ast.unparse(entered)}` around an await swallows the cancellation of the run too, so that it cannot be stopped"
        file.say(entered, "swallow", unit.where, message, "suppress Exception, or what you expect")
    elif any(name in CANCELLED for name in caught):
        _cancelled(file, unit, entered, body)


def _cancelled(file: File, unit: Unit, node: ast.AST, body: Sequence[ast.stmt]) -> None:
    """Deliberate: worth knowing. Waiting for a task that one has cancelled oneself is how that is done, and not worth a word."""
    if _waits_for_a_name(body):
        return
    message = "catches CancelledError and does not raise it again: a run that is cancelled here goes on, and may end as succeeded"
    file.say(node, "swallow", unit.where, message, "clean up, then raise", "note")


def _types(node: ast.expr | None) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [] if node is None else [node]


def _walk(body: Sequence[ast.AST]) -> list[ast.AST]:
    """Every node of these statements that runs with them: not what is only declared there."""
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
    """`await task`, or gather(*tasks): nothing is called here whose cancellation could be the run's own."""
    awaited = [node.value for node in _walk(body) if isinstance(node, ast.Await)]
    return bool(awaited) and all(isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)) or _gathers(one) for one in awaited)


def _gathers(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("gather")
        and all(isinstance(one, (ast.Name, ast.Starred)) for one in node.args)
    )
