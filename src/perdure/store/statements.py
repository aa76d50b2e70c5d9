"""A dialect's statements by name, from the one file in which they stand with the reasons for them."""

from __future__ import annotations

_MARK = "-- name: "


def load(text: str) -> dict[str, str]:
    """Statement by name; the comment lines around a statement stay in the file."""
    found: dict[str, str] = {}
    for part in text.split(f"\n{_MARK}")[1:]:
        name, *lines = part.splitlines()
        assert name not in found, f"queries.sql has two statements named {name}"
        found[name] = "\n".join(line for line in lines if line and not line.startswith("--"))
        assert found[name], f"queries.sql has no statement under the name {name}"
    return found
