"""The statements of queries.sql by name. Loaded once."""

from __future__ import annotations

from pathlib import Path

from perdure.store.statements import load

QUERIES = load(Path(__file__).with_name("queries.sql").read_text("utf-8"))
