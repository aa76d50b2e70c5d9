"""Rule `order`: an agent iterates over a set, and the order has an effect. The order differs from process to process.

A set of numbers and a set of tasks have the same order in every process: the hash of a number depends only on the
number, and the tasks of an agent are hashed by their number. In this file, such elements are called stable.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from perdure.check.file import File
from perdure.check.names import BoundNames, plain_annotation
from perdure.check.reach import Node, Unit
from perdure.check.scopes import Binding, Scope

_TASKS = frozenset(("asyncio.create_task", "asyncio.ensure_future"))
_STABLE = frozenset("builtins.int builtins.float builtins.bool asyncio.Task asyncio.Future asyncio.tasks.Task".split())
_SETS = frozenset(
    "builtins.set builtins.frozenset typing.Set typing.FrozenSet typing.AbstractSet collections.abc.Set collections.abc.MutableSet".split()
)
_STAYS_A_SET = frozenset("union intersection difference symmetric_difference copy".split())
_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
_FOLLOWED = 6


# -- Which values are sets, and does the order of such a set differ between processes?


class Sets:
    """Finds unordered values in the code of one function."""

    def __init__(self, names: BoundNames, code: Sequence[Node]) -> None:
        self._names = names
        self._stable_added: dict[tuple[Scope, str], bool] = {}  # set → are all elements that the code adds stable?
        for node, scope in code:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="add"), args=[given]):
                    self._put(name, scope, stable=self._is_stable(given, scope))
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "symmetric_difference_update"), args=many):
                    self._put(name, scope, stable=all(self._holds_stable(given, scope) for given in many))
                case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr() | ast.BitXor(), value=given):
                    self._put(name, scope, stable=self._holds_stable(given, scope))

    def _put(self, name: str, scope: Scope, *, stable: bool) -> None:
        home = scope.home(name)
        if home is not None:
            self._stable_added[home, name] = stable and self._stable_added.get((home, name), True)

    def is_unordered(self, node: ast.AST | None, scope: Scope, deep: int = _FOLLOWED) -> bool:
        """Is the value of this expression a set whose order differs from process to process?"""
        if deep == 0 or node is None:
            return False
        match node:
            case ast.Set(elts=elements):
                return len(elements) > 1 and not all(self._is_stable(one, scope) for one in elements)
            case ast.SetComp(elt=element):
                return not self._is_stable(element, self._names.scopes[node])
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
                return any(_is_keys(side) or self.is_unordered(side, scope, deep - 1) for side in (left, right))
            case ast.IfExp(body=left, orelse=right):
                return self.is_unordered(left, scope, deep - 1) or self.is_unordered(right, scope, deep - 1)
            case ast.BoolOp(values=values):
                return any(self.is_unordered(value, scope, deep - 1) for value in values)
            case ast.NamedExpr(value=value):
                return self.is_unordered(value, scope, deep - 1)
            case ast.Call():
                return self._is_made(node, scope, deep)
            case ast.Name(id=name):
                found = self._names.bindings(name, scope)
                return bool(found) and any(self._is_bound(binding, name, scope, deep) for binding in found)
        return False

    def _is_made(self, node: ast.Call, scope: Scope, deep: int) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _STAYS_A_SET and self.is_unordered(node.func.value, scope, deep - 1):
            return True
        if self._names.dotted(node.func, scope) not in ("builtins.set", "builtins.frozenset"):
            return False
        return bool(node.args) and not self._holds_stable(node.args[0], scope)

    def _is_bound(self, binding: Binding, name: str, scope: Scope, deep: int) -> bool:
        if (by_annotation := self._by_annotation(binding)) is not None:
            return by_annotation
        if binding.kind != "assign" or binding.value is None:
            return False
        made = self._names.dotted(binding.value.func, binding.scope) if isinstance(binding.value, ast.Call) else ""
        is_set = made in _SETS or isinstance(binding.value, (ast.Set, ast.SetComp))
        return (is_set and self._is_filled(name, scope)) or self.is_unordered(binding.value, binding.scope, deep - 1)

    def _is_filled(self, name: str, scope: Scope) -> bool:
        """Does the code add an element that is not stable? Of a set that begins as `set()`, only this is known."""
        home = scope.home(name)
        return home is not None and not self._stable_added.get((home, name), True)

    def _by_annotation(self, binding: Binding) -> bool | None:
        """Does the annotation name a set whose elements are neither numbers nor tasks? None if it names no set."""
        annotation = plain_annotation(binding.annotation)
        holds = annotation.slice if isinstance(annotation, ast.Subscript) else None
        if annotation is None or self._names.annotated(binding) not in _SETS:
            return None
        return holds is None or not self._is_stable_type(holds, binding.scope)

    def _is_stable_type(self, annotation: ast.expr, scope: Scope) -> bool:
        plain = plain_annotation(annotation)
        plain = plain.value if isinstance(plain, ast.Subscript) else plain
        return plain is not None and self._names.dotted(plain, scope) in _STABLE

    def _holds_stable(self, node: ast.expr, scope: Scope, deep: int = _FOLLOWED) -> bool:
        """Are all elements of this value numbers or tasks?"""
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return all(self._is_stable(one, scope) for one in elements)
            case ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.GeneratorExp(elt=element):
                return self._is_stable(element, self._names.scopes[node])
            case ast.Call(func=func):
                return self._names.dotted(func, scope) == "builtins.range"
            case ast.Name(id=name) if deep and (binding := self._names.only(name, scope)) is not None:
                annotation = plain_annotation(binding.annotation)
                if isinstance(annotation, ast.Subscript):
                    return self._is_stable_type(annotation.slice, binding.scope)
                return binding.value is not None and self._holds_stable(binding.value, binding.scope, deep - 1)
        return False

    def _is_stable(self, node: ast.expr, scope: Scope, deep: int = _FOLLOWED) -> bool:
        match node:
            case ast.Constant(value=int() | float() | None):
                return True
            case ast.UnaryOp(operand=operand):
                return self._is_stable(operand, scope)
            case ast.Call(func=func):
                made = self._names.dotted(func, scope)
                return (
                    made in _TASKS
                    or made in ("builtins.int", "builtins.len")
                    or (isinstance(func, ast.Attribute) and func.attr == "create_task")
                )
            case ast.Name(id=name) if deep and (binding := self._names.only(name, scope)) is not None:
                if (annotation := plain_annotation(binding.annotation)) is not None:
                    return self._is_stable_type(annotation, binding.scope)
                if binding.value is not None and binding.kind == "assign":
                    return self._is_stable(binding.value, binding.scope, deep - 1)
                return self._is_element(binding)
        return False

    def _is_element(self, binding: Binding) -> bool:
        """Is this name the variable of a loop over stable elements?"""
        around = self._names.parents.get(binding.node)
        if isinstance(around, (ast.For, ast.comprehension)) and around.target is binding.node:
            return self._holds_stable(around.iter, binding.scope)
        return False


def _is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys" and not node.args


# -- Where the order has an effect: in calls, lists and text. Sorting, counting and membership tests are harmless


# Functions whose result does not depend on the order of their argument.
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
_WHY = "is iterated in an order that differs from process to process"
_WAY_OUT = "use sorted(…), or keep a list or a dict instead of a set"


def look_at_order(file: File, unit: Unit) -> None:
    """Report every place where the order of a set has an effect."""
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
    """(a value, the node that iterates over the value), for each value whose order has an effect at this node."""
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
    """True if the order of the result has no effect: it is only tested, or sorted later, or passed to sorted(…)."""
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
    """Does the body of a loop only count, or only change another set? Then the order of the loop has no effect."""
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
    """Report calls of asyncio.as_completed and asyncio.wait that put their arguments into a set themselves."""
    named = file.names.dotted(node.func, scope)
    first = node.args[0] if node.args else None
    if named == "asyncio.as_completed" and isinstance(first, ast.GeneratorExp):
        message = "asyncio.as_completed starts the items of an iterator in a random order, and is refused"
        file.say(node.func, "order", unit.where, message, "give it a list")
    if named == "asyncio.wait" and isinstance(first, (ast.List, ast.Tuple, ast.Set)):
        for one in first.elts:
            if isinstance(one, ast.Call) and file.names.dotted(one.func, scope) == "asyncio.gather":
                message = "asyncio.wait returns sets, and a set with gather(…) in it has a random order"
                file.say(one, "order", unit.where, message, "wait for tasks: asyncio.create_task(…)")


def _said(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"the set {text}" if len(text) <= 40 else "this set"
