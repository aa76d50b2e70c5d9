"""Suggested commands: in every shell, each word has its original text, and nothing else is executed."""

from __future__ import annotations

import ast
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import perdure
from perdure.agents.plan.follow import Undone
from perdure.cli import VERBS
from perdure.shell import command, quote, with_options

SOURCES = Path(perdure.__file__).parent
NASTY = (
    *(
        "",
        " ",
        "a b",
        "$(touch PWNED)",
        "`touch PWNED`",
        "a;touch PWNED",
        "a&touch PWNED",
        "a|touch PWNED",
        "a>PWNED",
        "#x",
        "a#b",
        "~",
        "~root",
    ),
    *(
        "'",
        "''",
        "'a",
        "a'",
        "\\",
        "\\\\",
        "a\\",
        "\\'",
        "'\\",
        "\\'\";touch PWNED;#",
        "'\"'\"'",
        '"',
        '"$(touch PWNED)"',
        "!",
        "!!",
        "a!b",
        "!$",
    ),
    *(
        "*",
        "?",
        "[a]",
        "{a,b}",
        "$x",
        "${x}",
        "$'x'",
        "%self",
        "%1",
        "^a",
        "=ls",
        "a=~",
        "a:~",
        "(a)",
        "<a",
        "-",
        "--",
        "-x",
        "--url=x",
        "@x",
    ),
    *(
        "perdure why x",
        "x perdure why y",
        "'perdure why 'x",
        "perdure list",
        "a perdure resume $(touch PWNED)",
        "é",
        "a\u3000b",
        "日本",
        "%s",
        "\\n",
    ),
)


@pytest.fixture(params=["sh", "bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here")
    return str(request.param)


def read(shell: str, folder: Path, lines: list[str]) -> list[list[str]]:
    """The words that `perdure` is given by each of these lines, in this shell."""
    log = folder / f"words of {shell}"
    program = folder / "bin" / "perdure"
    program.parent.mkdir(exist_ok=True)
    # Words end with one NUL, and a command with an empty record that no word is: \1.
    program.write_text(f"#!/bin/sh\nfor word in \"$@\"; do printf '%s\\0' \"$word\"; done >>'{log}'; printf '\\1\\0' >>'{log}'\n")
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    script = "\n".join(lines) + "\n"
    done = subprocess.run([shell], input=script, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "PWNED").exists()
    told = log.read_text().split("\1\0")
    assert told.pop() == ""
    return [one.split("\0")[:-1] for one in told]


def words_of_chance(count: int) -> list[str]:
    """Random words of characters that shells interpret, the same in every test run."""
    chance = random.Random(14)
    letters = "'\"\\$`!;&|<>(){}[]*?~#=%^@+-:/., aé"
    return ["".join(chance.choices(letters, k=chance.randint(1, 9))) for _ in range(count)]


def test_every_shell_reads_the_words_that_were_meant(shell: str, tmp_path: Path) -> None:
    words = [*NASTY, *words_of_chance(150)]
    assert read(shell, tmp_path, [f"perdure {quote(word)} {quote(word)}" for word in words]) == [[word, word] for word in words]


def test_options_that_are_added_later_leave_the_words_as_they_were(shell: str, tmp_path: Path) -> None:
    """`--url` is put into the finished text of an error, which must not end the quotes of a word."""
    words = [*NASTY, *words_of_chance(150)]
    url = "sqlite:////it's a $(touch PWNED) perdure why x/perdure.db"
    sentences = [with_options(f"{command('cancel', word)} --force", f" --url {quote(url)}") for word in words]
    for word, seen in zip(words, read(shell, tmp_path, sentences), strict=True):
        guard = ["--"] if word.startswith("-") else []
        plain = [word, "--url", url] if quote(word) == word and not guard else ["--url", url, *guard, word]
        assert seen == ["cancel", *plain, "--force"]


def test_a_backslash_stands_outside_of_the_quotes_since_fish_reads_it_inside() -> None:
    assert quote("a\\b c") == "'a'\\\\'b c'"
    assert quote("it's") == "'it'\\''s'"


def test_a_word_that_looks_like_an_option_is_none() -> None:
    assert command("why", "-x") == "perdure why -- -x"
    assert command("why", "--url=postgresql://example.invalid/x") == "perdure why -- --url=postgresql://example.invalid/x"
    assert command("signal", "r", "--by") == "perdure signal -- r --by"


def test_plain_words_are_not_quoted() -> None:
    assert command("resume", "order-81/4", "/srv/agents.py:shop") == "perdure resume order-81/4 /srv/agents.py:shop"
    assert command("resume", "user:17@x+y=z.1", "FILE.py:shop") == "perdure resume user:17@x+y=z.1 FILE.py:shop"


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\nb", "a\rb", "a\x15b", "a\x00b", "a\u202eb", "a\u200bb", "a\x7fb", "a\udcffb"])
def test_what_a_terminal_acts_on_is_shown_as_its_escape(text: str) -> None:
    quoted = quote(text)
    assert quoted.isprintable()
    assert quoted == quote(text.encode("unicode_escape").decode("ascii"))


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("first: perdure why r; then perdure cancel r --force", "first: perdure why r --url U; then perdure cancel r --url U --force"),
        ("end it (perdure cancel r) and start anew", "end it (perdure cancel r --url U) and start anew"),
        ("perdure resume r /a/b.py:shop --adopt", "perdure resume r /a/b.py:shop --url U --adopt"),
        ("perdure resume r '/a b/c.py:shop'", "perdure resume r --url U '/a b/c.py:shop'"),
        ("perdure why 'a b'", "perdure why --url U 'a b'"),
        ("perdure why -- -x", "perdure why --url U -- -x"),
        ("`perdure list` shows them; perdure verify r", "`perdure list --url U` shows them; perdure verify --url U r"),
        ("perdure why r --url V", "perdure why r --url V"),
        ("perdure check names it", "perdure check names it"),
    ],
)
def test_options_go_into_each_command_of_a_sentence(sentence: str, told: str) -> None:
    assert with_options(sentence, " --url U") == told


def test_a_recorded_message_of_a_plan_has_an_id_as_in_older_journals_and_quotes_what_is_none() -> None:
    """It is compared on replay: a run of an older version must not differ because its id is quoted now."""
    left = Undone([], [("book", "no way")])
    assert left.words("a~b", []).endswith("once that is mended: perdure undo a~b")
    assert left.words("r>PWNED", []).endswith("once that is mended: perdure undo 'r>PWNED'")


# -- the sources ------------------------------------------------------------------------------------------------------------------
QUOTED = ("quote", "url_words", "_add_n", "_as_recorded")  # functions whose result is quoted already
UNQUOTED = re.compile(rf"\bperdure (?:{'|'.join(VERBS)})(?: [^\s;,`()\0]*[^\s;,`():\0])* \0")


def test_no_source_puts_a_value_into_a_command_by_itself() -> None:
    """`shell.command` inserts and quotes values.

    A shell would interpret a value that is put into the text directly.
    """
    files = sorted(SOURCES.rglob("*.py"))
    assert [f"{file}: {found}" for file in files for found in unquoted(file.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "source", ['f"perdure why {run}"', 'f"x: perdure resume {a} {b}"', '"go: perdure undo " + run', 'f"perdure copy --to {u}"']
)
def test_such_a_source_would_be_found(source: str) -> None:
    assert unquoted(source)


def unquoted(source: str) -> list[str]:
    """The texts with a command into which a value is put without quotes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else _place_of(part) for part in node.values)
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            text = f"{node.left.value}\0"
        if UNQUOTED.search(text):
            found.append(ast.unparse(node))
    return found


def _place_of(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    name = getattr(value.func, "attr", getattr(value.func, "id", "")) if isinstance(value, ast.Call) else ""
    ours = name in QUOTED or (isinstance(value, ast.Name) and value.id.isupper())  # a constant of ours, such as the run of the demo
    return "quoted" if ours or isinstance(value, ast.BinOp) else "\0"  # a sum is a number
