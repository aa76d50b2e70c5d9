"""TAB in a real shell, with a journal and a folder that another person has made.

The shell puts a completion on the command line as it is, and executes it when the user presses Enter. So a run id must
not act as a command. And TAB runs no command of the user: so a settings file in the current folder must not choose the
server that TAB asks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.e2e.test_cli_waiting import AGENTS as WAITING
from tests.servers import forked
from tests.servers.hostile import HostilePostgres

SHELLS = ("bash", "zsh", "fish")
PROMPT = "READY> "
HOSTILE = (
    "$(touch PWNED)",
    "$(>PWNED)",
    "`>PWNED`",
    "r;>PWNED",
    "r|>PWNED",
    "r&>PWNED",
    "r>PWNED",
    "r\n>PWNED\n",
    "r\nplain,$(>PWNED)",
    "r\nplain\n$(>PWNED)\n_",
    "r\r>PWNED",
    "r\t$(>PWNED)",
    "r,$(>PWNED)",
    "r $(>PWNED)",
    "r'",
    'r"',
    "r\\",
    "r*",
    "r?",
    "r{a,b}",
    "r!!",
    "~root",
    "-r",
    "--url=postgresql://example.invalid/x",
    "/r",
    "r/",
    "r//1",
    "r/1/",
    "r/../x",
    "r/$(>PWNED)",
    "r/1\n",
    "r\n",
    "r\x1b[31m",
    "r\x7f",
    "r\u202e",
    "r\u200b",
    "rä",
    "r" * 201,
    "",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal with a run that waits for an approval, and one with a child."""
    (tmp_path / "agents.py").write_text(WAITING)
    for agent, run_id in (("asker", "r-1"), ("boss", "f:2@x+y")):
        perdure(tmp_path, "run", f"agents.py:{agent}", "--id", run_id, "--no-wait")
    return tmp_path


def perdure(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure", *args]
    return forked.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False)


def offered(folder: Path, shell: str, verb: str, *given: str, incomplete: str = "", **environ: str) -> list[str]:
    """What click's protocol gives to the shell.

    One line `type,value`, and for zsh one line each for type, value and help.
    """
    words = " ".join(["perdure", verb, *given, incomplete])
    at = incomplete if shell == "fish" else str(2 + len(given))
    done = perdure(folder, _PERDURE_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=at, **environ)
    assert done.stderr == ""
    if done.stdout == "\n":
        return []
    lines = done.stdout.split("\n")
    assert lines.pop() == ""
    if shell != "zsh":
        assert all(line.startswith("plain,") for line in lines), lines
        return [line.removeprefix("plain,") for line in lines]
    assert lines[0::3] == ["plain"] * (len(lines) // 3), lines
    assert lines[2::3] == ["_"] * (len(lines) // 3), lines
    return lines[1::3]


class Foreign:
    """The file of a journal that another user controls: all triggers are gone, and the rows have any content."""

    def __init__(self, folder: Path) -> None:
        self._connection = apsw.Connection(str(folder / "perdure.db"))
        for (name,) in list(self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")):
            self._connection.execute(f"DROP TRIGGER {name}")

    def add(self, table: str, column: str, values: tuple[str, ...]) -> None:
        """A copy of the table's first row for each value."""
        columns = [str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({table})")]
        others = ", ".join(name for name in columns if name not in ("id", column))
        for value in values:
            self._connection.execute(
                f"INSERT INTO {table} ({column}, {others}) SELECT ?, {others} FROM {table} ORDER BY id LIMIT 1", (value,)
            )

    def leave_one(self, table: str, column: str, value: str) -> None:
        (first,) = next(iter(self._connection.execute(f"SELECT min(id) FROM {table}")))
        self._connection.execute(f"DELETE FROM {table} WHERE id <> ?", (first,))
        self._connection.execute(f"UPDATE {table} SET {column} = ?", (value,))

    def rename_runs(self, suffix: str) -> None:
        """Rename each run and its family: add this text to the part before the first slash."""
        named = "iif(instr({0}, '/'), substr({0}, 1, instr({0}, '/') - 1) || ?1 || substr({0}, instr({0}, '/')), {0} || ?1)"
        self._connection.execute(f"UPDATE perdure_runs SET run_id = {named.format('run_id')}", (suffix,))
        self._connection.execute(f"UPDATE perdure_runs SET parent = {named.format('parent')} WHERE parent IS NOT NULL", (suffix,))

    def forge_approval(self, real: str, forged: str) -> None:
        """The approval under another id, in the journal too."""
        self._connection.execute("UPDATE perdure_approvals SET approval = ? WHERE approval = ?", (forged, real))
        self._connection.execute("UPDATE perdure_events SET data = replace(data, ?, ?)", (real, forged))

    def close(self) -> None:
        self._connection.close()


# -- the completions --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shell", SHELLS)
def test_only_what_is_an_id_is_offered_as_a_run(folder: Path, shell: str) -> None:
    foreign = Foreign(folder)
    foreign.add("perdure_runs", "run_id", (*HOSTILE, "r-1/undo", "r-1/undo/3/12"))
    foreign.close()
    ours = {"r-1", "f:2@x+y", "f:2@x+y/1", "f:2@x+y/2", "r-1/undo", "r-1/undo/3/12"}
    assert set(offered(folder, shell, "why")) == ours
    assert set(offered(folder, shell, "resume", incomplete="r")) == {one for one in ours if one.startswith("r")}
    assert offered(folder, shell, "why", incomplete="$") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_only_what_is_an_id_is_offered_as_an_approval(folder: Path, shell: str) -> None:
    ours = set(offered(folder, shell, "approve"))
    assert len(ours) == 3
    assert all(re.fullmatch("ap-[0-9a-f]{20}", one) for one in ours)
    foreign = Foreign(folder)
    foreign.add("perdure_approvals", "approval", HOSTILE)  # which the journal does not bear out: nothing is said of them either
    forged = sorted(ours)[0]
    foreign.forge_approval(forged, "ap-$(>PWNED)")
    foreign.close()
    assert set(offered(folder, shell, "approve")) == ours - {forged}
    assert set(offered(folder, shell, "reject", incomplete="ap-")) == ours - {forged}


# -- a real shell -------------------------------------------------------------------------------------------------------------
# How each shell is started, and how completion is switched on in it.
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(perdure completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(perdure completion zsh)"'),
    "fish": (["fish", "--no-config", "-i", "-C", f"function fish_prompt; echo '{PROMPT}'; end"], "perdure completion fish | source"),
}
# The terminal becomes the terminal of the shell's own session, like a terminal window.
LEADER = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class Terminal:
    """An interactive shell on its own terminal, with completion enabled as the page of `perdure completion` says."""

    def __init__(self, shell: str, folder: Path, home: Path) -> None:
        self._ours, theirs = os.openpty()
        os.set_blocking(self._ours, False)
        program = home / "bin" / "perdure"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m perdure "$@"\n')
        program.chmod(0o755)
        words, switch_on = STARTS[shell]
        env = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PS1": PROMPT,
            "TERM": "xterm",
            "NO_COLOR": "1",
        }
        command = [sys.executable, "-c", LEADER, *words]
        self._process = subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.shown = ""
        self._until(PROMPT)
        self.type(switch_on)

    def type(self, keys: str) -> str:
        """Type the keys and Enter. Returns the screen after the command."""
        begins = len(self.shown)
        # The echo of the typed text has the quotes, and the output of the command has not.
        os.write(self._ours, f"{keys}\recho DO''NE\r".encode())
        self._until("DONE", begins)
        return self.shown[begins:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def _until(self, text: str, begins: int = 0) -> None:
        deadline_s = time.monotonic() + 60
        while text not in self.shown[begins:]:
            assert time.monotonic() < deadline_s, self.shown
            try:
                self.shown += os.read(self._ours, 65536).decode("utf-8", "replace")
            except BlockingIOError:
                time.sleep(0.01)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here")
    return str(request.param)


def test_tab_completes_a_run_id_in_a_real_shell(folder: Path, shell: str, tmp_path: Path) -> None:
    """Or the next test would pass because nothing is completed at all."""
    terminal = Terminal(shell, folder, tmp_path / "home")
    try:
        shown = terminal.type("perdure why r\t")
    finally:
        terminal.close()
    assert "run r-1  asker@1" in shown


@pytest.mark.parametrize("run_id", ["$(touch PWNED)", "r;>PWNED"])
def test_a_run_id_of_a_foreign_journal_is_not_executed_by_tab_and_enter(folder: Path, shell: str, run_id: str, tmp_path: Path) -> None:
    foreign = Foreign(folder)
    foreign.leave_one("perdure_runs", "run_id", run_id)
    foreign.close()
    terminal = Terminal(shell, folder, tmp_path / "home")
    try:
        shown = terminal.type("perdure why \t")
    finally:
        terminal.close()
    assert not (folder / "PWNED").exists()
    assert "Missing argument 'RUN'" in shown


# -- a server that a settings file names -----------------------------------------------------------------------------------------
@pytest.fixture
def server() -> Iterator[HostilePostgres]:
    with HostilePostgres("password") as hostile:
        yield hostile


@pytest.mark.parametrize("verb", ["why", "approve"])
@pytest.mark.parametrize("file", ["perdure.toml", "pyproject.toml"])
def test_tab_connects_to_no_server_that_a_settings_file_names(tmp_path: Path, server: HostilePostgres, file: str, verb: str) -> None:
    table = "[tool.perdure]\n" if file == "pyproject.toml" else ""
    for url in (server.url, server.url.replace("postgresql:", "postgres:")):
        (tmp_path / file).write_text(f'{table}url = "{url}"\n')
        assert offered(tmp_path, "bash", verb, PGPASSWORD="hunter2") == []
    assert server.connections == 0


def test_tab_asks_the_server_that_the_user_names(tmp_path: Path, server: HostilePostgres) -> None:
    assert offered(tmp_path, "bash", "why", PERDURE_URL=server.url, PGPASSWORD="hunter2") == []
    asked = server.connections
    assert asked
    assert offered(tmp_path, "bash", "why", "--url", server.url, PGPASSWORD="hunter2") == []
    assert server.connections > asked


def test_tab_reads_the_file_that_a_settings_file_names(folder: Path) -> None:
    (folder / "perdure.db").rename(folder / "mine.db")
    (folder / "perdure.toml").write_text('url = "sqlite:///mine.db"\n')
    assert "r-1" in offered(folder, "bash", "why")
