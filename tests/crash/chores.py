"""Slow and badly behaved agents and tools, for faults that must hit a process in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from tests.crash import paid
from tests.crash.ledger import Ledger

from perdure import Call, NotSent, Outcome, Retry, Run, Tool, ToolFailed, agent, tool

AT_ONCE = Retry(attempts=3, base=0.01, jitter=0)


async def _work(what: str, seconds: float, call: Call, *, by_key: bool = False) -> str:
    ledger = Ledger.here()
    ledger.note("begun", what, call)
    try:
        await asyncio.sleep(seconds)
        receipt = ledger.perform(what, call, by_key=by_key)
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        ledger.note("cancelled", what, call)
        raise
    return receipt


@tool(effect="keyed")
async def work(what: str, seconds: float, call: Call) -> str:
    return await _work(what, seconds, call, by_key=True)


@tool
async def deed(what: str, seconds: float, call: Call) -> str:
    return await _work(what, seconds, call)


@tool(effect="idempotent")
async def step(what: str, seconds: float, call: Call) -> str:
    return await _work(what, seconds, call)


@tool(effect="keyed", retry=Retry(attempts=2, base=60))
async def refuse(what: str, seconds: float) -> str:
    """Says that nothing was sent: the next attempt is a minute away."""
    raise NotSent("not now")


@tool(effect="transaction")
def book(what: str, seconds: float, call: Call) -> str:
    call.connection.execute(paid.MAKE)
    call.connection.execute(paid.WRITE, (what, call.run_id, call.number, call.attempt))
    return f"{what} done"


NOTHINGS = [0, "", False, None, [], {}]


@tool(effect="keyed")
async def nothing(what: str, seconds: float, call: Call) -> Any:
    """Returns something that is false."""
    Ledger.here().perform(what, call, by_key=True)
    return NOTHINGS[int(what)]


@tool(effect="idempotent", retry=AT_ONCE)
async def odd(what: str, seconds: float, call: Call) -> Any:
    """Returns something that no journal can hold."""
    Ledger.here().perform(what, call)
    return object()


@tool
async def block(what: str, seconds: float, call: Call) -> str:
    """An async tool that blocks the loop of its worker."""
    Ledger.here().note("begun", what, call)
    time.sleep(seconds)
    return Ledger.here().perform(what, call)


@tool(effect="idempotent")
async def poison(what: str, seconds: float, call: Call) -> str:
    """Kills whoever performs it."""
    Ledger.here().note("begun", what, call)
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(60)
    return ""


@tool(effect="idempotent")
def leave(what: str, seconds: float, call: Call) -> str:
    """Ends its worker's process, the first time that it is called."""
    Ledger.here().note("begun", what, call)
    if len(Ledger.here().lines("begun", call.run_id)) == 1:
        os._exit(7)
    return Ledger.here().perform(what, call)


@tool(effect="idempotent")
def breed(what: str, seconds: float, call: Call) -> str:
    """Forks a child that lives on with everything that its parent had open."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    Ledger.here().note("child", what, call, child=child)
    time.sleep(min(seconds, 0.2))
    return Ledger.here().perform(what, call)


@tool(effect="keyed")
def orphan(what: str, seconds: float, call: Call) -> str:
    """Starts a program that goes on after its worker's death, and waits for it."""
    program = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    Ledger.here().note("child", what, call, child=program.pid)
    if call.attempt == 1:
        program.wait()
    return Ledger.here().perform(what, call, by_key=True)


@tool(effect="idempotent", isolate=True)
def family(what: str, seconds: float, call: Call) -> str:
    """Starts a program inside its own process, and waits for it; the second attempt is content without."""
    ledger = Ledger.here()
    if call.attempt == 1:
        program = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        ledger.note("child", what, call, child=program.pid)
        program.wait()
    return ledger.perform(what, call)


@tool(effect="idempotent", isolate=True, retry=AT_ONCE)
def segfault(what: str, seconds: float, call: Call) -> str:
    """Dies by a signal in its own process, twice."""
    Ledger.here().note("begun", what, call)
    if call.attempt < 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    return Ledger.here().perform(what, call)


@tool(isolate=True)
def segfault_once(what: str, seconds: float, call: Call) -> str:
    """The same, and it may not be repeated."""
    Ledger.here().perform(what, call)
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


PARTS = 2_000  # more than an attempt of a test can upload before it is killed


async def _upload(what: str, seconds: float, call: Call) -> str:
    """Uploads parts: the first attempt never ends, the next one only the part at which it begins."""
    begins_at = call.last_progress["part"] if call.last_progress is not None else 0
    Ledger.here().note("begun", what, call, part=begins_at)
    for part in range(begins_at, PARTS if call.attempt == 1 else begins_at + 1):
        await asyncio.sleep(seconds)
        call.heartbeat({"part": part + 1})
    return f"from part {begins_at}"


upload_again = tool(effect="idempotent", name="upload_again")(_upload)
upload_keyed = tool(effect="keyed", name="upload_keyed")(_upload)
upload_once = tool(effect="once", name="upload_once")(_upload)


@upload_once.reconcile
async def _(what: str, seconds: float, call: Call) -> Outcome:
    """Finds nothing, and records what it was given."""
    Ledger.here().note("asked", what, call, part=None if call.last_progress is None else call.last_progress["part"])
    return Outcome.unknown("the service has a part of it")


@tool(effect="idempotent")
async def upload_long(what: str, attempts: int, call: Call) -> str:
    """Uploads parts from where the last attempt stopped; only the last attempt reaches the end."""
    begins_at = call.last_progress["part"] if call.last_progress is not None else 0
    Ledger.here().note("begun", what, call, part=begins_at)
    for part in range(begins_at, PARTS if call.attempt < attempts else begins_at + 1):
        await asyncio.sleep(0.01)
        call.heartbeat({"part": part + 1})
    return f"from part {begins_at}"


@tool(effect="idempotent")
async def upload_deadly(what: str, part: int, call: Call) -> str:
    """Reaches the same part each time, and then kills its worker."""
    Ledger.here().note("begun", what, call)
    call.heartbeat({"part": part})
    await asyncio.sleep(0.5)  # ten times `progress_s`: the part is stored
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


TOOLS: dict[str, Tool[..., Any]] = {
    found.name: found
    for found in (
        *(work, deed, step, refuse, book, nothing, odd, block, poison, leave, breed, orphan, family, segfault, segfault_once),
        *(upload_again, upload_keyed, upload_once, upload_long, upload_deadly),
    )
}


@agent(version="1")
async def chores(run: Run, todo: list[list[Any]]) -> list[Any]:
    """Makes the calls [tool, what, seconds] one after the other; calls in an inner list at the same time."""
    done: list[Any] = []
    for entry in todo:
        together = entry if isinstance(entry[0], list) else [entry]
        try:
            done += await asyncio.gather(*(TOOLS[name](what, seconds) for name, what, seconds in together))
        except ToolFailed as failed:
            done.append(f"failed: {failed.kind}")
    return done


@agent(version="1")
async def sleeper(run: Run, seconds: float) -> str:
    """Waits, then does one thing."""
    await asyncio.sleep(seconds)
    return await work("woken", 0)


@agent(version="1")
async def asker(run: Run, seconds: float) -> str:
    """Asks a question whose time is soon over, then does one thing."""
    await run.request_approval("go", expires=seconds)
    return await work("woken", 0)


@agent(version="1")
async def hasty(run: Run) -> str:
    """Ends while one of its calls waits for another attempt, and then makes a last call."""

    async def aside() -> None:
        try:
            await refuse("aside", 0)
        finally:
            run.note("the aside was ended")

    task = asyncio.create_task(aside())
    await work("first", 0)
    await work("second", 0)
    return f"done: {task.done()}"


@agent(version="1")
async def racing(run: Run) -> list[str]:
    """Its next call depends on which of its calls ends first."""
    done = [await work(f"after {await ended}", 0) for ended in asyncio.as_completed([work("slow", 0.1), work("fast", 0)])]
    return [*done, await work("last", 1.0)]  # long enough to be killed inside, however slow the machine is


@agent(version="1")
async def fickle(run: Run) -> str:
    """Not deterministic: it does what the environment variable says."""
    await work(os.environ["CRASH_WORD"], 0)
    return await work("last", 0)
