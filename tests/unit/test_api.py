"""The public API: the exported names, what users see of a run, and old names that still work for one version."""

from __future__ import annotations

import asyncio
import copy
import inspect
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from msgspec import structs

import perdure
from perdure import Budget, InvalidInput, Perdure, Run, RunInfo, RunStatus, agent, sync, tool
from perdure.app import info_of
from perdure.core.events import Limits
from perdure.store.api import RunRow


@tool(effect="read")
async def look(what: str) -> str:
    return what


@agent(version="1")
async def ticket(run: Run, id: int, queue: str = "none") -> list[Any]:
    return [id, queue]


@agent(version="1")
async def asker(run: Run) -> bool:
    return (await run.request_approval("go on")).granted


@agent(version="1")
async def old_asker(run: Run) -> bool:
    return (await run.approve("go on")).granted


@agent(version="1")
async def collector(run: Run) -> list[Any]:
    first = run.receive_all("word")
    await run.receive("go")
    return [first, run.receive_all("word"), run.receive_all("word")]


# -- exported names ---------------------------------------------------------------------------------------------------
def test_everything_that_the_app_and_the_handle_return_is_exported() -> None:
    exported = {getattr(perdure, name) for name in perdure.__all__}
    plain = {str, int, float, bool, dict, list, tuple, type(None), Any}
    for kind in (perdure.Perdure, perdure.Handle):
        for name, made in vars(kind).items():
            if name.startswith("_") or not inspect.isfunction(made) or name in ("row", "ask", "load"):
                continue
            wanted = str(get_type_hints_of(made, kind).get("return"))
            for one in ("RunRow", "Store", "Reading", "Lease"):
                assert one not in wanted, (kind, name)
            returned = get_type_hints_of(made, kind).get("return")
            if inspect.isclass(returned) and returned not in plain:
                assert returned in exported, (kind, name, returned)


def get_type_hints_of(made: Any, kind: type) -> dict[str, Any]:
    module = inspect.getmodule(kind)
    try:
        return get_type_hints(made, vars(module))
    except (NameError, TypeError):
        return {"return": made.__annotations__.get("return")}


def test_blocking_methods_have_the_signatures_and_docstrings_of_the_async_ones() -> None:
    for ours, theirs in ((sync.Perdure, perdure.Perdure), (sync.Handle, perdure.Handle)):
        for name in ("start", "run", "approve", "unpause", "list", "count", "costs", "info", "status", "result", "events"):
            if hasattr(theirs, name):
                assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name)), name
                assert getattr(ours, name).__doc__ == getattr(theirs, name).__doc__, name


# -- what users see of a run ----------------------------------------------------------------------------------------------------
def test_info_has_what_a_user_needs_and_nothing_of_leases() -> None:
    async def main() -> RunInfo:
        async with Perdure("sqlite://", [ticket]) as app:
            handle = await app.start(ticket.input(7), id="r", tenant="acme", priority=3)
            assert await handle.status() == "queued"
            assert await handle.result() == [7, "none"]
            return await handle.info()

    before = datetime.now(UTC)
    info = asyncio.run(main())
    assert (info.id, info.agent, info.tenant, info.priority, info.status, info.finished) == ("r", "ticket", "acme", 3, "succeeded", True)
    assert before <= info.created <= info.updated <= datetime.now(UTC)
    assert info.due is None
    assert not {"epoch", "head", "lost", "lost_with", "crashes", "input_digest"} & set(info.__struct_fields__)


def test_old_fields_still_work_with_a_warning_and_others_do_not_exist() -> None:
    async def main() -> tuple[RunInfo, RunStatus, RunRow | None]:
        async with Perdure("sqlite://", [ticket]) as app:
            handle = await app.start(ticket.input(7), id="r")
            return await handle.info(), await handle.status(), app.reading.get("r")

    info, status, row = asyncio.run(main())
    assert row is not None
    with pytest.warns(DeprecationWarning, match="is called id since"):
        assert info.run_id == "r"
    with pytest.warns(DeprecationWarning, match="is called created since"):
        assert info.created_at == row.created_at
    with pytest.warns(DeprecationWarning, match="is called due since"):
        assert info.ready_at == row.ready_at
    with pytest.warns(DeprecationWarning, match="returns the status alone"):
        assert status.status == "queued"
    with pytest.warns(DeprecationWarning, match="returns the status alone"):
        assert status.agent == "ticket"
    assert copy.copy(status) == status
    with pytest.raises(AttributeError, match="epoch"):
        info.epoch  # noqa: B018


def test_a_damaged_time_hides_no_run() -> None:
    with sync.Perdure("sqlite://", [ticket]) as app:
        app.start(ticket.input(7), id="r")
        row = app.reading.get("r")
    assert row is not None
    info = info_of(structs.replace(row, ready_at=10**18, created_at=-(10**18)))
    assert info.due is not None
    assert (info.due.year, info.created.year) == (9999, 1970)


def test_runs_are_listed_and_counted() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [ticket, asker]) as app:
            for number in range(3):
                await app.start(ticket.input(number), id=f"t{number}", tenant="acme")
            await app.start(asker, id="a")
            await app.run(ticket.input(9), id="t9")
            assert await app.count() == {"queued": 4, "succeeded": 1}
            assert await app.count(agent="ticket", tenant="acme") == {"queued": 3}
            assert await app.count(agent="nothing") == {}
            assert [one.id for one in await app.list(limit=2)] == ["t9", "a"]
            last = (await app.list(limit=2))[-1]
            assert [one.id for one in await app.list(before=last.created)] == ["t2", "t1", "t0"]
            assert [one.id for one in await app.list(status="succeeded")] == ["t9"]
            assert [one.id for one in await app.list(tenant="acme", agent="ticket", limit=1)] == ["t2"]
            for wrong in ({"status": "gone"}, {"limit": 0}, {"tenant": 5}, {"agent": 5}, {"before": 5}):
                with pytest.raises(InvalidInput):
                    await app.list(**wrong)

    asyncio.run(main())


# -- starting -------------------------------------------------------------------------------------------------------------------
def test_the_arguments_of_an_agent_and_the_options_of_a_start_do_not_mix() -> None:
    with sync.Perdure("sqlite://", [ticket]) as app:
        assert app.run(ticket.input(id=7, queue="q"), id="r") == [7, "q"]
        with pytest.raises(InvalidInput, match=r"ticket.input\(…\) already has the arguments"):
            app.start(ticket.input(7), 8)
        with pytest.raises(InvalidInput, match="id"):
            ticket.input("seven")  # type: ignore[arg-type]


def test_a_budget_is_a_class() -> None:
    assert isinstance(Budget(usd=5), Budget)
    assert Budget(usd=5) == Budget(usd="5.0") != Budget(usd=5, on_exceed="fail")
    assert repr(Budget(usd=2.5, calls=3)) == "Budget(usd=2.5, calls=3, on_exceed='pause')"
    assert len({Budget(usd=5), Budget(usd=5)}) == 1
    assert ticket.budget is None
    assert agent(version="1", budget=Budget(calls=2))(asker.fn).budget == Limits(calls=2)


def test_signals_that_have_arrived_are_received_without_waiting() -> None:
    with sync.Perdure("sqlite://", [collector]) as app:
        handle = app.start(collector, id="r")
        app.drive("r", wait=False)
        for word in ("a", "b"):
            app.signal("r", "word", word)
        app.signal("r", "go")
        assert handle.result() == [[], ["a", "b"], []]


# -- old names ------------------------------------------------------------------------------------------------------------------
def test_old_names_still_work_with_a_warning() -> None:
    # cache_runs=0: the agent is replayed after the decision, and warns again.
    with sync.Perdure("sqlite://", [old_asker], settings=perdure.Settings(cache_runs=0)) as app:
        app.start(old_asker, id="r")
        with pytest.warns(DeprecationWarning, match="request_approval"):
            app.drive("r", wait=False)
        (asked,) = app.approvals()
        app.approve(asked.approval, by="ann")
        with pytest.warns(DeprecationWarning, match="request_approval"):
            assert app.handle("r").result() is True
        with pytest.warns(DeprecationWarning, match="unpause"), pytest.raises(perdure.PerdureError):
            app.requeue("r")


# -- settings -------------------------------------------------------------------------------------------------------------------
def test_an_app_reads_the_settings_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "perdure.toml").write_text('url = "sqlite:///from-file.db"\nconcurrency = 3\n')
    monkeypatch.setenv("PERDURE_ROLES", '{"finance": ["ann"]}')
    app = Perdure()
    assert (app.url, app.settings.concurrency, app.settings.roles) == ("sqlite:///from-file.db", 3, {"finance": ("ann",)})
    assert Perdure("sqlite://").url == "sqlite://"
    assert Perdure(settings=perdure.Settings()).settings.concurrency == 200
    monkeypatch.setenv("PERDURE_LEASE", "5")
    with pytest.raises(InvalidInput, match="PERDURE_LEASE_S"):
        Perdure()
