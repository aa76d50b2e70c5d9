"""The text of a test that holds today's code to a recorded run. What it imports is plain to see, and yours to change."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from perdure.errors import InvalidInput

_TEMPLATE = '''"""What run {run_id} of agent {agent} did on {on}, and this code must still do.

Made by `perdure export`. A difference that is meant is a new version of the agent, and this file has served its time.
"""

{imports}
RUN = recorded(Path(__file__).with_name({file}))


def test_{slug}_goes_as_it_was_recorded() -> None:
    RUN.replay({name})


def test_{slug}_asks_for_the_same_when_it_runs_anew() -> None:
    again = RUN.rerun({name})
    assert again.same, again.diff
'''


def source_of_test(test: Path, export: Path, run_id: str, agent: str, on: str, target: str) -> str:
    """The test file. InvalidInput when the target is no `file.py:name` or `package.module:name`, or the export lies elsewhere."""
    if export.parent.resolve() != test.parent.resolve():
        raise InvalidInput(f"{export}: the export of a test lies beside it, in {test.parent}; leave -o out, or name a file there")
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise InvalidInput(f"{target}: a test imports its agent from a Python file: FILE.py:NAME, or package.module:NAME")
    lines = ["from pathlib import Path"]
    if where.endswith(".py"):
        folder, module = _place(Path(where))
        lines = ["import sys", *lines, "", f"sys.path.insert(0, {_from_here(test, folder)})", ""]
    else:
        module = where
    later = "  # noqa: E402" if where.endswith(".py") else ""
    imports = [*lines, *sorted([f"from {module} import {name}{later}", f"from perdure.testing import recorded{later}"]), ""]
    slug = re.sub(r"\W+", "_", f"run_{run_id}", flags=re.ASCII).strip("_").lower()
    words = {"run_id": _plain(run_id), "agent": _plain(agent), "on": on, "file": json.dumps(export.name), "slug": slug, "name": name}
    return _TEMPLATE.format(imports="\n".join(imports), **words)


def _place(file: Path) -> tuple[Path, str]:
    """The folder to import from, and the module's name from there: a file in a package is a part of it."""
    if not file.is_file():
        raise InvalidInput(f"{file} is not here; name the file that has the agent: FILE.py:NAME")
    file = file.resolve()
    names = [] if file.stem == "__init__" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if not names or not all(name.isidentifier() for name in names):
        raise InvalidInput(f"{file} cannot be imported by its name; write the test by hand, with recorded(…).replay(agent)")
    return folder, ".".join(names)


def _from_here(test: Path, folder: Path) -> str:
    steps = os.path.relpath(folder, test.parent.resolve())
    return "str(Path(__file__).parent)" if steps == "." else f"str((Path(__file__).parent / {json.dumps(steps)}).resolve())"


def _plain(text: str) -> str:
    """For a docstring: nothing in it may end it, or be read as an escape."""
    return re.sub(r"[^\w.,:/@ -]", "?", text)
