"""What a process of the lab gets (`Spec`), and what it writes to a file beside the journal (`TrialTold`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perdure.settings import Settings
from perdure.testing.boundaries import Boundary

RUN_ID = "crashtest"  # the run ids of all trials begin with this text; in a report it replaces the whole run id
VARIABLE = "PERDURE_CRASHTEST_DIR"  # the working folder of the trial, for the user's tools and ledger
Approve = Literal["all", "reject", "none"]


class Kill(Struct, frozen=True):
    """Where a process is killed. If that is inside an effect: `after_s` seconds after the effect began."""

    boundary: Boundary
    after_s: float = 0.0


class Spec(Struct, frozen=True):
    """One process of one trial."""

    folder: str
    process: int  # process 1 starts the run; the other processes resume it
    run_id: str
    input: bytes
    settings: Settings
    kill: Kill | None = None
    approve: Approve = "all"
    signals: tuple[tuple[str, Any], ...] = ()
    warp: bool = True
    patience_s: float = 15.0  # how many real seconds the lab waits for an effect outside
    target: str = ""  # where the agent's code is; a fresh interpreter needs it

    @property
    def home(self) -> Path:
        return Path(self.folder)

    @property
    def world(self) -> Path:
        """The working folder."""
        return self.home / "world"

    @property
    def told(self) -> Path:
        return self.home / f"told-{self.process}.json"

    @property
    def visits(self) -> Path:
        return self.home / f"visits-{self.process}"

    @property
    def log(self) -> Path:
        return self.home / f"log-{self.process}"


class Visit(Struct, frozen=True):
    """A point that a process reached, with all names of the point."""

    names: tuple[Boundary, ...]
    at: float


class Intent(Struct, frozen=True):
    attempt: int
    pid: int  # the pid of the worker that wrote the intent


class Resolution(Struct, frozen=True):
    attempt: int
    outcome: str
    by: str
    after_s: float = 0.0  # seconds after the worker claimed the run, by the run's own clock


class CallTold(Struct, frozen=True):
    """A call, as it is in the journal."""

    run: str  # the id of the call's run
    number: int
    tool: str
    effect: str  # "model" for a model call
    key: str
    phase: str
    digest: str | None
    reconcile: bool
    intents: tuple[Intent, ...]
    completed_by: int | None  # the pid of the worker that recorded the result
    resolutions: tuple[Resolution, ...]
    result: str | None  # JSON
    args: str | None = None  # JSON
    quiet_s: float = 0.0  # timeout plus `settle`: within this time after the worker's death "not found" proves nothing

    @property
    def meets_late_effects(self) -> bool:
        """Can a late effect matter? Yes, if a hook is asked about the call, or the call is made again with its key."""
        return self.effect == "keyed" or (self.effect == "once" and self.reconcile)


class TrialTold(Struct, frozen=True):
    """What the journals contain when the run has ended or parked."""

    status: str
    output: str | None  # JSON
    error: str | None
    waiting_for: str | None
    attention: str | None
    calls: tuple[CallTold, ...]
    faults: tuple[str, ...]  # the faults that `perdure verify` finds
    settled: tuple[str, ...]
    began_at: float
    rested_at: float
    uuids: tuple[tuple[str, int], ...] = ()  # pairs: a run, and how many UUIDs it has drawn


def read_visits(path: Path) -> list[Visit]:
    """The points that a process reached, in order. An incomplete last line is ignored."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Visit) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
