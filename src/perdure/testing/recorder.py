"""A production run as a regression test: `perdure export RUN --test FILE` writes one with this in it.

def test_run_o7_goes_as_it_was_recorded():
    recorded("tests/run_o7.perdure.jsonl").replay(support)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from perdure.agent import Agent
from perdure.core import codec, identity
from perdure.core.codec import Payload, shown
from perdure.errors import InvalidInput
from perdure.inspect.export import Export, Journal, export_run, load
from perdure.inspect.newfile import new_file
from perdure.inspect.replay import Different, compare
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing.rerun import Answers, Changed, Rerun, Rerunning
from perdure.worker.outside import guard

T = TypeVar("T")


def export(url: str, run_id: str, path: Path | str) -> Recording:
    """What `perdure export RUN -o FILE` does, in Python: the run and those below it into a new file, and that as a Recording."""
    store = open_store(url)
    try:
        with new_file(Path(path)) as file:
            export_run(store, run_id, file.write)
    finally:
        store.close()
    return recorded(path)


def recorded(path: Path | str) -> Recording:
    """The run in a file of `perdure export`, checked: InvalidInput when it is none, StoreCorrupt when it is not what was written."""
    return Recording(Path(path), load(path))


class Recording:
    """A run that has been, with everything that its agent asked for and was told."""

    def __init__(self, path: Path, export: Export) -> None:
        self.path = path
        self._export = export
        self._root = export.root
        self.run_id = self._root.run_id
        self.agent = self._root.agent
        self.version = self._root.version
        self.status = self._root.state.status
        created = self._root.state.created
        assert created is not None
        self.input: dict[str, Any] = self._value(created.input)

    @property
    def output(self) -> Any:
        """The run's result, as a JSON value; None when it has none."""
        return self._value(self._root.state.output)

    def results(self, tool: str) -> list[Any]:
        """What a tool, or a model, has answered in this run, as JSON values, in the order of the calls."""
        calls = self._root.state.calls.values()
        return [self._value(call.result) for call in calls if call.tool == tool and call.result is not None]

    @property
    def agents(self) -> list[str]:
        """The names of the agents that have runs in it: the run's own first, then those of its children, and of theirs."""
        return list(dict.fromkeys(run.agent for run in self._runs()))

    def replay(self, agent: Agent[Any, Any], *others: Agent[Any, Any]) -> None:
        """Changed, with the first difference of each run, unless this code asks for exactly what was recorded.

        `others` are the agents of its children, and of theirs: InvalidInput when one is missing, since its runs would not be looked at.
        Nothing is performed: the recording answers.
        """
        __tracebackhide__ = True
        agents = self._by_name((agent, *others))
        different = [found for run in self._runs() if (found := self._compare(run, agents[run.agent]))]
        if different:
            raise Changed("\n".join(f"run {found.run_id} would go another way with this code: {found.difference}" for found in different))

    def rerun(self, agent: Agent[Any, Any], *others: Agent[Any, Any]) -> Rerun:
        """Run the agent anew on the recorded input, with the recording in the place of the world; what it asked for, beside what was recorded.

        So is each child, on the input that it was given then. `others` are their agents: InvalidInput when one is missing.
        """
        agents = self._by_name((agent, *others))
        guard()
        again = Rerun([], [])
        for run in self._runs():
            found = _on_a_thread(partial(self._anew, run, agents[run.agent]))
            whose = "" if run is self._root else f"{run.run_id}: "
            again.recorded.extend(f"{whose}{line}" for line in found.recorded)
            again.asked.extend(f"{whose}{line}" for line in found.asked)
        return again

    def _runs(self) -> list[Journal]:
        """The runs that agents have asked for. Not what undoes them: that is made from what they have done, and calls no agent."""
        return [run for run in self._export.runs.values() if run is self._root or identity.undone_by(run.run_id) is None]

    def _anew(self, run: Journal, agent: Agent[Any, Any]) -> Rerun:
        answers = Answers(run, self._export)
        recorded_lines = list(answers.lines)
        machine = agent.machine_of(run.state, self._export.load, Settings().max_steps)
        try:
            return Rerun(recorded_lines, Rerunning(machine, run, answers).run())
        finally:
            machine.close()

    def _compare(self, run: Journal, agent: Agent[Any, Any]) -> Different | None:
        guard()
        make = partial(agent.machine_of, load=self._export.load, max_steps=Settings().max_steps)
        found = _on_a_thread(lambda: compare(run.run_id, run.events, run.state, make, self._export.load))
        return found if isinstance(found, Different) else None

    def _by_name(self, agents: tuple[Agent[Any, Any], ...]) -> dict[str, Agent[Any, Any]]:
        for agent in agents:
            if not isinstance(agent, Agent):
                raise InvalidInput(f"{shown(agent)} is not an agent: decorate the coroutine function with @agent")
        if agents[0].name != self.agent:
            raise InvalidInput(
                f"run {self.run_id} is of agent {self.agent!r}, and this is agent {agents[0].name!r}; give the one that it is of"
            )
        by_name = {agent.name: agent for agent in agents}
        missing = next((run for run in self._runs() if run.agent not in by_name), None)
        if missing is not None:
            raise InvalidInput(
                f"run {missing.run_id} below it is of agent {missing.agent!r}, which was not given, and would not be looked at; give the "
                f"children's agents too: ({', '.join(self.agents)})"
            )
        return by_name

    def _value(self, payload: Payload | None) -> Any:
        return None if payload is None else codec.decode(self._export.load(payload))


def _on_a_thread(work: Callable[[], T]) -> T:
    """From CPython 3.14 on an agent's tasks cannot be entered inside a task, which an async test is."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="perdure-recording")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
