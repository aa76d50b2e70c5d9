"""A web service that starts runs, shows them, and lets people decide. It drives no run: workers do.

    uvicorn --app-dir examples/service web:app
    perdure worker examples/service/agents.py

`Perdure()` has no agents here. So this process can start every run, follow it and steer it, and never drives one: not
even while it waits for a result. It can be restarted at any time, and a slow tool never slows a request down. To drive
runs in this process as well, for a small service without workers: docs/web-service.md.

README.md has the commands for curl. web_sync.py is the same service with plain `def` endpoints.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

from agents import support
from fastapi import Depends, FastAPI, Request, Response
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

from perdure import ApprovalRow, Event, Handle, Perdure
from perdure.errors import PerdureError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.people = load_people()
    async with Perdure() as app.state.perdure:  # PERDURE_URL, or perdure.toml
        yield


app = FastAPI(title="support", lifespan=lifespan)
map_errors(app)


def journal(request: Request) -> Perdure:
    opened: Perdure = request.app.state.perdure
    return opened


Journal = Annotated[Perdure, Depends(journal)]


# -- runs ---------------------------------------------------------------------------------------------------------------------
@app.post("/runs", status_code=202)
async def start(body: Start, person: Caller, perdure: Journal, response: Response) -> dict[str, Any]:
    """Start a run. It is durable when this answers; a worker drives it."""
    handle = await perdure.start(support.input(body.prompt), id=body.id, tenant=person.tenant, actor=person.name)
    response.headers["Location"] = f"/runs/{handle.id}"
    return run_view(await handle.info())


@app.get("/runs/{run_id}")
async def show(run_id: str, person: Caller, perdure: Journal) -> dict[str, Any]:
    """The run now; its result, if it has succeeded."""
    handle = perdure.handle(run_id, tenant=person.tenant)
    info = await handle.info()
    return run_view(info, await handle.result() if info.status == "succeeded" else None)


@app.post("/runs/{run_id}/messages", status_code=202)
async def tell(run_id: str, body: Message, person: Caller, perdure: Journal) -> dict[str, Any]:
    """A follow-up message: the model gets it with its next request, also if no worker is up right now."""
    await perdure.signal(run_id, "message", body.text, key=body.key, by=person.name, tenant=person.tenant)
    return run_view(await perdure.handle(run_id, tenant=person.tenant).info())


@app.get("/runs/{run_id}/events")
async def events(run_id: str, person: Caller, perdure: Journal, last_event_id: LastEventId = 0) -> Response:
    """The events of the run as they happen, as server-sent events, until the run has ended."""
    handle = perdure.handle(run_id, tenant=person.tenant)
    info = await handle.info()  # 404 before the stream begins: a stream has no way to say it
    check_place(info, last_event_id)
    if info.finished and last_event_id == info.seq:
        return Response(status_code=204)  # nothing more will come: a browser does not connect again after 204
    return EventStream(frames(handle, last_event_id))


async def frames(handle: Handle, after: int) -> AsyncIterator[str]:
    following = cast("AsyncGenerator[Event, None]", handle.follow(after))
    reading: asyncio.Future[Event | None] | None = None
    try:
        yield RECONNECT
        while True:
            # The same read goes on over several keep-alives: a time-out inside the generator would end it.
            reading = reading or asyncio.ensure_future(anext(following, None))
            if not (await asyncio.wait([reading], timeout=KEEP_ALIVE_S))[0]:
                yield KEEP_ALIVE
                continue
            event, reading = reading.result(), None
            if event is None:
                yield end_frame(await handle.status())
                return
            yield frame(event)
    except PerdureError as error:
        log.error("the events of run %s: %s", handle.id, error.in_full())  # the stream ends without `end`, so the client connects again
    finally:
        # The client has gone, or the run has ended. A generator cannot be closed while a read is under way in it; a read that
        # is cancelled ends it.
        if reading is not None:
            reading.cancel()
        else:
            await following.aclose()


# -- approvals ----------------------------------------------------------------------------------------------------------------
@app.get("/approvals")
async def approvals(person: Caller, perdure: Journal) -> list[dict[str, Any]]:
    """What waits for a decision, among the runs of the person's tenant."""
    return [await shown(perdure, row) for row in await perdure.approvals(tenant=person.tenant)]


@app.post("/approvals/{approval}/approve")
async def approve(approval: str, body: Approve, person: Caller, perdure: Journal, request: Request) -> dict[str, Any]:
    row = await perdure.approve(
        approval,
        by=person.name,  # from the login: a body has no name
        roles=person.roles,
        tenant=person.tenant,
        digest=body.digest,
        note=body.note,
        edit=body.edit,
        source=source(request),
    )
    return await shown(perdure, row)


@app.post("/approvals/{approval}/reject")
async def reject(approval: str, body: Reject, person: Caller, perdure: Journal, request: Request) -> dict[str, Any]:
    row = await perdure.reject(
        approval,
        by=person.name,
        roles=person.roles,
        tenant=person.tenant,
        digest=body.digest,
        reason=body.reason,
        source=source(request),
    )
    return await shown(perdure, row)


async def shown(perdure: Perdure, row: ApprovalRow) -> dict[str, Any]:
    # A long input is stored as a blob. The person must see all of it.
    return approval_view(row, json.loads(await perdure.ask(lambda: perdure.load(row.standing.request.input))))


def source(request: Request) -> str:
    return f"web {request.client.host}" if request.client else "web"


# -- health -------------------------------------------------------------------------------------------------------------------
@app.get("/health/live")
async def live() -> dict[str, bool]:
    """This process answers. It says nothing about the database: a restart would not repair it."""
    return {"ok": True}


@app.get("/health/ready")
async def ready(perdure: Journal) -> dict[str, bool]:
    """The database answers, too; otherwise 503."""
    await perdure.health(timeout=3)
    return {"ok": True}
