"""Agents and tools that are not deterministic: what the lab may conclude about them, and what it may not."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path

from perdure import Call, Run, agent, tool


def add(file: str, line: str) -> None:
    with open(file, "a") as log:
        log.write(f"{line}\n")


# -- another number of calls each time ----------------------------------------------------------------------------------------
@tool(effect="read")
def turns(counter: str) -> int:
    """One more each time that it is asked, over all trials: as a model's answer, never the same."""
    add(counter, "asked")
    return len(Path(counter).read_text().splitlines())


@tool(effect="read")
def look(n: int) -> int:
    return n


@tool(effect="idempotent")
def jot(n: int) -> int:
    return n


@tool(effect="keyed")
def charge(order: str) -> str:
    """Ignores its key."""
    add("charges", order)
    return order


@agent(version="1")
async def wanders(run: Run, counter: str, between: str) -> str:
    await charge("o-1")
    for n in range(await turns(counter)):
        await (jot if between == "jot" else look)(n)
    return "done"


@agent(version="1")
async def charges_late(run: Run, counter: str) -> str:
    for n in range(await turns(counter)):
        await look(n)
    return await charge("o-1")


# -- files that are not the same each time --------------------------------------------------------------------------------------
def _is_known(call: Call, heeds: bool) -> bool:
    """Was exactly this call here before?

    Its key is stored beside its output, so that both kinds leave the same files.
    """
    known = Path("keys").exists() and call.key in Path("keys").read_text()
    if not known:
        add("keys", call.key)
    return known and heeds


@tool(effect="keyed")
def bill(heeds: bool, call: Call) -> str:
    """A file with a different name each time."""
    if not _is_known(call, heeds):
        Path(f"bill-{uuid.uuid4().hex}.txt").write_text(f"{call.key}\n")
    return "billed"


@tool(effect="keyed")
def enter_json(heeds: bool, call: Call) -> str:
    """An entry with a time, in a file of one line."""
    entries = json.loads(Path("sales.json").read_text()) if Path("sales.json").exists() else []
    if not _is_known(call, heeds):
        entries.append({"order": "o-1", "at": time.time()})
    Path("sales.json").write_text(json.dumps(entries))
    return "entered"


@tool(effect="keyed")
def enter_count(heeds: bool, call: Call) -> str:
    """A number and a time, in a file of one line."""
    count = json.loads(Path("count.json").read_text())["count"] if Path("count.json").exists() else 0
    Path("count.json").write_text(json.dumps({"at": time.time(), "count": count + (not _is_known(call, heeds))}))
    return "counted"


@tool(effect="keyed")
def enter_row(heeds: bool, call: Call) -> str:
    """A row with a time."""
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute("CREATE TABLE IF NOT EXISTS sales (what TEXT, at REAL)")
        if not _is_known(call, heeds):
            database.execute("INSERT INTO sales VALUES ('o-1', ?)", (time.time(),))
        database.commit()
    return "entered"


@tool(effect="keyed")
def enter_noise(heeds: bool, call: Call) -> str:
    """Something that only its owner can read."""
    if not _is_known(call, heeds):
        add("entries", "one")
    Path("noise").write_bytes(b"\0" + os.urandom(64))
    return "entered"


TOOLS = {one.name: one for one in (bill, enter_json, enter_count, enter_row, enter_noise)}


@agent(version="1")
async def enters(run: Run, name: str, heeds: bool) -> str:
    return str(await TOOLS[name](heeds))


@tool(effect="idempotent")
def save() -> str:
    """Writes atomically: if it is cut off in the middle, its temporary file stays."""
    handle, name = tempfile.mkstemp(dir=".")
    os.write(handle, b"saved\n")
    time.sleep(0.3)
    os.close(handle)
    os.replace(name, "saved")
    return "saved"


@agent(version="1")
async def saves(run: Run) -> str:
    return await save()


# -- fewer effects than undisturbed ---------------------------------------------------------------------------------------------
@tool(effect="keyed")
def mark_first(call: Call) -> str:
    """Marks the key, and acts then: cut off in between it never acts."""
    if not Path("marks").exists():
        add("marks", call.key)
        time.sleep(0.3)
        add("payments", "paid")
    return "paid"


@tool(effect="idempotent")
def open_book() -> str:
    Path("payments").write_text("opened\n")
    return "opened"


@agent(version="1")
async def marks(run: Run) -> str:
    await open_book()
    return await mark_first()


@tool(effect="idempotent")
def fails_once(call: Call) -> str:
    """Each attempt leaves a line; the first one fails."""
    add("attempts", "tried")
    if call.attempt == 1:
        raise ConnectionError("busy")
    return "done"


@agent(version="1")
async def retries(run: Run) -> str:
    return await fails_once()
