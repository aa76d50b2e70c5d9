"""A stdio MCP server as a transport: its process ends with the worker, and what it writes to stderr is in the log `perdure.mcp`.

How the process ended and what it said last is kept: a connection that has closed says nothing about the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.core.invisible import escaped
from perdure.errors import NotReady
from perdure.integrations import mcp_launcher
from perdure.integrations.mcp_secrets import redacted

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

log = logging.getLogger("perdure.mcp")
MAX_LINE_CHARS = 1_000
MAX_LAST_CHARS = 300  # of what it said last, in an error
_MAX_PENDING_BYTES = 64 * 1024
_LAST_LINES = 3
_REPORT_S = 1.0  # between the end of its output and the word about its end


class Ending:
    """How the process behind a connection ended, in words for an error."""

    def __init__(self, program: str) -> None:
        self._program = printable(program, MAX_LAST_CHARS)
        self._how = ""
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._told = asyncio.Event()

    def said(self, line: str) -> None:
        self._lines.append(line.strip())

    def ended(self, how: str = "") -> None:
        self._how = how or self._how
        self._told.set()

    async def words(self) -> str:
        """`PROGRAM exited with code 2: its last words`; nothing if it has not ended by itself."""
        try:
            async with asyncio.timeout(_REPORT_S):
                await self._told.wait()
        except TimeoutError:
            pass
        if not self._how:
            return ""
        last = " | ".join(self._lines)
        last = last if len(last) <= MAX_LAST_CHARS else f"…{last[1 - MAX_LAST_CHARS :]}"  # the end of a traceback says most
        return f"{self._program} {self._how}: {last or 'it has said nothing on stderr'}"


class Stdio:
    """The transport for this command, to be entered once."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], secrets: Sequence[str]) -> None:
        self.ending = Ending(command[0])
        self._streams = _stdio(command, env, self.ending, partial(_Words, name, self.ending, secrets))

    async def __aenter__(self) -> TransportStreams:
        return await self._streams.__aenter__()

    async def __aexit__(self, *how: Any) -> bool | None:
        return await self._streams.__aexit__(*how)


@asynccontextmanager
async def _stdio(
    command: Sequence[str], env: Mapping[str, str], ending: Ending, listen: Callable[[int], _Words]
) -> AsyncGenerator[TransportStreams]:
    from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client

    _check_program(command[0], {**get_default_environment(), **env}.get("PATH", os.defpath))
    launched = ["-IS", mcp_launcher.__file__, str(os.getpid()), *command]
    # A line that is not UTF-8 must cost that line, not the connection and every call on it.
    parameters = StdioServerParameters(command=sys.executable, args=launched, env=dict(env), encoding_error_handler="replace")
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    words = listen(reading)
    loop = asyncio.get_running_loop()
    loop.add_reader(reading, words.read)
    try:
        with os.fdopen(writing, "w") as errors:
            entered = stdio_client(parameters, errors)
            streams = await entered.__aenter__()
        # Our copy of the writing end is closed now: the server's processes alone keep the pipe open.
        try:
            yield streams
        except BaseException as error:
            if not await entered.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await entered.__aexit__(None, None, None)
    finally:
        words.read()
        ending.ended()
        loop.remove_reader(reading)
        os.close(reading)


def _check_program(program: str, path: str) -> None:
    """NotReady unless it can be started here: what an empty answer of a process that never was cannot say."""
    if shutil.which(program, path=path) is not None:
        return
    shown = printable(program, MAX_LAST_CHARS)
    if os.path.dirname(program):
        why = "is not executable" if os.path.exists(program) else "no such program"
        raise NotReady(f"{shown}: {why}; see to it on this machine, or give mcp(…) another path, and resume the run")
    raise NotReady(
        f"{shown}: no such program on the PATH; install it, or give mcp(…) its whole path or env={{'PATH': …}}, and resume the run"
    )


class _Words:
    """What a server says on stderr, line by line."""

    def __init__(self, name: str, ending: Ending, secrets: Sequence[str], reading: int) -> None:
        self._name = name
        self._secrets = secrets
        self._reading = reading
        self._ending = ending
        self._begun = b""

    def read(self) -> None:
        try:
            piece = os.read(self._reading, _MAX_PENDING_BYTES)
        except BlockingIOError:
            return
        if not piece:  # nobody can write any more: without this the loop would be woken for ever
            asyncio.get_running_loop().remove_reader(self._reading)
        *lines, self._begun = (self._begun + piece).split(b"\n")
        if not piece or len(self._begun) > _MAX_PENDING_BYTES:
            lines, self._begun = [*lines, self._begun], b""
        for line in filter(None, lines):
            said = line.removeprefix(mcp_launcher.ENDED).decode("utf-8", "replace")
            shown = printable(redacted(said, self._secrets), MAX_LINE_CHARS)
            if line.startswith(mcp_launcher.ENDED):
                self._ending.ended(shown)
            else:
                self._ending.said(shown)
                log.info("server %s: %s", self._name, shown)


def printable(text: str, limit: int, keep: str = "") -> str:
    """Text that does nothing to a terminal, cut to the limit; control and invisible characters are shown as their escapes."""
    shown = escaped(text[:limit], keep)
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"
