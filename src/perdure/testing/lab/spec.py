"""What a process of the lab is told, and what it tells when it is done in a small file beside the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perdure.settings import Settings
from perdure.testing.boundaries import Boundary

RUN_ID = "crashtest"  # what the ids of all trials begin with, and the one that stands for each of them in a report
VARIABLE = "PERDURE_CRASHTEST_DIR"  # names the working folder of the trial, for whoever wants to look from outside
Approve = Literal["all", "reject", "none"]


class Kill(Struct, frozen=True):
    """Where a process dies; inside an effect after so many seconds of it."""

    boundary: Boundary
    after_s: float = 0.0


class Spec(Struct, frozen=True):
    """One process of one trial."""

    folder: str
    process: int  # 1 starts the run; the others resume it
    run_id: str
    input: bytes
    settings: Settings
    kill: Kill | None = None
    approve: Approve = "all"
    signals: tuple[tuple[str, Any], ...] = ()
    warp: bool = True
    patience_s: float = 15.0  # in which whatever is outside may still come late, at the pace of real time
    target: str = ""  # where the code is, for a fresh interpreter

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
    """A point that a process came to, with all of its names."""

    names: tuple[Boundary, ...]
    at: float


class Intent(Struct, frozen=True):
    attempt: int
    pid: int  # of the worker that wrote it


class Resolution(Struct, frozen=True):
    attempt: int
    outcome: str
    by: str
    after_s: float = 0.0  # in the run's own time, since its worker had taken the run


class CallTold(Struct, frozen=True):
    """A call as the journal has it."""

    run: str  # its id
    number: int
    tool: str
    effect: str  # "model" for a question to a model
    key: str
    phase: str
    digest: str | None
    reconcile: bool
    intents: tuple[Intent, ...]
    completed_by: int | None  # the pid of the worker that recorded its result
    resolutions: tuple[Resolution, ...]
    result: str | None  # JSON
    args: str | None = None  # JSON
    quiet_s: float = 0.0  # its time-out and `settle`: how long "not found" proves nothing after its worker has died

    @property
    def meets_late_effects(self) -> bool:
        """Whether a late effect would meet a hook that has looked for it, or the same call made again with its key."""
        return self.effect == "keyed" or (self.effect == "once" and self.reconcile)


class Told(Struct, frozen=True):
    """What the journal says when the run rests."""

    status: str
    output: str | None  # JSON
    error: str | None
    waiting_for: str | None
    attention: str | None
    calls: tuple[CallTold, ...]
    faults: tuple[str, ...]  # what `perdure verify` finds
    settled: tuple[str, ...]
    began_at: float
    rested_at: float
    uuids: tuple[tuple[str, int], ...] = ()  # by run, how many it has seen


def read_visits(path: Path) -> list[Visit]:
    """The points that a process came to, in order; half a line was never reached."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Visit) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
