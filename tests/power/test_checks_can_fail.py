"""Tests of the power-loss lab.

With a disk that lies, or without one of perdure's guards, it must find a wrong state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.power import agents, scenarios
from tests.power.agents import World
from tests.power.disk import FolderSynced, Noted, Op, Synced, Trouble
from tests.power.lab import Lab
from tests.power.scenarios import SCENARIOS, record
from tests.power.told import Acknowledged, Effect

from perdure.core import decide, run_core
from perdure.core.run_core import RunCore
from perdure.core.state import CallState
from perdure.store import blobs
from perdure.store.sql import SqlStore
from perdure.store.sqlite.database import SqliteDatabase

FIRST, CHECKPOINTS = "one run, from the first byte on", "one run, with checkpoints"


def wrong(folder: Path, log: list[Op], name: str, match: str, *, after: str = "", resume_every: int = 0) -> None:
    """Some state after a power loss is not as it was promised: looked for from the first answer on, or from that effect on."""
    begin = next(place for place, op in enumerate(log) if isinstance(op, Noted) and (not after or _is_effect(op.mark, after)))
    with pytest.raises(AssertionError, match=match):
        Lab(folder / "state", SCENARIOS[name], seed="can fail").survey(log, each=2, resume_every=resume_every, between=(begin, len(log)))


def _is_effect(mark: object, what: str) -> bool:
    return isinstance(mark, Effect) and what in mark.what


def recorded(folder: Path, name: str, trouble: Trouble | None = None) -> list[Op]:
    path = folder / "recorded" / "journal.db"
    path.parent.mkdir()
    return record(SCENARIOS[name], path, trouble)


def test_a_disk_that_says_that_it_has_synced_and_has_not_loses_what_was_acknowledged(folder: Path) -> None:
    log = recorded(folder, FIRST, Trouble("sync is a lie", 0, times=float("inf")))
    wrong(folder, log, FIRST, "was acknowledged and is gone|is damaged|is not a SQLite database")


def test_without_a_sync_at_every_commit_what_was_acknowledged_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "SETTINGS", structs.replace(scenarios.SETTINGS, synchronous="normal"))
    wrong(folder, recorded(folder, FIRST), FIRST, "was acknowledged and is gone|effects without a durable intent")


def test_a_folder_that_was_never_synced_may_have_lost_the_whole_journal(folder: Path) -> None:
    log: list[Op] = [op for op in recorded(folder, FIRST) if not isinstance(op, FolderSynced)]
    wrong(folder, log, FIRST, "was acknowledged and is gone")


def test_a_checkpoint_that_does_not_sync_the_database_damages_it(folder: Path) -> None:
    log = recorded(folder, CHECKPOINTS)
    # The first one is not a checkpoint's: it makes the file a database.
    first, *later = [op for op in log if isinstance(op, Synced) and op.inode == 1]
    assert len(later) > 5
    # A checkpoint has copied pages into the database, and the log has begun again. Without the sync, the power loss
    # loses these pages. SQLite says that the file is malformed. If it first reads a long text of the schema, whose
    # pages it reads without its cache, it says that the read was short (SQLITE_IOERR_SHORT_READ); perdure translates
    # this to "is damaged".
    wrong(
        folder,
        [op for op in log if op is first or not any(op is one for one in later)],
        CHECKPOINTS,
        "malformed|is damaged|is gone|is not the one",
    )


def test_an_answer_that_is_given_before_the_commit_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SqlStore.append

    def hasty(store: SqlStore, batch: Any) -> Any:
        for append in batch:
            for sealed in append.events:
                agents.WORLD[0].note(Acknowledged(append.lease.run_id, sealed.event.seq, sealed.hash))
        return real(store, batch)

    monkeypatch.setattr(SqlStore, "append", hasty)
    wrong(folder, recorded(folder, FIRST), FIRST, "was acknowledged and is gone")


def test_an_effect_that_begins_before_its_intent_is_durable_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(core: RunCore, call: CallState) -> None:
        core._running.add(call.number)
        core._out.begin_now.append(core._begin_of(call))
        core._dirty_since = core._mono  # the flush of earlier events must not come before the effect

    monkeypatch.setattr(RunCore, "_ready", ready)
    wrong(folder, recorded(folder, FIRST), FIRST, "effects without a durable intent")


def test_a_blob_that_is_written_after_the_event_that_names_it_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[tuple[int, tuple[bytes, ...]]] = []
    real_put, real_write = blobs.put, SqliteDatabase.write

    def write(database: SqliteDatabase, work: Callable[..., Any], arrived: Any, **options: Any) -> Any:
        done = real_write(database, work, arrived, **options)
        while late:
            real_write(database, lambda cursor: real_put(cursor, *late.pop()), lambda *_: False)
        return done

    monkeypatch.setattr(blobs, "put", lambda cursor, key, given: late.append((key, given)))
    monkeypatch.setattr(SqliteDatabase, "write", write)
    wrong(folder, recorded(folder, FIRST), FIRST, "blob .* is missing")


def test_an_effect_that_is_repeated_when_the_run_is_resumed_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorded(folder, FIRST)
    monkeypatch.setattr(World, "knows", lambda world, key: False)  # the service says that it has not happened
    monkeypatch.setattr(run_core, "quiet_after_s", lambda call, patience: 0.0)  # and is believed at once,
    monkeypatch.setattr(decide, "never_quiet", lambda call: False)  # also about what may still be sending
    wrong(folder, log, FIRST, "happened twice", after="shipped", resume_every=1)
