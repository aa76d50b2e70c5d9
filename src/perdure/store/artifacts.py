"""Artifacts: the rows of large bytes that tools have saved. Up to a size limit, the bytes are here too, in chunks.

An event never names missing bytes, because of the order of the writes: first the row, then the bytes, then the state
`saved` in the row, and last the event that names the artifact. A crash leaves at most an orphan: an artifact that no
event names. Its row says where its bytes are, so `perdure prune --orphans`, or the prune of its run, deletes both.

A deletion also begins with the row: the row gets the state `deleting`, then the bytes are deleted, then the row. After
a crash the next prune continues.

The table `perdure_artifact_uses` says which families use an artifact. Only these families may open the artifact. An
artifact is kept as long as a family uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from perdure.errors import Conflict, NotFound, StoreCorrupt, StoreUnavailable
from perdure.store.api import ArtifactRow, Reading, Store
from perdure.store.cursor import Cursor
from perdure.store.part import Part
from perdure.store.places import open_place

CHUNK_BYTES = 1 << 20
_CHUNKS_AT_A_TIME = 64  # how many chunks one transaction deletes: it must not hold the write lock for long


def root_of(run_id: str) -> str:
    """The id of the root of the run's family."""
    return run_id.partition("/")[0]


def use(cursor: Cursor, run_key: int, tenant: str, named: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Record that the family with this root uses the artifacts, inside the caller's transaction.

    An artifact of another tenant counts as missing. NotFound if one of `needed` is missing.
    """
    if not named:
        return
    wanted = msgspec.json.encode(list(named)).decode()
    found = cursor.all("artifacts_to_use", {"artifacts": wanted, "tenant": tenant})
    known = {artifact for _, artifact in found}
    for artifact in needed:
        if artifact not in known:
            raise NotFound(
                f"the input names artifact {artifact}, which tenant {tenant!r} does not have here (any more); nothing was started"
            )
    cursor.each("use_artifact", [(run_key, key) for key, _ in found])


class Artifacts(Part):
    def artifact(self, artifact: str) -> ArtifactRow | None:
        rows = self._database.read("artifact", (artifact,))
        return ArtifactRow(*rows[0]) if rows else None

    def artifact_chunk(self, artifact: str, number: int) -> bytes | None:
        rows = self._database.read("artifact_chunk", (artifact, number))
        return bytes(rows[0][0]) if rows else None

    def may_open(self, artifact: str, run_id: str) -> bool:
        return bool(self._database.read("artifact_use", (artifact, root_of(run_id))))

    def artifacts_of(self, run_id: str) -> list[ArtifactRow]:
        return [ArtifactRow(*row) for row in self._database.read("artifacts_of_run", (run_id,))]

    def artifact_runs(self, after: str = "", limit: int = 100) -> list[str]:
        return [str(run_id) for (run_id,) in self._database.read("artifact_runs", {"after": after, "limit": limit})]

    def begin_artifact(self, new: ArtifactRow) -> None:
        def write(cursor: Cursor) -> None:
            run, root = cursor.one("run_of_artifact", (new.run_id,)), cursor.one("run_key", (root_of(new.run_id),))
            if run is None or root is None:
                raise NotFound(f"there is no run {new.run_id}, so that artifact {new.artifact} would belong to no run")
            _insert(cursor, msgspec.structs.replace(new, tenant=run[0]))
            cursor.change("use_artifact", (root[0], _key(cursor, new.artifact)))

        self._database.write(write, lambda cursor, _: cursor.one("artifact", (new.artifact,)) is not None)

    def add_chunk(self, artifact: str, number: int, data: bytes) -> None:
        self._database.write(
            lambda cursor: cursor.change("insert_chunk", (_key(cursor, artifact), number, data)),
            lambda cursor, _: cursor.one("artifact_chunk", (artifact, number)) is not None,
        )

    def place_artifact(self, artifact: str, place: str, name: str) -> None:
        def write(cursor: Cursor) -> None:
            key = _key(cursor, artifact)
            cursor.change("place_artifact", {"artifact": artifact, "place": place, "object": name})
            cursor.change("delete_chunks", (key, 0))

        self._database.write(write, lambda cursor, _: _placed(cursor, artifact) == place)

    def finish_artifact(self, artifact: str, sha256: bytes, size: int) -> None:
        def write(cursor: Cursor) -> None:
            _key(cursor, artifact)
            cursor.change("finish_artifact", {"artifact": artifact, "digest": sha256, "size": size})

        def arrived(cursor: Cursor, _: None) -> bool:
            found = cursor.one("artifact", (artifact,))
            return found is not None and ArtifactRow(*found).state == "saved"

        self._database.write(write, arrived)

    def use_artifacts(self, run_id: str, artifacts: Sequence[str]) -> None:
        def write(cursor: Cursor) -> None:
            run, root = cursor.one("run_of_artifact", (run_id,)), cursor.one("run_key", (root_of(run_id),))
            if run is not None and root is not None:
                use(cursor, root[0], run[0], artifacts)

        self._database.write(write, lambda cursor, _: False)

    def doom_artifact(self, artifact: str) -> bool:
        def write(cursor: Cursor) -> bool:
            found = cursor.one("artifact_to_change", (artifact,))
            if found is None or cursor.one("other_artifact_use", (found[0],)) is not None:
                return False
            cursor.change("forget_artifact", (found[0],))
            cursor.change("doom_artifact", (found[0],))
            return True

        return self._database.write(write, lambda cursor, _: False)

    def doomed_artifacts(self, limit: int = 100) -> list[ArtifactRow]:
        return [ArtifactRow(*row) for row in self._database.read("doomed_artifacts", (limit,))]

    def delete_artifact(self, artifact: str) -> None:
        rows = self._database.read("artifact", (artifact,))
        chunks = 0 if not rows else -(-(ArtifactRow(*rows[0]).size or 0) // CHUNK_BYTES)
        # Delete a few chunks at a time, from the end: each transaction holds the write lock only briefly.
        for start in range(chunks - chunks % _CHUNKS_AT_A_TIME, -1, -_CHUNKS_AT_A_TIME):
            last = start == 0

            def write(cursor: Cursor, start: int = start, last: bool = last) -> None:
                found = cursor.one("artifact_to_change", (artifact,))
                if found is not None and found[1] != "saved":
                    cursor.change("delete_chunks", (found[0], start))
                    if last:
                        cursor.change("delete_artifact", (found[0],))

            self._database.write(write, lambda cursor, _: False)

    def take_in_artifact(self, row: ArtifactRow, chunks: Iterable[bytes]) -> None:
        here = self.artifact(row.artifact)
        if here is not None:
            if here.state == "saved":
                return
            self.delete_artifact(row.artifact)
        self._database.write(lambda cursor: _insert(cursor, row), lambda cursor, _: cursor.one("artifact", (row.artifact,)) is not None)
        for number, data in enumerate(chunks):
            self.add_chunk(row.artifact, number, data)

    def outside_artifacts(self, after: str = "", limit: int = 100) -> list[ArtifactRow]:
        return [ArtifactRow(*row) for row in self._database.read("outside_artifacts", {"after": after, "limit": limit})]

    def artifact_families(self, artifact: str) -> list[str]:
        return [str(run_id) for (run_id,) in self._database.read("artifact_families", (artifact,))]

    def artifact_facts(self) -> dict[str, str]:
        ((count, size, here, doomed),) = self._database.read("count_artifacts")
        return {"artifacts": str(count), "artifact_bytes": str(size), "artifact_bytes_here": str(here), "artifacts_doomed": str(doomed)}


def take_in_bytes(cursor: Cursor, row: ArtifactRow, chunks: Iterable[bytes]) -> None:
    """Insert an artifact with its bytes, in the caller's transaction. Nothing happens if it is here already.

    An id is random, so an artifact with the same id is the same artifact, of a specimen or of the run itself. Raises
    Conflict if the artifact here has other bytes, or is being deleted.
    """
    found = cursor.one("artifact", (row.artifact,))
    if found is None:
        _insert(cursor, row)
        key = _key(cursor, row.artifact)
        for number, data in enumerate(chunks):
            cursor.change("insert_chunk", (key, number, data))
        return
    here = ArtifactRow(*found)
    if here.state != "saved" or (here.sha256, here.size, here.tenant) != (row.sha256, row.size, row.tenant):
        raise Conflict(f"artifact {row.artifact} is here with other bytes, or is being deleted; nothing was imported: use another database")


def keep(cursor: Cursor, root_key: int, artifacts: Sequence[str], outside: Sequence[ArtifactRow]) -> None:
    """Record that the family of a copied run uses these artifacts, inside the transaction that inserts the run.

    The rows of `outside` are inserted only now, together with the run. A row without a run would be an orphan, and
    `perdure prune --orphans` in this database would delete its bytes, which the source needs until its move is done.
    """
    for row in outside:
        if cursor.one("artifact_to_change", (row.artifact,)) is None:
            _insert(cursor, row)
    for artifact in artifacts:
        found = cursor.one("artifact_to_change", (artifact,))
        if found is None or found[1] == "deleting":
            raise Conflict(f"artifact {artifact} was deleted while it was copied; nothing of its family was copied: try again")
        cursor.change("keep_artifact", (found[0],))
        cursor.change("use_artifact", (root_key, found[0]))


def doom_unused(cursor: Cursor, runs: dict[str, str], *, at_once: bool) -> int:
    """Give the state `deleting` to the artifacts of these runs that no other family uses. Returns how many.

    The caller deletes the runs. `at_once` is for copies of runs, when the copy is undone: bytes in other places belong
    to the journal that was copied, so only the rows and chunks in this database are deleted.
    """
    keys = [key for (key,) in cursor.all("used_artifacts", runs)]
    cursor.change("prune_artifact_uses", runs)
    if not keys:
        return 0
    wanted = {"artifacts": msgspec.json.encode(keys).decode()}
    cursor.all("lock_artifacts", wanted)
    unused = [key for (key,) in cursor.all("artifacts_to_prune", wanted)]
    for key in unused:
        cursor.change("doom_artifact", (key,))
        if at_once:
            cursor.change("delete_chunks", (key, 0))
            cursor.change("delete_artifact", (key,))
    return len(unused)


def sweep(store: Store) -> int:
    """Delete all artifacts in the state `deleting`. Returns how many. StoreUnavailable if a place is unreachable."""
    deleted = 0
    failed: dict[str, StoreUnavailable] = {}
    left_out: set[str] = set()
    while page := [row for row in store.doomed_artifacts(100 + len(left_out)) if row.artifact not in left_out]:
        for row in page:
            if row.place is not None and row.object is not None:
                try:
                    open_place(row.place).delete(row.object)
                except StoreUnavailable as error:
                    failed[row.place] = error
                    left_out.add(row.artifact)
                    continue
            store.delete_artifact(row.artifact)
            deleted += 1
    if failed:
        raise StoreUnavailable(
            f"{len(left_out)} artifacts could not be deleted, and the next prune tries again: {next(iter(failed.values()))}"
        )
    return deleted


def stored_chunks(store: Reading, row: ArtifactRow) -> Iterator[bytes]:
    """The bytes of a saved artifact as they are stored, without a check of the hash."""
    assert row.size is not None
    if row.place is None:
        for number in range(-(-row.size // CHUNK_BYTES)):
            chunk = store.artifact_chunk(row.artifact, number)
            if chunk is None:
                raise StoreCorrupt(f"artifact {row.artifact}: chunk {number} is missing; restore it from a backup")
            yield chunk
        return
    place, start = open_place(row.place), 0
    while start < row.size:
        assert row.object is not None
        piece = place.read(row.object, start, place.piece_bytes)
        if not piece:
            raise StoreCorrupt(f"artifact {row.artifact}: {row.place} has only {start:,} of {row.size:,} bytes; restore it from a backup")
        yield piece
        start += len(piece)


def _insert(cursor: Cursor, row: ArtifactRow) -> None:
    fields = msgspec.structs.asdict(row)
    del fields["state"]
    fields["digest"] = fields.pop("sha256")
    cursor.change("insert_artifact", fields)


def _key(cursor: Cursor, artifact: str) -> int:
    """The key of an artifact that is being saved. Its row stays locked until the transaction ends."""
    found = cursor.one("artifact_to_change", (artifact,))
    if found is None or found[1] != "saving":
        raise Conflict(f"artifact {artifact} is not being saved any more: it was deleted as an orphan, since its call is over")
    key: int = found[0]
    return key


def _placed(cursor: Cursor, artifact: str) -> str | None:
    found = cursor.one("artifact", (artifact,))
    return None if found is None else ArtifactRow(*found).place
