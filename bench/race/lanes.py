"""Who takes part: a contestant with each kind of store that it has is a lane."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

Store = Literal["sqlite", "postgres", "own"]

RACE = Path(__file__).resolve().parent
ROOT = RACE.parents[1]
ENVIRONMENTS = ROOT / ".bench"
OURS = "perdure"
PEERS = ("dbos", "langgraph", "temporal", "restate")
NAMES = (OURS, *PEERS)
_AS_SHIPPED = ", as shipped"


class Contestant(Struct, frozen=True):
    """A program, and the interpreter of the environment that it needs."""

    name: str
    program: Path
    python: Path

    @classmethod
    def called(cls, name: str) -> Contestant:
        python = Path(sys.executable) if name == OURS else ENVIRONMENTS / name / "bin" / "python"
        return cls(name, RACE / "contestants" / f"with_{name}.py", python)


class Lane(Struct, frozen=True):
    """A contestant on one kind of store; as the fastest durable settings that we know have it, or without those of them that its
    documentation does not tell of."""

    contestant: Contestant
    store: Store
    as_shipped: bool = False

    @property
    def name(self) -> str:
        name = self.contestant.name if self.store == "own" else f"{self.contestant.name}/{self.store}"
        return f"{name}{_AS_SHIPPED}" if self.as_shipped else name


def beside(lane: str) -> str:
    """The lane of perdure that this one is held against: on the same kind of store, and a server of one's own beside the file."""
    return f"{OURS}/postgres" if lane.removesuffix(_AS_SHIPPED).endswith("/postgres") else f"{OURS}/sqlite"


def contestant_of(lane: str) -> str:
    """Whose lane this is, by the lane's name."""
    return lane.removesuffix(_AS_SHIPPED).partition("/")[0]


def is_as_shipped(lane: str) -> bool:
    return lane.endswith(_AS_SHIPPED)


def is_ours(lane: str) -> bool:
    return contestant_of(lane) == OURS


def lanes_of(contestant: Contestant, about: dict[str, Any]) -> list[Lane]:
    """A lane for each store that it says it has, and one more for each that it also runs on as it is shipped."""
    return [
        Lane(contestant, store, as_shipped)
        for store in about["stores"]
        for as_shipped in ((False, True) if store in about.get("as_shipped", ()) else (False,))
    ]
