"""Files with any content: every file gets an answer. Also: accepted lines, and our own pages and examples."""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import pytest
from tests.check.snippets import alone
from tests.docs.test_examples import EXAMPLES, PAGES, names_of, programs

from perdure.check import Finding, look

DELIBERATE = {"crashtest_shop.py": ["key"]}  # this example shows what happens with such tools


def found_in(data: bytes | str) -> list[Finding]:
    return look("app.py", data.encode() if isinstance(data, str) else data).findings


@pytest.mark.parametrize(
    ("data", "line", "column", "words"),
    [
        (b"def x(:\n", 1, 7, "invalid syntax"),
        (b"x = 1\n  y = 2\n", 2, 2, "unexpected indent"),
        (b"x = (\n", 1, 5, "never closed"),
        (b"x = 1\ny = '\xff'\n", 2, 6, "byte 0xff is no utf-8"),
        (b"# coding: ascii\nx = 'ab\xe9'\n", 2, 8, "byte 0xe9 is no ascii"),
        (b"#!/usr/bin/python3\n# coding: ascii\nx = '\xe9'\n", 3, 6, "byte 0xe9 is no ascii"),
        (b"# coding: ascii, \xe9\n", 1, 18, "byte 0xe9 is no ascii"),
        (b"\xef\xbb\xbfx = '\xff'\n", 1, 6, "byte 0xff is no utf-8; save the file as UTF-8, or declare its encoding"),
        (b"\xef\xbb\xbf# coding: latin-1\n", 1, 1, "the mark of UTF-8, and declares the encoding latin-1"),
        (b"x = 1\n# coding: latin-1\ny = '\xe9'\n", 3, 6, "byte 0xe9 is no utf-8"),
        (b"# coding: nothing-like-that\n", 1, 1, "nothing-like-that"),
        (b"# coding: base64\n", 1, 1, "base64"),
        (b"# -*- coding: undefined -*-\nx = 1\n", 1, 1, "the encoding undefined is not an encoding of text"),
        (b"x = 1\nab\0c\n", 2, 3, "a NUL character"),
        (b"x\0\n", 1, 2, "a NUL character"),
        (b"\xff\xfex\0 \0", 1, 1, "byte 0xff"),
        (b"x = " + b"(" * 5000 + b")" * 5000, 1, None, ""),
        (b"x = " + b"-" * 200_000 + b"1", 1, None, "nested too deeply"),
    ],
)
def test_a_file_that_python_cannot_read_is_a_finding_with_its_place(data, line, column, words):
    [finding] = found_in(data)
    assert (finding.rule, finding.severity, finding.line) == ("syntax", "error", line)
    assert column is None or finding.column == column
    assert words in finding.message


def test_a_file_that_is_nested_deeply_is_looked_at_or_said_to_be_too_deep():
    chain = "await echo(" + " + ".join(["'x'"] * 2500) + ")\ntime.time()"
    rules = {finding.rule for finding in found_in(alone(chain))}
    assert rules in ({"clock"}, {"syntax"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\xef\xbb\xbfx = 1\n",
        b"# coding: latin-1\nx = '\xe9'\n",
        b"\r\n# vim: fileencoding=latin-1\r\nx = '\xe9'\r\n",
        b"x = 1\r\ny = 2\r",
        b"\x0c\nx = '\\d'\n",
    ],
)
def test_a_file_in_another_form_is_read_as_python_does(data):
    assert found_in(data) == []


def test_a_bom_and_an_encoding_do_not_move_the_place():
    source = alone("'é'; time.time()")
    places = {
        (finding.line, finding.column, finding.rule) for data in (source.encode(), source.encode("utf-8-sig")) for finding in found_in(data)
    }
    assert len(places) == 1
    latin = found_in(f"# coding: latin-1\n{source}".encode("latin-1"))
    assert [finding.column for finding in latin] == [column for _, column, _ in places]


# -- excuses ------------------------------------------------------------------------------------------------------------------
def excused(comment: str, body: str = "time.time()") -> list[tuple[str, str]]:
    return [(finding.rule, finding.message) for finding in found_in(alone(f"{body}  {comment}"))]


def test_an_excuse_with_a_reason_is_taken():
    assert excused("# perdure: ignore[clock] only for the log") == []
    assert excused("# noqa: X1 # perdure: ignore[clock, random] only for the log", "time.time(), random.random()") == []


def test_an_excuse_excuses_only_what_it_names_and_only_in_its_line():
    assert [rule for rule, _ in excused("# perdure: ignore[random] x")] == ["clock", "ignore"]
    assert [rule for rule, _ in excused("# perdure: ignore[clock] x\ntime.time()")] == ["clock"]
    assert [rule for rule, _ in excused("'# perdure: ignore[clock] x'", "time.time(),")] == ["clock"]  # text, and no comment


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("# perdure: ignore[clock]", "its readers cannot tell"),
        ("# perdure: ignore", "names no rule"),
        ("# perdure: ignore[] why", "names no rule"),
        ("# perdure: ignore[clok, clock] why", "no rule 'clok'"),
        ("# perdure: ignore[clock, io] why", "rule io has no finding"),
    ],
)
def test_an_excuse_that_is_of_no_use_is_a_note(comment, words):
    notes = [message for rule, message in excused(comment) if rule == "ignore"]
    assert len(notes) == 1
    assert words in notes[0]


def test_a_syntax_error_cannot_be_excused():
    assert [finding.rule for finding in found_in("def x(:  # perdure: ignore[syntax] why\n")] == ["syntax"]


# -- many files ---------------------------------------------------------------------------------------------------------------
def library(count: int) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in (*root.glob("*.py"), *root.glob("*/*.py")) if "site-packages" not in path.parts)
    return random.Random(7).sample([path for path in files if path.stat().st_size < 20_000], count)


@pytest.mark.long
def test_any_file_of_the_standard_library_goes_through_also_when_all_its_functions_are_agents():
    agents = errors = 0
    for path in library(150):
        data = path.read_bytes()
        found = look(path, data).findings
        assert [finding for finding in found if finding.rule not in ("syntax",)] == [], path
        if found:
            continue  # one of the library's own examples of bad Python
        tree = ast.parse(data)
        names = [one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        declared = "".join(f"\n__perdure_agent__({name})" for name in names)
        seen = look(path, data + f"\nfrom perdure import agent as __perdure_agent__{declared}\n".encode())
        agents, errors = agents + seen.agents, errors + len(seen.findings)
        assert all(finding.line > 0 and finding.column > 0 and finding.message and finding.way_out for finding in seen.findings)
    assert agents > 100
    assert errors > 50


def test_the_work_grows_with_the_file_and_not_with_its_square():
    """Counted in names looked up, because a clock would measure the other tests."""
    looked_up = [_lookups(number) for number in (200, 400)]
    assert looked_up[1] < 2.5 * looked_up[0]


def test_a_long_way_is_told_by_its_beginning_and_its_end():
    """With every step of it, the ways of some thousand functions would fill the memory."""
    last = 500
    helpers = "\n".join(f"def f{n}():\n    return f{n + 1}()" for n in range(last)) + f"\ndef f{last}():\n    return time.time()"
    [finding] = found_in(alone("f0()", helpers))
    assert finding.where == "agent one → f0 → f1 → … → f498 → f499 → f500"


def test_the_methods_of_a_class_and_the_hooks_of_tools_are_not_searched_for_each_use():
    def steps(number: int) -> int:
        methods = "\n".join(f"    def m{n}(self):\n        return self.m{n + 1}()" for n in range(number))
        tools = "\n".join(
            f"@tool(effect='once', timeout=1)\nasync def t{n}() -> None: ...\n@t{n}.reconcile\nasync def _() -> None: ..."
            for n in range(number)
        )
        return _lines_run(alone("Thing().m0()", f"class Thing:\n{methods}\n{tools}"))

    assert steps(200) < 2.5 * steps(100)


def _lines_run(source: str) -> int:
    """The lines that are run in what searches, and in its loops: the rest of the work, which is far more, would hide them."""
    count = 0

    def counting(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return counting if frame.f_code.co_name in ("method", "reconciled", "<genexpr>", "<listcomp>", "<dictcomp>") else None

    sys.settrace(counting)  # type: ignore[arg-type]
    try:
        assert found_in(source) == []
    finally:
        sys.settrace(None)
    return count


def _lookups(functions: int) -> int:
    helpers = "\n".join(
        f"def helper{n}(x):\n    seen = {{'a', x}}\n    for one in seen:\n        helper{n - 1 if n else 0}(one)\n    return {n}\n"
        for n in range(functions)
    )
    source = alone(f"helper{functions - 1}(run)", helpers).encode()
    count = 0

    def counting(frame: object, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counting)
    try:
        found = look("app.py", source).findings
    finally:
        sys.setprofile(None)
    assert len(found) == functions
    return count


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_our_examples_have_no_errors_but_those_that_they_are_about(path):
    found = [finding.rule for finding in look(path, path.read_bytes()).findings if finding.severity == "error"]
    assert found == DELIBERATE.get(path.name, [])


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_the_agents_of_our_pages_have_no_errors(page):
    for program in programs(page.read_text()):
        assert [finding for finding in found_in(program) if finding.severity == "error"] == []


def test_the_examples_and_pages_have_agents_to_look_at():
    everything = [path.read_text() for path in EXAMPLES.glob("*.py")] + [
        program for page in PAGES for program in programs(page.read_text())
    ]
    seen = [look("page.py", source.encode()) for source in everything]
    assert sum(one.agents for one in seen) > 25
    assert sum(one.tools for one in seen) > 40
