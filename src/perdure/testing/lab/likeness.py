"""Trials under names that are the same in every one of them.

Each trial is a run with an id of its own, as each is in real life: a service outside that drops duplicate keys, or is asked for one by
a reconcile hook, knows nothing of the trials before. What follows from the id (keys, ids of children and approvals, `run.uuid()`)
differs from trial to trial for no other reason, and is taken out before anything is compared. `run.random` comes out the same in all,
since an agent may go by it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from msgspec import structs

from perdure.core import codec, identity
from perdure.testing.lab.ledger import Entry
from perdure.testing.lab.spec import RUN_ID, CallTold, Told
from perdure.testing.lab.world import Aliases, normal, plain

_TENANT = "default"  # of every run that the lab starts
_BEGINNINGS = (32, 24, 20, 16, 12, 10, 8)  # characters; shorter ones would be found where they are not


class Chance:
    """The chance that runs of this process see; counts the UUIDs that each has asked for."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._seed = identity.seed
        self._uuids: dict[str, int] = {}

    def take_over(self) -> None:
        """From here on, in this process, which is the lab's own. What an agent sees is still the same whenever it is replayed."""
        identity.seed = self.seed

    def seed(self, run_id: str, purpose: str) -> int:
        if purpose == "random":
            return self._seed(RUN_ID + run_id.removeprefix(self._run_id), purpose)
        self._uuids[run_id] = max(self._uuids.get(run_id, 0), int(purpose.removeprefix("uuid ")))
        return self._seed(run_id, purpose)

    @property
    def uuids(self) -> tuple[tuple[str, int], ...]:
        """By run, how many UUIDs it has seen."""
        return tuple(self._uuids.items())


def known_as(run_id: str, told: Told | None) -> Aliases:
    """What everything that follows from the run's id stands for; of keys and UUIDs their beginnings too, which many show in their place."""
    own: dict[str, str] = {}
    for call in told.calls if told else ():
        where = f"call {call.number} of {call.run.removeprefix(run_id) or 'the run'}"
        if call.key:
            own |= {call.key[:length]: f"<key of {where}>" for length in (len(call.key), *_BEGINNINGS)}
        own[identity.approval_id(_TENANT, call.run, call.number)] = f"<approval of {where}>"
    for run, seen in told.uuids if told else ():
        for number in range(1, seen + 1):
            value = uuid.UUID(int=identity.seed(run, f"uuid {number}") >> 128, version=4)
            stands_for = f"<uuid {number} of {run.removeprefix(run_id) or 'the run'}>"
            own |= dict.fromkeys((str(value), *(value.hex[:length] for length in (32, *_BEGINNINGS))), stands_for)
    # The longest first: what begins with another one must not be taken for it. The run's own id begins those of its children.
    return {**dict(sorted(own.items(), key=lambda item: -len(item[0]))), run_id: "<run>"}


def alike(told: Told, run_id: str, known: Aliases) -> Told:
    """What the journal says, as if the run had the id that all have in the report."""
    return structs.replace(
        told,
        calls=tuple(_call_alike(call, run_id, known) for call in told.calls),
        error=None if told.error is None else plain(told.error, known),
        waiting_for=None if told.waiting_for is None else plain(told.waiting_for, known),
    )


def _call_alike(call: CallTold, run_id: str, known: Aliases) -> CallTold:
    asked = None if call.args is None else codec.digest(codec.encode(normal(codec.decode(call.args.encode()), known)))
    return structs.replace(call, run=RUN_ID + call.run.removeprefix(run_id), digest=asked or call.digest, args=None)


def lines_alike(entries: Iterable[Entry], run_id: str) -> tuple[Entry, ...]:
    """The ledger in the same names. Of what a reconcile hook has said about an attempt the last word alone.

    Perdure asks again where "not found" proves nothing yet: an answer that it did not believe is no lie.
    """
    last = {(entry.run, entry.call, entry.attempt): entry for entry in entries if entry.fact == "told"}
    return tuple(
        structs.replace(entry, run=RUN_ID + entry.run.removeprefix(run_id)) if entry.run else entry
        for entry in entries
        if entry.fact != "told" or last[entry.run, entry.call, entry.attempt] is entry
    )
