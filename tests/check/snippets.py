"""Agents that break replay, each with an innocent twin that does the same thing correctly.

The tests check these agents as text, and also run them. Each text is the body of an agent; code that must be outside
of the agent is above it. All agents together make one program, so that two processes can record and replay all of
them: `python truth.py record DB` and `python truth.py replay DB`. The second process has another hash seed, another
environment, another file and no memory of the first.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

HEADER = """
from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import random
import secrets
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from perdure import Call, Run, agent, tool


@tool(effect="read")
async def echo(what: str) -> str:
    return what

"""

DRIVER = """

AGENTS = [value for name, value in list(globals().items()) if name.startswith(("guilty_", "innocent_"))]


def main() -> None:
    import json
    import sys

    from perdure.core.machine import Facts
    from perdure.inspect.replay import compare
    from perdure.inspect.view import loader, read_run
    from perdure.store.open import open_store
    from perdure.engine.local.sandbox import guard

    async def record() -> None:
        from perdure import Perdure, RunFailed

        async with Perdure(f"sqlite:///{sys.argv[2]}", agents=AGENTS) as app:
            for one in AGENTS:
                for time_ in ("first", "second"):  # the second begins with what the first has left behind
                    try:
                        await app.run(one, id=f"{one.name}-{time_}")
                    except RunFailed as failed:
                        print(json.dumps([one.name, "refused", str(failed)]))

    if sys.argv[1] == "record":
        asyncio.run(record())
        return
    guard()
    store = open_store(f"sqlite:///{sys.argv[2]}")
    load = loader(store)
    for one in AGENTS:
        run_id = f"{one.name}-second"
        reading = read_run(store, run_id)

        def make(state):
            return one.machine(Facts(run_id, "default", None, one.name, one.version), load(state.created.input), 10_000)

        found = compare(run_id, reading.events, reading.state, make, load)
        print(json.dumps([one.name, "same" if found.same else "different", "" if found.same else found.difference]))
    store.close()


if __name__ == "__main__":
    main()
"""


class Pair(NamedTuple):
    """A guilty agent and its innocent twin, as the bodies of two functions."""

    rule: str
    name: str
    guilty: str
    innocent: str
    above: str = ""


PAIRS = [
    Pair("clock", "wall_clock", "await echo(str(time.time_ns()))", "await echo(run.now().isoformat())"),
    Pair(
        "clock",
        "datetime_in_a_helper",
        "await echo(stamp())",
        "await echo(stamp_of(run))",
        "def stamp():\n    return inner_stamp()\n\ndef inner_stamp():\n    return datetime.datetime.now().isoformat()\n\n"
        "def stamp_of(run):\n    return run.now().isoformat()",
    ),
    Pair("clock", "monotonic_by_another_name", "tick = time.perf_counter_ns\nawait echo(str(tick()))", "await echo(str(asyncio.get_running_loop().time()))"),
    Pair(
        "clock",
        "taken_when_loaded",
        "await echo(str(STARTED))",
        "await echo(str(LIMIT))",
        "STARTED = time.time_ns()\nLIMIT = datetime.timedelta(seconds=4)",
    ),
    Pair(
        "clock",
        "made_with_every_object",
        "await echo(Order().at.isoformat())",
        "await echo(Note().text)",
        "@dataclass\nclass Order:\n    at: datetime.datetime = field(default_factory=datetime.datetime.now)\n\n"
        "@dataclass\nclass Note:\n    text: str = field(default_factory=str)",
    ),
    Pair("random", "dice", "await echo(str(random.random()))", "await echo(str(run.random.random()))"),
    Pair("random", "unique", "await echo(str(uuid.uuid4()))", "await echo(str(run.uuid()) + str(uuid.uuid5(uuid.NAMESPACE_URL, 'x')))"),
    Pair("random", "secret", "await echo(secrets.token_hex(8))", "await echo(hashlib.sha256(b'x').hexdigest())"),
    Pair("random", "hash_of_text", "await echo(str(hash('text')))", "await echo(str(hash(7)))"),
    Pair("random", "without_a_seed", "await echo(str(random.Random().random()))", "await echo(str(random.Random(7).random()))"),
    Pair("random", "shared_generator", "await echo(str(RNG.random()))", "rng = random.Random(7)\nawait echo(str(rng.random()))", "RNG = random.Random(7)"),
    Pair("io", "reads_a_file", "await echo(open('world.txt').read())", "await echo(await read_world())",
         '@tool(effect="read")\ndef read_world() -> str:\n    return open("world.txt").read()'),
    Pair("io", "reads_a_path", "await echo((FOLDER / 'world.txt').read_text())", "await echo(str(FOLDER / 'world.txt'))", "FOLDER = Path('.')"),
    Pair("io", "writes_a_file", "Path('mine.txt').write_text('x')\nawait echo('x')", "await echo(Path('mine.txt').name)"),
    Pair("io", "environment", "await echo(os.environ['WORLD'])", "await echo(WORD)", "WORD = 'a word'"),
    Pair("io", "network", "socket.create_connection(('127.0.0.1', 9))", "await echo(str(socket.AF_INET))"),
    Pair("io", "process", "subprocess.run(['true'])", "await echo(subprocess.list2cmdline(['true']))"),
    Pair("io", "plain_function_of_a_tool", "await echo(look_outside.fn())", "await echo(await look_outside())",
         '@tool(effect="read")\ndef look_outside() -> str:\n    return open("world.txt").read()'),
    Pair("io", "uses_the_app", "await SHOP.signal('r', 'topic')", "await echo(await asked())",
         "from perdure import Perdure\n\nSHOP = Perdure('sqlite://')\n\n"
         '@tool(effect="read")\nasync def asked() -> str:\n    async with Perdure("sqlite://") as app:\n        return str(len(await app.approvals()))'),
    Pair("global", "counter", "global COUNT\nCOUNT += 1\nawait echo(str(COUNT))", "count = 0\ncount += 1\nawait echo(str(count))", "COUNT = 0"),
    Pair("global", "list_of_the_module", "SEEN.append('x')\nawait echo(str(len(SEEN)))", "seen = []\nseen.append('x')\nawait echo(str(len(seen)))", "SEEN: list[str] = []"),
    Pair("global", "class_attribute", "Totals.runs += 1\nawait echo(str(Totals.runs))", "own = Own()\nown.runs += 1\nawait echo(str(own.runs))",
         "class Totals:\n    runs = 0\n\nclass Own:\n    runs = 0"),
    Pair("global", "what_a_tool_changes", "await put('x')\nawait echo(str(len(KEPT)))", "await echo(str(await put('x')))",
         'KEPT: list[str] = []\n\n@tool(effect="idempotent")\nasync def put(what: str) -> int:\n    KEPT.append(what)\n    return len(KEPT)'),
    Pair("global", "mutable_default", "await echo(str(len(remember('x'))))", "await echo(str(len(forget('x'))))",
         "def remember(what, seen=[]):\n    seen.append(what)\n    return seen\n\ndef forget(what, seen=None):\n    seen = [] if seen is None else seen\n"
         "    seen.append(what)\n    return seen"),
    Pair("global", "numbers_that_go_on", "await echo(str(next(NUMBERS)))", "numbers = itertools.count()\nawait echo(str(next(numbers)))", "NUMBERS = itertools.count()"),
    Pair("global", "event_of_the_module", "if not DONE.is_set():\n    await echo('not yet')\nDONE.set()\nawait echo('done')",
         "done = asyncio.Event()\nif not done.is_set():\n    await echo('not yet')\ndone.set()", "DONE = asyncio.Event()"),
    Pair("thread", "executor", "await asyncio.to_thread(len, 'x')", "await asyncio.gather(echo('x'), echo('y'))"),
    Pair("thread", "own_loop", "loop = asyncio.get_running_loop()\nloop.run_until_complete(echo('x'))", "task = asyncio.create_task(echo('x'))\nawait task"),
    Pair("order", "walks_a_set", "for word in WORDS:\n    await echo(word)", "for word in sorted(WORDS):\n    await echo(word)", "WORDS = set('one two three four five six seven eight'.split())"),
    Pair("order", "gathers_over_a_set", "await asyncio.gather(*(echo(word) for word in set(LIST)))", "await asyncio.gather(*(echo(word) for word in dict.fromkeys(LIST)))",
         "LIST = 'one two three four five six seven eight'.split()"),
    Pair("order", "difference_of_keys", "for word in A.keys() - B.keys():\n    await echo(word)", "for word in A:\n    if word not in B:\n        await echo(word)",
         "A = dict.fromkeys('one two three four five six seven eight'.split())\nB = {'two': 2}"),
    Pair("order", "filled_by_an_operator", "seen = set()\nseen |= {'one', 'two', 'three', 'four', 'five', 'six'}\nfor word in seen:\n    await echo(word)",
         "seen = set()\nseen |= {1, 2, 3, 4, 5, 6}\nfor number in seen:\n    await echo(str(number))"),
    Pair("order", "text_of_a_set", "await echo(f'{set(LINE)}')", "await echo(f'{sorted(set(LINE))} {len(set(LINE))}')", "LINE = 'one two three four five six'.split()"),
    Pair("order", "as_completed_of_a_set", "for one in asyncio.as_completed({echo(word) for word in 'abc'}):\n    await one",
         "for one in asyncio.as_completed([echo(word) for word in 'abc']):\n    await one"),
]  # fmt: skip


def program() -> str:
    """All of them as one file."""
    parts = [HEADER]
    for pair in PAIRS:
        parts.append(f"{pair.above}\n")
        for role, body in (("guilty", pair.guilty), ("innocent", pair.innocent)):
            parts.append(
                f'\n@agent(version="1")\nasync def {role}_{pair.name}(run: Run) -> str:\n{textwrap.indent(body, "    ")}\n    return "done"\n'
            )
    return "\n".join((*parts, DRIVER))


def alone(body: str, above: str = "") -> str:
    """One agent, to be checked as text."""
    return f'{HEADER}\n{above}\n\n@agent(version="1")\nasync def one(run: Run):\n{textwrap.indent(body, "    ")}\n'
