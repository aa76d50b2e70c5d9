"""Runs all rules on one file."""

from __future__ import annotations

import warnings
from pathlib import Path

from msgspec import Struct

from perdure.check.file import File
from perdure.check.finding import Finding, without_ignored
from perdure.check.lives import look_at_lives
from perdure.check.order import look_at_order
from perdure.check.shared import look_at_shared
from perdure.check.source import NotPython, decode, parse
from perdure.check.swallow import look_at_swallowing
from perdure.check.tools import look_at_tools
from perdure.check.touching import look_at_touching


class Seen(Struct, frozen=True):
    """The result for one file: the findings, and how many agents and tools the file declares."""

    findings: list[Finding]
    agents: int = 0
    tools: int = 0


def look(path: Path | str, data: bytes) -> Seen:
    """Find the code in this file that breaks replay or safety.

    The file is not imported and not run, so the modules that it imports need not be installed.
    """
    shown = str(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns of escapes such as "\d"; no rule needs these warnings
            return _look(shown, decode(data))
    except NotPython as wrong:
        way_out = "fix it first: nothing else in the file was checked"
        return Seen([Finding(shown, wrong.line, wrong.column, "syntax", "error", "", str(wrong), way_out)])
    except RecursionError:
        message = "a part of the file is nested too deeply to be checked"
        return Seen([Finding(shown, 1, 1, "syntax", "error", "", message, "move generated code to another file")])


def _look(path: str, text: str) -> Seen:
    file = File(path, text, parse(text))
    for unit in file.units:
        look_at_touching(file, unit)
        look_at_order(file, unit)
        look_at_swallowing(file, unit)
    look_at_shared(file, file.units)
    look_at_lives(file)
    look_at_tools(file)
    return Seen(without_ignored(path, text, file.found), len(file.declared.agents) + file.declared.built, len(file.declared.tools))
