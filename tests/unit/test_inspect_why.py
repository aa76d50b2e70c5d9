"""The page of `perdure why`: every kind of run gets a true first sentence and a command to type."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner
from tests.unit import inspect_tools
from tests.unit.inspect_tools import LEASE_US, at_work, hold, lookup, make_zoo, url_of

from perdure import Call, Outcome, Perdure, Run, Settings, agent, tool
from perdure.cli import cli
from perdure.core.events import AnyBody, AttentionNeeded, RunReleased
from perdure.engine.clock import Clock
from perdure.errors import NotFound
from perdure.inspect.why.page import Why, why
from perdure.store.api import Served, Store
from perdure.store.open import open_store

SLEEPER = shlex.quote(f"{Path(inspect_tools.__file__).resolve()}:sleeper")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "journal.db"
    make_zoo(path)
    return path


@pytest.fixture
def path(zoo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(zoo, tmp_path / "journal.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(url_of(path))
    yield opened
    opened.close()


def page_of(store: Store, run_id: str, later_us: int = 0, code: str | None = None) -> Why:
    return why(store, run_id, now=Clock().now() + later_us, code=code)


def commands(page: Why) -> list[str]:
    return [step.command for step in page.next]


def test_a_call_in_doubt_is_told_with_its_key_its_arguments_and_three_ways_to_settle_it(store: Store) -> None:
    page = page_of(store, "doubt", later_us=8 * 60_000_000)
    call = store.read("doubt")
    key = next(event.body.key for event in call if event.type == "tool_call_initiated" and event.call == 2)  # type: ignore[union-attr]
    assert page.sentence.startswith("needs attention: call 2 charge is in doubt since ")
    assert "(8 min)" in page.sentence
    assert "TimeoutError: no answer" in page.sentence
    (doubt,) = page.in_doubt
    assert (doubt.call, doubt.asked, doubt.key, doubt.effect, doubt.recorded) == (2, 'charge(cents=500, order="o-2")', key, "once", True)
    assert "must not happen twice" in doubt.meaning
    assert [done.call for done in page.done] == [1]
    assert page.done[0].outcome == 'returned {"cents":500,"order":"o-2"}'
    assert commands(page)[:4] == [
        "perdure resolve doubt 2 --happened 'JSON'",
        "perdure resolve doubt 2 --did-not-happen",
        "perdure resolve doubt 2 --fail 'TEXT'",
        "perdure resume doubt",
    ]
    assert commands(page)[-1] == "perdure cancel doubt"
    assert "that code has not run" in page.never_started[-1]


@pytest.mark.parametrize(
    ("run_id", "sentence", "first"),
    [
        ("done", "succeeded at ", "perdure show done"),
        ("failed", "failed at ", "perdure retry failed"),
        ("cancelled", "cancelled by ann at ", "perdure show cancelled"),
        ("waiting", "waiting since ", "perdure show waiting"),
        ("queued", "queued for ", "perdure resume queued"),
        ("resolved", "queued for ", "perdure resume resolved"),
    ],
)
def test_every_run_has_a_first_sentence_and_a_next_command(store: Store, run_id: str, sentence: str, first: str) -> None:
    page = page_of(store, run_id)
    assert page.sentence.startswith(sentence)
    assert commands(page)[0] == first


def test_a_queued_run_says_that_nobody_is_there_to_take_it(store: Store) -> None:
    assert "it has not begun yet, and no worker has taken it; no worker is alive" in page_of(store, "queued").sentence
    assert page_of(store, "queued").never_started == ["the agent has not begun: no line of its code has run"]
    store.register("w", "host:1", 1, Clock().now())
    assert "no worker serves agent shop: 1 worker is alive, with other agents" in page_of(store, "queued").sentence


def test_a_timer_is_told_with_its_time_and_called_overdue_when_it_is(store: Store) -> None:
    page = page_of(store, "waiting")
    assert len(page.waiting) == 1
    assert page.waiting[0].startswith("timer 1 at ")
    assert "no worker is alive that would go on then" in page.sentence
    late = page_of(store, "waiting", later_us=2 * 3_600_000_000)
    assert "which was due at" in late.sentence
    assert commands(late)[0] == "perdure resume waiting"


def test_a_held_run_says_who_holds_it_and_a_silent_holder_is_not_called_dead(store: Store) -> None:
    hold(store, "queued", "shop")
    page = page_of(store, "queued")
    assert page.sentence.startswith("running: worker host:1 holds it and is alive, last seen ")
    assert commands(page) == ["perdure events queued --follow", "perdure cancel queued"]
    silent = page_of(store, "queued", later_us=2 * LEASE_US)
    assert "running on paper: worker host:1 holds it and is silent, last seen" in silent.sentence
    assert "dead" not in silent.sentence
    assert commands(silent)[0] == "perdure resume queued"


def test_a_run_that_its_worker_lost_is_told_as_such(store: Store) -> None:
    hold(store, "queued", "shop")
    store.unregister("w-alive", Clock().now())
    assert "worker host:1 died while it drove the run, and no other worker has taken it over yet" in page_of(store, "queued").sentence


@agent(version="1")
async def busy(run: Run, calls: int) -> int:
    for number in range(calls):
        await lookup(str(number))
    return calls


def test_ten_thousand_done_calls_are_three_and_five(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(busy, 120, id="busy")
        await app.engine.drive("busy")

    at_work(path, drive, agents=(busy,))
    store = open_store(url_of(path))
    page = page_of(store, "busy")
    store.close()
    assert page.done_count == 120
    assert [done.call for done in page.done] == [1, 2, 3, 116, 117, 118, 119, 120]
    told = CliRunner().invoke(cli, ["why", "busy", "--url", url_of(path)])
    assert "112 more: perdure show busy" in told.output
    assert len(told.output.splitlines()) < 25  # at most one screen


@pytest.mark.parametrize(
    ("reason", "words", "first"),
    [
        ("diverged", "the code asks for something else", f"perdure replay waiting {SLEEPER}"),
        ("poison", "kill its workers", "perdure resume waiting"),
        ("stuck", "does not come to rest", f"perdure replay waiting {SLEEPER}"),
        ("error", "cannot be driven", "perdure resume waiting"),
    ],
)
def test_every_reason_for_attention_has_its_own_words_and_way_out(path: Path, reason: str, words: str, first: str) -> None:
    from perdure.core import identity
    from perdure.core.events import Event
    from perdure.store.api import Append, Committed, RowChange

    store, clock = open_store(url_of(path)), Clock()
    row = store.get("waiting")
    assert row is not None
    store.register("w", "host:1", 1, clock.now())
    (claimed,) = store.claim("w", [Served(row.agent, row.version)], 1, clock.now(), run_id="waiting")
    seq, epoch = claimed.row.seq, claimed.lease.epoch
    bodies: tuple[AnyBody, ...] = (AttentionNeeded(reason, "the detail"), RunReleased("needs_attention", f"a person: {reason}"))  # type: ignore[arg-type]
    events = [Event(seq + n, clock.new_id(), clock.now(), epoch, None, seq, body) for n, body in enumerate(bodies, 1)]
    sealed = tuple(identity.seal_all(claimed.row.head, events))
    change = RowChange("needs_attention", waiting_for=f"a person: {reason}", error="the detail", attention=reason, release=True)  # type: ignore[arg-type]
    assert store.append([Append(claimed.lease, seq, sealed, row=change)]) == [Committed()]
    page = page_of(store, "waiting")
    store.close()
    assert f"({reason})" in page.sentence
    assert words in page.sentence
    assert "the detail" in page.sentence
    assert commands(page)[0] == first


def test_a_run_that_does_not_exist_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match=r"(?s)there is no run nobody.*shows the runs of sqlite:"):
        page_of(store, "nobody")


def test_the_commands_name_the_database_that_was_given_and_can_be_pasted(path: Path) -> None:
    url = url_of(path)
    told = CliRunner().invoke(cli, ["why", "doubt", "--url", url]).output
    lines = [line.strip() for line in told.splitlines() if line.strip().startswith("perdure resolve")]
    assert len(lines) == 3
    assert all(shlex.split(line)[-2:] == ["--url", url] for line in lines)


def test_what_tools_and_models_wrote_cannot_move_the_cursor(path: Path) -> None:
    with apsw.Connection(str(path)) as other:
        other.execute("DROP TRIGGER perdure_events_no_update")
        other.execute("UPDATE perdure_events SET data = replace(data, 'no answer', 'no \\u001b[2J\u202eanswer')")
    for verb in (["why", "doubt"], ["show", "doubt"], ["events", "doubt"], ["trace", "doubt", "7"], ["list"], ["why", "doubt", "--json"]):
        told = CliRunner().invoke(cli, [*verb, "--url", url_of(path)])
        assert told.exit_code == 0, told.output
        assert "\x1b" not in told.output
        assert "\u202e" not in told.output
        assert verb == ["list"] or "answer" in told.output


# -- where it failed -----------------------------------------------------------------------------------------------------------
def test_a_failed_run_and_its_failed_call_say_where_innermost_last(store: Store, path: Path) -> None:
    page = page_of(store, "failed")
    assert [place for place in page.places if place.startswith(f"{inspect_tools.__file__}:") and place.endswith(" in forbidden")]
    (refused,) = page.not_done
    assert not [place for place in (*page.places, *refused.places) if "/perdure/" in place], "frames of ours tell nobody anything"
    assert refused.places[-1].endswith(" in refuse")
    for verb in ("why", "show"):
        told = CliRunner().invoke(cli, [verb, "failed", "--url", url_of(path)]).output
        lines = [line.strip() for line in told.splitlines()]
        assert set(page.places) | set(refused.places) <= set(lines)
    shown = json.loads(CliRunner().invoke(cli, ["show", "failed", "--json", "--url", url_of(path)]).output)
    assert (shown["places"], shown["calls"][0]["places"]) == (page.places, refused.places)


# -- calls in doubt, and what happens without a person
# ------------------------------------------------------------------
def doubtful(path: Path, effect: Any, hook: Callable[[Call], Outcome] | None, cancel: bool = False) -> Why:
    """The page about a run whose payment timed out, where it rests."""

    @tool(effect=effect)
    async def pay(call: Call) -> str:
        raise TimeoutError("no answer")

    if hook is not None:

        @pay.reconcile
        async def _(call: Call) -> Outcome:
            assert hook is not None
            return hook(call)

    @agent(version="1")
    async def payer(run: Run) -> str:
        paid: str = await pay()
        return paid

    async def main() -> None:
        settings = Settings(reconcile_margin_s=0, unknown_deadline_s=0, park_after_s=0)
        async with Perdure(url_of(path), [payer], settings=settings) as app:
            await app.start(payer, id="r")
            await app.engine.drive("r", wait=False)
            if cancel:
                await app.cancel("r", by="ann", reason="no longer needed")

    asyncio.run(main())
    store = open_store(url_of(path))
    try:
        return page_of(store, "r")
    finally:
        store.close()


def test_what_the_hook_said_is_on_the_page(tmp_path: Path) -> None:
    page = doubtful(tmp_path / "journal.db", "once", lambda call: Outcome.unknown("the ledger is down"))
    (doubt,) = page.in_doubt
    assert "TimeoutError: no answer" in doubt.why
    assert doubt.why.endswith("its reconcile hook does not know: the ledger is down")
    assert "the ledger is down" in page.sentence
    assert doubt.by_itself.startswith("resume asks its reconcile hook first")
    assert commands(page)[0] == "perdure resume r FILE.py:payer"  # that may settle it, so it comes before a person's word


def test_a_hook_that_says_in_progress_is_told_with_how_often_and_when_again(tmp_path: Path) -> None:
    page = doubtful(tmp_path / "journal.db", "once", lambda call: Outcome.in_progress())
    (doubt,) = page.in_doubt
    assert "its reconcile hook says that it is in progress, asked 1 of 20 times, again at " in doubt.why
    assert page.waiting == [f"call 1 pay: {doubt.why.partition('; ')[2]}"]
    assert page.wakes_at is not None
    assert datetime.fromisoformat(page.wakes_at) > datetime.fromisoformat(page.now)


def test_without_a_hook_only_a_person_settles_a_once_call_and_a_key_settles_a_keyed_one(store: Store, tmp_path: Path) -> None:
    (once,) = page_of(store, "doubt").in_doubt
    assert once.by_itself == "nothing: it has no reconcile hook, so a person has to say"
    (keyed,) = doubtful(tmp_path / "keyed.db", "keyed", None).in_doubt
    assert keyed.by_itself.startswith("the next worker sends it again with the same key")


def test_a_request_to_cancel_comes_first_is_not_offered_again_and_changes_what_a_person_may_say(tmp_path: Path) -> None:
    page = doubtful(tmp_path / "journal.db", "once", None, cancel=True)
    assert page.cancel is not None
    assert (page.cancel.by, page.cancel.reason) == ("ann", "no longer needed")
    assert page.sentence.startswith("being cancelled (ann asked at ")
    assert ": no longer needed): no worker holds it" in page.sentence
    assert "perdure cancel r" not in commands(page)
    assert commands(page)[-1] == "perdure cancel r --force"  # the last way if the agent cannot clean up
    (did_not,) = [step.does for step in page.next if "--did-not-happen" in step.command]
    assert "NOT performed again" in did_not
    uncancelled = doubtful(tmp_path / "other.db", "once", None)
    assert "perdure cancel r" in commands(uncancelled)
    assert uncancelled.cancel is None


def test_reads_that_were_cut_off_are_not_in_doubt_and_take_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    @tool(effect="read")
    async def slow(number: int) -> int:
        await asyncio.sleep(60)
        return number

    @agent(version="1")
    async def reader(run: Run) -> list[int]:
        return await asyncio.gather(*(slow(number) for number in range(9)))

    async def main() -> None:
        settings = Settings(drain_timeout_s=0.0, cancel_grace_s=0.1)
        async with Perdure(url_of(path), [reader], settings=settings) as app:
            await app.start(reader, id="r")
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(0.3, stop.set)
            await app.engine.drive("r", stop=stop)

    asyncio.run(main())
    store = open_store(url_of(path))
    page = page_of(store, "r")
    store.close()
    assert page.in_doubt == []
    assert [call.call for call in page.again] == list(range(1, 10))
    told = CliRunner().invoke(cli, ["why", "r", "--url", url_of(path)]).output.splitlines()
    heading = told.index("cut off, and will be run again")
    assert told[heading + 1].strip() == "1 slow(number=0), 2 slow(number=1), 3 slow(number=2) and 6 more calls"
    assert told[heading + 2] == ""
    assert not [line for line in told if "perdure resolve" in line]


# -- what to type, and when it was ---------------------------------------------------------------------------------------------
def test_the_command_to_resume_names_the_code_where_it_would_not_be_found(
    store: Store, path: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    assert "perdure resume queued 'a b.py:shop'" in commands(page_of(store, "queued", code="'a b.py:shop'"))
    file = Path(inspect_tools.__file__).resolve()
    monkeypatch.chdir(tmp_path)
    told = json.loads(CliRunner().invoke(cli, ["why", "queued", "--json", "--url", url_of(path)]).output)
    assert told["next"][0]["command"] == f"perdure resume queued {shlex.quote(f'{file}:shop')} --url {url_of(path)}"


def test_times_are_iso_for_machines_and_have_the_date_for_people_unless_it_is_today(store: Store, path: Path) -> None:
    (doubt,) = page_of(store, "doubt", later_us=480_000_000).in_doubt
    asked, since = (datetime.fromisoformat(time) for time in (doubt.asked_at, doubt.since))
    assert asked <= since
    assert asked.utcoffset() is not None
    assert 480 <= doubt.age_s < 600
    day = doubt.since[:10]
    assert f"is in doubt since {day} " in page_of(store, "doubt", later_us=2 * 86_400_000_000).sentence
    assert day not in why(store, "doubt", now=round(since.timestamp() * 1e6)).sentence


def test_a_run_that_went_another_way_is_told_to_put_the_old_code_back(path: Path) -> None:
    test_every_reason_for_attention_has_its_own_words_and_way_out(
        path, "diverged", "the code asks for something else", f"perdure replay waiting {SLEEPER}"
    )
    store = open_store(url_of(path))
    (back,) = [step for step in page_of(store, "waiting").next if step.command == "perdure resume waiting"]
    store.close()
    assert back.does.startswith("put the code back that it began with (version 1)")
