"""A plan in a file, for people who do not write Python: TOML, or JSON of the same form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from perdure.core import codec
from perdure.core.codec import shown
from perdure.errors import InvalidInput, NotFound
from perdure.plan.step import Document

MAX_BYTES = 4 * 1024 * 1024
ENDINGS = (".toml", ".json")


def read_plan(path: str | os.PathLike[str]) -> tuple[Document, str | None]:
    """The plan's document and its version, if the file pins one. InvalidInput names the file, and the line where it is broken."""
    where = os.fspath(path)
    text = _text(Path(where), where)
    whole = _parsed(text, where)
    if not isinstance(whole, dict):
        raise InvalidInput(f"{where}: a plan is an object with its steps, not {shown(whole)}")
    version = whole.pop("version", None)
    if version is not None and not isinstance(version, str):
        raise InvalidInput(f'{where}: version is a text, such as "7", not {shown(version)}')
    whole.setdefault("name", Path(where).stem)
    if isinstance(whole.get("params"), dict):
        whole["params"] = {name: {"type": given} if isinstance(given, str) else given for name, given in whole["params"].items()}
    for step in whole["steps"] if isinstance(whole.get("steps"), list) else []:
        if isinstance(step, dict) and isinstance(step.get("after"), str):
            step["after"] = [step["after"]]
    return whole, version


def _text(file: Path, where: str) -> str:
    if not where.endswith(ENDINGS):
        raise InvalidInput(f"{where}: a plan is a file that ends in {' or '.join(ENDINGS)}")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {where}") from None
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise InvalidInput(f"{where} is larger than {MAX_BYTES:,} bytes; a plan is short: keep its data elsewhere, for a tool to read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} is not UTF-8 text: byte {error.start}") from None


def _parsed(text: str, where: str) -> Any:
    if where.endswith(".json"):
        return codec.parse(text, where)
    import tomllib

    try:
        parsed = tomllib.loads(text)
    except RecursionError:
        raise InvalidInput(f"{where} is nested deeper than {codec.MAX_DEPTH} levels") from None
    except ValueError as error:  # TOMLDecodeError, and integers of too many digits
        raise InvalidInput(f"{where} is not valid TOML: {error}") from None
    try:
        return codec.decode(codec.encode(parsed))  # dates become text, as they would in JSON
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
