"""This version decodes, folds, verifies, replays and continues the journals of every released version."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.golden.files import AGENTS, Golden, Line, projection, versions
from tests.golden.lives import SETTINGS, FixedClock, Stage
from tests.golden.make import make
from tests.golden.scenes import LIVES, begin_everyday, end_everyday, raise_family

from perdure import Perdure
from perdure.agent import Agent
from perdure.core import codec, identity
from perdure.core.events import AnyBody, encode_body
from perdure.core.state import fold, payloads
from perdure.inspect.replay import Same, compare
from perdure.inspect.verify import Verdict, verify_journal, verify_run
from perdure.store.api import FINISHED, Store, Stored
from perdure.store.open import open_store


@pytest.fixture(params=versions(), ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture
def store(golden: Golden, tmp_path: Path) -> Iterator[Store]:
    """The database of that version, opened by this one: a copy, which is migrated."""
    with closing(open_store(f"sqlite:///{golden.database(tmp_path)}", create=False)) as opened:
        yield opened


@cache
def lines_of(folder: Path) -> dict[str, list[Line]]:
    return Golden(folder).journals()


def stored(line: Line) -> Stored:
    return Stored(
        line.seq, bytes.fromhex(line.event_id), line.ts, line.epoch, line.call, line.cause, bytes(line.data), bytes.fromhex(line.hash)
    )


def verdict_on(run_id: str, lines: list[Line], golden: Golden, *, head: str | None = None) -> Verdict:
    blobs = golden.blobs()
    heading = Heading(run_id, len(lines), bytes.fromhex(head or lines[-1].hash))
    return verify_journal(heading, [stored(line) for line in lines], blobs.__getitem__)[0]


class Heading(msgspec.Struct, frozen=True):
    """What a row would say."""

    run_id: str
    seq: int
    head: bytes


# -- the text -------------------------------------------------------------------------------------------------------------------
def test_every_type_of_event_occurs_in_a_journal() -> None:
    """A new type needs a journal that contains it. Make the journals of the unreleased version again.

    `run_requeued` is only in the journals of 0.1: later versions do not write it.
    """
    found = {type(line.event.body) for folder in versions() for lines in lines_of(folder).values() for line in lines}
    assert {kind.__name__ for kind in get_args(AnyBody)} == {kind.__name__ for kind in found}


def test_every_journal_folds_to_what_its_version_said(golden: Golden, store: Store) -> None:
    expected = golden.expected()
    journals = lines_of(golden.folder)
    assert expected.keys() == journals.keys()
    for run_id, lines in journals.items():
        row = store.get(run_id)
        assert row is not None
        state = fold(line.event for line in lines)
        assert json.loads(json.dumps(projection(row, state, golden.load))) == expected[run_id], run_id


def test_every_event_is_written_today_as_it_was_then(golden: Golden) -> None:
    """Decoded and encoded again, an event has the same bytes, and so has every payload.

    Digests and hashes do not change.
    """
    for run_id, lines in lines_of(golden.folder).items():
        before = identity.genesis(run_id)
        for line in lines:
            assert encode_body(line.event.body) == bytes(line.data), (run_id, line.seq)
            assert identity.seal(before, line.event).hash.hex() == line.hash, (run_id, line.seq)
            before = bytes.fromhex(line.hash)
            for payload in payloads(line.event.body):
                assert codec.encode(codec.decode(golden.load(payload))) == golden.load(payload), (run_id, line.seq)
    for digest, data in golden.blobs().items():
        assert codec.digest(data) == digest
        assert codec.encode(codec.decode(data)) == data


def test_every_journal_verifies(golden: Golden) -> None:
    assert {run_id: verdict_on(run_id, lines, golden).problem for run_id, lines in lines_of(golden.folder).items()} == dict.fromkeys(
        lines_of(golden.folder)
    )


def test_every_journal_replays_with_the_agents_that_wrote_it(golden: Golden) -> None:
    agents = served(golden)
    replayed = 0
    for run_id, lines in lines_of(golden.folder).items():
        events = [line.event for line in lines]
        state = fold(events)
        assert state.created is not None
        agent = agents.get((state.created.agent, state.version or "1"))  # a run that has not begun has no version
        if agent is None:
            assert run_id.endswith("/undo")  # the only agent that perdure makes itself, from the calls of another run
            continue
        found = compare(run_id, events, state, partial(agent.machine_of, load=golden.load, max_steps=10_000), golden.load)
        assert isinstance(found, Same), found
        replayed += 1
    assert replayed >= 20


def served(golden: Golden) -> dict[tuple[str, str], Agent[Any, Any]]:
    return {(agent.name, agent.version): agent for agent in golden.agents().AGENTS}


# -- one changed byte -------------------------------------------------------------------------------------------------------------
def test_one_changed_byte_anywhere_is_found(golden: Golden) -> None:
    """Otherwise all tests above could pass with any journal.

    Change one byte in every event, and every column of the envelope.
    """
    looked = 0
    for run_id, lines in lines_of(golden.folder).items():
        for place, line in enumerate(lines):
            for changed in (_with_other_byte(line), _with_other_column(line)):
                verdict = verdict_on(run_id, [*lines[:place], changed, *lines[place + 1 :]], golden, head=lines[-1].hash)
                assert verdict.problem is not None, (run_id, line.seq)
                assert verdict.seq == line.seq, (run_id, line.seq, verdict)
                looked += 1
    assert looked > 500


def _with_other_byte(line: Line) -> Line:
    data = bytearray(bytes(line.data))
    data[line.seq * 7919 % len(data)] ^= 1
    return msgspec.structs.replace(line, data=msgspec.Raw(bytes(data)))


def _with_other_column(line: Line) -> Line:
    match line.seq % 5:
        case 0:
            return msgspec.structs.replace(line, ts=line.ts + 1)
        case 1:
            return msgspec.structs.replace(line, epoch=line.epoch + 1)
        case 2:
            return msgspec.structs.replace(line, call=(line.call or 0) + 1)
        case 3:
            return msgspec.structs.replace(line, cause=(line.cause or 0) + 1)
        case _:
            return msgspec.structs.replace(line, event_id=f"{int(line.event_id, 16) ^ 1:032x}")


# -- the database ---------------------------------------------------------------------------------------------------------------
def test_the_database_opens_and_says_what_the_text_says(golden: Golden, store: Store) -> None:
    journals = lines_of(golden.folder)
    assert {row.run_id for row in store.list(limit=1000)} == journals.keys()
    for run_id, lines in journals.items():
        assert store.stored(run_id) == [stored(line) for line in lines]
        row = store.get(run_id)
        assert row is not None
        assert verify_run(store, row).problem is None, run_id
    for digest, data in golden.blobs().items():
        assert store.blob(digest) == data


@pytest.mark.long
def test_the_command_line_works_on_the_database(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / AGENTS).write_bytes((golden.folder / AGENTS).read_bytes())
    golden.database(tmp_path)

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "perdure", *words, "--url", "sqlite:///journal.db"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    runs = [json.loads(line) for line in said("list", "--json", "--limit", "1000").splitlines()]
    assert {run["run_id"] for run in runs} == lines_of(golden.folder).keys()
    assert json.loads(said("show", "everyday", "--json"))["status"] == "succeeded"
    assert json.loads(said("replay", "everyday", f"{AGENTS}:everyday", "--json"))["same"]
    said("verify")


@pytest.mark.long
def test_what_was_unfinished_goes_on_to_its_end(golden: Golden, tmp_path: Path) -> None:
    database = golden.database(tmp_path)
    unfinished = [run_id for run_id, said in golden.expected().items() if said["status"] not in FINISHED]
    assert unfinished
    module, clock = golden.agents(), FixedClock(1000)

    async def main() -> dict[str, str]:
        async with asyncio.timeout(60), Perdure(f"sqlite:///{database}", module.AGENTS, settings=SETTINGS, clock=clock) as app:
            ends = {run_id: await go_on(Stage(app, clock, module), run_id) for run_id in unfinished}
            for run_id in unfinished:
                row = app.store.get(run_id)
                assert row is not None
                assert verify_run(app.store, row).problem is None
            return ends

    assert asyncio.run(main()) == dict.fromkeys(unfinished, "succeeded")


async def go_on(stage: Stage, run_id: str) -> str:
    """Do what the run waits for, until it has ended."""
    app = stage.app
    for _ in range(50):
        before = await app.handle(run_id).row()
        if before.status == "paused" or before.attention == "restored":
            await app.unpause(run_id, by="ann")
        row = await stage.drive(run_id)
        if row.status in FINISHED:
            return row.status
        for asked in await app.approvals(run_id=run_id):
            for who in ("ann", "bob")[: asked.standing.request.quorum]:
                await app.approve(asked.approval, by=who, roles=("finance",))
        match row.status:
            case "needs_attention" if row.attention == "in_doubt":
                for call in fold(app.store.read(run_id)).open:
                    await app.resolve(run_id, call, did_not_happen=True, final=True, by="ann")
            case "needs_attention":
                await app.unpause(run_id, by="ann")
            case "waiting" if row.ready_at is None:
                await app.signal(run_id, "go", "on")
    raise AssertionError(f"run {run_id} does not end")


# -- the maker --------------------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_making_journals_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """A worker that is killed, a worker that takes over, and a family: their events could have a varying order."""
    lives = [life for life in LIVES if life.scene in (begin_everyday, end_everyday, raise_family)]
    assert len(lives) == 3
    for name in ("one", "two"):
        make(tmp_path / name, lives)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 5
    assert one == two


def test_what_was_made_is_not_made_again(golden: Golden) -> None:
    before = {path.name: path.read_bytes() for path in golden.folder.iterdir() if path.is_file()}
    with pytest.raises(FileExistsError):
        make(golden.folder)
    assert {path.name: path.read_bytes() for path in golden.folder.iterdir() if path.is_file()} == before
