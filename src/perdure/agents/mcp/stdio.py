"""The transport to a stdio MCP server, and `printable`, which makes text safe for a terminal.

The server's process ends with the worker, and the server's stderr goes to the log `perdure.mcp`.

The SDK could read the pipes too, but it copies the whole unfinished line for every piece that arrives: an endless line
would use a whole core. Here the cost per byte is constant, and a server that writes a line that is too long is ended.

The exit status and the last lines of stderr are kept, because a closed connection does not say why it was closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from perdure.agents.mcp import launcher
from perdure.agents.mcp.errors import MAX_MESSAGE_BYTES
from perdure.agents.mcp.secrets import redacted
from perdure.core.invisible import escaped
from perdure.errors import NotReady

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

log = logging.getLogger("perdure.mcp")
MAX_LINE_CHARS = 1_000
MAX_LAST_CHARS = 300  # how much of the last lines of stderr an error message shows
_SHOWN_CHARS = 200  # how much the log shows of a line that is not an MCP message
_PIECE_BYTES = 64 * 1024
_LAST_LINES = 3
_REPORT_S = 1.0  # how long to wait for the launcher's report, after the server's output has ended
_FLUSH_S = 0.5  # at the end of a connection: how long already accepted messages may still be written
_LEAVE_S = 2.0  # how long the server may run after its input was closed; then it is terminated
_END_S = 5.0  # how long to wait for the launcher; longer than it needs to end a server that ignores SIGTERM
_LOOK_S = 0.01


class Ending:
    """How the process of a connection ended, as text for an error."""

    def __init__(self, program: str) -> None:
        self._program = printable(program, MAX_LAST_CHARS)
        self._how = ""
        self._by_us = False
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._told = asyncio.Event()

    def said(self, line: str) -> None:
        self._lines.append(line.strip())

    def ended(self, how: str = "") -> None:
        self._how = self._how or how
        self._told.set()

    def ended_by_us(self, how: str) -> None:
        self._by_us = True
        self.ended(how)

    async def words(self) -> str:
        """A text such as `PROGRAM exited with code 2: LAST LINES`. Empty if there is no report about the end."""
        try:
            async with asyncio.timeout(_REPORT_S):
                await self._told.wait()
        except TimeoutError:
            pass
        if not self._how:
            return ""
        if self._by_us:
            return f"{self._program} {self._how}"
        last = " | ".join(self._lines)
        # Cut at the beginning: the end of a traceback is the most useful part.
        last = last if len(last) <= MAX_LAST_CHARS else f"…{last[1 - MAX_LAST_CHARS :]}"
        return f"{self._program} {self._how}: {last or 'it has said nothing on stderr'}"


class Stdio:
    """The transport for this command. It can be entered once."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], secrets: Sequence[str]) -> None:
        self.ending = Ending(command[0])
        self._streams = _stdio(_Said(name, self.ending, secrets), command, env)

    async def __aenter__(self) -> TransportStreams:
        return await self._streams.__aenter__()

    async def __aexit__(self, *how: Any) -> bool | None:
        return await self._streams.__aexit__(*how)


@asynccontextmanager
async def _stdio(said: _Said, command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[TransportStreams]:
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    environment = {**get_default_environment(), **env}
    _check_program(command[0], environment.get("PATH", os.defpath))
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    errors = _Errors(said, reading)
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", launcher.__file__, str(os.getpid()), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=writing,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(writing)  # now only the server's processes hold the pipe open
        # Between the start of the process and the `try` that ends the process there must be no await: a cancel there
        # would leave the process running.
        to_session, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_send, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(_listen(process, to_session, said), name=f"mcp {said.name}: reads")
                sending = group.create_task(_send(process, from_session, to_session), name=f"mcp {said.name}: writes")
                try:
                    yield heard, to_send
                finally:
                    # Without a session `_listen` discards what it reads. It must continue to read: a server that
                    # blocks on a full pipe would not notice that its own input has ended.
                    heard.close()
                    to_send.close()
                    await asyncio.wait((sending,), timeout=_FLUSH_S)
                    await _end(process)
                    listening.cancel()
                    sending.cancel()
        finally:
            for stream in (heard, to_send, to_session, from_session):
                stream.close()
            if process.returncode is None:  # a second cancel interrupted `_end`: now the launcher must end the server
                _terminate(process)
            else:  # other processes of the server may still hold a pipe open, and asyncio would wait until it closes
                process._transport.close()  # type: ignore[attr-defined]
    finally:
        errors.close()
        said.ending.ended()


async def _listen(process: Process, session: MemoryObjectSendStream[SessionMessage | Exception], said: _Said) -> None:
    """Pass every message to the session, until the pipe ends or a line is too long.

    When the session has ended, continue to read and discard the messages.
    """
    import anyio

    assert process.stdout is not None
    buffer = LineBuffer()
    gone = False
    async with session:
        while piece := await process.stdout.read(_PIECE_BYTES):
            for line in () if gone else buffer.lines(piece):
                try:
                    await session.send(_message(line, said))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    gone = True
                    break
            if len(buffer) > MAX_MESSAGE_BYTES:
                said.ending.ended_by_us(
                    f"was ended, because it wrote more than {MAX_MESSAGE_BYTES:,} bytes without a line break: a message of MCP is one line, "
                    "and that is the longest; have the tool return less, or return where its result lies"
                )
                _terminate(process)
                return


def _message(line: bytes, said: _Said) -> SessionMessage | Exception:
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    # Invalid UTF-8 must damage only the text that contains it. It must not end the connection and all its calls.
    text = line.decode("utf-8", "replace")
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError as error:
        log.info("server %s: this line on stdout is no message of MCP: %s", said.name, said.shown(text, _SHOWN_CHARS))
        return error


async def _send(
    process: Process,
    messages: MemoryObjectReceiveStream[SessionMessage],
    session: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    """Write every message of the session.

    If the server stops reading, tell the session that the connection has ended.
    """
    assert process.stdin is not None
    async with messages:
        async for sent in messages:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                process.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await process.stdin.drain()
            except OSError:
                session.close()
                return


async def _end(process: Process) -> None:
    """Close the server's input, as the protocol wants. If the server does not exit, its launcher ends it."""
    assert process.stdin is not None
    process.stdin.close()
    if not await _has_ended(process, _LEAVE_S):
        _terminate(process)
        if not await _has_ended(process, _END_S):
            with suppress(ProcessLookupError):
                process.kill()
            await _has_ended(process, _LEAVE_S)


def _terminate(process: Process) -> None:
    """Tell the launcher to end the server and all processes that the server has started."""
    with suppress(ProcessLookupError):  # the launcher has just ended
        process.terminate()


async def _has_ended(process: Process, within_s: float) -> bool:
    """Has the process ended within this time?

    process.wait() cannot be used here: it waits for the pipes too, and other processes may have inherited them.
    """
    for _ in range(math.ceil(within_s / _LOOK_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_LOOK_S)
    return process.returncode is not None


def _check_program(program: str, path: str) -> None:
    """NotReady unless this machine has the program. Without this check the error would not name the reason."""
    if shutil.which(program, path=path) is not None:
        return
    shown = printable(program, MAX_LAST_CHARS)
    if os.path.dirname(program):
        why = "is not executable" if os.path.exists(program) else "no such program"
        raise NotReady(f"{shown}: {why}; correct this on this machine, or give mcp(…) another path, and resume the run")
    raise NotReady(
        f"{shown}: no such program on the PATH; install it, or give mcp(…) its whole path or env={{'PATH': …}}, and resume the run"
    )


class LineBuffer:
    """Splits pieces into lines. However long lines and pieces are, each byte is copied only a few times."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def __len__(self) -> int:
        """The length of the unfinished line."""
        return len(self._begun)

    def lines(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        *whole, rest = piece.split(b"\n")
        if whole:
            whole[0] = self.rest() + whole[0]
        self._begun += rest
        return whole

    def rest(self) -> bytes:
        """Remove and return the unfinished line."""
        begun, self._begun = bytes(self._begun), bytearray()
        return begun


class _Said:
    """For the output of one server: the server's name, the secrets to remove, and the `Ending` with the last lines."""

    def __init__(self, name: str, ending: Ending, secrets: Sequence[str]) -> None:
        self.name = name
        self.ending = ending
        self._secrets = secrets

    def shown(self, text: str, limit: int) -> str:
        return printable(redacted(text, self._secrets), limit)


class _Errors:
    """Reads a server's stderr line by line. A line that is too long is split."""

    def __init__(self, said: _Said, reading: int) -> None:
        self._said = said
        self._reading = reading
        self._buffer = LineBuffer()
        asyncio.get_running_loop().add_reader(reading, self._read)

    def close(self) -> None:
        self._read()
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)

    def _read(self) -> None:
        try:
            piece = os.read(self._reading, _PIECE_BYTES)
        except BlockingIOError:
            return
        if not piece:  # end of file: without remove_reader the loop would call `_read` again and again
            asyncio.get_running_loop().remove_reader(self._reading)
        lines = self._buffer.lines(piece)
        if not piece or len(self._buffer) > _PIECE_BYTES:
            lines.append(self._buffer.rest())
        for line in filter(None, lines):
            shown = self._said.shown(line.removeprefix(launcher.ENDED).decode("utf-8", "replace"), MAX_LINE_CHARS)
            if line.startswith(launcher.ENDED):
                self._said.ending.ended(shown)
            else:
                self._said.ending.said(shown)
                log.info("server %s: %s", self._said.name, shown)


def printable(text: str, limit: int, keep: str = "") -> str:
    """The text in a form that is safe for a terminal: control and invisible characters are escaped.

    The text is cut to `limit` characters. The characters in `keep` are not escaped.
    """
    shown = escaped(text[:limit], keep)
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"
