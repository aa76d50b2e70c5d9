"""The run core, explored without a store.

It crashes, replays and reorders at every step, and every promise is checked.

    python -m tests.core                     all scenarios, in short
    python -m tests.core "a pair" --effort 2,500 1,20

**What is explored.** A scenario (tests/core/scenario.py) is a small agent and what may happen to its run: how attempts
end, what people do, and when. The core, the agents and the declared tools are real. The rest is simulated. The world
(tests/core/world.py) has a journal in memory with its row, post, approvals and ledger, and services that count
effects. The engine (tests/core/engine.py) makes *moves*. A move is something that the network, the disk or the clock
decides in reality: this append is committed now, that request arrives now, this answer is delivered now, a second
passes.

**How.** At first no worker holds the run. A worker claims it and goes through one *path* of moves. The explorer takes
the ordinary path, and all paths that differ from it in at most as many places as the effort says. At every position of
every path the worker also dies, in all possible ways: the append under way is durable or not, the worker is proven
dead or only silent, each request under way has arrived, is lost, or arrives at the last possible moment. Each death
leaves a world, and this world goes into the queue. A world that was explored before is not explored again: the same
journal, post, services and time have the same future. The explorer empties the queue. So every world is recovered
until the run rests, and then, with the help of people, until the run ends.

**What is counted.** A *place* is a position on a path that no earlier path has reached (scenario, all moves so far). A
*crash point* is a place together with one way to die there. A *recovery* is a new world that was left behind, and that
a fresh core has really recovered. If the world of a crash point was recovered before, it is not recovered again, but
the crash point is counted, because it was judged.

**What is checked**: see `Violation` in world.py and engine.py. Each violation names its promise (G…, T…; docs/ lists
the promises). When a path is walked again, the possible moves at each position must be the same: the same moves give
the same journal. test_explorer.py removes the guards of the core one by one, and each time the explorer must find the
violation.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.core import people
from tests.core.engine import Life, Move
from tests.core.scenario import Scenario
from tests.core.world import SECOND, Violation, World

from perdure.core.events import encode_body

# How long no worker has the run after a death: no time, longer than any request flies, longer than a key, an approval and a timer last.
_AWAY_US = (0, 40 * SECOND, 1000 * SECOND)
_WILD = 0.3  # the share of unusual moves on a random path
_LAST = ("fenced", "drain")  # moves that end a way soon
_NEAR = 50
_LONGEST = 150  # moves until a run must have come to rest
_SOME = 3  # events at which a run is reopened, of all at which it could be
_DIES_BEFORE = 0.05  # the share of places before the first reopening at which a worker dies
# The number of paths before the first reopening, if a person reopens the run: other scenarios have the other paths.
_BEFORE = 12
_MOST_TURNS = 80  # claims and acts of people until it must have ended
# For a run with this many deaths so far: in how many places a path may differ, and the most paths.
Effort = Sequence[tuple[int, int]]


class Found(AssertionError):
    """A broken promise, with the shortest way to it that was walked."""


@dataclass
class Tally:
    """What was tried."""

    points: int = 0
    places: int = 0
    paths: int = 0
    recoveries: int = 0
    ends: int = 0
    moves: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.points:,} crash points at {self.places:,} places; {self.recoveries:,} different recoveries, {self.paths:,} paths, "
            f"{self.ends:,} ends of a run"
        )


@dataclass
class _Origin:
    """How a world was reached."""

    parent: tuple[Any, ...] | None
    moves: list[Move]
    length: int
    words: str


class _Path(NamedTuple):
    """A path to be walked: these moves, and then the ordinary course."""

    prefix: list[Move]
    expected: list[Move]  # what must be enabled where the last of them is made
    differs: int  # in how many places it differs from the ordinary course, from the beginning of the run on


class _Paths:
    """The paths to explore: usually the shortest prefix first, because it has the most new places; sometimes any path."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._by_length: list[list[_Path]] = []

    def add(self, path: _Path) -> None:
        while len(self._by_length) <= len(path.prefix):
            self._by_length.append([])
        self._by_length[len(path.prefix)].append(path)

    def take(self) -> _Path | None:
        filled = [some for some in self._by_length if some]
        if not filled:
            return None
        some = filled[0] if self._chance.random() < 0.7 else self._chance.choice(filled)
        place = self._chance.randrange(len(some))
        some[place], some[-1] = some[-1], some[place]
        return some.pop()


class Explorer:
    """One scenario, explored with this effort.

    `most_points`: after this many crash points no more deaths are tried, and the worlds so far are recovered. `deep`:
    long random paths instead of all short paths: worlds are explored in any order, and every path is random.
    """

    def __init__(self, scenario: Scenario, effort: Effort, *, seed: int = 0, most_points: int | None = None, deep: bool = False) -> None:
        self.tally = Tally()
        self._scenario = scenario
        self._effort = effort
        self._chance = random.Random(seed)
        self._most_points = most_points
        self._deep = deep
        self._origins: dict[tuple[Any, ...], _Origin] = {}
        self._queue: deque[tuple[tuple[Any, ...], World, int]] = deque()

    def run(self) -> Tally:
        """Explore it all; Found when a promise is broken."""
        scenario = self._scenario
        world = World(scenario.agent, scenario.env, scenario.beside, patient=scenario.patient, distinct=scenario.distinct)
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._reach(world.key, world, 0, _Origin(None, [], 0, "created"))
            while self._queue:
                if self._scenario.is_reopened:
                    self._queue.rotate(-self._chance.randrange(len(self._queue)))
                elif self._deep:
                    self._queue.rotate(-self._chance.randrange(min(len(self._queue), _NEAR)))
                self._explore(*self._queue.popleft())
        finally:
            if collecting:
                gc.enable()
        return self.tally

    def _reach(self, key: tuple[Any, ...], world: World, turns: int, origin: _Origin) -> None:
        if key not in self._origins:
            self._origins[key] = origin
            self._queue.append((key, world, turns))

    # -- a world without a worker -----------------------------------------------------------------------------------------
    def _explore(self, key: tuple[Any, ...], world: World, turns: int) -> None:
        try:
            if world.finished:
                self.tally.ends += 1
                world.check_whole()
            if turns > _MOST_TURNS:
                raise Violation(f"the run does not end: it is {world.status} (G6)")
            due = world.is_ready
            acts = [what for what in dict.fromkeys(world.env) if people.can(world, what)]
            if world.finished:
                acts = acts if world.differed < self._differences(world) else []
            elif world.differed >= self._differences(world):
                acts = [] if due or world.ready_at is not None else acts[:1]
            elif self._deep and acts:
                acts = [self._chance.choice(acts)] if self._chance.random() < _WILD or not due else []
            ways = [(what, how) for what in acts for how in self._ways(world, what)]
            if world.ready_at is not None and not due:
                away_us = world.ready_at - world.now
                # No one waits for an hour that a clock has lost.
                ways.append(("", "clock right" if world.skew < 0 and away_us >= people.HOUR // 2 else f"later {away_us / 1e6}"))
            if not ways and not due and not world.finished:
                need = people.next_need(world)
                if need is None:
                    raise Violation(f"the run is {world.status} and has no wake-up, and no one can bring it on (G6)")
                ways.append(("", need))
        except Violation as violation:
            raise self._found(violation, key, world, []) from None
        for what, how in ways:
            after = world.copied()
            try:
                if what:
                    after.differed += 1
                    self.tally.moves["env"] += 1
                    self.tally.moves[what] += what in people.REOPENS
                    people.do(after, after.env.index(what), how, self._scenario.new_code)
                else:
                    people.act(after, how)
            except Violation as violation:
                raise self._found(violation, key, after, [(how, 0)]) from None
            self._reach(after.key, after, turns + 1, _Origin(key, [], 0, how))
        if due:
            self._live(key, world, turns + 1)

    def _ways(self, world: World, what: str) -> list[str]:
        """The ways to do that which are tried: all of them on the ordinary course, some of them elsewhere."""
        ways = people.ways(world, what)
        return ways if world.differed == 0 or len(ways) <= _SOME else self._chance.sample(ways, _SOME)

    def _differences(self, world: World) -> int:
        """In how many places its course may differ from the ordinary one."""
        return self._effort[world.deaths][0] if world.deaths < len(self._effort) and not self._is_enough else 0

    @property
    def _is_enough(self) -> bool:
        return self._most_points is not None and self.tally.points >= self._most_points

    # -- the lives of a worker that claims it -----------------------------------------------------------------------------
    def _live(self, key: tuple[Any, ...], world: World, turns: int) -> None:
        dies = world.deaths < len(self._effort)
        differences, most = self._effort[world.deaths] if dies else (0, 1)
        if self._scenario.is_reopened and not world.journal.state.reopened:
            most = min(most, _BEFORE)
        paths = _Paths(self._chance)
        paths.add(_Path([], [], world.differed))
        been: set[tuple[Move, ...]] = set()
        for walked in range(most):
            if self._is_enough:
                if walked:
                    break
                dies = False
            path = paths.take()
            if path is None:
                break
            made, enabled = self._walk(key, world, turns, path, dies, been)
            if self._deep:
                paths.add(path)  # it goes elsewhere each time
            elif path.differs < differences:
                for at, moves in enumerate(enabled, len(path.prefix)):
                    for move in moves[1:]:
                        # A worker that has lost its run ends at once: seen once at each place of the ordinary course.
                        if move[0] != "fenced" or path.differs == world.differed:
                            paths.add(_Path([*made[:at], move], moves, path.differs + 1))

    def _walk(
        self, key: tuple[Any, ...], world: World, turns: int, path: _Path, dies: bool, been: set[tuple[Move, ...]]
    ) -> tuple[list[Move], list[list[Move]]]:
        """One path: the prefix, and then the ordinary course.

        Returns the moves that were made, and the moves that were possible at each place after the prefix.
        """
        tally, prefix = self.tally, path.prefix
        tally.paths += 1
        tally.recoveries += not prefix
        life = Life(self._scenario, world.copied())
        life.world.differed = path.differs
        made: list[Move] = []
        enabled: list[list[Move]] = []
        try:
            for move in prefix:
                if len(made) == len(prefix) - 1 and life.moves() != path.expected:
                    raise Violation(f"the same moves have led elsewhere: {life.moves()}, and before {path.expected} (G7)")
                made.append(move)
                life.make(move)
            while life.over is None:
                if dies and (not self._deep or tuple(made) not in been) and self._is_worth_it(life.world):
                    self._die_here(key, life, made, turns)
                    if self._deep:
                        been.add(tuple(made))
                moves = life.moves()
                if not moves:
                    raise Violation("a worker holds the run, and waits for nothing (G6)")
                if len(made) > _LONGEST:
                    raise Violation("the run does not come to rest")
                enabled.append(moves)
                move = moves[0]
                if self._deep and dies and self._chance.random() < _WILD:
                    move = self._chance.choice([one for one in moves if one[0] not in _LAST] or moves)
                made.append(move)
                tally.moves[move[0]] += 1
                life.make(move)
        except Violation as violation:
            raise self._found(violation, key, life.world, made) from None
        except AssertionError as error:
            raise self._found(error, key, life.world, made) from error
        finally:
            life.close()
        if prefix:
            tally.moves[prefix[-1][0]] += 1
        after = life.world
        self._reach(after.key, after, turns, _Origin(key, made, len(made), life.over or ""))
        return made, enabled

    def _is_worth_it(self, world: World) -> bool:
        """Where people reopen the run, workers die mostly after that: how they die before is explored in other scenarios."""
        return not self._scenario.is_reopened or world.journal.state.reopened > 0 or self._chance.random() < _DIES_BEFORE

    def _die_here(self, key: tuple[Any, ...], life: Life, made: list[Move], turns: int) -> None:
        tally, origins = self.tally, self._origins
        tally.places += 1
        for death in life.deaths(_AWAY_US if life.world.deaths == 0 else _AWAY_US[:1]):
            mark, lost, real = death.mark, death.lost, death.real
            for services in itertools.product(*death.services):
                tally.points += 1
                after = (mark, lost, real, services)
                if after not in origins:
                    self._reach(after, death.world(services), turns, _Origin(key, made, len(made), str(death)))

    # -- a broken promise -----------------------------------------------------------------------------------------------
    def _found(self, why: BaseException, key: tuple[Any, ...], world: World, made: list[Move]) -> Found:
        lines = [f"    {_shown(made)}  ← here"]
        at: tuple[Any, ...] | None = key
        while at is not None:
            origin = self._origins[at]
            lines.append(f"    {_shown(origin.moves[: origin.length])}  → {origin.words}")
            at = origin.parent
        journal = [
            f"    {event.seq:3} {(event.ts - world.journal.events[0].ts) / 1e6:8.3f} s  {event.type}"
            + (f" (call {event.call})" if event.call else "")
            + f" {encode_body(event.body).decode()[:150]}"
            for event in world.journal.events
        ]
        walk = "\n".join(reversed(lines))
        return Found(f"{self._scenario.name}: {why}\n\n  the way there:\n{walk}\n\n  the journal:\n" + "\n".join(journal))


def _shown(moves: Sequence[Move]) -> str:
    return " · ".join(f"{move[0]} {move[1]}" if move[1] else str(move[0]) for move in moves) or "(nothing)"


def explore(scenario: Scenario, effort: Effort, *, seed: int = 0, most_points: int | None = None, deep: bool = False) -> Tally:
    """The counts of what was tried. Raises Found if a promise is broken."""
    return Explorer(scenario, effort, seed=seed, most_points=most_points, deep=deep).run()
