"""What perdure has acknowledged, and what tools have done, up to a point of the log: the disk must agree with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.power.autopsy import Findings, inbox_count

from perdure.store.api import Append, Committed
from perdure.store.sql import SqlStore

Note = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The store has returned: this event of this run is durable."""

    run_id: str
    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    """The store has returned: the post is in the journal, or in the run's inbox."""

    run_id: str
    event_id: str | None
    inbox: int


@dataclass(frozen=True, slots=True)
class Effect:
    """A tool that needs an intent has done something to the world."""

    run_id: str
    key: str
    what: str


@dataclass(frozen=True, slots=True)
class Pruning:
    """The deletion of this family was requested; if `done`, it has finished."""

    root: str
    done: bool = False


@dataclass
class Told:
    """Everything that was said so far."""

    hashes: dict[tuple[str, int], bytes] = field(default_factory=dict)
    delivered: dict[str, str] = field(default_factory=dict)  # the run, by event id
    inbox: int = 0
    effects: dict[str, Effect] = field(default_factory=dict)  # by key
    pruning: dict[str, bool] = field(default_factory=dict)  # by root: whether it is done

    def note(self, mark: object) -> None:
        match mark:
            case Acknowledged(run_id, seq, hashed):
                self.hashes[run_id, seq] = hashed
            case Delivered(run_id, event_id, inbox):
                self.inbox = max(self.inbox, inbox)
                if event_id is not None:
                    self.delivered[event_id] = run_id
            case Effect(key=key):
                self.effects[key] = mark
            case Pruning(root, done):
                self.pruning[root] = done
            case _:
                raise AssertionError(mark)

    def hold_against(self, found: Findings) -> None:
        """Raises AssertionError if the disk lacks something that was acknowledged, or has something else."""
        assert not found.problems, found.problems
        for (run_id, seq), hashed in self.hashes.items():
            if not self._gone(run_id, found):
                there = found.hashes.get(run_id, ())
                assert len(there) >= seq, f"event {seq} of run {run_id} was acknowledged and is gone: {len(there)} are left"
                assert there[seq - 1] == hashed, f"event {seq} of run {run_id} is not the one that was acknowledged"
        missing = [event_id for event_id in self.delivered.keys() - found.event_ids if not self._gone(self.delivered[event_id], found)]
        assert not missing, f"delivered and gone: {missing}"
        assert found.inbox >= self.inbox, f"{self.inbox} were put into inboxes, and the journal knows of {found.inbox}"
        loose = [key for key in self.effects.keys() - found.intents.keys() if not self._gone(self.effects[key].run_id, found)]
        assert not loose, f"effects without a durable intent: {[self.effects[key] for key in loose]}"
        assert found.booked == found.bookings, "a transaction tool's own writes and its result are not one commit"

    def _gone(self, run_id: str, found: Findings) -> bool:
        """Is the run rightly missing? Its deletion was requested, and there is a tombstone."""
        done = self.pruning.get(run_id.partition("/")[0])
        buried = done is not None and run_id in found.tombstones
        assert buried or not done, f"run {run_id} was pruned, and there is no tombstone"
        return buried


@contextmanager
def notary(note: Note) -> Iterator[None]:
    """Every answer of the store that says "durable" is written down, right after it was given."""
    real = {name: getattr(SqlStore, name) for name in ("append", "transact", "create_run", "claim", "post", "end", "decide", "prune")}

    def row(store: SqlStore, run_id: str) -> None:
        found = store.get(run_id)
        assert found is not None, run_id
        note(Acknowledged(run_id, found.seq, found.head))

    def append(store: SqlStore, batch: Sequence[Append]) -> Any:
        answers = real["append"](store, batch)
        for one, answer in zip(batch, answers, strict=True):
            if answer == Committed():
                for sealed in one.events:
                    note(Acknowledged(one.lease.run_id, sealed.event.seq, sealed.hash))
        return answers

    def transact(store: SqlStore, head: Append, work: Any) -> Any:
        answer, value = real["transact"](store, head, work)
        if answer == Committed():
            row(store, head.lease.run_id)
        return answer, value

    def create_run(store: SqlStore, new: Any) -> Any:
        found, created = real["create_run"](store, new)
        note(Acknowledged(found.run_id, found.seq, found.head))
        return found, created

    def claim(store: SqlStore, *args: Any, **options: Any) -> Any:
        claimed = real["claim"](store, *args, **options)
        for one in claimed:
            note(Acknowledged(one.row.run_id, one.row.seq, one.row.head))
        return claimed

    def sent(name: str) -> Any:
        def send(store: SqlStore, *args: Any, event_id: str, **options: Any) -> Any:
            answer = real[name](store, *args, event_id=event_id, **options)
            run_id = answer.run_id if name == "decide" else args[0]
            journaled = any(event.event_id == event_id for event in store.read(run_id))
            note(Delivered(run_id, event_id if journaled else None, inbox_count(store)))
            return answer

        return send

    def prune(store: SqlStore, roots: Sequence[str], before: int, **options: Any) -> Any:
        for root in roots:
            note(Pruning(root))
        pruned = real["prune"](store, roots, before, **options)
        for root in roots:
            note(Pruning(root, done=True))
        return pruned

    watched = {"append": append, "transact": transact, "create_run": create_run, "claim": claim, "prune": prune}
    watched |= {name: sent(name) for name in ("post", "end", "decide")}
    for name, function in watched.items():
        setattr(SqlStore, name, function)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(SqlStore, name, function)
