"""Eight branches, a race and a time-out, killed at a random call, with 140 seeds: each run replays and finishes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.thicket import BRANCHES, plan, thicket
from tests.crash.world import KILLED, World

from perdure.core.codec import Payload
from perdure.core.events import Event
from perdure.core.machine import Facts, Machine
from perdure.core.state import RunState, fold
from perdure.inspect.replay import Same, compare

SEEDS, CHUNK = {"sqlite": 100, "postgres": 40}, 10
CASES = [(dialect, first) for dialect, seeds in SEEDS.items() for first in range(0, seeds, CHUNK)]


@pytest.mark.parametrize(("dialect", "first"), CASES, indirect=["dialect"])
def test_killed_at_a_random_call_a_thicket_of_branches_replays_and_finishes(world: World, first: int) -> None:
    deaths = 0
    for seed in range(first, first + CHUNK):
        try:
            deaths += live_and_die(world, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert deaths >= CHUNK, "not every seed has died"


def live_and_die(world: World, seed: int) -> int:
    """One seed, from the first process to the end of its run; how many processes died on the way."""
    chance, deaths = random.Random(f"{seed}.fate"), 0
    for _ in range(2 if seed % 4 == 0 else 1):
        code = world.run(victims.thicket, report=world.report(), seed=seed, die=fate_of(chance, first=deaths == 0))
        assert code in (KILLED, 0), f"code {code}\n{world.log()}"
        assert code == KILLED or deaths, f"it should have died\n{world.log()}"
        deaths += code == KILLED
    while (told := go_on(world, seed))["status"] == "needs_attention":
        settle(world, f"seed-{seed}")
    check(world, seed, told)
    return deaths


def go_on(world: World, seed: int) -> dict[str, Any]:
    report = world.report()
    assert world.run(victims.thicket, report=report, seed=seed) == 0, world.log()
    return world.told(report)


def fate_of(chance: random.Random, *, first: bool) -> list[Any]:
    """Where it dies: at an effect, at the start of one, or at a commit."""
    most = 9 if first else 3
    place, moments = chance.choice(
        [("effect", ["before", "after"]), ("start", ["before"]), ("arrive", ["before"]), ("append", ["before", "half", "kept", "after"])]
    )
    return [place, chance.choice(moments), chance.randint(1, most)]


def settle(world: World, run_id: str) -> None:
    """A person looks at the world, and says what is true about each call in doubt."""
    state = fold(world.look(run_id)[1])
    doubts = [call for call in state.open.values() if call.phase == "in_doubt"]
    assert doubts, f"it needs a person for something else: {state.attention}"
    for call in doubts:
        assert call.tool == "mail", call
        happened = world.ledger.has_happened(call.key)
        how: dict[str, Any] = {"happened": "by hand"} if happened else {"did_not_happen": True}
        assert world.run(victims.resolve, run_id=run_id, call=call.number, **how) == 0, world.log()


def check(world: World, seed: int, told: dict[str, Any]) -> None:
    run_id = f"seed-{seed}"
    assert told["status"] == "succeeded", f"{told}\n{world.log()}"
    events = check_journal(world, run_id)
    check_output(told["output"], seed)
    check_ledger(world, seed, fold(events))
    check_replays(run_id, events)


def check_output(output: dict[str, Any], seed: int) -> None:
    for branch in range(BRANCHES):
        expected = [f"{what} done" for _, what, _ in plan(seed, branch)]
        got = output["branches"][branch]
        assert len(got) == len(expected)
        assert all(one in (other, "by hand") for one, other in zip(got, expected, strict=True)), (got, expected)
    assert output["race"].startswith("race.")
    assert output["hurry"] in ("hurry done", "too late")
    assert output["last"] == "last done"


def check_ledger(world: World, seed: int, state: RunState) -> None:
    """Each call reached the world as its effect class allows, and every completed call reached it."""
    run_id = f"seed-{seed}"
    lines = world.ledger.effects(run=run_id)
    effects = Counter(line["key"] for line in lines)
    paid = Counter(row[2] for row in world.paid() if row[1] == run_id)
    recorded = {call.key for call in state.calls.values()}
    # A read begins before its intent is durable: if it was killed then, the journal may have nothing about it.
    reads = {what for branch in range(BRANCHES) for name, what, _ in plan(seed, branch) if name == "glance"} | {"race.glance"}
    assert {line["what"] for line in lines if line["key"] not in recorded} <= reads
    for call in state.calls.values():
        assert call.ended, call
        times = paid[call.number] if call.effect == "transaction" else effects[call.key]
        if call.effect in ("keyed", "once", "transaction"):
            assert times <= 1, f"call {call.number} ({call.tool}): {times} effects"
        if call.phase == "completed":
            assert times >= 1, f"call {call.number} ({call.tool}) is completed and never happened"


def check_replays(run_id: str, events: list[Event]) -> None:
    """A fresh machine with the completions of the finished journal asks for exactly the recorded calls (G7)."""

    def make(state: RunState) -> Machine:
        assert state.created is not None
        return thicket.machine(Facts(run_id, state.created.tenant, None, "thicket", "1"), inline(state.created.input), 100_000)

    answer = compare(run_id, events, fold(events), make, inline)
    assert isinstance(answer, Same), answer


def inline(payload: Payload) -> bytes:
    assert payload.inline is not None
    return payload.inline
