"""What goes over the wire, for both web programs: bodies of requests, what a client sees, errors, event streams.

A journal holds prompts, arguments, paths of files and names of machines. So this file lists what a client sees, instead
of passing records on as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, cast

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Send

from perdure import ApprovalRow, Event, RunInfo
from perdure.errors import AlreadyRunning, Conflict, InvalidInput, NotFound, NotPermitted, PerdureError, StoreUnavailable

log = logging.getLogger("service")
KEEP_ALIVE_S = 10.0  # proxies close a connection that is silent for longer, often after 60 s


# -- requests -----------------------------------------------------------------------------------------------------------------
class Body(BaseModel):
    # A field that is not known is refused. So a client that sends `by` learns that the name comes from the login.
    model_config = ConfigDict(extra="forbid")


class Start(Body):
    prompt: str = Field(min_length=1, max_length=10_000)
    # With an id of its own a client can send the same request again after a lost answer, and gets the same run.
    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class Message(Body):
    text: str = Field(min_length=1, max_length=10_000)
    key: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")  # the same key: the same message


class Approve(Body):
    digest: str  # of what the person has seen: GET /approvals
    note: str | None = None
    edit: dict[str, Any] | None = None


class Reject(Body):
    digest: str
    reason: str = Field(min_length=1)


LastEventId = Annotated[int, Header(alias="Last-Event-ID", ge=0, lt=1 << 32)]


# -- answers ------------------------------------------------------------------------------------------------------------------
def run_view(info: RunInfo, result: Any = None) -> dict[str, Any]:
    """A run as a client sees it. The text of an error stays inside: it can hold anything, and `perdure why` shows it."""
    return {
        "id": info.id,
        "status": info.status,
        "finished": info.finished,
        "said": info.said,
        "waiting_for": info.waiting_for,
        "attention": info.attention,
        "started_by": info.actor,
        "created": info.created.isoformat(),
        "updated": info.updated.isoformat(),
        "seq": info.seq,
        "result": result,
    }


def approval_view(row: ApprovalRow, proposed: Any) -> dict[str, Any]:
    return {
        "id": row.approval,
        "run": row.run_id,
        "status": row.status,
        "action": row.action,
        "proposed": proposed,
        "digest": row.standing.request.digest,
        "reason": row.reason,
        "asked_for": row.actor,
        "deciders": row.by,
        "editable": row.editable,
        "agreed": row.voters,
        "expires": None if row.expires_at is None else row.expires_at.isoformat(),
    }


# The fields of each event that a client sees. Every event is sent, also if none of its fields is, so that no seq is missing.
SHOWN: dict[str, tuple[str, ...]] = {
    "approval_decided": ("approval", "granted", "by", "note"),
    "approval_expired": ("approval",),
    "approval_requested": ("approval", "action"),
    "attention_needed": ("reason",),
    "cancel_requested": ("by", "reason"),
    "run_paused": ("by", "reason"),
    "run_released": ("status", "waiting_for"),
    "run_unpaused": ("by",),
    "signal_received": ("topic", "by"),
    "status_reported": ("text",),
    "tool_call_initiated": ("tool", "attempt"),
    "tool_call_proposed": ("tool",),
}


# -- errors -------------------------------------------------------------------------------------------------------------------
# The first class that fits counts. `str(error)` names no database, no host and no command, so a client may read it.
STATUSES: list[tuple[type[PerdureError], int]] = [
    (NotFound, 404),
    (NotPermitted, 403),
    (Conflict, 409),
    (AlreadyRunning, 409),
    (InvalidInput, 422),
    (StoreUnavailable, 503),
]


async def _answer(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PerdureError)
    code = next((code for kind, code in STATUSES if isinstance(error, kind)), 500)
    if code < 500:
        return JSONResponse({"detail": str(error)}, code)
    log.error("%s: %s", type(error).__name__, error.in_full())  # with the host, for the people who operate this
    said = "the database does not answer; try again" if code == 503 else "the service has failed"
    return JSONResponse({"detail": said}, code, {"Retry-After": "1"} if code == 503 else None)


def map_errors(app: FastAPI) -> None:
    """Every error of perdure is an answer with a proper status."""
    app.add_exception_handler(PerdureError, _answer)


# -- server-sent events -------------------------------------------------------------------------------------------------------
RECONNECT = "retry: 1000\n\n"  # a browser connects again after a second, with the id of the last event that it has received
KEEP_ALIVE = ": still here\n\n"


def frame(event: Event) -> str:
    """An event as a frame. Its id is the seq, which the client sends back as Last-Event-ID."""
    seen = {name: getattr(event.body, name) for name in SHOWN.get(event.type, ())}
    at = datetime.fromtimestamp(event.ts / 1e6, UTC).isoformat()
    return f"id: {event.seq}\ndata: {json.dumps({'seq': event.seq, 'type': event.type, 'at': at, 'call': event.call, **seen})}\n\n"


def end_frame(status: str) -> str:
    """The last frame of a run that has ended. A client closes the connection now, or it would connect again."""
    return f"event: end\ndata: {json.dumps({'status': status})}\n\n"


def check_place(info: RunInfo, after: int) -> None:
    """Raise InvalidInput for a Last-Event-ID that this run has never sent: the client would wait for ever."""
    if after > info.seq:
        raise InvalidInput(f"Last-Event-ID {after}: run {info.id} has events 1 to {info.seq}")


class EventStream(StreamingResponse):
    """Server-sent events from an async generator, which is closed at once when the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[str]) -> None:
        # X-Accel-Buffering: nginx would otherwise collect events before it sends them.
        super().__init__(frames, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        # Without this a generator that is interrupted inside `send` would be closed by the garbage collector, later.
        async with aclosing(cast("Any", self.body_iterator)):
            await super().stream_response(send)
