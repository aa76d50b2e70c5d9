"""Walking a set inside an agent, where the order shows: in calls, lists and text. Sorting, counting and looking up are fine."""

from __future__ import annotations

import ast

from perdure.check.file import File
from perdure.check.reach import Unit
from perdure.check.scopes import Scope
from perdure.check.sets import Sets

# Given a set, they give the same whatever its order is.
_ORDERLESS = frozenset(
    "builtins.sorted builtins.set builtins.frozenset builtins.min builtins.max builtins.len builtins.sum builtins.any builtins.all "
    "collections.Counter math.fsum math.prod".split()
)
_ORDERLESS_METHODS = frozenset("union intersection difference symmetric_difference issubset issuperset isdisjoint update".split())
_SHOWING = frozenset(
    "builtins.list builtins.tuple builtins.enumerate builtins.iter builtins.zip builtins.map builtins.filter builtins.next builtins.str "
    "builtins.repr builtins.dict.fromkeys collections.deque itertools.chain itertools.islice itertools.product itertools.combinations "
    "itertools.permutations itertools.groupby asyncio.as_completed".split()
)
_SHOWING_METHODS = frozenset(("join", "extend", "extendleft", "writelines"))
_WHY = "is walked in an order that is another one in every process"
_WAY_OUT = "use sorted(…), or keep a list or a dict instead of a set"


def look_at_order(file: File, unit: Unit) -> None:
    """Say where the order of a set shows."""
    sets = Sets(file.names, unit.code)
    sorted_later = {
        node.func.value.id
        for node, _ in unit.code
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sort"
        and isinstance(node.func.value, ast.Name)
    }
    for node, scope in unit.code:
        if isinstance(node, ast.Call):
            _at_once(file, unit, node, scope)
        for shown, walk in _shows(file, node, scope):
            if sets.is_unordered(shown, scope) and not _is_orderless(file, walk, scope, sorted_later):
                file.say(shown, "order", unit.where, f"{_said(shown)} {_WHY}", _WAY_OUT)


def _shows(file: File, node: ast.AST, scope: Scope) -> list[tuple[ast.expr, ast.AST]]:
    """(what is walked, what walks it) for each value whose order this node shows."""
    match node:
        case ast.For(iter=walked, body=body):
            return [] if _counts_only(body) else [(walked, node)]
        case ast.ListComp(generators=generators) | ast.GeneratorExp(generators=generators):
            return [(one.iter, node) for one in generators]
        case ast.Starred(value=walked) if not isinstance(file.names.parents.get(node), ast.Set):
            above = file.names.parents.get(node)
            return [(walked, above if isinstance(above, (ast.List, ast.Tuple)) else node)]
        case ast.FormattedValue(value=walked) | ast.YieldFrom(value=walked):
            return [(walked, node)]
        case ast.Assign(targets=[ast.Tuple() | ast.List(), *_], value=walked):
            return [(walked, node)]
        case ast.AugAssign(op=ast.Add(), value=walked):
            return [(walked, node)]
        case ast.Call(func=ast.Attribute(value=walked, attr="pop"), args=[], keywords=[]):
            return [(walked, node)]
        case ast.Call(func=func, args=args):
            named = file.names.dotted(func, scope)
            shows = named in _SHOWING or (isinstance(func, ast.Attribute) and func.attr in _SHOWING_METHODS)
            return [(one, node) for one in args] if shows else []
    return []


def _is_orderless(file: File, walk: ast.AST, scope: Scope, sorted_later: set[str]) -> bool:
    """Whether what is made by the walk goes straight to something that does not care about its order."""
    if not isinstance(walk, (ast.ListComp, ast.GeneratorExp, ast.Call, ast.List, ast.Tuple)):
        return False
    above = file.names.parents.get(walk)
    while isinstance(above, ast.Call) and walk in above.args:
        if file.names.dotted(above.func, scope) in _ORDERLESS:
            return True
        if isinstance(above.func, ast.Attribute) and above.func.attr in _ORDERLESS_METHODS:
            return True
        if file.names.dotted(above.func, scope) not in _SHOWING:
            return False
        walk, above = above, file.names.parents.get(above)
    if isinstance(above, ast.Compare):
        return all(isinstance(op, (ast.In, ast.NotIn)) for op in above.ops)
    return isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name) and above.targets[0].id in sorted_later


def _counts_only(body: list[ast.stmt]) -> bool:
    """Whether a loop's body comes to the same in any order: it counts, or fills another set."""
    return all(map(_counts, body))


def _counts(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Continue():
            return True
        case ast.If(body=body, orelse=orelse):
            return _counts_only([*body, *orelse])
        case ast.AugAssign(op=ast.Add() | ast.Sub(), value=ast.Constant(value=int())) | ast.AugAssign(op=ast.BitOr() | ast.BitAnd()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="add" | "discard"))):
            return True
    return False


def _at_once(file: File, unit: Unit, node: ast.Call, scope: Scope) -> None:
    """What asyncio takes as a set by itself."""
    named = file.names.dotted(node.func, scope)
    first = node.args[0] if node.args else None
    if named == "asyncio.as_completed" and isinstance(first, ast.GeneratorExp):
        message = "asyncio.as_completed starts what an iterator gives in an order left to chance, and is refused"
        file.say(node.func, "order", unit.where, message, "give it a list")
    if named == "asyncio.wait" and isinstance(first, (ast.List, ast.Tuple, ast.Set)):
        for one in first.elts:
            if isinstance(one, ast.Call) and file.names.dotted(one.func, scope) == "asyncio.gather":
                message = "asyncio.wait gives sets, and those of gather(…) are walked in an order left to chance"
                file.say(one, "order", unit.where, message, "wait for tasks: asyncio.create_task(…)")


def _said(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"the set {text}" if len(text) <= 40 else "this set"
