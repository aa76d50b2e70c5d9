"""Agents for the tests of the crash lab, each with one special property."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from perdure import Call, Outcome, Retry, Run, agent, tool
from perdure.agents.react.agent import ReAct
from perdure.models import Scripted
from perdure.models.messages import Answer, ToolUse


def add(file: str, line: str) -> int:
    """Append the line; how many there are then."""
    with open(file, "a") as log:
        log.write(f"{line}\n")
    return len(Path(file).read_text().splitlines())


# -- each wrong declaration, and its honest twin ----------------------------------------------------------------------------
@tool(effect="idempotent")
def append_twice(word: str) -> str:
    add("words", word)
    return word


@tool(effect="idempotent")
def overwrite(word: str) -> str:
    Path("word").write_text(word)
    return word


@tool(effect="keyed")
def ignores_key(word: str) -> str:
    add("words", word)
    return word


@tool(effect="keyed")
def heeds_key(word: str, call: Call) -> str:
    if not Path("keys").exists() or call.key not in Path("keys").read_text():
        add("keys", call.key)
    return word


@tool(effect="read")
def writing_read(word: str) -> str:
    add("words", word)
    return word


@tool(effect="read")
def reading_read(word: str) -> str:
    return word


@tool(effect="idempotent")
def changing_answer() -> int:
    Path("n").write_text(str(int(Path("n").read_text()) + 1 if Path("n").exists() else 1))
    return int(Path("n").read_text())


@tool
def lies_about_it(word: str) -> str:
    add("words", word)
    return word


@lies_about_it.reconcile
def _(word: str) -> Outcome:
    return Outcome.not_happened()


@tool
def looks_for_it(word: str, call: Call) -> str:
    add("words", call.key)
    return word


@looks_for_it.reconcile
def _(word: str, call: Call) -> Outcome:
    there = Path("words").exists() and call.key in Path("words").read_text()
    return Outcome.happened(word) if there else Outcome.not_happened()


@tool
def nobody_knows(word: str) -> str:
    add("words", word)
    return word


@tool(effect="idempotent")
def refuses_twice(word: str) -> str:
    os.mkdir("folder")
    return word


@tool(effect="idempotent")
def remembers(word: str) -> str:
    """Keeps it in the process alone."""
    _MEMORY.append(word)
    return word


@tool(effect="idempotent")
def writes_down() -> None:
    Path("memory").write_text(" ".join(_MEMORY))


_MEMORY: list[str] = []


@tool(effect="transaction")
def books(word: str, call: Call) -> str:
    call.connection.execute("create table if not exists bookings (word text)")
    call.connection.execute("insert into bookings values (?)", (word,))
    return word


TOOLS = {
    one.name: one
    for one in (
        *(append_twice, overwrite, ignores_key, heeds_key, writing_read, reading_read, lies_about_it, looks_for_it, nobody_knows),
        *(refuses_twice, remembers, books),
    )
}


@agent(version="1")
async def says(run: Run, which: str) -> str:
    """A `read` with its own commit, one call of that tool, and another `read`."""
    await reading_read("before")
    await asyncio.sleep(0.06)  # a wait that parks the run, and so has the read on record before the tool is called
    said = await TOOLS[which]("word")
    await writes_down()
    return said


@agent(version="1")
async def counts(run: Run) -> int:
    return await changing_answer()


# -- waits --------------------------------------------------------------------------------------------------------------------
@agent(version="1")
async def asks(run: Run) -> str:
    decision = await run.request_approval("go", {"cents": 1}, reason="over", expires=timedelta(hours=1))
    words = [await run.receive("word"), await run.receive("word")]
    await asyncio.sleep(86_400)
    return f"{decision.outcome} {words}"


@tool(effect="read", retry=Retry(attempts=3, base=5))
async def busy_at_first(call: Call) -> int:
    if call.attempt < 2:
        raise ConnectionRefusedError("busy")
    return 1


@agent(version="1")
async def child(run: Run, word: str) -> str:
    await asyncio.sleep(600)
    return await heeds_key(word)


@agent(version="1")
async def parent(run: Run) -> list[str]:
    await busy_at_first()
    return list(await asyncio.gather(child("a"), child("b")))


# -- minds --------------------------------------------------------------------------------------------------------------------
thinker = ReAct(
    "thinker",
    model=Scripted([Answer(uses=(ToolUse("t1", "heeds_key", {"word": "x"}),)), "done"]),
    tools=[heeds_key],
    version="1",
)


# -- troublemakers ------------------------------------------------------------------------------------------------------------
@tool(effect="read")
def chatters() -> str:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return sys.stdin.read()


@agent(version="1")
async def talkative(run: Run) -> str:
    return await chatters()


@tool(effect="read")
def exits() -> None:
    os._exit(3)


@agent(version="1")
async def leaves(run: Run) -> None:
    await exits()


@tool(effect="read")
def never_returns() -> None:
    time.sleep(3600)


@agent(version="1")
async def hangs(run: Run) -> None:
    await never_returns()


@tool(effect="read")
def fails() -> None:
    raise ValueError("<b>no</b>")


@agent(version="1")
async def unlucky(run: Run) -> None:
    await fails()


@agent(version="1")
async def fickle(run: Run) -> str:
    """Says something else in every process."""
    return await overwrite(f"{os.getpid()}")


@tool(effect="idempotent", isolate=True)
def apart(word: str) -> str:
    Path("apart").write_text(word)
    return word


@agent(version="1")
async def hermit(run: Run) -> str:
    return await apart("x")


@tool(effect="idempotent")
def starts_process(notes: str) -> None:
    """A child process that would sleep for long, and a note with its pid."""
    Path(notes, str(subprocess.Popen(["sleep", "300"]).pid)).touch()


@agent(version="1")
async def breeds(run: Run, notes: str) -> None:
    await starts_process(notes)


@tool(effect="read")
def shows_up() -> None:
    pass


@agent(version="1")
async def shy(run: Run) -> None:
    """Makes its second call in undisturbed runs alone: those are the first two folders."""
    await reading_read("x")
    if Path.cwd().parent.name in ("trial-00000", "trial-00001"):
        await shows_up()


@tool
async def takes_long() -> None:
    add("begun", "x")
    await asyncio.sleep(0.5)
    add("ended", "x")


@agent(version="1")
async def slow(run: Run) -> None:
    await takes_long()


@tool(effect="keyed")
def post(mailbox: str, heed: bool, call: Call) -> None:
    """Writes to a file outside of the trial's folder, with the name of the trial."""
    box = Path(mailbox, f"{Path.cwd().parent.name}.jsonl")
    if not heed or not box.exists() or call.key not in box.read_text():
        add(str(box), f'{{"key": "{call.key}"}}')


@agent(version="1")
async def posts(run: Run, mailbox: str, heed: bool) -> None:
    await post(mailbox, heed)
