"""Where a log record comes from, that a replay logs nothing again, and JSON lines for odd values."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run

from perdure import Call, JsonFormatter, Outcome, Perdure, Retry, Run, RunFilter, Settings, agent, tool
from perdure.logs import FIELDS, TextFormatter, json_line

log = logging.getLogger("test.logs")


class Kept(logging.Handler):
    """Keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def told(self) -> list[tuple[Any, ...]]:
        return [(record.getMessage(), *(getattr(record, name) for name in FIELDS[:5])) for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    handler.addFilter(RunFilter())
    for name in ("test.logs", "perdure.agent"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    yield handler
    for name in ("test.logs", "perdure.agent"):
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(logging.NOTSET)


@tool(effect="idempotent")
async def in_task() -> None:
    log.info("in a task")
    await asyncio.gather(asyncio.create_task(below()), asyncio.to_thread(log.info, "in a thread of the tool"))


async def below() -> None:
    await asyncio.sleep(0)
    log.info("in a task of the tool")


@tool(effect="idempotent")
def in_thread() -> None:
    log.info("in a thread")


@tool(effect="transaction")
def in_transaction(call: Call) -> None:
    log.info("in a transaction")


@tool(effect="once")
async def lost() -> None:
    raise TimeoutError("no answer")


@lost.reconcile
async def _() -> Outcome:
    log.info("in a hook")
    return Outcome.happened(None)


@agent(version="1")
async def chatty(run: Run) -> None:
    log.info("begins")
    await in_task()
    await in_thread()
    await in_transaction()
    await lost()
    log.info("ends")


def test_a_record_has_its_run_call_attempt_agent_and_tenant_wherever_the_code_runs(tmp_path: Path, kept: Kept) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [chatty]) as app:
            await app.run(chatty, id="r", tenant="acme")
            log.info("outside")

    run(main())
    of_agent, end = ("r", None, None, "chatty", "acme"), ("chatty", "acme")
    assert sorted(kept.told()) == sorted(
        [
            ("begins", *of_agent),
            ("in a task", "r", 1, 1, *end),
            ("in a task of the tool", "r", 1, 1, *end),
            ("in a thread of the tool", "r", 1, 1, *end),
            ("in a thread", "r", 2, 1, *end),
            ("in a transaction", "r", 3, 1, *end),
            ("in a hook", "r", 4, 1, *end),
            ("ends", *of_agent),
            ("outside", None, None, None, None, None),
        ]
    )


def test_two_runs_at_the_same_time_keep_their_records_apart(tmp_path: Path, kept: Kept) -> None:
    both = asyncio.Barrier(2)

    @tool(effect="idempotent")
    async def meet(name: str) -> None:
        await both.wait()
        log.info("%s after it has met", name)

    @agent(version="1")
    async def meeting(run: Run, name: str) -> None:
        await meet(name)
        run.log.info("%s ends", name)

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", [meeting]) as app:
            await asyncio.gather(app.run(meeting, "one", id="one"), app.run(meeting, "two", id="two"))

    run(main())
    assert len(kept.records) == 4
    assert all(record.getMessage().split()[0] == record.run for record in kept.records)  # type: ignore[attr-defined]


@agent(version="1")
async def waiting(run: Run) -> str:
    log.info("begins")
    run.log.info("begins, by run.log")
    try:
        word = await run.receive("word")
        run.log.warning("has heard %s", word)
        word = await run.receive("word")
        log.info("has heard %s", word)
        return str(word)
    finally:
        log.info("leaves")  # also when the machine of a parked run is closed: then it is not what the agent does


@pytest.mark.parametrize("cached", [0, 10])
def test_a_replay_and_a_closed_machine_log_nothing(tmp_path: Path, kept: Kept, cached: int) -> None:
    settings = Settings(cache_runs=cached, park_after_s=0, poll_s=0.01)

    async def main() -> None:
        for step in range(3):
            async with Perdure(f"sqlite:///{tmp_path}/db", [waiting], settings=settings) as app:
                if step == 0:
                    await app.start(waiting, id="r")
                else:
                    await app.signal("r", "word", f"w{step}")
                await app.drive("r", wait=False)

    run(main())
    assert [record.getMessage() for record in kept.records] == [
        "begins",
        "begins, by run.log",
        "has heard w1",
        "has heard w2",
        "leaves",
    ]


def test_run_log_is_silent_in_a_replay_without_any_filter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(cache_runs=0, park_after_s=0, poll_s=0.01)

    async def main() -> None:
        for step in range(3):
            async with Perdure(f"sqlite:///{tmp_path}/db", [waiting], settings=settings) as app:
                if step == 0:
                    await app.start(waiting, id="r")
                else:
                    await app.signal("r", "word", f"w{step}")
                await app.drive("r", wait=False)

    with caplog.at_level(logging.INFO, "perdure.agent"):
        run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "perdure.agent"]
    assert said == ["begins, by run.log", "has heard w1"]


def test_the_word_of_the_caller_counts_more_than_the_filter(kept: Kept) -> None:
    log.info("about another run", extra={"run": "other"})
    assert kept.records[0].run == "other"  # type: ignore[attr-defined]


# -- JSON -------------------------------------------------------------------------------------------------------------
class Mute:
    def __repr__(self) -> str:
        raise ValueError("no words")

    __str__ = __repr__


def record(message: Any, *args: Any, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("shop", logging.INFO, __file__, 1, message, args, more.pop("exc_info", None))
    made.__dict__.update(more)
    return made


def test_a_line_has_the_time_in_utc_the_level_the_logger_the_message_and_the_fields() -> None:
    line = JsonFormatter().format(record("paid %s", 5, run="r", call=3, attempt=1, agent="a", tenant="t", order="o-7", created=1.5))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500000Z",
        "level": "INFO",
        "logger": "shop",
        "message": "paid 5",
        "run": "r",
        "call": 3,
        "attempt": 1,
        "agent": "a",
        "tenant": "t",
        "order": "o-7",
    }


def test_an_exception_is_a_field_and_the_line_stays_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = JsonFormatter().format(record("failed\nhere", exc_info=(type(error), error, error.__traceback__)))
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "failed\nhere"
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: two\nlines")


looped: list[Any] = []
looped.append(looped)


@pytest.mark.parametrize(
    "odd",
    [Mute(), float("nan"), b"\xff", {1, 2}, looped, {(1, 2): 3}, "\ud800", object, 10**5000, Path("x")],
    ids=lambda odd: type(odd).__name__,
)
def test_no_odd_value_raises(odd: Any) -> None:
    for line in (JsonFormatter().format(record("odd", odd=odd)), JsonFormatter().format(record("%s", odd)), json_line({"odd": odd})):
        assert "\n" not in line
        assert isinstance(json.loads(line), dict)


def test_a_message_whose_arguments_do_not_fit_is_still_a_line() -> None:
    assert json.loads(JsonFormatter().format(record("%d pieces", "x")))["message"].startswith("%d pieces (its arguments do not fit")
    assert json.loads(JsonFormatter().format(record(Mute())))["message"].startswith("(cannot be shown")


def test_text_names_the_run_and_escapes_what_could_hide() -> None:
    line = TextFormatter().format(record("paid\x1b[2J", run="r", call=3, attempt=2, agent="a"))
    assert re.fullmatch(r"\S+ \S+ INFO paid\\x1b\[2J \(run r, call 3, attempt 2\)", line), line


def test_text_does_not_name_a_run_twice() -> None:
    assert TextFormatter().format(record("run r: released", run="r")).endswith(" INFO run r: released")


def test_what_the_worker_says_about_a_run_has_its_fields_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = threading.Event()

    @tool(effect="idempotent", timeout=0.05, retry=Retry(attempts=1))
    def deaf() -> None:
        end.wait(60)

    @agent(version="1")
    async def caller(run: Run) -> None:
        await deaf()

    def with_pin(**options: Any) -> Any:
        @tool(effect="idempotent", **options)
        async def pinned() -> None: ...

        @agent(version="1")
        async def caller_of_pinned(run: Run) -> None:
            await pinned()
            await run.receive("word")

        return caller_of_pinned

    async def main() -> None:
        async with perdure(tmp_path / "db", [caller]) as app:
            await app.start(caller, id="r", tenant="acme")
            await app.drive("r")
        for code in (with_pin(), with_pin(approval=lambda: None)):
            async with perdure(tmp_path / "db", [code]) as app:
                await app.start(code, id="p", tenant="acme")
                await app.drive("p", wait=False)

    run(main())
    end.set()
    told = {one.getMessage().partition(":")[0]: vars(one) for one in caplog.records if one.name == "perdure.worker"}
    stuck = next(one for words, one in told.items() if "does not stop" in words)
    assert [stuck.get(name) for name in FIELDS[:5]] == ["r", 1, 1, "caller", "acme"]
    changed = told["run p"]
    assert [changed.get(name) for name in FIELDS[:5]] == ["p", None, None, "caller_of_pinned", "acme"]


def test_the_filter_works_on_a_thread_without_a_loop(kept: Kept) -> None:
    thread = threading.Thread(target=log.info, args=("from a thread",))
    thread.start()
    thread.join()
    assert kept.told() == [("from a thread", None, None, None, None, None)]
