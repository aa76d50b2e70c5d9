"""A proxy that counts round trips between perdure and the server: one for every batch for which a client waits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import NamedTuple

from tests.servers.listener import Listener, Peer
from tests.servers.wire import Messages, Statements, address_of, startup_packet, startup_parameters, through_port


class RoundTrip(NamedTuple):
    at_ns: int  # by the clock that all processes of this machine share
    text: str  # the statements of the batch


class RoundTrips:
    """A proxy in front of the server of a URL that forwards everything and counts."""

    def __init__(self, url: str) -> None:
        self._address = address_of(url)
        self._lock = threading.Lock()
        self.trips: list[RoundTrip] = []
        self._listener = Listener(self._serve)

    @property
    def count(self) -> int:
        return len(self.trips)

    def url(self, url: str) -> str:
        return through_port(url, self._listener.port)

    def close(self) -> None:
        self._listener.close()

    async def _serve(self, client: Peer) -> None:
        packet = await client.read_startup()
        if not packet:
            return
        server = await Peer.connect(*self._address)
        await server.write(startup_packet(**startup_parameters(packet)))
        try:
            await asyncio.gather(self._to_server(client, server), self._to_client(server, client))
        finally:
            server.close()

    async def _to_server(self, client: Peer, server: Peer) -> None:
        messages, statements = Messages(), Statements()
        texts: list[str] = []
        while chunk := await client.read():
            for message in messages.feed(chunk):
                if (text := statements.executed_by(message)) is not None:
                    texts.append(text)
                if message.ends_batch:
                    with self._lock:
                        self.trips.append(RoundTrip(time.monotonic_ns(), "; ".join(texts)))
                    texts = []
            await server.write(chunk)
        server.close()

    async def _to_client(self, server: Peer, client: Peer) -> None:
        while chunk := await server.read():
            await client.write(chunk)
        client.close()
