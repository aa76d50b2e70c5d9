"""Makes trials comparable: values that are computed from a run's id are replaced by the same aliases in every trial.

Each trial is a run with its own id, as in production: an outside service, which drops duplicate keys or is asked by a
reconcile hook, must not confuse two trials. So the values that are computed from the id (keys, ids of children and
approvals, `run.uuid()`) differ between trials. They are replaced by aliases before anything is compared. `run.random`
gives the same values in all trials, because the decisions of an agent may depend on these values.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from msgspec import structs

from perdure.core import codec, identity
from perdure.testing.lab.ledger import Entry
from perdure.testing.lab.spec import RUN_ID, CallTold, TrialTold
from perdure.testing.lab.world import Aliases, normal, plain

_TENANT = "default"  # the tenant of every run that the lab starts
_BEGINNINGS = (32, 24, 20, 16, 12, 10, 8)  # lengths in characters; a shorter beginning could match by chance


class Chance:
    """The seeds of random values in this process. Also counts the UUIDs that each run has drawn."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._seed = identity.seed
        self._uuids: dict[str, int] = {}

    def take_over(self) -> None:
        """Replace the seeds in this process, which belongs to the lab. A replay still gets the same values."""
        identity.seed = self.seed

    def seed(self, run_id: str, purpose: str) -> int:
        if purpose == "random":
            return self._seed(RUN_ID + run_id.removeprefix(self._run_id), purpose)
        self._uuids[run_id] = max(self._uuids.get(run_id, 0), int(purpose.removeprefix("uuid ")))
        return self._seed(run_id, purpose)

    @property
    def uuids(self) -> tuple[tuple[str, int], ...]:
        """Pairs: a run, and how many UUIDs it has drawn."""
        return tuple(self._uuids.items())


def known_as(run_id: str, told: TrialTold | None) -> Aliases:
    """A dict: value that is computed from the run's id → its alias.

    The beginnings of keys and UUIDs have aliases too, because tools often show only the beginning.
    """
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
    # The longest values come first, so that a beginning is not replaced inside a longer value. The run's own id comes
    # last, because other values contain it.
    return {**dict(sorted(own.items(), key=lambda item: -len(item[0]))), run_id: "<run>"}


def alike(told: TrialTold, run_id: str, known: Aliases) -> TrialTold:
    """The report about the journal, with the run's id replaced by RUN_ID."""
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
    """The ledger's lines, with the run's id replaced by RUN_ID. Of a hook's answers to an attempt, the last is kept.

    While "not found" proves nothing yet, perdure asks the hook again. perdure did not believe the earlier answers, so
    they are not a fault of the hook.
    """
    last = {(entry.run, entry.call, entry.attempt): entry for entry in entries if entry.fact == "told"}
    return tuple(
        structs.replace(entry, run=RUN_ID + entry.run.removeprefix(run_id)) if entry.run else entry
        for entry in entries
        if entry.fact != "told" or last[entry.run, entry.call, entry.attempt] is entry
    )
