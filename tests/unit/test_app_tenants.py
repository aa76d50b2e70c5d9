"""For one tenant the runs of another do not exist (G16): every method of the app that takes a run or an approval."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run

from perdure import Conflict, NotFound, Perdure, Run, agent, tool
from perdure.app import Handle
from perdure.sync import Perdure as BlockingPerdure


@tool(effect="idempotent", approval=True)
async def pay() -> str:
    return "paid"


@agent(version="1")
async def payer(run: Run) -> str:
    return await pay()


@agent(version="1")
async def quick(run: Run) -> str:
    return "done"


# What each door needs besides the run or the approval.
DOORS: dict[str, dict[str, Any]] = {
    "drive": {"wait": False},
    "approve": {"by": "eve"},
    "reject": {"by": "eve", "reason": "no"},
    "signal": {"topic": "t"},
    "cancel": {},
    "pause": {},
    "unpause": {},
    "adopt": {},
    "resolve": {"call": 1, "did_not_happen": True},
    "transcript": {},
    "plan_undo": {},
    "undo": {},
    "retry": {},
    "rewind": {"to": 2},
    "fork": {},
    "live_fork": {},
    "diff": {"other": "ended"},
}
LOOKS = ["info", "status", "result", "events", "follow", "state", "inspect"]
# Deprecated; for perdure's own verbs; an artifact is refused when it is opened (tests/artifacts/test_artifacts.py).
NOT_PUBLIC = {"requeue", "row", "artifact"}


def takes(method: Callable[..., Any]) -> str | None:
    """The parameter of the method that names one run or one approval."""
    first = [name for name in inspect.signature(method).parameters if name != "self"][:1]
    return first[0] if first and first[0] in ("run_id", "approval") else None


def public(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: made for name, made in vars(kind).items() if not name.startswith("_") and name not in NOT_PUBLIC and inspect.isfunction(made)
    }


def test_no_door_is_forgotten_here() -> None:
    with_id = {name for name, made in public(Perdure).items() if takes(made)}
    assert with_id == {*DOORS, "handle"}
    assert set(public(Handle)) == set(LOOKS)
    for name in with_id:
        assert "tenant" in inspect.signature(getattr(Perdure, name)).parameters, name
        options = inspect.signature(getattr(BlockingPerdure, name)).parameters
        assert "tenant" in options or any(one.kind is one.VAR_KEYWORD for one in options.values()), name


async def two_tenants(app: Perdure) -> str:
    """A run of acme that waits for a person, a run of acme that has ended, and the approval."""
    await app.start(payer, id="waits", tenant="acme")
    await app.engine.drive("waits", wait=False)
    await app.start(quick, id="ended", tenant="acme")
    await app.engine.drive("ended")
    (asked,) = await app.approvals(tenant="acme")
    assert await app.approvals(tenant="rival") == []
    return asked.approval


async def refused(work: Any) -> str:
    with pytest.raises(NotFound) as error:
        await (anext(work) if isinstance(work, AsyncIterator) else work)
    return str(error.value)


@pytest.mark.parametrize("door", DOORS)
def test_another_tenant_s_run_cannot_be_told_from_one_that_does_not_exist(door: str) -> None:
    async def main() -> None:
        async with perdure(None, [payer, quick]) as app:
            approval = await two_tenants(app)
            ids = [approval] if door in ("approve", "reject") else ["waits", "ended"]
            call = getattr(app, door)
            nowhere = await refused(call("nowhere", **DOORS[door], tenant="rival"))
            for one in ids:
                before = [app.store.read(run_id) for run_id in ("waits", "ended")]
                assert await refused(call(one, **DOORS[door], tenant="rival")) == nowhere.replace("nowhere", one)
                assert [app.store.read(run_id) for run_id in ("waits", "ended")] == before

    run(main())


@pytest.mark.parametrize("look", LOOKS)
def test_a_handle_for_a_tenant_sees_nothing_of_another_s_run(look: str) -> None:
    async def main() -> None:
        async with perdure(None, [payer, quick]) as app:
            await two_tenants(app)
            nowhere = await refused(getattr(app.handle("nowhere", tenant="rival"), look)())
            for one in ("waits", "ended"):
                assert await refused(getattr(app.handle(one, tenant="rival"), look)()) == nowhere.replace("nowhere", one)
            assert (await app.handle("ended", tenant="acme").row()).status == "succeeded"

    run(main())


def test_the_tenant_itself_passes_every_door_that_is_open() -> None:
    async def main() -> Any:
        async with perdure(None, [payer, quick]) as app:
            approval = await two_tenants(app)
            await app.pause("waits", tenant="acme")
            await app.unpause("waits", tenant="acme")
            await app.adopt("waits", tenant="acme")
            await app.approve(approval, by="ann", tenant="acme")
            await app.drive("waits", tenant="acme")
            assert (await app.plan_undo("waits", tenant="acme")).run_id == "waits"
            return await app.handle("waits", tenant="acme").result()

    assert run(main()) == "paid"


def test_that_an_id_is_taken_is_all_that_another_tenant_learns() -> None:
    async def main() -> list[str]:
        async with perdure(None, [payer, quick]) as app:
            await two_tenants(app)
            await app.start(quick, id="pruned", tenant="acme")
            await app.engine.drive("pruned")
            later = (await app.handle("pruned", tenant="acme").row()).updated_at + 1
            assert app.store.prune(["pruned"], later, by="ann", now=later).runs == 1
            said = []
            for one in ("waits", "ended", "pruned"):
                for code in (payer, quick):
                    with pytest.raises(Conflict) as error:
                        await app.start(code, id=one, tenant="rival")
                    said.append(str(error.value).replace(one, "RUN"))
            with pytest.raises(Conflict, match=r"was pruned on .* by ann"):
                await app.start(quick, id="pruned", tenant="acme")
            return said

    assert set(run(main())) == {"the run id RUN is taken; choose another"}
