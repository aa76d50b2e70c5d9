"""What can be a tool, what its declaration says, and what a call outside of an agent does."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.core.machine import CallCompleted, CallTool, Facts, Finish, Machine, Succeeded
from perdure.core.retry import Retry
from perdure.errors import InvalidInput
from perdure.tool import Call, Outcome, Tool, tool

SOURCE = Path(inspect.getfile(Tool)).parents[2]


@tool
async def lookup(order: str) -> dict[str, Any]:
    return {"order": order}


@tool(effect="keyed", name="pay.refund", timeout=timedelta(seconds=30), retry=Retry(attempts=2), key_window=3600)
def refund(order: str, cents: int = 100, *, told: Call) -> str:
    return f"{order} {cents} {told.key}"


@tool(isolate=True)
def apart(n: int) -> int:
    return n


def test_a_bare_tool_is_taken_for_the_most_dangerous_kind():
    assert (lookup.name, lookup.effect, lookup.timeout_s, lookup.retry, lookup.isolate) == ("lookup", "once", None, None, False)
    assert lookup.key_window_s == 86_400
    assert lookup.is_async
    assert lookup.fn.__name__ == "lookup"


def test_options_are_kept_in_seconds():
    assert (refund.name, refund.effect, refund.timeout_s, refund.key_window_s) == ("pay.refund", "keyed", 30.0, 3600.0)
    assert refund.retry == Retry(attempts=2)
    assert not refund.is_async
    assert apart.isolate


# --- called outside an agent -------------------------------------------------------------------------------------------------


def test_outside_an_agent_a_tool_just_runs():
    assert asyncio.run(lookup("o-1")) == {"order": "o-1"}


def test_outside_an_agent_a_sync_tool_runs_in_a_thread_with_a_random_key():
    here = threading.get_ident()
    seen: list[tuple[int, str]] = []

    @tool
    def look(call: Call) -> None:
        seen.append((threading.get_ident(), call.key))

    asyncio.run(look())
    asyncio.run(look())
    assert here not in {thread for thread, _ in seen}
    assert len({key for _, key in seen}) == 2


def test_calling_gives_a_real_coroutine_so_that_it_can_become_a_task():
    async def main() -> Any:
        call = lookup("o-2")
        assert inspect.iscoroutine(call)
        return await asyncio.create_task(call)

    assert asyncio.run(main()) == {"order": "o-2"}


def test_wrong_arguments_are_refused_at_the_call_and_not_when_it_is_awaited():
    with pytest.raises(InvalidInput, match="tool lookup: the argument nope is unknown; it takes order"):
        lookup("o-1", nope=1)  # type: ignore[call-arg, unused-coroutine]


def test_arguments_are_fixed_when_the_call_is_made():
    @tool
    async def size(items: list[int]) -> int:
        return len(items)

    items = [1, 2]
    call = size(items)
    items.append(3)
    assert asyncio.run(call) == 2


def test_the_plain_function_stays_within_reach():
    assert refund.fn("o", 5, told=Call.outside()).startswith("o 5 ")
    assert inspect.signature(refund) == inspect.signature(refund.fn)
    assert repr(refund) == "<tool pay.refund effect=keyed>"


def test_a_decorated_function_keeps_its_signature():
    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        return wrapper

    @tool
    @logged
    async def double(n: int, call: Call) -> int:
        return 2 * n

    assert double.bind((4,), {}) == b'{"n":4}'
    assert asyncio.run(double(4)) == 8


# --- called inside an agent --------------------------------------------------------------------------------------------------


def test_inside_an_agent_a_call_is_bound_and_numbered_when_it_is_made_and_not_when_it_is_awaited():
    async def agent(_: Machine) -> list[Any]:
        first, second = lookup("one"), lookup("two")
        return [await second, await first]

    machine = Machine(Facts("r", "t", None, "a", "1"), agent)
    assert machine.start(0) == [CallTool(1, lookup, b'{"order":"one"}'), CallTool(2, lookup, b'{"order":"two"}')]
    assert machine.deliver(1, CallCompleted(2, b'{"n":2}')) == []
    assert machine.deliver(2, CallCompleted(1, b'{"n":1}')) == [Finish(Succeeded(b'[{"n":2},{"n":1}]'))]


def test_inside_an_agent_wrong_arguments_make_no_call():
    async def agent(_: Machine) -> str:
        try:
            await lookup(5)  # type: ignore[arg-type]
        except InvalidInput:
            return "refused"
        return "called"

    machine = Machine(Facts("r", "t", None, "a", "1"), agent)
    assert machine.start(0) == [Finish(Succeeded(b'"refused"'))]


def test_a_result_reaches_the_agent_as_its_annotation_has_it():
    @tool
    async def span() -> tuple[int, timedelta]:
        raise NotImplementedError

    async def agent(_: Machine) -> bool:
        return await span() == (1, timedelta(days=1))

    machine = Machine(Facts("r", "t", None, "a", "1"), agent)
    machine.start(0)
    assert machine.deliver(1, CallCompleted(1, span.encode_result((1, timedelta(days=1))))) == [Finish(Succeeded(b"true"))]


# --- the Call ----------------------------------------------------------------------------------------------------------------


def test_the_call_is_found_by_its_annotation_and_is_never_an_argument():
    @tool
    async def spelled(n: int, who: Call) -> None: ...
    @tool
    async def optional(n: int, who: Call | None = None) -> None: ...

    for declared in (spelled, optional):
        assert declared.bind((1,), {}) == b'{"n":1}'
        with pytest.raises(InvalidInput, match="who is the Call, which perdure passes"):
            declared.bind((1,), {"who": None})


def test_a_call_that_is_imported_for_type_checkers_alone_is_recognised():
    for spelling in ("Call", "perdure.Call", "Call | None"):
        names: dict[str, Any] = {"__name__": "elsewhere"}
        exec(f"async def f(n: int, told: '{spelling}') -> None: ...", names)
        assert tool(names["f"]).bind((1,), {}) == b'{"n":1}'


def test_two_parameters_for_the_call_are_refused():
    with pytest.raises(InvalidInput, match="one and two are both annotated Call"):

        @tool
        async def greedy(one: Call, two: Call) -> None: ...


def test_a_call_has_a_connection_only_in_a_transaction():
    with pytest.raises(InvalidInput, match='effect="transaction"'):
        _ = Call.outside().connection


def test_a_heartbeat_is_kept_as_json_would_keep_it():
    call = Call.outside()
    call.heartbeat((1, 2))
    assert call.progress == [1, 2]
    with pytest.raises(InvalidInput):
        call.heartbeat(object())


def test_cancelled_is_seen_from_another_thread():
    call, seen = Call.outside(), threading.Event()

    def work() -> None:
        while not call.cancelled:
            pass
        seen.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert not seen.wait(0.02)
    call.ask_to_stop()
    assert seen.wait(60)
    thread.join()


# --- what cannot be a tool ---------------------------------------------------------------------------------------------------


def generator():
    yield 1


class Service:
    def method(self, n: int) -> int:
        return n


def star(*args: int) -> None: ...
def double_star(**kwargs: int) -> None: ...
def positional_only(n: int, /) -> None: ...


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda: None, "a lambda has no name"),
        (lookup, "is a tool already"),
        (len, "a builtin_function_or_method cannot be a tool"),
        (Service, "a type cannot be a tool"),
        (functools.partial(star), "a partial cannot be a tool"),
        (generator, "a generator cannot be recorded"),
        (Service.method, "a method cannot be a tool"),
        (star, r"\*args has no name"),
        (double_star, r"\*\*kwargs has no name"),
        (positional_only, "n is positional-only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_tool_is_refused_at_its_declaration(fn, words):
    with pytest.raises(InvalidInput, match=words):
        tool(fn)


def plain(n: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"effect": "twice"}, "effect='twice' is unknown; one of read, idempotent, keyed, transaction, once"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": 1e12}, "timeout=1000000000000.0"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": "30"}, "timeout='30'"),
        ({"timeout": timedelta(0)}, "timeout=datetime.timedelta"),
        ({"key_window": -1}, "key_window=-1"),
        ({"retry": 5}, "retry=5 is not a Retry"),
        ({"name": ""}, "'' cannot name a tool"),
        ({"name": "a b"}, "cannot name a tool"),
        ({"name": "x" * 65}, "cannot name a tool"),
        ({"name": "naïve\n"}, r"'na\\xefve\\n' cannot name a tool"),
        ({"colour": "red"}, "no option colour"),
        ({"isolate": True, "effect": "transaction"}, "which no other process has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_make_no_sense_are_refused_at_the_declaration(options, words):
    with pytest.raises(InvalidInput, match=words):
        tool(**options)(plain)


def test_an_isolated_tool_must_be_found_by_its_name_in_a_file():
    def inner() -> None: ...

    with pytest.raises(InvalidInput, match=r"move .*inner to module level"):
        tool(isolate=True)(inner)
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec("def f(): ...", names)
    with pytest.raises(InvalidInput, match="from its file, but it has none"):
        tool(isolate=True)(names["f"])


# --- hooks -------------------------------------------------------------------------------------------------------------------


def declared() -> Tool[..., Any]:
    @tool(effect="keyed")
    async def charge(order: str, cents: int, call: Call) -> dict[str, Any]:
        return {}

    return charge


def test_hooks_are_kept_beside_the_tool():
    charge = declared()

    @charge.reconcile
    async def find(order: str, cents: int, about: Call) -> Outcome:
        return Outcome.not_happened()

    @charge.compensate
    def give_back(cents: int, order: str) -> None: ...

    assert charge.reconciler is not None
    assert charge.compensator is not None
    assert (charge.reconciler.fn, charge.reconciler.is_async) == (find, True)
    assert (charge.compensator.fn, charge.compensator.is_async) == (give_back, False)
    call = Call.outside()
    assert charge.reconciler.with_call({"order": "o"}, call) == {"order": "o", "about": call}
    assert charge.compensator.with_call({"order": "o"}, call) == {"order": "o"}


def test_a_hook_must_take_what_the_tool_takes():
    with pytest.raises(InvalidInput, match=r"the hook takes \(order\), but it is called with the tool's arguments \(order, cents\)"):

        @declared().reconcile
        async def find(order: str) -> Outcome:
            return Outcome.unknown("?")


def test_a_second_hook_is_refused():
    charge = declared()
    charge.reconcile(lookalike)
    with pytest.raises(InvalidInput, match="has a reconcile hook already: lookalike"):
        charge.reconcile(lookalike)


def lookalike(order: str, cents: int) -> Outcome:
    return Outcome.in_progress()


def test_a_transaction_has_nothing_to_reconcile():
    @tool(effect="transaction")
    def write(order: str, cents: int) -> None: ...

    with pytest.raises(InvalidInput, match="cannot be in doubt"):
        write.reconcile(lookalike)


# --- types and cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_type_checker_knows_arguments_and_results(tmp_path):
    (tmp_path / "user.py").write_text(
        "from perdure import Approval, Call, Rate, Usage, tool\n"
        "@tool(effect='read')\nasync def lookup(order: str) -> dict[str, int]: return {}\n"
        "@tool\ndef sync(n: int) -> str: return ''\n"
        "@tool(effect='keyed')\nasync def refund(order: str, cents: int, call: Call) -> list[int]: return []\n"
        "async def main() -> None:\n"
        "    reveal_type(await lookup('o'))\n"
        "    reveal_type(await sync(1))\n"
        "    reveal_type(await refund('o', 5))\n"
        "    await lookup(5)\n"
        "@tool(approval=lambda n: n > 5, rate=Rate(3), cost=0.02)\ndef asks(n: int) -> str: return ''\n"
        "@tool(approval=Approval(by='ann'), cost=Usage(tokens_in=5))\nasync def asks_ann(n: int) -> bytes: return b''\n"
        "@asks.compensate\ndef undo(n: int) -> int: return n\n"
        "@asks_ann.compensate(effect='read')\ndef undo_ann(result: bytes) -> bytes: return result\n"
        "async def more() -> None:\n"
        "    reveal_type(await asks(1))\n"
        "    reveal_type(await asks_ann(1))\n"
        "    reveal_type(undo(1))\n"
        "    reveal_type(undo_ann(b''))\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    environment = None
    if SOURCE.name == "src":  # an installed package is found without this
        environment = {**os.environ, "MYPYPATH": str(SOURCE)}
        # Nothing that is revealed comes from another package, and to read all of those takes ten times as long.
        command += ["--no-site-packages", "--disable-error-code=import-not-found"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False).stdout
    assert [line.partition('"')[2].rstrip('"') for line in said.splitlines() if "Revealed" in line] == [
        "dict[str, int]",
        "str",
        "list[int]",
        *("str", "bytes", "int", "bytes"),
    ]
    assert 'user.py:12: error: Argument 1 to "__call__" of "Tool" has incompatible type "int"; expected "str"' in said
    assert "Found 1 error" in said


def test_declaring_and_binding_simple_tools_needs_neither_pydantic_nor_the_docstring_parser():
    program = (
        "import sys\nfrom perdure.tool import Call, tool\n"
        "@tool(timeout=3)\nasync def f(a: str, b: int | None, call: Call, c: dict = None) -> dict: ...\n"
        "f.bind(('x', 1), {}); f.arguments(f.bind(('x', None), {'c': {}})); f.decode_result(f.encode_result({}))\n"
        "print([name for name in ('pydantic', 'docstring_parser') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
