"""What happens to the runs whose journals are kept: one scene after the other, each in as many lives as it needs."""

from __future__ import annotations

import tempfile

from tests.golden.lives import Life, Stage

from perdure import Budget, Perdure
from perdure.core.events import RunRestored
from perdure.store.backup import Restoring
from perdure.store.open import open_store


# -- everything goes well, but for the worker ---------------------------------------------------------------------------------------
async def begin_everyday(stage: Stage) -> None:
    await stage.start(
        "everyday", "everyday", "o-1 é", {"odd": ["\ud800", 2**70, -0.0, "\0"]}, actor="user:17", labels={"batch": "b-1", "customer": "c-7"}
    )
    await stage.drive("everyday")


async def end_everyday(stage: Stage) -> None:
    assert (await stage.drive("everyday")).status == "succeeded"


async def fail(stage: Stage) -> None:
    await stage.start("failing", "failing")
    assert (await stage.drive("failing")).status == "failed"


# -- doubts ---------------------------------------------------------------------------------------------------------------------------
async def begin_doubted(stage: Stage) -> None:
    await stage.start("doubted", "doubted", ["a", "b", "c"])
    await stage.drive("doubted")


async def doubt_happened(stage: Stage) -> None:
    assert (await stage.drive("doubted")).status == "needs_attention"
    await stage.app.resolve("doubted", 1, happened="mailed a", by="ann", note="the outbox shows it")
    await stage.drive("doubted")


async def doubt_did_not_happen(stage: Stage) -> None:
    assert (await stage.drive("doubted")).status == "needs_attention"
    await stage.app.resolve("doubted", 2, did_not_happen=True, final=True, by="ann")
    assert (await stage.drive("doubted")).status == "needs_attention"
    await stage.app.resolve("doubted", 3, fail="nobody will ever know", by="bob")
    assert (await stage.drive("doubted")).status == "succeeded"


# -- people ---------------------------------------------------------------------------------------------------------------------------
async def ask(stage: Stage) -> None:
    app, clock = stage.app, stage.clock
    await stage.start("asked", "asked", actor="bob")
    await stage.drive("asked")
    await app.approve(await stage.asked("asked", 1), by="ann", edit={"canary": 1}, note="slowly")
    await stage.drive("asked")
    await app.reject(await stage.asked("asked", 2), reason="no", by="bob")
    await stage.drive("asked")
    clock.advance(61)  # nobody decides
    await stage.drive("asked")
    clock.advance(31)  # the agent waits no longer
    await stage.drive("asked")
    await app.approve(await stage.asked("asked", 5), by="bob", edit={"cents": 450})
    await app.reject(await stage.asked("asked", 6), reason="too much", by="ann")
    await app.approve(await stage.asked("asked", 7), by="ann", roles=("finance",))
    await stage.drive("asked")
    clock.advance(61)  # the second one does not come, and others are asked
    await stage.drive("asked")
    for who in ("eve", "kim"):
        await app.approve(await stage.asked("asked", 7), by=who)
    assert (await stage.drive("asked")).status == "succeeded"


# -- waiting --------------------------------------------------------------------------------------------------------------------------
async def begin_waiting(stage: Stage) -> None:
    await stage.start("waiting", "waiting")
    await stage.drive("waiting")
    await stage.app.pause("waiting", by="ann", reason="lunch")


async def end_waiting(stage: Stage) -> None:
    app = stage.app
    await app.unpause("waiting", by="ann")
    await app.signal("waiting", "go", {"n": 1}, key="once", by="bob")
    await app.signal("waiting", "go", {"n": 1}, key="once", by="bob")
    await app.signal("waiting", "go", "\ud800 and \0")
    assert (await stage.drive("waiting")).status == "succeeded"


# -- relatives ------------------------------------------------------------------------------------------------------------------------
async def raise_family(stage: Stage) -> None:
    await stage.start("family", "family")
    assert (await stage.drive("family")).status == "succeeded"


async def cancel(stage: Stage) -> None:
    for run_id in ("cancelled", "forced"):
        await stage.start("cancellable", run_id)
        await stage.drive(run_id)
    await stage.app.cancel("cancelled", by="ann", reason="not needed")
    assert (await stage.drive("cancelled")).status == "cancelled"
    await stage.app.cancel("forced", by="ann", force=True)


async def spend(stage: Stage) -> None:
    await stage.start("spender", "spender")
    assert (await stage.drive("spender")).status == "needs_attention"
    await stage.app.unpause("spender", by="ann", add=Budget(usd=1))
    assert (await stage.drive("spender")).status == "succeeded"


# -- other code -----------------------------------------------------------------------------------------------------------------------
async def begin_changing(stage: Stage) -> None:
    await stage.start("changing_1", "changing")
    await stage.app.engine.drive("changing", wait=False)


async def adopt(stage: Stage) -> None:
    await stage.app.adopt("changing", by="ann", note="the scales are new")
    assert (await stage.drive("changing")).status == "succeeded"


async def begin_diverged(stage: Stage) -> None:
    await stage.start("steady", "diverged", "a")
    await stage.app.engine.drive("diverged", wait=False)


async def diverge(stage: Stage) -> None:
    stage.clock.advance(60)
    assert (await stage.app.engine.drive("diverged", wait=False)).status == "needs_attention"


async def poison(stage: Stage) -> None:
    if await _is_new(stage, "poisoned"):
        await stage.start("poisoned", "poisoned")
    await stage.drive("poisoned")


async def survive(stage: Stage) -> None:
    assert (await stage.drive("poisoned")).status == "needs_attention"
    await stage.app.unpause("poisoned", by="ann", note="the tool is mended")
    assert (await stage.drive("poisoned")).status == "succeeded"


async def _is_new(stage: Stage, run_id: str) -> bool:
    return stage.app.store.get(run_id) is None


# -- minds ----------------------------------------------------------------------------------------------------------------------------
async def begin_to_think(stage: Stage) -> None:
    await stage.start("thinker", "thinker", "what is left?")
    await stage.app.signal("thinker", "message", {"text": "and be quick"}, by="user:17")
    await stage.drive("thinker")


async def think_to_the_end(stage: Stage) -> None:
    assert (await stage.drive("thinker")).status == "succeeded"


async def follow_plan(stage: Stage) -> None:
    await stage.start("planned", "planned")
    await stage.drive("planned")
    await stage.app.approve(await stage.asked("planned", 2), by="ann")
    assert (await stage.drive("planned")).status == "succeeded"
    assert (await stage.app.undo("planned", by="ann", accept=True)).status == "succeeded"


# -- runs that are left unfinished, for later versions ---------------------------------------------------------------
async def leave(stage: Stage) -> None:
    for run_id in ("asleep", "paused"):
        await stage.start("steady", run_id, run_id)
        await stage.app.engine.drive(run_id, wait=False)
    await stage.app.pause("paused", by="ann")
    await stage.start("asked", "asking", actor="bob")
    await stage.drive("asking")
    await stage.start("planned", "planning")
    await stage.drive("planning")
    await stage.start("waiting", "listening")
    await stage.drive("listening")
    await stage.start("everyday", "queued", "o-2")


async def leave_restored(stage: Stage) -> None:
    """A run of another journal, which was restored from its backup into this one."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/other.db"
        async with Perdure(url, agents=[stage.agents.waiting], clock=stage.clock) as other:
            here = Stage(other, stage.clock, stage.agents)
            await here.start("waiting", "restored")
            await here.drive("restored")
        source = open_store(url)
        restoring = Restoring(source, stage.app.store, to_url="here", by="ann")
        restoring.mark = RunRestored("ann", stage.clock.now(), "restore-1")
        restoring.now, restoring.new_id = stage.clock.now() + 60_000_000, stage.clock.new_id
        assert restoring.everything().runs == 1
        source.close()
    await stage.app.signal("restored", "news", "it is recorded, and wakes nothing", by="bob")


async def leave_in_doubt(stage: Stage) -> None:
    await stage.start("doubted", "doubting", ["a"])
    await stage.drive("doubting")


async def see_doubt(stage: Stage) -> None:
    assert (await stage.drive("doubting")).status == "needs_attention"


async def leave_held(stage: Stage) -> None:
    await stage.start("steady", "held", "h")
    await stage.drive("held")


# -- a failed run goes on -------------------------------------------------------------------------------------------------------------------
async def fail_after_paying(stage: Stage) -> None:
    await stage.start("mended", "mended", "m-1")
    await stage.app.signal("mended", "extra", "a ribbon", by="ann")
    assert (await stage.drive("mended")).status == "failed"


async def rewind(stage: Stage) -> None:
    await stage.app.rewind("mended", 3, by="ann", reason="the shelf is free again")
    assert (await stage.drive("mended")).status == "succeeded"


async def fork(stage: Stage) -> None:
    """A rehearsal, and a live fork: both with another result of the first call."""
    await stage.app.fork("mended", edits={1: {"cents": 6}}, answers=[{"tool": "put", "result": None}], id="rehearsed", by="ann")
    await stage.app.live_fork("mended", edits={1: {"cents": 7}}, id="forked", by="ann", reason="7 is right")
    assert (await stage.drive("forked")).status == "succeeded"


# -- new code for runs that exist ---------------------------------------------------------------------------------------------------
async def begin_to_talk(stage: Stage) -> None:
    await stage.start("talker_1", "talker", "what is left?")
    assert (await stage.drive("talker")).status == "waiting_approval"
    # This process does not have the code of the agent `thrifty`.
    await stage.app.start("thrifty", what="w", id="by-name", tenant="acme")
    await stage.app.start("thrifty", what="w", times="many", id="by-name-wrong", tenant="acme")


async def go_on_with_new_code(stage: Stage) -> None:
    await stage.app.adopt("talker", by="ann", note="kinder")
    await stage.app.approve(await stage.asked("talker", 4), by="ann", roles=["finance"])
    assert (await stage.drive("talker")).status == "succeeded"
    assert (await stage.drive("by-name")).status == "succeeded"
    assert (await stage.drive("by-name-wrong")).status == "failed"


# -- a run that takes checkpoints -------------------------------------------------------------------------------------------------------------
async def begin_long(stage: Stage) -> None:
    await stage.start("long", "long", "p-1")
    await stage.app.signal("long", "extra", "a ribbon", by="ann")
    await stage.drive("long")
    await stage.app.signal("long", "go", 1, by="ann")
    await stage.drive("long")


async def go_on_long(stage: Stage) -> None:
    await stage.app.signal("long", "go", 2, by="ann")
    await stage.drive("long")
    await stage.app.approve(await stage.asked("long", 1), by="bob")
    await stage.drive("long")
    stage.clock.advance(601)
    assert (await stage.drive("long")).status == "succeeded"


# -- messages while a call waits for its approval -------------------------------------------------------------------------------------------
async def listen(stage: Stage) -> None:
    """The proposal is kept after the first message. It is approved, and then withdrawn, because a message came before the call began."""
    await stage.start("listener", "listener", "o-1 was paid twice")
    await stage.drive("listener")
    await stage.app.signal("listener", "message", "is it on its way?", by="user:17")
    assert (await stage.drive("listener")).status == "waiting_approval"
    await stage.app.approve(await stage.asked("listener", 2), by="ann")
    await stage.app.signal("listener", "message", "it was only 100", by="user:17")
    await stage.drive("listener")
    assert (await stage.drive("listener")).status == "waiting_approval"
    await stage.app.approve(await stage.asked("listener", 5), by="bob")
    assert (await stage.drive("listener")).status == "succeeded"


LIVES = (
    Life(begin_everyday, {"die": ["ship"]}, killed=True),
    Life(end_everyday, {"hook": ["in_progress", "not_happened"]}),
    Life(fail, {"fail": {"pay": ["not_sent", "later", "timeout"], "mail": ["fatal"]}}),
    Life(begin_doubted, {"die": ["mail"]}, killed=True),
    Life(doubt_happened, {"die": ["mail"]}, killed=True),
    Life(doubt_did_not_happen, {"fail": {"mail": ["", "timeout"]}}),
    Life(ask),
    Life(begin_waiting),
    Life(end_waiting),
    Life(raise_family),
    Life(cancel),
    Life(spend),
    Life(begin_changing, served=("changing_1",)),
    Life(adopt, served=("changing_2",)),
    Life(begin_diverged),
    Life(diverge, served=("unsteady",)),
    *[Life(poison, {"die": ["put"]}, killed=True)] * 5,
    Life(survive, {"fail": {"ship": ["timeout"]}, "hook": ["unknown to us", "happened"]}),
    Life(begin_to_think, {"die": ["model"], "fail": {"pay": ["not_sent"]}}, killed=True),
    Life(think_to_the_end, {"fail": {"model": ["timeout"]}}),
    Life(follow_plan),
    Life(leave),
    Life(leave_restored),
    Life(leave_in_doubt, {"die": ["mail"]}, killed=True),
    Life(see_doubt),
    Life(leave_held, {"die": ["put"]}, killed=True),
    Life(fail_after_paying, {"fail": {"put": ["fatal"]}}),
    Life(rewind),
    Life(fork),
    Life(begin_to_talk, served=("talker_1",)),
    Life(go_on_with_new_code, served=("talker_2", "thrifty")),
    Life(begin_long),
    Life(go_on_long),
    Life(listen),
)
