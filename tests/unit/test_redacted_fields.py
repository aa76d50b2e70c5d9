"""Fields that a journal has only as a keyed digest: equality shows, the value does not, and nothing is guessed (G15)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, run
from tests.unit.inspect_tools import url_of
from tests.unit.postgres_tools import empty
from tests.unit.test_secrets import everything

from perdure import Approval, Call, InvalidInput, Perdure, Plan, RetryLater, Run, Secret, Step, ToolFailed, agent, tool
from perdure.core import codec
from perdure.core.events import ApprovalRequested, ToolCallCompleted, ToolCallInitiated, ToolCallProposed
from perdure.core.redaction import REDACTED, Redaction, digest_in, filled_in, rules_of
from perdure.store.api import ApprovalFilter

KEY = "0123456789abcdef-key-of-digests"
CARD = {"number": "4111 1111 1111 1111", "cvv": 737, "holder": "Ann"}
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_REDACT_KEY", KEY)
    SEEN.clear()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(tmp_path / "s.db") if request.param == "sqlite" else empty(request.getfixturevalue("postgres"))


def card(number: int) -> dict[str, Any]:
    """A card that code computes: its value is not in the journal anywhere else."""
    return {**CARD, "number": f"4111 1111 1111 111{number}"}


def paying(effect: Any = "keyed", **options: Any) -> Any:
    @tool(name="pay", effect=effect, redact=["card.number", "key:cvv"], **options)
    async def pay(cents: int, card: dict[str, Any], call: Call) -> dict[str, Any]:
        SEEN.append(card)
        if len(SEEN) == 1:
            raise RetryLater(f"the card {card['number']} is busy", after=0.001)
        call.heartbeat({"card": card["number"]})
        return {"receipt": 1, "echo": f"paid with {card['number']}"}

    return pay


def args_in(app: Perdure, run_id: str) -> list[Any]:
    bodies = (event.body for event in app.store.read(run_id))
    return [json.loads(body.args.inline or b"") for body in bodies if isinstance(body, ToolCallInitiated | ToolCallProposed) and body.args]


def test_a_field_is_stored_as_a_digest_and_every_attempt_gets_the_value(url):
    pay = paying()

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return [await pay(1, card(1)), await pay(2, card(1)), await pay(3, card(2))]

    async def main() -> tuple[Any, list[Any], str]:
        async with Perdure(url, [shop], settings=SETTINGS) as app:
            return await app.run(shop, id="r"), args_in(app, "r"), everything(app, "r")

    result, args, journal = run(main())
    assert [one["number"][-1] for one in SEEN] == ["1", "1", "1", "2"]
    assert all(one["cvv"] == 737 for one in SEEN)
    assert "4111" not in journal
    assert '"cvv":737' not in journal
    assert result[0]["echo"] == "paid with <redacted card.number>"
    first, second, third = (one["card"]["number"][REDACTED] for one in {one["cents"]: one for one in args}.values())
    assert first == second != third
    assert {one["card"]["holder"] for one in args} == {"Ann"}
    assert all(digest_in(one["card"]["cvv"]) for one in args)


def test_a_replay_compares_the_digests_and_another_value_diverges(tmp_path):
    pay = paying(approval=True)
    numbers = [1]

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return await pay(1, card(numbers[0]))

    async def main() -> tuple[str, str]:
        url = url_of(tmp_path / "s.db")
        async with Perdure(url, [shop], settings=SETTINGS) as app:
            await app.start(shop, id="r")
            await app.engine.drive("r", wait=False)
        numbers[0] = 2  # the code computes another value now
        async with Perdure(url, [shop], settings=SETTINGS) as app:
            (row,) = app.store.approvals(ApprovalFilter(run_id="r"))
            await app.approve(row.approval, by="ann")
            await app.engine.drive("r", wait=False)
            changed = (await app.handle("r").info()).waiting_for or ""
        assert SEEN == []
        numbers[0] = 1
        async with Perdure(url, [shop], settings=SETTINGS) as app:
            await app.unpause("r", by="ann")
            await app.engine.drive("r", wait=False)
            return changed, (await app.handle("r").info()).status

    _changed, status = run(main())
    assert status == "succeeded"
    assert [one["number"][-1] for one in SEEN] == ["1", "1"]


def test_a_result_is_redacted_for_the_agent_too_live_and_in_a_replay(url):
    @tool(effect="read", redact_result=["customer.email", "rows.*.ssn"])
    async def find() -> dict[str, Any]:
        return {"customer": {"email": "ann@example.org", "id": 7}, "rows": [{"ssn": "123-45-6789", "n": 1}, {"n": 2}, {"ssn": None}]}

    @agent(version="1")
    async def look(run: Run) -> Any:
        found = await find()
        await run.receive("go")
        return found

    async def main() -> tuple[Any, str]:
        async with Perdure(url, [look], settings=SETTINGS) as app:
            await app.start(look, id="r")
            await app.engine.drive("r", wait=False)
        async with Perdure(url, [look], settings=SETTINGS) as app:
            await app.signal("r", "go", by="ann")
            return await app.handle("r").result(), everything(app, "r")

    result, journal = run(main())
    assert "ann@example.org" not in journal
    assert "123-45" not in journal
    assert digest_in(result["customer"]["email"])
    assert result["customer"]["id"] == 7
    assert digest_in(result["rows"][0]["ssn"])
    assert result["rows"][1:] == [{"n": 2}, {"ssn": None}]


def test_a_tool_never_runs_with_a_placeholder():
    @tool(effect="read", redact_result=["number"])
    async def find() -> dict[str, Any]:
        return dict(CARD)

    @tool(effect="once")
    async def send(what: Any) -> None:
        SEEN.append(what)

    pay = paying()

    @agent(version="1")
    async def shop(run: Run) -> list[str]:
        said = []
        found = await find()
        for call in (lambda: pay(1, found), lambda: send([{"deep": found}])):
            try:
                await call()
            except InvalidInput as error:
                said.append(str(error))
        await send(found["number"][REDACTED])  # the digest itself is text
        return said

    async def main() -> Any:
        async with Perdure("sqlite://", [shop], settings=SETTINGS) as app:
            return await app.run(shop, id="r")

    said = run(main())
    assert len(said) == 2, (said, SEEN)
    assert "tool pay: card.number is redacted, and its value is not known here" in said[0]
    assert "tool send: what.0.deep.number is redacted" in said[1]
    assert len(SEEN) == 1
    assert str(SEEN[0]).startswith("hmac-sha256:")


def test_an_approval_shows_the_digest_and_an_edit_keeps_the_value():
    pay = paying(effect="once", approval=Approval(editable=("cents", "card")))

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return await pay(1, card(1))

    async def main() -> tuple[str, list[Any]]:
        async with Perdure("sqlite://", [shop], settings=SETTINGS) as app:
            await app.start(shop, id="r")
            await app.engine.drive("r", wait=False)
            (row,) = app.store.approvals(ApprovalFilter(run_id="r"))
            (asked,) = [event.body for event in app.store.read("r") if isinstance(event.body, ApprovalRequested)]
            shown = json.loads(asked.input.inline or b"")
            await app.approve(row.approval, by="ann", edit={"cents": 5, "card": {**shown["card"], "holder": "Bob"}})
            await app.engine.drive("r", wait=False)
            return everything(app, "r"), [shown]

    SEEN.append("the first attempt is not refused")
    journal, (shown,) = run(main())
    assert digest_in(shown["card"]["number"])
    assert SEEN[1:] == [{**card(1), "holder": "Bob"}]
    assert "4111" not in journal


def test_an_edit_cannot_put_a_value_into_a_redacted_field():
    pay = paying(approval=Approval(editable=("card",)))
    callee, args = pay.for_call(pay.bind((1, card(1)), {}))
    with pytest.raises(InvalidInput, match="may not be edited: the journal would have it"):
        callee.edited(args, codec.encode({"cents": 1, "card": card(2)}))
    forged = codec.encode({"cents": 1, "card": {"number": {REDACTED: "hmac-sha256:" + "0" * 64}}})
    with pytest.raises(InvalidInput, match="its value is not known here"):
        callee.edited(args, forged)


def test_rules_for_all_tools_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PERDURE_REDACT", "key:CVV, path:*.number")

    @tool(effect="once")
    async def send(card: dict[str, Any], other: list[Any]) -> dict[str, Any]:
        SEEN.append(card)
        return {"cvv": 1234567, "x": {"number": 5}}

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return await send(card(1), [{"Cvv": "secret"}])

    async def main() -> tuple[Any, str]:
        async with Perdure("sqlite://", [shop], settings=SETTINGS) as app:
            return await app.run(shop, id="r"), everything(app, "r")

    result, journal = run(main())
    assert [card(1)] == SEEN
    assert "4111" not in journal
    assert '"secret"' not in journal
    assert "1234567" not in journal
    assert digest_in(result["cvv"])
    assert digest_in(result["x"]["number"])


def test_a_missing_key_is_an_error_where_the_tool_is_declared(monkeypatch, tmp_path):
    monkeypatch.delenv("PERDURE_REDACT_KEY")
    with pytest.raises(InvalidInput, match="tool pay: redact: the key of the digests is missing; set PERDURE_REDACT_KEY"):
        paying()
    monkeypatch.setenv("PERDURE_REDACT_KEY", "short")
    with pytest.raises(InvalidInput, match="has fewer than 16 characters"):
        paying()
    monkeypatch.delenv("PERDURE_REDACT_KEY")
    monkeypatch.setenv("PERDURE_REDACT_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(InvalidInput, match="cannot be read from PERDURE_REDACT_KEY_FILE"):
        paying()
    (tmp_path / "key").write_text(f"{KEY}\n")
    from_file = paying().redaction
    monkeypatch.setenv("PERDURE_REDACT_KEY", KEY)
    assert from_file == paying().redaction
    assert KEY not in repr(from_file)


@pytest.mark.parametrize("fields", ["card.number", {"a": 1}, [5], ["text:x+"], ["key:"], [""]])
def test_a_wrong_rule_is_refused(fields):
    async def pay(card: str) -> None: ...

    with pytest.raises(InvalidInput, match="redact"):
        tool(redact=fields)(pay)


def test_another_key_gives_another_digest_and_the_same_key_the_same():
    rules = rules_of([("x", "path:a")])
    one, again, other = (Redaction(key, rules).redacted(b'{"a":"4111"}')[0] for key in (b"k1", b"k1", b"k2"))
    assert one == again != other
    assert Redaction(b"k1", rules).redacted(one) == (one, {})
    with pytest.raises(InvalidInput, match="x: a is redacted"):
        filled_in(one, {}, "x")


def test_a_new_rule_does_not_diverge_from_an_older_journal():
    @tool(name="pay")
    async def before(card: dict[str, Any]) -> None: ...

    @tool(name="pay", redact=["card.number"])
    async def after(card: dict[str, Any]) -> None: ...

    callee, args = after.for_call(after.bind((card(1),), {}))
    assert callee.rebind(before.bind((card(1),), {})) == args == callee.rebind(args)
    assert after.rebind(args) is None  # without the values of the call nothing is guessed


def test_an_undo_does_not_begin_without_the_value():
    @tool(effect="once", redact=["card.number"])
    async def pay(card: dict[str, Any]) -> str:
        return "paid"

    @pay.compensate
    async def _(card: dict[str, Any]) -> None:
        SEEN.append(card)

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return await pay(card(1))

    async def main() -> Any:
        async with Perdure("sqlite://", [shop], settings=SETTINGS) as app:
            await app.run(shop, id="r")
            return await app.plan_undo("r")

    plan = run(main())
    assert plan.steps == [] or plan.steps == ()
    assert "is redacted, and its value is not known here" in plan.left[0].why
    assert SEEN == []


def test_a_plan_does_not_ask_with_clear_arguments():
    pay = paying()
    with pytest.raises(InvalidInput, match="has redacted arguments, which this approval would show"):
        Plan("p", [Step("pay", pay, {"cents": 1, "card": card(1)}, approval=True)], version="1")


@tool(effect="read", isolate=True)
def isolated(card: dict[str, Any], key: Secret, raises: bool) -> dict[str, Any]:
    if raises:
        raise ValueError(f"x{card['number']}y{key.reveal()}")
    return {
        "card": card["number"] == card1(),
        "number": card["number"],
        "environment": "0123456789abcdef" in str(dict(__import__("os").environ)),
    }


def card1() -> str:
    return "4111 1111 1111 1111"


def test_an_isolated_tool_gets_the_value_and_not_the_key(monkeypatch):
    monkeypatch.setenv("PERDURE_SECRET_K", "value-of-k")
    # Like @tool(redact=…, redact_result=…): the module of an isolated tool is loaded before the fixtures of this test.
    redacting = tool(effect="read", isolate=True, redact=["card.number"], redact_result=["number"])(isolated.fn)

    @agent(version="1")
    async def shop(run: Run) -> Any:
        try:
            await redacting({"number": card1()}, Secret("k"), True)
        except ToolFailed as error:
            return [error.message, await redacting({"number": card1()}, Secret("k"), False)]

    async def main() -> tuple[Any, str]:
        async with Perdure("sqlite://", [shop], settings=SETTINGS) as app:
            return await app.run(shop, id="r"), everything(app, "r")

    (message, result), journal = run(main())
    assert message == "x<redacted card.number>y<secret k>"
    assert result["card"] is True
    assert result["environment"] is False
    assert "4111" not in journal
    assert "value-of-k" not in journal


def test_the_completed_event_of_a_transaction_is_redacted():
    @tool(effect="transaction", redact=["number"], redact_result=["number"])
    def writes(number: str, key: Secret) -> dict[str, str]:
        return {"number": number, "other": f"{number} {key.reveal()}"}

    @agent(version="1")
    async def shop(run: Run) -> Any:
        return await writes(card1(), Secret("k"))

    async def main() -> tuple[Any, str]:
        async with Perdure("sqlite://", [shop], settings=SETTINGS, secrets=lambda name: "value-of-k") as app:
            result = await app.run(shop, id="r")
            assert any(isinstance(event.body, ToolCallCompleted) for event in app.store.read("r"))
            return result, everything(app, "r")

    result, journal = run(main())
    assert result["other"] == "<redacted number> <secret k>"
    assert "4111" not in journal
    assert "value-of-k" not in journal
