"""docs/migrating.md names new places. Each of these places exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from perdure.moved import MOVED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text()


def new_places(page: str) -> list[str]:
    """The modules in the second column of the tables; `.name` is in the same package as the module before it."""
    found: list[str] = []
    for cell in re.findall(r"^\| `perdure[^|]*\| ([^|]+) \|$", page, re.M):
        for name in re.findall(r"`(perdure\.[\w.]+|\.\w+)`", cell):
            found.append(name if name.startswith("perdure") else found[-1].rpartition(".")[0] + name)
    return found


def test_every_new_place_exists():
    places = new_places(PAGE)
    assert len(places) > 20
    assert [place for place in places if importlib.util.find_spec(place) is None] == []


def test_every_module_with_an_old_name_is_on_the_page():
    assert [old for old in MOVED if old not in PAGE] == []
    assert [instead for _, instead in MOVED.values() if instead not in PAGE] == []
