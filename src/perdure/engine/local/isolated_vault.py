"""Artifacts of an isolated tool. The tool's process has no journal, so it asks its worker over a separate socket.

Both sides are here. A message is a line of JSON, and then as many bytes as the line says. The tool's process sends one
request at a time, and the worker answers it. The worker does not trust the process: a message that breaks the protocol
closes the connection, and every request has only the rights of the call.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from perdure import errors
from perdure.errors import ArtifactNotSaved, InvalidInput, NotFound, PerdureError, StoreCorrupt, StoreUnavailable
from perdure.tool.artifact import CHUNK_BYTES, Artifact, Saving, Vault, check_content_type

T = TypeVar("T")
_LINE_BYTES = 8_192
_MOST_BYTES = 16 << 20  # a piece that the worker reads from a bucket may be larger than a chunk
_MOST_OPEN = 1_000
# Errors that are sent over the socket with their type.
_TOLD = (ArtifactNotSaved, NotFound, StoreCorrupt, StoreUnavailable, InvalidInput)


def _send(to: socket.socket, line: dict[str, Any], data: bytes = b"") -> None:
    if data:
        line = {**line, "bytes": len(data)}
    to.sendall(json.dumps(line).encode() + b"\n" + data)


def _receive(file: BinaryIO, most: int) -> tuple[dict[str, Any], bytes] | None:
    """The next message. None: the other side has closed the connection, or has broken the protocol."""
    raw = file.readline(_LINE_BYTES)
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    size = line.get("bytes", 0)
    if not isinstance(size, int) or not 0 <= size <= most:
        return None
    data = file.read(size) if size else b""
    return (line, data) if len(data) == size else None


# -- the worker's side ------------------------------------------------------------------------------------------------
class Service:
    """Answers one isolated process, on a thread, with the rights of its call."""

    def __init__(self, vault: Callable[[], Vault]) -> None:
        """Begin to answer. `there` is the process's end of the socket. The caller closes it once the process runs."""
        self._vault = vault
        self._here, self.there = socket.socketpair()
        self._open: dict[int, Any] = {}
        self._next = 0
        try:
            threading.Thread(target=self._serve, name="perdure-isolated-artifacts", daemon=True).start()
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        for end in (self._here, self.there):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the socket was closed before, or was never used
            end.close()

    def _serve(self) -> None:
        try:
            with self._here.makefile("rb") as file:
                while (message := _receive(file, CHUNK_BYTES)) is not None:
                    try:
                        answer, data = self._answer(*message)
                    except PerdureError as error:
                        kind = next((known.__name__ for known in _TOLD if isinstance(error, known)), "StoreUnavailable")
                        answer, data = {"error": kind, "message": str(error), "final": getattr(error, "final", False)}, b""
                    _send(self._here, answer, data)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the process has ended or broken the protocol: answer nothing more
        finally:
            self._here.close()
            for left in self._open.values():
                if not isinstance(left, Iterator):
                    left.discard()

    def _answer(self, line: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        match line["do"]:
            case "begin":
                check_content_type(line["content_type"])
                size = line["size"]
                if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
                    raise ValueError(size)
                self._check_room()  # before the row is inserted: an artifact that is refused must not leave an orphan
                return {"ok": self._keep(self._vault().begin(line["content_type"], size))}, b""
            case "write":
                self._saving(line).write(data)
            case "finish":
                saved = self._saving(line).finish()
                del self._open[line["number"]]
                return {"ok": _fields(saved)}, b""
            case "discard":
                self._saving(line).discard()
                del self._open[line["number"]]
            case "open":
                self._check_room()
                return {"ok": self._keep(self._vault().chunks(Artifact(**line["pointer"])))}, b""
            case "next":
                chunks = self._open[line["number"]]
                if not isinstance(chunks, Iterator):
                    raise KeyError(line["number"])
                chunk = next(chunks, None)
                if chunk is None:
                    del self._open[line["number"]]
                return {"ok": chunk is not None}, chunk or b""
            case "close":
                self._open.pop(line["number"], None)
            case unknown:
                raise ValueError(unknown)
        return {"ok": None}, b""

    def _keep(self, opened: Saving | Iterator[bytes]) -> int:
        self._next += 1
        self._open[self._next] = opened
        return self._next

    def _check_room(self) -> None:
        if len(self._open) >= _MOST_OPEN:
            # The tool may have acted already. InvalidInput would mean that its effect did not happen.
            raise ArtifactNotSaved(f"this tool has {_MOST_OPEN:,} artifacts open at the same time; close some", final=True)

    def _saving(self, line: dict[str, Any]) -> Saving:
        found = self._open[line["number"]]
        if isinstance(found, Iterator):
            raise KeyError(line["number"])
        saving: Saving = found
        return saving


def _fields(artifact: Artifact) -> dict[str, Any]:
    return {"uri": artifact.uri, "sha256": artifact.sha256, "size": artifact.size, "content_type": artifact.content_type}


# -- the side of the tool's process -----------------------------------------------------------------------------------
class AskedVault:
    """The vault of an isolated call. Any thread of the tool may use it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._left: deque[int] = deque()  # streams that were not read to the end: the worker has them open

    def begin(self, content_type: str, size: int | None) -> Saving:
        self._close_left()
        return _AskedSaving(self, self.do("begin", content_type=content_type, size=size)[0])

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        self._close_left()
        number, _ = self.do("open", pointer=_fields(artifact))
        try:
            while True:
                there, chunk = self.do("next", number=number)
                if not there:
                    number = None  # the worker has closed the stream
                    return
                yield chunk
        finally:
            # Only note the number: the garbage collector may close this generator while `do` runs on the same thread.
            if number is not None:
                self._left.append(number)

    def _close_left(self) -> None:
        while self._left:
            self.do("close", number=self._left.popleft())

    def ask(self, work: Callable[[], T], /) -> Awaitable[T]:
        return asyncio.to_thread(work)

    def do(self, what: str, data: bytes = b"", **fields: Any) -> tuple[Any, bytes]:
        """Ask the worker, and wait for its answer."""
        with self._lock:
            try:
                _send(self._socket, {"do": what, **fields}, data)
                answer = _receive(self._file, _MOST_BYTES)
            except OSError:
                answer = None
        if answer is None:
            raise ArtifactNotSaved("the worker of this isolated tool does not answer any more")
        line, data = answer
        if "error" in line:
            kind = getattr(errors, line["error"])
            raise kind(line["message"], final=line["final"]) if kind is ArtifactNotSaved else kind(line["message"])
        return line["ok"], data


class _AskedSaving:
    def __init__(self, vault: AskedVault, number: int) -> None:
        self._vault = vault
        self._number = number

    def write(self, data: bytes) -> None:
        self._vault.do("write", data, number=self._number)

    def finish(self) -> Artifact:
        return Artifact(**self._vault.do("finish", number=self._number)[0])

    def discard(self) -> None:
        try:
            self._vault.do("discard", number=self._number)
        except PerdureError:
            pass  # the worker deletes the artifact, or the artifact stays as an orphan
