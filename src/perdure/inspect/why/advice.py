"""What to type next: the commands that make sense for a run. Each is complete, quoted for a shell, and explained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from msgspec import Struct

from perdure import shell
from perdure.core.codec import Payload
from perdure.core.events import CallAnswered
from perdure.core.identity import undone_by
from perdure.core.reopen import reopening, retry_point
from perdure.core.state import CallState, RunState, happened, is_repeatable, own_children
from perdure.core.taken_back import taken_back
from perdure.errors import PerdureError
from perdure.inspect.text import amount, clip, people, plural
from perdure.inspect.view import RunView, begins_later
from perdure.inspect.why.calls import CallInDoubt, topics
from perdure.inspect.why.context import Scene, Shortage, Undoing
from perdure.inspect.why.waiting import Asked, Child, child_in_short
from perdure.store.api import FINISHED, RunRow, Specimen

EDIT_CHARS = 100
SHOWN_EACH = 3  # at most this many calls are named, and approvals, children and topics get separate commands


class AdviceStep(Struct, frozen=True):
    command: str
    does: str


class Orders:
    """Makes the commands about one run, each with the words that say what the command does."""

    def __init__(self, row: RunRow, options: str, code: str | None, *, cancelled: bool) -> None:
        self.run = row.run_id
        self.row = row
        self.agent = row.agent
        self.options = options
        self.target = row.target or f"FILE.py:{row.agent.removesuffix('.undo')}"
        self.cancelled = cancelled
        if code is None:
            code = "" if row.target else shell.quote(self.target)
        self.code = f" {code}".rstrip()  # the words after the run id, for verbs that need the code; already quoted
        self.undone = undone_by(row.run_id)  # not None if this run is an undo, which only `perdure undo` drives

    def _perdure(self, verb: str, *words: str, more: str = "") -> str:
        """The command line. `words` are quoted for the shell; `more` is appended unchanged."""
        return f"{shell.command(verb, *words)}{more}{self.options}"

    def _resume(self, more: str = "") -> str:
        verb, run_id = ("resume", self.run) if self.undone is None else ("undo", self.undone)
        return self._perdure(verb, run_id, more=self.code + more)

    def begin_early(self, *, served: bool) -> list[AdviceStep]:
        """The commands for a run whose time to begin has not come."""
        worker = AdviceStep(self._perdure("worker", self.target), f"serve every run of {self.agent}, this one when its time has come")
        return [*([] if served else [worker]), AdviceStep(self._resume(" --now"), "begin it now and here, before its time")]

    # -- what needs a person ------------------------------------------------------------------------------------------
    def decide(self, one: Asked) -> list[AdviceStep]:
        """The commands to approve, to approve with other values (if the approval allows edits), and to reject."""
        what = f"exactly this is {'made' if one.tool else 'approved'} (digest {one.digest[:12]}): {clip(one.asked, 200)}"
        yes = f"say yes, as {people(tuple(one.by))}: {what}" if one.by else f"say yes: {what}"
        refused = f"{clip(one.action, 60)} is not made" if one.tool else "it is not approved"
        steps = [
            AdviceStep(self._perdure("approve", one.approval), yes),
            AdviceStep(self._perdure("reject", one.approval, more=" --reason 'TEXT'"), f"say no: {refused}, and the agent sees the reason"),
        ]
        if one.editable:
            edit = AdviceStep(
                self._perdure("approve", one.approval, more=f" --edit {_to_fill_in(one)}"), f"say yes with other values: {_as_it_is(one)}"
            )
            steps.insert(1, edit)
        return steps

    def approvals(self, count: int) -> AdviceStep:
        return AdviceStep(self._perdure("approvals", more=f" --run {shell.quote(self.run)}"), f"all {count:,} approvals that it waits for")

    def signal(self, topic: str) -> AdviceStep:
        return AdviceStep(self._perdure("signal", self.run, topic, more=" 'JSON'"), f"send the signal that it waits for on {topic!r}")

    def why(self, child: Child) -> AdviceStep:
        return AdviceStep(self._perdure("why", child.run_id), f"{child_in_short(child)}; that page has what to type")

    def settle(self, call: int, too_early: str | None) -> list[AdviceStep]:
        """The commands for the three answers about a call in doubt.

        `too_early` is the reason why `--did-not-happen` is refused for now; None if it is not refused.
        """
        if self.cancelled:
            # In a cancelled run, the agent no longer waits for the result of the call.
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
            AdviceStep(self._perdure("resolve", self.run, str(call), more=" --happened 'JSON'"), happened),
            AdviceStep(self._perdure("resolve", self.run, str(call), more=" --did-not-happen"), did_not),
            AdviceStep(self._perdure("resolve", self.run, str(call), more=" --fail 'TEXT'"), fail),
        ]

    # -- driving the run on -------------------------------------------------------------------------------------------
    def go_on(
        self, *, served: bool, version_served: bool, then: bool = False, settling: bool = False, silent: bool = False
    ) -> list[AdviceStep]:
        first, last = "then " if then else "", "; that may settle what is in doubt by itself" if settling else ""
        takes = "wait here until the silent worker's lease has run out, take the run over, and " if silent else ""
        # This page does not load the code. If no worker serves the version, the file may have another version by now.
        needs = "" if version_served or self.undone is not None or not self.row.version else self._needs()
        resume = AdviceStep(self._resume(), f"{first}{takes}drive the run here until it rests{last}{needs}")
        worker = AdviceStep(
            self._perdure("worker", self.target),
            f"{first}serve every run of {self.agent}{' with such code' if needs else ''}, this one too",
        )
        return [resume] if served or self.undone is not None else [resume, worker]

    def _needs(self) -> str:
        adopt = self._perdure("adopt", self.run, more=self.code)
        return f"; that takes the code of version {self.row.version}: other code goes on with the run only after {adopt}"

    def another_version(self, version: str) -> list[AdviceStep]:
        """The commands for a run whose version no live worker serves."""
        if self.undone is not None:
            return self.go_on(served=False, version_served=False)
        is_file = self.row.target is not None and " --tools " in self.row.target
        new = f" {shell.quote(f'NEW_FILE.py:{self.agent}')}" if not is_file else " PLAN.toml --tools NEW_FILE.py"
        adopt = "let the code in that file go on with it, which is recorded; replay it first"
        return [
            AdviceStep(self._perdure("worker", self.target), f"serve it, with the code of {self.agent} as it was in version {version}"),
            # Do not suggest the recorded target: it names the file of the old code. The new code may be elsewhere.
            AdviceStep(
                self._perdure("adopt", self.run, more=new),
                f"or {adopt}",
            ),
            AdviceStep(
                self._perdure("replay", self.run, more=new), "see whether the code in that file, of another version, still does the same"
            ),
        ]

    def unpause(self, does: str) -> AdviceStep:
        return AdviceStep(self._perdure("unpause", self.run), does)

    def top_up(self, short: Shortage) -> list[AdviceStep]:
        """The commands for a run that stopped because a budget is used up."""
        add = AdviceStep(self._perdure("unpause", self.run, more=_add_n(short)), _adding(short))
        return [add] if short.least else [self.unpause("let it go on: there is room in the budget again"), add]

    def top_up_below(self, short: Shortage) -> AdviceStep:
        """The command for children that this budget stopped. The command names the run that owns the budget."""
        return AdviceStep(self._perdure("unpause", short.budget_of, more=_add_n(short)), _adding(short))

    def budgets(self) -> AdviceStep:
        return AdviceStep(self._perdure("show", self.run), "see what it has been used for")

    def attend(self, state: RunState) -> list[AdviceStep]:
        """The commands for a run that needs attention, if the reason is neither a call in doubt nor a budget."""
        reason = state.attention.reason if state.attention else "error"
        look = AdviceStep(self._perdure("replay", self.run, self.target), "check the journal against the code, without performing anything")
        again = AdviceStep(self._resume(), "try again here; it stops at the same place if nothing has changed")
        last = AdviceStep(self._perdure("events", self.run), "see what it did last")
        if self.undone is not None:
            return [last, again]
        match reason:
            case "diverged":
                began = state.began_with or "?"
                which = f"that it began with (version {began})"
                if state.version != began:
                    which = f"of version {state.version}, which goes on with it since (it began with version {began})"
                back = f"put the code back {which}, or code that asks for the same, then this goes on"
                return [look, AdviceStep(again.command, back)]
            case "poison":
                return [AdviceStep(again.command, "drive it alone in this process, where its death harms no other run and can be watched")]
            case "stuck":
                return [look, last, again]
            case "restored":
                look = AdviceStep(last.command, "see what it was about to do, and look there: has it happened since?")
                on = self.unpause("let it go on, if no effect would happen twice; `keyed` calls have the same keys as before")
                force = " --force --reason 'it went on elsewhere'"
                return [look, on, AdviceStep(self._perdure("cancel", self.run, more=force), "end it, without its agent, if not")]
            case "circling":
                return [last, self.unpause("let it go on; the counters for circles begin again")]
            case _:
                return [again, AdviceStep(self._perdure("verify", self.run), "check that the journal itself is sound")]

    def repair(self) -> AdviceStep:
        does = "write the row again from the journal, which is not changed; it shows the changes and asks first"
        return AdviceStep(self._perdure("verify", self.run, more=" --repair"), does)

    # -- watching, cancelling, and after the end ----------------------------------------------------------------------
    def follow(self) -> AdviceStep:
        return AdviceStep(self._perdure("events", self.run, more=" --follow"), "watch it; nothing needs to be done")

    def nothing(self) -> AdviceStep:
        return AdviceStep(self._perdure("show", self.run), "look at its calls; nothing needs to be done while it waits")

    def cancel(self) -> AdviceStep:
        return AdviceStep(self._perdure("cancel", self.run), "stop it: the agent is told, effects that have happened stay")

    def force(self) -> AdviceStep:
        return AdviceStep(
            self._perdure("cancel", self.run, more=" --force"), "end it without its agent, if that cannot clean up: what is open stays so"
        )

    def after_the_end(self, state: RunState, undoing: Undoing | None, undone: Mapping[int, int]) -> list[AdviceStep]:
        """The commands for a run that has ended.

        `undone` maps each call that the run itself has undone to the call that undid it. These calls are not counted.
        """
        steps = [AdviceStep(self._perdure("show", self.run), "every call with its result")]
        if state.status == "failed":
            steps.append(AdviceStep(self._perdure("trace", self.run, str(state.seq)), "how it came to the failure"))
        if undoing is not None:
            return [*steps, AdviceStep(self._perdure("why", undoing.run_id), f"{undoing.words}; that page has how far it came")]
        if state.status == "succeeded" or self.undone is not None or self.row.parent is not None:
            return steps
        settled = {*undone, *undone.values()}
        effects = sum(happened(call) == "yes" and not call.inherited and call.number not in settled for call in state.calls.values())
        children = own_children(state)
        if effects or children:
            what = plural(effects, "call") + (", and what its children did" if children else "")
            does = f"take back what it has changed ({what}), where its tools say how; with --dry-run only see what that would be"
            does += (
                f"; that takes code that still does what the journal has, as version {state.version} did: use it before you fix the code"
            )
            steps.append(AdviceStep(self._perdure("undo", self.run, more=self.code), does))
        return steps

    def reopen(self, reading: RunView, short: Shortage | None) -> list[AdviceStep]:
        """The command that lets a failed or cancelled run go on. With --dry-run it only shows what would happen.

        `short`: the budget because of which it failed.
        """
        state, row = reading.state, self.row
        if state.status == "succeeded" or self.undone is not None:
            return []
        if row.parent is not None:
            root = row.run_id.partition("/")[0]
            more = _add_n(short) if short is not None and short.least else ""
            return [
                AdviceStep(self._perdure("retry", root, more=more), f"if run {root} has failed too: let it go on, and with it this child")
            ]
        try:
            found = reopening(reading.events, retry_point(reading.events), by="preview")
        except PerdureError as error:
            return [
                AdviceStep(self._perdure("rewind", self.run, more=f" --to SEQ{self.code}"), f"let it go on from an earlier event; {error}")
            ]
        kept = f"{plural(len(found.kept), 'call')} with a result {'is' if len(found.kept) == 1 else 'are'} not made again"
        if state.status == "cancelled":
            does = f"let it go on after all, as if its cancel had not been asked for; {kept}"
        elif found.again:
            does = f"{_tried_again(found.again)}; {kept}"
        elif found.children:
            does = f"let its child {found.children[0]} go on, and then the run; {kept}"
        else:
            does = f"take its last step again, with the code of now (mend it first); {kept}"
        dry = "with --dry-run only see what it would do"
        if short is not None and short.least:
            add = f"add N to the budget of run {short.budget_of} (it needs at least {amount(short.limit.what, short.least)}), and let the run go on"
            return [AdviceStep(self._perdure("retry", self.run, more=f"{self.code}{_add_n(short)}"), f"{add}; {kept}; {dry}")]
        return [AdviceStep(self._perdure("retry", self.run, more=self.code), f"{does}; {dry}")]


def _tried_again(calls: Sequence[CallState]) -> str:
    """What a retry does with these failed calls. As in core/decide.py: a call that may have happened is in doubt."""
    safe = [call for call in calls if is_repeatable(call)]
    doubtful = [call for call in calls if not is_repeatable(call)]
    asked = [call for call in doubtful if call.has_reconcile]
    sent = [call for call in doubtful if not call.has_reconcile and call.effect == "keyed"]
    parked = [call for call in doubtful if not call.has_reconcile and call.effect != "keyed"]
    told = []
    if safe:
        told.append(f"attempt {_named(safe)} again")
    if sent:
        told.append(f"send {_named(sent)} again with the same key, if the key is still inside its window (else a person has to say)")
    if asked:
        told.append(f"ask the reconcile hook what became of {_named(asked)}")
    if not parked:
        return f"{', '.join(told)}, and go on"
    then = (
        f"{_named(parked)} may have happened: the run stops there in doubt until a person says what became of it "
        "(with perdure resolve; then this page has the commands)"
    )
    return "; ".join([*([", ".join(told)] if told else ["reopen the run"]), then])


def _named(calls: Sequence[CallState]) -> str:
    more = f" and {len(calls) - SHOWN_EACH:,} more" if len(calls) > SHOWN_EACH else ""
    return f"call {', '.join(f'{call.number} ({call.tool})' for call in calls[:SHOWN_EACH])}{more}"


def _add_n(short: Shortage) -> str:
    return f" {shell.quote(f'--add-{short.limit.what}')} N"


def _adding(short: Shortage) -> str:
    least = f"it needs at least {amount(short.limit.what, short.least)}" if short.least else "there is room for a call again"
    return f"add N to the budget of run {short.budget_of} ({least}), and let all runs go on that it stopped"


def _to_fill_in(one: Asked) -> str:
    """The editable fields as JSON with the word NEW for each value. NEW is not JSON, so the user must replace it."""
    return shell.quote("{" + ", ".join(f"{json.dumps(name)}: NEW" for name in one.editable) + "}")


def _as_it_is(one: Asked) -> str:
    """The editable fields with their current values."""
    values = {name: one.input.get(name) if isinstance(one.input, dict) else None for name in one.editable}
    return ", ".join(f"{name} is {clip(json.dumps(value, ensure_ascii=False), EDIT_CHARS)}" for name, value in values.items()) + " now"


# -- Which commands make sense for the run


class OpenAdvice(Struct, frozen=True):
    """What is open in a run and needs commands: calls in doubt, approvals, children and budgets."""

    doubts: Sequence[CallInDoubt]  # the calls in doubt
    asked: Sequence[Asked]
    news: Sequence[Child]  # children that continue only after a person does something
    short: Sequence[Shortage] = ()  # budgets that are used up and stopped children


def advise(scene: Scene, what: OpenAdvice, *, options: str = "", code: str | None = None) -> list[AdviceStep]:
    """The commands that make sense for the run now, the most likely command first.

    `options` is added to every command, such as ` --url …`. `code` is the argument that tells `resume` where the
    agent's code is. It is "" if `resume` finds the code without the argument, and None to take the argument from the
    run's row.
    """
    row, state = scene.reading.row, scene.reading.state
    imported = row.imported
    if imported is not None and imported.fork_of is not None:
        return _look_at_fork(scene, imported, options)
    if imported is not None:
        return _look_at_specimen(row, options)
    orders = Orders(row, options, code, cancelled=state.cancel is not None)
    if scene.reading.row_was_edited:
        return [orders.repair()]
    if row.status in FINISHED:
        steps = orders.after_the_end(state, scene.undoing, taken_back(state, scene.load))
        again = [] if scene.undoing is not None else orders.reopen(scene.reading, scene.short)
        # A person wanted a cancelled run to end. So the command that lets it go on comes last.
        return [*steps, *again] if row.status == "cancelled" else [*again, *steps]
    stop = _stop(scene, orders)
    add = [orders.top_up_below(short) for short in what.short if scene.short is None or scene.short.budget_of != short.budget_of]
    people = [*_decide(what.asked, orders), *add, *_look_below(what.news, orders)]
    settle = [step for doubt in what.doubts for step in orders.settle(doubt.call, doubt.too_early)]
    settling = [doubt.settles_itself for doubt in what.doubts]  # may the next worker settle it without a person?
    go_on = _go_on(scene, orders, then=bool(people), settling=any(settling))
    if row.status == "needs_attention":
        if settling and all(settling):
            return [*go_on, *settle, *people, *stop]
        if settle:
            return [*settle, *orders.go_on(served=scene.served, version_served=scene.version_served, then=True), *people, *stop]
        return [*_attend(scene, orders), *people, *stop]
    if row.status == "paused":
        return [orders.unpause("let it go on where it stands"), *people, *stop]
    if scene.held:
        stay = [] if state.paused is None else [orders.unpause("let it go on after all, without standing still")]
        return [*people, *stay, orders.follow(), *settle, *stop]
    if row.status in ("waiting", "waiting_approval") and (row.ready_at is None or row.ready_at > scene.now):
        return [*people, *_signals(scene, orders), *([] if people else [orders.nothing()]), *([] if scene.served else go_on), *stop]
    if begins_later(row, scene.now) and (scene.version_served or scene.missing is None):
        return [*([orders.nothing()] if scene.served else []), *orders.begin_early(served=scene.served), *stop]
    return [*go_on, *people, *settle, *stop]


def _look_at_specimen(row: RunRow, options: str) -> list[AdviceStep]:
    run_id = row.run_id
    inspect = f"{shell.command('inspect', run_id, f'FILE.py:{row.agent}')} --at SEQ{options}"
    looks = (
        []
        if undone_by(run_id) is not None
        else [AdviceStep(inspect, "the lines and variables of its agent at an event, with your copy of its code")]
    )
    return [
        AdviceStep(f"{shell.command('events', run_id)}{options}", "its journal; act on the run in the journal that it came from"),
        *looks,
        AdviceStep(f"{shell.command('verify', run_id)}{options}", "was the copy changed since it was written?"),
        AdviceStep(f"perdure prune --specimen {shell.quote(run_id)}{options}", "delete this copy, when you have seen enough"),
    ]


def _look_at_fork(scene: Scene, made: Specimen, options: str) -> list[AdviceStep]:
    assert made.fork_of is not None
    run_id = scene.reading.row.run_id
    changes, missing = _changes_of_fork(scene)
    live = f"{shell.command('fork', made.fork_of)} --at {made.at}{changes} --live{options}"
    return [
        AdviceStep(
            f"{shell.command('diff', made.fork_of)} {shell.quote(run_id)}{options}", "where it differs from the run that was forked"
        ),
        AdviceStep(live, f"the same with effects{missing}: it shows first what may happen twice"),
        AdviceStep(f"perdure prune --specimen {shell.quote(run_id)}{options}", "delete this rehearsal, when you have seen enough"),
    ]


def _changes_of_fork(scene: Scene) -> tuple[str, str]:
    """(the options that change the same as this rehearsal did, what the person has to put in for JSON)."""
    state = scene.reading.state
    assert state.forked is not None and state.created is not None
    forked, to_fill_in = state.forked, []
    words = "".join(f" --edit {number}=JSON" for number in forked.edits)
    own = [event.body for event in scene.reading.events if event.seq > state.inherited]
    edited = [body for body in own if isinstance(body, CallAnswered) and body.source == "edited"]
    # The rehearsal may number a call differently than the run that was forked. So only a single edit is certain.
    value = _short_json(edited[0].result, scene) if len(forked.edits) == len(edited) == 1 else None
    if value is not None:
        words = f" --edit {shell.quote(f'{forked.edits[0]}={value}')}"
    elif forked.edits:
        to_fill_in.append(f"the edited result of call {', '.join(map(str, forked.edits))}")
    if forked.input:
        value = _short_json(state.created.input, scene)
        words += f" --input {'JSON' if value is None else shell.quote(value)}"
        if value is None:
            to_fill_in.append("its input")
    missing = f" (put in {' and '.join(to_fill_in)} again)" if to_fill_in else ""
    if forked.model is not None:
        missing += f", if you name code as TARGET in which the model is {forked.model}"
    return words, missing


def _short_json(payload: Payload | None, scene: Scene) -> str | None:
    """The value as JSON for a command line; None if it is not known, or too long for that."""
    text = None if payload is None else scene.load(payload).decode()
    return None if text is None or len(text) > EDIT_CHARS else text


def _stop(scene: Scene, orders: Orders) -> list[AdviceStep]:
    # A second request to cancel would change nothing. What is left is to end the run without its agent.
    if scene.reading.state.cancel is None:
        return [orders.cancel()]
    return [] if scene.held else [orders.force()]


def _go_on(scene: Scene, orders: Orders, *, then: bool, settling: bool) -> list[AdviceStep]:
    if scene.missing is not None and not scene.version_served:
        return orders.another_version(scene.reading.row.version)
    return orders.go_on(served=scene.served, version_served=scene.version_served, then=then, settling=settling, silent=scene.silent)


def _attend(scene: Scene, orders: Orders) -> list[AdviceStep]:
    if scene.short is not None:
        return [*orders.top_up(scene.short), orders.budgets()]
    return orders.attend(scene.reading.state)


def _decide(asked: Sequence[Asked], orders: Orders) -> list[AdviceStep]:
    pending = [one for one in asked if one.status == "pending" and not one.expired]
    steps = [step for one in pending[:SHOWN_EACH] for step in orders.decide(one)]
    return steps if len(pending) <= SHOWN_EACH else [*steps, orders.approvals(len(pending))]


def _look_below(news: Sequence[Child], orders: Orders) -> list[AdviceStep]:
    return [orders.why(child) for child in news[:SHOWN_EACH]]


def _signals(scene: Scene, orders: Orders) -> list[AdviceStep]:
    return [orders.signal(topic) for topic in topics(scene)[:SHOWN_EACH]]
