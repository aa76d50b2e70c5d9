"""Artifact: large bytes by pointer. A tool saves them and gets a pointer; another tool opens the pointer as a stream.

The pointer is a small JSON value. It goes through agents, arguments, results and journals; the bytes do not. The URI
in a pointer is a name that only perdure's own database resolves, never an address: so a forged pointer cannot name a
file, another bucket, or the artifact of another tenant.

The same code serves async and sync tools: an async tool awaits a `Pending`, and a sync tool calls its `wait()`;
`open()` works with `async with` and with `with`.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Protocol, Self, TypeVar

from perdure.core import codec
from perdure.core.machine import current as machine_of_agent
from perdure.core.redaction import Scrubber
from perdure.errors import ArtifactNotSaved, InvalidInput, NotAllowedInAgent, PerdureError

T = TypeVar("T")
SCHEME = "perdure:artifact/"
CHUNK_BYTES = 1 << 20  # how much of an artifact is in memory at a time while it is saved or read
_URI = re.compile(r"perdure:artifact/([0-9a-f]{32})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_TYPE = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,199}")
_FIELDS = frozenset(("uri", "sha256", "size", "content_type"))

Data = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]


class Saving(Protocol):
    """One artifact that is being saved. All methods block."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> Artifact:
        """Make the artifact durable. From then on it can be opened."""

    def discard(self) -> None:
        """Delete what was written. Raises nothing."""


class Vault(Protocol):
    """Saves and opens the artifacts of one call. In an isolated process, the vault asks the worker."""

    def begin(self, content_type: str, size: int | None) -> Saving:
        """Begin an artifact. `size` is None if it is not known yet. Blocks."""

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        """The bytes in chunks. The hash is checked before the last chunk. Blocks."""

    def ask(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Do blocking work on a thread."""


class HasVault(Protocol):
    """A call, or another holder of a vault."""

    @property
    def vault(self) -> Vault: ...


class OfHandle:
    """A holder that `app.handle(…)` has made, for one run that the app's own code has named."""


# The call that is running on this task or thread. Each artifact stores the value of this variable at its creation.
in_call: ContextVar[HasVault | None] = ContextVar("perdure_artifacts", default=None)


@dataclass(frozen=True)
class Artifact:
    """A pointer to large bytes that perdure has stored. Pass it on unchanged, with all four fields."""

    uri: str
    sha256: str
    size: int
    content_type: str

    # pydantic reads this: a value with further fields is not an artifact, even if it has these four fields too.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str) or _URI.fullmatch(self.uri) is None:
            raise InvalidInput(f"{codec.shown(self.uri)} is not the URI of an artifact; call.save(…) makes artifacts")
        if not isinstance(self.sha256, str) or _SHA256.fullmatch(self.sha256) is None:
            raise InvalidInput(f"artifact {self.uri}: sha256 is not 64 hexadecimal digits")
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 0:
            raise InvalidInput(f"artifact {self.uri}: size={codec.shown(self.size)} is not a number of bytes")
        check_content_type(self.content_type)
        object.__setattr__(self, "_holder", in_call.get())

    @property
    def id(self) -> str:
        """The part of the URI that is different for every artifact."""
        return self.uri.removeprefix(SCHEME)

    def open(self) -> Opened:
        """Open the bytes as a stream.

        In an async tool: `async with artifact.open() as stream`. In a sync tool: `with artifact.open() as file`.

        Iterate the stream for chunks, or read it. The hash is checked while you read. If the bytes are not the bytes
        that were saved, StoreCorrupt is raised before the last bytes are returned. NotFound if this run may not open
        the artifact: it was pruned, or it belongs to another family or tenant.
        """
        return Opened(self, _vault_of(self))

    def read(self) -> Pending[bytes]:
        """All bytes, after a check of the hash. They must fit into memory.

        In an async tool: `await artifact.read()`. In a sync tool: `artifact.read().wait()`.
        """
        vault = _vault_of(self)

        def steps() -> Generator[Any, Any, bytes]:
            whole: bytes = yield lambda: b"".join(vault.chunks(self))
            return whole

        return Pending(steps(), vault.ask)


def _vault_of(artifact: Artifact) -> Vault:
    # The rights are those of the call that is running, not of the call that has created this object: an object may
    # come from another run's tool through a global variable. In a thread that a tool has started itself, no call is
    # known.
    creator: HasVault | None = artifact._holder  # type: ignore[attr-defined]
    holder = creator if isinstance(creator, OfHandle) else in_call.get() or creator
    if machine_of_agent() is not None:
        raise NotAllowedInAgent(f"{artifact.uri}: an agent passes an artifact on; a tool opens it")
    if holder is None:
        raise InvalidInput(
            f"{artifact.uri}: an artifact is opened inside a tool that an agent has called (in the thread or task of the tool), "
            "or through app.handle(RUN).artifact(…)"
        )
    return holder.vault


class Pending(Generic[T]):
    """Work that was asked for and has not begun: `await` it in an async tool, or call `wait()` in a sync tool."""

    def __init__(self, steps: Generator[Any, Any, T], ask: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        # The steps yield blocking functions or awaitables, and receive their results.
        self._steps = steps
        self._ask = ask

    def __await__(self) -> Generator[Any, Any, T]:
        return self._run().__await__()

    def wait(self) -> T:
        """Do the work on this thread. Only for sync code: it blocks."""
        step = self._steps.send
        given: Any = None
        while True:
            try:
                work = step(given)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                if inspect.isawaitable(work):
                    if inspect.iscoroutine(work):
                        work.close()
                    raise ArtifactNotSaved("an async iterator has to be awaited: await call.save(…) in an async tool", final=True)
                step, given = self._steps.send, work()
            except BaseException as error:
                step, given = self._steps.throw, error

    async def _run(self) -> T:
        step: Any = self._steps.send
        given: Any = None
        while True:
            try:
                work = step(given)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                step, given = self._steps.send, await (work if inspect.isawaitable(work) else self._ask(work))
            except asyncio.CancelledError:
                # The bytes so far stay as an orphan, until `perdure prune --orphans` or the prune of the run. If they
                # were deleted now, that would delay the cancel.
                self._steps.close()
                raise
            except BaseException as error:
                step, given = self._steps.throw, error


def save(vault: Vault, data: Data, content_type: str, scrubber: Scrubber | None = None) -> Pending[Artifact]:
    """Save the bytes. Nothing has happened yet when this returns.

    Wrong data also raises ArtifactNotSaved. InvalidInput would mean that the effect did not happen, but the tool may
    have acted already.
    """
    try:
        check_content_type(content_type)
    except InvalidInput as error:
        raise ArtifactNotSaved(f"call.save(…): {error}", final=True) from None
    source, size = _source(data)
    return Pending(_save(vault, source, size, content_type, scrubber), vault.ask)


def _save(
    vault: Vault, source: Iterator[bytes] | AsyncIterator[bytes], size: int | None, content_type: str, scrubber: Scrubber | None
) -> Generator[Any, Any, Artifact]:
    held = b""
    saving: Saving = yield lambda: vault.begin(content_type, size)
    try:
        while part := (yield _next(source) if isinstance(source, AsyncIterator) else partial(next, source, None)):
            if scrubber is not None:
                part, held = _without_secret(scrubber, held + part)
            if part:
                yield partial(saving.write, part)
        if held:
            yield partial(saving.write, held)
        artifact: Artifact = yield saving.finish
    except Exception:
        yield saving.discard
        raise
    return artifact


def _without_secret(scrubber: Scrubber, whole: bytes) -> tuple[bytes, bytes]:
    """What can be written now, and the end of these bytes, in which a secret may begin: it is held back.

    ArtifactNotSaved if a secret is in the bytes.
    """
    if (name := scrubber.found_in(whole)) is not None:
        raise ArtifactNotSaved(f"call.save(…): the value of {name} is in the bytes; they are not stored", final=True)
    return whole[: -scrubber.longest], whole[-scrubber.longest :]


async def _next(source: AsyncIterator[bytes]) -> bytes | None:
    return await anext(source, None)


class _Batch(AsyncIterator[bytes]):
    """The pieces of an async iterator, joined or cut to chunks: each chunk costs a thread switch, maybe a commit."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._rest = bytearray()

    async def __anext__(self) -> bytes:
        while len(self._rest) < CHUNK_BYTES and (piece := await anext(self._source, None)) is not None:
            self._rest += _checked(piece)
        chunk = bytes(self._rest[:CHUNK_BYTES])
        del self._rest[:CHUNK_BYTES]
        if not chunk:
            raise StopAsyncIteration
        return chunk


def _batches(source: Iterator[bytes]) -> Iterator[bytes]:
    """Like _Batch, for an iterator that blocks."""
    rest = bytearray()
    for piece in source:
        rest += _checked(piece)
        while len(rest) >= CHUNK_BYTES:
            yield bytes(rest[:CHUNK_BYTES])
            del rest[:CHUNK_BYTES]
    if rest:
        yield bytes(rest)


def _checked(piece: object) -> bytes | bytearray | memoryview:
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise ArtifactNotSaved(f"call.save(…): its data contains a {type(piece).__name__}; an artifact consists of bytes", final=True)
    return piece


def _slices(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    view = memoryview(data).cast("B")
    return (bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES))


def _source(data: Data) -> tuple[Iterator[bytes] | AsyncIterator[bytes], int | None]:
    """The pieces of the data, and its size if it is known."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _slices(data), memoryview(data).nbytes
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ArtifactNotSaved(
                f"call.save({str(path)!r:.200}): {error.strerror}; text is a path, bytes are content", final=True
            ) from None
        return _file(path), size
    if isinstance(data, AsyncIterable):
        return _Batch(aiter(data)), None
    if callable(read := getattr(data, "read", None)):
        # Do not read by lines: a binary file may be one long line.
        return _batches(iter(partial(read, CHUNK_BYTES), b"")), None
    if isinstance(data, Iterable):
        return _batches(iter(data)), None
    what = "bytes, the path of a file, a binary file, or an iterator of bytes, sync or async"
    raise ArtifactNotSaved(f"call.save({codec.shown(data)}): {what}", final=True)


def _file(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
    except OSError as error:
        raise ArtifactNotSaved(f"call.save({str(path)!r:.200}): {error.strerror}", final=True) from None


class Opened:
    """What `artifact.open()` returns: a context manager, sync and async."""

    def __init__(self, artifact: Artifact, vault: Vault) -> None:
        self._artifact = artifact
        self._vault = vault
        self._chunks: Iterator[bytes] | None = None

    async def __aenter__(self) -> Stream:
        chunks = self._chunks = self._vault.chunks(self._artifact)
        # The first chunk is read at once, so that a pointer that cannot be opened fails here.
        first = await self._vault.ask(lambda: next(chunks, None))
        return Stream(chunks, first, self._vault)

    async def __aexit__(self, *exc: Any) -> None:
        self._close()

    def __enter__(self) -> io.BufferedReader:
        self._chunks = self._vault.chunks(self._artifact)
        return io.BufferedReader(_Raw(self._chunks), CHUNK_BYTES)

    def __exit__(self, *exc: Any) -> None:
        self._close()

    def _close(self) -> None:
        if isinstance(self._chunks, Generator):
            try:
                self._chunks.close()
            except ValueError:
                pass  # an abandoned thread still reads the next chunk


class Stream:
    """The bytes of an artifact: `async for chunk in stream`, or `await stream.read(n)`."""

    def __init__(self, chunks: Iterator[bytes], first: bytes | None, vault: Vault) -> None:
        self._chunks = chunks
        self._rest = first
        self._vault = vault

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self, n: int = -1) -> bytes:
        """`n` bytes, or fewer at the end. Without `n`, all remaining bytes."""
        pieces: list[bytes] = []
        wanted = n
        while n < 0 or wanted > 0:
            chunk = await self._next()
            if chunk is None:
                break
            if n >= 0 and len(chunk) > wanted:
                chunk, self._rest = chunk[:wanted], chunk[wanted:]
            pieces.append(chunk)
            wanted -= len(chunk)
        return b"".join(pieces)

    async def _next(self) -> bytes | None:
        if self._rest is not None:
            chunk, self._rest = self._rest, None
            return chunk
        return await self._vault.ask(lambda: next(self._chunks, None))


class _Raw(io.RawIOBase):
    """The chunks as a file that is read from its beginning to its end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(next(chunks, b""))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


# -- pointers in values -----------------------------------------------------------------------------------------------
def ids_in(encoded: bytes) -> list[str]:
    """The ids of all artifacts that this text mentions, as pointers or in any other way."""
    if SCHEME.encode() not in encoded:
        return []
    return list(dict.fromkeys(_URI.findall(encoded.decode("utf-8", "replace"))))


def pointers_in(encoded: bytes) -> list[Artifact]:
    """All pointers in a JSON value, at any depth. A text that only mentions a URI is not a pointer."""
    if SCHEME.encode() not in encoded:
        return []
    found: dict[str, Artifact] = {}
    left = [codec.decode(encoded)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(reversed(value))
        elif isinstance(value, dict) and value.keys() == _FIELDS:
            try:
                artifact = Artifact(**value)
            except PerdureError:
                continue
            found[artifact.uri] = artifact
        elif isinstance(value, dict):
            left.extend(reversed(value.values()))
    return list(found.values())


def uri_of(artifact_id: str) -> str:
    return SCHEME + artifact_id


def check_content_type(content_type: object) -> None:
    if not isinstance(content_type, str) or _CONTENT_TYPE.fullmatch(content_type) is None:
        raise InvalidInput(f"content_type={codec.shown(content_type)}: text such as 'application/pdf', at most 200 ASCII characters")


class NoVault:
    """The vault of a call that has none: outside of a run, or inside a transaction."""

    def __init__(self, why: str) -> None:
        self._why = why

    def begin(self, content_type: str, size: int | None) -> Saving:
        raise ArtifactNotSaved(self._why, final=True)

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        raise InvalidInput(self._why)

    async def ask(self, work: Callable[[], T], /) -> T:
        return work()
