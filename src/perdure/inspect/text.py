"""Words for recorded data: times, spans, payloads, calls, amounts, model calls, plans, and one sentence per event.

Text from a journal is returned as it was recorded. The caller must escape the text before it prints it on a terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetDeclared,
    BudgetExceeded,
    BudgetRaised,
    CallAnswered,
    CallHeld,
    CallKept,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    Failure,
    FrameChanged,
    LabelsChanged,
    Limits,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    OutcomeReused,
    PatchMarked,
    PinChanged,
    PlanGenerated,
    RetryScheduled,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunForked,
    RunPaused,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunRestored,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    Usage,
    batch_of,
)
from perdure.core.prompt_deltas import is_request, told
from perdure.core.state import LOST, CallState, RunState
from perdure.core.times import iso as iso
from perdure.core.times import micros_of, utc
from perdure.errors import StoreCorrupt
from perdure.store.api import Tombstone

if TYPE_CHECKING:
    from perdure.models.messages import Answer, ToolUse

_OURS = re.compile(r"-packages/perdure/|/python3[.0-9]*t?/(asyncio|concurrent)/")  # the paths may be from any machine
_OUR_FOLDER = __file__.removesuffix("inspect/text.py")
_SPANS = ((86_400, "day", "days"), (3_600, "h", "h"), (60, "min", "min"), (1, "s", "s"))

# Effect class → the meaning of a journal that has the intent of a call and no result.
EFFECTS = {
    "read": "changes nothing, so it is simply asked again",
    "idempotent": "repeating it ends in the same state, so it is simply run again",
    "keyed": "the service drops a second request with the same key, so it is safe to repeat only while the service still knows the key",
    "transaction": "its effect and its result are one commit, so without a result it did not happen",
    "once": "it must not happen twice, so it is repeated only after its hook or a person has said that it did not happen",
}


def clock(ts: int, now: int) -> str:
    """The time `ts` for people. The date is left out if `ts` and `now` are on the same day."""
    try:
        then = utc(ts)
        same_day = then.date() == utc(now).date()
    except OverflowError:
        return f"{ts} µs"
    return then.strftime("%H:%M:%S UTC" if same_day else "%Y-%m-%d %H:%M:%S UTC")


def moment(text: str, now: int) -> str:
    """For people: a time in the form that iso() returns."""
    try:
        return clock(micros_of(datetime.fromisoformat(text)), now)
    except ValueError:
        return text  # a time after the year 9999


def seconds(us: int) -> float:
    """A length of time in seconds, for programs."""
    return round(us / 1e6, 3)


def span(us: int) -> str:
    """A length of time for people, rounded: 8 min, 3 s, 2.5 h."""
    length = max(us, 0) / 1e6
    for unit, one, many in _SPANS:
        if length >= unit:
            count = length / unit
            shown = f"{count:.1f}".removesuffix(".0") if unit > 60 and count < 10 else f"{count:.0f}"
            return f"{shown} {one if shown == '1' else many}"
    return "moments" if length < 0.001 else f"{length * 1000:.0f} ms"


def at(ts: int, now: int) -> str:
    """The time `ts`, and how long it is before or after `now`."""
    return f"{clock(ts, now)} ({f'in {span(ts - now)}' if ts > now else f'due for {span(now - ts)}'})"


# The canonical JSON of a pointer, with or without spaces.
_POINTER = re.compile(
    r'\{"content_type": ?"([\x20-\x21\x23-\x5b\x5d-\x7e]{1,200})", ?"sha256": ?"[0-9a-f]{64}", ?"size": ?(\d{1,18}), ?'
    r'"uri": ?"(perdure:artifact/[0-9a-f]{32})"\}'
)


def clip(text: str, width: int) -> str:
    """The text on one line, cut to the width with an ellipsis. A pointer to an artifact is shown by its URI and size."""
    flat = " ".join(text.split())
    if "perdure:artifact/" in flat:
        flat = _POINTER.sub(lambda found: f"{found[3]} ({size(int(found[2]))}, {found[1]})", flat)
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def shown(payload: Payload | None, width: int = 80) -> str:
    """The payload as JSON, cut to the width. If the payload is in the blob store: its preview and its size."""
    if payload is None:
        return ""
    inline = payload.inline
    if inline is None:
        length = payload.size if isinstance(payload.size, int) else 0
        return clip(f"{payload.preview}", width) + f" ({size(length)})"
    return clip(inline.decode("utf-8", "replace"), width)


def called(tool: str, args: Payload | None, width: int = 80) -> str:
    """A call as Python code: refund(order="o-7", cents=500)."""
    inline = args.inline if args is not None else None
    if inline is None:
        return f"{tool}({shown(args, width)})"
    value = json.loads(inline)
    if not isinstance(value, dict):
        return f"{tool}({shown(args, width)})"
    return f"{tool}({clip(', '.join(f'{name}={json.dumps(item, ensure_ascii=False)}' for name, item in value.items()), width)})"


def failed(failure: Failure | None, width: int = 160) -> str:
    """A failure in one line."""
    return "" if failure is None else clip(f"{failure.type}: {failure.message}" if failure.message else failure.type, width)


def places(failure: Failure | None) -> list[str]:
    """Where the failure was raised: lines such as `file:line in function`, the innermost function last.

    Lines of perdure, asyncio and thread pools are left out: users look for a line in their own code.
    """
    found = failure.traceback.splitlines() if failure is not None and failure.traceback else []
    return [place for place in found if not place.startswith(_OUR_FOLDER) and not _OURS.search(place)]


def plural(count: int, one: str, many: str = "") -> str:
    """1 call, 2 calls."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def money(usd_micros: int) -> str:
    """Micro-dollars for people: $2.00, $0.0123."""
    whole, part = divmod(abs(usd_micros), 1_000_000)
    decimals = f"{part:06d}".rstrip("0")
    return f"{'-' if usd_micros < 0 else ''}${whole:,}.{decimals:0<2}"


def amount(what: str, number: int) -> str:
    """An amount with its unit; `what` is a limit of a budget: "usd", "tokens", "calls" or "seconds"."""
    match what:
        case "usd":
            return money(number)
        case "seconds":
            return f"{number / 1e6:,.3f}".rstrip("0").rstrip(".") + " s"
        case _:
            return plural(number, what.removesuffix("s"))


def used(usage: Usage | None) -> str:
    """The cost of a call or a run: tokens and money. Empty if there is no cost."""
    if usage is None:
        return ""
    tokens = usage.tokens_in + usage.tokens_out
    cached = f" ({usage.tokens_cached:,} cached)" if usage.tokens_cached else ""
    parts = [f"{usage.tokens_in:,} tokens in{cached}, {usage.tokens_out:,} out"] if tokens else []
    if usage.usd_micros:
        parts.append(money(usage.usd_micros))
    return ", ".join(parts)


def people(who: tuple[str, ...]) -> str:
    """The people or groups who may decide."""
    return " or ".join(who) or "anybody"


def place_words(queue: str, priority: int) -> str:
    """The run's queue and priority. Each is left out if it is the default."""
    return (f", queue {queue}" if queue != "default" else "") + (f", priority {priority}" if priority else "")


def plain(payload: Payload | None, load: Any = None) -> Any:
    """The payload as a JSON value. Without `load`, a payload in the blob store becomes {"blob", "size", "preview"}."""
    if payload is None:
        return None
    inline = payload.inline
    if inline is None and load is not None:
        inline = load(payload)
    if inline is None:
        return {"blob": payload.blob, "size": payload.size, "preview": payload.preview}
    return json.loads(inline)


def pruned_words(tombstone: Tombstone) -> str:
    """When the run was pruned, who pruned it, and how the run had ended."""
    return (
        f"run {tombstone.run_id} ({tombstone.agent}, tenant {tombstone.tenant}) {tombstone.status} at {iso(tombstone.finished_at)} and was pruned "
        f"at {iso(tombstone.pruned_at)} by {tombstone.by}; its journal had {plural(tombstone.events, 'event')}, head {tombstone.head.hex()}"
    )


# -- Model calls: how many messages a request has, and what the model answered


Load = Callable[[Payload], bytes]
# Where an answer in a fork came from.
SOURCES = {
    "recorded": "as recorded in the run that was forked",
    "edited": "edited by a person",
    "answers": "a prepared answer",
    "simulated": "from the tool's stand-in",
    "read": "really asked: it changes nothing",
}
USES_NAMED = 3
_STOPS = {"end": "", "tools": "", "length": "; it was cut off at its limit of tokens", "refusal": "; it refuses to say more"}


def request_words(args: Payload | None, load: Load | None = None) -> str:
    """The size of a request: 12 messages, 3 of them new."""
    encoded = _bytes(args, load)
    if encoded is None:
        return f"{size(args.size)} of what is new" if args is not None and isinstance(args.size, int) else "a request"
    try:
        messages, new = told(encoded)
    except StoreCorrupt:
        return "a request that cannot be read"
    return plural(messages, "message") + ("" if new == messages else f", {new:,} of them new" if new else ", none of them new")


def answer_words(result: Payload | None, load: Load | None = None, width: int = 120) -> str:
    """The answer of a model: “the beginning of its text…” and wants refund(order="o-7"), lookup(…)."""
    answer = answer_in(result, load)
    return shown(result, width) if answer is None else said_words(answer, width)


def said_words(answer: Answer, width: int = 120) -> str:
    """The text of a decoded answer, and the tool uses that the answer wants."""
    wanted = ", ".join(use_words(use, width // 2) for use in answer.uses[:USES_NAMED])
    if len(answer.uses) > USES_NAMED:
        wanted += f" and {plural(len(answer.uses) - USES_NAMED, 'more call')}"
    said = f"“{clip(answer.text, width)}”" if answer.text else ""
    parts = [part for part in (said, f"wants {wanted}" if wanted else "") if part]
    return (" and ".join(parts) or "nothing") + _STOPS.get(answer.stop, "")


def use_words(use: ToolUse, width: int = 60) -> str:
    """A tool use as Python code."""
    if isinstance(use.arguments, str):
        return f"{use.name}({clip(use.arguments, width)})"
    return (
        f"{use.name}({clip(', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in use.arguments.items()), width)})"
    )


def answer_in(result: Payload | None, load: Load | None = None) -> Answer | None:
    """The recorded answer; None if the answer cannot be decoded, or if it is in the blob store and `load` is None."""
    encoded = _bytes(result, load)
    if encoded is None:
        return None
    # Imported here, so that a worker without models does not load this module.
    from perdure.models.messages import answer_of

    try:
        return answer_of(encoded)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None


def asked_words(call: CallState, load: Load | None = None, width: int = 80) -> str:
    """A call of a tool, such as refund(order="o-7"), or of a model, such as claude (12 messages, 3 of them new)."""
    if not is_request(call.args):
        return called(call.tool, call.args, width)
    return f"{call.tool} ({request_words(call.args, load)})"


def result_words(call: CallState, load: Load | None = None, width: int = 60) -> str:
    """The result of a call, or its last failure. Empty if there is no result and no failure yet."""
    if call.result is None:
        return failed(call.failure, width) if call.failure is None or call.failure.type != LOST else "the answer was lost with its worker"
    return answer_words(call.result, load, width) if is_request(call.args) else shown(call.result, width)


def _bytes(payload: Payload | None, load: Load | None) -> bytes | None:
    if payload is None:
        return None
    inline = payload.inline
    return inline if inline is not None or load is None else load(payload)


# -- Recorded plans: the name and the steps of a plan


STEPS_NAMED = 8


def plan_words(plan: Payload, load: Load | None = None) -> str:
    """A plan in one line: "the plan deploy: build, lb, dns (3 steps)"."""
    found = plain(plan, load)
    steps = found.get("steps") if isinstance(found, dict) else None
    if not isinstance(steps, list):
        return f"a plan: {shown(plan)}"
    names = [_name(step) for step in steps]
    more = ", …" if len(names) > STEPS_NAMED else ""
    called = f"the plan {clip(str(found['name']), 60)}" if found.get("name") else "a plan"
    return f"{called}: {', '.join(names[:STEPS_NAMED])}{more} ({plural(len(names), 'step')})"


def _name(step: Any) -> str:
    name = step.get("name") if isinstance(step, dict) else step
    return clip(str(name), 40)


# -- One sentence per event


UNTIL = {
    "approval": "until it is approved",
    "rate": "until its rate allows it",
    "budget": "until there is enough left in the budget",
    "handover": "until another worker has the run",
    "fork": "for ever: this is a rehearsal, and nothing is sent",
}
ApprovalSettled = ApprovalDecided | ApprovalEscalated | ApprovalExpired | ApprovalWithdrawn | ApprovalVoted


def sentence(event: Event, names: Mapping[int, str], began: Mapping[int, int] | None = None, load: Load | None = None) -> str:
    """One sentence that says what happened in this event.

    `names` has the tool, model, action or agent of each call so far. `began` has the time at which the last attempt of
    each call began. `load` reads payloads from the blob store; without `load` the sentence gives only their size.
    """
    batch = f" (in batch {batch})" if (batch := batch_of(event.body)) else ""
    if event.call is None:
        return _about_run(event, load) + batch
    call = f"call {event.call} {names.get(event.call, '?')}"
    match event.body:
        case ModelCallInitiated() | ModelCallCompleted() | ModelCallFailed():
            since = None if began is None else began.get(event.call)
            return _about_model(event.body, call, None if since is None else event.ts - since, load)
        case _:
            return _about_call(event, call, load) + batch


def _about_model(body: ModelCallInitiated | ModelCallCompleted | ModelCallFailed, call: str, took: int | None, load: Load | None) -> str:
    match body:
        case ModelCallInitiated(attempt=1):
            return f"{call} is asked" + (f" ({request_words(body.args, load)})" if body.args is not None else "")
        case ModelCallInitiated():
            return f"{call} is asked again (attempt {body.attempt})"
        case ModelCallCompleted(result=None):
            return f"{call} answered, but its answer could not be recorded: {failed(body.failure)}"
        case ModelCallCompleted():
            took_words = "" if took is None else f" in {_length(took)}"
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} answered{took_words}: {answer_words(body.result, load)}{cost}"
        case ModelCallFailed(final=True, attempt=0):
            return f"{call} was never asked: {failed(body.failure)}"
        case ModelCallFailed() if body.failure.type == LOST:
            counted = f"; it counts as what was reserved for it: {used(body.usage)}" if used(body.usage) else ", and its cost is unknown"
            return f"{call}: the answer to attempt {body.attempt} was lost with its worker{counted}"
        case ModelCallFailed():
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} gave no answer at attempt {body.attempt}{', for good' if body.final else ''}: {failed(body.failure)}{cost}"
        case _:
            assert_never(body)


def progress_words(progress: bytes, limit: int = 80) -> str:
    """What an attempt reported with `call.heartbeat`."""
    return f"progress {clip(progress.decode('utf-8', 'replace'), limit)}"


def _reached(progress: Payload | None) -> str:
    return "" if progress is None else f"; progress {shown(progress, 80)}"


def _length(us: int) -> str:
    return f"{us / 1e6:.1f} s" if 1_000_000 <= us < 60_000_000 else span(us)


def _about_call(event: Event, call: str, load: Load | None) -> str:
    body = event.body
    match body:
        case ToolCallProposed() if is_request(body.args):
            until = f", {iso(body.at)}" if body.at is not None else ""
            return f"{call} ({request_words(body.args, load)}) is to be asked, and waits {UNTIL[body.until]}{until}"
        case ToolCallProposed():
            until = f", {iso(body.at)}" if body.at is not None else ""
            return f"call {event.call}: {called(body.tool, body.args)} ({body.effect}) is wanted, and waits {UNTIL[body.until]}{until}"
        case ToolCallInitiated(attempt=1):
            return f"{_first_attempt(event, body, call)} is about to be performed"
        case ToolCallInitiated():
            return f"{call}: attempt {body.attempt} is about to be performed"
        case ToolCallCompleted(result=None):
            return f"{call} happened, but its result could not be recorded: {failed(body.failure)}{_reached(body.progress)}"
        case ToolCallCompleted():
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} returned {shown(body.result)}{cost}{_reached(body.progress)}"
        case ToolCallFailed(final=True, attempt=0):
            return f"{call} was never made: {failed(body.failure)}"
        case ToolCallFailed(final=True):
            return f"{call} failed for good at attempt {body.attempt}: {failed(body.failure)}{_reached(body.progress)}"
        case ToolCallFailed():
            return f"{call} failed at attempt {body.attempt}: {failed(body.failure)}{_reached(body.progress)}"
        case ToolCallInDoubt():
            return f"{call} is in doubt (attempt {body.attempt}): {body.why}{_reached(body.progress)}"
        case ToolCallResolved():
            return f"{call}: {_resolution(body)}"
        case RetryScheduled(reconcile=True):
            return f"{call}: whether it happened is asked again at {iso(body.at)}"
        case RetryScheduled():
            return f"{call}: attempt {body.attempt} follows at {iso(body.at)}"
        case ApprovalRequested():
            return _request(event, body)
        case ApprovalVoted() | ApprovalDecided() | ApprovalEscalated() | ApprovalExpired() | ApprovalWithdrawn():
            return f"{call}: approval {body.approval} {_settling(body)}"
        case CallHeld():
            return f"{call} is held: it does not begin before the agent has considered it again"
        case ChildStarted():
            return f"call {event.call}: run {body.run_id} of {called(versioned(body.agent, body.version), body.input)} begins as its child"
        case ChildFinished(status="succeeded"):
            return f"{call}: its child {body.run_id} succeeded with {shown(body.output)}"
        case ChildFinished():
            return f"{call}: its child {body.run_id} {'was ' if body.status == 'cancelled' else ''}{body.status}: {failed(body.failure)}"
        case CallAnswered():
            answer = f"gets {shown(body.result)}" if body.failure is None else f"fails: {failed(body.failure)}"
            return f"{call} {answer} ({SOURCES[body.source]}); no attempt was made"
        case CallRequestedAgain():
            return f"{call} is made again" + (": a new result is needed" if body.anew else ": it is the same call, with the same key")
        case OutcomeReused():
            return f"{call}: the outcome in event {body.of} is used again"
        case _:
            return f"{call}: {event.type}"


def _first_attempt(event: Event, body: ToolCallInitiated, call: str) -> str:
    # If the call was proposed first, the intent has no arguments: they are in the proposal. If a person edited the
    # arguments, the intent has the edited arguments.
    what = call if body.args is None else f"call {event.call}: {called(body.tool, body.args)}"
    approved = f", as approved ({body.approval})," if body.approval else ""
    return f"{what} ({body.effect}){approved}"


def _resolution(body: ToolCallResolved) -> str:
    told = {
        "happened": f"it happened, and {_result_of(body)}",
        "did_not_happen": f"it did not happen{' and never will' if body.final else ''}",
        "failed": "it counts as failed",
    }
    note = f" ({body.note})" if body.note else ""
    cost = f"; charged: {used(body.usage)}" if used(body.usage) else ""
    who = "its reconcile hook says" if body.by == "reconcile" else f"{body.by} says"
    return f"{who} that {told[body.outcome]}{note}{cost}"


def _result_of(body: ToolCallResolved) -> str:
    return f"returned {shown(body.result)}" if body.failure is None else f"its result could not be recorded: {failed(body.failure)}"


def _request(event: Event, body: ApprovalRequested) -> str:
    number = f", {body.quorum} of them must agree" if body.quorum > 1 else ""
    until = f", until {iso(body.expires_at)}" if body.expires_at is not None else ""
    reason = f", because “{clip(body.reason, 120)}”" if body.reason else ""
    return f"call {event.call}: approval {body.approval} is asked of {people(body.by)}{number}{until}: {called(body.action, body.input)}{reason}"


def _settling(body: ApprovalSettled) -> str:
    match body:
        case ApprovalVoted():
            return f"has {body.by}'s yes{_from(body.source)}, and needs more{_note(body.note)}"
        case ApprovalDecided():
            edited = f", edited to {shown(body.input)}" if body.input is not None else ""
            return f"was {'approved' if body.granted else 'rejected'} by {body.by}{_from(body.source)}{edited}{_note(body.note)}"
        case ApprovalEscalated():
            until = f", until {iso(body.expires_at)}" if body.expires_at is not None else ""
            return f"was not decided in time; it is asked of {people(body.to)} now{until}"
        case ApprovalExpired(lapsed=True):
            return "was given, and expired before the call could start"
        case ApprovalExpired():
            return "expired: no decision came in time"
        case ApprovalWithdrawn():
            return "was withdrawn: the answer is not needed any more"


def _from(source: str | None) -> str:
    return f" (from {clip(source, 60)})" if source else ""


def _note(note: str | None) -> str:
    return f": {clip(note, 120)}" if note else ""


def _about_run(event: Event, load: Load | None) -> str:
    body = event.body
    match body:
        case RunCreated():
            return _creation(body)
        case RunClaimed(takeover=True):
            why = "which is gone (the kernel says so)" if body.proven_dead else "which gave no sign of life"
            others = f"; {plural(body.lost_with, 'other run')} of that worker may be to blame" if body.lost_with else ""
            return f"worker {body.name or body.worker} took the run over from the worker before, {why}{others}"
        case RunClaimed():
            return f"worker {body.name or body.worker} took the run" + (
                f", which has its version from now on: {body.version}" if body.version else ""
            )
        case RunReleased():
            until = f" until {iso(body.wake_at)}" if body.wake_at is not None else ""
            return f"the worker released the run as {body.status}: {body.waiting_for}{until}"
        case TimerSet():
            return f"timer {body.timer} set for {iso(body.due)}"
        case TimerFired():
            return f"timer {body.timer} fired"
        case ThoughtRecorded():
            return f"the agent noted: {clip(body.text, 160)}"
        case PlanGenerated():
            by = f", which {body.by} has written" if body.by else ""
            return f"the run follows {plan_words(body.plan, load)}{by}"
        case DecisionMade():
            among = f" among {shown(body.among)}" if body.among is not None else ""
            reason = f", because {clip(body.reason, 120)}" if body.reason else ""
            return f"the agent decided {shown(body.choice)}{among}{reason}"
        case CallKept():
            return f"the agent keeps call {body.number}: it begins as soon as it is approved"
        case StatusReported():
            return f"the agent reported: {clip(body.text, 160)}"
        case LabelsChanged():
            return f"the agent set {labels_words(body.labels)}"
        case PatchMarked():
            return f"the run takes the new side of the change {body.name!r}"
        case PinChanged():
            return f"{body.what} has changed since the run first used it (it was {body.before}, and is {body.after} now)"
        case BudgetExceeded():
            return over_budget(body)
        case AttentionNeeded():
            return f"the run needs attention ({body.reason}): {clip(body.detail, 240)}"
        case RunSucceeded():
            return f"the run succeeded with {shown(body.output)}"
        case RunFailed():
            return f"the run failed: {failed(body.failure)}"
        case RunCancelled(forced_by=None):
            return f"the run was cancelled{_note(body.reason)}"
        case RunCancelled():
            return f"{body.forced_by} ended the run without its agent, and what was open stays so{_unsettled(body)}{_note(body.reason)}"
        case BudgetDeclared():
            return f"the agent's code declares a budget of {limits_words(body.limits)}, which applies from now on"
        case (
            CancelRequested()
            | RunPaused()
            | RunUnpaused()
            | RunRequeued()
            | RunAdopted()
            | FrameChanged()
            | BudgetRaised()
            | SignalReceived()
        ):
            return _said(body)
        case RunRestored():
            return f"{body.by} restored the run: it is as in the backup of {iso(body.taken_at)}, and what happened since is unknown"
        case RunReopened():
            fresh = ", and `read` calls and requests to models are made again" if body.fresh else ""
            return f"{body.by} let the run go on from event {body.back_to}: all events since are superseded{fresh}{_note(body.reason)}"
        case RunForked():
            edits = f", with another result of call {', '.join(map(str, body.edits))}" if body.edits else ""
            edits += ", with another input" if body.input else ""
            edits += f", with the model {body.model}" if body.model else ""
            return (
                f"{body.by} forked run {body.parent} at event {body.at}{edits}: the events up to here are copies, and what they say "
                f"was done by {body.parent}{_note(body.reason)}"
            )
        case OutcomeReused():
            return f"the outcome in event {body.of} is used again"
        case CheckpointTaken():
            return f"the agent took a checkpoint with {shown(body.state)}, and began again from there"
        case (
            ToolCallProposed()
            | ToolCallInitiated()
            | ToolCallCompleted()
            | ToolCallFailed()
            | ToolCallInDoubt()
            | ToolCallResolved()
            | RetryScheduled()
            | ApprovalRequested()
            | ApprovalVoted()
            | ApprovalDecided()
            | ApprovalEscalated()
            | ApprovalExpired()
            | ApprovalWithdrawn()
            | CallHeld()
            | ChildStarted()
            | ChildFinished()
            | CallRequestedAgain()
            | CallAnswered()
        ):
            return f"{event.type} without a call"
        case _:
            assert_never(body)


def labels_words(labels: Mapping[str, str | None]) -> str:
    """Labels in words: customer=c-7, order=o-1, without tier."""
    return ", ".join(f"without {key}" if value is None else f"{key}={value}" for key, value in labels.items())


def _unsettled(body: RunCancelled) -> str:
    """The cost that is charged for calls that may have happened."""
    costs = [f"call {one.call} with {used(one.usage)}" for one in body.unsettled if used(one.usage)]
    return f", and is charged: {', '.join(costs)}" if costs else ""


def _creation(body: RunCreated) -> str:
    by = f" for {body.actor}" if body.actor else ""
    child = f" as child of run {body.parent} (its call {body.parent_call})" if body.parent else ""
    queue = f", queue {body.queue}" if body.queue != "default" else ""
    later = f", not before {iso(body.not_before)}" if body.not_before is not None else ""
    limits = f", with a budget of {limits_words(body.budget)}" if body.budget is not None else ""
    labels = f", labels {labels_words(body.labels)}" if body.labels else ""
    where = f"(tenant {body.tenant}{queue}{labels}{later}{limits})"
    return f"run of {versioned(body.agent, body.version)} created{by}{child} {where} with input {shown(body.input)}"


def _said(body: CancelRequested | RunPaused | RunUnpaused | RunRequeued | RunAdopted | FrameChanged | BudgetRaised | SignalReceived) -> str:
    """A sentence about a message that was posted to the run from outside."""
    match body:
        case CancelRequested():
            return f"{body.by} asked to cancel the run{_note(body.reason)}"
        case RunPaused():
            return f"{body.by} paused the run{_note(body.reason)}"
        case RunUnpaused(early=True):
            return f"{body.by} begins the run before its time{_note(body.note)}"
        case RunUnpaused():
            return f"{body.by} let the run go on{_note(body.note)}"
        case RunRequeued():
            return f"{body.by} sent the run back to work{_note(body.note)}"
        case RunAdopted():
            return f"{body.by} lets version {body.version} of the agent go on with the run{_note(body.note)}"
        case FrameChanged():
            return f"{body.by} lets version {body.version} of the agent go on with the run, from its next turn or step on{_note(body.note)}"
        case BudgetRaised():
            return f"{body.by} added {limits_words(body.added)} to the run's budget{_note(body.note)}"
        case SignalReceived():
            key = f" (key {body.key})" if body.key else ""
            return f"{body.by} sent a signal on {body.topic!r}{key}: {shown(body.payload)}"


def versioned(agent: str, version: str) -> str:
    """The agent with its version; the agent alone while no worker has begun the run, which has no version then."""
    return f"{agent}@{version}" if version else agent


def over_budget(body: BudgetExceeded) -> str:
    """Whose budget it is, how much of the budget is used, and how much more a call wanted."""
    used_up, limit = amount(body.what, body.used), amount(body.what, body.limit)
    wanted = f", and {amount(body.what, body.wanted)} more wanted" if body.wanted else ""
    return f"the budget of run {body.budget_of} is used up: {used_up} of {limit} used or reserved{wanted}"


def limits_words(limits: Limits) -> str:
    """The limits of a budget that are set, such as "$2.00, 100 calls"."""
    parts = [
        None if limits.usd_micros is None else money(limits.usd_micros),
        None if limits.tokens is None else amount("tokens", limits.tokens),
        None if limits.calls is None else amount("calls", limits.calls),
        None if limits.busy_us is None else amount("seconds", limits.busy_us),
    ]
    return ", ".join(part for part in parts if part is not None) or "nothing"


def checkpoint_words(state: RunState) -> str | None:
    """How many checkpoints the run has taken; None if it has taken none."""
    if not state.checkpoints:
        return None
    return f"{plural(state.checkpoints, 'checkpoint')}, the last at event {state.checkpoint}"
