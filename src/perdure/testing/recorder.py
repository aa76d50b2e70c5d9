"""A production run as a regression test. `perdure export RUN --test FILE` writes such a test:

def test_run_o7_goes_as_it_was_recorded():
    recorded("tests/run_o7.perdure.jsonl").replay(support)
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from perdure.agent import Agent
from perdure.core import codec, identity
from perdure.core.codec import Payload, shown
from perdure.engine.local.sandbox import guard
from perdure.errors import InvalidInput
from perdure.inspect.export import Export, ExportedJournal, export_run, load
from perdure.inspect.newfile import new_file
from perdure.inspect.replay import Different, compare
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing.rerun import Answers, Changed, Rerun, Rerunning


def export(url: str, run_id: str, path: Path | str) -> Recording:
    """Like `perdure export RUN -o FILE`: write the run and the runs below it to a new file. Returns its Recording."""
    store = open_store(url)
    try:
        with new_file(Path(path)) as file:
            export_run(store, run_id, file.write)
    finally:
        store.close()
    return recorded(path)


def recorded(path: Path | str) -> Recording:
    """The run in a file of `perdure export`.

    InvalidInput if the file is not an export, StoreCorrupt if the file is damaged.
    """
    return Recording(Path(path), load(path))


class Recording:
    """A recorded run, with all calls of its agent and all their results."""

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
        """The run's result, as a JSON value. None if the run has no result."""
        return self._value(self._root.state.output)

    def results(self, tool: str) -> list[Any]:
        """The results of a tool or of a model in this run, as JSON values, in the order of the calls."""
        calls = self._root.state.calls.values()
        return [self._value(call.result) for call in calls if call.tool == tool and call.result is not None]

    @property
    def agents(self) -> list[str]:
        """The names of all agents that have runs in the file: first the run's own agent, then those of runs below."""
        return list(dict.fromkeys(run.agent for run in self._runs()))

    def replay(self, agent: Agent[Any, Any], *others: Agent[Any, Any]) -> None:
        """Raise Changed, with the first difference of each run, unless this code makes exactly the recorded calls.

        `others` are the agents of the runs below. If an agent is missing, its runs cannot be checked: InvalidInput. No
        tool is called: the results come from the recording.
        """
        __tracebackhide__ = True
        agents = self._by_name((agent, *others))
        different = [found for run in self._runs() if (found := self._compare(run, agents[run.agent]))]
        if different:
            raise Changed("\n".join(f"run {found.run_id} would go another way with this code: {found.difference}" for found in different))

    def rerun(self, agent: Agent[Any, Any], *others: Agent[Any, Any]) -> Rerun:
        """Run the agent again with the recorded input and the recorded answers. Returns the old and the new calls.

        Each child is run again too, with its recorded input. `others` are the agents of the children. InvalidInput if
        an agent is missing.
        """
        agents = self._by_name((agent, *others))
        guard()
        again = Rerun([], [])
        for run in self._runs():
            found = self._anew(run, agents[run.agent])
            whose = "" if run is self._root else f"{run.run_id}: "
            again.recorded.extend(f"{whose}{line}" for line in found.recorded)
            again.asked.extend(f"{whose}{line}" for line in found.asked)
        return again

    def _runs(self) -> list[ExportedJournal]:
        """The runs of agents, without undo runs: an undo run is made from a journal and has no agent of the user."""
        return [run for run in self._export.runs.values() if run is self._root or identity.undone_by(run.run_id) is None]

    def _anew(self, run: ExportedJournal, agent: Agent[Any, Any]) -> Rerun:
        answers = Answers(run, self._export)
        recorded_lines = list(answers.lines)
        machine = agent.machine_of(run.state, self._export.load, Settings().max_steps)
        try:
            return Rerun(recorded_lines, Rerunning(machine, run, answers).run())
        finally:
            machine.close()

    def _compare(self, run: ExportedJournal, agent: Agent[Any, Any]) -> Different | None:
        guard()
        make = partial(agent.machine_of, load=self._export.load, max_steps=Settings().max_steps)
        found = compare(run.run_id, run.events, run.state, make, self._export.load)
        return found if isinstance(found, Different) else None

    def _by_name(self, agents: tuple[Agent[Any, Any], ...]) -> dict[str, Agent[Any, Any]]:
        for agent in agents:
            if not isinstance(agent, Agent):
                raise InvalidInput(f"{shown(agent)} is not an agent: decorate the coroutine function with @agent")
        if agents[0].name != self.agent:
            raise InvalidInput(
                f"run {self.run_id} belongs to agent {self.agent!r}, but this is agent {agents[0].name!r}; give the agent of the run"
            )
        by_name = {agent.name: agent for agent in agents}
        missing = next((run for run in self._runs() if run.agent not in by_name), None)
        if missing is not None:
            raise InvalidInput(
                f"run {missing.run_id} below it belongs to agent {missing.agent!r}, which was not given, so it cannot be checked; give the "
                f"children's agents too: ({', '.join(self.agents)})"
            )
        return by_name

    def _value(self, payload: Payload | None) -> Any:
        return None if payload is None else codec.decode(self._export.load(payload))
