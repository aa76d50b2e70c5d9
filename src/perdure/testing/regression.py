"""Writes the source of a test file: the test compares today's code with a recorded run. The user may edit the file."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from perdure.errors import InvalidInput

_TEMPLATE = '''"""What run {run_id} of agent {agent} did on {on}, and this code must still do.

Made by `perdure export`. If the code is changed on purpose, give the agent a new version, and delete this file.
"""

{imports}
RUN = recorded(Path(__file__).with_name({file}))


def test_{slug}_goes_as_it_was_recorded() -> None:
    RUN.replay({agents})


def test_{slug}_asks_for_the_same_when_it_runs_anew() -> None:
    RUN.rerun({agents}).check()
'''


def check_places(test: Path, export: Path, target: str) -> None:
    """InvalidInput if no test can be written to these files, or for this target.

    This is called before the user's code is imported.
    """
    if test.suffix != ".py":
        raise InvalidInput(f"{test}: pytest takes a test from a file that ends in .py, such as {test.with_suffix('.py')}")
    if export.parent.resolve() != test.parent.resolve():
        raise InvalidInput(f"{export}: the export of a test lies beside it, in {test.parent}; leave -o out, or name a file there")
    if export.name == test.name:
        raise InvalidInput(f"{export} cannot be the export and its test; leave -o out, or name another file there")
    _import_of(target)


def source_of_test(test: Path, export: Path, run_id: str, agent: str, on: str, targets: list[str]) -> str:
    """The source of the test file. The first target is the agent of the run, the others are agents of its children."""
    lines, names = _imports(test, targets)
    slug = re.sub(r"\W+", "_", f"run_{run_id}", flags=re.ASCII).strip("_").lower()
    words = {"run_id": _plain(run_id), "agent": _plain(agent), "on": on, "file": json.dumps(export.name), "slug": slug}
    return _TEMPLATE.format(imports="\n".join(lines), agents=", ".join(names), **words)


def _imports(test: Path, targets: list[str]) -> tuple[list[str], list[str]]:
    """The import lines of the test file, and the name that each target has in the file."""
    folders: dict[Path, None] = {}
    imported: dict[str, list[str]] = {"perdure.testing": ["recorded"]}
    names: list[str] = []
    for target in targets:
        folder, module, name = _import_of(target)
        called = name if name not in (*names, "recorded", "Path", "RUN", "sys") else f"{name}_{len(names) + 1}"
        imported.setdefault(module, []).append(name if called == name else f"{name} as {called}")
        names.append(called)
        if folder is not None:
            folders[folder] = None
    later = "  # noqa: E402" if folders else ""
    lines = sorted(f"from {module} import {', '.join(sorted(wanted))}{later}" for module, wanted in imported.items())
    if not folders:
        return ["from pathlib import Path", *lines, ""], names
    on_path = [f"sys.path.insert(0, {_from_here(test, folder)})" for folder in folders]
    return ["import sys", "from pathlib import Path", "", *on_path, "", *lines, ""], names


def _import_of(target: str) -> tuple[Path | None, str, str]:
    """(folder for sys.path or None, module, name) for a target `file.py:name` or `package.module:name`."""
    if target.partition(" --tools ")[0].endswith((".toml", ".json")):
        raise InvalidInput(
            f"{target}: a test imports its agent from a Python file, not from a plan's file; give the plan a name in a Python file, "
            'deploy = Plan.from_file("deploy.toml", tools), and name it: FILE.py:deploy'
        )
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise InvalidInput(f"{target}: a test imports its agent from a Python file: FILE.py:NAME, or package.module:NAME")
    if not where.endswith(".py"):
        return None, where, name
    folder, module = _place(Path(where))
    return folder, module, name


def _place(file: Path) -> tuple[Path, str]:
    """The folder for sys.path, and the module's name in that folder. A module in a package has a dotted name."""
    if not file.is_file():
        raise InvalidInput(f"{file} does not exist; name the file that has the agent: FILE.py:NAME")
    file = file.resolve()
    names = [] if file.stem == "__init__" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if not names or not all(name.isidentifier() for name in names) or (len(names) == 1 and names[0] in sys.stdlib_module_names):
        raise InvalidInput(f"{file} cannot be imported by its name; write the test by hand, with recorded(…).replay(agent)")
    return folder, ".".join(names)


def _from_here(test: Path, folder: Path) -> str:
    steps = os.path.relpath(folder, test.parent.resolve())
    return "str(Path(__file__).parent)" if steps == "." else f"str((Path(__file__).parent / {json.dumps(steps)}).resolve())"


def _plain(text: str) -> str:
    """The text without characters that could end a docstring or be read as an escape."""
    return re.sub(r"[^\w.,:/@ -]", "?", text)
