"""ARCHITECTURE.md names files. Each of these files exists, and the page names every folder of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "perdure"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
NAME = re.compile(r"[\w.]+\.(?:py|sql|md|toml)\b|\b[a-z_]+/")


def tree(page: str) -> Iterator[tuple[Path, str]]:
    """Each name in the tree of folders, with the folder that it must lie in."""
    lines = page.partition("## Folders\n\n```text\n")[2].partition("\n```")[0].splitlines()
    above: list[Path] = []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, words = line.strip().partition("  ")
        here = above[depth - 1] if depth else Path()
        for name in NAME.findall(names):
            yield here, name
        del above[depth:]
        above.append(here / names.split(",")[0])
        for name in NAME.findall(words):
            yield above[-1] if names.endswith("/") else here, name


def missing(page: str) -> list[str]:
    """Paths of a page that do not exist."""
    text = re.sub(r"```text.*?```", "", page, flags=re.S)
    named = [path.rstrip("/") for path in re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|md|sql|toml))`", text)]
    bare = [path for path in named if not ((PACKAGE / path).exists() or (ROOT / path).exists() or path in ("database.py", "schema"))]
    return bare + [str(folder / name) for folder, name in tree(page) if not (PACKAGE / folder / name).exists()]


def test_every_path_of_the_page_exists():
    assert missing(PAGE) == []


def test_a_path_that_is_gone_is_noticed():
    page = "See `core/nothing.py`.\n\n## Folders\n\n```text\ncore/     rules\n  gone.py, state.py   the fold\nlost/   words: app.py\n```\n"
    assert missing(page) == ["core/nothing.py", "core/gone.py", "lost", "lost/app.py"]


def test_every_folder_of_the_package_is_on_the_page():
    listed = {str(folder / name).rstrip("/") for folder, name in tree(PAGE) if name.endswith("/")}
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert folders - listed == set()


def test_every_module_at_the_top_and_of_the_core_and_the_engine_is_on_the_page():
    listed = {str(folder / name) for folder, name in tree(PAGE)}
    folders = (PACKAGE, PACKAGE / "core", PACKAGE / "engine", PACKAGE / "engine" / "local")
    modules = {str(path.relative_to(PACKAGE)) for folder in folders for path in folder.glob("[!_]*.py")}
    assert modules - listed == set()
