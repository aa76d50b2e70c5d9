"""A listening socket with an asyncio loop in a separate thread. The proxy and the pooler use it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from tests.servers.wire import NEGOTIATIONS, REFUSED


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, host: str, port: int) -> Peer:
        return cls(*await asyncio.open_connection(host, port))

    async def read(self) -> bytes:
        """What has arrived; empty at the end, whichever way it ended."""
        try:
            return await self.reader.read(1 << 16)
        except OSError:
            return b""

    async def write(self, raw: bytes) -> None:
        """Send. If the other side is gone, do nothing: its reader notices that anyway."""
        try:
            self.writer.write(raw)
            await self.writer.drain()
        except OSError:
            pass

    def reset(self) -> None:
        """Close with RST: the other side gets an error at once, and data under way is dropped."""
        if self.writer.is_closing():
            return
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """Close in order: data that was written still arrives."""
        self.writer.close()

    async def read_startup(self) -> bytes:
        """The first packet without its length, once the client has heard that there is no encryption; empty if it went away."""
        while True:
            try:
                length = int.from_bytes(await self.reader.readexactly(4))
                packet = await self.reader.readexactly(length - 4)
            except (asyncio.IncompleteReadError, OSError):
                return b""
            if int.from_bytes(packet[:4]) not in NEGOTIATIONS:
                return packet
            await self.write(REFUSED)


class Listener:
    """Runs `serve` for every client on a free port of 127.0.0.1 until close(), which ends them all with a reset."""

    def __init__(self, serve: Callable[[Peer], Coroutine[None, None, None]]) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        # Bound here, so that a client may connect as soon as the constructor has returned.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"listener-{self.port}", daemon=True)
        self._thread.start()

    def call(self, do: Callable[[], None]) -> None:
        """Run it on the loop's thread, and return when it is done."""
        done = threading.Event()

        def run() -> None:
            try:
                do()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(60), "the proxy's loop does not turn"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the proxy's loop does not end"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket)
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = Peer(reader, writer)
        # asyncio sets this option only for sockets with a known protocol number, and accepted sockets have none.
        # Without the option an answer takes 40 ms.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._serve(client)
        except asyncio.CancelledError:
            pass  # close(): the stream's own callback would report it as an error
        finally:
            client.reset()
            self._tasks.discard(task)
