"""Goes through a log: every kind of power loss at every point. Each result is opened, read, verified and compared."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.power.agents import World
from tests.power.autopsy import Findings, examine, lay_out, recovered
from tests.power.disk import Noted, Op
from tests.power.outage import Image, Medium
from tests.power.scenarios import Scenario, resume
from tests.power.told import Told


class Lab:
    """Counts what it has examined; every state is written into `folder`."""

    def __init__(self, folder: Path, scenario: Scenario, seed: str) -> None:
        self.folder = folder
        self.scenario = scenario
        self.chance = random.Random(seed)
        self.kinds: Counter[str] = Counter()  # of distinct states
        self.resumed = 0
        self._states: dict[bytes, Findings] = {}  # by the digest of all files
        self._databases: dict[bytes | str, Findings] = {}  # by what SQLite makes of them

    @property
    def distinct(self) -> int:
        return len(self._states)

    @property
    def databases(self) -> int:
        return len(self._databases)

    def survey(self, log: list[Op], *, each: int, resume_every: int = 0, between: tuple[float, float] = (0, float("inf"))) -> None:
        """AssertionError at the first state that is not as it must be; `each` is how many of every kind at each point."""
        for place, told, medium in points(log):
            if between[0] <= place < between[1]:
                where = f"power loss after operation {place} of {len(log)}"
                for kind, image in medium.extremes():
                    self._look(f"{where}, {kind}", kind, image, told, resume_every)
                for kind, image in medium.between(self.chance, each):
                    self._look(f"{where}, {kind}", kind, image, told, resume_every)

    def _look(self, where: str, kind: str, image: Image, told: Told, resume_every: int) -> None:
        digest = hashlib.sha256(b"".join(name.encode() + hashlib.sha256(image[name]).digest() for name in sorted(image))).digest()
        found = self._states.get(digest)
        if found is None:
            self.kinds[kind] += 1
            found = self._states[digest] = self._found(image)
            if resume_every and self.distinct % resume_every == 0:
                self._resume(where, image, told)
        try:
            told.hold_against(found)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error

    def _found(self, image: Image) -> Findings:
        """Every state is opened; and every database that comes of it is looked at once, from the files that it first came of."""
        database = recovered(lay_out(self.folder, image))
        found = self._databases.get(database)
        if found is None:
            found = self._databases[database] = examine(lay_out(self.folder, image))
        return found

    def _resume(self, where: str, image: Image, told: Told) -> None:
        """Go on from there with the real app: every run ends as it should, and what had happened has not happened again."""
        self.resumed += 1
        world = World(before=told.effects)
        path = lay_out(self.folder, image)
        outputs = resume(self.scenario, path, world)
        expected = {run_id: start.output for run_id, start in self.scenario.runs.items()}
        assert outputs == expected, f"{where}, resumed: {outputs}"
        found = examine(path)
        told.hold_against(found)
        check_effects(world, found, f"{where}, resumed")


def check_effects(world: World, found: Findings, where: str) -> None:
    """The world was changed as often as each effect class allows (section 2)."""
    kinds = {key: intent.effect for key, intent in found.intents.items()}
    twice = [key for key, times in world.happened.items() if times > 1 and kinds[key] != "idempotent"]
    assert not twice, f"{where}: happened twice: {twice}"
    again = [key for key, times in world.begun.items() if times > 1 and kinds[key] == "once"]
    assert not again, f"{where}: begun twice: {again}"


def points(log: list[Op]) -> Iterator[tuple[int, Told, Medium]]:
    """Every point of the log, with the answers so far and the operations that have reached the disk."""
    told, medium = Told(), Medium()
    yield 0, told, medium
    for place, op in enumerate(log, 1):
        if isinstance(op, Noted):
            told.note(op.mark)
        else:
            medium.take(op)
        yield place, told, medium
