"""The contestants and their lanes: a lane is a contestant on one kind of store."""

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
    """A contestant on one kind of store: with the fastest durable settings that we know, or, as shipped, without the settings that
    are not in its documentation."""

    contestant: Contestant
    store: Store
    as_shipped: bool = False

    @property
    def name(self) -> str:
        name = self.contestant.name if self.store == "own" else f"{self.contestant.name}/{self.store}"
        return f"{name}{_AS_SHIPPED}" if self.as_shipped else name


def beside(lane: str) -> str:
    """The lane of perdure with which this one is compared: on the same kind of store; perdure's file for contestants with their own server."""
    return f"{OURS}/postgres" if lane.removesuffix(_AS_SHIPPED).endswith("/postgres") else f"{OURS}/sqlite"


def contestant_of(lane: str) -> str:
    """The contestant of a lane, from the lane's name."""
    return lane.removesuffix(_AS_SHIPPED).partition("/")[0]


def is_as_shipped(lane: str) -> bool:
    return lane.endswith(_AS_SHIPPED)


def is_ours(lane: str) -> bool:
    return contestant_of(lane) == OURS


def lanes_of(contestant: Contestant, about: dict[str, Any]) -> list[Lane]:
    """A lane for each store that the contestant has, and an additional one for each store on which it also runs as shipped."""
    return [
        Lane(contestant, store, as_shipped)
        for store in about["stores"]
        for as_shipped in ((False, True) if store in about.get("as_shipped", ()) else (False,))
    ]
