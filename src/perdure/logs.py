"""Logs of agents and tools: which run a record belongs to, no record twice because of a replay, and JSON lines.

    handler.addFilter(RunFilter())            # record.run, .call, .attempt, .agent, .tenant, .trace_id and .span_id
    handler.setFormatter(JsonFormatter())     # one JSON object for each line

`perdure worker --log-format json` does both. Nothing is set while a run is driven: the filter finds out where a record
comes from. The code of an agent runs on the loop of its machine, and the code of a tool in a context that has its call.
"""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from typing import Any

from perdure.core import codec
from perdure.core.agent_loop import AgentLoop
from perdure.core.compat import running_loop
from perdure.core.invisible import escaped
from perdure.core.redaction import Scrubber
from perdure.errors import NotEncodable
from perdure.tool.artifact import in_call
from perdure.tool.call import Call

FIELDS = ("run", "call", "attempt", "agent", "tenant", "trace_id", "span_id")
_OF_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"taskName"}
_STANDARD = _OF_RECORD | {"message", "asctime", *FIELDS}


class RunFilter(logging.Filter):
    """Adds to each record what it belongs to: `run`, `call`, `attempt`, `agent` and `tenant`; None if it is not known.

    With telemetry, or if the run was started inside a trace, also `trace_id` and `span_id`.
    It removes the secrets of the call from the record.

    It drops the records of an agent that only repeats its recorded steps: such a record was logged before. After a
    crash the records of the last step may come again. Add it to a handler, not to a logger: the filter of a logger does
    not see the records of the loggers below it. With a QueueHandler, add it to the QueueHandler itself, which runs where
    the record comes from.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to the record. False: the record comes from a replay."""
        loop = running_loop()
        known: tuple[Any, ...] = (None,) * len(FIELDS)
        if type(loop) is AgentLoop:
            machine = loop.owner
            if machine is not None:
                if not machine.is_live:
                    return False
                facts = machine.facts
                known = (facts.run_id, None, None, facts.agent, facts.tenant, machine.trace_id, None)
        elif isinstance(call := in_call.get(), Call) and call.run_id:
            span = call.span
            of_span = (None, None) if span is None else (span.trace_id, span.span_id)
            known = (call.run_id, call.number, call.attempt, call.agent, call.tenant, *of_span)
            if call.scrubber is not None:
                _scrub(record, call.scrubber)
        for name, value in zip(FIELDS, known, strict=True):
            if getattr(record, name, None) is None:  # the caller may have said it: log.info(…, extra={"run": …})
                setattr(record, name, value)
        return True


def _scrub(record: logging.LogRecord, scrubber: Scrubber) -> None:
    """Remove the secrets of the call from the record: from its text, `extra=`, its exception and its stack.

    The record itself is changed. So handlers that come later do not show the secrets either.
    """
    record.msg, record.args = scrubber.text(_message(record)), None
    if record.exc_info:
        record.exc_text = scrubber.text(_said(lambda: logging.Formatter().formatException(record.exc_info)))
        record.exc_info = None  # a formatter that shows the exception itself would show the secrets
    elif record.exc_text:
        record.exc_text = scrubber.text(record.exc_text)
    if record.stack_info:
        record.stack_info = scrubber.text(record.stack_info)
    for name, value in list(vars(record).items()):
        if name not in _OF_RECORD:
            try:
                plain = codec.decode(codec.encode(value))
            except NotEncodable:
                plain = _repr(value)
            del record.__dict__[name]
            record.__dict__[scrubber.text(name)] = scrubber.value(plain)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, the fields of RunFilter, `extra=`, and the exception.

    It never raises: a value that JSON cannot hold is written as its repr.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        for name in FIELDS:
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in line:
                line[name] = value
        if record.exc_info:
            line["exception"] = _said(lambda: self.formatException(record.exc_info))
        elif record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        return json_line(line)


class TextFormatter(logging.Formatter):
    """A record as a line for people, with what it belongs to at its end. Invisible characters are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # a name of the standard library
        """The first line of the text, before the exception."""
        text = super().formatMessage(record)
        named = [f"{name} {value}" for name in FIELDS[:3] if (value := getattr(record, name, None)) is not None]
        return text if not named or named[0] in text else f"{text} ({', '.join(named)})"

    def format(self, record: logging.LogRecord) -> str:
        """The text, of several lines if there is an exception."""
        return escaped(super().format(record), keep="\n")


def json_line(fields: dict[str, Any]) -> str:
    """The fields as one line of ASCII, whatever their values are."""
    try:
        return json.dumps(fields, default=_repr, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # a NaN, a key that is no text, a value that contains itself
        return json.dumps({str(name): _plain(value) for name, value in fields.items()}, allow_nan=False)


def json_message(message: str, logger: str = "perdure") -> str:
    """A line like those of JsonFormatter, for text that does not come from a logger."""
    return json_line({"time": _time(datetime.now(UTC).timestamp()), "level": "INFO", "logger": logger, "message": message})


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # the arguments do not fit the text, or cannot be shown
        return f"{record.msg!s} (its arguments do not fit: {type(error).__name__})" if isinstance(record.msg, str) else _repr(record.msg)


def _plain(value: Any) -> Any:
    if isinstance(value, int):
        return value if abs(value) < 2**64 else _repr(value)  # Python shows no integer of thousands of digits
    return value if value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)) else _repr(value)


def _repr(value: Any) -> str:
    return _said(lambda: repr(value))


def _said(say: Any) -> str:
    try:
        return str(say())
    except Exception as error:
        return f"(cannot be shown: {type(error).__name__})"


def log_to_stderr(form: str, level: int) -> None:
    """Send the log of perdure to stderr. `form` is a value of the setting log_format.

    If it is not empty, all other loggers come too, unless the program has configured them itself.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RunFilter())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    ours, root = logging.getLogger("perdure"), logging.getLogger()
    ours.addHandler(handler)
    ours.setLevel(level)
    ours.propagate = False  # the program may have configured the root: then each line would come twice
    if form and not root.handlers:
        root.addHandler(handler)
        root.setLevel(level)
