"""Agents with models of all three wire formats, with the clients of the SDKs; one tool for each effect class."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from tests.crash import fate
from tests.crash.chores import work
from tests.crash.clans import kin
from tests.crash.errands import TOOLS, look
from tests.crash.ledger import Ledger
from tests.crash.petitions import asked_brief, asked_keyed, asked_once

from perdure import Agent, Budget, Call, Plan, ReAct, Retry, Run, Step, agent, ref, tool
from perdure.models import Anthropic, Message, Model, OpenAI, Price, User

# In integer micro-dollars for each token, so that sums are exact.
PRICE = Price(input=3, output=15, cached=1, stored=4)
LONG = "All that there is to know about it. " * 10  # long enough to be journaled once and referred to


def overhear(call: Call, text: str) -> None:
    """A listener of the streamed answer. It may be the last to have heard a piece."""
    fate.current().meet("stream", "before")


def _options() -> dict[str, Any]:
    return {"price": PRICE, "listener": overhear, "retry": Retry(attempts=5, base=0.01), "timeout": 30}


claude = Anthropic("claude-crash", **_options())
chat = OpenAI("gpt-chat-crash", api="chat", **_options())
responses = OpenAI("gpt-crash", api="responses", **_options())
MODELS: dict[str, Model] = {model.name: model for model in (claude, chat, responses)}


@tool(effect="read")
async def dossier(what: str, call: Call) -> str:
    """Everything that is known about it."""
    Ledger.here().note("looked", what, call)
    return f"{what}: {LONG}"


class Verdict(BaseModel):
    guilty: bool
    years: int


HANDS: list[Any] = [*TOOLS.values(), look, dossier, work, asked_once, asked_keyed, asked_brief, kin]
HOW = "Do what you are asked to."


def clerk_of(name: str, model: Model = claude, instructions: str = HOW, tools: list[Any] = HANDS, **options: Any) -> ReAct:
    return ReAct(name, model=model, tools=tools, instructions=instructions, **options)


clerk = clerk_of("clerk")
clerk_chat = clerk_of("clerk_chat", chat)
clerk_responses = clerk_of("clerk_responses", responses)
boss = clerk_of("boss", tools=[clerk])
judge = clerk_of("judge", tools=[look], output=Verdict)
pinned = clerk_of("pinned", version="1")
thrifty = clerk_of("thrifty", budget=Budget(usd=1.0, tokens=50_000), max_tokens=500)


@agent(version="1")
async def asker(run: Run, prompt: str) -> list[str]:
    """Free Python: two questions at the same time, and one about their answers."""
    left, right = await asyncio.gather(claude.ask(f"{prompt} left"), claude.ask(f"{prompt} right"))
    both: list[Message] = [User(f"{prompt} left"), left.message, User(f"the other one said: {right.text}")]
    last = await claude.ask(both, max_tokens=100)
    return [left.text, right.text, last.text]


# -- plans ------------------------------------------------------------------------------------------------------------------
def route_of(middle: str = "order", **options: Any) -> Plan:
    steps = [
        Step("before", look, {"what": "before"}),
        Step("order", TOOLS["keyed"], {"what": middle}, after=["before"]),
        Step("settle", TOOLS["once_reconcile"], {"what": ref("order")}),
        Step("told", look, {"what": ref("settle")}),
    ]
    return Plan("route", steps, **options)


route = route_of()
planner = Plan.from_model(claude, [TOOLS["keyed"], TOOLS["once_reconcile"], look], name="planner")
careful = Plan.from_model(claude, [TOOLS["keyed"], look], name="careful", approval=True)

AGENTS: dict[str, Agent[..., Any]] = {
    found.name: found for found in (clerk, clerk_chat, clerk_responses, boss, judge, pinned, thrifty, asker, route, planner, careful, kin)
}

# -- the same tools in another release (T30) --------------------------------------------------------------------------


@tool(effect="keyed", name="keyed")
async def keyed_otherwise(what: str, call: Call, urgent: bool = False) -> str:
    """The same tool with another schema."""
    raise AssertionError("a changed tool was called under a run that knew another one")


def changed(name: str, change: str) -> Agent[..., Any]:
    """The agent as another release has it: the same name, and another brain."""
    told: dict[str, Any] = {"version": "1"} if name == "pinned" else {}
    match change:
        case "prompt":
            return clerk_of(name, instructions="Do the contrary.", **told)
        case "model":
            return clerk_of(name, Anthropic("claude-newer", **_options()), **told)
        case "schema":
            others = [one for one in HANDS if one.name != "keyed"]
            return clerk_of(name, tools=[keyed_otherwise, *others], **told)
        case "plan":
            return route_of("another order", version=route.version)
        case _:
            raise AssertionError(change)
