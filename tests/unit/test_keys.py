"""Ids and idempotency keys: unambiguous, independent of arguments, time and attempt, and the same in every process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.identity import MAX_ID_CHARS, CallKeys, check_id, child_id, is_id, jitter, seed, undo_id
from perdure.errors import InvalidInput

part = st.text(max_size=8)
place = st.tuples(part, part, part, part, st.integers(min_value=1, max_value=10**6), part)


def call_key(namespace: str, tenant: str, run_id: str, agent: str, call: int, tool: str) -> str:
    return CallKeys(tenant, run_id, agent, namespace, scheme=2).key(call, tool)


def test_a_key_is_the_same_for_ever() -> None:
    """Written down: a release that changes it would send a second key for a call that is in doubt."""
    assert call_key("", "acme", "refund-o-81", "support", 4, "refund") == "5e6051498f51804380f873ce4875bbf1ea4fe77edb78474b026cb5bb100f8b46"
    assert (
        call_key("eu", "acme", "refund-o-81", "support", 4, "refund") == "ca7eeb8a4a480997f0d058e98b5fba19c9d622feeebcc501608946c58b08758d"
    )


def test_a_key_of_a_run_begun_under_the_first_scheme_is_the_same_for_ever() -> None:
    old = CallKeys("acme", "refund-o-81", "support", "", scheme=1)
    assert old.key(4, "refund") == "ef307829966cb37c886c83e80bdd5e22517e6c36ae04c8951bc2b6ea9e5af488"


@given(place, place)
def test_two_calls_share_a_key_only_if_they_are_the_same_call(
    one: tuple[str, str, str, str, int, str], other: tuple[str, str, str, str, int, str]
) -> None:
    assert (call_key(*one) == call_key(*other)) == (one == other)


def test_separators_inside_a_part_do_not_move_it_into_the_next() -> None:
    assert call_key("", "a:b", "c", "", 1, "") != call_key("", "a", "b:c", "", 1, "")
    assert call_key("", "a", "b1", "", 1, "") != call_key("", "a", "b", "", 11, "")
    assert call_key("", "", "ab", "", 1, "") != call_key("", "ab", "", "", 1, "")
    assert call_key("", "a", "b", "", 1, "1x") != call_key("", "a", "b", "", 11, "x")


def test_a_key_is_the_full_hash() -> None:
    key = call_key("", "t", "r", "a", 1, "pay")
    assert len(key) == 64
    assert int(key, 16) > 0


def test_seeds_differ_by_run_and_by_purpose() -> None:
    assert len({seed("a", "random"), seed("b", "random"), seed("a", "uuid 1"), seed("a", "uuid 2")}) == 4
    assert seed("a", "random") == seed("a", "random")


@given(st.text(), st.integers(min_value=1, max_value=1000))
def test_jitter_is_a_fraction_and_repeats(key: str, attempt: int) -> None:
    assert 0 <= jitter(key, attempt) < 1
    assert jitter(key, attempt) == jitter(key, attempt)


@pytest.mark.parametrize("good", ["a", "0", "_x", "refund-o-81", "user:17", "a@b+c~d=e.f", "x" * MAX_ID_CHARS])
def test_usable_ids_are_taken_as_they_are(good: str) -> None:
    assert check_id(good, "the run id") == good


@pytest.mark.parametrize(
    "bad",
    [
        *("", "x" * (MAX_ID_CHARS + 1), "x" * 1000, "../etc", "a/b", "a%2Fb", "a\nb", "a\n", "-rf", ":a", ".hidden", "a b", " a"),
        *("☃", "a☃", "é", "e\u0301", "a\0b", "\ud800", "a\u202eb", "a\u200bb", "\ufeffa", "'; DROP TABLE runs; --", "a;b", 'a"b'),
        *(None, 7, b"a", ["a"]),
    ],
)
def test_unusable_ids_are_refused_with_the_rule_and_shown_escaped(bad: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_id(bad, "the run id")  # type: ignore[arg-type]
    said = str(refused.value)
    assert said.startswith("the run id ")
    assert "1 to 200 characters" in said
    assert said.isascii()
    assert len(said) < 300
    assert "\n" not in said


@pytest.mark.parametrize("good", ["a", "user:17", "a@b+c~d=e.f", "x" * MAX_ID_CHARS, "r/1", "r/1/20", "r/undo", "r/undo/3", "ap-0123"])
def test_ids_that_users_give_and_those_below_them_are_ids(good: str) -> None:
    assert is_id(good)


@given(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:@+~=-]{0,20}", fullmatch=True), st.lists(st.integers(min_value=1) | st.none()))
def test_below_an_id_every_child_and_every_undo_has_an_id(run_id: str, below: list[int | None]) -> None:
    for call in below:
        run_id = undo_id(run_id) if call is None else child_id(run_id, call)
    assert is_id(run_id)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "x" * (MAX_ID_CHARS + 1), "/", "/1", "r/", "r//1", "r/1/", "r/x", "r/undone", "r/../x", "r/1\n", "r\n", "r/²", "r/1 "),
        *("$(touch x)", "r/$(touch x)", "r/1;x", "`x`", "a b", "-rf", "~root", "a\x1b", "é"),
    ],
)
def test_what_a_run_cannot_be_called_is_no_id(bad: str) -> None:
    assert not is_id(bad)
