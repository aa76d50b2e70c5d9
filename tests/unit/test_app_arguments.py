"""Arguments of the wrong type are refused at once, with a message of perdure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perdure import Perdure, Retry, Run, agent, tool
from perdure.cli.times import parse_future, parse_past
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable
from perdure.sync import Perdure as BlockingPerdure

if TYPE_CHECKING:
    from perdure import Run as OnlyForTheTypeChecker

TOO_LONG = 10**5_000


@agent(version="1")
async def echo(run: Run, value: Any = None) -> Any:
    return value


@pytest.mark.parametrize("url", [5, Path("journal.db"), b"sqlite://", True])
def test_a_url_is_text(url: Any) -> None:
    with pytest.raises(InvalidInput, match=r"a URL is text, such as 'sqlite:///perdure\.db'"):
        Perdure(url)


def test_agents_come_in_a_list() -> None:
    with pytest.raises(InvalidInput, match=r"agents=\[…\]"):
        Perdure("sqlite://", agents=echo)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="settings"):
        Perdure("sqlite://", settings={"lease_s": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "argument", "rule"),
    [
        ("state", {"at": "x"}, r"at='x'\): the seq of an event"),
        ("state", {"at": 1.0}, r"at=1\.0\): the seq of an event"),
        ("state", {"at": True}, r"at=True\): the seq of an event"),
        ("result", {"timeout": "x"}, r"timeout='x'\): a number of seconds"),
        ("result", {"timeout": float("nan")}, r"timeout=nan\): a number of seconds"),
        ("result", {"timeout": True}, r"timeout=True\): a number of seconds"),
        ("events", {"after": -5}, r"after=-5: the seq of an event, or 0"),
        ("events", {"after": "x"}, r"after='x': the seq of an event, or 0"),
        ("events", {"after": 2**70}, r"after=\d+: the seq of an event, or 0"),
        ("events", {"after": None}, r"after=None: the seq of an event, or 0"),
        ("follow", {"after": -5}, r"after=-5: the seq of an event, or 0"),
    ],
)
def test_a_handle_refuses_what_is_no_number_of_the_right_kind(method: str, argument: dict[str, Any], rule: str) -> None:
    with BlockingPerdure("sqlite://", [echo]) as app:
        handle = app.start(echo, 1)
        with pytest.raises(InvalidInput, match=rule):
            list(handle.follow(**argument)) if method == "follow" else getattr(handle, method)(**argument)
        assert handle.result(timeout=60) == 1
        assert handle.result(timeout=None) == 1
        assert handle.events(after=2**32 - 1) == []


@pytest.mark.parametrize("wrong", [[5], (ValueError, 5), (int,), (ValueError("x"),), "ValueError", 5, (name for name in ("ValueError",))])
def test_a_retry_is_on_exception_types_or_their_names(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"Retry\(on=…\): exception types or their names"):
        Retry(on=wrong)
    assert Retry(on=[ValueError, "HTTPError"]).on == [ValueError, "HTTPError"]  # type: ignore[arg-type, comparison-overlap]


# -- the first parameter of an agent ----------------------------------------------------------------------------------------
async def _order_first(order: str) -> None: ...
async def _run_second(order: str, run: Run) -> None: ...
async def _no_parameter() -> None: ...
async def _by_name_only(*, run: Run) -> None: ...
async def _optional_order(order: int | None = None) -> None: ...


@pytest.mark.parametrize("fn", [_order_first, _run_second, _no_parameter, _by_name_only, _optional_order])
def test_an_agent_whose_first_parameter_is_not_its_run_is_refused_where_it_is_declared(fn: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"agent {fn.__name__}: its first parameter receives its Run.*{fn.__name__}\(run: Run, …\)"):
        agent(fn)


async def _bare(run) -> None: ...
async def _text(run: "Run") -> None: ...  # noqa: UP037 – a string of a string, with the annotations of this file
async def _unknown_here(run: OnlyForTheTypeChecker) -> None: ...
async def _whatever(run: Any) -> None: ...
async def _maybe(run: Run | None) -> None: ...


@pytest.mark.parametrize("fn", [_bare, _text, _unknown_here, _whatever, _maybe])
def test_an_agent_may_leave_open_what_its_first_parameter_is(fn: Any) -> None:
    declared = agent(fn)
    with BlockingPerdure("sqlite://", [declared]) as app:
        assert app.run(declared) is None


# -- integers that cannot be written down -------------------------------------------------------------------------------------
def test_a_longer_integer_than_python_writes_down_is_refused_by_its_place() -> None:
    with pytest.raises(NotEncodable, match=r"^cents is an integer of 5,001 digits; the limit is 4,300: write it as a string$"):
        codec.encode({"orders": [{"cents": 1}, {"cents": -TOO_LONG}]})
    assert codec.decode(codec.encode(10**4_299)) == 10**4_299
    with pytest.raises(NotEncodable, match="4,301 digits"):
        codec.encode(10**4_300)


def test_the_limit_does_not_follow_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        # Any other process, with the limit that Python has by default, must be able to read what this one records.
        with pytest.raises(NotEncodable, match="5,001 digits"):
            codec.encode([TOO_LONG])
        with pytest.raises(NotEncodable, match="5,001 digits"):
            codec.parse("1" + "0" * 5_000)
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("text", ['{"a": [1, -%s]}', "%s"])
def test_a_long_integer_in_typed_json_is_refused_in_our_words(text: str) -> None:
    with pytest.raises(NotEncodable, match=r"^--input: the integer -?10+… has 5,001 digits; the limit is 4,300: write it as a string$"):
        codec.parse(text % ("1" + "0" * 5_000), "--input")
    assert codec.parse(text % "17", "--input") == json.loads(text % "17")


def test_a_run_is_not_started_with_such_an_integer() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [echo]) as app:
            with pytest.raises(NotEncodable, match="agent echo: value is an integer of 5,001 digits"):
                await app.start(echo, TOO_LONG, id="r")

    asyncio.run(main())


@agent(version="1")
async def ticket(run: Run, priority: int = 5, queue: str = "x", *, id: str = "none") -> list[Any]:
    return [priority, queue, id]


@pytest.mark.parametrize("option", [{"priority": 7}, {"priority": 0}, {"queue": "mine"}, {"id": "t-1"}, {"id": None}])
@pytest.mark.parametrize("way", ["start", "run"])
def test_an_option_that_could_be_the_agent_s_own_argument_is_refused(way: str, option: dict[str, Any]) -> None:
    with BlockingPerdure("sqlite://", [ticket]) as app:
        (name,) = option
        with pytest.raises(InvalidInput, match=f"{name}= is ambiguous: agent ticket takes an argument of that name.*ticket.input"):
            getattr(app, way)(ticket, **option)


def test_by_position_and_as_an_input_there_is_no_doubt_whose_argument_it_is() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [ticket]) as app:
            assert await app.run(ticket, 7, "mine") == [7, "mine", "none"]
            handle = await app.start(ticket, 7, tenant="acme", actor="ann")  # the agent takes none of those names
            assert (await handle.row()).tenant == "acme"
            handle = await app.start(ticket.input(7, id="t"), id="r", priority=3)
            assert (await handle.row()).priority == 3
            assert await handle.result() == [7, "x", "t"]

    asyncio.run(main())


# -- what people and programs say to runs ------------------------------------------------------------------------------------
class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


DEEP: Any = None
for _ in range(5_000):
    DEEP = [DEEP]
NO_TEXT: list[Any] = [5, True, 2**63, TOO_LONG, 1.5, b"x", [], {}, {"a": 1}, ("a",), object(), DEEP, Hostile(), timedelta(1)]


@agent(version="1")
async def asks(run: Run) -> str:
    return (await run.request_approval("pay", {"cents": 1})).outcome


async def refused(said: str, act: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(InvalidInput, match=said):
        await act(*args, **options)


def test_what_is_no_text_is_no_id_of_a_run_or_an_approval() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [echo, asks]) as app:
            await app.start(echo, id="1")  # True would be stored as 1, and so find it
            for wrong in [*NO_TEXT, None]:
                for act in (app.drive, app.cancel, app.pause, app.unpause, app.adopt, app.undo, app.plan_undo):
                    await refused("a run's id is text, and .* is not", act, wrong)
                await refused("a run's id is text", app.cancel, wrong, force=True)
                await refused("a run's id is text", app.signal, wrong, "topic")
                await refused("a run's id is text", app.resolve, wrong, 1, did_not_happen=True)
                with pytest.raises(InvalidInput, match="a run's id is text"):
                    app.handle(wrong)
                await refused("an approval's id is text", app.approve, wrong, by="ann")
                await refused("an approval's id is text", app.reject, wrong, by="ann", reason="no")
            for wrong in NO_TEXT:
                await refused("a run's id is text", app.approvals, run_id=wrong)
                await refused("a tenant is text", app.approvals, tenant=wrong)
                await refused("a tenant is text", app.costs, tenant=wrong)
                await refused("a tenant is text", app.cancel, "1", tenant=wrong)
                await refused("the run id .* is not usable", app.start, echo, id=wrong)
                await refused("the tenant .* is not usable", app.start, echo, tenant=wrong)
            assert [event.type for event in await app.handle("1").events()] == ["run_created"]

    asyncio.run(main())


def test_a_decision_is_made_of_text_and_of_lists_of_names() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [asks]) as app:
            await app.start(asks, id="r")
            await app.engine.drive("r", wait=False)
            (row,) = await app.approvals()
            for wrong in NO_TEXT:
                await refused("note=.*: text, or None", app.approve, row.approval, by="ann", note=wrong)
                for act in (partial(app.approve, row.approval, by="ann"), partial(app.reject, row.approval, by="ann", reason="no")):
                    await refused("source=.*: text, or None", act, source=wrong)
                    await refused("the digest of what was seen is text", act, digest=wrong)
                    if wrong not in ([], ("a",)):
                        await refused("roles", act, roles=wrong)
                await refused("by=.*: say who, such as", app.approve, row.approval, by=wrong)
                await refused("say why", app.reject, row.approval, by="ann", reason=wrong)
            for letters in ("finance", "", {"finance"}, {"finance": 1}, None, (name for name in ("finance",))):
                await refused(r"roles=.*: a list of names, such as roles=\['finance'\]", app.approve, row.approval, by="ann", roles=letters)
            assert (await app.approvals())[0].standing == row.standing
            await app.approve(row.approval, by="ann", roles=["finance"], note="fine", digest=row.standing.request.digest)

    asyncio.run(main())


def test_what_is_said_to_a_run_is_text() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [echo]) as app:
            await app.start(echo, id="r")
            for wrong in NO_TEXT:
                await refused("reason=.*: text, or None", app.pause, "r", reason=wrong)
                await refused("reason=.*: text, or None", app.cancel, "r", reason=wrong)
                await refused("reason=.*: text, or None", app.cancel, "r", reason=wrong, force=True)
                await refused("by=.*: say who", app.pause, "r", by=wrong)
            await app.pause("r")
            for wrong in NO_TEXT:
                await refused("note=.*: text, or None", app.unpause, "r", note=wrong)
                await refused("is not a Budget", app.unpause, "r", add=wrong)
                await refused("is not the number of a call", app.resolve, "r", "1", did_not_happen=True)
                if wrong is not True:
                    await refused("did_not_happen=.*: True or False", app.resolve, "r", 1, did_not_happen=wrong)
                await refused("is text, and .* is not", app.resolve, "r", 1, fail=wrong)
            await refused("True is not the number of a call", app.resolve, "r", True, did_not_happen=True)

    asyncio.run(main())


@pytest.mark.parametrize("yes", ["no", "", 0, 1, None, [], Hostile(), TOO_LONG], ids=lambda yes: type(yes).__name__)
def test_only_true_forces_and_only_true_accepts(yes: Any) -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [echo]) as app:
            await app.start(echo, id="r")
            await refused(r"cancel\(force=\): .* is neither True nor False", app.cancel, "r", force=yes)
            await refused(r"undo\(accept=\): .* is neither True nor False", app.undo, "r", accept=yes)
            assert (await app.handle("r").row()).status == "queued"

    asyncio.run(main())


def test_the_inbox_is_asked_for_what_there_can_be() -> None:
    async def main() -> None:
        async with Perdure("sqlite://") as app:
            status: Any
            limit: Any
            by: Any
            for status in ("junk", "", 0, True, [], TOO_LONG, Hostile()):
                await refused(r"approvals\(status=.*: one of pending, approved, rejected", app.approvals, status=status)
            for limit in (0, -1, True, "1", None, 1.5, 2**32, TOO_LONG, [], Hostile()):
                await refused(r"approvals\(limit=.*: a whole number, at least 1", app.approvals, limit=limit)
            assert await app.approvals(status=None, limit=2**32 - 1) == []
            for since in (timedelta(0), timedelta(days=7), 5, "2026-01-01", Hostile()):
                await refused(r"costs\(since=.*: a datetime with a time zone", app.costs, since=since)
            for by in (Hostile(), TOO_LONG, [], "all"):
                await refused(r"costs\(.*: one of agent", app.costs, by)

    asyncio.run(main())


def test_only_none_means_the_agent_s_own_queue() -> None:
    @agent(version="1", queue="slow")
    async def slow(run: Run) -> None: ...

    async def main() -> None:
        async with Perdure("sqlite://", [echo, slow]) as app:
            no_queues: list[Any] = ["", 0, False, [], {}, timedelta(0), Hostile(), TOO_LONG]
            for queue in no_queues:
                await refused("the queue .* is not usable", app.start, echo, queue=queue)
            rows = [await (await app.start(one, queue=queue)).row() for one in (echo, slow) for queue in (None, "mine")]
            assert [row.queue for row in rows] == ["default", "mine", "slow", "mine"]
            for wrong in (Hostile(), TOO_LONG, DEEP):
                await refused("priority=", app.start, echo, priority=wrong)
                await refused("is not a Budget", app.start, echo, budget=wrong)
                await refused("a datetime with a time zone", app.start, echo, not_before=wrong)

    asyncio.run(main())


def test_an_id_of_a_class_of_its_own_is_recorded_as_text() -> None:
    class Marked(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    async def main() -> None:
        async with Perdure("sqlite://", [asks]) as app:
            handle = await app.start(asks, id=Marked("r"), tenant=Marked("t"), actor=Marked("a"), queue=Marked("q"))
            row = await app.handle(Marked("r")).row()
            assert (handle.id, row.tenant, row.actor, row.queue) == ("r", "t", "a", "q")
            await app.signal(Marked("r"), Marked("topic"), key=Marked("k"), by=Marked("bob"))
            await app.engine.drive("r", wait=False)
            (asked,) = await app.approvals()
            await app.approve(Marked(asked.approval), by=Marked("ann"))
            assert await handle.result() == "approved"

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [Hostile(), TOO_LONG, DEEP], ids=["hostile", "long", "deep"])
def test_what_is_declared_wrong_is_refused_whatever_it_looks_like(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"budget=.* is not a Budget"):
        agent(budget=wrong)(_bare)
    with pytest.raises(InvalidInput, match=r"circles=.* is not a Circles"):
        agent(circles=wrong)(_bare)
    with pytest.raises(InvalidInput, match=r"approval=.* is neither True"):
        tool(effect="once", approval=wrong)(_no_parameter)
    with pytest.raises(InvalidInput, match=r"rate=.* is not a Rate"):
        tool(effect="once", rate=wrong)(_no_parameter)


# -- times that a person types -------------------------------------------------------------------------------------------------
NOW = 1_800_000_000_000_000
DAY = 86_400_000_000


@pytest.mark.parametrize(
    "text", ["99999999d", "+99999999d", "999999999d", "0001-01-01T00:00+23:59", "1969-12-31T23:59Z", "9999-12-31T23:59-23:59"]
)
def test_a_time_that_cannot_be_kept_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--not-before '.*' lies before 1970 or after 9999; write 15m, 2h, 1d"):
        parse_future(text, NOW, "--not-before")
    assert parse_past(text.removeprefix("+"), NOW, "--since") >= 0


def test_a_time_is_so_long_from_now_or_a_moment() -> None:
    assert parse_future("2d", NOW, "x") == parse_future("+2d", NOW, "x") == NOW + 2 * DAY
    assert parse_past("2d", NOW, "x") == NOW - 2 * DAY
    assert parse_future("2026-01-31T14:00:00.000001Z", NOW, "x") == parse_past("2026-01-31T15:00:00.000001+01:00", NOW, "x")
    assert parse_future("2026-01-31T14:00:00.000001Z", NOW, "x") == 1_769_868_000_000_001
    assert parse_future("1970-01-01", NOW, "x") == 0
    assert parse_past("1900-01-01", NOW, "x") == parse_past("999999999d", NOW, "x") == 0
    with pytest.raises(InvalidInput, match="is not a time"):
        parse_future("soon", NOW, "x")
