"""Which modules a process loads before it can work: every start waits for them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional, Union

import pytest

from perdure import Perdure
from perdure.tool.convert import json_schemas
from perdure.tool.describe import documented, plain_schema

_LATE = (
    *("pydantic", "docstring_parser", "rich"),
    *("perdure.engine.notify.messages", "perdure.models", "perdure.agents.plan", "perdure.agents.react.agent"),
    "zipfile",  # importlib.resources brings it
)
_AGENT = """
import gc, sys
from perdure import Run, agent, tool

@tool(effect="keyed")
async def seen(text: str, often: int | None = None) -> dict[str, object]:
    '''What this process has loaded, and how much of it the garbage collector leaves alone.'''
    return {"modules": list(sys.modules), "frozen": gc.get_freeze_count()}

@agent(version="1")
async def looking(run: Run) -> dict[str, object]:
    await seen("once")
    return await seen("twice")
"""
_MODEL = """
from perdure import ReAct, tool
from perdure.models import Scripted

@tool(effect="read")
async def look_up(name: str, often: int | None = None, exactly: bool = False) -> str:
    '''Looks something up.'''
    return name

thinking = ReAct("thinking", model=Scripted([]), tools=[look_up])
"""


def test_a_worker_that_drives_a_plain_run_has_loaded_only_what_it_needs_and_frozen_that(tmp_path: Path) -> None:
    file, url = tmp_path / "looking.py", f"sqlite:///{tmp_path}/perdure.db"
    file.write_text(_AGENT)
    command = [sys.executable, "-m", "perdure", "worker", str(file), "--url", url]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ""})
    try:
        seen = asyncio.run(_result(url, file))
    finally:
        worker.send_signal(signal.SIGTERM)
        told = worker.communicate(timeout=60)[1]
    assert worker.returncode == 0, told
    assert "perdure.cli.worker" in seen["modules"]  # it is the worker that was asked
    assert [name for name in _LATE if name in seen["modules"]] == []
    assert seen["frozen"] > 10_000


async def _result(url: str, file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "looking", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), found)
    async with Perdure(url) as app:
        handle = await app.start(found["looking"], id="one")
        result: dict[str, Any] = await handle.result(timeout=60)
        return result


def test_an_agent_whose_tools_take_text_and_numbers_is_declared_without_pydantic(tmp_path: Path) -> None:
    program = f"{_MODEL}\nimport sys\nprint(*(name for name in ('pydantic', 'docstring_parser', 'rich') if name in sys.modules))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.split() == []


_SCALARS = (str, int, float, bool, None)


@pytest.mark.parametrize(
    "annotation",
    [
        *(*_SCALARS, type(None), Any),
        *(Union[pair] for pair in itertools.permutations(_SCALARS, 2)),  # noqa: UP007
        *(int | str | None, None | int | str, Optional[Union[float, bool]]),  # noqa: UP007, UP045
    ],
    ids=str,
)
def test_what_is_said_of_a_plain_annotation_is_what_pydantic_says(annotation: Any) -> None:
    assert plain_schema(annotation) == json_schemas({"it": annotation})[0]["it"]


@pytest.mark.parametrize("annotation", [list, dict, list[int], dict[str, int], object, Union[Any, int], bytes, 1, "str"], ids=str)  # noqa: UP007
def test_pydantic_is_asked_about_all_else(annotation: Any) -> None:
    assert plain_schema(annotation) is None


@pytest.mark.parametrize(
    "text", ["", "Looks it up.", "  Looks - it (up)  ", "Args", "Returns nothing.", "Parameters ----------", ">>> it()"]
)
def test_a_docstring_of_one_line_says_what_its_parser_says(text: str) -> None:
    from docstring_parser import parse

    def fn() -> None: ...

    fn.__doc__ = text
    parsed = parse(text)
    assert documented(fn) == (parsed.short_description or "", {})
    assert not parsed.params
