"""Commands about one run, each with what it would do: ready to be pasted anywhere."""

from __future__ import annotations

import json
import shlex

from msgspec import Struct

from perdure.core.events import BudgetExceeded
from perdure.core.keys import undone_by
from perdure.core.state import RunState
from perdure.inspect.asks import Asked
from perdure.inspect.children import Child, in_short
from perdure.inspect.words import amount, clip, people
from perdure.store.api import RunRow

EDIT_CHARS = 100


class Step(Struct, frozen=True):
    command: str
    does: str


class Orders:
    """Commands about one run."""

    def __init__(self, row: RunRow, options: str, code: str | None, *, cancelled: bool) -> None:
        self.run = shlex.quote(row.run_id)
        self.agent = row.agent
        self.options = options
        self.target = shlex.quote(row.target) if row.target else f"FILE.py:{row.agent.removesuffix('.undo')}"
        self.cancelled = cancelled
        if code is None:
            code = "" if row.target else self.target
        self.undone = undone_by(row.run_id)  # an undo goes on with the command that began it, and no worker serves it
        verb = f"resume {self.run}" if self.undone is None else f"undo {shlex.quote(self.undone)}"
        self.resume_words = f"{verb} {code}".rstrip()

    def _perdure(self, words: str) -> str:
        return f"perdure {words}{self.options}"

    # -- people -------------------------------------------------------------------------------------------------------
    def decide(self, one: Asked) -> list[Step]:
        """Yes, yes with other values where that is allowed, and no."""
        what = f"exactly this is {'made' if one.tool else 'approved'} (digest {one.digest[:12]}): {clip(one.asked, 200)}"
        yes = f"say yes, as {people(tuple(one.by))}: {what}" if one.by else f"say yes: {what}"
        refused = f"{clip(one.action, 60)} is not made" if one.tool else "it is not approved"
        steps = [
            Step(self._perdure(f"approve {one.approval}"), yes),
            Step(self._perdure(f"reject {one.approval} --reason 'TEXT'"), f"say no: {refused}, and the agent sees the reason"),
        ]
        if one.editable:
            edit = Step(self._perdure(f"approve {one.approval} --edit {shlex.quote(_as_it_is(one))}"), "say yes with these values changed")
            steps.insert(1, edit)
        return steps

    def approvals(self, count: int) -> Step:
        return Step(self._perdure(f"approvals --run {self.run}"), f"all {count:,} approvals that it waits for")

    def signal(self, topic: str) -> Step:
        return Step(self._perdure(f"signal {self.run} {shlex.quote(topic)} 'JSON'"), f"hand it what it waits for on {topic!r}")

    def why(self, child: Child) -> Step:
        return Step(self._perdure(f"why {shlex.quote(child.run_id)}"), f"{in_short(child)}; that page has what to type")

    def settle(self, call: int) -> list[Step]:
        """The three things that somebody can say about a call in doubt."""
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

    # -- going on -----------------------------------------------------------------------------------------------------
    def go_on(self, *, served: bool, then: bool = False, settling: bool = False) -> list[Step]:
        first, last = "then " if then else "", "; that may settle what is in doubt by itself" if settling else ""
        resume = Step(self._perdure(self.resume_words), f"{first}drive the run here until it rests{last}")
        worker = Step(self._perdure(f"worker {self.target}"), f"{first}serve every run of {self.agent}, this one too")
        return [resume] if served or self.undone is not None else [resume, worker]

    def another_version(self, version: str) -> list[Step]:
        """For a run whose code no worker has."""
        if self.undone is not None:
            return self.go_on(served=False)
        return [
            Step(self._perdure(f"worker {self.target}"), f"serve it, with the code of {self.agent} as it was in version {version}"),
            Step(
                self._perdure(f"{self.resume_words} --adopt"),
                "or let the code as it is now go on with it, which is recorded; replay it first",
            ),
            Step(self._perdure(f"replay {self.run} {self.target}"), "see whether the code as it is now still does the same"),
        ]

    def unpause(self, does: str) -> Step:
        return Step(self._perdure(f"unpause {self.run}"), does)

    def top_up(self, over: BudgetExceeded) -> Step:
        # A limit that has been reached stops even what costs nothing.
        missing = amount(over.what, max(over.used + over.wanted - over.limit, over.used - over.limit + 1))
        does = f"add N to the budget of run {over.budget_of} (it needs at least {missing}), and let all go on that stand still for it"
        return Step(self._perdure(f"unpause {self.run} --add-{over.what} N"), does)

    def budgets(self) -> Step:
        return Step(self._perdure(f"show {self.run}"), "see what it has been used for")

    def attend(self, state: RunState) -> list[Step]:
        """For a run that a worker has stopped for a person."""
        reason = state.attention.reason if state.attention else "error"
        look = Step(self._perdure(f"replay {self.run} {self.target}"), "check the journal against the code, without performing anything")
        again = Step(self._perdure(self.resume_words), "try again here; it stops at the same place if nothing has changed")
        last = Step(self._perdure(f"events {self.run}"), "see what it did last")
        if self.undone is not None:
            return [last, again]
        match reason:
            case "diverged":
                version = state.version or "?"
                back = f"put the code back that it began with (version {version}), or code that asks for the same, then this goes on"
                return [look, Step(again.command, back)]
            case "poison":
                return [Step(again.command, "drive it alone in this process, where its death harms no other run and can be watched")]
            case "stuck":
                return [look, last, again]
            case "circling":
                return [last, self.unpause("let it go on; what counts as a circle is counted anew")]
            case _:
                return [again, Step(self._perdure(f"verify {self.run}"), "check that the journal itself is sound")]

    # -- looking, and the end -----------------------------------------------------------------------------------------
    def follow(self) -> Step:
        return Step(self._perdure(f"events {self.run} --follow"), "watch it; nothing needs to be done")

    def nothing(self) -> Step:
        return Step(self._perdure(f"show {self.run}"), "look at its calls; nothing needs to be done before what it waits for")

    def cancel(self) -> Step:
        return Step(self._perdure(f"cancel {self.run}"), "stop it: the agent is told, effects that have happened stay")

    def force(self) -> Step:
        return Step(self._perdure(f"cancel {self.run} --force"), "end it without its agent, if that cannot clean up: what is open stays so")

    def after_the_end(self, state: RunState) -> list[Step]:
        show = Step(self._perdure(f"show {self.run}"), "every call with its result")
        if state.status == "failed":
            return [show, Step(self._perdure(f"trace {self.run} {state.seq}"), "how it came to the failure")]
        return [show]


def _as_it_is(one: Asked) -> str:
    """The editable fields with the values that they have, as JSON to edit; what is too long to be edited in a line as an ellipsis."""
    values = {name: one.input.get(name) if isinstance(one.input, dict) else None for name in one.editable}
    return json.dumps({name: value if len(json.dumps(value)) <= EDIT_CHARS else "…" for name, value in values.items()})
