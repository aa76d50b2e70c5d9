"""Every command that perdure prints, pasted into real shells.

Ids and folder names are words there, and never commands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.e2e.test_cli_waiting import AGENTS
from tests.e2e.test_completion import Foreign, Terminal
from tests.servers import forked
from tests.unit.test_shell import read

from perdure.cli import VERBS
from perdure.shell import command

SHELLS = [shell for shell in ("sh", "bash", "zsh", "fish") if shutil.which(shell)]
FOLDER = 'it\'s "here" \\ $(touch PWNED) `touch PWNED` & >PWNED'
MORE = """
@tool(effect="once")
async def book(what: str) -> str:
    return what

@book.compensate(effect="idempotent")
async def _(result: str, what: str) -> None:
    raise ValueError("cannot be undone")

@agent(version="1")
async def booker(run: Run) -> None:
    await book("x")
    raise ValueError("no way")
"""
# Where a command ends inside a sentence of ours.
COMMAND = re.compile(rf"\bperdure (?:{'|'.join(VERBS)})(?: (?:[^\s;,`()'\\]|'[^']*'|\\.)+)*")


def perdure(folder: Path, *args: str) -> str:
    """The output on stdout and stderr."""
    done = forked.run(
        [sys.executable, "-m", "perdure", *args], cwd=folder, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 70, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in many states, whose code and whose journal lie in a folder with that name."""
    folder = tmp_path_factory.mktemp("pasted") / FOLDER
    folder.mkdir()
    (folder / "control.py").write_text(AGENTS + MORE)
    for agent, run_id, *words in (
        ("asker", "asked"),
        ("asker", "late", "expires:=0.001"),
        ("boss", "family"),
        ("doubtful", "doubt"),
        ("careful", "above"),
        ("chat", "talk"),
        ("booker", "failed"),
        ("thinker", "broke", "--budget-calls", "1"),
        ("team", "poor", "--budget-calls", "1"),
        ("thinker", "done"),
        ("chat", "ended"),
        ("chat", "paused"),
    ):
        perdure(folder, "run", f"control.py:{agent}", "--id", run_id, "--no-wait", *words)
    perdure(folder, "cancel", "ended", "--force")
    perdure(folder, "pause", "paused")
    perdure(folder, "undo", "failed", "--yes")
    perdure(folder, "run", "control.py:chat", "--id", "queued", "--detach")
    return folder


@pytest.fixture
def elsewhere(journal: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the journal that a test may change. Its runs were started from the first one's folder."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    whole, copied = apsw.Connection(str(journal / "perdure.db")), apsw.Connection(str(folder / "perdure.db"))
    with copied.backup("main", whole, "main") as backup:
        backup.step()
    whole.close()
    copied.close()
    yield folder
    assert not list(tmp_path.rglob("PWNED"))


def said_about(folder: Path, ids: list[str], *options: str) -> list[str]:
    """The output of every verb that suggests commands, for these runs."""
    said = [perdure(folder, *verb, *options) for verb in (["doctor"], ["list"], ["approvals"], ["verify"], ["list", "--limit", "1"])]
    for run_id in ids:
        if re.search("/[2-9]", run_id):
            continue  # of several children one is enough
        verbs = (
            "why",
            "show",
            "resume",
            "replay",
            "inspect",
            "retry --dry-run",
            "rewind --dry-run --to 2",
            "unpause --add-usd 0.000001",
            "undo --yes",
        )
        said += [perdure(folder, *verb.split(), *options, "--", run_id) for verb in verbs]
        said.append(perdure(folder, "export", "--test", "test $(touch PWNED).py", *options, "--", run_id))
    return said


def check(said: list[str], known: set[str], folder: Path) -> int:
    """Each shell reads each command as the intended words. Returns how many commands contain a hostile name."""
    lines = sorted({found[0] for text in said for line in text.splitlines() for found in COMMAND.finditer(line)})
    meant = [shlex.split(line)[1:] for line in lines]
    for shell in SHELLS:
        scratch = folder / shell
        scratch.mkdir()
        assert read(shell, scratch, lines) == meant
    hostile = [word for words in meant for word in words if "PWNED" in word]
    assert set(hostile) <= known, set(hostile) - known
    return len(hostile)


def targets(folder: Path) -> set[str]:
    names = re.findall(r"async def (\w+)\(run", AGENTS + MORE)
    return {f"{folder}/control.py:{name}" for name in names}


def ids_of(folder: Path) -> list[str]:
    connection = apsw.Connection(str(folder / "perdure.db"))
    ids = [str(run_id) for (run_id,) in connection.execute("SELECT run_id FROM perdure_runs ORDER BY id")]
    connection.close()
    return ids


@pytest.mark.parametrize("named", [False, True], ids=["from the settings", "by --url"])
def test_a_target_and_a_url_with_a_hostile_path_are_words(journal: Path, elsewhere: Path, named: bool, tmp_path: Path) -> None:
    url = f"sqlite:///{elsewhere}/perdure.db"
    said = said_about(elsewhere, ids_of(elsewhere), *(["--url", url] if named else []))
    known = {*targets(journal), url, "test $(touch PWNED).py", str(elsewhere)}
    assert check(said, known, tmp_path) > 30


@pytest.mark.parametrize("suffix", [">PWNED", "'\\';>PWNED;'\"$(touch PWNED) perdure why x;>PWNED"])
def test_an_id_of_a_foreign_journal_is_a_word(journal: Path, elsewhere: Path, suffix: str, tmp_path: Path) -> None:
    foreign = Foreign(elsewhere)
    foreign.rename_runs(suffix)
    foreign.close()
    ids = ids_of(elsewhere)
    assert all(suffix in run_id for run_id in ids)
    url = f"sqlite:///{elsewhere}/perdure.db"
    known = {*ids, *targets(journal), url, "test $(touch PWNED).py"}
    assert check(said_about(elsewhere, ids, "--url", url), known, tmp_path) > 100


def test_an_id_that_looks_like_an_option_is_no_option(elsewhere: Path, tmp_path: Path) -> None:
    option = "--url=sqlite:///PWNED"
    foreign = Foreign(elsewhere)
    foreign.leave_one("perdure_runs", "run_id", option)
    foreign.close()
    commands = [shlex.split(found[0]) for text in said_about(elsewhere, ids_of(elsewhere)) for found in COMMAND.finditer(text)]
    about = [words for words in commands if option in words]
    assert len(about) > 5
    for words in about:
        assert "--" in words[: words.index(option)], words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_command_that_is_pasted_into_an_interactive_shell_is_not_expanded(elsewhere: Path, shell: str, tmp_path: Path) -> None:
    """Some expansions happen only in an interactive shell, such as the expansion of the history."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    run_id = 'a!! b!$ \'c!d\\ "!e" ^f^g $(touch PWNED)'
    foreign = Foreign(elsewhere)
    foreign.leave_one("perdure_runs", "run_id", run_id)
    foreign.close()
    terminal = Terminal(shell, elsewhere, tmp_path / "home")
    try:
        terminal.type("echo before")
        shown = terminal.type(command("show", run_id))
    finally:
        terminal.close()
    assert "pending: anybody" in shown


def test_a_folder_that_is_to_be_made_and_a_file_that_is_to_be_closed_are_words(tmp_path: Path) -> None:
    """Commands that are none of perdure's own."""
    missing = tmp_path / FOLDER
    (tmp_path / "agents.py").write_text(AGENTS)
    made = perdure(tmp_path, "run", "agents.py:chat", "--no-wait", "--url", f"sqlite:///{missing}/perdure.db")
    subprocess.run(["sh"], input=made.partition("create it first: ")[2], cwd=tmp_path, text=True, timeout=60, check=True)
    assert missing.is_dir()
    perdure(tmp_path, "run", "agents.py:chat", "--no-wait", "--url", f"sqlite:///{missing}/perdure.db")
    file = missing / "perdure.db"
    file.chmod(0o644)
    closed = perdure(tmp_path, "doctor", "--url", f"sqlite:///{file}")
    chmod = next(line.partition("→ ")[2] for line in closed.splitlines() if "→ chmod" in line)
    subprocess.run(["sh"], input=chmod, cwd=tmp_path, text=True, timeout=60, check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.rglob("PWNED"))
