"""What to type next, complete with ids, and what each command would do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

from perdure.core.state import RunState
from perdure.store.api import FINISHED, RunRow


class Step(Struct, frozen=True):
    command: str
    does: str


def advise(row: RunRow, state: RunState, doubts: Sequence[int], *, held: bool, alive: int, now: int, options: str = "") -> list[Step]:
    """The commands that make sense for the run as it is, the most likely one first. `doubts` are the calls to settle."""
    orders = _Orders(row, options)
    if row.status in FINISHED:
        return orders.after_the_end(state)
    settle = [step for call in doubts for step in orders.settle(call)]
    if row.status == "needs_attention":
        if settle:
            return [*settle, *orders.go_on(alive, then=True), orders.cancel()]
        return [*orders.attend(state), orders.cancel()]
    stop = [] if row.status == "cancelling" else [orders.cancel()]
    if held:
        return [orders.follow(), *settle, *stop]
    if row.status in ("waiting", "waiting_approval", "paused") and (row.ready_at is None or row.ready_at > now):
        return [orders.nothing(), *orders.go_on(alive), *stop]
    return [*orders.go_on(alive), *settle, *stop]


class _Orders:
    """Commands about one run."""

    def __init__(self, row: RunRow, options: str) -> None:
        self.run = shlex.quote(row.run_id)
        self.agent = row.agent
        self.options = options
        self.target = shlex.quote(row.target) if row.target else f"FILE.py:{row.agent}"
        self.resume_words = f"resume {self.run}" + ("" if row.target else f" {self.target}")

    def _perdure(self, words: str) -> str:
        return f"perdure {words}{self.options}"

    def settle(self, call: int) -> list[Step]:
        resolve = f"resolve {self.run} {call}"
        return [
            Step(self._perdure(f"{resolve} --happened 'JSON'"), f"call {call} did happen: the agent gets this JSON as its result"),
            Step(self._perdure(f"{resolve} --did-not-happen"), f"call {call} did not happen: it is performed again, with the same key"),
            Step(self._perdure(f"{resolve} --fail 'TEXT'"), f"leave it: the agent gets a ToolFailed for call {call} with this text"),
        ]

    def go_on(self, alive: int, *, then: bool = False) -> list[Step]:
        resume = Step(self._perdure(self.resume_words), f"{'then ' if then else ''}drive the run here until it rests")
        worker = Step(self._perdure(f"worker {self.target}"), f"{'then ' if then else ''}serve every run of {self.agent}, this one too")
        return [resume] if alive else [resume, worker]

    def attend(self, state: RunState) -> list[Step]:
        reason = state.attention.reason if state.attention else "error"
        look = Step(self._perdure(f"replay {self.run} {self.target}"), "check the journal against the code, without performing anything")
        again = Step(self._perdure(self.resume_words), "try again here; it stops at the same place if nothing has changed")
        match reason:
            case "diverged":
                back = f"go on with the code that the run began with (version {state.created.version if state.created else '?'}), or with code that asks for the same"
                return [look, Step(again.command, back)]
            case "poison":
                return [Step(again.command, "drive it alone in this process, where its death harms no other run and can be watched")]
            case "stuck":
                return [look, Step(self._perdure(f"events {self.run}"), "see what it did last"), again]
            case _:
                return [again, Step(self._perdure(f"verify {self.run}"), "check that the journal itself is sound")]

    def follow(self) -> Step:
        return Step(self._perdure(f"events {self.run} --follow"), "watch it; nothing needs to be done")

    def nothing(self) -> Step:
        return Step(self._perdure(f"show {self.run}"), "look at its calls; nothing needs to be done before what it waits for")

    def cancel(self) -> Step:
        return Step(self._perdure(f"cancel {self.run}"), "stop it: the agent is told, effects that have happened stay")

    def after_the_end(self, state: RunState) -> list[Step]:
        show = Step(self._perdure(f"show {self.run}"), "every call with its result")
        if state.status == "failed":
            return [show, Step(self._perdure(f"trace {self.run} {state.seq}"), "how it came to the failure")]
        return [show]
