"""Commands about one run, each with what it would do: ready to be pasted anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import Struct

from perdure import shell
from perdure.core.identity import undone_by
from perdure.core.prompts import is_request
from perdure.core.state import RunState
from perdure.inspect.asks import Asked
from perdure.inspect.children import Child, in_short
from perdure.inspect.shortage import Shortage
from perdure.inspect.undone import Undoing
from perdure.inspect.words import amount, clip, people, plural
from perdure.store.api import RunRow

EDIT_CHARS = 100


class Step(Struct, frozen=True):
    command: str
    does: str


class Orders:
    """Commands about one run."""

    def __init__(self, row: RunRow, options: str, code: str | None, *, cancelled: bool) -> None:
        self.run = row.run_id
        self.row = row
        self.agent = row.agent
        self.options = options
        self.target = row.target or f"FILE.py:{row.agent.removesuffix('.undo')}"
        self.cancelled = cancelled
        if code is None:
            code = "" if row.target else shell.quote(self.target)
        self.code = f" {code}".rstrip()  # behind the run, for verbs that need its code; quoted already
        self.undone = undone_by(row.run_id)  # an undo goes on with the command that began it, and no worker serves it

    def _perdure(self, verb: str, *words: str, more: str = "") -> str:
        """The command: words are whatever they are, and `more` is text of ours that goes behind them as it is."""
        return f"{shell.command(verb, *words)}{more}{self.options}"

    def _resume(self) -> str:
        verb, run_id = ("resume", self.run) if self.undone is None else ("undo", self.undone)
        return self._perdure(verb, run_id, more=self.code)

    # -- people -------------------------------------------------------------------------------------------------------
    def decide(self, one: Asked) -> list[Step]:
        """Yes, yes with other values where that is allowed, and no."""
        what = f"exactly this is {'made' if one.tool else 'approved'} (digest {one.digest[:12]}): {clip(one.asked, 200)}"
        yes = f"say yes, as {people(tuple(one.by))}: {what}" if one.by else f"say yes: {what}"
        refused = f"{clip(one.action, 60)} is not made" if one.tool else "it is not approved"
        steps = [
            Step(self._perdure("approve", one.approval), yes),
            Step(self._perdure("reject", one.approval, more=" --reason 'TEXT'"), f"say no: {refused}, and the agent sees the reason"),
        ]
        if one.editable:
            edit = Step(
                self._perdure("approve", one.approval, more=f" --edit {_to_fill_in(one)}"), f"say yes with other values: {_as_it_is(one)}"
            )
            steps.insert(1, edit)
        return steps

    def approvals(self, count: int) -> Step:
        return Step(self._perdure("approvals", more=f" --run {shell.quote(self.run)}"), f"all {count:,} approvals that it waits for")

    def signal(self, topic: str) -> Step:
        return Step(self._perdure("signal", self.run, topic, more=" 'JSON'"), f"hand it what it waits for on {topic!r}")

    def why(self, child: Child) -> Step:
        return Step(self._perdure("why", child.run_id), f"{in_short(child)}; that page has what to type")

    def settle(self, call: int, too_early: str | None) -> list[Step]:
        """The three things that a person can say about a call in doubt; `too_early` is why one of them is not taken yet."""
        if self.cancelled:
            # Nobody waits for the call any more, whatever became of it.
            happened = f"call {call} did happen: this JSON is recorded as its result, and the run goes on to its end"
            did_not = f"call {call} did not happen: it is NOT performed again, because the run is being cancelled"
            fail = f"leave it: call {call} is recorded as failed with this text"
        else:
            happened = f"call {call} did happen: the agent gets this JSON as its result"
            did_not = f"call {call} did not happen: it is performed again, with the same key"
            fail = f"leave it: the agent gets a ToolFailed for call {call} with this text"
        if too_early is not None:
            did_not += f"; refused while {too_early}, unless you add --final: the service has ruled it out"
        return [
            Step(self._perdure("resolve", self.run, str(call), more=" --happened 'JSON'"), happened),
            Step(self._perdure("resolve", self.run, str(call), more=" --did-not-happen"), did_not),
            Step(self._perdure("resolve", self.run, str(call), more=" --fail 'TEXT'"), fail),
        ]

    # -- going on -----------------------------------------------------------------------------------------------------
    def go_on(self, *, served: bool, then: bool = False, settling: bool = False) -> list[Step]:
        first, last = "then " if then else "", "; that may settle what is in doubt by itself" if settling else ""
        resume = Step(self._resume(), f"{first}drive the run here until it rests{last}")
        worker = Step(self._perdure("worker", self.target), f"{first}serve every run of {self.agent}, this one too")
        return [resume] if served or self.undone is not None else [resume, worker]

    def another_version(self, version: str) -> list[Step]:
        """For a run whose code no worker has."""
        if self.undone is not None:
            return self.go_on(served=False)
        is_file = self.row.target is not None and " --tools " in self.row.target  # a plan's, which a run keeps whatever becomes of the file
        new = f" {shell.quote(f'NEW_FILE.py:{self.agent}')}" if not is_file else " PLAN.toml --tools NEW_FILE.py"
        adopt = "let the code in that file go on with it, which is recorded; replay it first"
        return [
            Step(self._perdure("worker", self.target), f"serve it, with the code of {self.agent} as it was in version {version}"),
            # What was recorded is where the old code was; that another version lies there now is nothing to bet on.
            Step(
                self._perdure("resume", self.run, more=f"{new} --adopt"),
                f"or, if the plan is the same and only its tools have changed, {adopt}" if is_file else f"or {adopt}",
            ),
            Step(self._perdure("replay", self.run, more=new), "see whether the code in that file, of another version, still does the same"),
        ]

    def unpause(self, does: str) -> Step:
        return Step(self._perdure("unpause", self.run), does)

    def top_up(self, short: Shortage) -> list[Step]:
        """For a run that stands still for a budget."""
        add = Step(self._perdure("unpause", self.run, more=_add_n(short)), _adding(short))
        return [add] if short.least else [self.unpause("let it go on: there is room in the budget again"), add]

    def top_up_below(self, short: Shortage) -> Step:
        """For children that do: one command, whoever's the budget is."""
        return Step(self._perdure("unpause", short.budget_of, more=_add_n(short)), _adding(short))

    def budgets(self) -> Step:
        return Step(self._perdure("show", self.run), "see what it has been used for")

    def attend(self, state: RunState) -> list[Step]:
        """For a run that a worker has stopped for a person."""
        reason = state.attention.reason if state.attention else "error"
        look = Step(self._perdure("replay", self.run, self.target), "check the journal against the code, without performing anything")
        again = Step(self._resume(), "try again here; it stops at the same place if nothing has changed")
        last = Step(self._perdure("events", self.run), "see what it did last")
        if self.undone is not None:
            return [last, again]
        match reason:
            case "diverged":
                began = state.created.version if state.created else "?"
                which = f"that it began with (version {began})"
                if state.version != began:
                    which = f"of version {state.version}, which goes on with it since (it began with version {began})"
                back = f"put the code back {which}, or code that asks for the same, then this goes on"
                return [look, Step(again.command, back)]
            case "poison":
                return [Step(again.command, "drive it alone in this process, where its death harms no other run and can be watched")]
            case "stuck":
                return [look, last, again]
            case "circling":
                return [last, self.unpause("let it go on; what counts as a circle is counted anew")]
            case _:
                return [again, Step(self._perdure("verify", self.run), "check that the journal itself is sound")]

    # -- looking, and the end -----------------------------------------------------------------------------------------
    def follow(self) -> Step:
        return Step(self._perdure("events", self.run, more=" --follow"), "watch it; nothing needs to be done")

    def nothing(self) -> Step:
        return Step(self._perdure("show", self.run), "look at its calls; nothing needs to be done before what it waits for")

    def cancel(self) -> Step:
        return Step(self._perdure("cancel", self.run), "stop it: the agent is told, effects that have happened stay")

    def force(self) -> Step:
        return Step(
            self._perdure("cancel", self.run, more=" --force"), "end it without its agent, if that cannot clean up: what is open stays so"
        )

    def after_the_end(self, state: RunState, undoing: Undoing | None, undone: Mapping[int, int]) -> list[Step]:
        """`undone` are calls that the run itself has taken back, with those that have done so: neither is left to be undone."""
        steps = [Step(self._perdure("show", self.run), "every call with its result")]
        if state.status == "failed":
            steps.append(Step(self._perdure("trace", self.run, str(state.seq)), "how it came to the failure"))
        if undoing is not None:
            return [*steps, Step(self._perdure("why", undoing.run_id), f"{undoing.words}; that page has how far it came")]
        if state.status == "succeeded" or self.undone is not None or self.row.parent is not None:
            return steps
        settled = {*undone, *undone.values()}
        effects = sum(
            call.phase == "completed" and call.effect != "read" and not is_request(call.args) and call.number not in settled
            for call in state.calls.values()
        )
        if effects or state.children:
            what = plural(effects, "call") + (", and what its children did" if state.children else "")
            does = f"take back what it has changed ({what}), where its tools say how; with --dry-run only see what that would be"
            steps.append(Step(self._perdure("undo", self.run, more=self.code), does))
        return steps if state.status != "failed" else [*steps, self._again()]

    def _again(self) -> Step:
        row = self.row
        who = (f" --tenant {shell.quote(row.tenant)}" if row.tenant != "default" else "") + (
            f" --actor {shell.quote(row.actor)}" if row.actor else ""
        )
        does = "what has ended stays so: begin anew, under another id; what this run did is done again then"
        return Step(self._perdure("run", self.target, more=f" --input 'JSON' --id NEW_ID{who}"), does)


def _add_n(short: Shortage) -> str:
    return f" {shell.quote(f'--add-{short.limit.what}')} N"


def _adding(short: Shortage) -> str:
    least = f"it needs at least {amount(short.limit.what, short.least)}" if short.least else "there is room for a call again"
    return f"add N to the budget of run {short.budget_of} ({least}), and let all go on that stand still for it"


def _to_fill_in(one: Asked) -> str:
    """The editable fields as JSON that somebody has to fill in: pasted as it is, it is refused."""
    return shell.quote("{" + ", ".join(f"{json.dumps(name)}: NEW" for name in one.editable) + "}")


def _as_it_is(one: Asked) -> str:
    """The editable fields with the values that they have."""
    values = {name: one.input.get(name) if isinstance(one.input, dict) else None for name in one.editable}
    return ", ".join(f"{name} is {clip(json.dumps(value, ensure_ascii=False), EDIT_CHARS)}" for name, value in values.items()) + " now"
