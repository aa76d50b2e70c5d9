"""A world with a model provider: compares the requests in the provider's own ledger with the journal.

A request is *lost* if it has reached the provider and its answer is not in the journal, because the process died
first. The rules:

    every answer in the journal belongs to exactly one request, and every request has a durable intent;
    every other request belongs to one `model_call_failed`: caused by the provider (429, reset), or of type AnswerLost;
    if a process died between the intent and the first byte, there is an AnswerLost without a request;
    so for each request that is open at a time: lost requests ≤ AnswerLost ≤ kills (and drains);
    a lost request is charged with its reserved amount, and with nothing if the model has no max_tokens.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tests.crash import thinkers, thinking
from tests.crash.checks import check_journal
from tests.crash.world import KILLED, RUN, World
from tests.servers.provider_answers import Turn
from tests.servers.providers import Line, Provider, say, use

from perdure.core.events import Event, ModelCallCompleted, ModelCallFailed, ModelCallInitiated
from perdure.core.machine import Facts, Machine
from perdure.core.state import LOST, RunState, fold
from perdure.inspect.cost import cost_of
from perdure.inspect.prompt import request_of_call
from perdure.inspect.replay import Same, compare
from perdure.inspect.view import loader, read_run
from perdure.models.messages import answer_of, request_of
from perdure.store.api import Store

ORDER = "order"
DONE = "It is done."
MAX_STEPS = 1_000_000


def ordering(kind: str = "keyed", what: str = ORDER) -> list[Turn]:
    """A conversation of two answers: the first asks for a tool, the second is the final answer."""
    return [say("Let me see to that.", use(kind, what=what), cached=7, stored=5), say(DONE)]


@dataclass(frozen=True)
class Accounts:
    """What came of all requests of a world."""

    lost_requests: int  # how many requests the provider has seen, and whose answers no process has
    lost_events: int
    failures: int  # of the provider's own making
    answers: int


class Mind:
    """Runs that think, in one world; the provider knows them by a word that all their conversations begin with."""

    def __init__(self, world: World, provider: Provider) -> None:
        self.world = world
        self.provider = provider
        self.word = f"case-{uuid4().hex}"
        self.kills = 0

    def script(self, *turns: Turn, of: str = "") -> None:
        self.provider.script(turns, when=f"{self.word}{of}")

    def fault(self, kind: str, **how: Any) -> None:
        self.provider.fault(kind, **{"when": self.word, **how})

    # -- victims ------------------------------------------------------------------------------------------------------
    def rest(self, agent: str = "clerk", *args: Any, die: Sequence[Any] = (), run_id: str = RUN, **more: Any) -> dict[str, Any]:
        """A new process starts the run, or finds it, and drives it until it rests; or dies at the given place."""
        report = self.world.report()
        code = self.world.wait(self.start(agent, *args, die=die, run_id=run_id, report=report, **more))
        assert code == (KILLED if die else 0), f"{agent} with fate {die}: code {code}\n{self.world.log()}"
        self.kills += bool(die)
        return {} if die else self.world.told(report)

    def start(self, agent: str = "clerk", *args: Any, die: Sequence[Any] = (), run_id: str = RUN, **more: Any) -> int:
        given = {"report": self.world.report(), "env": self.provider.env, "args": list(args or [self.word]), **more}
        return self.world.start(thinking.rest, agent=agent, run_id=run_id, die=list(die), **given)

    def kill_while_held(self, agent: str = "clerk", *args: Any, held: int = 1, **more: Any) -> None:
        """Kill it from outside while the provider keeps it waiting."""
        pid = self.start(agent, *args, **more)
        self.provider.wait_for(held=held)
        self.kill(pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.world.wait(pid) == KILLED
        self.kills += 1

    # -- the requests that the provider has seen
    # ---------------------------------------------------------------------------
    def lines(self) -> list[Line]:
        return self.provider.requests(containing=self.word)

    # -- what must hold -------------------------------------------------------------------------------------------------
    def check(self, told: dict[str, Any], output: Any = DONE, *, at_once: int = 1) -> Accounts:
        """The run has ended well, and the accounts are right."""
        assert (told["status"], told["output"]) == ("succeeded", output), f"{told}\n{self.world.log()}"
        return self.check_accounts(at_once=at_once)

    def check_accounts(self, *, at_once: int = 1) -> Accounts:
        """`at_once` is how many questions were open at the same time."""
        lines = self.lines()
        refused = [line.refused for line in lines if line.status is not None and 400 <= line.status < 429]
        assert not refused, f"the provider has refused what it was sent: {refused}"
        by_key: dict[str | None, list[Line]] = defaultdict(list)
        for line in lines:
            by_key[line.key].append(line)
        found = Accounts(0, 0, 0, 0)
        with self.world.journal.reading() as store:
            for row in store.list(limit=100):
                found = _sum(found, _check_run(self.world, store, row.run_id, by_key))
        assert not by_key, f"asked without a durable intent: {list(by_key)}"
        assert found.lost_requests <= found.lost_events <= self.kills * at_once, f"{found} after {self.kills} kills"
        return found


def _sum(one: Accounts, other: Accounts) -> Accounts:
    return Accounts(
        one.lost_requests + other.lost_requests,
        one.lost_events + other.lost_events,
        one.failures + other.failures,
        one.answers + other.answers,
    )


def _check_run(world: World, store: Store, run_id: str, by_key: dict[str | None, list[Line]]) -> Accounts:
    """The run's journal is sound, replays, and has every request under its keys.

    These requests are removed from `by_key`.
    """
    events = check_journal(world, run_id)
    reading, load = read_run(store, run_id), loader(store)
    calls = {event.call: event.body.key for event in events if isinstance(event.body, ModelCallInitiated) and event.call is not None}
    found = Accounts(0, 0, 0, 0)
    charged: Counter[str] = Counter()
    for number, key in calls.items():
        lines = by_key.pop(key, [])
        if lines:
            request = request_of(request_of_call(reading, number, load))
            expected = {**thinkers.MODELS[request.model].body(request), "stream": True}  # type: ignore[attr-defined]
            assert all(line.body == expected for line in lines), f"call {number}: {expected} is not what was sent: {lines}"
            assert len({line.digest for line in lines}) == 1, f"call {number} was not asked in the same bytes: {lines}"
        found = _sum(found, _check_call(number, [event for event in events if event.call == number], lines, load, charged))
    _check_cost(store, run_id, events, charged, found)
    replayed = compare(run_id, events, reading.state, lambda state: _machine(state, load), load)
    assert isinstance(replayed, Same), replayed
    return found


def _check_call(number: int, events: Sequence[Event], lines: Sequence[Line], load: Any, charged: Counter[str]) -> Accounts:
    answers = [event.body for event in events if isinstance(event.body, ModelCallCompleted)]
    failures = [event.body for event in events if isinstance(event.body, ModelCallFailed) and event.body.attempt]
    lost = sum(body.failure.type == LOST for body in failures)
    by_provider = [body for body in failures if body.failure.type not in (LOST, "Cancelled")]
    assert len(answers) <= 1, f"call {number} has two answers"
    others = list(lines)
    for body in answers:
        assert body.result is not None
        answer = answer_of(load(body.result))
        (mine,) = (line for line in lines if f"req_{line.number}" == answer.request_id)
        assert mine.complete, f"call {number}: what was not said to its end was taken for an answer"
        others.remove(mine)
        told = {
            "input": answer.tokens.input,
            "output": answer.tokens.output,
            "cached": answer.tokens.cached,
            "stored": answer.tokens.stored,
        }
        assert told == mine.tokens, f"call {number}: {told} for {mine}"
        plain = mine.tokens["input"] - mine.tokens["cached"] - mine.tokens["stored"]
        usd = 3 * plain + 15 * mine.tokens["output"] + mine.tokens["cached"] + 4 * mine.tokens["stored"]
        charged.update(mine.tokens | {"usd_micros": usd})
    for failed in failures:
        if failed.usage is not None:  # a stream that broke, or that a drain stopped, has reported its cost so far
            charged.update({"input": failed.usage.tokens_in, "output": failed.usage.tokens_out, "usd_micros": failed.usage.usd_micros})
    missing = len(others) - len(by_provider)
    assert 0 <= missing <= lost, (
        f"call {number}: {len(others)} requests came to nothing, {len(by_provider)} failed, {lost} are told as lost"
    )
    return Accounts(missing, lost, len(by_provider), len(answers))


def _check_cost(store: Store, run_id: str, events: Sequence[Event], charged: Counter[str], found: Accounts) -> None:
    """T24: `show` and `costs` agree with the provider's ledger, plus the reserved amounts of lost requests."""
    cost = cost_of(fold(events), events)
    expected = (charged["input"], charged["output"], charged["usd_micros"], found.lost_events)
    assert (cost.tokens_in, cost.tokens_out, cost.usd_micros, cost.lost) == expected, (cost, charged)
    for row in (row for row in store.costs("run") if row.group == run_id):
        assert (row.tokens_in, row.tokens_out, row.usd_micros, row.lost) == expected, (row, charged)


def _machine(state: RunState, load: Any) -> Machine:
    created = state.created
    assert created is not None
    facts = Facts(created.run_id, created.tenant, created.actor, created.agent, created.version)
    return thinkers.AGENTS[created.agent].machine(facts, load(created.input), MAX_STEPS)
