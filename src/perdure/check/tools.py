"""Rules about tools: `effect`, `key`, `reconcile`, `timeout`, `undecorated`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

from perdure.check.declared import CALL, REACT, STEP, Declared
from perdure.check.file import File
from perdure.check.names import BoundNames, plain_annotation
from perdure.check.scopes import Function, Scope
from perdure.core.events import Effect

_SHOWS = frozenset("builtins.print builtins.type builtins.isinstance builtins.len builtins.bool builtins.id builtins.hash".split())
_SHOWS_METHODS = frozenset("debug info warning error exception critical log".split())
_LOGGERS = frozenset(("logging.getLogger", "structlog.get_logger"))
_MAKES_TEXT = frozenset(("builtins.str", "builtins.repr", "builtins.format"))
_PARTS = (ast.FormattedValue, ast.JoinedStr, ast.BinOp, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.keyword, ast.IfExp)


# -- Does a keyed tool use its key? Printing the key, or assigning it to a name that is not used, does not count


def uses_key(names: BoundNames, function: Function, parameter: str) -> bool:
    """Does the function use the key of its Call, or pass the Call to code that may use the key?"""
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


def _uses(names: BoundNames, function: Function, name: str, *, only_key: bool) -> Iterator[ast.AST]:
    """Every use of this name. With `only_key`, `name.key` counts, and other attributes of the name do not."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            above = names.parents.get(node)
            if not isinstance(above, ast.Attribute):
                yield node
            elif not only_key or above.attr == "key":
                yield above


def _goes_to(names: BoundNames, scope: Scope, node: ast.AST) -> set[str] | None:
    """The name to which the code assigns this value, as a set.

    If the code only prints or logs the value, the set is empty. If the code uses the value in any other way, the
    result is None.
    """
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


def _only_shows(names: BoundNames, scope: Scope, func: ast.expr) -> bool:
    if names.dotted(func, scope) in _SHOWS:
        return True
    if not isinstance(func, ast.Attribute) or func.attr not in _SHOWS_METHODS:
        return False
    return names.dotted(func.value, scope) == "logging" or names.made_by(func.value, scope) in _LOGGERS


# -- The rules


_EFFECTS = get_args(Effect)
_CHOOSE = 'say effect="read", "idempotent", "keyed", "transaction" or "once"'


def look_at_tools(file: File) -> None:
    """Report tools that are declared wrongly, and plain functions where only a tool is accepted."""
    for tool in file.declared.tools:
        _tool(file, tool)
    for kind, _, hook in file.declared.hooks:
        if kind == "compensate" and _effect(file, hook) == "keyed":
            _key(file, hook)
    for call, scope in file.names.calls:
        for given in _wanted_tools(file.names, call, scope):
            _undecorated(file, given, scope)


def _tool(file: File, tool: Declared) -> None:
    effect = _effect(file, tool)
    where = f"tool {tool.name}"
    if "effect" not in tool.options:
        if tool.complete:
            message = "declares no effect, so it is `once`: after a crash inside a call nothing is repeated, and a person must resolve it"
            file.say(tool.at, "effect", where, message, _CHOOSE, "note")
    elif effect is not None and effect not in _EFFECTS:
        file.say(tool.options["effect"], "effect", where, f"effect={effect!r} is unknown, and refused when the file is loaded", _CHOOSE)
    elif effect == "keyed":
        _key(file, tool)
    elif effect == "once" and not file.declared.reconciled(tool):
        message = "is `once` and has no reconcile hook in this file: after a crash inside a call a person must resolve it"
        file.say(
            tool.at,
            "reconcile",
            where,
            message,
            f"write @{tool.function.name}.reconcile if a service can tell whether the call happened",
            "note",
        )
    elif effect == "once" and "timeout" not in tool.options and tool.complete:
        message = (
            "is `once` and has a hook but no timeout: the hook's “not found” is believed only after 60 s, "
            "and never if the lost worker may still live"
        )
        file.say(tool.at, "timeout", where, message, "say timeout=, the longest that its client waits for an answer", "note")


def _effect(file: File, tool: Declared) -> str | None:
    """The declared effect of the tool or hook; None if the file does not show the effect as a text."""
    given = tool.options.get("effect")
    if isinstance(given, ast.Name) and (binding := file.names.only(given.id, tool.scope)) is not None:
        given = binding.value
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None


def _key(file: File, tool: Declared) -> None:
    where = f"tool {tool.name}"
    parameter = _call_parameter(file.names, tool.function, tool.scope)
    way_out = (
        "take `call: Call` and send call.key as the idempotency key; if repeating it without a key is harmless, it is idempotent; else once"
    )
    if parameter is None:
        message = "is `keyed` and takes no Call, so that it cannot send call.key: repeated after a crash it acts twice"
        file.say(tool.at, "key", where, message, way_out)
    elif not uses_key(file.names, tool.function, parameter):
        message = f"is `keyed` and never sends {parameter}.key: repeated after a crash it acts twice"
        file.say(tool.at, "key", where, message, way_out)


def _call_parameter(names: BoundNames, function: Function, scope: Scope) -> str | None:
    args = function.args
    for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        annotation = plain_annotation(parameter.annotation)
        if annotation is not None and names.dotted(annotation, scope) in CALL:
            return parameter.arg
    return None


def _wanted_tools(names: BoundNames, call: ast.Call, scope: Scope) -> list[ast.expr]:
    """The expressions that this call passes as tools to a ReAct agent or to a step of a plan."""
    dotted = names.dotted(call.func, scope)
    if dotted in REACT:
        listed = [keyword.value for keyword in call.keywords if keyword.arg == "tools"]
        return [one for given in listed if isinstance(given, (ast.List, ast.Tuple, ast.Set)) for one in given.elts]
    if dotted in STEP:
        return [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "tool")]
    return []


def _undecorated(file: File, given: ast.expr, scope: Scope) -> None:
    function = file.names.function_called(given, scope)
    if isinstance(given, ast.Lambda) or (function is not None and function not in file.declared.taken):
        name = "a lambda" if function is None else function.name
        file.say(
            given,
            "undecorated",
            "",
            f"{name} is a plain function, and is refused: only tools and agents are recorded",
            "decorate it with @tool(effect=…)",
        )
