"""`perdure crashtest`, as a user types it: real processes, exit codes, one JSON document, a page to share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.lab import wards

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples/crashtest_shop.py"
HOSTILE = """
import time
from pathlib import Path
from perdure import Run, agent, tool

NAME = "</style><script>alert(1)</script>"

@tool(effect="idempotent")
def add(word: str) -> str:
    with Path("words <b>").open("a") as file:
        file.write(word + chr(10))
    return NAME + str(len(Path("words <b>").read_text())) + chr(0x202e)

@agent(version="1")
async def hostile(run: Run, word: str) -> str:
    return await add(word)

@tool(effect="read")
def rests() -> None:
    Path("{began}").touch()
    time.sleep(600)

@agent(version="1")
async def sleeper(run: Run) -> None:
    await rests()
"""


def crashtest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "perdure", "crashtest", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


class Page(HTMLParser):
    """The elements of a page, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_honest_shop_survives_and_what_was_learned_stands_in_a_table(tmp_path: Path) -> None:
    done = crashtest(tmp_path, f"{SHOP}:shop", "order=o-1", "--boundary", "effect")
    assert (done.returncode, done.stderr) == (0, "")
    assert "killed at" in done.stdout
    assert "note: tool mail: declared once" in done.stdout
    assert "0 wrong" in done.stdout
    # Its files were the trials' own, and nothing of them is left.
    assert list(tmp_path.iterdir()) == []


def test_the_careless_shop_is_found_out_in_one_json_document_and_on_a_page(tmp_path: Path) -> None:
    done = crashtest(
        tmp_path,
        *(f"{SHOP}:careless", "order=o-1", "--json", "--report", "out.html"),
        *("--boundary", "careless", "--boundary", "count_", "--boundary", "late"),
    )
    assert done.returncode == 7, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert {problem["tool"] for problem in document["problems"]} == {
        "charge_carelessly",
        "count_sale",
        "send_carelessly",
        "insure_hastily",
    }
    assert {"subject", "baseline", "trials", "tools", "problems", "notes", "figures"} <= document.keys()
    assert set(document["trials"][0]) == set(fields_of_a_trial())
    assert document["subject"]["command"].startswith("perdure crashtest ")
    assert any(trial["fresh"] for trial in document["trials"])
    page = Page((tmp_path / "out.html").read_text())
    assert page.open == []
    assert "count_sale: declared idempotent, and its effect shows twice: sales.log has 2 lines instead of 1" in page.text
    assert document["subject"]["source_digest"] in page.text
    assert document["subject"]["command"] in page.text


def fields_of_a_trial() -> list[str]:
    return [
        *("number", "boundaries", "also", "status", "outcome", "output_equal", "repeated", "effects", "world", "resume_s"),
        *("settled", "problems", "compared", "kills", "asked", "fresh"),
    ]


def test_whatever_an_agent_says_is_text_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    done = crashtest(
        tmp_path, "hostile.py:hostile", "word=<img src=x onerror=alert(1)>", "--report", "out.html", "--boundary", "after_tool_effect"
    )
    assert done.returncode == 7
    assert "\u202e" not in done.stdout
    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "img", "b>"})
    assert "<img" not in text.lower()
    assert "</style><script>" not in text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "\u202e" not in text
    assert "default-src 'none'" in text


def test_the_boundaries_can_be_listed_without_killing_anybody(tmp_path: Path) -> None:
    done = crashtest(tmp_path, f"{SHOP}:shop", "order=o-1", "--list")
    assert done.returncode == 0
    assert "during_tool_effect: send (call 4)" in done.stdout.splitlines()
    assert done.stdout.splitlines()[0] == "before_run_created_persisted"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bad.py:a",), 2, "bad.py, line 1: ZeroDivisionError: division by zero"),
        ((f"{wards.__file__}:unlucky",), 1, "without any kill, it is failed: ToolFailed: tool fails (call 1)"),
        ((f"{wards.__file__}:leaves",), 1, "without any kill, it ended its process (exit code 3)"),
        ((f"{wards.__file__}:hangs", "--timeout", "1"), 1, "without any kill, it neither ended nor parked in time"),
        ((f"{wards.__file__}:counts", "--boundary", "nowhere"), 2, "none of its boundaries contains 'nowhere'"),
        ((f"{wards.__file__}:counts", "n=1"), 2, "the argument n is unknown"),
        ((f"{wards.__file__}:counts", "--url", "sqlite:///x.db"), 2, "only a postgresql://"),
        ((f"{wards.__file__}:counts", "--signal", "word"), 2, "write TOPIC=JSON"),
        ((f"{wards.__file__}:counts", "--ledger", f"{wards.__file__}:nobody"), 2, "has no function called 'nobody'"),
    ],
)
def test_what_cannot_be_tested_is_one_line_and_a_code(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    done = crashtest(tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("perdure: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]


def test_a_target_that_starts_threads_gets_fresh_interpreters_and_the_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n" + HOSTILE
    )
    done = crashtest(tmp_path, "threads.py:hostile", "word=x", "--boundary", "after_tool_effect: add", "--json")
    assert done.returncode == 7, done.stderr
    assert any("every process is a fresh interpreter" in remark for remark in json.loads(done.stdout)["baseline"]["remarks"])


def test_a_plan_from_a_file_and_a_folder_to_begin_with(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from pathlib import Path\nfrom perdure import tool\n\n@tool(effect='read')\ndef look() -> str:\n    return Path('seed').read_text()\n"
    )
    (tmp_path / "plan.toml").write_text('name = "looking"\n\n[[steps]]\nname = "look"\ntool = "look"\n')
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds/seed").write_text("grown")
    done = crashtest(
        tmp_path, "plan.toml", "--tools", "tools.py", "--world", "seeds", "--boundary", "tool_effect", "--keep", "kept", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "grown" in json.dumps(json.loads(done.stdout)["baseline"]["output"])
    assert (tmp_path / "kept/trial-00000/world/seed").read_text() == "grown"
    assert (tmp_path / "kept/trial-00000/journal.db").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_test(tmp_path: Path, number: signal.Signals) -> None:
    began = tmp_path / "began"
    (tmp_path / "app.py").write_text(HOSTILE.replace("{began}", str(began)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure", "crashtest", "app.py:sleeper"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not began.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victims = children_of(process.pid)
    assert len(victims) == 1
    process.send_signal(number)
    assert process.wait(60) == (130 if number is signal.SIGINT else -signal.SIGKILL)
    while any(is_alive(pid) for pid in victims):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    assert said.strip() == (b"perdure: interrupted in the undisturbed run" if number is signal.SIGINT else b"")
    if number is signal.SIGINT:
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("perdure-crashtest")) == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
