"""What every store must do with the progress of attempts."""

from __future__ import annotations

from tests.conformance import suite

from perdure.core.events import RunSucceeded
from perdure.store.api import EndedAttempt, KeptProgress, Lease, RowChange, Store


def kept(lease: Lease, progress: bytes, call: int = 1, attempt: int = 1) -> KeptProgress:
    return KeptProgress(lease, call, attempt, progress)


def stored(store: Store, *runs: str) -> list[tuple[str, int, int, bytes]]:
    return [(row.run_id, row.call, row.attempt, row.progress) for row in store.progress(runs)]


class ProgressConformance:
    def test_the_last_progress_of_each_call_is_kept(self, store: Store) -> None:
        one, other = suite.hold_one(store, "r1").lease, suite.hold_one(store, "r2").lease
        store.keep_progress([kept(other, b"7"), kept(one, b'{"part":1}'), kept(one, '"ü \\u0000"'.encode(), call=3)], [], suite.T0)
        store.keep_progress([kept(one, b'{"part":40}')], [], suite.T0 + 5)
        assert stored(store, "r1", "r2", "nobody") == [
            *(("r1", 1, 1, b'{"part":40}'), ("r1", 3, 1, '"ü \\u0000"'.encode())),
            ("r2", 1, 1, b"7"),
        ]
        assert [row.at for row in store.progress(["r1"])] == [suite.T0 + 5, suite.T0]
        assert store.progress([]) == []

    def test_a_worker_that_lost_its_run_cannot_overwrite_the_progress(self, store: Store) -> None:
        late = suite.hold_one(store, "r", "late").lease
        store.keep_progress([kept(late, b"1")], [], suite.T0)
        store.unregister("late", suite.T0)
        store.keep_progress([kept(late, b"2")], [], suite.T0)
        assert stored(store, "r") == [("r", 1, 1, b"1")]
        now = suite.claim_one(store, "r", "now").lease
        store.keep_progress([kept(late, b"3"), kept(now, b"4", call=2)], [], suite.T0)
        assert stored(store, "r") == [("r", 1, 1, b"1"), ("r", 2, 1, b"4")]

    def test_the_holder_of_an_earlier_claim_is_another_one_even_with_the_same_name(self, store: Store) -> None:
        before = suite.hold_one(store, "r", "w").lease
        store.release_undriven("w", [("r", before.epoch)], suite.T0)
        after = suite.claim_one(store, "r", "w").lease
        assert after.epoch == before.epoch + 1
        store.keep_progress([kept(before, b"1")], [], suite.T0)
        assert stored(store, "r") == []
        store.keep_progress([kept(after, b"2")], [], suite.T0)
        assert stored(store, "r") == [("r", 1, 1, b"2")]

    def test_an_earlier_attempt_never_replaces_the_progress_of_a_later_one(self, store: Store) -> None:
        lease = suite.hold_one(store, "r").lease
        store.keep_progress([kept(lease, b"20", attempt=2)], [], suite.T0)
        store.keep_progress([kept(lease, b"10", attempt=1)], [], suite.T0)
        assert stored(store, "r") == [("r", 1, 2, b"20")]

    def test_the_progress_of_an_ended_attempt_is_forgotten_and_that_of_the_next_one_is_not(self, store: Store) -> None:
        lease = suite.hold_one(store, "r").lease
        store.keep_progress([kept(lease, b"1"), kept(lease, b"2", call=2, attempt=2)], [], suite.T0)
        store.keep_progress([], [EndedAttempt("r", 1, 1), EndedAttempt("r", 2, 1), EndedAttempt("nobody", 1, 1)], suite.T0)
        assert stored(store, "r") == [("r", 2, 2, b"2")]

    def test_a_run_is_pruned_with_its_progress(self, store: Store) -> None:
        held = suite.hold_one(store, "r")
        store.keep_progress([kept(held.lease, b"1")], [], suite.T0)
        store.append([held.append(RunSucceeded(suite.payload("done")), row=RowChange("succeeded"))])
        assert store.prune(["r"], suite.T0 + 10**12, by="ann", now=suite.T0).runs == 1
        assert stored(store, "r") == []
