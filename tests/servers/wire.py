"""The part of PostgreSQL's wire protocol (version 3) that a proxy between a client and a server needs.

A first packet is a length and a code; every message after it is a type byte and a length. This module does no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

CANCEL_REQUEST = 80877102
NEGOTIATIONS = (80877103, 80877104)
"""SSLRequest and GSSENCRequest: answered with REFUSED, and the client goes on in the clear."""
REFUSED = b"N"

READY = b"Z"


@dataclass(frozen=True, slots=True)
class Message:
    kind: bytes
    body: bytes

    @property
    def raw(self) -> bytes:
        return message(self.kind, self.body)

    @property
    def ends_batch(self) -> bool:
        """Whether the server answers it with ReadyForQuery: Query, Sync, FunctionCall."""
        return self.kind in (b"Q", b"S", b"F")


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


class Messages:
    """Takes bytes and returns complete messages: the limits of packets do not matter."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Message]:
        buffer = self._rest + chunk
        found, at = [], 0
        while len(buffer) - at >= 5:
            end = at + 1 + int.from_bytes(buffer[at + 1 : at + 5])
            if end > len(buffer):
                break
            found.append(Message(buffer[at : at + 1], buffer[at + 5 : end]))
            at = end
        self._rest = buffer[at:]
        return found


@dataclass(slots=True)
class Statements:
    """Follows a client's messages and says which statement each one makes the server execute."""

    _texts: dict[bytes, str] = field(default_factory=dict)
    _portals: dict[bytes, str] = field(default_factory=dict)

    def executed_by(self, sent: Message) -> str | None:
        """The text of the statement that this very message executes. A Parse executes nothing: its Execute does."""
        match sent.kind:
            case b"Q":
                return _text(sent.body.split(b"\x00")[0])
            case b"P":
                name, text, *_ = sent.body.split(b"\x00")
                self._texts[name] = _text(text)
            case b"B":
                portal, name, *_ = sent.body.split(b"\x00")
                self._portals[portal] = self._texts.get(name, "")
            case b"E":
                return self._portals.get(sent.body.split(b"\x00")[0], "")
            case _:
                pass
        return None


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def startup_parameters(packet: bytes) -> dict[str, str]:
    """Of a StartupMessage without its length."""
    words = packet[4:].rstrip(b"\x00").split(b"\x00")
    return {_text(name): _text(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def startup_packet(**parameters: str) -> bytes:
    words = b"".join(f"{name}\0{value}\0".encode() for name, value in parameters.items())
    body = struct.pack("!I", 3 << 16) + words + b"\x00"
    return struct.pack("!I", len(body) + 4) + body


def error_response(sqlstate: str, text: str) -> bytes:
    return message(b"E", f"SFATAL\0VFATAL\0C{sqlstate}\0M{text}\0\0".encode())


def through_port(url: str, port: int) -> str:
    """The same URL by way of another port of this machine."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{port}"))


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return parts.hostname, parts.port or 5432
