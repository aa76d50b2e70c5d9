"""The pin of a tool changes if the tool changes for its callers, and for no other reason."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from typing_extensions import TypedDict  # before Python 3.12 pydantic refuses the TypedDict of typing

from perdure.core.retry import Retry
from perdure.tool import Call, Outcome, Tool, tool


def charge(order: str, cents: int = 5) -> None: ...
def more(order: str, cents: int = 5, note: str = "") -> None: ...
def renamed(order: str, amount: int = 5) -> None: ...
def retyped(order: str, cents: float = 5) -> None: ...
def other_default(order: str, cents: int = 6) -> None: ...
def no_default(order: str, cents: int) -> None: ...
def with_call(order: str, call: Call, cents: int = 5) -> None:
    """With a docstring and a `call` parameter: its caller notices no difference."""


def pinned(fn: Any = charge, **options: Any) -> Tool[..., Any]:
    return tool(**{"name": "charge", **options})(fn)


def test_a_pin_is_sixteen_hex_digits_and_stays():
    declared = pinned()
    assert len(declared.pin()) == 16
    assert int(declared.pin(), 16) >= 0
    assert declared.pin() is declared.pin()
    assert pinned().pin() == declared.pin()


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (charge, {"name": "charge2"}),
        (charge, {"effect": "keyed"}),
        (charge, {"key_window": 60}),
        (charge, {"approval": True}),
        (more, {}),
        (renamed, {}),
        (retyped, {}),
        (other_default, {}),
        (no_default, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_matters_to_the_caller_changes_the_pin(fn, options):
    assert pinned(fn, **options).pin() != pinned().pin()


@pytest.mark.parametrize(
    ("fn", "options"),
    [(with_call, {}), (charge, {"timeout": 3}), (charge, {"retry": Retry(attempts=2)})],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_does_not_matter_to_the_caller_leaves_the_pin(fn, options):
    assert pinned(fn, **options).pin() == pinned().pin()


def test_a_hook_that_is_declared_after_the_pin_was_asked_for_counts():
    declared = pinned()
    before = declared.pin()

    @declared.reconcile
    def find(order: str, cents: int) -> Outcome:
        return Outcome.unknown("?")

    assert declared.pin() != before


def model(**fields: Any) -> Any:
    return pydantic.create_model("Order", **fields)


def typed_dict(**fields: Any) -> Any:
    return TypedDict("Order", fields)  # type: ignore[operator]


def dataclass(**fields: Any) -> Any:
    return dataclasses.make_dataclass("Order", list(fields.items()))


@pytest.mark.parametrize("make", [model, typed_dict, dataclass])
def test_the_fields_of_an_argument_count_and_not_its_name_alone(make):
    def taking(annotation: Any) -> str:
        def ship(order: Any) -> None: ...

        ship.__annotations__["order"] = annotation
        return tool(ship).pin()

    field = (int, ...) if make is model else int
    other = (str, ...) if make is model else str
    assert taking(make(id=field)) == taking(make(id=field))
    assert taking(make(id=field)) != taking(make(id=other))
    assert taking(make(id=field)) != taking(make(id=field, note=other))


class Unit:
    """Shown with its address."""


UNIT = Unit()


def measure(length: Annotated[int, UNIT], origin: Any = UNIT) -> None: ...


PROGRAM = """
import sys
sys.path[:0] = [{folder!r}]
from tests.unit import test_tool_pins as here
print(here.tool(here.measure).pin(), here.pinned(here.charge).pin())
"""


def test_every_process_has_the_same_pin():
    folder = str(Path(inspect.getfile(charge)).resolve().parents[2])
    command = [sys.executable, "-c", PROGRAM.format(folder=folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [tool(measure).pin(), pinned(charge).pin()]


def test_the_name_under_which_a_file_is_loaded_does_not_count():
    source = "from dataclasses import dataclass\n@dataclass\nclass Order:\n    id: int\ndef ship(orders: list[Order]) -> None: ...\n"
    pins = set()
    for name in ("__main__", "agents"):
        names: dict[str, Any] = {"__name__": name}
        exec(compile(source, "agents.py", "exec", dont_inherit=True), names)
        assert names["Order"].__module__ == name
        pins.add(tool(names["ship"]).pin())
    assert len(pins) == 1
