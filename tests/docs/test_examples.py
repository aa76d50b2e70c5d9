"""The documents are true: every Python block runs, and every command and every name in them exists.

The Python blocks of a page make one program, in order, as a reader would paste them. A block right below `<!-- alone
-->` is a separate program.
"""

from __future__ import annotations

import ast
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
from tests.servers import forked

from perdure.cli import VERBS, common
from perdure.core.events import AnyBody
from perdure.core.identity import approval_id
from perdure.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", EXAMPLES / "service" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")} | {"PYTHONPATH": str(ROOT / "src")}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process in an empty folder without the caller's settings. Programs of the pages get a real interpreter."""
    start = forked.run if arguments[0] == "-m" else subprocess.run
    return start([sys.executable, *arguments], cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=60, check=False)


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
    taught = ("writing-agents", "tools-and-effects", "approvals", "waiting", "limits", "deploying", "notifications", "undo")
    assert {"README.md", *(f"docs/{name}.md" for name in taught)} <= set(names_of(WITH_PYTHON))


def test_blocks_of_a_page_are_one_program_unless_they_stand_alone():
    page = "```python\na = 1\n```\ntext\n```python\nprint(a)\n```\n\n<!-- alone -->\n```python\nprint(2)\n```\n```console\n$ x\n```\n"
    assert programs(page) == ["a = 1\n\n\nprint(a)\n", "print(2)\n"]


def runs_when_imported(program: str) -> bool:
    """Whether `perdure run` on this file would run its `main` as well."""
    return any(isinstance(line, ast.Expr) and ast.unparse(line).startswith("asyncio.run(") for line in ast.parse(program).body)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names_of(WITH_PYTHON))
def test_the_python_of_a_page_can_be_imported_by_perdure(page):
    assert not any(map(runs_when_imported, programs(page.read_text())))


def test_a_main_that_runs_when_imported_is_noticed():
    assert runs_when_imported("import asyncio\nasyncio.run(main())\n")
    assert not runs_when_imported("if __name__ == '__main__':\n    asyncio.run(main())\n")


def test_the_deploying_program_runs_twice_in_one_folder(tmp_path):
    (tmp_path / "page.py").write_text(programs((ROOT / "docs" / "deploying.md").read_text())[0])
    for _ in range(2):
        ran = python(tmp_path, "page.py")
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("page", "tenant", "run_id", "call"),
    [
        ("README.md", "default", "refund-o-82", 3),
        ("docs/approvals.md", "default", "refund-o-81", 1),
        ("docs/notifications.md", "acme", "refund-o-81", 1),
    ],
)
def test_the_approval_ids_of_a_page_are_the_true_ones(page, tenant, run_id, call):
    shown = set(re.findall(r"\bap-[0-9a-f]{6,}", (ROOT / page).read_text()))
    assert (true := approval_id(tenant, run_id, call)) in shown
    assert [some for some in shown if not true.startswith(some)] == []


def test_the_approval_that_the_page_shows_is_the_one_that_is_asked(tmp_path):
    page = (ROOT / "docs" / "approvals.md").read_text()
    (tmp_path / "shop.py").write_text(programs(page)[0])
    ran = python(tmp_path, "-m", "perdure", "run", "shop.py:support", "order=o-81", "cents:=9900", "--id", "refund-o-81", "--actor", "ann")
    assert ran.returncode == 3, ran.stderr
    [asked] = pending(tmp_path)
    assert f"{asked['approval']}  refund  (" in page
    assert f"digest     {str(asked['digest'])[:12]}\n" in page


def test_the_moments_that_the_inspect_page_shows_are_the_true_ones(tmp_path):
    page = (ROOT / "docs" / "inspect.md").read_text()
    (tmp_path / "shop.py").write_text(programs(page)[0])
    shown = "".join(block.text for block in blocks(page) if block.language == "console")
    typed = ""
    for line in [line for line in shown.splitlines() if line.startswith("$ ")]:
        ran = python(tmp_path, "-m", *shlex.split(line)[1:])
        assert ran.returncode == (1 if " run " in line else 0), ran.stderr
        typed += f"{line}\n{ran.stdout}"
    time = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
    assert time.sub("TIME", typed) == time.sub("TIME", shown)


def test_the_undo_of_the_page_does_what_it_shows(tmp_path):
    page = (ROOT / "docs" / "undo.md").read_text()
    (tmp_path / "trip.py").write_text(programs(page)[0])
    [shown] = [block.text for block in blocks(page) if block.language == "console"]
    typed = ""
    for line in [line for line in shown.splitlines() if line.startswith("$ ")]:
        ran = python(tmp_path, "-m", *shlex.split(line)[1:])
        assert ran.returncode == 0, ran.stderr
        typed += f"{line}\n{ran.stdout}"
    time = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
    assert time.sub("TIME", typed) == time.sub("TIME", shown)


def test_the_readme_program_does_nothing_the_second_time(tmp_path):
    (tmp_path / "shop.py").write_text(programs((ROOT / "README.md").read_text())[0])
    first = python(tmp_path, "shop.py")
    journal = python(tmp_path, "-m", "perdure", "events", "refund-o-81", "--json").stdout

    second = python(tmp_path, "shop.py")

    assert first.stdout == second.stdout == "receipt for 4900\n", first.stderr + second.stderr
    assert "tool_call_completed" in journal
    assert python(tmp_path, "-m", "perdure", "events", "refund-o-81", "--json").stdout == journal


def test_the_readme_program_asks_for_the_large_order_and_goes_on_in_another_process(tmp_path):
    (tmp_path / "shop.py").write_text(programs((ROOT / "README.md").read_text())[0])
    first = python(tmp_path, "-m", "perdure", "run", "shop.py:support", "order=o-82", "--id", "refund-o-82")
    assert (first.returncode, first.stdout) == (3, ""), first.stderr
    [asked] = pending(tmp_path)
    assert f"waits for approval {asked['approval']} (refund)" in (ROOT / "README.md").read_text()
    assert (asked["action"], asked["input"], asked["reason"]) == ("refund", {"cents": 25_000, "order": "o-82"}, "over $100")

    approved = python(tmp_path, "-m", "perdure", "approve", str(asked["approval"])[:9], "--note", "talked to them")
    assert approved.returncode == 0, approved.stderr

    second = python(tmp_path, "-m", "perdure", "resume", "refund-o-82")
    assert (second.returncode, second.stdout) == (0, "receipt for 25000\n"), second.stderr


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
    if isinstance(command, click.Group) and len(words) > 1:
        if words[1] not in command.commands:
            return f"{verb} has no verb {words[1]}"
        command = command.commands[words[1]]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    unknown = [word for word in words if re.match(r"\[?--\w", word) and word.strip("[]").partition("=")[0] not in known]
    return f"{verb} has no {unknown}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_every_command_in_a_page_exists(page):
    assert [fault for words in commands(page.read_text()) if (fault := wrong_with(words))] == []


@pytest.mark.parametrize(
    "example",
    [*sorted(EXAMPLES.glob("*.py")), *(EXAMPLES / "service" / name for name in ("agents.py", "web.py", "web_sync.py"))],
    ids=lambda path: path.stem,
)
def test_every_command_in_an_examples_docstring_exists(example):
    typed = re.findall(r"^\s*(perdure .*?)(?: &)?(?:  .*)?$", ast.get_docstring(ast.parse(example.read_text())) or "", re.M)
    assert typed
    assert [fault for line in typed if (fault := wrong_with(shlex.split(line)[1:]))] == []


def test_a_wrong_command_is_noticed():
    page = "Type `perdure explode RUN`.\n\n```console\n$ perdure list --colour red  # no\n   $ make demo\nperdure: text\n```\n"
    assert commands(page) == [["list", "--colour", "red"], ["explode", "RUN"]]
    assert [wrong_with(words) for words in commands(page)] == ["list has no ['--colour']", "there is no verb explode"]
    assert wrong_with(["schedules", "explode"]) == "schedules has no verb explode"
    assert wrong_with(["schedules", "add", "a", "--when", "now"]) == "schedules has no ['--when']"


def test_the_command_line_page_has_every_verb_and_every_exit_code():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert set(re.findall(r"^\| `perdure (\w+)", text, re.M)) == set(VERBS)
    codes = {value for name, value in vars(common).items() if name.isupper() and isinstance(value, int) and 0 <= value < 10}
    assert {int(code) for code in re.findall(r"^\| (\d) \|", text, re.M)} == codes


# --- names -----------------------------------------------------------------------------------------------------------------


def test_the_settings_table_is_complete_and_has_the_true_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs" / "operating.md").read_text(), re.M)
    assert rows == [(name, str(getattr(Settings(), name)) or '""') for name in Settings.__struct_fields__]


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
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 290


# --- examples/ -------------------------------------------------------------------------------------------------------------


def perdure_json(folder: Path, *arguments: str) -> dict[str, object]:
    ran = python(folder, "-m", "perdure", *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def pending(folder: Path) -> list[dict[str, object]]:
    """The inbox of approvals, as the command line has it."""
    ran = python(folder, "-m", "perdure", "approvals", "--json")
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


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


def test_the_ledger_books_once_and_nothing_when_there_is_too_little(tmp_path):
    target = f"{EXAMPLES / 'ledger.py'}:transfer"
    for _ in range(2):
        assert perdure_json(tmp_path, "run", f"{EXAMPLES / 'ledger.py'}:set_up", "--id", "accounts")["status"] == "succeeded"
    for _ in range(2):
        done = perdure_json(tmp_path, "run", target, "source=ann", "target=bob", "cents:=2500", "--id", "pay-1")
        assert done["output"] == "ann has 7500, bob has 12500"
    refused = perdure_json(tmp_path, "run", target, "source=zoe", "target=ann", "cents:=10001", "--id", "pay-2")
    assert refused["output"] == "not booked: zoe has less than 10001"
    after = perdure_json(tmp_path, "run", f"{EXAMPLES / 'ledger.py'}:statement", "--id", "s-1")
    assert after["output"] == {"ann": 7500, "bob": 12500, "zoe": 10000}


def test_the_fan_out_makes_every_call(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'fanout.py'}:fan_out", "count:=30", "--id", "census")
    assert done["output"] == {"measured": 30, "sum": sum(number * number for number in range(30))}


def test_the_fan_out_stops_at_its_deadline(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'fanout.py'}:fan_out", "count:=30", "limit:=1", "deadline_s:=0.3", "--id", "hurry")
    assert isinstance(done["output"], dict)
    assert 0 < done["output"]["measured"] < 30


def ask_for_refund(folder: Path, run_id: str) -> str:
    """The id of the approval that a large refund waits for; its process has ended."""
    ran = python(folder, "-m", "perdure", "run", f"{EXAMPLES / 'approval.py'}:support", "order=o-81", "--id", run_id, "--no-wait")
    assert ran.returncode == 3, ran.stderr
    [asked] = pending(folder)
    assert not (folder / "refunds.log").exists()
    return str(asked["approval"])


def test_a_large_refund_is_paid_as_somebody_else_has_edited_it(tmp_path):
    approval = ask_for_refund(tmp_path, "refund-1")
    stranger = python(tmp_path, "-m", "perdure", "approve", approval, "--by", "eve")
    assert stranger.returncode == 2
    assert "eve is not among them" in stranger.stderr

    approved = python(tmp_path, "-m", "perdure", "approve", approval, "--by", "bob", "--edit", '{"cents": 2500}')
    assert approved.returncode == 0, approved.stderr

    done = perdure_json(tmp_path, "resume", "refund-1", f"{EXAMPLES / 'approval.py'}:support")
    assert done["output"] == "ann got $25.00 back"
    [paid] = (tmp_path / "refunds.log").read_text().splitlines()
    assert paid.endswith(" o-81 2500")


def test_a_rejected_refund_is_not_paid_and_the_agent_hears_why(tmp_path):
    approval = ask_for_refund(tmp_path, "refund-1")
    rejected = python(tmp_path, "-m", "perdure", "reject", approval, "--by", "bob", "--reason", "was paid in March")
    assert rejected.returncode == 0, rejected.stderr
    done = perdure_json(tmp_path, "resume", "refund-1", f"{EXAMPLES / 'approval.py'}:support")
    assert done["output"] == "not refunded, rejected: was paid in March"
    assert not (tmp_path / "refunds.log").exists()


def test_a_small_refund_asks_nobody(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'approval.py'}:support", "order=o-82", "--id", "small")
    assert done["output"] == "bob got $1.20 back"
    assert pending(tmp_path) == []


def say(folder: Path, text: str) -> None:
    ran = python(folder, "-m", "perdure", "signal", "chat-1", "user", json.dumps(text))
    assert ran.returncode == 0, ran.stderr


def test_the_chat_hears_a_message_between_two_pages_and_ends_with_bye(tmp_path):
    target = f"{EXAMPLES / 'chat.py'}:chat"
    started = python(tmp_path, "-m", "perdure", "run", target, "--id", "chat-1", "--detach")
    assert started.returncode == 0, started.stderr
    say(tmp_path, "read 500 pages")
    driving = forked.Popen(
        [sys.executable, "-m", "perdure", "run", target, "--id", "chat-1", "--json"],
        cwd=tmp_path,
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "read_page" not in python(tmp_path, "-m", "perdure", "events", "chat-1").stdout:
            assert driving.poll() is None, driving.communicate()
        say(tmp_path, "stop")
        say(tmp_path, "bye")
        stdout, stderr = driving.communicate(timeout=60)
    finally:
        driving.kill()
        driving.wait()
    talk = json.loads(stdout)["output"]
    assert driving.returncode == 0, stderr
    assert 0 < sum(line["role"] == "tool" for line in talk) < 500
    assert [line["text"] for line in talk if line["role"] == "user"] == ["read 500 pages", "stop", "bye"]
    assert talk[-1] == {"role": "agent", "text": "goodbye"}


def test_the_research_never_spends_more_than_its_budget_and_the_calls_in_flight(tmp_path):
    done = perdure_json(tmp_path, "run", f"{EXAMPLES / 'research.py'}:research", "question=why do runs survive", "--id", "research-1")
    assert isinstance(done["output"], dict)
    [spent] = (
        row["usd_micros"]
        for row in map(json.loads, python(tmp_path, "-m", "perdure", "costs", "--by", "agent", "--json").stdout.splitlines())
        if row["group"] == "investigate"
    )
    assert spent == 50_000 * done["output"]["answers"]
    assert 500_000 <= spent <= 500_000 + 8 * 50_000  # eight children, one call each in flight
    children = [json.loads(line) for line in python(tmp_path, "-m", "perdure", "list", "--json").stdout.splitlines()]
    assert {row["parent"] for row in children if row["agent"] == "investigate"} == {"research-1"}


def without_keys(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Uses a scripted model, so that no test needs a key."""
    env = {name: value for name, value in clean_env().items() if name not in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY")}
    return forked.run(
        [sys.executable, "-m", "perdure", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_support_agent_asks_for_a_large_refund_and_tells_the_customer_what_became_of_it(tmp_path):
    target = f"{EXAMPLES / 'support.py'}:support"
    asked = without_keys(tmp_path, "run", target, "prompt=My order o-81 arrived broken.", "--id", "case-81", "--no-wait")
    assert asked.returncode == 3, asked.stderr
    [approval] = pending(tmp_path)
    assert (approval["action"], approval["input"]) == ("pay_back", {"cents": 4900, "order": "o-81"})
    decided = without_keys(tmp_path, "approve", str(approval["approval"]), "--by", "bob", "--edit", '{"cents": 2500}')
    assert decided.returncode == 0, decided.stderr
    told = without_keys(tmp_path, "signal", "case-81", "message", '"and I moved house since"')
    assert told.returncode == 0, told.stderr
    done = without_keys(tmp_path, "resume", "case-81", target, "--json")
    assert done.returncode == 0, done.stderr
    assert '"cents":2500' in json.loads(done.stdout)["output"]
    [paid] = (tmp_path / "refunds.log").read_text().splitlines()
    assert paid.endswith(" o-81 2500")
    prompt = json.loads(without_keys(tmp_path, "show", "case-81", "--prompt", "6", "--json").stdout)
    assert {"role": "user", "text": "and I moved house since"} in prompt["messages"]


def test_the_support_agent_tells_a_rejection_as_one(tmp_path):
    target = f"{EXAMPLES / 'support.py'}:support"
    without_keys(tmp_path, "run", target, "prompt=My order o-81 arrived broken.", "--id", "case-81", "--no-wait")
    [approval] = pending(tmp_path)
    without_keys(tmp_path, "reject", str(approval["approval"]), "--by", "bob", "--reason", "it is fine")
    done = json.loads(without_keys(tmp_path, "resume", "case-81", target, "--json").stdout)
    assert done["status"] == "succeeded"
    assert done["output"].startswith("I am sorry: ")
    assert "it is fine" in done["output"]
    assert not (tmp_path / "refunds.log").exists()


def test_the_investigation_searches_at_once_has_a_child_write_and_hands_in_a_report(tmp_path):
    target = f"{EXAMPLES / 'investigation.py'}:investigate"
    done = without_keys(tmp_path, "run", target, "prompt=Why do durable agents need fencing?", "--id", "why-fencing", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["output"]
    assert report["sources"] == ["fencing", "leases", "zombies"]
    assert report["text"].endswith("So a lease alone is not enough.")
    runs = [json.loads(line) for line in without_keys(tmp_path, "list", "--json").stdout.splitlines()]
    assert {row["agent"]: row["parent"] for row in runs} == {"investigate": None, "writer": "why-fencing"}


def test_a_case_that_is_closed_is_continued_from_the_shell(tmp_path):
    target = f"{EXAMPLES / 'support.py'}:support"
    assert without_keys(tmp_path, "run", target, "prompt=My order o-82 is lost.", "--id", "case-82").returncode == 0
    again = without_keys(tmp_path, "run", target, "prompt=Thank you.", "--after", "case-82", "--id", "case-82b", "--json")
    assert "We have paid you back" in json.loads(again.stdout)["output"]  # the result of the first conversation: it counts
    prompt = json.loads(without_keys(tmp_path, "show", "case-82b", "--prompt", "1", "--json").stdout)
    assert [message["role"] for message in prompt["messages"]].count("assistant") == 3
    assert prompt["messages"][-1] == {"role": "user", "text": "Thank you."}
    other = without_keys(tmp_path, "run", f"{EXAMPLES / 'refund.py'}:refund", "order=o-81", "--after", "case-82")
    assert (other.returncode, "takes no `history`" in other.stderr) == (2, True)
    assert without_keys(tmp_path, "run", target, "prompt=x", "--after", "nobody").returncode == 6
