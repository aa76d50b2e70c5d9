"""What every Store must do about forks. Part of StoreConformance."""

from __future__ import annotations

import hashlib
import threading
import uuid

import pytest
from msgspec import structs
from tests.conformance.suite_reopening import LATER, _register, failed
from tests.conformance.suite_waiting import found, hold, payload

from perdure.core.events import RunForked, RunReopened, RunSucceeded, ThoughtRecorded
from perdure.core.fork import live_fork
from perdure.core.state import fold
from perdure.errors import Conflict, NotFound, PerdureError
from perdure.inspect.specimen import Packing, new_fork
from perdure.inspect.verify import verify_run
from perdure.store.api import NewFork, RowChange, Served, Specimen, Store


class ForkConformance:
    """Needs a `store` fixture."""

    def test_a_live_fork_is_ready_and_is_claimed_like_any_run(self, store: Store) -> None:
        failed(store, "r")
        before = (found(store, "r"), store.read("r"))
        store.insert_fork(forking(store, "r", "f"))
        row = found(store, "f")
        assert (row.status, row.ready_at, row.holder, row.error, row.parent, row.specimen) == ("queued", LATER, None, None, None, None)
        assert verify_run(store, row).problem is None
        assert [type(event.body) for event in store.read("f")[-2:]] == [RunForked, RunReopened]
        assert [event.event_id for event in store.read("f")[: before[0].seq]] == [event.event_id for event in before[1]]
        assert (found(store, "r"), store.read("r")) == before
        assert not store.missing_heads()
        _register(store, "w2")
        (claimed,) = store.claim("w2", [Served("a", "1")], 5, LATER)
        assert (claimed.row.run_id, claimed.row.seq, claimed.row.epoch) == ("f", row.seq + 1, row.epoch + 1)

    def test_a_stored_rehearsal_is_never_claimed(self, store: Store) -> None:
        failed(store, "r")
        store.insert_fork(forking(store, "r", "f", Specimen("", "", LATER, "ann", fork_of="r", at=2)))
        row = found(store, "f")
        assert (row.ready_at, row.imported and row.imported.fork_of) == (None, "r")
        _register(store, "w2")
        assert store.claim("w2", [Served("a", "1")], 5, LATER * 2) == []
        with pytest.raises(Conflict, match="is a rehearsal, a fork of run r"):
            store.claim("w2", [Served("a", "1")], 1, LATER * 2, run_id="f")

    def test_a_fork_has_the_bytes_of_its_parent_and_is_refused_if_the_parent_has_lost_events_meanwhile(self, store: Store) -> None:
        failed(store, "r")
        new = forking(store, "r", "f")
        lacking = structs.replace(new, copied={**new.copied, found(store, "r").seq + 1: bytes(32)})
        with pytest.raises(NotFound, match="were removed meanwhile; nothing was written"):
            store.insert_fork(lacking)
        assert store.get("f") is None
        store.insert_fork(new)
        bytes_of = {run_id: {one.seq: one.data for one in store.stored(run_id)} for run_id in ("r", "f")}
        assert new.copied
        assert all(bytes_of["f"][seq] == bytes_of["r"][seq] for seq in new.copied)
        assert verify_run(store, found(store, "f")).problem is None

    def test_a_taken_id_a_pruned_id_and_a_pruned_parent_are_refused_and_nothing_is_written(self, store: Store) -> None:
        failed(store, "r")
        succeeded(store, "gone")
        pruned, orphan = forking(store, "r", "gone"), forking(store, "gone", "g")
        store.prune(["gone"], LATER * 2, by="ann", now=LATER)
        store.insert_fork(forking(store, "r", "f"))
        before = (store.count_runs(), store.read("f"), found(store, "f"))
        refused: list[tuple[NewFork, type[PerdureError], str]] = [
            (forking(store, "r", "f"), Conflict, "run f exists; nothing was written"),
            (forking(store, "r", "r2", as_id="r"), Conflict, "run r exists; nothing was written"),
            (pruned, Conflict, "run gone ran in this journal and was pruned"),
            (orphan, NotFound, "run gone was pruned meanwhile"),
        ]
        for new, error, words in refused:
            with pytest.raises(error, match=words):
                store.insert_fork(new)
        assert (store.count_runs(), store.read("f"), found(store, "f")) == before

    def test_of_forks_with_one_id_at_the_same_time_one_is_made(self, store: Store) -> None:
        failed(store, "r")
        plans = [forking(store, "r", "f") for _ in range(4)]
        meet, answers = threading.Barrier(len(plans)), []

        def insert(plan: NewFork) -> None:
            meet.wait()
            try:
                store.insert_fork(plan)
            except Conflict as refused:
                answers.append(str(refused))
            else:
                answers.append("made")

        threads = [threading.Thread(target=insert, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(answers) == sorted(["made", *["run f exists; nothing was written: choose another id for the fork"] * 3])
        assert verify_run(store, found(store, "f")).problem is None

    def test_a_fork_keeps_the_blobs_of_its_parent(self, store: Store) -> None:
        succeeded(store, "r")
        large = b'"' + b"x" * 1000 + b'"'
        digest = hashlib.sha256(large).hexdigest()
        new = forking(store, "r", "f", blobs=[large], digests=[digest])
        store.insert_fork(new)
        store.prune(["r"], LATER * 2, by="ann", now=LATER)
        assert store.get("r") is None
        assert store.blob(digest) == large


def succeeded(store: Store, run_id: str) -> None:
    """A run that can be pruned: no notice is left to send."""
    hand = hold(store, run_id)
    hand.write(ThoughtRecorded("x"))
    hand.write(RunSucceeded(payload("done")), row=RowChange("succeeded"))


def forking(
    store: Store,
    run_id: str,
    fork_id: str,
    specimen: Specimen | None = None,
    *,
    as_id: str | None = None,
    blobs: list[bytes] | None = None,
    digests: list[str] | None = None,
) -> NewFork:
    """A live fork of the run at its event 2; or, with `specimen`, the same journal as a specimen."""
    recorded = store.recorded(run_id)
    events = recorded.events
    forked = RunForked(as_id or fork_id, run_id, 2, found(store, run_id).head.hex(), "ann")
    ids = iter(lambda: uuid.uuid4().hex, None)
    fork = live_fork(events, fold(events), forked, {}, version="1", input=None, target=None, now=LATER, ids=ids)
    packing = Packing(1000, lambda one: one.inline or b"")
    packing.blobs.update((hashlib.sha256(blob).hexdigest(), blob) for blob in blobs or [])
    new = new_fork(recorded, fork.state, fork.events, specimen, packing)
    return new if digests is None else structs.replace(new, whole=structs.replace(new.whole, blobs=digests))
