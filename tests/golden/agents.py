"""The agents whose journals are kept. The copy beside a version's journals is frozen: what it recorded must replay with it for ever.

What the world does to them is told by whoever makes the journals, in `WORLD`; left alone, everything goes well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from perdure import Approval, Budget, Call, Fatal, NotSent, Outcome, Plan, ReAct, Retry, RetryLater, Run, Step, ToolFailed, agent, ref, tool
from perdure.models import Answer, Price, Request, Scripted, Tokens
from perdure.models.scripted import use, uses

WORLD: dict[
    str, Any
] = {}  # "die": tools that kill their worker; "fail": tool → errors, one for each attempt; "hook": what the hook says, time after time
TICK: list[Callable[[], None]] = []  # called when a tool begins, so that time goes by
DIE: list[Callable[[], None]] = []  # how a worker dies

ODD = {"text": "nul \0 é 漢 🦉 \u202e", "lone": "\ud800", "big": 2**80, "minus_zero": -0.0, "none": None, "nothing": [0, "", False, {}, []]}


def _begin(name: str) -> None:
    for tick in TICK:
        tick()
    if name in WORLD.get("die", ()):
        for die in DIE:
            die()
    errors = WORLD.get("fail", {}).get(name)
    if errors and (error := errors.pop(0)):
        raise ERRORS[error]


# -- tools of every effect class ------------------------------------------------------------------------------------------------
@tool(effect="read")
async def look(at: str) -> Any:
    _begin("look")
    return {"odd": ODD, "falsy": 0, "large": "x" * 700}.get(at, at)


@tool(effect="idempotent", timeout=30)
async def put(name: str, value: Any) -> None:
    _begin("put")


@tool(effect="keyed", retry=Retry(attempts=4, base=2.0))
async def pay(cents: int, call: Call) -> dict[str, Any]:
    _begin("pay")
    call.spend(usd=0.25)
    return {"key": call.key[:8], "cents": cents, "attempt": call.attempt}


@tool(effect="keyed")
async def ship(parcel: str) -> str:
    _begin("ship")
    return f"shipped {parcel}"


@ship.reconcile
async def _(parcel: str) -> Outcome:
    said = WORLD.get("hook") or ["happened"]
    match said.pop(0):
        case "happened":
            return Outcome.happened(f"shipped {parcel}")
        case "not_happened":
            return Outcome.not_happened()
        case "in_progress":
            return Outcome.in_progress()
        case why:
            return Outcome.unknown(why)


@tool
async def mail(to: str) -> str:
    _begin("mail")
    return f"mailed {to}"


@tool(effect="once")
async def stray(what: str) -> Any:
    _begin("stray")
    return {1, 2} if what == "set" else what


@tool(effect="transaction")
def book(amount: int, call: Call) -> int:
    call.connection.execute("CREATE TABLE IF NOT EXISTS ledger (amount INTEGER)")
    call.connection.execute("INSERT INTO ledger VALUES (?)", (amount,))
    return amount


@tool(effect="once", approval=Approval(by=("ann", "bob"), expires=3600, editable=("cents",)))
async def refund(order: str, cents: int) -> str:
    _begin("refund")
    return f"refunded {cents} for {order}"


@tool(effect="once", approval=Approval(by="role:finance", quorum=2, expires=60, on_expiry="escalate", escalate_to=("eve", "kim")))
async def wire(cents: int) -> str:
    _begin("wire")
    return f"wired {cents}"


@tool(effect="keyed", name="weigh")
async def weigh_in_grams(what: str) -> int:
    _begin("weigh")
    return 7


@tool(effect="keyed", name="weigh")
async def weigh(what: str, unit: str = "g") -> int:
    _begin("weigh")
    return 7


@tool(effect="once")
async def reserve(room: str) -> str:
    _begin("reserve")
    return f"{room}-1"


@reserve.compensate
async def _(room: str, result: str) -> str:
    return f"gave {result} back"


# -- agents ---------------------------------------------------------------------------------------------------------------------
@agent(version="1")
async def everyday(run: Run, order: str, odd: Any = None) -> dict[str, Any]:
    run.status("looking")
    run.label({"order": order, "batch": None}, tier="gold")
    one, two, falsy = await asyncio.gather(look("odd"), look(order), look("falsy"))
    run.note(f"it is {run.now().isoformat()}, \0 and 漢")
    large = await look("large")
    choice = run.decide("ship", among=["ship", "mail"], reason="cheaper")
    await put("choice", [choice, -0.0, 10**30, odd])
    shipped = await ship(two)
    booked = await book(5)
    return {
        "same": one == ODD,
        "falsy": falsy,
        "large": len(large),
        "shipped": shipped,
        "booked": booked,
        "die": run.random.randint(1, 6),
        "uuid": str(run.uuid()),
    }


@agent(version="1")
async def failing(run: Run) -> str:
    first = await pay(100)
    try:
        await stray("set")
    except ToolFailed as failed:
        run.note(f"{failed.kind}: {failed.message}")
    try:
        await mail("nobody")
    except ToolFailed as failed:
        run.note(f"{failed.kind} after {failed.attempts}")
    raise ValueError(f"enough, after {first['attempt']} attempts: \ud800 é")


@agent(version="1")
async def doubted(run: Run, names: list[str]) -> list[str]:
    said = []
    for name in names:
        try:
            said.append(await mail(name))
        except ToolFailed as failed:
            said.append(failed.kind)
    return said


@agent(version="1")
async def asked(run: Run) -> list[Any]:
    first = await run.request_approval("deploy", {"to": "prod", "canary": 5}, reason="friday", by="ann", editable="canary", four_eyes=True)
    said: list[Any] = [first.outcome, first.input]
    no = await run.request_approval("drop", "everything", expires=timedelta(minutes=5))
    late = await run.request_approval("late", expires=60)
    said += [no.outcome, no.note, late.outcome]
    try:
        async with asyncio.timeout(30):
            await run.request_approval("unwanted")
    except TimeoutError:
        said.append("withdrawn")
    for call in (refund("o-1", 500), refund("o-2", 600), wire(9)):
        try:
            said.append(await call)
        except ToolFailed as failed:
            said.append(failed.kind)
    return said


@agent(version="1")
async def waiting(run: Run) -> list[Any]:
    await asyncio.sleep(90)
    said: list[Any] = [await run.receive("go"), await run.receive("go")]
    try:
        said.append(await run.receive("never", timeout=10))
    except TimeoutError:
        said.append("nobody")
    await pay(1)
    return [*said, run.now().isoformat()]


@agent(version="1")
async def child(run: Run, what: str) -> str:
    if what == "fail":
        raise Fatal("as told")
    return await ship(what)


@agent(version="1")
async def family(run: Run) -> list[str]:
    said = [await child("parcel")]
    try:
        await child("fail")
    except ToolFailed as failed:
        said.append(failed.type)
    return said


@agent(version="1")
async def cancellable(run: Run) -> str:
    try:
        await run.receive("never")
    finally:
        await put("cleaned", True)
    return "not reached"


@agent(version="1", budget=Budget(usd=0.40, calls=10))
async def spender(run: Run) -> int:
    spent = 0
    for _ in range(3):
        spent += (await pay(25))["cents"]
    return spent


@agent(name="changing", version="1")
async def changing_1(run: Run) -> list[Any]:
    said = [await weigh_in_grams("a")]
    await asyncio.sleep(60)
    said.append(await weigh_in_grams("b"))
    return said


@agent(name="changing", version="2")
async def changing_2(run: Run) -> list[Any]:
    said = [await weigh("a")]
    await asyncio.sleep(60)
    said.append(await weigh("b"))
    if run.patched("third"):
        said.append(await weigh("c"))
    return said


@agent(version="1")
async def steady(run: Run, name: str) -> str:
    await put("first", name)
    await asyncio.sleep(60)
    await put("second", name)
    return name


@agent(name="steady", version="1")
async def unsteady(run: Run, name: str) -> str:
    """What somebody has made of `steady` without saying so. No journal was begun with it."""
    await put("first", name.upper())
    return name


@agent(version="1")
async def poisoned(run: Run) -> str:
    await put("poison", 1)
    return await ship("a cure")


def _conclude(request: Request) -> Answer:
    _begin("model")
    return Answer("that is all", tokens=Tokens(input=100, output=7))


thinker = ReAct(
    "thinker",
    model=Scripted(
        [uses(use("look", at="left"), use("pay", cents=3), text="let me see"), uses(use("nothing", x=1)), _conclude], price=Price(3, 15)
    ),
    tools=[look, pay],
    instructions="be brief",
    version="1",
)


def _talker(version: str, told: str, *tools: Any) -> ReAct:
    lines: list[Any] = [uses(use("look", at="left")), uses(use("refund", order="o-1", cents=20_000)), "that is all"]
    return ReAct("talker", model=Scripted(lines), tools=tools, instructions=told, version=version)


talker_1 = _talker("1", "be brief", look, refund)
talker_2 = _talker("2", "be kind", refund, put)

_REFUND = uses(use("refund", order="o-1", cents=20_000))
listener = ReAct(
    "listener", model=Scripted([_REFUND, _REFUND, uses(use("refund", order="o-1", cents=100)), "that is all"]), tools=[refund], version="1"
)

planned = Plan(
    "planned",
    steps=[
        Step("room", reserve, {"room": "r"}),
        Step("tell", mail, {"to": ref("room")}, approval=True),
        Step("never", mail, {"to": "x"}, when=ref("room") == "other"),
    ],
    version="1",
)


@agent(version="1")
async def mended(run: Run, parcel: str) -> str:
    paid = await pay(5)
    extra = await run.receive("extra")
    await put(parcel, extra)
    return f"{parcel} with {extra} for {paid['cents']}"


@agent(version="1", budget=Budget(calls=3))
async def thrifty(run: Run, what: str, times: int = 1) -> str:
    for _ in range(times):
        await put(what, times)
    return what


@agent(version="1")
async def long(run: Run, parcel: str) -> list[str]:
    """Three lives: a signal is not received, a timer and an approval are open, and a call is under way at a checkpoint."""
    done: list[str] = run.restored or []
    asked = asyncio.create_task(run.request_approval("go on", {"parcel": parcel}), name="asked")
    bell = asyncio.create_task(asyncio.sleep(600.0), name="bell")
    if len(done) < 2:
        await run.receive("go")
        paid = await pay(len(done) + 1)
        await run.checkpoint([*done, f"{paid['cents']} {run.uuid()}"])
    decision = await asked
    await bell
    return [*done, decision.outcome, *run.receive_all("extra")]


AGENTS = [
    long,
    everyday,
    failing,
    doubted,
    asked,
    waiting,
    family,
    child,
    cancellable,
    spender,
    changing_1,
    changing_2,
    steady,
    mended,
    poisoned,
    thinker,
    talker_1,
    listener,
    talker_2,
    thrifty,
    planned,
]
ERRORS = {"not_sent": NotSent("no line"), "later": RetryLater(after=7), "timeout": TimeoutError("no answer"), "fatal": Fatal("never")}
