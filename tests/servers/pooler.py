"""A proxy that pools transactions like pgbouncer's transaction mode, but stricter.

No client keeps a connection by luck.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.servers.listener import Listener, Peer
from tests.servers.wire import (
    CANCEL_REQUEST,
    READY,
    Message,
    Messages,
    address_of,
    error_response,
    message,
    startup_packet,
    startup_parameters,
    through_port,
)

_IDLE = b"I"
_ACCEPTED = {"user", "database", "application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings"}
"""The parameters that a client may send at its start.

All are ignored; others are refused, as pgbouncer does by default.
"""


class Pooler:
    """Few connections to one database, as the user of the URL.

    Each transaction gets the connection that was idle longest.

    State that a session leaves behind (SET, advisory locks, prepared statements, LISTEN) reaches the next client,
    unless `discard` says to run DISCARD ALL in between. Notifications without a listener are dropped, cancel requests
    are ignored.
    """

    def __init__(self, url: str, size: int = 3, discard: bool = False) -> None:
        parts = urlsplit(url)
        self._address = address_of(url)
        self._user = parts.username or ""
        self._database = parts.path.removeprefix("/")
        self._discard = discard
        self._greeting: bytes | None = None
        # None means a connection that is not open yet. First in, first out: this rotates the connections.
        self._free: asyncio.Queue[_Backend | None] = asyncio.Queue()
        for _ in range(size):
            self._free.put_nowait(None)
        self._listener = Listener(self._serve)
        self.port = self._listener.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def url(self, url: str) -> str:
        """The same database by way of this pooler; any process may use it."""
        return through_port(url, self.port)

    def close(self) -> None:
        self._listener.close()

    async def _serve(self, client: Peer) -> None:
        startup = await client.read_startup()
        if not startup or int.from_bytes(startup[:4]) == CANCEL_REQUEST:
            return
        refusal = self._refusal(startup_parameters(startup))
        try:
            if refusal is None and self._greeting is None:
                (await self._take()).release()  # it has left its greeting
        except OSError as error:
            refusal = error_response("08006", f"the server cannot be reached: {error}")
        if refusal is not None:
            await client.write(refusal)
            client.close()
            return
        assert self._greeting is not None
        await client.write(self._greeting)
        await self._transactions(client)

    def _refusal(self, parameters: dict[str, str]) -> bytes | None:
        if unknown := parameters.keys() - _ACCEPTED:
            return error_response("08P01", f"unsupported startup parameter: {', '.join(sorted(unknown))}")
        asked = (parameters.get("user", ""), parameters.get("database", ""))
        if asked != (self._user, self._database):
            return error_response("3D000", f"this pooler serves {self._user}@{self._database} and not {'@'.join(asked)}")
        return None

    async def _transactions(self, client: Peer) -> None:
        messages = Messages()
        backend: _Backend | None = None
        try:
            while chunk := await client.read():
                for sent in messages.feed(chunk):
                    if sent.kind == b"X":
                        return
                    if backend is None or backend.holder is not client:
                        backend = await self._take()
                        backend.holder = client
                    await backend.forward(sent)
        except OSError as error:
            await client.write(error_response("08006", f"the server cannot be reached: {error}"))
            client.close()
        finally:
            # A client that leaves inside a transaction takes the connection with it, so that the server rolls back.
            if backend is not None and backend.holder is client:
                backend.peer.reset()

    async def _take(self) -> _Backend:
        backend = await self._free.get()
        if backend is not None and not backend.is_gone:
            backend.is_free = False
            return backend
        try:
            return await self._open()
        except OSError:
            self._free.put_nowait(None)
            raise

    async def _open(self) -> _Backend:
        peer = await Peer.connect(*self._address)
        await peer.write(startup_packet(user=self._user, database=self._database))
        messages, heard = Messages(), list[Message]()
        while not heard or heard[-1].kind != READY:
            chunk = await peer.read()
            heard += messages.feed(chunk)
            if not chunk or any(each.kind == b"E" for each in heard):
                peer.reset()
                raise ConnectionRefusedError(b" ".join(each.body for each in heard).replace(b"\0", b" ").decode(errors="replace"))
        # A client must not get the key of a connection that is another's a moment later.
        self._greeting = b"".join(message(b"K", bytes(8)) if each.kind == b"K" else each.raw for each in heard)
        return _Backend(peer, self._free, self._discard)


class _Backend:
    """One connection to the server, the client that has it now, and what that client is still owed."""

    def __init__(self, peer: Peer, free: asyncio.Queue[_Backend | None], discard: bool) -> None:
        self.peer = peer
        self.holder: Peer | None = None
        self.is_gone = False
        self.is_free = False
        self._free = free
        self._discard = discard
        self._is_clean = True
        self._is_begun = False
        self._awaited = 0
        self._reading = asyncio.create_task(self._read())

    async def forward(self, sent: Message) -> None:
        self._is_clean = False
        self._is_begun = not sent.ends_batch
        self._awaited += sent.ends_batch
        await self.peer.write(sent.raw)

    async def _read(self) -> None:
        messages = Messages()
        try:
            while chunk := await self.peer.read():
                for answer in messages.feed(chunk):
                    await self._hear(answer)
        finally:
            self.is_gone = True
            self.peer.reset()
            if self.holder is not None:
                self.holder.close()
            if not self.is_free:  # a free connection is in the queue already
                self._free.put_nowait(None)

    async def _hear(self, answer: Message) -> None:
        holder = self.holder
        if answer.kind == READY:
            self._awaited -= 1
            if answer.body == _IDLE and self._awaited == 0 and not self._is_begun:
                self._part()
        # After parting, so that a client that has its answer can never be faster than its connection's return.
        if holder is not None:
            await holder.write(answer.raw)

    def _part(self) -> None:
        self.holder = None
        if self._discard and not self._is_clean:
            self._is_clean = True
            self._awaited += 1
            self.peer.writer.write(message(b"Q", b"DISCARD ALL\0"))
        else:
            self.release()

    def release(self) -> None:
        self.is_free = True
        self._free.put_nowait(self)
