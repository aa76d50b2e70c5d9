"""A forked program behaves like any other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.servers import forked

ROOT = Path(__file__).resolve().parents[2]


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('with these words')",
        "import os; os.kill(os.getpid(), 9)",
        "raise KeyboardInterrupt",
        "1 / 0",
        "import sys; print('out'); print('err', file=sys.stderr)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('to the end'))).start()",
        "import atexit; atexit.register(print, 'to the end')",
        "import os, sys; print(sys.argv, sys.path, sorted(os.environ.items()), os.getcwd(), __name__)",
        "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGTERM))",
        "import os; print(os.listdir('/proc/self/fd'))",
        "print(open(0).read())",
    ],
)
def test_it_ends_and_says_what_an_interpreter_would(tmp_path: Path, program: str) -> None:
    def ran(run: object) -> tuple[int, str, str]:
        assert callable(run)
        env = {"HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "PYTHONPATH": str(tmp_path)}
        done = run(python("-c", program, "a", "b"), cwd=tmp_path, env=env, input="words", capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout, done.stderr.splitlines()[-1:]

    assert ran(forked.run) == ran(subprocess.run)


def test_modules_and_files_are_programs_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys, other; print(__name__, sys.argv, other.here)")
    (tmp_path / "other.py").write_text("here = True")
    for how in (["-m", "program", "x"], [str(tmp_path / "program.py"), "x"]):
        said = [run(python(*how), cwd=tmp_path, capture_output=True, text=True, timeout=30).stdout for run in (forked.run, subprocess.run)]
        assert said[0] == said[1]
        assert "['" in said[0]


def test_signals_reach_it_and_waiting_for_it_takes_as_long_as_it_lives() -> None:
    process = forked.Popen(python("-c", "print(1, flush=True); input()"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    answers: list[int] = []
    waiting = [threading.Thread(target=lambda: answers.append(process.wait(30))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    os.kill(process.pid, signal.SIGTERM)
    for thread in waiting:
        thread.join()
    assert answers == [-signal.SIGTERM] * 2
    process.communicate()


@pytest.mark.parametrize(("own", "survives"), [(False, False), (True, True)])
def test_it_ends_with_the_process_that_started_it_unless_it_has_a_session_of_its_own(own: bool, survives: bool) -> None:
    script = (
        "import os, sys; from tests.servers import forked\n"
        f"child = forked.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout={subprocess.DEVNULL}, start_new_session={own})\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(python("-c", script), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    try:
        deadline = time.monotonic() + (0.3 if survives else 20)
        while _lives(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _lives(pid) == survives
    finally:
        if _lives(pid):
            os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_it_brings_is_there_already_and_otherwise_is_not() -> None:
    program = "import sys; print('turtledemo' in sys.modules)"
    assert forked.run(python("-c", program), capture_output=True, text=True, timeout=60).stdout == "False\n"
    brings = forked.run(python("-c", program), capture_output=True, text=True, timeout=60, brings=("turtledemo",))
    assert brings.stdout == "True\n"
