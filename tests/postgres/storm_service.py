"""The service that the storm's tools use: a separate process without faults, whose file says what really happened.

One request is one line of JSON, and so is its answer. Each effect is appended and synced before the answer. A request
may have a deadline: the service refuses it if it arrives later. So if a caller finds nothing after the deadline,
nothing will arrive any more.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from perdure import Call, NotSent

VARIABLE = "STORM_FOLDER"  # where the service of this process's storm has its files
Fact = Literal["effect", "dropped", "late"]


def serve(folder: str) -> None:
    """Answer until killed."""
    asyncio.run(_Service(Path(folder)).serve())


class _Service:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._known: set[str] = set()

    async def serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        (self._folder / "port.new").write_text(str(server.sockets[0].getsockname()[1]))
        os.replace(self._folder / "port.new", self._folder / "port")
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if line.endswith(b"\n"):  # a client that died while it sent has requested nothing
                writer.write(json.dumps(self._do(json.loads(line))).encode() + b"\n")
                await writer.drain()
        except OSError:
            pass  # the effect has happened, and the client is gone: a storm must test this
        finally:
            writer.close()

    def _do(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "find":
            return {"found": asked["key"] in self._known}
        fact: Fact = "effect"
        if asked["until"] is not None and time.time() > asked["until"]:
            fact = "late"
        elif asked["drops"] and asked["key"] in self._known:
            fact = "dropped"
        else:
            self._known.add(asked["key"])
        os.write(self._file, (json.dumps({"fact": fact, **asked}) + "\n").encode())
        os.fsync(self._file)
        return {"fact": fact}


# -- whoever asks -------------------------------------------------------------------------------------------------------------
async def perform(what: str, call: Call, *, drops: bool = False) -> str:
    """Have it done. With `drops` the service drops a request whose key it knows."""
    until = None if call.deadline is None else call.deadline.timestamp()
    told = {"what": what, "key": call.key, "run": call.run_id, "number": call.number, "attempt": call.attempt, "pid": os.getpid()}
    answer = await _ask({"do": "perform", "drops": drops, "until": until, **told})
    if answer["fact"] == "late":
        raise NotSent("the service has refused it: it came too late")
    return f"{what} done"


async def find(key: str) -> bool:
    """Whether a request with this key has been carried out."""
    return bool((await _ask({"do": "find", "key": key}))["found"])


async def _ask(request: dict[str, Any]) -> dict[str, Any]:
    port = int((Path(os.environ[VARIABLE]) / "port").read_text())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
    finally:
        writer.close()
    return answer


def facts(folder: Path) -> Iterator[dict[str, Any]]:
    """Everything that was asked of the service, in order."""
    with (folder / "ledger").open() as lines:
        yield from map(json.loads, lines)
