"""Places for artifacts outside of the database: a folder, or a bucket of an S3-compatible store.

A place knows only names and bytes. The database knows which artifact has which name, which run saved it, and whether
its bytes are right. Every method blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from perdure.errors import InvalidInput, NotReady, StoreCorrupt, StoreUnavailable

T = TypeVar("T")
_NAME = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{16})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BACKOFF: Any = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2}
_FORMS = "file:///absolute/folder, s3://bucket or s3://bucket/prefix"


class ObjectWriter(Protocol):
    """Writes one object. The object is there, whole and durable, only after `close`."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Write nothing more. `Place.delete` deletes what was written."""


class Place(Protocol):
    url: str
    piece_bytes: int  # how much is read at a time

    def create(self, name: str) -> ObjectWriter:
        """Begin an object. An object with the same name is replaced when the new one is closed."""

    def read(self, name: str, start: int, size: int) -> bytes:
        """At most `size` bytes from `start`. StoreCorrupt if there is no such object.

        StoreUnavailable if the place itself cannot be reached.
        """

    def delete(self, name: str) -> None:
        """Delete the object, and what is left of an object that was never closed. It is no error if there is none.

        StoreUnavailable if the place itself is not there: then it is unknown whether the object exists.
        """


def open_place(url: str) -> Place:
    """The place that a URL names. Nothing is written yet."""
    if url.startswith("file:"):
        return Folder(url)
    if url.startswith("s3:"):
        return Bucket(url)
    raise InvalidInput(f"{url!r:.100} is not a place for artifacts; supported: {_FORMS}")


def check_place(url: str) -> str:
    """The URL, if it has the form of a place. Otherwise InvalidInput."""
    open_place(url)
    return url


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:  # perdure makes the names; a name never contains a path
        raise StoreCorrupt(f"{name!r:.100} is not the name of an artifact's object; the row that has it was changed by hand")
    return name


class Folder:
    """A folder that exists. If several machines work on a journal, they all need the same folder at the same path.

    The folder is never created here, because its file system may not be mounted at the moment. In a new folder,
    artifacts would go to another disk, and a prune would treat every artifact that it does not find as deleted.
    """

    piece_bytes = 1 << 20

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if (
            parts.netloc not in ("", "localhost")
            or not path.startswith("/")
            or path == "/"
            or "\0" in path
            or parts.query
            or parts.fragment
        ):
            raise InvalidInput(f"{url!r:.100} does not name a folder for artifacts: file:///absolute/folder")
        self.url = url
        self._folder = Path(os.path.normpath(path))

    def create(self, name: str) -> ObjectWriter:
        target = self._file(name)
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            return _FileWriter(self, target)
        except OSError as error:
            raise self.unavailable(error) from None

    def read(self, name: str, start: int, size: int) -> bytes:
        try:
            with open(os.open(self._file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            self._check_is_there()
            raise StoreCorrupt(f"{self._file(name)} is missing; restore it from a backup, or mount the folder on this machine") from None
        except OSError as error:
            raise self.unavailable(error) from None

    def delete(self, name: str) -> None:
        target = self._file(name)
        found = False
        for file in (_part(target), target):
            try:
                file.unlink()
                found = True
            except FileNotFoundError:
                pass
            except OSError as error:
                raise self.unavailable(error) from None
        if not found:
            self._check_is_there()

    def _check_is_there(self) -> None:
        """Call this if a file is missing. StoreUnavailable if the folder may not be mounted on this machine."""
        try:
            with os.scandir(self._folder) as entries:
                empty = next(entries, None) is None
        except OSError as error:
            raise self.unavailable(error) from None
        # If the folder ever had an artifact, it has folders below it for ever. An empty folder is a mount point
        # without its file system; or a crash came before the very first artifact, and there is nothing to delete yet.
        if empty:
            raise StoreUnavailable(f"the folder for artifacts {self._folder} is empty; mount its file system on this machine")

    def unavailable(self, error: OSError) -> StoreUnavailable:
        what = "it does not exist; create it, or mount its file system on this machine"
        why = what if isinstance(error, FileNotFoundError) else error.strerror or error
        return StoreUnavailable(f"the folder for artifacts {self._folder} cannot be used: {why}")

    def _file(self, name: str) -> Path:
        # Use two levels of folders, so that no folder gets too many files.
        return self._folder / _checked(name)[:2] / name


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


class _FileWriter:
    """Writes a file that ends in .part, and renames it at the end. A crash in between leaves only that file."""

    def __init__(self, folder: Folder, target: Path) -> None:
        self._folder = folder
        self._target = target
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = open(os.open(_part(target), flags, 0o600), "wb")  # noqa: SIM115 – `close` closes it

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._folder.unavailable(error) from None

    def abandon(self) -> None:
        try:
            self._file.close()
        except OSError:
            pass  # the rest of the buffer could not be written; it is not needed

    def close(self) -> None:
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            os.replace(_part(self._target), self._target)
            for folder in (self._target.parent, self._target.parent.parent):
                entry = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(entry)  # without this, the file's name could be lost in a power failure
                finally:
                    os.close(entry)
        except OSError as error:
            raise self._folder.unavailable(error) from None


class Bucket:
    """A bucket of an S3-compatible store. Credentials, region and endpoint come from the usual AWS_… variables."""

    piece_bytes = 8 << 20  # each piece is a request

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if _BUCKET.fullmatch(parts.netloc) is None or parts.query or parts.fragment:
            raise InvalidInput(f"{url!r:.100} does not name a bucket: s3://bucket or s3://bucket/prefix")
        self.url = url
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path).strip("/")
        self._opened: Any = None

    @property
    def _store(self) -> Any:
        if self._opened is None:
            try:
                from obstore.store import S3Store
            except ImportError:
                raise NotReady(f"artifacts in {self.url} need the package obstore: pip install 'perdure[s3]'") from None
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
            given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
            # Allow plain HTTP only if the URL of the endpoint asks for it.
            self._opened = S3Store(
                self._bucket,
                prefix=self._prefix or None,
                client_options={"allow_http": endpoint.startswith("http://"), "timeout": "60s", "connect_timeout": "10s"},
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=60), "backoff": _BACKOFF},
                **given,
            )
        return self._opened

    def create(self, name: str) -> ObjectWriter:
        store = self._store
        from obstore import open_writer

        # Send one piece at a time: n pieces at a time would be faster, but they would need n times the memory.
        writer = self._do(lambda: open_writer(store, _checked(name), buffer_size=self.piece_bytes, max_concurrency=1))
        return _ObjectWriter(self, writer)

    def read(self, name: str, start: int, size: int) -> bytes:
        store = self._store
        from obstore import get_range

        return bytes(self._do(lambda: get_range(store, _checked(name), start=start, length=size)))

    def delete(self, name: str) -> None:
        store, path = self._store, _checked(name)
        from obstore import delete

        try:
            self._do(lambda: delete(store, path))
        except StoreCorrupt:
            pass  # there is no such object

    def _do(self, work: Callable[[], T]) -> T:
        from obstore.exceptions import BaseError

        try:
            return work()
        except FileNotFoundError:
            self._check_is_there()
            raise StoreCorrupt(f"an object is missing from {self.url}; restore it from a backup") from None
        except (BaseError, OSError) as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise StoreUnavailable(f"the bucket for artifacts {self.url} cannot be used: {first[0][:300]}") from None

    def _check_is_there(self) -> None:
        """Call this if an object is missing. StoreUnavailable if the bucket itself is missing."""
        from obstore import list as listing

        try:
            next(iter(listing(self._store, chunk_size=1)), None)
        except Exception as error:  # also if the list is refused: then it is unknown what is missing
            raise StoreUnavailable(f"the bucket for artifacts {self.url} is not there, or cannot be listed: {str(error)[:200]}") from None


class _ObjectWriter:
    """A multipart upload, or one request for a small object.

    A crash leaves parts. Only the bucket's own rule for incomplete uploads deletes these parts.
    """

    def __init__(self, bucket: Bucket, writer: Any) -> None:
        self._bucket = bucket
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._bucket._do(lambda: self._writer.write(data))

    def close(self) -> None:
        self._bucket._do(self._writer.close)

    def abandon(self) -> None:
        pass  # an upload that is not closed makes no object
