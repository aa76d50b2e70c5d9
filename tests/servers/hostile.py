"""A server that is no PostgreSQL.

It speaks the start-up of the protocol, asks for a password, and keeps what it gets.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType
from typing import Literal

from tests.servers.wire import NEGOTIATIONS, REFUSED, message

Asks = Literal["password", "md5", "scram-sha-256", "nothing"]
SALT = b"salt"
_AUTHENTICATION = {
    "password": struct.pack("!I", 3),
    "md5": struct.pack("!I", 5) + SALT,
    "scram-sha-256": struct.pack("!I", 10) + b"SCRAM-SHA-256\0\0",
    "nothing": struct.pack("!I", 0),
}


class HostilePostgres:
    """Listens on a free port of loopback until the block ends.

    `told`: what clients have sent after their start-up packet.
    """

    def __init__(self, asks: Asks) -> None:
        self._asks = asks
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.connections = 0
        self.told = b""

    @property
    def url(self) -> str:
        return f"postgresql://ann@127.0.0.1:{self._listener.getsockname()[1]}/journal"

    def __enter__(self) -> HostilePostgres:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # the block has ended
            self.connections += 1
            with client:
                client.settimeout(60)
                try:
                    self._talk(client)
                except OSError:
                    pass  # the client has had enough

    def _talk(self, client: socket.socket) -> None:
        while True:
            head = client.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                return
            length, code = struct.unpack("!II", head)
            client.recv(length - 8, socket.MSG_WAITALL)
            if code not in NEGOTIATIONS:
                break
            client.sendall(REFUSED)
        client.sendall(message(b"R", _AUTHENTICATION[self._asks]))
        while chunk := client.recv(65536):
            self.told += chunk
            # Every password is refused: so the client ends, and does not wait.
            client.sendall(message(b"E", b"SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed\0\0"))
            return
