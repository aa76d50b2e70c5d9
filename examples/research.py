"""Many agents, one budget: a question is split among children, which share one budget.

    perdure run examples/research.py:research question="why do runs survive" --id research-1
    perdure costs --by agent
    perdure show research-1/1          a child is a separate run, with its own journal, lease and id

A function that costs $0.03 to $0.05 a call stands for the model, so that no key is needed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Budget, BudgetExceeded, Call, ChildFailed, Run, agent, tool

TOPICS = ("journals", "leases", "replay", "effects", "approvals", "clocks", "locks", "retries")


@tool(effect="read", timeout=60, cost="0.05")  # reserved in the budget before each call …
async def ask_model(prompt: str, call: Call) -> str:
    """What the model says."""
    await asyncio.sleep(0.02)
    words = len(prompt.split())
    # … and this reports the real cost.
    call.spend(usd="0.03" if words < 6 else "0.05", tokens_in=words, tokens_out=3 * words, model="stand-in")
    return f"{prompt}: {words} words"


@agent(version="1")
async def investigate(run: Run, question: str, topic: str, rounds: int = 3) -> list[str]:
    """What can be found about one topic with the money that is left."""
    found: list[str] = []
    for number in range(rounds):
        try:
            found.append(await ask_model(f"{question} {topic} {number}"))
        except BudgetExceeded:  # nothing was sent
            run.note(f"no money left after {len(found)} of {rounds}")
            break
    return found


@agent(version="1", budget=Budget(usd="0.50", on_exceed="fail"))  # "pause" would stop the run until a person raises it
async def research(run: Run, question: str, topics: tuple[str, ...] = TOPICS) -> dict[str, Any]:
    """One child for each topic, all at once. While they work, this run is parked."""
    answers = await asyncio.gather(*(investigate(question, topic) for topic in topics), return_exceptions=True)
    found = {
        topic: f"{answer.run_id} failed: {answer.message}" if isinstance(answer, ChildFailed) else answer
        for topic, answer in zip(topics, answers, strict=True)
    }
    return {"answers": sum(len(some) for some in found.values() if isinstance(some, list)), "found": found}
