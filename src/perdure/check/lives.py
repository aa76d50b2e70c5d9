"""Rule `checkpoint`: an agent that loops for ever takes checkpoints, and an agent that takes them reads `run.restored`.

Only notes: an agent may need no state, and a loop may end in a way that the rule does not see. If the agent passes its
`Run` on to code that is not in the file, the rule says nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from perdure.check.declared import Declared
from perdure.check.file import File
from perdure.check.reach import Root, Unit, reached
from perdure.check.scopes import Function

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LIMITS = frozenset(("asyncio.timeout", "asyncio.timeout_at"))


def look_at_lives(file: File) -> None:
    """Report loops that never end without a checkpoint, and checkpoints whose state is never read."""
    for agent in file.declared.agents:
        loops = [node for node in _own_code(agent.function.body) if isinstance(node, ast.While) and _is_endless(file, node)]
        units = reached(file.names, file.declared, [Root(agent.function, f"agent {agent.name}")])
        if any(_passes_on(file, unit, agent) for unit in units):
            continue
        taken = [(unit, node) for unit in units for node in _uses(unit, agent, "checkpoint")]
        for loop in loops if not taken else ():
            message = "this loop never ends, and a resume replays all of its rounds: the run takes longer and longer to resume"
            way_out = "end a round with await run.checkpoint(state), and begin with run.restored"
            file.say(loop, "checkpoint", f"agent {agent.name}", message, way_out, "note")
        if taken and not any(_uses(unit, agent, "restored") for unit in units):
            unit, node = taken[0]
            message = "run.restored is never read: after this checkpoint the agent begins from the top, and knows nothing of its state"
            file.say(node, "checkpoint", unit.where, message, "begin with state = run.restored; it is None in the first life", "note")


def _own_code(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node of these statements, without the code of inner functions and classes."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _INNER):
            todo += ast.iter_child_nodes(node)


def _is_endless(file: File, loop: ast.While) -> bool:
    """Does this loop wait for something, again and again, without a way out?"""
    if not (isinstance(loop.test, ast.Constant) and loop.test.value) or _is_bounded(file, loop):
        return False
    code = list(_own_code(loop.body))
    awaits = any(isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)) for node in code)
    return awaits and not any(isinstance(node, (ast.Return, ast.Raise)) for node in code) and not _breaks(loop.body)


def _breaks(body: list[ast.stmt]) -> bool:
    """Is there a `break` that leaves the loop with this body? A `break` of an inner loop leaves the inner loop."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Break):
            return True
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            todo += node.orelse
        elif not isinstance(node, _INNER):
            todo += ast.iter_child_nodes(node)
    return False


def _is_bounded(file: File, loop: ast.While) -> bool:
    """Is a time-out or an exception handler around the loop, which may end it?"""
    node: ast.AST | None = file.names.parents.get(loop)
    while node is not None and not isinstance(node, _INNER):
        if isinstance(node, (ast.Try, ast.TryStar)) and node.handlers:
            return True
        if isinstance(node, ast.AsyncWith):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(file.names.dotted(call.func, scope) in _LIMITS for call, scope in file.names.calls if call in calls):
                return True
        node = file.names.parents.get(node)
    return False


def _run_names(function: Function, agent: Declared) -> set[str]:
    """The names of the parameters that hold the `Run`: the agent's first one, and those with this name or annotation."""
    own = _parameters(agent.function)
    first = own[0].arg if own else "run"
    return {one.arg for one in _parameters(function) if one.arg == first or _is_called_run(one.annotation)}


def _is_called_run(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").rpartition(".")[2] == "Run"


def _parameters(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _uses(unit: Unit, agent: Declared, attr: str) -> list[ast.Attribute]:
    """Where the code uses this attribute of the `Run`."""
    if isinstance(unit.owner, ast.ClassDef):
        return []
    names = _run_names(unit.owner, agent)
    found = [node for node, _ in unit.code if isinstance(node, ast.Attribute) and node.attr == attr]
    return [node for node in found if attr == "restored" or (isinstance(node.value, ast.Name) and node.value.id in names)]


def _passes_on(file: File, unit: Unit, agent: Declared) -> bool:
    """Does the code give the `Run` to something that is not a function of this file?"""
    if isinstance(unit.owner, ast.ClassDef):
        return False
    names = _run_names(unit.owner, agent)
    for node, scope in unit.code:
        if not (isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)):
            continue
        above = file.names.parents.get(node)
        if isinstance(above, ast.Attribute):
            continue
        if not (isinstance(above, ast.Call) and file.names.function_called(above.func, scope) is not None):
            return True
    return False
