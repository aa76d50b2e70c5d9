"""The difference between two runs, or between a run and its fork: calls, arguments, results, outcome and cost.

The calls of both sides are the same up to some call. The later calls are aligned: a call of one side stands beside the
call of the other side with the same tool and arguments, if there is such a call. Superseded events of a reopened run
are left out, because its agent does not know them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

from msgspec import Struct, structs, to_builtins

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalRequested,
    CallRequestedAgain,
    ChildStarted,
    Event,
    Failure,
    OutcomeReused,
    ToolCallInitiated,
    ToolCallProposed,
    Usage,
)
from perdure.core.history import ends_wait, history, is_stated
from perdure.core.invisible import escaped
from perdure.core.machine import ApprovalSettled, CallCompleted, CallFailed, ChildEnded, Completion
from perdure.core.prompt_deltas import digest_in, in_short, is_request
from perdure.core.replay import completion_of
from perdure.core.state import RunState, fold
from perdure.inspect.text import clip, plural, used

Kind = Literal["tool", "model", "approval", "child"]
_WIDTH = 200
_PAGE_CHARS = 20_000  # a longer value is cut on the page
_MOST_PAIRS = 4_000_000  # the most comparisons of two lists of calls; longer lists are not aligned


class DiffCall(Struct, frozen=True, omit_defaults=True):
    """One call on one side of a diff."""

    call: int  # the number of the call
    kind: Kind
    name: str  # the name of the tool, model or agent, or the action of an approval
    args: Any  # the arguments; for a model, the request in short
    result: Any = None
    error: str | None = None
    answered: bool = False  # False: the call has no result and no error (yet)
    source: str | None = None  # only in a fork: where the answer came from, such as "recorded" or "simulated"
    digest: str = ""  # the digest of the arguments; for a model, the digest of the whole request
    effect: str | None = None  # only in a fork, for a tool: its effect class


class EncodedCall(Struct, frozen=True):
    """A call as it was recorded. `Calls` makes a DiffCall of it."""

    number: int
    kind: Kind
    name: str
    args: bytes
    answer: Completion | None = None
    source: str | None = None
    effect: str | None = None


class Calls(Sequence[DiffCall]):
    """The calls of a path. A call is decoded when it is read: most calls of a long run are never looked at."""

    def __init__(self, encoded: Sequence[EncodedCall]) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    @overload
    def __getitem__(self, place: int) -> DiffCall: ...

    @overload
    def __getitem__(self, place: slice) -> list[DiffCall]: ...

    def __getitem__(self, place: int | slice) -> DiffCall | list[DiffCall]:
        found = self.encoded[place]
        return _decoded(found) if isinstance(found, EncodedCall) else [_decoded(one) for one in found]


class CallPath(Struct, frozen=True):
    """The calls that an agent has made, and how its run ended."""

    name: str  # "run order-7", or "fork of run order-7 at event 12"
    calls: Sequence[DiffCall]
    status: str  # the status of the run; a fork may also be "stopped" (at a call without an answer), "waiting" or "checkpoint"
    used: Usage
    output: Any = None
    error: str | None = None


class DiffLine(Struct, frozen=True):
    """One call of each side. `differs` names the parts that differ; it is empty if the calls are the same."""

    left: DiffCall | None
    right: DiffCall | None
    differs: tuple[str, ...] = ()


class Diff(Struct, frozen=True):
    """Two paths, aligned. The first `same` calls are the same on both sides; `lines` has the calls after them."""

    left: CallPath
    right: CallPath
    same: int
    lines: list[DiffLine]
    same_outcome: bool

    @property
    def is_same(self) -> bool:
        return not self.lines and self.same_outcome


# -- paths ------------------------------------------------------------------------------------------------------------
def path_of(name: str, events: Sequence[Event], load: Callable[[Payload], bytes], state: RunState | None = None) -> CallPath:
    """The path of a recorded run. `state`: the fold of its events, if the caller has it."""
    state = state or fold(events)
    error = None if state.failure is None else _failed(state.failure)
    output = None if state.output is None else codec.decode(load(state.output))
    return CallPath(name, calls_of(events, load), state.status, state.used, output, error)


def calls_of(events: Sequence[Event], load: Callable[[Payload], bytes]) -> Calls:
    """The calls, approvals and children that the agent knows, in the order of their numbers."""
    past = history(events)
    requests: dict[int, Event] = {}
    tools: set[int] = set()
    for event in events:
        number = event.call
        if number is not None and is_stated(event) and type(event.body) is not CallRequestedAgain:
            requests[number] = event
            if isinstance(event.body, (ToolCallInitiated, ToolCallProposed)):
                tools.add(number)
    asked: set[int] = set()
    answers: dict[int, Completion] = {}
    for event in past.whole:
        number = event.call
        if number not in requests:
            continue
        if is_stated(event):
            asked.add(number)
        source = past.sources[event.body.of] if type(event.body) is OutcomeReused else event
        if ends_wait(source, of_tool=number in tools) and (completion := completion_of(source, load)) is not None:
            answers[number] = completion
    return Calls([EncodedCall(number, *_requested(requests[number], load), answers.get(number)) for number in sorted(asked)])


def call_of(number: int, kind: Kind, name: str, args: bytes) -> DiffCall:
    """A call that is not answered yet."""
    return _decoded(EncodedCall(number, kind, name, args))


def _decoded(call: EncodedCall) -> DiffCall:
    number, kind, name, args = call.number, call.kind, call.name, call.args
    if kind == "model":
        found = DiffCall(number, kind, name, in_short(args) or "", digest=digest_in(args), effect=call.effect)
    else:
        found = DiffCall(number, kind, name, codec.decode(args), digest=codec.digest(args), effect=call.effect)
    source = call.source
    match call.answer:
        case CallCompleted(_, result):
            return structs.replace(found, result=_result(found, result), answered=True, source=source)
        case CallFailed(_, failure, _):
            return structs.replace(found, error=_failed(failure), answered=True, source=source)
        case ApprovalSettled() as settled:
            return structs.replace(found, result=_decision(settled), answered=True, source=source)
        case ChildEnded(_, _, result, failure):
            if result is not None:
                return structs.replace(found, result=codec.decode(result), answered=True, source=source)
            return structs.replace(found, error=None if failure is None else _failed(failure), answered=True, source=source)
        case _:
            return found


def _requested(event: Event, load: Callable[[Payload], bytes]) -> tuple[Kind, str, bytes]:
    """(kind, name, arguments)"""
    body = event.body
    match body:
        case ToolCallInitiated(args=Payload() as args) | ToolCallProposed(args=args):
            return "model" if is_request(args) else "tool", body.tool, load(args)
        case ApprovalRequested():
            return "approval", body.action, load(body.input)
        case ChildStarted():
            return "child", body.agent, load(body.input)
        case _:
            raise AssertionError(body)


def _result(call: DiffCall, result: bytes) -> Any:
    value = codec.decode(result)
    if call.kind == "model" and isinstance(value, dict):
        # Leave out the id of the request and the number of its tokens: they are different each time.
        return {name: part for name, part in value.items() if name in ("text", "uses", "stop")}
    return value


def _decision(settled: ApprovalSettled) -> dict[str, Any]:
    edited = {} if settled.input is None else {"input": codec.decode(settled.input)}
    return {"outcome": settled.outcome, "by": settled.by, "note": settled.note, **edited}


def _failed(failure: Failure) -> str:
    return f"{failure.type}: {failure.message}" if failure.message else failure.type


def spent(state: RunState, numbers: Sequence[int]) -> Usage:
    """What these calls of a recorded run have used together."""
    each = [state.calls[number].used for number in numbers if number in state.calls]
    return Usage(
        sum(one.usd_micros for one in each),
        sum(one.tokens_in for one in each),
        sum(one.tokens_out for one in each),
        sum(one.tokens_cached for one in each),
    )


# -- the difference ---------------------------------------------------------------------------------------------------
def diff_of(left: CallPath, right: CallPath) -> Diff:
    """Compare two paths."""
    same, most = 0, min(len(left.calls), len(right.calls))
    if isinstance(left.calls, Calls) and isinstance(right.calls, Calls):
        # What is the same byte by byte need not be decoded.
        pairs = zip(left.calls.encoded, right.calls.encoded, strict=False)
        same = next((place for place, (one, other) in enumerate(pairs) if not _same_bytes(one, other)), most)
    while same < most and not _differs(left.calls[same], right.calls[same]):
        same += 1
    lines = [_line(one, other) for one, other in _aligned(left.calls[same:], right.calls[same:])]
    return Diff(left, right, same, lines, _equal((left.status, left.output, left.error), (right.status, right.output, right.error)))


def same_effects(left: CallPath, right: CallPath) -> bool:
    """Do both sides make the same calls of tools, children and approvals, in the same order? Models do not count."""
    return [_key(call) for call in left.calls if call.kind != "model"] == [_key(call) for call in right.calls if call.kind != "model"]


def _key(call: DiffCall) -> tuple[str, str, str]:
    return call.kind, call.name, call.digest


def _aligned(left: Sequence[DiffCall], right: Sequence[DiffCall]) -> Iterator[tuple[DiffCall | None, DiffCall | None]]:
    """Pairs of calls: equal calls beside each other, then calls of the same tool in the same order."""
    if len(left) * len(right) > _MOST_PAIRS:
        yield from _paired(left, right)
        return
    from difflib import SequenceMatcher  # imported late: only a diff needs it

    matcher = SequenceMatcher(None, [_key(call) for call in left], [_key(call) for call in right], autojunk=False)
    for tag, begin, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(left[begin:end], right[first:last], strict=True)
        else:
            yield from _paired(left[begin:end], right[first:last])


def _paired(left: Sequence[DiffCall], right: Sequence[DiffCall]) -> Iterator[tuple[DiffCall | None, DiffCall | None]]:
    rest = list(right)
    for one in left:
        place = next((at for at, other in enumerate(rest) if (one.kind, one.name) == (other.kind, other.name)), None)
        if place is None:
            place = next((at for at, other in enumerate(rest) if one.kind == other.kind == "model"), None)
        if place is None:
            yield one, None
            continue
        yield from ((None, other) for other in rest[:place])
        yield one, rest[place]
        del rest[: place + 1]
    yield from ((None, other) for other in rest)


def _line(left: DiffCall | None, right: DiffCall | None) -> DiffLine:
    if left is None or right is None:
        return DiffLine(left, right, ("call",))
    return DiffLine(left, right, _differs(left, right))


def _same_bytes(left: EncodedCall, right: EncodedCall) -> bool:
    if left is right:  # a fork keeps the calls of the run up to its point
        return True
    return left.args == right.args and left.answer == right.answer and (left.kind, left.name) == (right.kind, right.name)


def _differs(left: DiffCall, right: DiffCall) -> tuple[str, ...]:
    name = ("call",) if (left.kind, left.name) != (right.kind, right.name) else ()
    args = ("arguments",) if left.digest != right.digest else ()
    same = _equal((left.answered, left.result, left.error), (right.answered, right.result, right.error))
    return (*name, *args, *(() if same else ("result",)))


def diff_record(diff: Diff) -> dict[str, Any]:
    """The diff for programs. The calls at the beginning that are the same on both sides are only counted."""
    ends = {
        side: {"name": path.name, "status": path.status, "output": path.output, "error": path.error, "cost": structs.asdict(path.used)}
        for side, path in (("left", diff.left), ("right", diff.right))
    }
    lines = to_builtins(diff.lines)
    return {"is_same": diff.is_same, "same_calls": diff.same, "lines": lines, "same_outcome": diff.same_outcome, **ends}


def _equal(left: Any, right: Any) -> bool:
    return codec.encode(left) == codec.encode(right)  # in Python, True equals 1; in JSON, it does not


# -- for people -------------------------------------------------------------------------------------------------------
def call_words(call: DiffCall, width: int = _WIDTH) -> str:
    """A call as code: refund(order="o-7", cents=500)."""
    kind = "" if call.kind == "tool" else f"{call.kind} "
    if call.kind != "model" and isinstance(call.args, dict):
        given = ", ".join(f"{name}={_json(value)}" for name, value in call.args.items())
    else:
        given = call.args if isinstance(call.args, str) else _json(call.args)
    return f"{kind}{call.name}({clip(given, width)})"


def answer_words(call: DiffCall, width: int = _WIDTH) -> str:
    """The result or the error of a call, in words."""
    said = "no answer" if not call.answered else f"failed: {call.error}" if call.error is not None else _json(call.result)
    source = "now" if call.source == "read" else call.source
    return clip(said, width) + (f" ({source})" if source not in (None, "recorded") else "")


def end_words(path: CallPath, width: int = _WIDTH) -> str:
    """How a path ended."""
    if path.status == "succeeded":
        return f"succeeded with {clip(_json(path.output), width)}"
    if path.status == "checkpoint":
        return "takes a checkpoint, where a rehearsal ends"
    return clip(path.status.replace("_", " ") + (f": {path.error}" if path.error else ""), width)


def diff_lines(diff: Diff, width: int = _WIDTH) -> Iterator[str]:
    """The diff as text. Lines with `-` belong to the left side, lines with `+` to the right side."""
    yield f"- {diff.left.name}"
    yield f"+ {diff.right.name}"
    yield f"  {plural(diff.same, 'call')} the same" + ("" if diff.lines else ", and no other calls")
    for line in diff.lines:
        one, other = line.left, line.right
        if not line.differs and one is not None:
            yield f"  {one.call}: {call_words(one, width)} → {answer_words(one, width)}"
            continue
        if one is not None:
            yield f"- {one.call}: {call_words(one, width)} → {answer_words(one, width)}"
        if other is not None:
            request = " [another request]" if other.kind == "model" and "arguments" in line.differs else ""
            yield f"+ {other.call}: {call_words(other, width)}{request} → {answer_words(other, width)}"
    if diff.same_outcome:
        yield f"  {end_words(diff.left, width)}"
    else:
        yield f"- {end_words(diff.left, width)}"
        yield f"+ {end_words(diff.right, width)}"
    before, now = used(diff.left.used) or "nothing", used(diff.right.used) or "nothing"
    yield from (f"  cost: {before}",) if before == now else (f"- cost: {before}", f"+ cost: {now}")


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%;table-layout:fixed}
td,th{border:1px solid #d0d7de;padding:.4rem .6rem;vertical-align:top;text-align:left}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.4 ui-monospace,monospace}
.differs .l{background:#ffebe9}.differs .r{background:#dafbe1}.about{color:#57606a}
@media (prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}
.differs .l{background:#3d1d20}.differs .r{background:#12361f}.about{color:#8b949e}}
"""


def diff_page(diff: Diff) -> str:
    """The diff as one HTML page. It has no scripts and loads nothing. All recorded text is escaped."""
    rows = "".join(_row(line) for line in diff.lines)
    outcome = _cells(not diff.same_outcome, end_words(diff.left, _PAGE_CHARS), end_words(diff.right, _PAGE_CHARS))
    before, now = used(diff.left.used) or "nothing", used(diff.right.used) or "nothing"
    title = _escape(f"{diff.left.name} – {diff.right.name}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head><body>\n'
        f"<h1>{title}</h1>\n<p>{plural(diff.same, 'call')} the same, then:</p>\n"
        f"<table><thead><tr><th>{_escape(diff.left.name)}</th><th>{_escape(diff.right.name)}</th></tr></thead><tbody>\n"
        f"{rows}{outcome}{_cells(before != now, f'cost: {before}', f'cost: {now}')}</tbody></table>\n</body></html>\n"
    )


def _row(line: DiffLine) -> str:
    left, right = ("" if call is None else _block(call) for call in (line.left, line.right))
    return _cells(bool(line.differs), left, right)


def _block(call: DiffCall) -> str:
    return f"{call.call}: {call_words(call, _PAGE_CHARS)}\n→ {answer_words(call, _PAGE_CHARS)}"


def _cells(differs: bool, left: str, right: str) -> str:
    mark = ' class="differs"' if differs else ""
    return f'<tr{mark}><td class="l"><pre>{_escape(left)}</pre></td><td class="r"><pre>{_escape(right)}</pre></td></tr>\n'


def _escape(text: str) -> str:
    return html.escape(escaped(text, keep="\n"), quote=True)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
