"""The agents that are measured. Their tools do nothing, so that only the cost of perdure is measured."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from perdure import ReAct, Run, agent, tool
from perdure.models import Answer, Assistant, Request, Scripted
from perdure.models.scripted import use, uses


@tool(effect="idempotent")
async def step(text: str) -> str:
    """Does nothing: its intent is durable before it begins."""
    return text


@tool(effect="read")
async def look(text: str) -> str:
    """Does nothing. As a read, it waits for no commit."""
    return text


@tool(effect="idempotent")
async def when() -> int:
    """The moment at which the effect begins, on the clock that all processes of this machine share."""
    return time.monotonic_ns()


@tool(effect="idempotent")
async def last_words() -> None:
    """Prints when it was reached, and kills its process as `kill -9` does."""
    os.write(1, f"{time.monotonic_ns()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


@tool(effect="idempotent")
async def labour(text: str) -> str:
    """Uses a millisecond of CPU time in its worker."""
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return text


class Crowd:
    """A barrier: all tasks wait here until `may_go` is set; `all_here` is set when all have arrived."""

    def __init__(self) -> None:
        self.expected = 0
        self.all_here = asyncio.Event()
        self.may_go = asyncio.Event()
        self._here = 0

    async def wait(self) -> None:
        self._here += 1
        if self._here == self.expected:
            self.all_here.set()
        await self.may_go.wait()


crowd = Crowd()


@tool(effect="idempotent")
async def meet() -> None:
    """Keeps its run in memory until all runs have arrived."""
    await crowd.wait()


# -- conversations ----------------------------------------------------------------------------------------------------
def _line(request: Request) -> Answer:
    """Each turn has 2 kB and a tool call. The prompt says how many turns there are, and the tool of the last turn."""
    turn = sum(isinstance(message, Assistant) for message in request.messages)
    turns, _, last = str(getattr(request.messages[0], "text", "")).partition(" ")
    if turn < int(turns):
        return uses(use("page", number=turn), text=f"{turn}: " + "a" * 2000)
    return uses(use(last)) if last else Answer("done")


@tool(effect="idempotent")
async def page(number: int) -> str:
    """Two kilobytes to read."""
    return f"{number}: " + "p" * 2000


talker = ReAct("talker", model=Scripted([_line] * 1000), tools=[page, last_words], max_turns=1000)


def text_of(number: int) -> str:
    """An argument of 20 characters, different for every call."""
    return f"{number:020d}"


@agent(version="1")
async def steps(run: Run, calls: int) -> int:
    for number in range(calls):
        await step(text_of(number))
    return calls


@agent(version="1")
async def labours(run: Run, calls: int) -> int:
    for number in range(calls):
        await labour(text_of(number))
    return calls


@agent(version="1")
async def looks(run: Run, calls: int) -> int:
    for number in range(calls):
        await look(text_of(number))
    return calls


@agent(version="1")
async def punctual(run: Run) -> int:
    return await when()


@agent(version="1")
async def asking(run: Run) -> int:
    await run.request_approval("bench", {"what": "anything"})
    return await when()


@agent(version="1")
async def sleeper(run: Run, due: float) -> None:
    await asyncio.sleep(due - run.now().timestamp())


@agent(version="1")
async def parent(run: Run, count: int) -> int:
    return len(await asyncio.gather(*(steps(1) for _ in range(count))))


@agent(version="1")
async def doomed(run: Run, calls: int) -> None:
    for number in range(calls):
        await step(text_of(number))
    await last_words()


@agent(version="1")
async def sociable(run: Run, calls: int) -> None:
    for number in range(calls):
        await step(text_of(number))
    await meet()


@agent(version="1")
async def patient(run: Run, steps: int) -> str:
    """So many steps, and then it waits for a word."""
    for number in range(steps):
        await step(f"{number}")
    return str(await run.receive("go"))
