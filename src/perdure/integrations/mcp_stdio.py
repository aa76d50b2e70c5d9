"""A stdio MCP server as a transport: its process ends with the worker, and what it writes to stderr is in the log `perdure.mcp`.

The pipes are read here and not by the SDK, which copies all that it has of a line for each piece that it reads: a server that never ends
its line would cost a core. Here a byte costs the same wherever in its line it stands, and a server whose line is too long is ended.

How the process ended and what it said last is kept: a connection that has closed says nothing about the reason.
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

from perdure.core.invisible import escaped
from perdure.errors import NotReady
from perdure.integrations import mcp_launcher
from perdure.integrations.mcp_errors import MAX_MESSAGE_BYTES
from perdure.integrations.mcp_secrets import redacted

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

log = logging.getLogger("perdure.mcp")
MAX_LINE_CHARS = 1_000
MAX_LAST_CHARS = 300  # of what it said last, in an error
_SHOWN_CHARS = 200  # of a line that is no message
_PIECE_BYTES = 64 * 1024
_LAST_LINES = 3
_REPORT_S = 1.0  # between the end of its output and the word about its end
_FLUSH_S = 0.5  # for messages that were accepted before the end
_LEAVE_S = 2.0  # between the end of its input and the order to end
_END_S = 5.0  # more than mcp_launcher.py takes to end a server that does not want to
_LOOK_S = 0.01


class Ending:
    """How the process behind a connection ended, in words for an error."""

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
        """`PROGRAM exited with code 2: its last words`; nothing if it has not ended by itself."""
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
        last = last if len(last) <= MAX_LAST_CHARS else f"…{last[1 - MAX_LAST_CHARS :]}"  # the end of a traceback says most
        return f"{self._program} {self._how}: {last or 'it has said nothing on stderr'}"


class Stdio:
    """The transport for this command, to be entered once."""

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
                *(sys.executable, "-IS", mcp_launcher.__file__, str(os.getpid()), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=writing,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(writing)  # the server's processes alone keep the pipe open
        # No await between the start of the process and the `try` that ends it: a cancel there would leave it behind.
        to_session, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_send, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(_listen(process, to_session, said), name=f"mcp {said.name}: reads")
                sending = group.create_task(_send(process, from_session, to_session), name=f"mcp {said.name}: writes")
                try:
                    yield heard, to_send
                finally:
                    # Without its session the reader throws away what comes. A server that waits to be read would not see its input end.
                    heard.close()
                    to_send.close()
                    await asyncio.wait((sending,), timeout=_FLUSH_S)
                    await _end(process)
                    listening.cancel()
                    sending.cancel()
        finally:
            for stream in (heard, to_send, to_session, from_session):
                stream.close()
            if process.returncode is None:  # a second cancel has cut the end short; the launcher does the rest on its own
                _terminate(process)
            else:  # what is left of the server may hold a pipe open, and asyncio would wait for its end
                process._transport.close()  # type: ignore[attr-defined]
    finally:
        errors.close()
        said.ending.ended()


async def _listen(process: Process, session: MemoryObjectSendStream[SessionMessage | Exception], said: _Said) -> None:
    """Give the session every message, until the pipe ends or a line is too long. Without a session: throw away what comes."""
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

    # Bytes that are not UTF-8 must cost what they stand in, not the connection and every call on it.
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
    """Write every message of the session. When the server reads no more, the session is told that the connection has ended."""
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
    """As the protocol has it: the end of its input is the server's sign to leave. One that stays is ended by its launcher."""
    assert process.stdin is not None
    process.stdin.close()
    if not await _has_ended(process, _LEAVE_S):
        _terminate(process)
        if not await _has_ended(process, _END_S):
            with suppress(ProcessLookupError):
                process.kill()
            await _has_ended(process, _LEAVE_S)


def _terminate(process: Process) -> None:
    """Have the launcher end the server and everything that it has started."""
    with suppress(ProcessLookupError):  # it has just ended
        process.terminate()


async def _has_ended(process: Process, within_s: float) -> bool:
    """Not by process.wait(), which waits for the ends of the pipes too: those may have been inherited."""
    for _ in range(math.ceil(within_s / _LOOK_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_LOOK_S)
    return process.returncode is not None


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


class LineBuffer:
    """Pieces in, lines out. A byte is copied a bounded number of times, however long its line is and however small the pieces are."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def __len__(self) -> int:
        """How much there is of a line that has not ended."""
        return len(self._begun)

    def lines(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        *whole, rest = piece.split(b"\n")
        if whole:
            whole[0] = self.rest() + whole[0]
        self._begun += rest
        return whole

    def rest(self) -> bytes:
        """What there is of a line that has not ended, which is forgotten here."""
        begun, self._begun = bytes(self._begun), bytearray()
        return begun


class _Said:
    """Whose words they are, what must not be repeated of them, and where the last of them are kept."""

    def __init__(self, name: str, ending: Ending, secrets: Sequence[str]) -> None:
        self.name = name
        self.ending = ending
        self._secrets = secrets

    def shown(self, text: str, limit: int) -> str:
        return printable(redacted(text, self._secrets), limit)


class _Errors:
    """What a server says on stderr, line by line. Pieces of a line that is too long are lines of their own."""

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
        if not piece:  # nobody can write any more: without this the loop would be woken for ever
            asyncio.get_running_loop().remove_reader(self._reading)
        lines = self._buffer.lines(piece)
        if not piece or len(self._buffer) > _PIECE_BYTES:
            lines.append(self._buffer.rest())
        for line in filter(None, lines):
            shown = self._said.shown(line.removeprefix(mcp_launcher.ENDED).decode("utf-8", "replace"), MAX_LINE_CHARS)
            if line.startswith(mcp_launcher.ENDED):
                self._said.ending.ended(shown)
            else:
                self._said.ending.said(shown)
                log.info("server %s: %s", self._said.name, shown)


def printable(text: str, limit: int, keep: str = "") -> str:
    """Text that does nothing to a terminal, cut to the limit; control and invisible characters are shown as their escapes."""
    shown = escaped(text[:limit], keep)
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"
