"""How recorded things are said in words: times, spans, payloads, calls, and a sentence for every event.

Text that comes out of a journal stays as it was recorded; whoever prints it makes it safe for a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

from perdure.core.codec import Payload
from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    DecisionMade,
    Event,
    Failure,
    RetryScheduled,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunReleased,
    RunRequeued,
    RunSucceeded,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SPANS = ((86_400, "day", "days"), (3_600, "h", "h"), (60, "min", "min"), (1, "s", "s"))

# What a doubt about a call means, and what it does not, by effect class.
EFFECTS = {
    "read": "changes nothing, so it is simply asked again",
    "idempotent": "repeating it ends in the same state, so it is simply run again",
    "keyed": "the service drops a second request with the same key, so it is safe to repeat only while the service still knows the key",
    "transaction": "its effect and its result are one commit, so without a result it did not happen",
    "once": "it must not happen twice, so perdure never repeats it by itself",
}


def iso(ts: int) -> str:
    """The time as ISO 8601 in UTC, to the microsecond, for machines."""
    try:
        return (_EPOCH + timedelta(microseconds=ts)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{ts} µs"


def clock(ts: int, now: int) -> str:
    """The time for people: without the date when it is today's."""
    try:
        then = _EPOCH + timedelta(microseconds=ts)
        same_day = then.date() == (_EPOCH + timedelta(microseconds=now)).date()
    except OverflowError:
        return f"{ts} µs"
    return then.strftime("%H:%M:%S UTC" if same_day else "%Y-%m-%d %H:%M:%S UTC")


def moment(text: str, now: int) -> str:
    """A time that iso() wrote, for people."""
    try:
        return clock((datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1), now)
    except ValueError:
        return text  # beyond the year 9999


def seconds(us: int) -> float:
    """A length of time for machines."""
    return round(us / 1e6, 3)


def span(us: int) -> str:
    """A length of time, to the precision that a person needs: 8 min, 3 s, 2.5 h."""
    length = max(us, 0) / 1e6
    for unit, one, many in _SPANS:
        if length >= unit:
            count = length / unit
            shown = f"{count:.1f}".removesuffix(".0") if unit > 60 and count < 10 else f"{count:.0f}"
            return f"{shown} {one if shown == '1' else many}"
    return "moments" if length < 0.001 else f"{length * 1000:.0f} ms"


def at(ts: int, now: int) -> str:
    """A moment, and how far away it is."""
    return f"{clock(ts, now)} ({f'in {span(ts - now)}' if ts > now else f'due for {span(now - ts)}'})"


def clip(text: str, width: int) -> str:
    """The text on one line, cut to the width with an ellipsis."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def shown(payload: Payload | None, width: int = 80) -> str:
    """The payload as JSON, short; one that lies in the blob store by its preview and size."""
    if payload is None:
        return ""
    inline = payload.inline
    if inline is None:
        length = payload.size if isinstance(payload.size, int) else 0
        return clip(f"{payload.preview}", width) + f" ({size(length)})"
    return clip(inline.decode("utf-8", "replace"), width)


def called(tool: str, args: Payload | None, width: int = 80) -> str:
    """A call as one would write it: refund(order="o-7", cents=500)."""
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
    """Where it was raised, as recorded: `file:line in function`, the innermost last."""
    return failure.traceback.splitlines() if failure is not None and failure.traceback else []


def plural(count: int, one: str, many: str = "") -> str:
    """1 call, 2 calls."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sentence(event: Event, tools: Mapping[int, str]) -> str:
    """What this event says happened. `tools` names the tool of each call so far."""
    if event.call is not None:
        return _about_call(event, f"call {event.call} {tools.get(event.call, '?')}")
    return _about_run(event)


def _about_call(event: Event, call: str) -> str:
    body = event.body
    match body:
        case ToolCallInitiated(attempt=1):
            return f"call {event.call}: {called(body.tool, body.args)} ({body.effect}) is about to be performed"
        case ToolCallInitiated():
            return f"{call}: attempt {body.attempt} is about to be performed"
        case ToolCallCompleted(result=None):
            return f"{call} happened, but its result could not be recorded: {failed(body.failure)}"
        case ToolCallCompleted():
            return f"{call} returned {shown(body.result)}"
        case ToolCallFailed(final=True):
            return f"{call} failed for good at attempt {body.attempt}: {failed(body.failure)}"
        case ToolCallFailed():
            return f"{call} failed at attempt {body.attempt}: {failed(body.failure)}"
        case ToolCallInDoubt():
            return f"{call} is in doubt (attempt {body.attempt}): {body.why}"
        case ToolCallResolved():
            return f"{call}: {_resolution(body)}"
        case RetryScheduled(reconcile=True):
            return f"{call}: whether it happened is asked again at {iso(body.at)}"
        case RetryScheduled():
            return f"{call}: attempt {body.attempt} follows at {iso(body.at)}"
        case _:
            return f"{call}: {event.type}"


def _resolution(body: ToolCallResolved) -> str:
    told = {
        "happened": f"it happened, and returned {shown(body.result)}",
        "did_not_happen": "it did not happen",
        "failed": "it counts as failed",
    }
    note = f" ({body.note})" if body.note else ""
    who = "its reconcile hook says" if body.by == "reconcile" else f"{body.by} says"
    return f"{who} that {told[body.outcome]}{note}"


def _about_run(event: Event) -> str:
    body = event.body
    match body:
        case RunCreated():
            by = f" for {body.actor}" if body.actor else ""
            return f"run of {body.agent}@{body.version} created{by} (tenant {body.tenant}) with input {shown(body.input)}"
        case RunClaimed(takeover=True):
            why = "which is gone (the kernel says so)" if body.proven_dead else "which gave no sign of life"
            return f"worker {body.name or body.worker} took the run over from the worker before, {why}"
        case RunClaimed():
            return f"worker {body.name or body.worker} took the run"
        case RunReleased():
            until = f" until {iso(body.wake_at)}" if body.wake_at is not None else ""
            return f"the worker gave the run up as {body.status}: {body.waiting_for}{until}"
        case TimerSet():
            return f"timer {body.timer} set for {iso(body.due)}"
        case TimerFired():
            return f"timer {body.timer} fired"
        case ThoughtRecorded():
            return f"the agent noted: {clip(body.text, 160)}"
        case DecisionMade():
            among = f" among {shown(body.among)}" if body.among is not None else ""
            reason = f", because {clip(body.reason, 120)}" if body.reason else ""
            return f"the agent decided {shown(body.choice)}{among}{reason}"
        case StatusReported():
            return f"the agent reported: {clip(body.text, 160)}"
        case CancelRequested():
            return f"{body.by} asked to cancel the run" + (f": {clip(body.reason, 120)}" if body.reason else "")
        case AttentionNeeded():
            return f"the run needs attention ({body.reason}): {clip(body.detail, 240)}"
        case RunRequeued():
            return f"{body.by} sent the run back to work" + (f": {clip(body.note, 120)}" if body.note else "")
        case RunSucceeded():
            return f"the run succeeded with {shown(body.output)}"
        case RunFailed():
            return f"the run failed: {failed(body.failure)}"
        case RunCancelled():
            return "the run was cancelled" + (f": {clip(body.reason, 120)}" if body.reason else "")
        case ToolCallInitiated() | ToolCallCompleted() | ToolCallFailed() | ToolCallInDoubt() | ToolCallResolved() | RetryScheduled():
            return f"{event.type} without a call"
        case _:
            assert_never(body)


def plain(payload: Payload | None, load: Any = None) -> Any:
    """The payload as a JSON value; one in the blob store as {"blob", "size", "preview"} unless it can be loaded."""
    if payload is None:
        return None
    inline = payload.inline
    if inline is None and load is not None:
        inline = load(payload)
    if inline is None:
        return {"blob": payload.blob, "size": payload.size, "preview": payload.preview}
    return json.loads(inline)
