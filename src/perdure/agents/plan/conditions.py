"""Conditions of steps.

Conditions are plain data that perdure evaluates, so plan files can contain conditions and models can write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from perdure.agents.plan.refs import Condition, Look, Ref, Test, found, kind, read_ref, refs_in
from perdure.core import codec
from perdure.core.codec import shown
from perdure.errors import InvalidInput

MAX_CONDITIONS = 20
_ORDERS: dict[Test, Callable[[Any, Any], bool]] = {
    "below": lambda value, limit: value < limit,
    "at_most": lambda value, limit: value <= limit,
    "above": lambda value, limit: value > limit,
    "at_least": lambda value, limit: value >= limit,
}


def written_condition(condition: Any) -> dict[str, Any]:
    """The condition as JSON: `{"ref": ["test", "passed"], "is": true}`."""
    if isinstance(condition, Ref):
        condition = Condition(condition)
    if not isinstance(condition, Condition):
        raise InvalidInput(f'when={shown(condition)} is no condition: compare a reference, as in ref("test", "failures") == 0')
    if any(True for _ in refs_in(_listed(condition.value))):
        raise InvalidInput(f"{condition}: a reference is compared with a value, not with another reference; compare them in a tool")
    of = condition.ref
    where = {"param": list(of.path)} if of.step is None else {"ref": [of.step, *of.path]}
    value = codec.decode(codec.encode(condition.value))
    _check_limit(condition.test, value)
    return {**where, condition.test: value}


def read_condition(form: Any) -> Condition:
    """The condition from its JSON form. A form without a comparison means: the value must be true."""
    if not isinstance(form, dict) or ("ref" in form) == ("param" in form):
        raise InvalidInput(f'{shown(form)} is no condition: write {{ref = ["test", "failures"], is = 0}}')
    mark = "ref" if "ref" in form else "param"
    of = read_ref(f"${mark}", form[mark])
    tests = [key for key in form if key != mark]
    if not tests:
        return Condition(of)
    test: Any = tests[0]
    if len(tests) > 1 or test not in get_args(Test):
        raise InvalidInput(f"a condition has one comparison of {', '.join(get_args(Test))}; this one has {', '.join(map(shown, tests))}")
    _check_limit(test, form[test])
    return Condition(of, test, form[test])


def _check_limit(test: Test, value: Any) -> None:
    if test in _ORDERS and not _is_number(value) and not isinstance(value, str):
        raise InvalidInput(f"{test.replace('_', ' ')} compares with a number or a text, not with {shown(value)}")
    if test == "one_of" and (not isinstance(value, list) or not value):
        raise InvalidInput(f"one of takes a list of values, not {shown(value)}")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def holds(condition: Condition, look: Look) -> bool:
    """Does the condition hold? InvalidInput if the two values cannot be compared."""
    value, wanted = found(condition.ref, look), condition.value
    if condition.test in _ORDERS:
        comparable = (_is_number(value) and _is_number(wanted)) or (isinstance(value, str) and isinstance(wanted, str))
        if not comparable:
            raise InvalidInput(f"{condition}: {shown(value)}, {kind(value)}, cannot be compared with {shown(wanted)}")
        return _ORDERS[condition.test](value, wanted)
    if condition.test == "is" and wanted is True and not isinstance(value, bool):
        # Python would take a list, a text or a number as true or false. A condition does not.
        raise InvalidInput(f"{condition}: it is {shown(value)}, {kind(value)}, and neither true nor false; compare it with a value")
    if condition.test == "one_of":
        return any(same(value, one) for one in wanted)
    return same(value, wanted) == (condition.test == "is")


def same(one: Any, other: Any) -> bool:
    """Are two JSON values equal? 1 and 1.0 are equal; 1 and true are not."""
    if _is_number(one) and _is_number(other):
        return bool(one == other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[key]) for key, item in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
