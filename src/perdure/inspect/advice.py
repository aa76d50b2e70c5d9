"""What to type next, complete with ids, and what each command would do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from msgspec import Struct

from perdure.core.state import RunState
from perdure.store.api import FINISHED, RunRow


class Step(Struct, frozen=True):
    command: str
    does: str


def advise(
    row: RunRow,
    state: RunState,
    doubts: Mapping[int, bool],
    *,
    held: bool,
    alive: int,
    now: int,
    options: str = "",
    code: str | None = None,
) -> list[Step]:
    """The commands that make sense for the run as it is, the most likely one first.

    `doubts` are the calls to settle, and of each whether the next worker may settle it by itself. `code` is what `resume` must be
    told about where the agent's code is; "" when it finds it by itself.
    """
    orders = _Orders(row, options, code, cancelled=state.cancel is not None)
    if row.status in FINISHED:
        return orders.after_the_end(state)
    # Asking twice changes nothing.
    stop = [] if state.cancel is not None else [orders.cancel()]
    settle = [step for call in doubts for step in orders.settle(call)]
    if row.status == "needs_attention":
        if doubts and all(doubts.values()):
            return [*orders.go_on(alive, settling=True), *settle, *stop]
        if settle:
            return [*settle, *orders.go_on(alive, then=True), *stop]
        return [*orders.attend(state), *stop]
    if held:
        return [orders.follow(), *settle, *stop]
    if row.status in ("waiting", "waiting_approval", "paused") and (row.ready_at is None or row.ready_at > now):
        return [orders.nothing(), *orders.go_on(alive), *stop]
    return [*orders.go_on(alive, settling=any(doubts.values())), *settle, *stop]


class _Orders:
    """Commands about one run."""

    def __init__(self, row: RunRow, options: str, code: str | None, *, cancelled: bool) -> None:
        self.run = shlex.quote(row.run_id)
        self.agent = row.agent
        self.options = options
        self.target = shlex.quote(row.target) if row.target else f"FILE.py:{row.agent}"
        self.cancelled = cancelled
        if code is None:
            code = "" if row.target else self.target
        self.resume_words = f"resume {self.run} {code}".rstrip()

    def _perdure(self, words: str) -> str:
        return f"perdure {words}{self.options}"

    def settle(self, call: int) -> list[Step]:
        if self.cancelled:
            # Nobody waits for the call any more, whatever became of it.
            happened = f"call {call} did happen: this JSON is recorded as its result, and the run goes on to its end"
            did_not = f"call {call} did not happen: it is NOT performed again, because the run is being cancelled"
            fail = f"leave it: call {call} is recorded as failed with this text"
        else:
            happened = f"call {call} did happen: the agent gets this JSON as its result"
            did_not = f"call {call} did not happen: it is performed again, with the same key"
            fail = f"leave it: the agent gets a ToolFailed for call {call} with this text"
        resolve = f"resolve {self.run} {call}"
        return [
            Step(self._perdure(f"{resolve} --happened 'JSON'"), happened),
            Step(self._perdure(f"{resolve} --did-not-happen"), did_not),
            Step(self._perdure(f"{resolve} --fail 'TEXT'"), fail),
        ]

    def go_on(self, alive: int, *, then: bool = False, settling: bool = False) -> list[Step]:
        first, last = "then " if then else "", "; that may settle what is in doubt by itself" if settling else ""
        resume = Step(self._perdure(self.resume_words), f"{first}drive the run here until it rests{last}")
        worker = Step(self._perdure(f"worker {self.target}"), f"{first}serve every run of {self.agent}, this one too")
        return [resume] if alive else [resume, worker]

    def attend(self, state: RunState) -> list[Step]:
        reason = state.attention.reason if state.attention else "error"
        look = Step(self._perdure(f"replay {self.run} {self.target}"), "check the journal against the code, without performing anything")
        again = Step(self._perdure(self.resume_words), "try again here; it stops at the same place if nothing has changed")
        match reason:
            case "diverged":
                version = state.created.version if state.created else "?"
                back = f"put the code back that it began with (version {version}), or code that asks for the same, then this goes on"
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
