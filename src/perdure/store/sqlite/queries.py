"""The statements of this dialect by name, loaded once."""

from __future__ import annotations

from perdure.store.cursor import load

QUERIES = load("sqlite")
