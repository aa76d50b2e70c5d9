"""`perdure prune` with real journals, on both stores, killed at every transaction, while a worker continues."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.mortal import Mortals
from tests.e2e.moving_tools import SETTINGS, World, finish, plant, verified
from tests.unit.postgres_tools import empty

from perdure import Conflict, Perdure, Run, agent, tool
from perdure.store.open import open_store

ONE = {"BATCH_FAMILIES": 1}  # in each transaction
COPIES = 3
FAMILIES = {f"{name}-{n}" for name in ("shop", "waiting", "parent", "large", "failing") for n in range(COPIES)}


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    server = Mortals()
    yield server
    server.close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal in which all runs have ended, except the waiting runs of the last copy."""
    folder = tmp_path_factory.mktemp("ended")
    world = World(folder)

    async def main() -> None:
        await plant(f"sqlite:///{folder}/a.db", world, COPIES)
        await finish(f"sqlite:///{folder}/a.db", world, COPIES)
        async with Perdure(f"sqlite:///{folder}/a.db", world.agents(), settings=SETTINGS) as app:
            await app.start("waiting", "open", id="open")
            await app.engine.drive("open", wait=False)

    asyncio.run(main())
    store = open_store(f"sqlite:///{folder}/a.db")
    for notice in store.take_notices(2**62, 999, 1):
        store.notice_done(notice.notice_id)
    store.close()
    return folder / "a.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, ended: Path, tmp_path: Path, mortals: Mortals) -> str:
    shutil.copy(ended, tmp_path / "a.db")
    here = f"sqlite:///{tmp_path}/a.db"
    if request.param == "sqlite":
        return here
    there = empty(request.getfixturevalue("postgres"))
    code, _, err = mortals.run("copy", "--from", here, "--to", there)
    assert code == 0, err
    return there


def test_killed_at_every_transaction_no_family_is_ever_half_there(mortals: Mortals, url: str) -> None:
    deaths = 0
    left = set(verified(url))
    for death in [(1, "after"), (1, "inside"), (2, "after"), (2, "inside")] * 9:
        code, _, err = mortals.run("prune", "--older-than", "0s", "--url", url, dies=death, constants=ONE)
        if code == 0:
            break
        assert code == -signal.SIGKILL, err
        deaths += 1
        there = set(verified(url))
        gone = left - there
        # A family has one to three runs, and one or none goes in a transaction.
        assert len({run_id.partition("/")[0] for run_id in gone}) == death[0] - (death[1] == "inside"), gone
        assert not {run_id.partition("/")[0] for run_id in there} & {run_id.partition("/")[0] for run_id in gone}
        left = there
    assert deaths > 12
    assert mortals.run("prune", "--older-than", "0s", "--url", url)[0] == 0
    assert set(verified(url)) == {"open"}
    store = open_store(url)
    assert {tombstone.run_id.partition("/")[0] for _, tombstone in store.tombstones()} == FAMILIES
    assert len(store.tombstones()) == len(FAMILIES) + 2 * COPIES
    assert store.missing_blobs([tombstone.head.hex() for _, tombstone in store.tombstones()[:1]]) != []
    store.close()


def test_what_is_said_before_and_after(mortals: Mortals, url: str) -> None:
    code, out, _ = mortals.run("prune", "--older-than", "1h", "--url", url, "--json")
    assert (code, json.loads(out)["families"]) == (0, 0)
    code, out, _ = mortals.run("prune", "--older-than", "0s", "--dry-run", "--url", url, "--json")
    assert (json.loads(out)["families"], json.loads(out)["runs"]) == (len(FAMILIES), len(FAMILIES) + 2 * COPIES)
    code, out, _ = mortals.run("prune", "--older-than", "0s", "--status", "failed", "--url", url)
    assert out.startswith(f"pruned {COPIES} families, {COPIES} runs, ")
    code, out, _ = mortals.run("prune", "--older-than", "0s", "--status", "succeeded", "--limit", "2", "--url", url, "--json")
    assert json.loads(out)["families"] == 2
    for verb in ("show", "why", "events", "trace"):
        code, _, err = mortals.run(verb, "failing-0", *(("5",) if verb == "trace" else ()), "--url", url)
        assert code == 6, err
        assert "run failing-0 (failing, tenant default) failed at " in err
        assert " and was pruned at " in err
    code, out, _ = mortals.run("audit", "--url", url)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["run_id"] for line in lines if line["type"] == "run_pruned"][:COPIES] == [f"failing-{n}" for n in range(COPIES)]
    assert "failing-0" not in {line["run_id"] for line in lines if line["type"] != "run_pruned"}
    assert f"ok    pruned        {COPIES + 2} runs were pruned, the last ones at " in mortals.run("doctor", "--url", url)[1].replace(
        "  4 ", "  4 "
    )
    code, out, _ = mortals.run("verify", "--url", url)
    assert (code, f": all as they were written; {COPIES + 2} runs were pruned before\n" in out) == (0, True)
    assert mortals.run("costs", "--url", url, "--json")[2].startswith(f"without {COPIES + 2} runs that were pruned")
    code, _, err = mortals.run("prune", "--older-than", "0s", "--status", "running", "--url", url)
    assert code == 2
    assert "one or more of succeeded, failed, cancelled" in err


def test_an_id_whose_run_was_pruned_starts_nothing(mortals: Mortals, url: str, tmp_path: Path) -> None:
    """T14: otherwise its effects would happen twice."""
    mortals.run("prune", "--older-than", "0s", "--url", url)
    world = World(tmp_path)

    async def main() -> None:
        async with Perdure(url, world.agents(), settings=SETTINGS) as app:
            with pytest.raises(Conflict, match=r"run failing-0 ran .* and was pruned"):
                await app.run("failing", id="failing-0")

    asyncio.run(main())
    assert not world.path.exists()


def test_a_worker_goes_on_beside_it(mortals: Mortals, url: str, tmp_path: Path) -> None:
    @tool(effect="idempotent")
    async def step(n: int) -> int:
        return n

    @agent(version="1")
    async def walker(run: Run) -> int:
        return sum([await step(n) for n in range(50)])

    pruned = threading.Thread(target=lambda: mortals.run("prune", "--older-than", "0s", "--url", url, constants=ONE))

    async def main() -> list[int]:
        async with Perdure(url, [walker], settings=SETTINGS) as app:
            pruned.start()
            return list(await asyncio.gather(*(app.run(walker, id=f"w-{n}") for n in range(4))))

    assert asyncio.run(main()) == [sum(range(50))] * 4
    pruned.join(60)
    assert set(verified(url)) >= {"open"}


# -- by name, by tenant, by query -------------------------------------------------------------------------------------
def test_a_named_run_is_pruned_with_its_whole_family_and_only_if_it_has_ended(mortals: Mortals, url: str) -> None:
    code, _, err = mortals.run("prune", "--run", "open", "--yes", "--url", url)
    assert (code, "run open has not ended: it is waiting" in err, "perdure cancel open" in err) == (2, True, True), err
    code, _, err = mortals.run("prune", "--run", "parent-0/1", "--yes", "--url", url)
    assert (code, "is part of a family, which is pruned as a whole: --run parent-0" in err) == (2, True), err
    assert mortals.run("prune", "--run", "nosuch", "--yes", "--url", url)[0] == 6
    code, _, err = mortals.run("prune", "--run", "parent-0", "--url", url)
    assert (code, "prune asks before it deletes, and this is no terminal" in err) == (2, True), err
    assert len(verified(url)) == len(FAMILIES) + 2 * COPIES + 1, "nothing was deleted so far"
    code, out, err = mortals.run("prune", "--run", "parent-0", "--run", "shop-1", "--yes", "--url", url)
    assert (code, out.startswith("pruned 2 families, 4 runs, ")) == (0, True), (out, err)
    assert err.startswith("2 families with 4 runs and ")
    assert "  2 succeeded\n  1 of shop, 1 of parent\n" in err or "  2 succeeded\n  1 of parent, 1 of shop\n" in err
    assert not {"parent-0", "parent-0/1", "shop-1"} & set(verified(url))
    assert mortals.run("verify", "--url", url)[0] == 0


def test_a_query_and_a_tenant_choose_families_and_unfinished_ones_stay(mortals: Mortals, url: str) -> None:
    code, out, _ = mortals.run("prune", "--where", "agent:failing", "--dry-run", "--url", url)
    assert out.startswith(f"would prune {COPIES} families, {COPIES} runs, ")
    code, _, err = mortals.run("prune", "--where", "status:waiting", "--yes", "--url", url)
    assert (code, "only runs that have ended are pruned" in err) == (2, True)
    code, out, _ = mortals.run("prune", "--where", "agent:failing", "--limit", "1", "--yes", "--json", "--url", url)
    assert (json.loads(out)["families"], json.loads(out)["before"]) == (1, None)
    assert "failing-0" not in verified(url), "the oldest goes first"
    assert mortals.run("prune", "--tenant", "nosuch", "--yes", "--url", url)[1].startswith("pruned 0 families")
    code, out, _ = mortals.run("prune", "--tenant", "default", "--older-than", "1h", "--yes", "--url", url)
    assert out.startswith("pruned 0 families"), "both must be true"
    code, out, _ = mortals.run("prune", "--tenant", "default", "--yes", "--url", url)
    assert out.startswith("pruned 11 families")
    store = open_store(url)
    assert {row.tenant for row in store.list() if row.run_id != "open"} == {"t"}
    store.close()


def test_a_family_with_an_unfinished_run_or_an_unsent_notice_is_kept_with_the_reason(mortals: Mortals, url: str) -> None:
    store = open_store(url)
    root, *_ = store.families()
    assert [type(one).__name__ for one in store.judged([root.root, "open", "nosuch"], 2**62)] == ["Prunable", "Kept"]
    (late,) = store.judged([root.root], 1)
    assert "ended later than that" in getattr(late, "why", "")
    store.close()
