"""How recorded things are said in words: times, spans, payloads, calls, amounts.

Text that comes out of a journal stays as it was recorded; whoever prints it makes it safe for a terminal.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.core.codec import Payload
from perdure.core.events import Failure, Usage
from perdure.store.api import Tombstone

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OURS = re.compile(r"-packages/perdure/|/python3[.0-9]*t?/asyncio/")  # wherever the run was driven
_OUR_FOLDER = __file__.removesuffix("inspect/words.py")
_SPANS = ((86_400, "day", "days"), (3_600, "h", "h"), (60, "min", "min"), (1, "s", "s"))

# What a doubt about a call means, and what it does not, by effect class.
EFFECTS = {
    "read": "changes nothing, so it is simply asked again",
    "idempotent": "repeating it ends in the same state, so it is simply run again",
    "keyed": "the service drops a second request with the same key, so it is safe to repeat only while the service still knows the key",
    "transaction": "its effect and its result are one commit, so without a result it did not happen",
    "once": "it must not happen twice, so it is repeated only after its hook or a person has said that it did not happen",
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
    """Where it was raised: `file:line in function`, the innermost last; without the frames of perdure and of asyncio, which tell nobody anything."""
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
    """So much of what a budget limits: "usd", "tokens", "calls" or "seconds"."""
    match what:
        case "usd":
            return money(number)
        case "seconds":
            return f"{number / 1e6:,.3f}".rstrip("0").rstrip(".") + " s"
        case _:
            return plural(number, what.removesuffix("s"))


def used(usage: Usage | None) -> str:
    """What something has cost: tokens and money; empty when nothing."""
    if usage is None:
        return ""
    tokens = usage.tokens_in + usage.tokens_out
    cached = f" ({usage.tokens_cached:,} cached)" if usage.tokens_cached else ""
    parts = [f"{usage.tokens_in:,} tokens in{cached}, {usage.tokens_out:,} out"] if tokens else []
    if usage.usd_micros:
        parts.append(money(usage.usd_micros))
    return ", ".join(parts)


def people(who: tuple[str, ...]) -> str:
    """Those who may decide."""
    return " or ".join(who) or "anybody"


def place_words(queue: str, priority: int) -> str:
    """Where a run stands in line, unless that is where all do."""
    return (f", queue {queue}" if queue != "default" else "") + (f", priority {priority}" if priority else "")


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


def pruned_words(tombstone: Tombstone) -> str:
    """What became of a run that is not there any more."""
    return (
        f"run {tombstone.run_id} ({tombstone.agent}, tenant {tombstone.tenant}) {tombstone.status} at {iso(tombstone.finished_at)} and was pruned "
        f"at {iso(tombstone.pruned_at)} by {tombstone.by}; its journal had {plural(tombstone.events, 'event')}, head {tombstone.head.hex()}"
    )
