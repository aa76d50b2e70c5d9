# mypy: ignore-errors
"""LangGraph in the race: a graph that loops over one node, saved after every step (`durability="sync"`) by its own savers.

The sync API of LangGraph is used, with a thread for each of many runs: for one run and for many it used less CPU time
per step than `ainvoke` with the asynchronous savers. The functional API is not used: the result of a `@task` is saved
in the background under every durability, so that a crash may repeat all tasks that have ended since the last checkpoint.
"""

import os

# Tracing is off by default, but the environment may switch it on.
os.environ["LANGSMITH_TRACING"] = "false"

import asyncio
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypedDict

import wire
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

# PostgreSQL allows 100 connections by default; between 5 and 50 there was no visible difference on two cores.
_CONNECTIONS = 20
_PARKING_S = 60.0
_PATIENCE_S = 300.0

# The options that the savers need on connections that they did not open themselves.
_CONNECTION = {"autocommit": True, "prepare_threshold": 0}

_LAST = "last"
_THREAD = "the one"

Graph = Any
Saver = Any
Build = Callable[[Saver], Graph]


# -- the graphs ------------------------------------------------------------------------------------------------------------
class Steps(TypedDict):
    """The whole state of a run: constant in size, because only the newest result is kept."""

    steps: int
    number: int
    text: str


def stepping(tool_ms: float = 0.0, after: str = END, began_ns: list[int] | None = None) -> Build:
    """A graph of one node that runs as often as the state says, and then goes on to `after`."""

    def step(state: Steps) -> dict[str, Any]:
        if began_ns is not None:
            began_ns.append(time.monotonic_ns())
        number = state["number"]
        return {"number": number + 1, "text": tool(wire.text_of(number))}

    def tool(text: str) -> str:
        if tool_ms:
            time.sleep(tool_ms / 1000)
        return text

    def onward(state: Steps) -> str:
        return "step" if state["number"] < state["steps"] else after

    graph = StateGraph(Steps)
    graph.add_node("step", step)
    graph.add_node(_LAST, lambda _: wire.last_words())
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", onward, ["step", _LAST, END])
    return lambda saver: graph.compile(checkpointer=saver)


class Approval(TypedDict):
    """The state of a parked run, and the message that wakes it."""

    text: str
    granted: bool


def approving(began_ns: list[int]) -> Build:
    """A graph that waits for a person, and then makes one step."""

    def ask(state: Approval) -> dict[str, Any]:
        return {"granted": interrupt(state["text"])}

    def step(state: Approval) -> dict[str, Any]:
        began_ns.append(time.monotonic_ns())
        return {"text": state["text"]}

    graph = StateGraph(Approval)
    graph.add_node("ask", ask)
    graph.add_node("step", step)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "step")
    graph.add_edge("step", END)
    return lambda saver: graph.compile(checkpointer=saver)


def conversing() -> Build:
    """LangChain's agent, with messages in the channel of its Deep Agents: only additions, and all messages after every fifty."""
    # Imported here, because the import is slow and runs without an agent do not need it.
    from typing import Annotated, Required

    from langchain.agents import AgentState, create_agent
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AnyMessage, BaseMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langgraph.channels.delta import DeltaChannel
    from langgraph.graph.message import _messages_delta_reducer

    class Scripted(BaseChatModel):
        """Finds its turn from the messages; asks for a page every turn, and for the killing tool after the requested number of turns."""

        @property
        def _llm_type(self) -> str:
            return "scripted"

        def bind_tools(self, tools: Any, **kwargs: Any) -> BaseChatModel:
            return self

        def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
            turns = int(messages[0].content)
            turn = sum(isinstance(message, AIMessage) for message in messages)
            call = {"name": "page", "args": {"number": turn}} if turn < turns else {"name": "last_words", "args": {}}
            answer = AIMessage(wire.said(turn), tool_calls=[{**call, "id": f"call-{turn}"}])
            return ChatResult(generations=[ChatGeneration(message=answer)])

    # The graph reads this annotation at run time: no `from __future__ import annotations` in this file.
    class Conversation(AgentState):
        messages: Required[Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=50)]]

    def page(number: int) -> str:
        """A page of a book."""
        return wire.said(number)

    def last_words() -> str:
        """The end."""
        wire.last_words()

    return lambda saver: create_agent(Scripted(), [page, last_words], state_schema=Conversation, checkpointer=saver)


# -- the savers -------------------------------------------------------------------------------------------------------
def prepare(given: Mapping[str, Any]) -> None:
    """Create PostgreSQL's tables, once per database as documented; SQLite's saver does it by itself."""
    if given["url"] is None:
        return
    from langgraph.checkpoint.postgres import PostgresSaver

    with PostgresSaver.from_conn_string(given["url"]) as saver:
        saver.setup()


@contextmanager
def savers(given: Mapping[str, Any], count: int) -> Iterator[list[Saver]]:
    """As many savers as concurrent runs.

    A saver for PostgreSQL holds its own lock while it saves, so a single saver would use one connection at a time. SQLite
    has one writer anyway.
    """
    if given["url"] is None:
        from langgraph.checkpoint.sqlite import SqliteSaver

        with SqliteSaver.from_conn_string(str(_file(given))) as saver:
            yield [saver] * count
        return
    from langgraph.checkpoint.postgres import PostgresSaver

    if count == 1:
        with PostgresSaver.from_conn_string(given["url"], pipeline=True) as saver:
            yield [saver]
        return
    from psycopg.rows import dict_row
    from psycopg_pool import ConnectionPool

    settings = {**_CONNECTION, "row_factory": dict_row}
    with ConnectionPool(given["url"], min_size=_CONNECTIONS, max_size=_CONNECTIONS, timeout=_PATIENCE_S, kwargs=settings) as pool:
        pool.wait()
        yield [PostgresSaver(pool) for _ in range(count)]


def bytes_kept(given: Mapping[str, Any]) -> int:
    """The size of all tables with their indexes; for SQLite after a checkpoint of its log."""
    if given["url"] is None:
        import sqlite3

        with closing(sqlite3.connect(_file(given))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return wire.bytes_in(Path(given["folder"]))
    import psycopg

    with psycopg.connect(given["url"]) as connection:
        tables = "FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        return int(connection.execute(f"SELECT sum(pg_total_relation_size(oid)) {tables}").fetchone()[0])


def _file(given: Mapping[str, Any]) -> Path:
    return Path(given["folder"]) / "checkpoints.sqlite"


def run(graph: Graph, what: Any, thread: str, steps: int = 10_000) -> Any:
    """Run on this thread until the end, every step saved before the next one begins. `None` resumes an interrupted run."""
    # Each iteration of the loop counts against the recursion limit, which exists to stop endless graphs.
    config = {"configurable": {"thread_id": thread}, "recursion_limit": steps + 10}
    return graph.invoke(what, config, durability="sync")


# -- the roles --------------------------------------------------------------------------------------------------------------
def about(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "LangGraph",
        "version": importlib.metadata.version("langgraph"),
        "stores": ["sqlite", "postgres"],
        "durable": "the state after a step, before the next one begins: a snapshot and what the step wrote, two commits; no intent, no arguments",
        "how": "StateGraph looping over one plain node (no @task, since a crash may repeat all that have ended since the last checkpoint), invoke(durability='sync'), SqliteSaver or PostgresSaver (one run: a connection in "
        f"pipeline mode; many: a thread and a saver per run on a pool of {_CONNECTIONS} connections); the agent is langchain's create_agent "
        "with its messages in a DeltaChannel (beta, as Deep Agents has it)",
        "resume": "invoke(None) on the thread, by whoever knows its name: nothing finds interrupted runs, and nothing has to time out",
    }


def sequential(given: Mapping[str, Any]) -> dict[str, Any]:
    prepare(given)
    began_ns: list[int] = []
    with savers(given, 1) as (saver,):
        graph = stepping(given["tool_ms"], began_ns=began_ns)(saver)
        began_s = time.monotonic()
        ended = run(graph, _fresh(given["steps"]), _THREAD, given["steps"])
        seconds = time.monotonic() - began_s
    assert ended["number"] == given["steps"], ended
    laps = wire.laps(began_ns) if given["steps"] > 1 else {}
    return {"seconds": seconds, **laps, "peak_mb": wire.peak_mb(), "bytes": bytes_kept(given)}


def together(given: Mapping[str, Any]) -> dict[str, Any]:
    prepare(given)
    runs, steps = given["runs"], given["steps"]
    build = stepping(given["tool_ms"])
    with savers(given, runs) as kept, ThreadPoolExecutor(runs) as threads:
        began_s = time.monotonic()
        asked = [
            threads.submit(lambda saver, thread: run(build(saver), _fresh(steps), thread, steps), kept[n], str(n)) for n in range(runs)
        ]
        assert all(one.result()["number"] == steps for one in asked)
        seconds = time.monotonic() - began_s
    return {"seconds": seconds, "peak_mb": wire.peak_mb()}


def build(given: Mapping[str, Any]) -> dict[str, Any]:
    prepare(given)
    with savers(given, 1) as (saver,):
        return run(stepping(after=_LAST)(saver), _fresh(given["steps"]), _THREAD, given["steps"])


def resume(given: Mapping[str, Any]) -> dict[str, Any]:
    with savers(given, 1) as (saver,):
        return run(stepping(after=_LAST)(saver), None, _THREAD)


def talk(given: Mapping[str, Any]) -> dict[str, Any]:
    prepare(given)
    asked = {"messages": [{"role": "user", "content": str(given["turns"])}]}
    with savers(given, 1) as (saver,):
        return run(conversing()(saver), asked, _THREAD)


def talk_on(given: Mapping[str, Any]) -> dict[str, Any]:
    with savers(given, 1) as (saver,):
        return run(conversing()(saver), None, _THREAD)


def size(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"bytes": bytes_kept(given)}


def park(given: Mapping[str, Any]) -> dict[str, Any]:
    prepare(given)
    build = approving([])
    began_s = time.monotonic()
    until_s = began_s + _PARKING_S
    numbers = itertools.count()

    def park_some(saver: Saver) -> int:
        graph = build(saver)
        parked = 0
        while time.monotonic() < until_s and (number := next(numbers)) < given["runs"]:
            run(graph, {"text": wire.text_of(number), "granted": False}, str(number))
            parked += 1
        return parked

    # Threads that wait for SQLite's single writer only cost time.
    at_a_time = 1 if given["url"] is None else _CONNECTIONS
    with savers(given, at_a_time) as kept, ThreadPoolExecutor(at_a_time) as threads:
        parked = sum(threads.map(park_some, kept))
    answer = {"runs": parked, "seconds": time.monotonic() - began_s}
    if parked < given["runs"]:
        answer["why"] = f"as many as there was time for in {_PARKING_S:.0f} s"
    return answer


def parked(given: Mapping[str, Any]) -> dict[str, Any]:
    began_ns: list[int] = []
    wake_ms = []
    with savers(given, 1) as (saver,):
        graph = approving(began_ns)(saver)
        cpu = asyncio.run(wire.idle_cpu(given))
        for number in range(given.get("woken", 0), given.get("woken", 0) + given["wakes"]):
            sent_ns = time.monotonic_ns()
            run(graph, Command(resume=True), str(number))
            wake_ms.append((began_ns[-1] - sent_ns) / 1e6)
    return {
        "peak_mb": wire.peak_mb(),
        **cpu,
        "wake_ms": wake_ms,
        "why": "it has no worker: this is a process with the graph compiled and nothing to do, and whoever wakes a run also runs it",
    }


def _fresh(steps: int) -> Steps:
    return {"steps": steps, "number": 0, "text": ""}


if __name__ == "__main__":
    wire.compete(
        {
            "about": about,
            "sequential": sequential,
            "together": together,
            "build": build,
            "resume": resume,
            "talk": talk,
            "talk_on": talk_on,
            "size": size,
            "park": park,
            "parked": parked,
        }
    )
