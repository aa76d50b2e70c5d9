"""Does a tool hand its key on? Showing it to people, or giving it a name that nobody uses, sends it nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from perdure.check.names import Names
from perdure.check.scopes import Function, Scope

_SHOWS = frozenset("builtins.print builtins.type builtins.isinstance builtins.len builtins.bool builtins.id builtins.hash".split())
_SHOWS_METHODS = frozenset("debug info warning error exception critical log".split())
_LOGGERS = frozenset(("logging.getLogger", "structlog.get_logger"))
_MAKES_TEXT = frozenset(("builtins.str", "builtins.repr", "builtins.format"))
_PARTS = (ast.FormattedValue, ast.JoinedStr, ast.BinOp, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.keyword, ast.IfExp)


def hands_on(names: Names, function: Function, parameter: str) -> bool:
    """Whether the function uses the key, or hands its Call to somebody who may."""
    scope = names.scopes[function]
    known, todo = {parameter}, [parameter]
    while todo:
        name = todo.pop()
        for used in _uses(names, function, name, only_key=name == parameter):
            goes_to = _goes_to(names, scope, used)
            if goes_to is None:
                return True
            todo += goes_to - known
            known |= goes_to
    return False


def _uses(names: Names, function: Function, name: str, *, only_key: bool) -> Iterator[ast.AST]:
    """Where the value of this name, or the key of the Call, is used."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            above = names.parents.get(node)
            if not isinstance(above, ast.Attribute):
                yield node
            elif not only_key or above.attr == "key":
                yield above


def _goes_to(names: Names, scope: Scope, node: ast.AST) -> set[str] | None:
    """The names that this value is given here: none when it is only shown; None when it goes on to somebody."""
    above = names.parents.get(node)
    while isinstance(above, _PARTS) or (isinstance(above, ast.Call) and names.dotted(above.func, scope) in _MAKES_TEXT):
        node, above = above, names.parents.get(above)
    match above:
        case ast.Expr():
            return set()
        case ast.Call(func=func) if func is not node and _only_shows(names, scope, func):
            return set()
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return None


def _only_shows(names: Names, scope: Scope, func: ast.expr) -> bool:
    if names.dotted(func, scope) in _SHOWS:
        return True
    if not isinstance(func, ast.Attribute) or func.attr not in _SHOWS_METHODS:
        return False
    return names.dotted(func.value, scope) == "logging" or names.made_by(func.value, scope) in _LOGGERS
