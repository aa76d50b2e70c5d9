"""docs/api.md has every public name, with its current signature and docstring."""

from __future__ import annotations

import inspect
from pathlib import Path

from tests.docs import api_page

import perdure
from perdure import app, sync

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "api.md").read_text() == api_page.page(), "python -m tests.docs.api_page > docs/api.md"


def test_the_page_has_every_public_name():
    assert set(perdure.__all__) - api_page.covered() == set()


def test_the_page_leaves_out_nothing_that_does_not_exist():
    for name, inside in api_page.INSIDE.items():
        assert [one for one in inside.split() if not hasattr(api_page.named(name), one)] == [], name


def test_the_blocking_app_has_the_methods_of_the_page():
    for one, other in ((app.Perdure, sync.Perdure), (app.Handle, sync.Handle)):
        left_out = api_page.INSIDE[one.__name__].split()
        public = {name for name, value in vars(one).items() if not name.startswith("_") and inspect.isfunction(value)}
        assert {name for name in public if not hasattr(other, name)} <= set(left_out), one
