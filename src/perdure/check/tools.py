"""Tools: do they say what is right when their answer is lost, and do they keep what they say?"""

from __future__ import annotations

import ast
from typing import get_args

from perdure.check.declared import CALL, REACT, STEP, Declared
from perdure.check.file import File
from perdure.check.handing import hands_on
from perdure.check.names import Names, plain_annotation
from perdure.check.scopes import Function, Scope
from perdure.core.events import Effect

_EFFECTS = get_args(Effect)
_CHOOSE = 'say effect="read", "idempotent", "keyed", "transaction" or "once"'


def look_at_tools(file: File) -> None:
    """Say which tools are declared wrongly, or not at all."""
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
            message = "declares no effect, so it is `once`: after a crash inside it nothing is repeated, and a person must settle it"
            file.say(tool.at, "effect", where, message, _CHOOSE, "note")
    elif effect is not None and effect not in _EFFECTS:
        file.say(tool.options["effect"], "effect", where, f"effect={effect!r} is unknown, and refused when the file is loaded", _CHOOSE)
    elif effect == "keyed":
        _key(file, tool)
    elif effect == "once" and not file.declared.reconciled(tool):
        message = "is `once` and has no reconcile hook in this file: after a crash inside it a person must settle it"
        file.say(
            tool.at,
            "reconcile",
            where,
            message,
            f"write @{tool.function.name}.reconcile if anything can be asked whether it happened",
            "note",
        )
    elif effect == "once" and "timeout" not in tool.options and tool.complete:
        message = (
            "is `once` and has a hook but no timeout: 60 s are waited before the hook's “not found” is believed, "
            "and where the lost worker may still live it is never believed"
        )
        file.say(tool.at, "timeout", where, message, "say timeout=, the longest that its client waits for an answer", "note")


def _effect(file: File, tool: Declared) -> str | None:
    """The declared effect, if the file tells it."""
    given = tool.options.get("effect")
    if isinstance(given, ast.Name) and (binding := file.names.only(given.id, tool.scope)) is not None:
        given = binding.value
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None


def _key(file: File, tool: Declared) -> None:
    where = f"tool {tool.name}"
    parameter = _call_parameter(file.names, tool.function, tool.scope)
    way_out = (
        "take `call: Call` and send call.key as the idempotency key; if repeating it is harmless without one, it is idempotent; else once"
    )
    if parameter is None:
        message = "is `keyed` and takes no Call, so that it cannot send call.key: repeated after a crash it acts twice"
        file.say(tool.at, "key", where, message, way_out)
    elif not hands_on(file.names, tool.function, parameter):
        message = f"is `keyed` and never sends {parameter}.key: repeated after a crash it acts twice"
        file.say(tool.at, "key", where, message, way_out)


def _call_parameter(names: Names, function: Function, scope: Scope) -> str | None:
    args = function.args
    for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        annotation = plain_annotation(parameter.annotation)
        if annotation is not None and names.dotted(annotation, scope) in CALL:
            return parameter.arg
    return None


def _wanted_tools(names: Names, call: ast.Call, scope: Scope) -> list[ast.expr]:
    """What this call gives to a ReAct agent or a plan's step as tools."""
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
