"""Rules `clock`, `random`, `io`, `thread`, `print`: names and objects that agents must not use.

A name is found by its dotted name. An object is found by the call that made it, or by its annotated class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from perdure.check.file import File
from perdure.check.reach import Unit
from perdure.check.scopes import Binding, Scope
from perdure.check.world import (
    FILES,
    GENERATORS,
    LOOP_MAKERS,
    LOOP_REFUSED,
    NAMES,
    PATH,
    PATH_IO,
    THREADS,
    Fact,
    fact_of,
    fact_of_call,
    fact_of_made,
)

_STAYS_A_PATH = frozenset("parent joinpath with_name with_suffix with_stem relative_to absolute resolve expanduser".split())


def look_at_touching(file: File, unit: Unit) -> None:
    """Report the clock, randomness, I/O and threads that the code uses."""
    for node, scope in unit.code:
        if isinstance(node, ast.Call):
            _call(file, unit, node, scope)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            _name(file, unit, node, scope)


def _name(file: File, unit: Unit, node: ast.Name | ast.Attribute, scope: Scope) -> None:
    above = file.names.parents.get(node)
    if isinstance(above, ast.Attribute):
        return  # this node is a part of a dotted name, and only the whole name is checked
    dotted = file.names.dotted(node, scope)
    if dotted and (fact := fact_of(dotted)) is not None:
        _say(file, unit, node, fact, _shown(node) + ("()" if isinstance(above, ast.Call) and above.func is node else ""))
    elif (
        isinstance(node, ast.Attribute)
        and node.attr == "fn"
        and file.names.function_called(node.value, scope) in file.declared.tool_functions
    ):
        tool = _shown(node.value)
        message = f"{_shown(node)} is the tool's plain function: called here, its effect is not recorded, and happens again on every replay"
        file.say(node, "io", unit.where, message, f"call the tool itself: await {tool}(…)")
    elif isinstance(node, ast.Name):
        _loaded(file, unit, node, scope)


def _loaded(file: File, unit: Unit, node: ast.Name, scope: Scope) -> None:
    """Report a shared name whose value came from the clock or from randomness when the file was loaded."""
    if file.shared(node, scope) is None or (binding := file.names.only(node.id, scope)) is None:
        return
    for source, fact in _volatile(file, binding):
        message = f"{node.id} comes from {source} when the file is loaded, so that every process has another value"
        file.say(node, fact.rule, unit.where, message, fact.way_out)


def _volatile(file: File, binding: Binding) -> Iterator[tuple[str, Fact]]:
    if binding.kind != "assign" or binding.value is None:
        return
    for part, scope in file.names.code([binding.value], binding.scope):
        if isinstance(part, ast.Lambda):
            return  # a lambda runs only where it is called, and is checked there
        if isinstance(part, ast.Call):
            dotted = file.names.dotted(part.func, scope)
            fact = NAMES.get(dotted)
            if fact is not None and fact.rule in ("clock", "random"):
                yield f"{_shown(part.func)}()", fact


def _call(file: File, unit: Unit, node: ast.Call, scope: Scope) -> None:
    dotted = file.names.dotted(node.func, scope)
    if dotted:
        if (fact := fact_of_call(dotted, _arguments(node))) is not None and not _is_number(node, dotted):
            _say(file, unit, node.func, fact, f"{_shown(node.func)}()")
        return
    if not isinstance(node.func, ast.Attribute):
        return
    method, owner = node.func.attr, node.func.value
    if method in PATH_IO and _is_path(file, owner, scope):
        _say(file, unit, node.func, FILES, f"{_shown(node.func)}()")
    elif method == "run_in_executor":
        _say(file, unit, node.func, THREADS, f"{_shown(node.func)}()")
    elif method in LOOP_REFUSED and file.names.made_by(owner, scope) in LOOP_MAKERS:
        _say(file, unit, node.func, LOOP_REFUSED[method], f"{_shown(node.func)}()")
    else:
        _method(file, unit, node.func, scope)


def _method(file: File, unit: Unit, func: ast.Attribute, scope: Scope) -> None:
    """Report a method of an object that was made outside this function.

    For an object that is made inside the function, `_call` reports the call that makes the object.
    """
    root: ast.expr = func
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or (binding := file.names.only(root.id, scope)) is None:
        return
    made = file.names.made_by(root, scope)
    shared = file.shared(root, scope) is not None
    if made in GENERATORS and shared:
        message = f"{root.id} is shared by all runs: its next value depends on what other runs have drawn"
        file.say(func, "random", unit.where, message, "use run.random, which belongs to the run")
    elif made and (shared or binding.kind == "param") and (fact := fact_of_made(made)) is not None:
        _say(file, unit, func, fact, f"{_shown(func)}(), of {made},")


def _is_path(file: File, node: ast.expr, scope: Scope) -> bool:
    """Does this expression build a path, or name a path?"""
    while True:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            node = node.left
        elif isinstance(node, ast.Attribute) and node.attr in _STAYS_A_PATH:
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STAYS_A_PATH:
            node = node.func.value
        elif (
            isinstance(node, ast.Name) and (binding := file.names.only(node.id, scope)) is not None and isinstance(binding.value, ast.BinOp)
        ):
            node, scope = binding.value, binding.scope
        else:
            return file.names.made_by(node, scope) == PATH


def _arguments(node: ast.Call) -> int:
    unknown = any(isinstance(one, ast.Starred) for one in node.args) or any(keyword.arg is None for keyword in node.keywords)
    return 99 if unknown else len(node.args) + len(node.keywords)


def _is_number(node: ast.Call, dotted: str) -> bool:
    """Is this call hash() of a number literal? The hash of a number is the same in every process."""
    return (
        dotted == "builtins.hash"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, (int, float))
    )


def _say(file: File, unit: Unit, node: ast.AST, fact: Fact, shown: str) -> None:
    file.say(node, fact.rule, unit.where, f"{shown} {fact.what}", fact.way_out, fact.severity)


def _shown(node: ast.AST) -> str:
    """The source text of the name, shortened if it is long."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"…{text[-59:]}"
