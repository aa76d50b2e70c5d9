"""A recorded run against today's code: the same code makes the same calls, and a change is shown at its place."""

from __future__ import annotations

import asyncio
import inspect
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.servers import forked
from tests.testing.plugged import pytest_in
from tests.testing.test_export import perdure

from perdure import Agent, Call, InvalidInput, NotApproved, Perdure, ReAct, Retry, RetryLater, Run, ToolFailed, agent, tool
from perdure.inspect.export import export_run
from perdure.models import Scripted
from perdure.models.scripted import use, uses
from perdure.testing import Changed, ManualClock, Recording, export, recorded


@tool(effect="read")
async def look(order: str) -> dict[str, int]:
    """What an order cost."""
    return {"cents": 4900}


@tool(effect="keyed", approval=True)
async def pay(order: str, cents: int, call: Call) -> str:
    return f"receipt {call.key[:0]}for {cents}"


@tool(effect="idempotent", retry=Retry(attempts=2, base=60, jitter=False))
async def flaky(n: int, call: Call) -> int:
    if call.attempt == 1:
        raise RetryLater("busy", after=60)
    return n


@tool(effect="once")
async def refuse() -> None:
    raise PermissionError("not for you")


@tool(effect="read")
async def endless() -> None:
    await asyncio.Event().wait()


@agent(version="1")
async def child(run: Run, n: int) -> int:
    return n * 2


async def life(run: Run, order: str) -> list[Any]:
    """Everything that can happen to an agent."""
    details, doubled = await asyncio.gather(look(order), child(4))
    paid = await pay(order, details["cents"])
    try:
        await refuse()
    except ToolFailed as error:
        run.note(str(error.type))
    try:
        async with asyncio.timeout(5):
            await endless()
    except TimeoutError:
        run.decide("go on", among=["go on", "stop"])
    decision = await run.request_approval("ship", {"order": order}, expires=timedelta(hours=1))
    told = await run.receive("address")
    await asyncio.sleep(3600)
    return [paid, doubled, await flaky(7), decision.outcome, told, run.random.random(), str(run.uuid()), run.now().isoformat()]


everything = agent(version="1", name="everything")(life)


def record(where: Path, agents: list[Agent[Any, Any]], *args: Any) -> Recording:
    """A real run until its end, with a person who approves, signals and moves the time; and its export."""

    async def main() -> None:
        clock = ManualClock()
        async with Perdure(f"sqlite:///{where / 'journal.db'}", agents, clock=clock) as app:
            await app.start(agents[0], *args, id="r")
            async with asyncio.timeout(60):
                await live(app, clock)
            with (where / "run.perdure.jsonl").open("wb") as out:
                export_run(app.store, "r", out.write)

    async def live(app: Perdure, clock: ManualClock) -> None:
        while True:
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            while not driving.done():
                await asyncio.wait([driving], timeout=0.05)
                clock.advance(10)
            row = driving.result()
            if row.status in ("succeeded", "failed"):
                return
            for asked in await app.approvals():
                if asked.action == "pay":
                    await app.approve(asked.approval, by="ann")
                else:
                    clock.advance(hours=2)
            if row.waiting_for and "signal" in row.waiting_for:
                clock.advance(600)
                await app.signal("r", "address", {"street": "x"})
            clock.advance(600)

    asyncio.run(main())
    return recorded(where / "run.perdure.jsonl")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("everything"), [everything, child], "o-7")


def changed_to(old: str, new: str) -> Agent[Any, Any]:
    """The same agent, with one thing in its code changed."""
    source = inspect.getsource(life)
    assert old in source
    names: dict[str, Any] = dict(globals())
    exec(compile(source.replace(old, new), __file__, "exec", dont_inherit=True), names)
    return agent(version="2", name="everything")(names["life"])


# -- the recording ----------------------------------------------------------------------------------------------------
def test_a_recording_tells_what_was(recording):
    assert (recording.run_id, recording.agent, recording.version, recording.status) == ("r", "everything", "1", "succeeded")
    assert recording.input == {"order": "o-7"}
    assert recording.output[:5] == ["receipt for 4900", 8, 7, "expired", {"street": "x"}]
    assert recording.results("look") == [{"cents": 4900}]
    assert recording.results("nothing") == []


# -- replay --------------------------------------------------------------------------------------------------------------
def test_the_same_code_goes_the_same_way(recording):
    recording.replay(everything, child)


def test_the_first_difference_is_named(recording):
    with pytest.raises(Changed, match=r'run r would go another way(?s:.*)call 3: pay\((?s:.*)"cents":4900(?s:.*)"cents":4901'):
        recording.replay(changed_to('details["cents"])', 'details["cents"] + 1)'), child)


def test_a_childs_difference_is_named_too(recording):
    @agent(version="2", name="child")
    async def other(run: Run, n: int) -> int:
        return n * 3

    with pytest.raises(Changed, match=r"run r/2 would go another way(?s:.*)success with 8(?s:.*)success with 12"):
        recording.replay(everything, other)
    again = recording.rerun(everything, other)
    with pytest.raises(Changed, match=r"-r/2: succeeded with 8\n\+r/2: succeeded with 12"):
        again.check()


def test_a_child_whose_agent_is_not_given_is_not_passed_over(recording):
    assert recording.agents == ["everything", "child"]
    for look_at in (recording.replay, recording.rerun):
        with pytest.raises(
            InvalidInput, match=r"run r/2 below it belongs to agent 'child', which was not given(?s:.*)\(everything, child\)"
        ):
            look_at(everything)


def test_what_undoes_a_run_needs_no_agent(tmp_path):
    @tool(effect="idempotent")
    async def book(n: int) -> int:
        return n

    @book.compensate
    async def _(n: int) -> None:
        """Taken back."""

    @agent(version="1")
    async def booker(run: Run) -> int:
        return await book(1)

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [booker]) as app:
            await app.run(booker, id="r")
            await app.undo("r", accept=True)

    asyncio.run(main())
    undone = export(f"sqlite:///{tmp_path / 'journal.db'}", "r", tmp_path / "r.perdure.jsonl")
    assert undone.agents == ["booker"]
    undone.replay(booker)
    undone.rerun(booker).check()
    with pytest.raises(InvalidInput, match="is there already"):
        export(f"sqlite:///{tmp_path / 'journal.db'}", "r", tmp_path / "r.perdure.jsonl")


def test_an_agent_of_another_name_is_refused(recording):
    with pytest.raises(InvalidInput, match="run r belongs to agent 'everything', but this is agent 'child'"):
        recording.replay(child)
    with pytest.raises(InvalidInput, match="is not an agent"):
        recording.rerun(len)


# -- anew ----------------------------------------------------------------------------------------------------------------
def test_anew_the_same_code_asks_for_the_same_and_comes_to_the_same_end(recording):
    again = recording.rerun(everything, child)
    assert again.same, again.diff
    assert again.diff == ""
    assert again.asked[:3] == ['look({"order":"o-7"})', 'child child({"n":4})', 'pay({"cents":4900,"order":"o-7"})']
    assert again.asked[-2].startswith('succeeded with ["receipt for 4900",8,7,"expired"')
    assert again.asked[-1] == "r/2: succeeded with 8"  # the child's own run
    again.check()


def test_anew_what_is_asked_in_another_order_gets_its_own_answers(recording):
    again = recording.rerun(
        changed_to(
            "details, doubled = await asyncio.gather(look(order), child(4))",
            "doubled, details = await asyncio.gather(child(4), look(order))",
        ),
        child,
    )
    assert again.asked[:2] == ['child child({"n":4})', 'look({"order":"o-7"})']
    assert again.asked[-2:] == recording.rerun(everything, child).asked[-2:]


def test_anew_a_difference_shows_what_follows_from_it(recording):
    again = recording.rerun(changed_to("await refuse()", "pass"), child)
    assert not again.same
    assert "-refuse({})" in again.diff
    assert "+refuse" not in again.diff
    assert again.asked[-2].startswith("succeeded with")  # for everything else it continues with the recorded values


def test_anew_a_call_that_was_not_recorded_ends_it_with_clear_words(recording):
    again = recording.rerun(changed_to("await flaky(7)", "await flaky(8)"), child)
    assert again.asked[-2:] == ['flaky({"n":8})  [which was not recorded, so there is no answer]', "r/2: succeeded with 8"]
    twice = recording.rerun(changed_to("await flaky(7)", "await flaky(7) + await flaky(7)"), child)
    assert twice.asked[-3:-1] == ['flaky({"n":7})', 'flaky({"n":7})  [which was not recorded, so there is no answer]']


def test_anew_a_deadline_that_is_new_goes_off_where_the_answer_came_later(recording):
    again = recording.rerun(
        changed_to("told = await run.receive", "async with asyncio.timeout(1):\n        told = await run.receive"), child
    )
    assert again.asked[-2].startswith("failed with TimeoutError")


def test_a_conversation_is_recorded_and_answered_like_everything_else(tmp_path):
    model = Scripted([uses(use("look", order="o-7")), "It cost $49."])
    helper = ReAct("helper", model=model, tools=[look])
    recording = record(tmp_path, [helper], "What did o-7 cost?")
    silent = ReAct("helper", model=Scripted([]), tools=[look])  # the model is not asked: it would have no answer
    recording.replay(silent)
    again = recording.rerun(silent)
    assert again.same, again.diff
    assert again.asked[-1] == 'succeeded with "It cost $49."'


def test_a_run_that_still_waits_is_the_same_as_long_as_it_waits(tmp_path):
    @agent(version="1")
    async def waiter(run: Run) -> None:
        await look("o-1")
        await run.receive("never")

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [waiter]) as app:
            await app.start(waiter, id="r")
            await app.engine.drive("r")
            with (tmp_path / "run.perdure.jsonl").open("wb") as out:
                export_run(app.store, "r", out.write)
        # In a task, as in an async test.
        recording = recorded(tmp_path / "run.perdure.jsonl")
        recording.replay(waiter)
        again = recording.rerun(waiter)
        assert again.same, again.diff

    asyncio.run(main())


MEDDLER = """
import sys
from perdure import Run, agent
from perdure.testing import recorded

@agent(name="everything", version="2")
async def meddler(run: Run, order: str) -> None:
    open(sys.argv[1], "w")

@agent(version="1")
async def child(run: Run, n: int) -> int:
    return n * 2

if sys.argv[3] == "rerun":
    print(recorded(sys.argv[2]).rerun(meddler, child).asked)
else:
    recorded(sys.argv[2]).replay(meddler, child)
"""


def test_an_agent_that_touches_the_world_is_refused_also_where_there_is_no_worker(recording, tmp_path):
    words = [sys.executable, "-c", MEDDLER, str(tmp_path / "touched"), str(recording.path)]
    again = forked.run([*words, "rerun"], capture_output=True, text=True, timeout=60)
    assert "failed with NotAllowedInAgent: an agent may not open a file for writing" in again.stdout
    replayed = forked.run([*words, "replay"], capture_output=True, text=True, timeout=60)
    assert "Changed: run r would go another way with this code" in replayed.stderr
    assert not (tmp_path / "touched").exists()


def test_a_rejected_call_is_answered_as_it_was(tmp_path):
    @tool(effect="once", approval=True)
    async def wire(cents: int) -> int:
        return cents

    @agent(version="1")
    async def payer(run: Run) -> str:
        try:
            return str(await wire(5))
        except NotApproved as no:
            return f"no: {no.note}"

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [payer]) as app:
            await app.start(payer, id="r")
            await app.engine.drive("r")
            [asked] = await app.approvals()
            await app.reject(asked.approval, by="ann", reason="too much")
            assert await app.handle("r").result() == "no: too much"
            with (tmp_path / "run.perdure.jsonl").open("wb") as out:
                export_run(app.store, "r", out.write)

    asyncio.run(main())
    again = recorded(tmp_path / "run.perdure.jsonl").rerun(payer)
    assert again.same, again.diff


# -- the test that is written ----------------------------------------------------------------------------------------------
FAMILY = """
from perdure import Run, agent, tool

@tool(effect="read")
async def look(order: str) -> int:
    return 4900

@agent(version="1")
async def clerk(run: Run, order: str) -> int:
    return await look(order.upper())

@agent(version="1")
async def support(run: Run, order: str) -> str:
    return f"{await clerk(order)}"

@agent(version="1")
async def stranger(run: Run, order: str) -> str:
    return order
"""


@pytest.mark.long
def test_the_command_line_makes_a_test_that_passes_until_the_code_of_it_or_of_its_child_changes(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "shop.py").write_text(FAMILY)
    assert perdure(tmp_path, "run", "shop.py:support", "order=o-7", "--id", "o.7").returncode == 0
    made = perdure(tmp_path, "export", "o.7", "--test", "tests/test_o7.py")
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in (tmp_path / "tests").iterdir()) == ["test_o7.perdure.jsonl", "test_o7.py"]
    assert "RUN.replay(support, clerk)" in (tmp_path / "tests/test_o7.py").read_text()

    passed = pytest_in(tmp_path)
    assert (passed.returncode, "2 passed" in passed.stdout) == (0, True), passed.stdout + passed.stderr

    (tmp_path / "shop.py").write_text(FAMILY.replace("order.upper()", "order"))
    failed = pytest_in(tmp_path)
    assert "2 failed" in failed.stdout
    assert '-o.7/1: look({"order":"O-7"})' in failed.stdout
    assert 'the code asks for call 1: look({"order":"o-7"})' in failed.stdout
    assert "recorder.py" not in failed.stdout  # no line of our own source: only the test, and the difference
    assert "rerun.py" not in failed.stdout

    late = perdure(tmp_path, "export", "o.7", "--test", "tests/test_late.py")
    assert (late.returncode, late.stdout) == (7, "")
    assert "no longer does what run o.7 did, so no test was written" in late.stderr
    assert not list((tmp_path / "tests").glob("*late*"))


def test_a_child_of_another_module_is_imported_from_there(tmp_path):
    (tmp_path / "kids.py").write_text(FAMILY)
    (tmp_path / "top.py").write_text(
        "import kids\nfrom perdure import Run, agent\n"
        "@agent(version='1')\nasync def recorded(run: Run, order: str) -> int:\n    return await kids.clerk(order)\n"
    )
    assert perdure(tmp_path, "run", "top.py:recorded", "order=o-7", "--id", "o7").returncode == 0
    made = perdure(tmp_path, "export", "o7", "--test", "test_o7.py")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "test_o7.py").read_text()
    assert "from kids import clerk  # noqa: E402\nfrom perdure.testing import recorded  # noqa: E402\n" in text
    assert "from top import recorded as recorded_1  # noqa: E402\n" in text
    assert "RUN.replay(recorded_1, clerk)" in text
    passed = pytest_in(tmp_path)
    assert "2 passed" in passed.stdout, passed.stdout + passed.stderr


def test_a_test_that_cannot_be_written_is_refused_before_anything_is(tmp_path):
    for name in ("shop.py", "bad-name.py", "json.py"):
        (tmp_path / name).write_text(FAMILY)
    (tmp_path / "deploy.toml").touch()
    perdure(tmp_path, "run", "shop.py:support", "order=o-7", "--id", "o7")
    for words, why in (
        (("shop.py:support", "--test", "nowhere/test_o7.py"), "there is no folder nowhere"),
        (("nothing.py:support", "--test", "test_o7.py"), "nothing.py does not exist"),
        (("bad-name.py:support", "--test", "test_o7.py"), "cannot be imported by its name"),
        (("json.py:support", "--test", "test_o7.py"), "cannot be imported by its name"),
        (("shop.py", "--test", "test_o7.py"), "FILE.py:NAME"),
        (("shop.py:stranger", "--test", "test_o7.py"), "belongs to agent 'support', but shop.py:stranger is agent 'stranger'"),
        (("deploy.toml", "--test", "test_o7.py"), 'Plan.from_file("deploy.toml", tools), and name it: FILE.py:deploy'),
        (("shop.py:support", "--test", "test_o7.txt"), "ends in .py, such as test_o7.py"),
        (("shop.py:support", "--test", "test_o7.py", "-o", "test_o7.py"), "cannot be the export and its test"),
        (("shop.py:support",), "only needed for a test"),
        (("shop.py:support", "--test", "test_o7.py", "-o", "/tmp/o7.jsonl"), "lies beside it"),
        (("shop.py:support", "--test", "shop.py"), "is there already"),
    ):
        refused = perdure(tmp_path, "export", "o7", *words)
        assert (refused.returncode, refused.stdout) == (2, ""), words
        assert why in refused.stderr
    assert not [path for path in tmp_path.iterdir() if "o7" in path.name]
