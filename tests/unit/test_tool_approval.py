"""When a call of a tool needs a person, and what that person may change about it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import pydantic
import pytest

from perdure.core import codec
from perdure.core.approval import Approval
from perdure.errors import InvalidInput
from perdure.tool import Call, Tool, tool


class Receiver(pydantic.BaseModel):
    iban: str
    name: str = ""


def paying(approval: Any) -> Tool[..., Any]:
    """A tool under this policy."""

    @tool(approval=approval)
    async def pay(order: str, cents: int, to: Receiver, due: datetime, call: Call, note: str = "") -> None:
        """Pay.

        Args:
            cents: the amount
        """

    return pay


TO = {"iban": "DE1", "name": ""}
DUE = datetime(2030, 1, 1, tzinfo=UTC)


def asked(approval: Any, cents: int = 500) -> str | bool:
    pay = paying(approval)
    return pay.asks(pay.bind(("o-1", cents, TO, DUE), {}))


# --- who is asked ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approval", [None, False])
def test_without_a_policy_nobody_is_asked(approval):
    assert paying(approval).approval is None
    assert asked(approval) is False


def test_true_always_asks():
    assert isinstance(paying(True).approval, Approval)
    assert asked(True) is True


def test_a_function_decides_by_the_arguments():
    def over_50(cents: int) -> bool:
        return cents > 5000

    assert (asked(over_50, 5000), asked(over_50, 5001)) == (False, True)
    assert (asked(Approval(by="ann", when=over_50), 5000), asked(Approval(by="ann", when=over_50), 5001)) == (False, True)


def test_a_function_may_answer_with_the_reason():
    assert asked(lambda cents: f"{cents} is over 50 dollars" if cents > 5000 else False, 9000) == "9000 is over 50 dollars"


def test_an_approval_without_a_predicate_always_asks():
    policy = Approval(by="role:finance", reason="money")
    assert paying(policy).approval is policy
    assert asked(policy) is True


def test_the_policy_sees_the_types_that_the_function_would_get():
    seen: list[Any] = []

    def look(due: datetime, to: Receiver, note: str) -> bool:
        seen.extend((due, to, note))
        return False

    assert asked(look) is False
    assert seen == [DUE, Receiver(iban="DE1"), ""]


def test_a_policy_cannot_change_the_arguments():
    def forge(to: Receiver) -> bool:
        to.iban = "XX9"
        return False

    pay = paying(forge)
    args = pay.bind(("o-1", 500, TO, DUE), {})
    before = bytes(args)
    assert pay.asks(args) is False
    assert args == before
    assert pay.arguments(args)["to"].iban == "DE1"


# --- it fails closed ---------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def policy(cents: int) -> bool:
        raise error

    return policy


@pytest.mark.parametrize("error", [ValueError("no rates today"), SystemExit(1), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_a_policy_that_raises_asks_and_says_so(error):
    said = asked(raising(error))
    assert isinstance(said, str)
    assert said.startswith(f"the approval policy of pay raised {type(error).__name__}")
    assert str(error) in said


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "None"), (0, "a int"), ("", "empty text"), ([], "a list"), (Decimal(0), "a Decimal"), (b"", "a bytes")]
)
def test_an_answer_that_is_no_answer_asks_and_says_so(answer, words):
    said = asked(lambda cents: answer)
    assert said == f"the approval policy of pay answered with {words}; it must be True, False or a reason"


def test_a_coroutine_for_an_answer_asks_and_is_not_left_behind():
    async def later() -> bool:
        return False

    said = asked(lambda cents: later())  # a warning about it would fail this test
    assert isinstance(said, str)
    assert "answered with a coroutine" in said


def test_recorded_arguments_that_do_not_fit_any_more_ask():
    said = paying(lambda cents: False).asks(b'{"order":"o-1"}')
    assert isinstance(said, str)
    assert "raised InvalidInput: tool pay, parameter cents" in said


def test_a_reason_can_be_journaled_whatever_it_holds():
    said = asked(lambda cents: "lone \ud800 " + "x" * 5000)
    assert isinstance(said, str)
    assert said.startswith("lone \\ud800 xxx")
    assert len(said) == 1000
    said.encode("utf-8")


# --- declarations that are refused
# -------------------------------------------------------------------------------------


async def asynchronous(cents: int) -> bool:
    return True


def generator(cents: int) -> Any:
    yield True


class Wrong:
    pass


@pytest.mark.parametrize(
    ("approval", "words"),
    [
        (
            lambda amount: True,
            r"its approval policy takes amount; it can take only the tool's arguments, by name: order, cents, to, due, note",
        ),
        (lambda cents, limit=5: True, "its approval policy takes limit=5"),
        (lambda *args: True, r"its approval policy takes \*args"),
        (lambda **arguments: True, r"its approval policy takes \*\*arguments"),
        (lambda cents, /: True, "its approval policy takes cents"),
        (lambda call: True, "its approval policy takes call"),
        (asynchronous, "must answer at once"),
        (generator, "must answer at once"),
        (Approval(when=cast(Any, asynchronous)), "must answer at once"),
        (dict.fromkeys, "are not known|its approval policy takes"),
        ("yes", "approval='yes' is neither True, nor an Approval"),
        (1, "approval=1 is neither True"),
        (Wrong(), "is neither True"),
        (Approval(editable="amount"), r"names 'amount'; the tool takes order, cents, to, due, note"),
        (Approval(editable=["cents", "call"]), "names 'call'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_policy_that_could_never_be_asked_is_refused_at_the_declaration(approval, words):
    with pytest.raises(InvalidInput, match=f"tool pay: .*({words})"):
        paying(approval)


@pytest.mark.parametrize("effect", ["read", "transaction", "once", "keyed", "idempotent"])
def test_every_kind_of_tool_can_need_an_approval(effect):
    def touch(n: int) -> int:
        return n

    assert tool(effect=effect, approval=lambda n: n > 1)(touch).asks(b'{"n":2}') is True


def test_called_outside_an_agent_a_tool_asks_nobody():
    @tool(approval=True)
    async def double(n: int) -> int:
        return 2 * n

    assert asyncio.run(double(4)) == 8


# --- what may be edited ------------------------------------------------------------------------------------------------------


def test_the_schema_of_what_may_be_edited_holds_that_alone():
    assert paying(Approval(editable="cents")).editable_schema() == {
        "properties": {"cents": {"type": "integer", "description": "the amount"}}
    }
    nested = paying(Approval(editable=("to", "note"))).editable_schema()
    assert nested["properties"] == {"to": {"$ref": "#/$defs/Receiver"}, "note": {"type": "string", "default": ""}}
    assert nested["$defs"]["Receiver"]["properties"]["iban"] == {"title": "Iban", "type": "string"}


@pytest.mark.parametrize("approval", [None, True, Approval(by="ann")])
def test_where_nothing_may_be_edited_the_schema_is_empty(approval):
    assert paying(approval).editable_schema() == {"properties": {}}


def edit(pay: Tool[..., Any], **changes: Any) -> bytes:
    args = pay.bind(("o-1", 500, TO, DUE), {})
    return pay.edited(args, codec.encode({**codec.decode(args), **changes}))


def test_an_edited_call_runs_with_the_very_bytes_that_were_approved():
    pay = paying(Approval(editable=("cents", "due")))
    edited = edit(pay, cents=400, due="2031-01-01T00:00:00+00:00")
    # Binding would write this time as …Z; the approved digest is the digest of these bytes.
    assert codec.decode(edited)["due"] == "2031-01-01T00:00:00+00:00"
    assert pay.arguments(edited)["due"] == datetime(2031, 1, 1, tzinfo=UTC)
    assert pay.arguments(edited)["cents"] == 400


def test_an_approval_without_changes_is_the_call_itself():
    pay = paying(True)
    args = pay.bind(("o-1", 500, TO, DUE), {})
    assert pay.edited(args, args) == args


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cents": "many"}, "tool pay, parameter cents: "),
        ({"to": {"name": "nobody"}}, "tool pay, parameter to: .*iban"),
        ({"order": "o-2"}, "tool pay: order may not be edited; cents, to may"),
        ({"colour": "red"}, "tool pay: the argument colour is unknown"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        edit(paying(Approval(editable=("cents", "to"))), **changes)


def test_an_edit_cannot_leave_an_argument_out():
    pay = paying(Approval(editable="cents"))
    args = pay.bind(("o-1", 500, TO, DUE), {"note": "thanks"})
    left = {name: value for name, value in codec.decode(args).items() if name != "note"}
    with pytest.raises(InvalidInput, match="note may not be edited"):
        pay.edited(args, codec.encode(left))


def test_true_is_not_one_when_an_edit_is_compared():
    @tool(approval=True)
    async def switch(on: Any) -> None: ...

    with pytest.raises(InvalidInput, match="on may not be edited; nothing may"):
        switch.edited(b'{"on":1}', b'{"on":true}')


def test_edited_arguments_that_are_no_object_are_refused():
    with pytest.raises(InvalidInput, match="are not an object"):
        paying(True).edited(b"{}", b"[]")


def test_asking_a_plain_policy_needs_no_pydantic():
    program = (
        "import sys\nfrom perdure.tool import tool\n"
        "@tool(approval=lambda cents: cents > 5)\nasync def pay(order: str, cents: int) -> dict: ...\n"
        "assert pay.asks(pay.bind(('o', 6), {})) is True; pay.editable_schema(); pay.pin()\n"
        "print([name for name in ('pydantic', 'docstring_parser') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("raises", [False, True])
def test_a_rule_that_takes_long_is_named_in_the_log(caplog, raises):
    def slow(cents: int) -> bool:
        time.sleep(0.15)
        if raises:
            raise ValueError("and knows nothing")
        return False

    @tool(approval=slow)
    async def pay(cents: int) -> None: ...

    with caplog.at_level(logging.WARNING, "perdure.worker"):
        assert (pay.asks(b'{"cents":1}') is False) is not raises
    assert "the approval policy of tool pay took" in caplog.text
