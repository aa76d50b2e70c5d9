"""The service of web.py with plain `def` endpoints and `perdure.sync`: for code bases without asyncio.

    uvicorn --app-dir examples/service web_sync:app
    perdure worker examples/service/agents.py

FastAPI calls a `def` endpoint in one of 40 threads. `perdure.sync` may be used from any of them. As in web.py, this
process drives no run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from agents import support
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from login import Caller, load_people
from wire import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    RECONNECT,
    Approve,
    EventStream,
    LastEventId,
    Message,
    Reject,
    Start,
    approval_view,
    check_place,
    end_frame,
    frame,
    log,
    map_errors,
    run_view,
)

from perdure import ApprovalRow, Event, RunInfo
from perdure.errors import PerdureError
from perdure.sync import Handle, Perdure

POLL_S = 0.5


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.people = load_people()
    with Perdure() as app.state.perdure:  # PERDURE_URL, or perdure.toml
        yield


app = FastAPI(title="support", lifespan=lifespan)
map_errors(app)


def journal(request: Request) -> Perdure:
    opened: Perdure = request.app.state.perdure
    return opened


Journal = Annotated[Perdure, Depends(journal)]


# -- runs ---------------------------------------------------------------------------------------------------------------------
@app.post("/runs", status_code=202)
def start(body: Start, person: Caller, perdure: Journal, response: Response) -> dict[str, Any]:
    """Start a run. It is durable when this answers; a worker drives it."""
    handle = perdure.start(support.input(body.prompt), id=body.id, tenant=person.tenant, actor=person.name)
    response.headers["Location"] = f"/runs/{handle.id}"
    return run_view(handle.info())


@app.get("/runs/{run_id}")
def show(run_id: str, person: Caller, perdure: Journal) -> dict[str, Any]:
    """The run now; its result, if it has succeeded."""
    handle = perdure.handle(run_id, tenant=person.tenant)
    info = handle.info()
    return run_view(info, handle.result() if info.status == "succeeded" else None)


@app.post("/runs/{run_id}/messages", status_code=202)
def tell(run_id: str, body: Message, person: Caller, perdure: Journal) -> dict[str, Any]:
    """A follow-up message: the model gets it with its next request, also if no worker is up right now."""
    perdure.signal(run_id, "message", body.text, key=body.key, by=person.name, tenant=person.tenant)
    return run_view(perdure.handle(run_id, tenant=person.tenant).info())


@app.get("/runs/{run_id}/events")
def events(run_id: str, person: Caller, perdure: Journal, last_event_id: LastEventId = 0) -> Response:
    """The events of the run as they happen, as server-sent events, until the run has ended."""
    handle = perdure.handle(run_id, tenant=person.tenant)
    info = handle.info()  # 404 before the stream begins: a stream has no way to say it
    check_place(info, last_event_id)
    if info.finished and last_event_id == info.seq:
        return Response(status_code=204)  # nothing more will come: a browser does not connect again after 204
    return EventStream(frames(handle, last_event_id))


async def frames(handle: Handle, after: int) -> AsyncIterator[str]:
    # Not `handle.follow()`: it would keep one of the 40 threads for as long as the client stays, and the thread could not
    # be interrupted when the client has gone. A look takes a thread for milliseconds.
    def look() -> tuple[RunInfo, list[Event]]:
        return handle.info(), handle.events(after)  # in this order: if the run has ended, all its events are here

    said = time.monotonic()
    try:
        yield RECONNECT
        while True:
            info, new = await run_in_threadpool(look)
            for event in new:
                after, said = event.seq, time.monotonic()
                yield frame(event)
            if info.finished:
                yield end_frame(info.status)
                return
            await asyncio.sleep(POLL_S)
            if time.monotonic() - said > KEEP_ALIVE_S:
                said = time.monotonic()
                yield KEEP_ALIVE
    except PerdureError as error:
        log.error("the events of run %s: %s", handle.id, error.in_full())  # the stream ends without `end`, so the client connects again


# -- approvals ----------------------------------------------------------------------------------------------------------------
@app.get("/approvals")
def approvals(person: Caller, perdure: Journal) -> list[dict[str, Any]]:
    """What waits for a decision, among the runs of the person's tenant."""
    return [shown(perdure, row) for row in perdure.approvals(tenant=person.tenant)]


@app.post("/approvals/{approval}/approve")
def approve(approval: str, body: Approve, person: Caller, perdure: Journal, request: Request) -> dict[str, Any]:
    row = perdure.approve(
        approval,
        by=person.name,  # from the login: a body has no name
        roles=person.roles,
        tenant=person.tenant,
        digest=body.digest,
        note=body.note,
        edit=body.edit,
        source=source(request),
    )
    return shown(perdure, row)


@app.post("/approvals/{approval}/reject")
def reject(approval: str, body: Reject, person: Caller, perdure: Journal, request: Request) -> dict[str, Any]:
    row = perdure.reject(
        approval,
        by=person.name,
        roles=person.roles,
        tenant=person.tenant,
        digest=body.digest,
        reason=body.reason,
        source=source(request),
    )
    return shown(perdure, row)


def shown(perdure: Perdure, row: ApprovalRow) -> dict[str, Any]:
    proposed = row.standing.request.input
    # A long input is stored as a blob. The person must see all of it.
    inline = proposed.inline
    return approval_view(row, json.loads(perdure.reading.blob(str(proposed.blob)) if inline is None else inline))


def source(request: Request) -> str:
    return f"web {request.client.host}" if request.client else "web"


# -- health -------------------------------------------------------------------------------------------------------------------
@app.get("/health/live")
def live() -> dict[str, bool]:
    """This process answers. It says nothing about the database: a restart would not repair it."""
    return {"ok": True}


@app.get("/health/ready")
def ready(perdure: Journal) -> dict[str, bool]:
    """The database answers, too; otherwise 503."""
    perdure.health(timeout=3)
    return {"ok": True}
