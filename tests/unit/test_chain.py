"""The hash chain: every field of every event is covered, and no event can move."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import identity
from perdure.core.events import Event, ThoughtRecorded, TimerFired, encode_body

BEFORE = identity.genesis("run-1")
EVENT = Event(3, "0" * 32, 1_700_000_000_000_000, 2, 4, 1, ThoughtRecorded("hm"))


def test_hashes_are_the_same_for_ever() -> None:
    """Written down: journals of every release must verify."""
    assert identity.genesis("run-1").hex() == "a2c20f50917ed556bbfccdb5782301dd9899c9b0ecc0c2cee01f843c580c948a"
    assert identity.seal(BEFORE, EVENT).hash.hex() == "49d47edf37d437f022f610804e6ce4455133af8ab4f3fbafcc14745c430d3460"


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 4},
        {"event_id": "1" * 32},
        {"ts": EVENT.ts + 1},
        {"epoch": 3},
        {"call": 5},
        {"call": None},
        {"cause": 2},
        {"cause": None},
        {"body": ThoughtRecorded("hm.")},
        {"body": TimerFired(1)},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_field_is_covered(change: dict[str, Any]) -> None:
    assert identity.seal(BEFORE, msgspec.structs.replace(EVENT, **change)).hash != identity.seal(BEFORE, EVENT).hash


def test_a_call_and_a_cause_cannot_be_swapped_for_each_other() -> None:
    only_call = msgspec.structs.replace(EVENT, call=7, cause=None)
    only_cause = msgspec.structs.replace(EVENT, call=None, cause=7)
    assert identity.seal(BEFORE, only_call).hash != identity.seal(BEFORE, only_cause).hash


def test_the_same_event_has_another_hash_in_another_run_and_at_another_place() -> None:
    assert identity.seal(identity.genesis("run-2"), EVENT).hash != identity.seal(BEFORE, EVENT).hash
    assert identity.seal(identity.seal(BEFORE, EVENT).hash, EVENT).hash != identity.seal(BEFORE, EVENT).hash


@given(st.lists(st.text(max_size=5), max_size=6), st.integers(min_value=0, max_value=6))
def test_sealing_in_batches_is_sealing_one_by_one(texts: list[str], cut: int) -> None:
    numbers = (None, 1, 20)  # of calls and causes
    events = [
        Event(seq, f"{seq:032x}", seq, 1, numbers[seq % 3], numbers[seq // 3 % 3], ThoughtRecorded(text))
        for seq, text in enumerate(texts, 1)
    ]
    whole = identity.seal_all(BEFORE, events)
    first = identity.seal_all(BEFORE, events[:cut])
    second = identity.seal_all(first[-1].hash if first else BEFORE, events[cut:])
    assert whole == first + second
    before = BEFORE
    for event, sealed in zip(events, whole, strict=True):
        assert sealed == identity.seal(before, event)
        before = sealed.hash
    assert all(sealed.data == encode_body(sealed.event.body) for sealed in whole)
