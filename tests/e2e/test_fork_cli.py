"""`perdure fork`, `diff` and `whatif` as a person types them, in real processes that are interrupted and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_retry import typed
from tests.servers import forked

SHOP = """
import os, time
from pathlib import Path
from perdure import Call, ReAct, Run, agent, tool
from perdure.models import Answer, Model, Tokens
from perdure.models.messages import Assistant
from perdure.models.prices import Price
from perdure.models.scripted import use

HERE = Path(__file__).parent

def note(word):
    with open(HERE / "ledger", "a") as file:
        file.write(word + "\\n")

@tool(effect="read")
async def look(order: str) -> int:
    note(f"look {order}")
    return 500

@tool(effect="once")
async def pay(order: str, cents: int) -> str:
    note(f"pay {order} {cents}")
    return f"paid {cents}"

@tool(effect="once")
async def odd(order: str) -> str:
    return "done"

@odd.simulate
def _(order: str) -> str:
    open(HERE / "written", "w")
    return "simulated"

@agent(version="1")
async def shop(run: Run, order: str) -> str:
    return await pay(order, await look(order))

@agent(version="1")
async def strange(run: Run, order: str) -> str:
    return await odd(order)

class Cashier(Model):
    async def answer(self, request, call):
        note(f"asked {request.model}")
        if (HERE / "slow").exists():
            note("waiting")
            while (HERE / "slow").exists():
                time.sleep(0.01)
        prompt = request.messages[0].text
        place = sum(isinstance(message, Assistant) for message in request.messages)
        tokens = Tokens(input=1000, output=10)
        if place == 0:
            full = ", in full" if "thorough" in request.system else ""
            return Answer("", (use("look", order=prompt + full),), "tools", tokens=tokens)
        if place == 1:
            cents = 900 if "generous" in request.system and prompt == "o-3" else 500
            return Answer("", (use("pay", order=prompt, cents=cents),), "tools", tokens=tokens)
        return Answer("refused" if "strict" in request.system and prompt == "o-2" else "ok", tokens=tokens)

till = ReAct("till", model=Cashier("cashier", price=Price(input=10, output=0)), tools=[look, pay], instructions=(HERE / "prompt").read_text())
"""


class Desk:
    """A folder with an agent and its journal, and the program run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/perdure.db"
        (folder / "shop.py").write_text(SHOP)
        (folder / "prompt").write_text("be kind")

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return forked.Popen([sys.executable, "-m", "perdure", *words], cwd=self.folder, env=env, **streams)

    def __call__(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def json(self, *words: str) -> Any:
        code, out, err = self(*words, "--json")
        assert code in (0, 3, 7), err
        lines = [json.loads(line) for line in out.splitlines()]
        return lines if words[0] == "whatif" else lines[0]

    @property
    def ledger(self) -> list[str]:
        file = self.folder / "ledger"
        return file.read_text().splitlines() if file.exists() else []

    def journal(self) -> bytes:
        """All events of all runs, in the bytes that a person can see."""
        runs = [json.loads(line)["run_id"] for line in self("list", "--json")[1].splitlines()]
        return "".join(self("events", one, "--json")[1] for one in sorted(runs)).encode()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def shop(desk: Desk) -> Desk:
    assert desk("run", "shop.py:shop", "order=o-7", "--id", "r")[0] == 0
    return desk


@pytest.fixture
def till(desk: Desk) -> Desk:
    """Five recorded runs of a ReAct agent."""
    for number in range(5):
        code, _, err = desk("run", "shop.py:till", f"prompt=o-{number}", "--id", f"r-{number}")
        assert code == 0, err
    (desk.folder / "ledger").unlink()
    return desk


# -- fork -------------------------------------------------------------------------------------------------------------
def test_a_fork_shows_the_exact_call_and_the_diff_and_changes_nothing(shop: Desk) -> None:
    before, ledger = shop.journal(), shop.ledger
    code, out, err = shop("fork", "r", "--edit", "1=700")
    assert (code, err) == (0, "")
    assert 'would now call pay: {"cents": 700, "order": "o-7"}' in out
    assert '- 2: pay(cents=500, order="o-7") → "paid 500"\n+ 2: pay(cents=700, order="o-7") → no answer\n' in out
    assert (shop.journal(), shop.ledger) == (before, ledger)


def test_a_fork_for_programs_and_as_a_page(shop: Desk) -> None:
    found = shop.json("fork", "r", "--input", '{"order": "o-8"}', "--reads", "--html", "page.html")
    assert (found["status"], found["would_call"][0]["args"]) == ("stopped", {"order": "o-8", "cents": 500})
    assert shop.ledger[-1] == "look o-8"
    assert "order=&quot;o-8&quot;" in (shop.folder / "page.html").read_text()
    code, _, err = shop("fork", "r", "--html", "page.html")
    assert (code, "is there already" in err) == (2, True)


def test_prepared_answers_are_read_from_a_file(shop: Desk) -> None:
    (shop.folder / "answers.json").write_text('[{"tool": "pay", "args": {"cents": 700}, "result": "fine"}]')
    assert shop.json("fork", "r", "--edit", "1=700", "--answers", "answers.json")["output"] == "fine"


def test_why_of_a_stored_fork_names_the_live_fork_with_the_same_changes(shop: Desk) -> None:
    def live(run_id: str) -> tuple[str, str]:
        return next((step["command"], step["does"]) for step in shop.json("why", run_id)["next"] if "--live" in step["command"])

    assert shop("fork", "r", "--edit", "1=700", "--id", "f")[0] == 0
    assert live("f") == ("perdure fork r --at 3 --edit 1=700 --live", "the same with effects: it shows first what may happen twice")
    assert "--edit and --input as the rehearsal (perdure why f names them)" in shop("resume", "f")[2]
    # The command works as it is.
    code, out, err = shop(*live("f")[0].split()[1:], "--id", "l", "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith("run l goes on from event 3 of run r, WITH effects")
    assert shop("fork", "r", "--input", '{"order": "o 8"}', "--id", "g")[0] == 0
    assert """--input '{"order":"o 8"}' --live""" in live("g")[0]
    # A value that is too long for a command, or an edit that the agent never got, is left to the person.
    assert shop("fork", "r", "--input", json.dumps({"order": "o" * 200}), "--edit", "1=700", "--at", "2", "--id", "h")[0] == 0
    command, does = live("h")
    assert command == "perdure fork r --at 2 --edit 1=JSON --input JSON --live"
    assert does.startswith("the same with effects (put in the edited result of call 1 and its input again)")


def test_a_stored_fork_is_a_run_that_every_page_reads_and_nothing_drives(shop: Desk) -> None:
    ledger = shop.ledger
    code, out, err = shop("fork", "r", "--edit", "1=700", "--id", "f", "--by", "ann", "--reason", "what if")
    assert (code, err) == (0, "")
    assert out.startswith("a rehearsal, stored as run f: fork of run r at event 3, agent shop@1\nstopped\nwould now call pay: ")
    code, out, _ = shop("show", "f")
    assert "fork     run r at event 3, made by ann: a rehearsal, and nothing in it has touched the world" in out
    assert 'status   waiting: nothing: it would now make call 2: pay({"cents":700,"order":"o-7"})' in out
    assert "a fork of run r at event 3, made by ann: a rehearsal, and nothing in it has touched the world" in shop("why", "f")[1]
    assert "call 1 look gets 700 (edited by a person); no attempt was made" in shop("events", "f")[1]
    assert "the rehearsal stops here as waiting: nothing: it would now make call 2: pay" in shop("events", "f")[1]
    assert "released" not in shop("events", "f")[1].partition("forked run r")[2]
    assert "rehearsal, fork of r; nothing: it would now make" in shop("list")[1]
    assert shop("retry", "f", "--dry-run")[2].startswith("perdure: run f is a rehearsal, a fork of run r: no worker drives it")
    assert "ann forked run r at event 3, with another result of call 1" in shop("trace", "f")[1]
    assert "agent waits for call 2 pay(cents=700, order='o-7')" in shop("inspect", "f")[1]
    assert shop("replay", "f")[0] == 0
    assert shop("verify")[0] == 0
    assert shop("diff", "r", "f")[0] == 7
    assert shop("export", "f", "-o", "f.jsonl")[0] == 0
    assert shop("import", "f.jsonl", "--url", "sqlite:///other.db")[0] == 0
    assert "nothing in it has touched the world" in shop("show", "f", "--url", "sqlite:///other.db")[1]
    for words in (
        ("resume",),
        ("cancel",),
        ("signal", "x"),
        ("rewind", "--to", "2", "--yes"),
        ("fork", "--live", "--yes"),
        ("undo", "--yes"),
    ):
        code, _, err = shop(words[0], "f", *words[1:])
        assert code != 0
        assert len(err.splitlines()) == 1, err
    assert shop.ledger == ledger
    assert shop("prune", "--specimen", "f")[0] == 0
    assert shop("show", "f")[0] != 0


def test_a_live_fork_lists_what_may_happen_twice_and_needs_a_yes(shop: Desk) -> None:
    before = shop.journal()
    words = ("fork", "r", "--edit", "1=700", "--live", "--id", "f")
    code, out, _ = shop(*words, "--dry-run")
    assert code == 0
    assert "run f goes on from event 3 of run r, WITH effects, with version 1, as before" in out
    assert 'will run first:\n    call 3: pay({"cents":700,"order":"o-7"})' in out
    assert "may happen twice:\n    call 2 pay (once) has happened in r: its result is used if the fork makes the same call" in out
    assert shop.json(*words, "--dry-run")["twice"]
    code, out, err = shop(*words)
    assert (code, out) == (2, "")
    assert "this is no terminal" in err
    assert shop.journal() == before
    code, out, err = shop(*words, "--yes")
    assert code == 0
    assert "may happen twice:" in err, "the list is printed also without a question"
    assert out.startswith("run f is queued: it goes on from event 3 of run r; a worker goes on with it, or here: perdure resume f")
    assert "live fork of r" in shop("list")[1]
    assert [line["fork_of"] for line in map(json.loads, shop("list", "--json")[1].splitlines())] == ["r", None]
    code, _, err = shop(*words, "--yes")
    assert (code, "run f exists" in err) == (2, True)
    assert shop.ledger == ["look o-7", "pay o-7 500"]
    assert shop("resume", "f")[1] == "paid 700\n"
    assert shop.ledger == ["look o-7", "pay o-7 500", "pay o-7 700"]
    assert shop("verify")[0] == 0
    assert shop("events", "r", "--json")[1].encode() in before
    for wrong, said in (
        (("--answers", "answers.json"), "a prepared answer would be an effect that never happened"),
        (("--reads",), "leave --answers and --reads out"),
        (("--set-model", "other"), "set the model in the code"),
        (("--html", "page.html"), "--html shows a rehearsal"),
    ):
        code, _, err = shop("fork", "r", "--live", *wrong, "--yes")
        assert (code, said in err) == (2, True), err
    assert "goes with --live only" in shop("fork", "r", "--yes")[2]


@pytest.mark.parametrize("answer", ["\n", "y\n"])
def test_on_a_terminal_a_live_fork_asks_and_no_is_the_default(shop: Desk, answer: str) -> None:
    code, said = typed(shop, answer, "fork", "r", "--edit", "1=700", "--live", "--id", "f", "--url", "sqlite:///perdure.db")
    assert said.index("may happen twice:") < said.index("make run f, with effects? [y/N]")
    assert (code, shop("show", "f")[0]) == ((2, 6) if answer == "\n" else (0, 0)), said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("r", "--at", "99"), 2, "run r has no event 99: its events are 1 to 7"),
        (("r", "--at", "7"), 2, "it has ended there; fork it at event 6 or before"),
        (("r", "--edit", "1"), 2, "write CALL=JSON"),
        (("r", "--edit", "x=1"), 2, "write CALL=JSON"),
        (("r", "--edit", "1={"), 2, "--edit 1 is not valid JSON"),
        (("r", "--edit", "1=1", "--edit", "1=2"), 2, "call 1 is edited twice"),
        (("r", "--edit", "9=1"), 2, "run r has no call 9"),
        (("r", "--edit", '1="much"'), 2, "does not fit look: Input should be a valid integer"),
        (("r", "--input", "[1]"), 2, "the arguments of agent shop by name"),
        (("r", "--input", "[1]", "--live", "--yes"), 2, "the arguments of agent shop by name"),
        (("r", "--live", "--yes", "--id", "r"), 2, "run r exists; nothing was written: choose another id for the fork"),
        (("r", "--input", "{"), 2, "--input is not valid JSON"),
        (("r", "--answers", "missing.json"), 2, "--answers missing.json: No such file"),
        (("r", "shop.py:strange"), 2, "run r belongs to agent 'shop', but the target is agent 'strange'"),
        (("r", "shop.py:shop", "more"), 2, "give one run and at most one target"),
        (("r", "--set-model", "x"), 2, "agent shop is not a ReAct agent"),
        (("r", "--input", '{"order": "o-8"}', "--at", "4"), 7, "at event 3 the journal has call 1"),
        (("nothing",), 6, "there is no run nothing"),
    ],
)
def test_a_wrong_fork_is_one_clear_line(shop: Desk, words: tuple[str, ...], code: int, said: str) -> None:
    found, out, err = shop("fork", *words)
    assert (found, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_code_that_no_longer_imports_is_one_clear_line(shop: Desk) -> None:
    (shop.folder / "shop.py").write_text("import nothing_of_that_name\n" + SHOP)
    code, out, err = shop("fork", "r", "shop.py:shop")
    assert (code, out) == (2, "")
    assert "nothing_of_that_name" in err.splitlines()[0]
    assert "Traceback" not in err


def test_a_stand_in_that_writes_a_file_is_refused_in_a_process_without_a_worker(desk: Desk) -> None:
    assert desk("run", "shop.py:strange", "order=o-7", "--id", "r")[0] == 0
    found = desk.json("fork", "r", "--input", '{"order": "o-8"}')
    assert "an agent may not open a file for writing" in found["diff"]["lines"][0]["right"].get("error", "")
    assert not (desk.folder / "written").exists()


def test_a_specimen_is_forked_and_rehearsed_and_stays_as_it_is(shop: Desk) -> None:
    assert shop("export", "r", "-o", "r.perdure.jsonl")[0] == 0
    there = ("--url", "sqlite:///there.db")
    code, _, err = shop("import", "r.perdure.jsonl", *there)
    assert code == 0, err
    before, ledger = shop("events", "r", "--json", *there), shop.ledger
    assert shop.json("fork", "r", "shop.py:shop", "--edit", "1=700", *there)["would_call"][0]["args"] == {"order": "o-7", "cents": 700}
    assert shop("whatif", "shop.py:shop", *there)[0] == 0
    assert shop("verify", "r", *there)[0] == 0
    assert (shop("events", "r", "--json", *there), shop.ledger) == (before, ledger)


# -- diff -------------------------------------------------------------------------------------------------------------
def test_a_diff_ends_with_7_if_the_runs_differ(shop: Desk) -> None:
    shop("run", "shop.py:shop", "order=o-8", "--id", "s")
    code, out, _ = shop("diff", "r", "s", "--html", "page.html")
    assert (code, '+ 1: look(order="o-8") → 500' in out) == (7, True)
    assert (shop.folder / "page.html").stat().st_mode & 0o077 == 0
    assert shop("diff", "r", "r")[0] == 0
    assert shop.json("diff", "r", "s")["same_calls"] == 0
    assert shop("diff", "r", "nothing")[0] == 6


# -- whatif -----------------------------------------------------------------------------------------------------------
def verdicts(lines: list[Any]) -> dict[str, str]:
    return {line["run_id"]: line["verdict"] for line in lines if line["kind"] == "run"}


def test_the_same_code_asks_no_model_and_finds_no_difference(till: Desk) -> None:
    before = till.journal()
    code, out, err = till("whatif", "shop.py:till")
    assert (code, err) == (0, "")
    assert re.search(r"same path +5\n", out)
    assert (till.ledger, till.journal()) == ([], before)


def test_runs_on_postgresql_are_rehearsed_too(desk: Desk, postgres_url: str) -> None:
    where = ("--url", postgres_url)
    for number in (2, 3):
        assert desk("run", "shop.py:till", f"prompt=o-{number}", "--id", f"r-{number}", *where)[0] == 0
    (desk.folder / "ledger").unlink()
    assert desk("whatif", "shop.py:till", *where)[0] == 0
    (desk.folder / "prompt").write_text("be generous and strict")
    assert verdicts(desk.json("whatif", "shop.py:till", *where)) == {"r-2": "different", "r-3": "would_call"}
    assert desk.json("fork", "r-3", "shop.py:till", "--reads", *where)["would_call"][0]["args"] == {"order": "o-3", "cents": 900}
    assert desk("diff", "r-2", "r-3", *where)[0] == 7
    assert set(desk.ledger) == {"asked cashier"}


def test_a_changed_prompt_shows_what_changes_and_no_tool_is_called(till: Desk) -> None:
    (till.folder / "prompt").write_text("be generous and strict")
    before = till.journal()
    lines = till.json("whatif", "shop.py:till")
    assert verdicts(lines) == {"r-0": "same", "r-1": "same", "r-2": "different", "r-3": "would_call", "r-4": "same"}
    other = next(line for line in lines if line.get("run_id") == "r-3")
    assert [(call["name"], call["args"]) for call in other["would_call"]] == [("pay", {"order": "o-3", "cents": 900})]
    summary = lines[-1]
    assert (summary["same"], summary["different"], summary["would_call"], summary["left_out"]) == (3, 1, 1, 0)
    assert (summary["before"]["usd_micros"], summary["after"]["usd_micros"], summary["spent_usd_micros"]) == (150_000, 140_000, 140_000)
    assert set(till.ledger) == {"asked cashier"}
    assert till.journal() == before
    assert till("whatif", "shop.py:till")[0] == 7
    code, out, _ = till("whatif", "shop.py:till", "--ignore-text")
    assert (code, "different outcome           0" in out) == (7, True)


def test_a_changed_prompt_asks_about_an_order_that_was_not_recorded_and_calls_no_read(till: Desk) -> None:
    (till.folder / "prompt").write_text("be thorough")
    lines = till.json("whatif", "shop.py:till")
    assert set(verdicts(lines).values()) == {"would_call"}
    assert lines[0]["would_call"][0]["args"] == {"order": "o-4, in full"}
    assert set(till.ledger) == {"asked cashier"}
    assert set(verdicts(till.json("whatif", "shop.py:till", "--reads")).values()) == {"other_path"}
    assert set(till.ledger) == {"asked cashier", *(f"look o-{number}, in full" for number in range(5))}


def test_another_model_is_asked_and_prepared_answers_let_the_run_go_on(till: Desk) -> None:
    (till.folder / "prompt").write_text("be generous")
    (till.folder / "answers.json").write_text('[{"tool": "pay", "result": "paid 900"}]')
    lines = till.json("whatif", "shop.py:till", "--answers", "answers.json")
    assert verdicts(lines) == {f"r-{number}": "would_call" if number == 3 else "same" for number in range(5)}
    assert next(line for line in lines if line.get("run_id") == "r-3")["now"] == 'succeeded with "ok"'
    assert till("whatif", "shop.py:till", "--answers", "answers.json")[0] == 7
    (till.folder / "prompt").write_text("be kind")
    till.json("whatif", "shop.py:till", "--set-model", "other", "--limit", "1")
    assert till.ledger[-1] == "asked other"


def test_runs_are_chosen_by_age_status_and_number(till: Desk) -> None:
    def chosen(*words: str) -> int:
        return len(verdicts(till.json("whatif", "shop.py:till", *words)))

    queries = ("since:1d", "since:2999-01-01", "status:failed", "tenant:other", "agent:till")
    assert [chosen("--where", query) for query in queries] == [5, 0, 0, 0, 5]
    assert chosen("--limit", "2") == 2
    code, _, err = till("whatif", "shop.py:till", "--where", "agent:shop")
    assert (code, "the target is agent till" in err) == (2, True)
    code, _, err = till("whatif", "shop.py")
    assert (code, "has 3 agents" in err) == (2, True)
    assert till("whatif", "shop.py", "--agent", "till")[0] == 0


@pytest.mark.parametrize("budget", ["nan", "inf"])
def test_a_budget_is_a_finite_number(till: Desk, budget: str) -> None:
    code, out, err = till("whatif", "shop.py:till", "--budget", budget)
    assert (code, out, err) == (2, "", f"perdure: --budget {budget}: a number of dollars, such as 2.50\n")


def test_a_budget_leaves_runs_out_and_a_larger_one_goes_on(till: Desk) -> None:
    (till.folder / "prompt").write_text("be brief")
    code, out, err = till("whatif", "shop.py:till", "--budget", "0.07", "--state", "state")
    assert (code, "left out: the budget of $0.07 is used up; the same command goes on" in err) == (3, True), out + err
    asked = len(till.ledger)
    assert asked <= 7
    assert till("whatif", "shop.py:till", "--budget", "1", "--state", "state")[0] == 0
    code, out, _ = till("whatif", "shop.py:till", "--budget", "1", "--state", "state")
    assert re.search(r"same path +5\n", out)


def test_an_interrupted_command_goes_on_where_it_was(till: Desk) -> None:
    (till.folder / "prompt").write_text("be brief")
    assert till("whatif", "shop.py:till", "--state", "state", "--limit", "2")[0] == 0
    done = len(till.ledger)
    (till.folder / "slow").touch()
    process = till.start("whatif", "shop.py:till", "--state", "state")
    until(lambda: "waiting" in till.ledger)
    process.send_signal(signal.SIGINT)
    (till.folder / "slow").unlink()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "left out: it was interrupted; the same command goes on" in err
    assert re.search(r"same path +[2-4]\n", out)
    assert till("whatif", "shop.py:till", "--state", "state")[0] == 0
    assert len(till.ledger) > done
    before = till.ledger
    code, out, _ = till("whatif", "shop.py:till", "--state", "state")
    assert (code, till.ledger) == (0, before)


def test_a_killed_command_leaves_whole_verdicts_and_half_a_line_is_dropped(till: Desk) -> None:
    (till.folder / "prompt").write_text("be brief")
    assert till("whatif", "shop.py:till", "--state", "state", "--limit", "2")[0] == 0
    (till.folder / "slow").touch()
    process = till.start("whatif", "shop.py:till", "--state", "state")
    until(lambda: "waiting" in till.ledger)
    process.kill()
    process.communicate()
    (till.folder / "slow").unlink()
    with open(till.folder / "state", "ab") as file:
        file.write(b'{"run_id": "r-0", "verd')
    assert till("whatif", "shop.py:till", "--state", "state")[0] == 0
    lines = (till.folder / "state").read_text().splitlines()
    assert sorted(json.loads(line)["run_id"] for line in lines[1:]) == [f"r-{number}" for number in range(5)]


@pytest.mark.parametrize("change", ["prompt", "options", "damage", "foreign"])
def test_verdicts_about_another_question_are_not_taken(till: Desk, change: str) -> None:
    state = till.folder / "state"
    if change == "foreign":
        state.write_text("name,age\nann,7\n")
    else:
        assert till("whatif", "shop.py:till", "--state", "state")[0] == 0
    if change == "prompt":
        (till.folder / "prompt").write_text("be brief")
    if change == "damage":
        state.write_text(state.read_text().replace('"verdict":"same"', '"verdict":"fine"'))
    before = state.read_bytes()
    code, out, err = till("whatif", "shop.py:till", "--state", "state", *(("--reads",) if change == "options" else ()))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "name a new file" in err
    assert state.read_bytes() == before


def test_a_run_whose_input_no_longer_fits_is_told_and_the_others_go_on(shop: Desk) -> None:
    file = shop.folder / "shop.py"
    file.write_text(file.read_text().replace("async def shop(run: Run, order: str)", "async def shop(run: Run, order: int)"))
    lines = shop.json("whatif", "shop.py:shop")
    assert lines[0]["verdict"] == "failed"
    assert "does not fit this code" in lines[0]["now"]
    assert shop("whatif", "shop.py:shop")[0] == 7


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_changed_payment_counts_also_if_a_stand_in_answers_it(till: Desk) -> None:
    shop = till.folder / "shop.py"
    shop.write_text(
        SHOP.replace(
            '@tool(effect="once")\nasync def odd',
            "@pay.simulate\ndef _(cents: int) -> str:\n    return f'paid {cents}'\n\n@tool(effect=\"once\")\nasync def odd",
        )
    )
    assert till("whatif", "shop.py:till")[0] == 0
    (till.folder / "prompt").write_text("be generous")
    assert verdicts(till.json("whatif", "shop.py:till"))["r-3"] == "would_call"
    code, out, _ = till("whatif", "shop.py:till")
    assert (code, 'would call pay(cents=900, order="o-3"); succeeded with "ok"' in out) == (7, True), out
    assert set(till.ledger) == {"asked cashier"}
