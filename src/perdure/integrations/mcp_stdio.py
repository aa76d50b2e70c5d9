"""A stdio MCP server as a transport: its process ends with the worker, and what it writes to stderr is in the log `perdure.mcp`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from perdure.integrations import mcp_launcher

if TYPE_CHECKING:
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

log = logging.getLogger("perdure.mcp")
MAX_LINE_CHARS = 1_000
_MAX_PENDING_BYTES = 64 * 1024


def stdio(name: str, command: Sequence[str], env: Mapping[str, str]) -> Transport:
    """The transport for this command, to be entered once."""
    return _stdio(name, command, env)


@asynccontextmanager
async def _stdio(name: str, command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[TransportStreams]:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    launched = ["-IS", mcp_launcher.__file__, str(os.getpid()), *command]
    # A line that is not UTF-8 must cost that line, not the connection and every call on it.
    parameters = StdioServerParameters(command=sys.executable, args=launched, env=dict(env), encoding_error_handler="replace")
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    words = _Words(name, reading)
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
        loop.remove_reader(reading)
        os.close(reading)


class _Words:
    """What a server says on stderr, line by line."""

    def __init__(self, name: str, reading: int) -> None:
        self._name = name
        self._reading = reading
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
            log.info("server %s: %s", self._name, printable(line.decode("utf-8", "replace"), MAX_LINE_CHARS))


def printable(text: str, limit: int, keep: str = "") -> str:
    """Text that does nothing to a terminal, cut to the limit; control characters are shown as what they are."""
    cut = text[:limit]
    shown = cut if cut.isprintable() else "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in cut)
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"
