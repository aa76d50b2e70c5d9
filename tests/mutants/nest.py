"""A process that runs tests against a changed perdure. It has imported all slow modules except perdure, so a mutant costs only a fork.

Requests and answers are lines of JSON on its stdin and stdout:

    {"src": folder, "tests": [ids], "log": path, "within_s": s}  → {"code": exit code of pytest, or null, "reports": [[id, phase, outcome, error, took_s]]}

The process ends when its stdin ends. No process that a request has started outlives the request.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

ROOT = Path(__file__).resolve().parents[2]
_PLUGINS = ("_hypothesis_pytestplugin", "anyio.pytest_plugin", "xdist.plugin")
_HEAVY = ("pytest", *_PLUGINS, "hypothesis", "apsw", "msgspec", "pydantic", "psycopg", "click", "rich")
_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # importing early is the purpose of this process


class Report(NamedTuple):
    """How one phase of one test ended."""

    test: str
    phase: str  # setup, call or teardown
    outcome: str
    error: str | None  # name of the exception's type
    took_s: float


class Verdict(NamedTuple):
    """The result of running tests; `code` is pytest's exit code, or None after a time-out."""

    code: int | None
    reports: list[Report]

    @property
    def green(self) -> bool:
        return self.code == 0 and any(report.phase == "call" and report.outcome == "passed" for report in self.reports)

    def is_red(self, says: str) -> bool:
        """Did a test itself fail, with this exception? A failing import or fixture, and a time-out, do not count."""
        ways = ("AssertionError", "Failed") if says == "AssertionError" else (says,)  # Failed: pytest.raises saw no exception
        failed = [report for report in self.reports if report.outcome == "failed"]
        return self.code == 1 and bool(failed) and failed[0].phase == "call" and failed[0].error in ways


# -- in the tests ----------------------------------------------------------------------------------------------------------
class Nest:
    """Runs tests against any copy of the sources."""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
        command = [sys.executable, "-c", "from tests.mutants.nest import main; main()"]
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._requests, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def run(self, src: Path, tests: list[str], log: Path, within_s: float = 100.0) -> Verdict:
        """Run the tests against the perdure in that folder."""
        request = {"src": str(src), "tests": tests, "log": str(log), "within_s": within_s}
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        answer = self._answers.readline()
        assert answer, "the nest has died"
        told = json.loads(answer)
        return Verdict(told["code"], [Report(*report) for report in told["reports"]])

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=90)
        self._answers.close()


# -- in the process -------------------------------------------------------------------------------------------------------------
def main() -> None:
    """Serve requests until stdin ends."""
    for name in _HEAVY:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] == "perdure"], "each child imports its own"
    gc.freeze()  # otherwise every collection in a child would write to, and so copy, all pages of this process
    for line in sys.stdin.buffer:
        answer = _serve(json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _be_born(request, writing)
    os.close(writing)
    told = _read(reading, request["within_s"])
    os.close(reading)
    # Kill the whole process group, with all processes that the tests have started.
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return cast("dict[str, Any]", json.loads(told)) if told else {"code": None, "reports": []}


def _read(reading: int, within_s: float) -> bytes:
    told = b""
    while select.select([reading], [], [], within_s)[0]:
        some = os.read(reading, 65536)
        if not some:
            break
        told += some
        if told.endswith(b"\n"):
            return told
    return b""


def _be_born(request: dict[str, Any], writing: int) -> None:
    """In the child: run the tests and write their reports to the pipe. Never returns."""
    try:
        os.setpgid(0, 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ["PYTHONPATH"] = request["src"]  # for the processes of the tests
        sys.path.insert(0, request["src"])
        # perdure is a pytest plugin, so pytest rewrites the assertions of all its modules. Keep the .pyc files, so that only the first mutant pays.
        sys.dont_write_bytecode = False
        listener = _Listener()
        import pytest

        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"--basetemp={request['log']}.tmp",
            "-o",
            "faulthandler_timeout=0",
            "-W",
            _IMPORTED,
        ]
        code = pytest.main([*options, *request["tests"]], plugins=[listener])
        import perdure

        assert str(perdure.__file__).startswith(request["src"]), perdure.__file__
        os.write(writing, json.dumps({"code": int(code), "reports": listener.reports}).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Listener:
    """A pytest plugin that collects the reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, str, str, str | None, float]] = []

    def pytest_load_initial_conftests(self) -> None:
        sys.dont_write_bytecode = True  # from here on as in any other test run; tests/conftest.py gives the reason

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        outcome = "passed" if call.excinfo is None else "skipped" if call.excinfo.typename == "Skipped" else "failed"
        error = None if call.excinfo is None else call.excinfo.typename
        self.reports.append((item.nodeid, call.when, outcome, error, round(call.duration, 3)))
