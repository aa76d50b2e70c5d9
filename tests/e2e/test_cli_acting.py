"""The verbs that act, as a person or a script uses them.

Real processes, real signals, and a separate ledger of effects.
"""

from __future__ import annotations

import json
import os
import pty
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.crash.world import stands_still
from tests.servers import forked

AGENTS = """
import asyncio, os
from pathlib import Path
from perdure import Retry, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")

@tool(effect="once")
async def charge(cents: int) -> str:
    note(f"charge {cents}")
    if (HERE / "kill").exists():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), 9)
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return f"charged {cents}"

@tool(effect="idempotent")
async def tell(line: str) -> None:
    note(line)

@tool(effect="read")
async def watch() -> str:
    note("watch")
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return "seen"

@tool(effect="idempotent", retry=Retry(attempts=5, base=0.05, jitter=0))
async def flaky() -> str:
    note("flaky")
    if len((HERE / "ledger").read_text().split()) < 3:
        raise ConnectionResetError("the line broke")
    return "at last"

@agent(version="1")
async def shop(run: Run, cents: int = 5) -> str:
    receipt = await charge(cents)
    await tell("after")
    return receipt

@agent(version="1")
async def echo(run: Run, value: dict | list | str | int | None = None) -> dict | list | str | int | None:
    return value

@agent(version="1")
async def sleeper(run: Run, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"

@agent(version="1")
async def stubborn(run: Run) -> str:
    return await flaky()

@agent(version="1")
async def watcher(run: Run) -> str:
    return await watch()

@agent(version="1")
async def broken(run: Run) -> None:
    raise ValueError("no \\x1b[31mway")
"""

FAMILY = """
import asyncio
from perdure import Run, agent

@agent(version="1")
async def child(run: Run, number: int) -> int:
    await asyncio.sleep(0.05)
    return number

@agent(version="1")
async def parent(run: Run) -> int:
    return await child(1) + sum(await asyncio.gather(child(2), child(3)))
"""


class Shop:
    """A folder with agents in it, and the real program run inside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(AGENTS)
        self.children: list[subprocess.Popen[str]] = []

    def __call__(self, *args: str, code: int = 0, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `perdure ARGS` to its end, which must be this exit code."""
        done = forked.run(
            self._command(args), cwd=cwd or self.folder, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def begin(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start `perdure ARGS` and leave it running."""
        child = forked.Popen(self._command(args), cwd=cwd or self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def _command(self, args: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "perdure", *args]

    def refusal(self, *args: str, code: int = 2, **kwargs: Path) -> str:
        """The last line on stderr, with which the program ends; stdout must be empty.

        Before it, `resume` says what it does.
        """
        done = self(*args, code=code, **kwargs)  # type: ignore[arg-type]
        assert done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if not line.startswith("perdure: resuming run ")]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("perdure: "), lines
        return lines[0]

    def has_journal(self) -> bool:
        """The file exists a moment before its content: a reader in between learns that it is no journal."""
        if not (self.folder / "perdure.db").exists():
            return False
        seen = forked.run(
            self._command(("list",)), cwd=self.folder, env=os.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return seen.returncode == 0

    def freeze(self, child: subprocess.Popen[str]) -> None:
        """Stop it at a moment when it is not inside a transaction: there it would keep the database from others."""
        deadline = time.monotonic() + 60
        while True:
            child.send_signal(signal.SIGSTOP)
            until(lambda: stands_still(child.pid))
            with closing(apsw.Connection(str(self.folder / "perdure.db"))) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE; ROLLBACK")
                    return
                except apsw.BusyError:
                    assert time.monotonic() < deadline, "it is inside a transaction whenever it is stopped"
            child.send_signal(signal.SIGCONT)
            time.sleep(0.01)

    def put(self, name: str) -> None:
        (self.folder / name).touch()

    def take(self, name: str) -> None:
        (self.folder / name).unlink()

    @property
    def ledger(self) -> list[str]:
        ledger = self.folder / "ledger"
        return ledger.read_text().splitlines() if ledger.exists() else []

    def events(self, run_id: str) -> list[dict[str, Any]]:
        from perdure.core.events import encode_body
        from perdure.store.open import open_store

        store = open_store(f"sqlite:///{self.folder}/perdure.db")
        try:
            return [json.loads(encode_body(event.body)) for event in store.read(run_id)]
        finally:
            store.close()

    def in_doubt(self, run_id: str) -> None:
        """Leave a run whose worker was killed inside call 1."""
        self.put("kill")
        self("run", "shop.py:shop", "--id", run_id, code=-signal.SIGKILL)
        assert self.ledger == ["charge 5"]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    for child in shop.children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


# --- run --------------------------------------------------------------------------------------------------------------------


def test_run_prints_the_output_and_nothing_else(shop):
    done = shop("run", "shop.py:shop", "cents=7")
    assert done.stdout == "charged 7\n"
    run_id = json.loads(shop("list", "--json").stdout)["run_id"]
    assert done.stderr == f"perdure: run {run_id}; if this process ends first: perdure resume {run_id}\n"


def test_run_json_is_one_document_of_four_fields(shop):
    done = shop("run", "shop.py:shop", "--id", "r-1", "--json")
    assert json.loads(done.stdout) == {"run_id": "r-1", "status": "succeeded", "output": "charged 5", "error": None}


@pytest.mark.parametrize("value", ['{"a": [1, null]}', '"text"', "0", "null", "[]"])
def test_an_output_is_printed_as_json_and_falsy_ones_are_outputs(shop, value):
    assert json.loads(shop("run", "shop.py:echo", f"value:={value}", "--json").stdout)["output"] == json.loads(value)


@pytest.mark.parametrize(
    "arguments",
    [("cents=9",), ("cents:=9",), ("--input", '{"cents": 9}'), ("--input", "[9]"), ("--input", "9")],
)
def test_every_way_to_give_the_input_reaches_the_agent(shop, arguments):
    assert shop("run", "shop.py:shop", *arguments).stdout == "charged 9\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cents",), "key=value"),
        (("=3",), "key=value"),
        (("cents:=",), "not valid JSON"),
        (("cents:=NaN",), "NaN"),
        (("cents=1", "cents=2"), "twice"),
        (("cents=many",), "cents"),
        (("pounds=1",), "pounds"),
        (("--input", "{", "cents=1"), "use one of them"),
        (("--input", '{"cents": 1, "cents": 2}'), "twice"),
        (("--id", "../x"), "run id"),
        (("--id", ""), "run id"),
        (("--tenant", "a b"), "tenant"),
        (("--bogus",), "--bogus"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(shop, arguments, said):
    assert said in shop.refusal("run", "shop.py:shop", *arguments)
    assert shop.ledger == []


def test_running_the_same_id_again_returns_the_same_run_without_a_second_effect(shop):
    for _ in range(2):
        assert shop("run", "shop.py:shop", "--id", "r-1").stdout == "charged 5\n"
    assert shop.ledger == ["charge 5", "after"]
    assert "another input" in shop.refusal("run", "shop.py:shop", "cents=6", "--id", "r-1")


def test_a_failed_run_is_exit_1_and_its_words_cannot_reach_the_terminal_raw(shop):
    line = shop.refusal("run", "shop.py:broken", "--id", "r-1", code=1)
    assert "ValueError: no \\x1b[31mway" in line
    assert "perdure why r-1" in line
    assert json.loads(shop("resume", "r-1", "--json", code=1).stdout)["status"] == "failed"


def test_text_from_an_agent_is_shown_escaped_but_keeps_its_lines(shop):
    done = shop("run", "shop.py:echo", "value=one\n\x1b[2Jtwo \u202e three\u200b")
    assert done.stdout == "one\n\\x1b[2Jtwo \\u202e three\\u200b\n"


def test_run_stays_for_retries(shop):
    assert shop("run", "shop.py:stubborn").stdout == "at last\n"
    assert shop.ledger == ["flaky"] * 3


def test_run_stays_for_its_own_timer_and_leaves_with_3_where_it_may_not_wait(shop):
    line = shop.refusal("run", "shop.py:sleeper", "seconds=3600", "--id", "r-1", "--no-wait", code=3)
    assert "waits" in line
    assert "perdure resume r-1" in line
    assert shop("run", "shop.py:sleeper", "seconds=0.5").stdout == "awake\n"
    shop("run", "shop.py:sleeper", "seconds=0.5", "--id", "r-2", "--detach")
    assert shop("resume", "r-2").stdout == "awake\n"


def test_detach_only_starts_and_prints_the_id(shop):
    done = shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    assert done.stdout == "r-1\n"
    assert "perdure resume r-1" in done.stderr
    assert shop.ledger == []
    assert json.loads(shop("run", "shop.py:shop", "--id", "r-1", "--detach", "--json").stdout)["status"] == "queued"


def test_hints_name_the_database_that_was_named(shop):
    shop("run", "shop.py:shop", "--id", "r-1", "--detach", "--url", "sqlite:///other.db")
    assert not (shop.folder / "perdure.db").exists()
    assert "there is no database" in shop.refusal("resume", "r-1", code=6)
    assert shop("resume", "r-1", "--url", "sqlite:///other.db").stdout == "charged 5\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("show", "nobody"), "`perdure list --url sqlite:///other.db`"),
        (("resolve", "nobody", "1", "--did-not-happen"), "`perdure list --url sqlite:///other.db`"),
        (("run", "shop.py:shop", "cents=6", "--id", "r-1"), "perdure resume r-1 --url sqlite:///other.db"),
    ],
)
def test_refusals_name_the_database_that_was_named(shop, words, hint):
    shop("run", "shop.py:shop", "--id", "r-1", "--detach", "--url", "sqlite:///other.db")
    code = 2 if words[0] == "run" else 6
    assert hint in shop.refusal(*words, "--url", "sqlite:///other.db", code=code)
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    assert "--url" not in shop.refusal(*words, code=code)


def test_debug_shows_where_a_failed_run_was_raised(shop):
    told = shop("run", "shop.py:broken", "--id", "r-1", code=1, PERDURE_DEBUG="1").stderr.splitlines()
    line = AGENTS.splitlines().index('    raise ValueError("no \\x1b[31mway")') + 1
    assert told[-2].strip() == f"{shop.folder}/shop.py:{line} in broken"
    assert told[-1].startswith("perdure: run r-1 failed: ")
    assert shop.refusal("resume", "r-1", code=1).startswith("perdure: run r-1 failed: ")


# --- in doubt ---------------------------------------------------------------------------------------------------------------


def test_a_run_killed_inside_a_once_call_needs_attention_and_never_repeats_it(shop):
    shop.in_doubt("r-1")
    assert "perdure why r-1" in shop.refusal("run", "shop.py:shop", "--id", "r-1", code=4)
    assert "perdure why r-1" in shop.refusal("resume", "r-1", code=4)  # sent back to work, and in doubt again
    assert json.loads(shop("resume", "r-1", "--json", code=4).stdout)["status"] == "needs_attention"
    assert shop.ledger == ["charge 5"]


def test_run_leaves_a_run_that_needs_attention_as_it_is_and_resume_sends_it_back_to_work(shop):
    shop.in_doubt("r-1")
    shop("run", "shop.py:shop", "--id", "r-1", code=4)
    before = len(shop.events("r-1"))
    shop("run", "shop.py:shop", "--id", "r-1", code=4)
    assert len(shop.events("r-1")) == before
    shop("resume", "r-1", code=4)
    assert [event["by"] for event in shop.events("r-1") if event["type"] == "run_unpaused"] == [os_user()]


@pytest.mark.parametrize(
    ("answer", "next_words", "code", "stdout", "ledger"),
    [
        (("--happened", '"by hand"'), "goes on with that result", 0, "by hand\n", ["charge 5", "after"]),
        (("--happened", "null"), "goes on with that result", 0, "null\n", ["charge 5", "after"]),
        (("--did-not-happen", "--final"), "performed again", 0, "charged 5\n", ["charge 5", "charge 5", "after"]),
        (("--fail", "gave up"), "ToolFailed", 1, "", ["charge 5"]),
    ],
)
def test_resolve_settles_the_doubt_and_says_what_to_type_next(shop, answer, next_words, code, stdout, ledger):
    shop.in_doubt("r-1")
    shop("resume", "r-1", code=4)
    told = shop("resolve", "r-1", "1", *answer, "--note", "looked it up").stdout
    assert next_words in told
    assert "perdure resume r-1" in told
    assert shop("resume", "r-1", code=code).stdout == stdout
    assert shop.ledger == ledger
    resolved = [event for event in shop.events("r-1") if event["type"] == "tool_call_resolved"]
    assert [(event["by"], event["note"]) for event in resolved] == [(os_user(), "looked it up")]


@pytest.mark.parametrize("answer", [(), ("--did-not-happen", "--fail", "x"), ("--happened", "1", "--did-not-happen")])
def test_resolve_wants_exactly_one_answer(shop, answer):
    assert "exactly one" in shop.refusal("resolve", "r-1", "1", *answer)


def test_resolve_refuses_what_is_not_in_doubt(shop):
    shop.in_doubt("r-1")
    shop("run", "shop.py:echo", "--id", "r-2")
    assert "not valid JSON" in shop.refusal("resolve", "r-1", "1", "--happened", "{")
    assert "call 7" in shop.refusal("resolve", "r-1", "7", "--did-not-happen", code=6)
    assert "no run r-9" in shop.refusal("resolve", "r-9", "1", "--did-not-happen", code=6)
    shop.refusal("resolve", "r-2", "1", "--did-not-happen", code=6)
    shop.refusal("resolve", "r-1", "0", "--did-not-happen")
    assert "--happened" in (told := shop.refusal("resolve", "r-1", "1", "--happened", "parcel"))
    assert told.endswith("""text is written '"like this"'""")
    shop("resolve", "r-1", "1", "--happened", '"once"')
    assert "only a call in doubt" in shop.refusal("resolve", "r-1", "1", "--happened", '"twice"')


def os_user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


# --- who drives -------------------------------------------------------------------------------------------------------------


def test_a_run_that_a_live_process_drives_is_exit_8_and_names_it(shop):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:shop", "--id", "r-1")
    until(lambda: shop.ledger)
    for verb in (("run", "shop.py:shop", "--id", "r-1", "--no-wait"), ("resume", "r-1")):
        assert f":{driver.pid}" in shop.refusal(*verb, code=8)
    assert f":{driver.pid} end it" in shop.refusal("cancel", "r-1", "--force", code=8)
    follower = shop.begin("run", "shop.py:shop", "--id", "r-1")
    said = follower.stderr.readline()
    assert said.startswith("perdure: run r-1 is held by the worker ")
    assert said.endswith(f":{driver.pid}; waiting for it\n")
    shop.take("hold")
    assert driver.communicate(timeout=60)[0] == "charged 5\n"
    assert driver.returncode == 0
    assert follower.communicate(timeout=60) == ("charged 5\n", "")
    assert follower.returncode == 0
    assert shop.ledger == ["charge 5", "after"]


def test_run_goes_on_itself_with_a_run_whose_worker_dies_while_it_waits_for_that(shop):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:watcher", "--id", "r-1")
    until(lambda: shop.ledger)
    follower = shop.begin("run", "shop.py:watcher", "--id", "r-1", "--json")
    assert f":{driver.pid};" in follower.stderr.readline()
    driver.kill()
    shop.take("hold")
    out, err = follower.communicate(timeout=60)
    assert (json.loads(out)["output"], follower.returncode) == ("seen", 0), err


def test_run_leaves_a_run_with_its_worker_when_it_is_told_to_stop(shop):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:shop", "--id", "r-1")
    until(lambda: shop.ledger)
    follower = shop.begin("run", "shop.py:shop", "--id", "r-1")
    follower.stderr.readline()
    follower.send_signal(signal.SIGTERM)
    _, err = follower.communicate(timeout=60)
    assert follower.returncode == 8
    assert f"run r-1 is held by the worker {socket.gethostname()}:{driver.pid}; perdure why r-1" in err
    shop.take("hold")
    assert driver.communicate(timeout=60)[0] == "charged 5\n"


def test_run_beside_a_worker_of_the_same_agents_always_ends_with_the_result(shop):
    (shop.folder / "family.py").write_text(FAMILY)
    shop("run", "family.py:child", "number:=1")
    worker = shop.begin("worker", "family.py")
    until(lambda: "alive" in shop("list", "--workers").stdout)
    for number in range(4):
        assert shop("run", "family.py:parent", "--id", f"p-{number}").stdout == "6\n"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains_hands_the_run_over_and_says_how_to_resume(shop, number):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:shop", "--id", "r-1")
    until(lambda: shop.ledger)
    driver.send_signal(number)
    time.sleep(0.3)
    assert driver.poll() is None  # the call is under way, and a drain lets it end
    shop.take("hold")
    stdout, stderr = driver.communicate(timeout=60)
    assert (driver.returncode, stdout) == (3, "")
    assert number.name in stderr
    assert "perdure resume r-1" in stderr.splitlines()[-1]
    assert shop("resume", "r-1").stdout == "charged 5\n"
    assert shop.ledger == ["charge 5", "after"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_end_it_at_once(shop, number):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:shop", "--id", "r-1")
    until(lambda: shop.ledger)
    driver.send_signal(number)
    while "second signal" not in driver.stderr.readline():
        pass  # two of them that it has not heard of yet would be one
    driver.send_signal(number)
    assert driver.wait(timeout=60) == -number
    assert "needs attention" in shop.refusal("resume", "r-1", code=4)


def test_a_signal_while_the_run_waits_for_its_timer_leaves_it_waiting(shop):
    driver = shop.begin("run", "shop.py:sleeper", "seconds=60", "--id", "r-1")
    until(lambda: shop.has_journal() and any(event["type"] == "run_released" for event in shop.events("r-1")))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=60) == 3
    assert "perdure resume r-1" in driver.communicate()[1].splitlines()[-1]


# --- worker -----------------------------------------------------------------------------------------------------------------


def test_a_worker_serves_what_was_started_elsewhere_and_ends_with_0_after_a_drain(shop):
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    worker = shop.begin("worker", "shop.py", "--concurrency", "4", "--audit-log", "audit.jsonl")
    until(lambda: "after" in shop.ledger)
    shop("run", "shop.py:echo", "value=later", "--id", "r-2", "--detach")
    until(lambda: any(event["type"] == "run_succeeded" for event in shop.events("r-2")))
    worker.send_signal(signal.SIGTERM)
    _, stderr = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert f"serving shop@1 ({shop.folder}/shop.py:shop)" in stderr
    assert "sqlite:///perdure.db" in stderr
    assert "drained" in stderr
    assert json.loads(shop("resume", "r-1", "--json").stdout)["output"] == "charged 5"
    audited = [json.loads(line) for line in (shop.folder / "audit.jsonl").read_text().splitlines()]
    assert {line["run_id"] for line in audited} == {"r-1", "r-2"}


def test_a_drained_worker_hands_its_run_to_the_next_one(shop):
    shop.put("hold")
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    first = shop.begin("worker", "shop.py:shop")
    until(lambda: shop.ledger)
    first.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert first.poll() is None
    shop.take("hold")
    assert first.wait(timeout=60) == 0
    second = shop.begin("worker", "shop.py:shop")
    until(lambda: "after" in shop.ledger)
    second.send_signal(signal.SIGINT)
    assert second.wait(timeout=60) == 0
    assert shop.ledger == ["charge 5", "after"]


def test_a_drain_that_takes_too_long_ends_the_call_and_records_the_doubt(shop):
    shop.put("hold")
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    worker = shop.begin("worker", "shop.py:shop", "--drain-timeout", "0.2")
    until(lambda: shop.ledger)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    assert "tool_call_in_doubt" in [event["type"] for event in shop.events("r-1")]


def test_a_second_signal_ends_a_worker_at_once(shop):
    shop.put("hold")
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    worker = shop.begin("worker", "shop.py:shop")
    until(lambda: shop.ledger)
    worker.send_signal(signal.SIGTERM)
    while "second signal" not in worker.stderr.readline():
        pass
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == -signal.SIGTERM


def test_a_worker_refuses_wrong_settings_and_two_agents_of_one_name(shop):
    (shop.folder / "other.py").write_text(AGENTS)
    assert "both agent 'shop'" in shop.refusal("worker", "shop.py:shop", "other.py:shop")
    assert "--concurrency" in shop.refusal("worker", "shop.py:shop", "--concurrency", "0")
    assert "TARGET" in shop.refusal("worker")


# --- cancel -----------------------------------------------------------------------------------------------------------------


def test_a_waiting_run_is_cancelled_by_whoever_drives_it_next(shop):
    shop("run", "shop.py:sleeper", "seconds=600", "--id", "r-1", "--no-wait", code=3)
    assert "perdure resume r-1" in shop("cancel", "r-1", "--reason", "changed my mind").stdout
    assert "was cancelled" in shop.refusal("resume", "r-1", code=5)
    asked = [event for event in shop.events("r-1") if event["type"] == "cancel_requested"]
    assert [(event["by"], event["reason"]) for event in asked] == [(os_user(), "changed my mind")]


def test_a_run_that_is_being_driven_is_cancelled_where_it_runs(shop):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:watcher", "--id", "r-1")
    until(lambda: shop.ledger)
    shop.freeze(driver)  # or it might have cancelled the run before `cancel` looks who holds it
    assert "the worker that holds it" in shop("cancel", "r-1", "--by", "ann").stdout
    driver.send_signal(signal.SIGCONT)
    assert driver.wait(timeout=60) == 5


def test_a_cancel_does_not_guess_away_a_once_call_in_flight(shop):
    shop.put("hold")
    driver = shop.begin("run", "shop.py:shop", "--id", "r-1")
    until(lambda: shop.ledger)
    shop("cancel", "r-1")
    assert driver.wait(timeout=60) == 4
    assert "tool_call_in_doubt" in [event["type"] for event in shop.events("r-1")]


def test_what_did_not_happen_is_not_performed_again_in_a_cancelled_run(shop):
    shop.in_doubt("r-1")
    shop("cancel", "r-1", "--by", "ann")
    assert "being cancelled (ann asked at " in shop("why", "r-1").stdout
    told = shop("resolve", "r-1", "1", "--did-not-happen", "--final").stdout
    assert "it is not performed again, and the run, which is being cancelled, goes on to its end" in told
    assert "was cancelled" in shop.refusal("resume", "r-1", code=5)
    assert shop.ledger == ["charge 5"]


def test_hints_of_resolve_and_cancel_name_the_code_from_another_folder(shop, tmp_path_factory):
    shop("run", "shop.py:sleeper", "seconds=600", "--id", "r-1", "--no-wait", code=3)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "perdure.db").hardlink_to(shop.folder / "perdure.db")
    assert f"perdure resume r-1 {shop.folder}/shop.py:sleeper" in shop("cancel", "r-1", cwd=elsewhere).stdout


def test_cancel_refuses_what_is_over_or_absent(shop):
    shop("run", "shop.py:echo", "--id", "r-1")
    assert "r-1" in shop.refusal("cancel", "r-1")
    assert "r-9" in shop.refusal("cancel", "r-9", code=6)


# --- where the code comes from ----------------------------------------------------------------------------------------------


def test_resume_uses_recorded_code_only_from_below_here_or_beside_the_database(shop, tmp_path_factory):
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (shop.folder / "perdure.db").rename(elsewhere / "perdure.db")
    for ending in ("-wal", "-shm"):
        if (left := shop.folder / f"perdure.db{ending}").exists():
            left.rename(elsewhere / f"perdure.db{ending}")
    typed = f"{shop.folder}/shop.py:shop"
    assert shop.refusal("resume", "r-1", cwd=elsewhere).endswith(f"look at it, then: perdure resume r-1 {typed}")
    url = f"sqlite:///{elsewhere}/perdure.db"
    refused = shop.refusal("replay", "r-1", "--url", url, cwd=elsewhere)
    assert refused.endswith(f"look at it, then: perdure replay r-1 {typed} --url {url}")
    refused = shop.refusal("inspect", "r-1", "--at", "2", "--all-frames", cwd=elsewhere)
    assert refused.endswith(f"look at it, then: perdure inspect r-1 {typed} --at 2 --all-frames")
    assert shop.ledger == []
    assert shop("resume", "r-1", f"{shop.folder}/shop.py:shop", cwd=elsewhere).stdout == "charged 5\n"


def test_a_result_can_be_read_when_the_code_is_gone(shop):
    shop("run", "shop.py:echo", "value=kept", "--id", "r-1")
    shop.take("shop.py")
    assert shop("resume", "r-1").stdout == "kept\n"


def test_an_agent_of_another_name_cannot_take_the_run(shop):
    shop("run", "shop.py:shop", "--id", "r-1", "--detach")
    assert "belongs to agent 'shop'" in shop.refusal("resume", "r-1", "shop.py:echo")
    assert shop("resume", "r-1").stdout == "charged 5\n"


def test_a_target_that_does_not_load_is_one_line(shop):
    (shop.folder / "bad.py").write_text("import nothing_of_that_name\n")
    assert shop.refusal("run", "bad.py").startswith("perdure: bad.py, line 1: No module named")
    assert "there is no file absent.py" in shop.refusal("run", "absent.py:x", code=6)


# --- the program ------------------------------------------------------------------------------------------------------------


def test_verbs_that_need_a_database_do_not_make_one(shop):
    for verb in (("resume", "r-1"), ("cancel", "r-1"), ("resolve", "r-1", "1", "--did-not-happen")):
        assert "there is no database perdure.db" in shop.refusal(*verb, code=6)
    assert sorted(path.name for path in shop.folder.iterdir()) == ["shop.py"]


def test_a_file_that_is_no_database_is_one_line(shop):
    (shop.folder / "perdure.db").write_text("not a database, but long enough to be looked at: " + "x" * 5000)
    shop.refusal("resume", "r-1")
    shop.refusal("run", "shop.py:shop")


def test_unknown_verbs_and_options_are_one_line_with_the_nearest_name(shop):
    assert "did you mean 'resume'?" in shop.refusal("resum", "r-1")
    assert "--jsn" in shop.refusal("run", "shop.py:shop", "--jsn")
    assert "RUN" in shop.refusal("resume")


def test_a_typo_in_a_setting_stops_every_verb(shop):
    assert "did you mean PERDURE_LEASE_S?" in shop("run", "shop.py:shop", code=2, PERDURE_LEASE="3").stderr
    (shop.folder / "perdure.toml").write_text('url = "sqlite:///from-file.db"\n')
    shop("run", "shop.py:shop")
    assert (shop.folder / "from-file.db").exists()


def test_a_closed_stdout_ends_quietly(shop):
    shop("run", "shop.py:echo", "value=x", "--id", "r-1")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "resume", "r-1"],
        cwd=shop.folder,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_streams_closed_from_the_start_harm_nothing(shop):
    program = f"exec {sys.executable} -m perdure run shop.py:broken --id r-1 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", program], cwd=shop.folder, timeout=60, check=False).returncode == 1
    assert json.loads(shop("resume", "r-1", "--json", code=1).stdout)["status"] == "failed"


def test_progress_goes_to_a_terminal_on_stderr_and_the_result_to_stdout(shop):
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "run", "shop.py:stubborn"],
        cwd=shop.folder,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "at last\n")
    assert "flaky" in shown
    assert "attempt 2" in shown


def test_completion_offers_run_ids_and_is_silent_about_errors(shop):
    shop("run", "shop.py:echo", "--id", "r-1")
    shop("run", "shop.py:echo", "--id", "other")
    asked = {"_PERDURE_COMPLETE": "bash_complete", "COMP_WORDS": "perdure resume r", "COMP_CWORD": "2"}
    assert shop(**asked).stdout.split() == ["plain,r-1"]
    (shop.folder / "perdure.db").write_bytes(b"x" * 5000)
    broken = shop(**asked)
    assert (broken.stdout.strip(), broken.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shop, shell):
    assert "_PERDURE_COMPLETE" in shop("completion", shell).stdout


def test_the_bash_completion_script_is_valid(shop):
    script = shop("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=10, check=False).returncode == 0


def test_help_and_version_of_the_program_and_of_every_acting_verb(shop):
    assert shop("--version").stdout.startswith("perdure ")
    for verb in ("run", "resume", "worker", "resolve", "cancel", "completion"):
        assert verb in shop("--help").stdout
        assert f"Usage: perdure {verb}" in shop(verb, "--help").stdout
