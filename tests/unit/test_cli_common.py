"""Shared by all verbs: text that is safe on a terminal, errors in one line, exit codes, times, tables."""

from __future__ import annotations

import importlib
import json
import os
import pty
import subprocess
import sys
import unicodedata

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import errors
from perdure.cli import VERBS, common
from perdure.cli.common import clean, code_of_error, iso, report, table, to_json


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, äöü, 日本語\u3000テスト, 🙂", "plain text, äöü, 日本語\u3000テスト, 🙂"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\nc\td\x07\x7f", "a\\rb\\nc\\td\\x07\\x7f"),
        ("pay\u202eevil\u2066", "pay\\u202eevil\\u2066"),
        ("zero\u200bwidth\ufeff\u00ad", "zero\\u200bwidth\\ufeff\\xad"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("ann\ufe0f, bob\U000e0100", "ann\\ufe0f, bob\\U000e0100"),
        ("blank\u3164\u2800", "blank\\u3164\\u2800"),
        ("line\u2028para\u2029", "line\\u2028para\\u2029"),
        ("lone\ud800", "lone\\ud800"),
    ],
)
def test_clean_shows_what_would_act_or_hide_as_its_escape(raw, shown):
    assert clean(raw) == shown


def test_clean_keeps_only_what_it_is_told_to_keep():
    assert clean("a\nb\tc\x1b", keep="\n\t") == "a\nb\tc\\x1b"


@given(st.text())
def test_nothing_that_clean_lets_through_controls_or_formats(text):
    assert not {unicodedata.category(char) for char in clean(text)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


# Default_Ignorable_Code_Point, of Unicode's DerivedCoreProperties.txt; and the blank of Braille.
DEFAULT_IGNORABLE = [
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E),
    (0x2060, 0x206F), (0x2800, 0x2800), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
]  # fmt: skip


def test_every_character_that_unicode_lets_a_terminal_ignore_is_shown_as_its_escape():
    for first, last in DEFAULT_IGNORABLE:
        for point in range(first, last + 1):
            escape = f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
            assert clean(f"a{chr(point)}b") == f"a{escape}b"
            line = to_json({"k": f"a{chr(point)}"})
            assert line.isascii()
            assert json.loads(line) == {"k": f"a{chr(point)}"}


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_json_on_one_line_means_the_same_and_is_as_harmless_as_clean_text(value):
    line = to_json(value)
    assert json.loads(line) == value
    assert clean(line) == line


@pytest.mark.parametrize("text", ["\x7f\x9b", "\u202e", "\U000e0041", "\ud800", "\u3164", "\ufe0f", "\U000e0100"])
def test_json_escapes_every_kind_of_unsafe_character(text):
    assert to_json(text).isascii()
    assert json.loads(to_json(text)) == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("x"), 2),
        (errors.NotEncodable("x"), 2),
        (errors.Conflict("x"), 2),
        (errors.RunEnded("x"), 2),
        (errors.UnknownAgent("x"), 2),
        (errors.StoreUnavailable("x"), 2),
        (errors.StoreCorrupt("x"), 2),
        (errors.StoreVersion("x"), 2),
        (errors.NotFound("x"), 6),
        (errors.AlreadyRunning("x"), 8),
        (errors.Fenced("x"), 8),
        (errors.Diverged("x", seq=3), 7),
        (errors.RunFailed("r", "x"), 1),
        (errors.RunCancelled("r", "x"), 5),
        (errors.NeedsAttention("r", "x"), 4),
        (errors.ResultTimeout("r", "x"), 3),
    ],
)
def test_every_error_of_ours_has_its_exit_code_and_is_one_clean_line(error, code, capsys):
    assert code_of_error(error) == code
    error.args = ("the thing\nand \x1b[31mmore",)
    assert report(error) == code
    assert capsys.readouterr().err == "perdure: the thing\\nand \\x1b[31mmore\n"


def test_an_unexpected_error_is_one_line_and_a_traceback_only_where_asked_for(capsys, monkeypatch):
    def bug() -> int:
        try:
            return len(3)  # type: ignore[arg-type]
        except TypeError as error:
            return report(error)

    assert bug() == common.BUG
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "PERDURE_DEBUG=1" in told
    monkeypatch.setenv("PERDURE_DEBUG", "1")
    assert bug() == common.BUG
    assert "Traceback" in capsys.readouterr().err


def test_an_error_alone_in_a_group_is_told_as_itself(capsys):
    assert report(ExceptionGroup("tasks", [errors.NotFound("no run r-1")])) == 6
    assert capsys.readouterr().err == "perdure: no run r-1\n"


def test_every_status_has_an_exit_code():
    from typing import get_args

    from perdure.store.api import Status

    assert set(common.CODE_OF_STATUS) == set(get_args(Status))


def test_times_are_iso_in_utc_and_survive_the_year_10000():
    assert iso(1_700_000_000_123_456) == "2023-11-14T22:13:20.123456Z"
    assert "µs" in iso(10**18)


def test_a_table_off_the_terminal_is_plain_aligned_and_clean(capsys):
    table(["run", "status"], [["r-1", "failed"], ["long-name", "bad\x1b[31m\n"]])
    assert capsys.readouterr().out == "run        status\nr-1        failed\nlong-name  bad\\x1b[31m\\n\n"


@pytest.mark.parametrize(
    ("terminal", "environ", "colours"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_go_to_a_terminal_only_and_no_color_is_respected(terminal, environ, colours):
    program = "from perdure.cli.common import style, table\nprint(style('x', 'red'))\ntable(['status'], [['failed']])"
    ours, theirs = pty.openpty() if terminal else os.pipe()
    env = {**os.environ, "TERM": "xterm", **environ}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=env, timeout=60, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert (b"\x1b[31m" in shown) == colours
    assert b"failed" in shown


# --- verbs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_command_of_its_name_with_help(verb):
    command = importlib.import_module(VERBS[verb][0]).command
    assert isinstance(command, click.Command)
    assert command.name == verb
    assert command.help


def loaded_by(*args: str) -> set[str]:
    """The verbs' modules, and rich, that a fresh interpreter has loaded after `perdure ARGS`."""
    program = f"""
import contextlib, io, sys
from perdure.cli import VERBS, cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    cli.main({list(args)!r})
print(*(name for name in [*(module for module, _ in VERBS.values()), "rich"] if name in sys.modules))
"""
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout.split())


def test_help_loads_no_verb_and_a_verb_loads_only_itself():
    assert loaded_by("--help") == set()
    assert loaded_by("completion", "zsh") == {"perdure.cli.completion"}
