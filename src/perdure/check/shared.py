"""Rule `global`: agents change state that outlives a run, or read state that tools change. Then replay differs.

The rule also reports an object with state, such as a lock or an iterator, if all runs share the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perdure.check.file import File
from perdure.check.names import BoundNames
from perdure.check.reach import Node, Unit
from perdure.check.scopes import Binding, Scope
from perdure.check.world import LOOP_BOUND, RUNNING_ON

_CHANGING = frozenset(
    "append appendleft extend extendleft insert remove pop popleft popitem clear update setdefault add discard sort reverse "
    "difference_update intersection_update symmetric_difference_update subtract move_to_end".split()
)
_CONTAINERS = frozenset(
    "builtins.list builtins.dict builtins.set builtins.bytearray collections.deque collections.defaultdict collections.Counter "
    "collections.OrderedDict types.SimpleNamespace".split()
)
_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_WAY_OUT = "keep it in a variable of the agent, or in a service that tools ask"


class Change(NamedTuple):
    """A place in the code that changes state which outlives a run."""

    name: str
    shown: str
    node: ast.AST
    home: Scope


def look_at_shared(file: File, units: Sequence[Unit]) -> None:
    """Report where agents change state that outlives a run, read state that tools change, or share an object."""
    by_tools = {(change.home, change.name): unit.where for unit in file.tool_units for change in _changes(file, unit.code)}
    for unit in units:
        changed = set()
        for change in _changes(file, unit.code):
            changed.add((change.home, change.name))
            message = f"changes {change.shown}, which outlives the run: a replay finds other values there, and all runs share it"
            file.say(change.node, "global", unit.where, message, _WAY_OUT)
        for node, scope in unit.code:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and (home := file.shared(node, scope)) is not None:
                if (home, node.id) in by_tools and (home, node.id) not in changed:
                    message = f"reads {node.id}, which {by_tools[home, node.id]} changes: on replay it has a later value, or none yet"
                    file.say(node, "global", unit.where, message, "have a tool return what the agent needs to know")
                _shared_thing(file, unit, node, scope)
        _shared_defaults(file, unit)


def _shared_thing(file: File, unit: Unit, node: ast.Name, scope: Scope) -> None:
    made = file.names.made_by(node, scope)
    if made in LOOP_BOUND:
        message = f"{node.id} is one {made} for all runs: it keeps the state of earlier runs, and belongs to the first loop that uses it"
        file.say(node, "global", unit.where, message, f"make it inside the agent: {made}(…)")
    elif made in RUNNING_ON:
        message = f"{node.id} continues where the last run stopped, so a replay gets other values"
        file.say(node, "global", unit.where, message, "make it inside the agent, or use run.uuid()")


def _shared_defaults(file: File, unit: Unit) -> None:
    """Report changes to a mutable default. In `def helper(seen=[])` all runs share one list."""
    if isinstance(unit.owner, ast.ClassDef):
        return
    args = unit.owner.args
    positional = [*args.posonlyargs, *args.args]
    pairs = [
        *zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    kept = {parameter.arg for parameter, default in pairs if isinstance(default, _LITERALS)}
    own = file.names.scopes[unit.owner]
    for node, scope in unit.code:
        for target in _changed(node):
            root = _root(target)
            if root is not None and root.id in kept and scope.home(root.id) is own and len(file.names.bindings(root.id, scope)) == 1:
                message = f"changes {root.id}, whose default is made once for all runs"
                file.say(node, "global", unit.where, message, f"write {root.id}=None, and make it inside")


def _changes(file: File, code: Sequence[Node]) -> Iterator[Change]:
    """Every place in the code that changes state which outlives a run."""
    for node, scope in code:
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            home = scope.home(node.id)
            if home is not None and home is not scope and _is_declared_foreign(node.id, scope) and file.is_shared(home):
                yield Change(node.id, node.id, node, home)
            continue
        for target in _changed(node):
            root = _root(target)
            if root is None:
                continue
            home = file.shared(root, scope)
            if home is not None and (not isinstance(node, ast.Call) or _is_container(file.names, root, target, scope)):
                yield Change(root.id, _shown(target), node, home)
            elif home is None and not isinstance(node, ast.Call) and _is_class_of_method(file.names, root, scope):
                yield Change(root.id, _shown(target), node, scope)


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that the node changes in place."""
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=value):
            yield value
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            yield node
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _CHANGING:
            yield value


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _is_declared_foreign(name: str, scope: Scope) -> bool:
    at: Scope | None = scope
    while at is not None:
        if name in at.foreign:
            return True
        if name in at.bound:
            return False
        at = at.parent
    return False


def _is_container(names: BoundNames, root: ast.Name, target: ast.expr, scope: Scope) -> bool:
    """Is this surely an object that methods such as `append` and `update` change? Other objects are not reported."""
    if isinstance(target, ast.Attribute):  # STATE.items.append(…): STATE must be an object of a class of this file
        return names.class_of(root, scope) is not None or names.class_called(root, scope) is not None
    return any(_holds(names, binding) for binding in names.bindings(root.id, scope))


def _holds(names: BoundNames, binding: Binding) -> bool:
    if isinstance(binding.value, _LITERALS):
        return True
    return names.made_by(binding.value, binding.scope) in _CONTAINERS or names.annotated(binding) in _CONTAINERS


def _shown(target: ast.expr) -> str:
    text = ast.unparse(target)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _is_class_of_method(names: BoundNames, root: ast.Name, scope: Scope) -> bool:
    """Is this name the `cls` of a class method?"""
    binding = names.only(root.id, scope)
    if binding is None or binding.kind != "param" or names.first_parameter_of(binding) is None:
        return False
    function = names.parents[names.parents[binding.node]]
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    return any(isinstance(one, ast.Name) and one.id == "classmethod" for one in function.decorator_list)
