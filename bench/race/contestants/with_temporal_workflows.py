"""The activities of Temporal and the workflows that call them, in a separate module as its documentation advises."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import wire
from temporalio import activity, workflow
from temporalio.common import RetryPolicy

# These steps are not interrupted, so the time-out only has to be longer than a step on a busy machine.
STEP: dict[str, Any] = {"start_to_close_timeout": timedelta(minutes=1)}
# The server notices a dead worker by a time-out. These steps are shorter than a second and need no heartbeat; longer ones would.
NOTICED_STEP: dict[str, Any] = {
    "start_to_close_timeout": timedelta(minutes=1),
    "heartbeat_timeout": timedelta(seconds=1),
    "retry_policy": RetryPolicy(initial_interval=timedelta(milliseconds=100)),
}

Message = dict[str, Any]


class Tools:
    """The activities: what a step does in the worker's process."""

    def __init__(self, tool_ms: float = 0) -> None:
        self.tool_ms = tool_ms
        self.began_ns: list[int] = []

    @activity.defn
    async def step(self, text: str) -> str:
        self.began_ns.append(time.monotonic_ns())
        if self.tool_ms:
            await asyncio.sleep(self.tool_ms / 1000)
        return text

    @activity.defn
    async def moment(self, text: str) -> int:
        return time.monotonic_ns()

    @activity.defn
    async def last_words(self, text: str) -> str:
        wire.last_words()

    @activity.defn
    async def model(self, messages: list[Message]) -> Message:
        """The scripted model: the first message says how many pages to read, and every turn reads the next."""
        turn = sum(message["role"] == "assistant" for message in messages)
        tool = "page" if turn < messages[0]["pages"] else "last_words"
        return {"role": "assistant", "content": wire.said(turn), "tool": tool, "number": turn}

    @activity.defn
    async def page(self, number: int) -> str:
        return wire.said(number)


@workflow.defn(sandboxed=False)
class Steps:
    @workflow.run
    async def run(self, steps: int) -> None:
        for number in range(steps):
            await workflow.execute_activity_method(Tools.step, wire.text_of(number), **STEP)


@workflow.defn(sandboxed=False)
class StepsToTheLast:
    @workflow.run
    async def run(self, steps: int) -> None:
        for number in range(steps):
            await workflow.execute_activity_method(Tools.step, wire.text_of(number), **NOTICED_STEP)
        await workflow.execute_activity_method(Tools.last_words, wire.text_of(steps), **NOTICED_STEP)


@workflow.defn(sandboxed=False)
class Moment:
    @workflow.run
    async def run(self) -> int:
        return await workflow.execute_activity_method(Tools.moment, wire.text_of(0), **STEP)


@workflow.defn(sandboxed=False)
class Approval:
    def __init__(self) -> None:
        self.granted = False

    @workflow.run
    async def run(self) -> int:
        Approval.reached += 1
        await workflow.wait_condition(lambda: self.granted)
        return await workflow.execute_activity_method(Tools.moment, wire.text_of(0), **STEP)

    @workflow.signal
    def grant(self) -> None:
        self.granted = True

    # Only for the measurement, which must not end before every run waits.
    reached = 0


@workflow.defn(sandboxed=False)
class Conversation:
    """The model is stateless, so every turn sends it all messages; a long history continues as a new run."""

    @workflow.run
    async def run(self, messages: list[Message]) -> None:
        while True:
            said = await workflow.execute_activity_method(Tools.model, messages, **NOTICED_STEP)
            messages.append(said)
            if said["tool"] == "last_words":
                await workflow.execute_activity_method(Tools.last_words, wire.text_of(said["number"]), **NOTICED_STEP)
                return
            page = await workflow.execute_activity_method(Tools.page, said["number"], **NOTICED_STEP)
            messages.append({"role": "tool", "content": page})
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(messages)
