"""Artifacts of calls: where their bytes go, and who may open them.

Saving: an artifact of up to `artifact_database_bytes` goes into the journal's database, chunk by chunk. A larger one
goes to the place that the setting `artifacts` names. If the size is not known in advance, the first chunks go into the
database. When the limit is reached, they are moved to that place.

Opening: a pointer proves nothing, since a model or a caller can write any pointer. The row in the database decides.
The artifact must be saved, belong to the run's tenant, be used by the run's family, and have the size, the hash and
the content type of the pointer. In every other case the same NotFound is raised, so that the error reveals nothing
about other artifacts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from perdure.engine.api import AskReading
from perdure.engine.clock import Clock
from perdure.engine.threads import ReadingThreads
from perdure.errors import ArtifactNotSaved, NotFound, NotReady, PerdureError, StoreCorrupt, StoreError
from perdure.settings import Settings
from perdure.store.api import ArtifactRow, Reading, Store
from perdure.store.artifacts import CHUNK_BYTES, stored_chunks
from perdure.store.places import ObjectWriter, open_place
from perdure.tool.artifact import Artifact, OfHandle, Saving, uri_of
from perdure.tool.call import Call

T = TypeVar("T")


class Vaults:
    """The vaults of one worker's calls. They share the threads that do the blocking work of async tools."""

    def __init__(self, store: Store, settings: Settings, clock: Clock) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self._threads: ReadingThreads | None = None

    def __call__(self, call: Call) -> CallVault:
        return CallVault(self, call)

    def ask(self, work: Callable[[], T]) -> Awaitable[T]:
        if self._threads is None:
            self._threads = ReadingThreads()
        return self._threads.ask(work)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()


class RunVault(OfHandle):
    """Opens artifacts for one run, and saves none."""

    def __init__(self, reading: Reading, run_id: str, ask: AskReading, tenant: str | None) -> None:
        """`tenant`: the run must belong to this tenant. None: the caller may see the runs of all tenants."""
        self._reading = reading
        self._run_id = run_id
        self._ask = ask
        self._tenant = tenant

    @property
    def vault(self) -> RunVault:
        return self

    def begin(self, content_type: str, size: int | None) -> Saving:
        raise ArtifactNotSaved("only a call of a tool saves artifacts: call.save(…)", final=True)

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        return opened(self._reading, artifact, self._run_id, self._tenant)

    def ask(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._ask(work)


class CallVault:
    """Saves artifacts of one call, and opens artifacts that the family of its run may use."""

    def __init__(self, vaults: Vaults, call: Call) -> None:
        self._vaults = vaults
        self._call = call

    def begin(self, content_type: str, size: int | None) -> Saving:
        return NewArtifact(self._vaults, self._call, content_type, size)

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        return opened(self._vaults.store, artifact, self._call.run_id)

    def ask(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._vaults.ask(work)


class NewArtifact:
    """One artifact that is being saved. At most one chunk of it is in memory."""

    def __init__(self, vaults: Vaults, call: Call, content_type: str, size: int | None) -> None:
        self._store = vaults.store
        self._limit = vaults.settings.artifact_database_bytes
        self._place_url = vaults.settings.artifacts
        self._id = secrets.token_hex(16)  # not guessable, and different for every attempt
        self._content_type = content_type
        self._sum = hashlib.sha256()
        self._size = 0
        self._chunks = 0
        self._rest = bytearray()
        self._writer: ObjectWriter | None = None
        if size is not None and size > self._limit and not self._place_url:
            raise self._too_large(f"{size:,} bytes")
        outside = size is not None and size > self._limit
        place, name = (self._place_url, self._id) if outside else (None, None)
        row = ArtifactRow(
            *(self._id, call.run_id, call.tenant, call.number, call.attempt, "saving", place, name),
            *(None, None, content_type, vaults.clock.now()),
        )
        # The row is written before the first byte, for every place. So a crash from here on leaves an orphan that can
        # be found.
        self._do(lambda: self._store.begin_artifact(row))
        if outside:
            self._writer = self._do(lambda: open_place(self._place_url).create(self._id))

    def write(self, data: bytes) -> None:
        self._sum.update(data)
        self._size += len(data)
        if self._writer is None and self._size > self._limit:
            self._move_out()
        if self._writer is not None:
            writer = self._writer
            self._do(lambda: writer.write(data))
            return
        self._rest += data
        while len(self._rest) >= CHUNK_BYTES:
            self._add_chunk(bytes(self._rest[:CHUNK_BYTES]))
            del self._rest[:CHUNK_BYTES]

    def finish(self) -> Artifact:
        if self._writer is not None:
            self._do(self._writer.close)
        elif self._rest:
            self._add_chunk(bytes(self._rest))
            self._rest.clear()
        digest = self._sum.digest()
        # All bytes are durable. Now the row may say so, and after that an event may name the artifact.
        self._do(lambda: self._store.finish_artifact(self._id, digest, self._size))
        return Artifact(uri_of(self._id), digest.hex(), self._size, self._content_type)

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        try:
            if self._store.doom_artifact(self._id):
                row = self._store.artifact(self._id)
                if row is not None and row.place is not None and row.object is not None:
                    open_place(row.place).delete(row.object)
                self._store.delete_artifact(self._id)
        except (PerdureError, OSError):
            pass  # the artifact stays as an orphan, or in the state `deleting`: a later prune deletes it

    def _add_chunk(self, data: bytes) -> None:
        number = self._chunks
        self._do(lambda: self._store.add_chunk(self._id, number, data))
        self._chunks += 1

    def _move_out(self) -> None:
        """The limit of the database is reached: move the chunks from the database to the place, one by one."""
        if not self._place_url:
            raise self._too_large(f"more than {self._limit:,} bytes")

        def move() -> ObjectWriter:
            writer = open_place(self._place_url).create(self._id)
            for number in range(self._chunks):
                chunk = self._store.artifact_chunk(self._id, number)
                if chunk is None:
                    raise StoreCorrupt(f"artifact {self._id}: chunk {number} is missing, although the artifact is still being saved")
                writer.write(chunk)
            writer.write(bytes(self._rest))
            self._store.place_artifact(self._id, self._place_url, self._id)
            return writer

        self._writer = self._do(move)
        self._rest.clear()

    def _too_large(self, how: str) -> ArtifactNotSaved:
        return ArtifactNotSaved(
            # Pages for people cut a message: the setting comes first.
            f"the artifact has {how}, and artifact_database_bytes is {self._limit:,}: raise that setting, or name another place "
            'for larger artifacts, artifacts = "file:///…" or "s3://…" in perdure.toml (or PERDURE_ARTIFACTS)',
            final=True,
        )

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except NotReady as error:
            raise ArtifactNotSaved(str(error), final=True) from None
        except (StoreError, PerdureError) as error:
            if isinstance(error, ArtifactNotSaved):
                raise
            raise ArtifactNotSaved(f"an artifact could not be saved: {error}") from None


def opened(reading: Reading, artifact: Artifact, run_id: str, tenant: str | None = None) -> Iterator[bytes]:
    """The bytes of the artifact for a call of this run, in chunks. The hash is checked before the last chunk."""
    row = allowed(reading, artifact, run_id, tenant)
    total, size = hashlib.sha256(), 0
    held: bytes | None = None
    for chunk in stored_chunks(reading, row):
        total.update(chunk)
        size += len(chunk)
        if held is not None:
            yield held
        held = chunk
    if total.digest() != row.sha256 or size != row.size:
        raise StoreCorrupt(
            f"{artifact.uri} does not have the bytes that were saved (sha256 {total.hexdigest()}, not {artifact.sha256}); restore it from a backup"
        )
    if held is not None:
        yield held


def allowed(reading: Reading, artifact: Artifact, run_id: str, tenant: str | None = None) -> ArtifactRow:
    """The row of the artifact, if this run may open it. In every other case the same NotFound is raised."""
    row, run = reading.artifact(artifact.id), reading.get(run_id)
    if (
        row is None
        or run is None
        or row.state != "saved"
        or row.tenant != run.tenant
        or tenant not in (None, run.tenant)
        or row.sha256 is None
        or (row.sha256.hex(), row.size, row.content_type) != (artifact.sha256, artifact.size, artifact.content_type)
        or not reading.may_open(artifact.id, run_id)
    ):
        raise NotFound(
            f"{artifact.uri} is not an artifact that run {run_id} may open: its family has not saved it and did not get it with its input, "
            "or it was pruned, or the pointer was changed"
        )
    return row
