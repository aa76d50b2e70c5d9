"""The statements of queries.sql by name. Loaded once."""

from __future__ import annotations

from importlib import resources

from perdure.store.statements import load

QUERIES = load(resources.files("perdure.store.sqlite").joinpath("queries.sql").read_text("utf-8"))
