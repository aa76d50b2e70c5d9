"""Checks a database as a whole: events without a run, and triggers and functions that are missing or changed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.migrate import MIGRATIONS

_TRIGGER = re.compile(r"CREATE TRIGGER (\w+)[^;]*?\bON (perdure_\w+)[^;]*", re.DOTALL)
_TRIGGER_PARTS = re.compile(
    r"(BEFORE|AFTER) (.+?) ON (?:\S+\.)?perdure_\w+ .*?FOR EACH (\w+) (?:WHEN \((.*)\) )?EXECUTE FUNCTION (?:\S+\.)?(\w+)\((.*?)\)",
    re.DOTALL,
)
_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (perdure_\w+)\(.*?AS \$\$(.*?)\$\$", re.DOTALL)


def problems(database: PostgresDatabase) -> list[str]:
    """Each problem in words; empty if there is no problem."""
    return [*_orphans(database), *_triggers(database), *_functions(database)]


def _orphans(database: PostgresDatabase) -> Iterator[str]:
    for run, events, data in database.read("journals_without_run"):
        yield (
            f"{_name(run, data)}: its row is gone, and a journal of {events:,} events is left: the row was deleted by hand;  "
            "restore it from a backup"
        )


def _name(run: int, data: bytes | None) -> str:
    try:
        return f"run {msgspec.json.decode(data or b'')['run_id']!r}"
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError):
        return f"run number {run}"


def _triggers(database: PostgresDatabase) -> Iterator[str]:
    found = {(table, name): (enabled, made) for table, name, made, enabled in database.read("triggers")}
    # A later migration may replace a trigger: the last definition counts.
    wanted = {(trigger[2], trigger[1]): trigger[0] for migration in MIGRATIONS for trigger in _TRIGGER.finditer(migration.sql)}
    for (table, name), definition in wanted.items():
        enabled, made = found.get((table, name), (None, ""))
        if enabled is None:
            what = "is missing"
        elif enabled not in ("O", "A"):
            what = "is switched off"
        elif _essence(made) != _essence(definition):
            what = "is not the one that perdure makes"
        else:
            continue
        yield f"the trigger {name} on {table} {what}: the database was changed by hand; find out what else was changed"


def _essence(trigger: str) -> object:
    """What a trigger does, in a form that can be compared: PostgreSQL rewrites the text of a trigger's definition."""
    parts = _TRIGGER_PARTS.search(" ".join(trigger.split()))
    if parts is None:
        return trigger
    moment, events, each, condition, function, argument = parts.groups()
    # Of the trigger's condition, compare only the columns and values, in order.
    return (
        moment,
        sorted(events.split(" OR ")),
        each,
        re.findall(r"\b(?:old|new)\.\w+|'\w*'", condition.lower() if condition else ""),
        function,
        argument,
    )


def _functions(database: PostgresDatabase) -> Iterator[str]:
    found: dict[str, str] = {row[0]: row[1] for row in database.read("functions")}
    expected = {name: body for migration in MIGRATIONS for name, body in _FUNCTION.findall(migration.sql)}
    for name, body in expected.items():
        if found.get(name) != body:
            what = "is not the one that perdure makes" if name in found else "is missing"
            yield f"the function {name} {what}: the database was changed by hand; find out what else was changed"
