"""Payloads too large for an event: stored under their digest, in the commit of the event that names them, and verified when read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from perdure.errors import InvalidInput, StoreCorrupt
from perdure.store.cursor import Cursor
from perdure.store.part import Part


def put(cursor: Cursor, key: int, blobs: Iterable[bytes]) -> None:
    """Store each under its SHA-256, inside the caller's transaction, for the run with that number: as long as it is there, so are they."""
    cursor.each("use_blob", [(key, digest) for digest in put_unused(cursor, blobs)])


def put_unused(cursor: Cursor, blobs: Iterable[bytes]) -> list[bytes]:
    """Store each, and nobody deletes any of them before this transaction ends; their digests."""
    named = {hashlib.sha256(blob).digest(): blob for blob in blobs}
    # In this order: two who store the same ones must not wait for each other.
    digests = missing = sorted(named)
    while missing:
        cursor.each("insert_blob", [(digest, named[digest]) for digest in missing])
        names = msgspec.json.encode([digest.hex() for digest in missing]).decode()
        kept = {digest for (digest,) in cursor.all("blobs_to_keep", {"digests": names})}
        # One that was there can have been deleted while we waited for whoever was about to: then it is stored again.
        missing = [digest for digest in missing if digest not in kept]
    return digests


class Blobs(Part):
    def blob(self, digest: str) -> bytes:
        """The bytes that have this digest; StoreCorrupt when they are missing or have another."""
        try:
            key = bytes.fromhex(digest)
        except ValueError:
            raise InvalidInput(f"{digest[:80]!r} is not the digest of a blob: it has 64 hexadecimal digits") from None
        rows = self._database.read("blob", (key,))
        if not rows:
            raise StoreCorrupt(f"blob {digest} is missing from {self._database.where}; restore it from a backup")
        data = rows[0][0]
        if not isinstance(data, bytes) or hashlib.sha256(data).digest() != key:  # in a damaged page it may not even be bytes
            raise StoreCorrupt(
                f"blob {digest} in {self._database.where} does not have the content that it was stored with; restore it from a backup"
            )
        return data
