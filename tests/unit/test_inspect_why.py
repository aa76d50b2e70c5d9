"""The page that somebody reads at two in the morning: every kind of run gets a true first sentence and a command to type."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from click.testing import CliRunner
from tests.unit.inspect_tools import LEASE_US, at_work, hold, lookup, make_zoo, url_of

from perdure import Perdure, Run, agent
from perdure.cli import cli
from perdure.core.events import AnyBody, AttentionNeeded, RunReleased
from perdure.errors import NotFound
from perdure.inspect.why import Why, why
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.worker.clock import Clock


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


def page_of(store: Store, run_id: str, later_us: int = 0) -> Why:
    return why(store, run_id, now=Clock().now() + later_us, lease_us=LEASE_US)


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
        "perdure resume doubt FILE.py:buy",
    ]
    assert commands(page)[-1] == "perdure cancel doubt"
    assert "that code has not run" in page.never_started[-1]


@pytest.mark.parametrize(
    ("run_id", "sentence", "first"),
    [
        ("done", "succeeded at ", "perdure show done"),
        ("failed", "failed at ", "perdure show failed"),
        ("cancelled", "cancelled by ann at ", "perdure show cancelled"),
        ("waiting", "waiting since ", "perdure show waiting"),
        ("queued", "queued for ", "perdure resume queued FILE.py:shop"),
        ("resolved", "queued for ", "perdure resume resolved FILE.py:buy"),
    ],
)
def test_every_run_has_a_first_sentence_and_a_next_command(store: Store, run_id: str, sentence: str, first: str) -> None:
    page = page_of(store, run_id)
    assert page.sentence.startswith(sentence)
    assert commands(page)[0] == first


def test_a_queued_run_says_that_nobody_is_there_to_take_it(store: Store) -> None:
    assert "it has not begun yet, and nobody has taken it; no worker is alive" in page_of(store, "queued").sentence
    assert page_of(store, "queued").never_started == ["the agent has not begun: no line of its code has run"]
    store.register("w", "host:1", 1, Clock().now())
    assert "1 worker is alive: busy, or not serving agent shop" in page_of(store, "queued").sentence


def test_a_timer_is_told_with_its_time_and_called_overdue_when_it_is(store: Store) -> None:
    page = page_of(store, "waiting")
    assert len(page.waiting) == 1
    assert page.waiting[0].startswith("timer 1 at ")
    assert "no worker is alive that would go on then" in page.sentence
    late = page_of(store, "waiting", later_us=2 * 3_600_000_000)
    assert "which was due at" in late.sentence
    assert commands(late)[0] == "perdure resume waiting FILE.py:sleeper"


def test_a_held_run_says_who_holds_it_and_a_dead_holder_is_called_dead(store: Store) -> None:
    hold(store, "queued", "shop")
    page = page_of(store, "queued")
    assert page.sentence.startswith("running: worker host:1 holds it and is alive, last seen ")
    assert commands(page) == ["perdure events queued --follow", "perdure cancel queued"]
    silent = page_of(store, "queued", later_us=2 * LEASE_US)
    assert "running on paper: worker host:1 held it and is dead" in silent.sentence
    assert commands(silent)[0] == "perdure resume queued FILE.py:shop"


def test_a_run_that_its_worker_lost_is_told_as_such(store: Store) -> None:
    hold(store, "queued", "shop")
    store.unregister("w-alive", Clock().now())
    assert "worker host:1 died while it drove the run, and nobody has taken it over yet" in page_of(store, "queued").sentence


@agent(version="1")
async def busy(run: Run, calls: int) -> int:
    for number in range(calls):
        await lookup(str(number))
    return calls


def test_ten_thousand_done_calls_are_three_and_five(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(busy, 120, id="busy")
        app.agents["busy"] = busy
        await app.drive("busy")

    at_work(path, drive)
    store = open_store(url_of(path))
    page = page_of(store, "busy")
    store.close()
    assert page.done_count == 120
    assert [done.call for done in page.done] == [1, 2, 3, 116, 117, 118, 119, 120]
    told = CliRunner().invoke(cli, ["why", "busy", "--url", url_of(path)])
    assert "112 more: perdure show busy" in told.output
    assert len(told.output.splitlines()) < 25  # a screen


@pytest.mark.parametrize(
    ("reason", "words", "first"),
    [
        ("diverged", "the code asks for something else", "perdure replay waiting FILE.py:sleeper"),
        ("poison", "kill its workers", "perdure resume waiting FILE.py:sleeper"),
        ("stuck", "does not come to rest", "perdure replay waiting FILE.py:sleeper"),
        ("error", "cannot be driven", "perdure resume waiting FILE.py:sleeper"),
    ],
)
def test_every_reason_for_attention_has_its_own_words_and_way_out(path: Path, reason: str, words: str, first: str) -> None:
    from perdure.core import chain
    from perdure.core.events import Event
    from perdure.store.api import Append, Committed, RowChange

    store, clock = open_store(url_of(path)), Clock()
    store.register("w", "host:1", 1, clock.now())
    (claimed,) = store.claim("w", ["sleeper"], 1, clock.now(), run_id="waiting")
    seq, epoch = claimed.row.seq, claimed.lease.epoch
    bodies: tuple[AnyBody, ...] = (AttentionNeeded(reason, "the detail"), RunReleased("needs_attention", f"a person: {reason}"))  # type: ignore[arg-type]
    events = [Event(seq + n, clock.new_id(), clock.now(), epoch, None, seq, body) for n, body in enumerate(bodies, 1)]
    sealed = tuple(chain.seal_all(claimed.row.head, events))
    row = RowChange("needs_attention", waiting_for=f"a person: {reason}", error="the detail", release=True)
    assert store.append([Append(claimed.lease, seq, sealed, row=row)]) == [Committed()]
    page = page_of(store, "waiting")
    store.close()
    assert f"({reason})" in page.sentence
    assert words in page.sentence
    assert "the detail" in page.sentence
    assert commands(page)[0] == first


def test_a_run_that_does_not_exist_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match="no run 'nobody'"):
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
