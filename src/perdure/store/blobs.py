"""Blobs: payloads that are too large for an event.

A blob is stored under its digest, in the commit of the event that names it. Every read verifies the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from perdure.errors import InvalidInput, StoreCorrupt
from perdure.store.cursor import Cursor
from perdure.store.part import Part


def put(cursor: Cursor, key: int, blobs: Iterable[bytes]) -> None:
    """Store blobs that the run with this key uses, inside the caller's transaction.

    The blobs stay until the run is deleted.
    """
    cursor.each("use_blob", [(key, digest) for digest in put_unused(cursor, blobs)])


def put_unused(cursor: Cursor, blobs: Iterable[bytes]) -> list[bytes]:
    """Store blobs under their SHA-256, and lock them against deletion until this transaction ends.

    Returns the digests.
    """
    named = {hashlib.sha256(blob).digest(): blob for blob in blobs}
    # Store the blobs in sorted order, so that two transactions that store the same blobs cannot deadlock.
    digests = missing = sorted(named)
    while missing:
        cursor.each("insert_blob", [(digest, named[digest]) for digest in missing])
        names = msgspec.json.encode([digest.hex() for digest in missing]).decode()
        kept = {digest for (digest,) in cursor.all("blobs_to_keep", {"digests": names})}
        # A blob that existed before may have been deleted, while this transaction waited for a prune to end. Store the
        # blob again.
        missing = [digest for digest in missing if digest not in kept]
    return digests


class Blobs(Part):
    def blob(self, digest: str) -> bytes:
        """The blob with this digest. StoreCorrupt if the blob is missing, or its content has another digest."""
        try:
            key = bytes.fromhex(digest)
        except ValueError:
            raise InvalidInput(f"{digest[:80]!r} is not the digest of a blob: it has 64 hexadecimal digits") from None
        rows = self._database.read("blob", (key,))
        if not rows:
            raise StoreCorrupt(f"lacks blob {digest}, which is missing; restore it from a backup", where=self._database.where)
        data = rows[0][0]
        if not isinstance(data, bytes) or hashlib.sha256(data).digest() != key:
            # On a damaged page, the value may have another type than bytes.
            raise StoreCorrupt(
                f"is damaged: blob {digest} does not have the content that it was stored with; restore it from a backup",
                where=self._database.where,
            )
        return data
