"""Finds the files at a path, reads them and parses them. A file that cannot be parsed gives a one-line error."""

from __future__ import annotations

import ast
import codecs
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from perdure import shell
from perdure.errors import InvalidInput

MAX_BYTES = 4 * 1024 * 1024
_DECLARATION = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(rb"[ \t\f]*(#.*)?\r?$")
_PLANS = (".toml", ".json")
_LEFT_OUT = frozenset(("__pycache__", "node_modules", "site-packages"))


class NotPython(Exception):
    """The file cannot be parsed. The error has the reason, and its line and column in the file."""

    def __init__(self, why: str, line: int = 1, column: int = 1) -> None:
        super().__init__(why)
        self.line = line
        self.column = column


def files_at(path: Path) -> Iterator[Path]:
    """The file itself, or every *.py file below a folder, without hidden files and virtual environments.

    InvalidInput if nothing is at this path, or if the file is a plan (.toml or .json).
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        name, colon, _ = str(path).rpartition(":")
        way_out = (
            f"; the check takes a file, not an agent in the file: {shell.command('check', name)}" if colon and Path(name).is_file() else ""
        )
        raise InvalidInput(f"{path}: {error.strerror}{way_out}") from None
    except ValueError:  # the path contains a NUL
        raise InvalidInput(f"{str(path)!r} cannot be the name of a file") from None
    if path.suffix in _PLANS and not is_folder:
        raise InvalidInput(
            f"{path} is no Python file; a plan is checked with its tools: {shell.command('run', str(path))} --tools FILE.py --check"
        )
    if not is_folder:
        yield path
        return
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if not _is_left_out(Path(folder) / name))
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py") and not name.startswith("."))


def _is_left_out(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _LEFT_OUT or (folder / "pyvenv.cfg").exists()


def read(path: Path) -> bytes:
    """The bytes of a file. InvalidInput if the file cannot be read, or has more than MAX_BYTES."""
    try:
        # O_NONBLOCK: without this flag, opening a named pipe waits for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(f"{path} is not a file")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{path}: more than {MAX_BYTES:,} bytes; a file of that size is not written by hand, leave it out")
    return data


def decode(data: bytes) -> str:
    """The text of the bytes, in the encoding that the file declares.

    NotPython if the bytes cannot be decoded. The error names the first byte that cannot be decoded.
    """
    has_mark = data.startswith(codecs.BOM_UTF8)
    data = data.removeprefix(codecs.BOM_UTF8)
    declared = _declared_encoding(data)
    encoding = declared or "utf-8"
    try:
        is_utf_8 = codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        raise NotPython(f"unknown encoding: {encoding}") from None
    if has_mark and not is_utf_8:
        raise NotPython(f"the file begins with the mark of UTF-8, and declares the encoding {encoding}")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line, column = _place(data[: error.start])
        way_out = "save the file as UTF-8" if declared else "save the file as UTF-8, or declare its encoding in the first line"
        raise NotPython(f"byte 0x{data[error.start]:02x} is no {encoding}; {way_out}", line, column) from None
    except (LookupError, UnicodeError):  # such as the codec "undefined", which always raises
        raise NotPython(f"the encoding {encoding} is not an encoding of text") from None
    if "\0" in text:
        line, column = _place(text[: text.index("\0")].encode())
        raise NotPython("a NUL character; Python accepts no file with a NUL character", line, column)
    return text


def _declared_encoding(data: bytes) -> str | None:
    """The encoding that the first or the second line declares in a comment (PEP 263).

    tokenize.detect_encoding does not help: from Python 3.14 on it decodes these lines itself, and if that fails, its
    error names neither the encoding nor the byte.
    """
    for line in data.split(b"\n", 2)[:2]:
        declared = _DECLARATION.match(line)
        if declared:
            return declared[1].decode()
        if not _BLANK.match(line):
            return None
    return None


def parse(text: str) -> ast.Module:
    """The parsed tree of the text. NotPython if the text cannot be parsed."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotPython(error.msg, max(error.lineno or 1, 1), max(error.offset or 1, 1)) from None
    except (RecursionError, MemoryError):
        raise NotPython("it is nested too deeply to be parsed") from None
    except ValueError as error:
        raise NotPython(str(error)) from None


def _place(before: bytes) -> tuple[int, int]:
    lines = re.split(rb"\r\n|\r|\n", before)
    return len(lines), len(lines[-1].decode(errors="replace")) + 1
