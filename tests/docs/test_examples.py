"""What the documents show is what the program does: every Python block runs, every command and every name in them exists.

The Python blocks of a page make one program, in order, as a reader would paste them. A block right below `<!-- alone -->` is a
program of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from perdure.cli import VERBS, common
from perdure.core.events import AnyBody
from perdure.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- (?P<mark>\w+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    language: str
    text: str
    alone: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(found["language"], found["text"], found["mark"] == "alone") for found in FENCE.finditer(text)]


def programs(text: str) -> list[str]:
    """The Python programs of a page: all its blocks as one, and each that stands alone."""
    found = [block for block in blocks(text) if block.language == "python"]
    together = "\n\n".join(block.text for block in found if not block.alone)
    return [program for program in (together, *(block.text for block in found if block.alone)) if program]


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A real interpreter in an empty folder, with nothing of the caller's settings."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")} | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# --- Python ----------------------------------------------------------------------------------------------------------------

WITH_PYTHON = [page for page in PAGES if programs(page.read_text())]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names_of(WITH_PYTHON))
def test_the_python_of_a_page_runs(page, tmp_path):
    for number, program in enumerate(programs(page.read_text())):
        (tmp_path / f"page{number}.py").write_text(program)
        ran = python(tmp_path, "-W", "error", f"page{number}.py")
        assert ran.returncode == 0, ran.stderr


def test_the_pages_that_teach_have_python():
    assert {"README.md", "docs/writing-agents.md", "docs/tools-and-effects.md"} <= set(names_of(WITH_PYTHON))


def test_blocks_of_a_page_are_one_program_unless_they_stand_alone():
    page = "```python\na = 1\n```\ntext\n```python\nprint(a)\n```\n\n<!-- alone -->\n```python\nprint(2)\n```\n```console\n$ x\n```\n"
    assert programs(page) == ["a = 1\n\n\nprint(a)\n", "print(2)\n"]


def test_the_readme_program_does_nothing_the_second_time(tmp_path):
    (tmp_path / "shop.py").write_text(programs((ROOT / "README.md").read_text())[0])
    first = python(tmp_path, "shop.py")
    journal = python(tmp_path, "-m", "perdure", "events", "refund-o-81", "--json").stdout

    second = python(tmp_path, "shop.py")

    assert first.stdout == second.stdout == "receipt for 4900\n", first.stderr + second.stderr
    assert "tool_call_completed" in journal
    assert python(tmp_path, "-m", "perdure", "events", "refund-o-81", "--json").stdout == journal


# --- commands --------------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every `perdure …` command line of a page, in transcripts and in the running text, as words."""
    shown = [
        line.lstrip()[2:]
        for block in blocks(text)
        if block.language == "console"
        for line in block.text.splitlines()
        if line.lstrip().startswith("$ ")
    ]
    prose = re.findall(r"`(perdure [^`]+)`", FENCE.sub("", text).replace(r"\|", "|"))
    return [words[1:] for line in (*shown, *prose) if (words := shlex.split(line, comments=True))[0] == "perdure"]


def wrong_with(words: list[str]) -> str | None:
    """Why this command line cannot be typed, or None."""
    verb = words[0]
    if verb == "VERB":
        return None
    if verb not in VERBS:
        return f"there is no verb {verb}"
    command: click.Command = importlib.import_module(VERBS[verb][0]).command
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    unknown = [word for word in words if re.match(r"\[?--\w", word) and word.strip("[]").partition("=")[0] not in known]
    return f"{verb} has no {unknown}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_every_command_in_a_page_exists(page):
    assert [fault for words in commands(page.read_text()) if (fault := wrong_with(words))] == []


def test_a_wrong_command_is_noticed():
    page = "Type `perdure explode RUN`.\n\n```console\n$ perdure list --colour red  # no\n   $ make demo\nperdure: text\n```\n"
    assert commands(page) == [["list", "--colour", "red"], ["explode", "RUN"]]
    assert [wrong_with(words) for words in commands(page)] == ["list has no ['--colour']", "there is no verb explode"]


def test_the_command_line_page_has_every_verb_and_every_exit_code():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert set(re.findall(r"^\| `perdure (\w+)", text, re.M)) == set(VERBS)
    codes = {value for name, value in vars(common).items() if name.isupper() and isinstance(value, int) and 0 <= value < 10}
    assert {int(code) for code in re.findall(r"^\| (\d) \|", text, re.M)} == codes


# --- names -----------------------------------------------------------------------------------------------------------------


def test_the_settings_table_is_complete_and_has_the_true_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs" / "operating.md").read_text(), re.M)
    assert rows == [(name, str(getattr(Settings(), name))) for name in Settings.__struct_fields__]


def test_the_journal_page_has_every_event_type():
    table = (ROOT / "docs" / "journal.md").read_text().partition("## The types")[2].partition("##")[0]
    listed = [name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    types = {body.__struct_config__.tag for body in AnyBody.__args__}
    assert sorted(listed) == sorted(str(tag) for tag in types)


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links and pictures of a page that lead nowhere."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", FENCE.sub("", text))
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_noticed():
    assert broken_links(ROOT / "README.md", "[a](docs/cli.md#exit-codes) [b](docs/nothing.md) [c](https://example.org/x)") == [
        "docs/nothing.md"
    ]


def test_architecture_stays_short():
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150


# --- examples/ -------------------------------------------------------------------------------------------------------------


def perdure_json(folder: Path, *arguments: str) -> dict[str, object]:
    ran = python(folder, "-m", "perdure", *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def test_the_refund_pays_once_after_its_retries_and_its_timer(tmp_path):
    target = f"{EXAMPLES / 'refund.py'}:refund"
    done = perdure_json(tmp_path, "run", target, "order=o-81", "pause_s:=0.2", "--id", "refund-1")
    assert done["status"] == "succeeded"
    [paid] = (tmp_path / "payments.log").read_text().splitlines()
    assert paid.endswith(" o-81 4900")
    assert done["output"] == f"receipt-{paid[:8]}"
    types = [json.loads(line)["type"] for line in python(tmp_path, "-m", "perdure", "events", "refund-1", "--json").stdout.splitlines()]
    assert types.count("retry_scheduled") == 2
    assert {"timer_fired", "decision_made", "thought_recorded", "status_reported"} <= set(types)


def test_the_fan_out_makes_every_call(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'fanout.py'}:fan_out", "count:=30", "--id", "census")
    assert done["output"] == {"measured": 30, "sum": sum(number * number for number in range(30))}


def test_the_fan_out_stops_at_its_deadline(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'fanout.py'}:fan_out", "count:=30", "limit:=1", "deadline_s:=0.3", "--id", "hurry")
    assert isinstance(done["output"], dict)
    assert 0 < done["output"]["measured"] < 30
