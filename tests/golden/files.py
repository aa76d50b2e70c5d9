"""The files of one version.

Journals as text that can be reviewed, the states that they fold to, the agents, the database.

A line of journal.jsonl is one event with exactly its stored columns. `data` is the stored text itself, so that every
byte is kept. blobs.jsonl is the same for values that were too large to be inline.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Raw, Struct
from tests.golden.lives import load_agents

from perdure.core.codec import Payload
from perdure.core.events import Event, decode_body
from perdure.core.state import AskState, CallState, ChildState, RunState
from perdure.store.api import RunRow

HERE = Path(__file__).parent
AGENTS, JOURNAL, BLOBS, EXPECTED, DATABASE = "agents.py", "journal.jsonl", "blobs.jsonl", "expected.json", "journal.db.gz"


class Line(Struct):
    """One event, as it is stored."""

    run_id: str
    seq: int
    event_id: str
    ts: int
    epoch: int
    call: int | None
    cause: int | None
    data: Raw
    hash: str

    @property
    def event(self) -> Event:
        return Event(self.seq, self.event_id, self.ts, self.epoch, self.call, self.cause, decode_body(self.data))


class Blob(Struct):
    """One blob, under the digest of its bytes."""

    digest: str
    data: Raw


class Golden:
    """The journals of one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def journals(self) -> dict[str, list[Line]]:
        """The lines of every run, in order."""
        found: dict[str, list[Line]] = {}
        for raw in (self.folder / JOURNAL).read_bytes().splitlines():
            line = msgspec.json.decode(raw, type=Line)
            found.setdefault(line.run_id, []).append(line)
        return found

    def blobs(self) -> dict[str, bytes]:
        """By digest."""
        lines = [msgspec.json.decode(line, type=Blob) for line in (self.folder / BLOBS).read_bytes().splitlines()]
        return {line.digest: bytes(line.data) for line in lines}

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, inline or from a blob."""
        inline = payload.inline
        return self.blobs()[str(payload.blob)] if inline is None else inline

    def agents(self) -> ModuleType:
        """The frozen module in the folder of the journals."""
        return load_agents(self.folder / AGENTS)

    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / EXPECTED).read_text("utf-8"))
        return found

    def database(self, to: Path) -> Path:
        """A copy of the database, to be worked on."""
        place = to / "journal.db"
        place.write_bytes(gzip.decompress((self.folder / DATABASE).read_bytes()))
        return place


def versions() -> list[Path]:
    """The folders of all versions whose journals are kept."""
    return sorted(path for path in HERE.glob("v*") if path.is_dir())


def folder_of(version: str) -> Path:
    """Version 0.2.0.dev0 makes the journals of 0.2.0."""
    return HERE / f"v{version.partition('.dev')[0].replace('.', '_')}"


# -- the state that a journal folds to --------------------------------------------------------------------------------
def projection(row: RunRow, state: RunState, load: Callable[[Payload], bytes]) -> dict[str, Any]:
    """What a version said about a run: its row, its state, its calls, approvals and children, and its usage."""

    def text(payload: Payload | None) -> str | None:
        # As text: a decoded value would hide -0.0, and the difference of 1 and true.
        return None if payload is None else load(payload).decode("utf-8")

    return {
        "row": {
            name: getattr(row, name) for name in ("agent", "version", "tenant", "actor", "status", "seq", "epoch", "crashes", "attention")
        },
        "head": row.head.hex(),
        "status": state.status,
        "waiting_for": state.waiting_for,
        "output": text(state.output),
        "failure": msgspec.to_builtins(state.failure),
        "used": msgspec.to_builtins(state.used),
        "attempts": state.attempts,
        "busy_us": state.busy_us,
        "pins": state.pins,
        "patches": sorted(state.patches),
        "calls": {str(number): _call(call, text) for number, call in state.calls.items()},
        "asks": {str(number): _ask(ask, text) for number, ask in state.asks.items()},
        "children": {str(number): _child(child, text) for number, child in state.children.items()},
    }


def _call(call: CallState, text: Callable[[Payload | None], str | None]) -> dict[str, Any]:
    plain = ("tool", "effect", "key", "digest", "phase", "attempt", "doubt", "doubtful", "resolved_by", "approval", "retry_at", "busy_us")
    return {
        **{name: getattr(call, name) for name in plain},
        "args": text(call.args),
        "result": text(call.result),
        "failure": None if call.failure is None else [call.failure.kind, call.failure.type, call.failure.message],
        "used": msgspec.to_builtins(call.used),
    }


def _ask(ask: AskState, text: Callable[[Payload | None], str | None]) -> dict[str, Any]:
    plain = {name: getattr(ask, name) for name in ("outcome", "voters", "by", "note", "digest", "edited", "escalated")}
    return {**plain, "action": ask.request.action, "input": text(ask.input), "asked": text(ask.request.input)}


def _child(child: ChildState, text: Callable[[Payload | None], str | None]) -> dict[str, Any]:
    ended = None if child.ended is None else {"status": child.ended.status, "output": text(child.ended.output)}
    return {"run_id": child.run_id, "agent": child.agent, "version": child.version, "input": text(child.input), "ended": ended}
