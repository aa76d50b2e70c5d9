"""An isolated tool's process may write any bytes into the pipe: they only become an answer about that one call."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.drive_tools import outline, perdure, run
from tests.unit.test_perform_isolated import a_call, failure_of, loaded, performed

from perdure import Run, agent
from perdure.core.codec import MAX_BYTES, decode, encode
from perdure.core.failures import MAX_MESSAGE_CHARS
from perdure.core.outcomes import Raised, Returned, Unrecordable
from perdure.engine.local.isolated_main import framed
from perdure.errors import ResultNotEncodable

LIARS = '''
import base64, os
from perdure.tool import Call, tool

def write(raw: bytes) -> None:
    """Into the pipe that its supervisor has for its stdout."""
    answers = os.readlink(f"/proc/{os.getppid()}/fd/1")
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != answers:
                continue
        except FileNotFoundError:
            continue  # it was the listing's own
        while raw:
            raw = raw[os.write(int(name), raw):]
        return
    raise AssertionError("there is no such pipe")

@tool(isolate=True)
def lies(raw: str) -> None:
    write(base64.b85decode(raw))
    os._exit(0)

@tool(isolate=True)
def lies_and_returns(raw: str) -> str:
    write(base64.b85decode(raw))
    return "truly"

@tool(isolate=True)
def pours(size: int) -> str:
    for _ in range(size >> 20):
        write(b"x" * 2**20)
    write(b"\\n")
    return "truly"

@tool(effect="once", isolate=True)
def digits(ledger: str) -> int:
    with open(ledger, "a") as effects:
        effects.write("effect\\n")
    write(b"R5000:" + b"9" * 5000 + b"\\n")
    os._exit(0)

@tool(effect="once", isolate=True)
def scribbles(ledger: str) -> int:
    with open(ledger, "a") as effects:
        effects.write("effect\\n")
    write(b"U3:xyz\\n")
    os._exit(0)
'''


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return loaded(tmp_path_factory.mktemp("liars") / "liars.py", LIARS)


def raw(lines: bytes) -> str:
    return base64.b85encode(lines).decode()


def failure(**fields: Any) -> bytes:
    return json.dumps({"kind": "error", "type": "Odd", "message": "m", **fields}).encode()


DIGITS = b"9" * 5000
DEEP = b"[" * 100_000 + b"]" * 100_000


# --- a result that breaks the rules: the effect has still happened
# -----------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("result", "words"),
    [
        (DIGITS, "has 5,000 digits"),
        (b'{"a":[' + DIGITS + b"]}", "has 5,000 digits"),
        (b'{"a":1,"a":2}', "the key 'a' occurs twice"),
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"1e999", "which JSON cannot hold"),
        (b'"\xff"', "is not UTF-8 text"),
        (b'"\xed\xa0\x80"', "is not UTF-8 text"),
        (DEEP, "is nested deeper than 200 levels"),
        (b"[" * 300 + b"]" * 300, "nested deeper than 200 levels"),
        (b"", "is not valid JSON"),
        (b"{}{}", "is not valid JSON"),
        (b"garbage", "is not valid JSON"),
    ],
    ids=[
        "digits",
        "digits inside",
        "twice",
        "nan",
        "infinity",
        "1e999",
        "utf-8",
        "surrogate",
        "deep",
        "less deep",
        "empty",
        "two",
        "garbage",
    ],
)
def test_a_result_that_cannot_be_recorded_is_one_of_a_call_that_has_happened(liars, result, words):
    answer = performed(liars.lies, raw(framed(b"R", result)))
    assert isinstance(answer, Unrecordable), answer
    assert answer.failure.kind == "not_encodable"
    assert words in answer.failure.message


@pytest.mark.parametrize(
    ("result", "recorded"),
    [
        (b' {"b" : 1.0, "a" :"\\u00e9"} ', '{"a":"é","b":1.0}'.encode()),
        (b'"\\ud800"', b'"\\ud800"'),  # half a pair, which Python's text can hold too
        (b"[1e2,-0.0]", b"[100.0,-0.0]"),
    ],
    ids=["spaces", "half a pair", "numbers"],
)
def test_a_result_is_recorded_as_we_would_have_written_it(liars, result, recorded):
    answer = performed(liars.lies, raw(framed(b"R", result)))
    assert answer == Returned(recorded)
    assert encode(decode(recorded)) == recorded


# --- garbage proves nothing, so the call is in doubt
# -------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        framed(b"F", b"garbage"),
        framed(b"F", b"[]"),
        framed(b"F", b'{"kind":"not_sent"}'),
        framed(b"F", failure(kind="no such kind")),
        framed(b"F", failure(message=7)),
        framed(b"F", failure(lineage="Exception")),
        framed(b"F", failure(retry_after_s="soon")),
        framed(b"F", b'{"kind":"error","kind":"not_sent","type":"T","message":"m"}'),
        framed(b"F", b'{"kind":"not_sent","type":"T","message":"\xff"}'),
        framed(b"F", b'{"kind":"not_sent","type":"T","message":"m","retry_after_s":' + DIGITS + b"}"),
        framed(b"F", b'{"kind":"not_sent","type":"T","message":"m","more":' + DEEP + b"}"),
        framed(b"H", DIGITS),
        framed(b"H", b"NaN"),
        framed(b"H", DEEP),
        framed(b"H", b'{"a":1,"a":2}'),
        framed(b"U", b"garbage"),
        framed(b"U", b'{"usd_micros":1.5}'),
        framed(b"U", b'{"usd_micros":' + DIGITS + b"}"),
        framed(b"U", b'{"tokens_in":1000000000000001}'),
        framed(b"U", b'{"model":"\\u001b[2J"}'),
        framed(b"B", b"more"),
        framed(b"E", b"zero"),
        framed(b"E", DIGITS),
        framed(b"Z", b"?"),
        framed(b"R", b"1") + framed(b"R", b"2"),
        framed(b"R", b"1") + framed(b"F", failure(kind="not_sent")),
        framed(b"F", failure(kind="not_sent")) + framed(b"R", b"1"),
    ],
    ids=lambda line: ascii(line[:40])[2:-1],
)
def test_a_line_that_is_no_message_ends_the_process_and_the_call_is_in_doubt(liars, line):
    call = a_call()
    kind, message = failure_of(performed(liars.lies, raw(line), call=call))
    assert kind == "process_died"
    assert "the process of tool lies was ended, because it wrote something that is no message into perdure's own pipe: " in message
    assert len(message) <= MAX_MESSAGE_CHARS
    assert call.usage is None


@pytest.mark.parametrize("kind", ["rejected", "expired", "withdrawn", "over_budget"])
def test_a_tool_cannot_fail_with_what_is_ours_to_say(liars, kind):
    """Otherwise an agent could learn "not approved" or "no budget", and believe that the call did not happen."""
    told, message = failure_of(performed(liars.lies, raw(framed(b"F", failure(kind=kind)))))
    assert told == "process_died"
    assert f"a tool cannot fail with the kind {kind}" in message


def test_nobody_can_spend_less_than_nothing(liars):
    """Such a line would give amounts back to the run's budget that other calls have spent."""
    call = a_call()
    spent = framed(b"U", b'{"usd_micros":5}') + framed(b"U", b'{"usd_micros":-1000000}')
    assert failure_of(performed(liars.lies_and_returns, raw(spent), call=call))[0] == "process_died"
    assert call.usage is not None
    assert call.usage.usd_micros == 5


def test_a_result_beside_the_tools_own_is_not_believed_and_neither_is_that_one(liars):
    assert failure_of(performed(liars.lies_and_returns, raw(framed(b"R", b'"forged"'))))[0] == "process_died"


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"\n\n\n",
        b"R" + DIGITS + b":1\n",
        b"R1:\n",
        b"R01:1\n",
        b"R+1:1\n",
        b"R-1:\n",
        b"\xff\xfe\x00\n",
        framed(b"R", b"12345")[:-3],
        b"R1000000000:1",
    ],
    ids=lambda line: ascii(line[:40])[2:-1],
)
def test_what_is_not_even_a_line_of_ours_is_no_answer(liars, line):
    """It may be the beginning of a line, left by a process that died while it wrote.

    The end of the process is reported.
    """
    kind, message = failure_of(performed(liars.lies, raw(line)))
    assert (kind, message) == ("process_died", "the process of tool lies ended with exit code 0 before it answered")


def test_a_stray_line_does_not_cost_the_answer(liars):
    assert performed(liars.lies_and_returns, raw(b"from a library\n")) == Returned(b'"truly"')


def test_a_line_without_end_is_read_to_the_longest_that_there_is(liars):
    kind, message = failure_of(performed(liars.pours, MAX_BYTES + 2**21))
    assert kind == "process_died"
    assert "a line of 67,108,928 bytes or more" in message


@pytest.mark.full
def test_the_longest_value_gets_through(liars, tmp_path):
    module = loaded(
        tmp_path / "long.py", "from perdure.tool import tool\n@tool(isolate=True)\ndef longest(n: int) -> str: return 'x' * n\n"
    )
    answer = performed(module.longest, MAX_BYTES - 2)
    assert isinstance(answer, Returned)
    assert len(answer.result) == MAX_BYTES


def test_a_result_before_the_tool_has_begun_is_no_message(tmp_path):
    source = LIARS + "\n@tool(isolate=True)\ndef early() -> int: return 1\n"
    module = loaded(tmp_path / "early.py", source)
    (tmp_path / "early.py").write_text(source + "write(b'R1:7\\n')\nos._exit(0)\n")
    kind, message = failure_of(performed(module.early))
    assert kind == "process_died"
    assert "which the protocol does not allow, or not now" in message


# --- reports of the tool are believed, within limits
# -------------------------------------------------------------------


def test_a_failure_in_the_tools_own_words_is_believed_and_cut_to_what_a_journal_keeps(liars):
    told = failure(
        kind="not_sent", message="m" * 100_000, type="T" * 1_000, lineage=["B" * 1_000] * 100, retry_after_s=1e300, traceback="t" * 9_000
    )
    answer = performed(liars.lies, raw(framed(b"F", told)))
    assert isinstance(answer, Raised)
    found = answer.failure
    assert found.kind == "not_sent"
    assert (len(found.message), len(found.type), len(found.traceback or "")) == (2_000, 200, 2_000)
    assert (len(found.lineage), len(found.lineage[0])) == (20, 200)
    assert found.retry_after_s == 86_400


@pytest.mark.parametrize("seconds", [-1, None])
def test_a_wait_that_makes_no_sense_is_none(liars, seconds):
    answer = performed(liars.lies, raw(framed(b"F", failure(kind="rate_limited", retry_after_s=seconds))))
    assert isinstance(answer, Raised)
    assert (answer.failure.kind, answer.failure.retry_after_s) == ("rate_limited", None)


# --- the run goes on -----------------------------------------------------------------------------------------------------------


def driven(folder: Path, body: Callable[[Run], Any]) -> tuple[str, list[str]]:
    async def main() -> tuple[str, list[str]]:
        lying = agent(version="1", name="lying")(body)
        async with perdure(folder / "journal.db", [lying]) as app:
            await app.start(lying, id="r")
            row = await app.engine.drive("r", wait=False)
            return row.status, outline(app.store.read("r"))

    return run(main())


def test_5000_digits_are_a_call_that_has_happened_and_not_a_stopped_run(liars, tmp_path):
    ledger = tmp_path / "effects"

    async def body(run: Run) -> str:
        try:
            await liars.digits(str(ledger))
        except ResultNotEncodable as error:
            return error.message
        return "no error"

    status, events = driven(tmp_path, body)
    assert status == "succeeded", events
    assert "completed 1/1 unrecordable" in events
    assert ledger.read_text() == "effect\n"


def test_a_once_tool_that_scribbles_into_the_pipe_is_in_doubt_and_not_tried_again(liars, tmp_path):
    ledger = tmp_path / "effects"

    async def body(run: Run) -> int:
        return int(await liars.scribbles(str(ledger)))

    status, events = driven(tmp_path, body)
    assert status == "needs_attention"
    assert "in_doubt 1/1" in events
    assert ledger.read_text() == "effect\n"
