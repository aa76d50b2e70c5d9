"""The diff of two runs: aligned from the first difference on, for people, for programs, and as a page that runs nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run

from perdure import Perdure, Run, agent, tool
from perdure.core import codec
from perdure.core.events import RunClaimed, Usage
from perdure.inspect.diff import CallPath, DiffCall, diff_lines, diff_of, diff_page, diff_record, path_of


def call(number: int, name: str, args: Any, result: Any = "done", kind: Any = "tool") -> DiffCall:
    return DiffCall(number, kind, name, args, result, answered=True, digest=codec.digest(codec.encode(args)))


def path(*calls: DiffCall, output: Any = "end", status: str = "succeeded", used: Usage | None = None) -> CallPath:
    return CallPath("run x", calls, status, used or Usage(), output)


def pairs(left: CallPath, right: CallPath) -> list[tuple[int | None, int | None, tuple[str, ...]]]:
    return [(_number(line.left), _number(line.right), line.differs) for line in diff_of(left, right).lines]


def _number(call: DiffCall | None) -> int | None:
    return None if call is None else call.call


def test_equal_paths_are_the_same() -> None:
    one = path(call(1, "look", {"a": 1}), call(2, "pay", {"b": 2}))
    diff = diff_of(one, one)
    assert (diff.same, diff.lines, diff.is_same) == (2, [], True)


def test_a_call_that_one_side_has_more_does_not_shift_the_others() -> None:
    left = path(call(1, "look", {"a": 1}), call(2, "pay", {"b": 2}), call(3, "end", {}))
    right = path(call(1, "look", {"a": 1}), call(2, "check", {}), call(3, "pay", {"b": 2}), call(4, "end", {}))
    assert diff_of(left, right).same == 1
    assert pairs(left, right) == [(None, 2, ("call",)), (2, 3, ()), (3, 4, ())]


def test_calls_of_one_tool_with_other_arguments_stand_beside_each_other() -> None:
    left = path(call(1, "pay", {"b": 1}), call(2, "send", {}, "one"))
    right = path(call(1, "pay", {"b": 2}), call(2, "send", {}, "two"))
    assert pairs(left, right) == [(1, 1, ("arguments",)), (2, 2, ("result",))]


def test_results_that_python_takes_for_equal_are_not_the_same() -> None:
    left, right = path(call(1, "count", {}, 1), output=1), path(call(1, "count", {}, True), output=True)
    assert pairs(left, right) == [(1, 1, ("result",))]
    assert not diff_of(left, right).same_outcome


def test_models_with_other_names_stand_beside_each_other() -> None:
    left, right = path(call(1, "old", "1 message", kind="model")), path(call(1, "new", "1 message ", kind="model"))
    assert pairs(left, right) == [(1, 1, ("call", "arguments"))]


def test_lists_that_are_too_long_to_align_are_compared_in_order() -> None:
    left = path(*(call(number, "look", {"a": number}) for number in range(1, 3000)))
    right = path(*(call(number, "look", {"a": -number}) for number in range(1, 3000)))
    assert len(diff_of(left, right).lines) == 2999


@tool(effect="once")
async def pay(cents: int) -> str:
    return f"paid {cents}"


BUG = [True]


@agent(version="1")
async def shop(run: Run, cents: int) -> str:
    first = await pay(cents)
    if BUG:
        raise ValueError("<script>alert(1)</script>\u202e")
    return f"{first} and {await pay(7)}"


async def reopened(app: Perdure) -> None:
    BUG[:] = [True]
    handle = await app.start(shop, 5, id="r")
    assert (await app.drive("r")).status == "failed"
    claim = next(event.seq for event in await handle.events() if isinstance(event.body, RunClaimed))
    BUG.clear()
    await app.rewind("r", claim)
    assert (await app.drive("r")).status == "succeeded"


def test_what_was_superseded_is_left_out_and_a_call_made_again_is_one_call() -> None:
    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await reopened(app)
            found = path_of("run r", await app.handle("r").events(), app.load)
            assert [(one.call, one.args, one.result) for one in found.calls] == [(1, {"cents": 5}, "paid 5"), (2, {"cents": 7}, "paid 7")]
            await app.run(shop, 5, id="s")
            assert (await app.diff("r", "s")).is_same

    run(main())


def test_the_diff_of_two_runs_in_words_and_as_a_record() -> None:
    async def main() -> None:
        async with perdure(None, [shop]) as app:
            BUG.clear()
            await app.run(shop, 5, id="r")
            await app.run(shop, 6, id="s")
            diff = await app.diff("r", "s")
            assert list(diff_lines(diff)) == [
                "- run r",
                "+ run s",
                "  0 calls the same",
                '- 1: pay(cents=5) → "paid 5"',
                '+ 1: pay(cents=6) → "paid 6"',
                '  2: pay(cents=7) → "paid 7"',
                '- succeeded with "paid 5 and paid 7"',
                '+ succeeded with "paid 6 and paid 7"',
                "  cost: nothing",
            ]
            record = json.loads(json.dumps(diff_record(diff)))
            assert (record["is_same"], record["same_calls"], record["same_outcome"]) == (False, 0, False)
            assert [line["differs"] for line in record["lines"]] == [["arguments", "result"], []]

    run(main())


class _Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</pre></td>&lt;", "a\u202eb\u200bc\x1b[2J", "'javascript:x'"]


@pytest.mark.parametrize("text", HOSTILE, ids=["a_script", "an_image", "an_end", "invisible", "a_link"])
def test_no_recorded_text_becomes_a_part_of_the_page(text: str) -> None:
    left = CallPath(text, [call(1, text, {text: text}, text)], "succeeded", Usage(), text)
    right = CallPath(text, [DiffCall(1, "tool", text, text, None, text, True)], "failed", Usage(1, 2, 3), None, text)
    page = diff_page(diff_of(left, right))
    found = _Page(page)
    assert {tag for tag, _ in found.tags} <= {*"html head meta title style body h1 p table thead tr th tbody td pre".split()}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attributes in found.tags for name in attributes)
    assert "default-src 'none'" in page
    assert not any(char in page for char in "\u202e\u200b\x1b")
    shown = text.replace("\u202e", "\\u202e").replace("\u200b", "\\u200b").replace("\x1b", "\\x1b")
    assert shown in found.text
