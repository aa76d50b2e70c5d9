"""The page docs/api.md, made of signatures and docstrings: `python -m tests.docs.api_page > docs/api.md`."""

from __future__ import annotations

import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import perdure
from perdure import app, errors, models, otel, sync, undo
from perdure.agents.mcp.tools import McpServer
from perdure.control import NOTHING
from perdure.core import approval, events, state
from perdure.inspect import diff, inside
from perdure.scheduling import Scheduling, TickTime

WIDTH = 118
Public = type[Any] | Callable[..., Any]


class Group(NamedTuple):
    title: str
    words: str
    names: str  # of perdure, or of `EXTRA`
    example: str = ""


# The names on the page in addition to `perdure.__all__`: what methods return, and what other modules offer to users.
EXTRA: Mapping[str, Public] = {
    "Deed": undo.Deed,
    "CallPath": diff.CallPath,
    "DiffCall": diff.DiffCall,
    "DiffLine": diff.DiffLine,
    "McpServer": McpServer,
    "RunNotSucceeded": errors.RunNotSucceeded,
    **{one.__name__: one for one in (inside.Awaited, inside.InspectedFrame, inside.InspectedTask, inside.RaisedError, inside.Variable)},
    "Scheduling": Scheduling,
    "TickTime": TickTime,
    "Telemetry": otel.Telemetry,
    "StoreCorrupt": errors.StoreCorrupt,
    "StoreUnavailable": errors.StoreUnavailable,
    "StoreVersion": errors.StoreVersion,
    "Fenced": errors.Fenced,
    **{name: getattr(models, name) for name in models.__all__ if isinstance(getattr(models, name), type)},
}

# Members that are there for perdure's own modules, and may change in any version.
INSIDE: Mapping[str, str] = {
    "Agent": "bind rebind misfits takes parameter_names encode_result decode_result home machine machine_of replayed facts_of "
    "result_misfit with_model scheduled spec_of",
    "AgentInput": "agent encoded",
    "Approval": "check_for request",
    "ApprovalRow": "standing",
    "Artifact": "id",
    "Call": "outside add_usage ask_to_stop hear progress_json vault span",
    "CallState": "may_cost cost_if keys recorded_key estimate unsettled reserved",
    "Circles": "usd_micros",
    "Handle": "row",
    "McpServer": "pin",
    "Metrics": "exposition lagged",
    "MetricsServer": "show",
    "Model": "say_if_unpriced is_priced renamed identity pin",
    "Anthropic": "body answer",
    "OpenAI": "body answer identity",
    "Scripted": "answer",
    "Telemetry": "spans_of committed ended_by_force begins enter",
    "Perdure": "ask load engine reading store start_encoded abort",
    "Plan": "facts_of frame_change check_open_calls declared",
    "Every": "interval_s",
    "Schedule": "spec",
    "Scheduling": "set",
    "Rate": "step_us",
    "ReAct": "agents bind encode_result decode_result description schema facts_of result_misfit with_model",
    "Retry": "covers delay_s",
    "RunState": "keys reserved apply take_back short_since pins pin_changes",
    "Tool": "bind takes misfits rebind with_call encode_result decode_result asks editable_schema edited pin compensation events "
    "result_misfit",
}

# Classes that users do not make themselves, or under which name an example of them goes.
MADE = frozenset("Agent Artifact Tool Run Handle Call McpServer RunStatus Scheduling".split())
INSTANCES = {"Agent": "my_agent", "Tool": "my_tool", "Perdure": "app", "McpServer": "server", "Scheduling": "app.schedules"}

KINDS: Mapping[str, tuple[Any, str]] = {
    "Effect": (events.Effect, "what is right when it is unknown whether an attempt happened"),
    "Status": (events.Status, "how a run stands"),
    "Reason": (events.Reason, "why a run needs a person"),
    "Phase": (state.Phase, "where a call stands"),
    "ApprovalStatus": (approval.ApprovalStatus, "where an approval stands"),
    "OnExpiry": (events.OnExpiry, "what happens when the time of an approval is over"),
    "OnExceed": (events.OnExceed, "what happens when a budget is used up"),
    "AwaitedKind": (inside.AwaitedKind, "what a task of an agent waits for"),
    "CostsBy": (app.CostsBy, "how costs are grouped"),
}

GROUPS = (
    Group(
        "Agents and tools",
        "An agent is a coroutine function that decides. A tool is a function that touches the world. "
        "More: [writing agents](writing-agents.md), [tools and effects](tools-and-effects.md).",
        "agent Agent AgentInput tool Tool",
        """\
import asyncio

from perdure import Call, Outcome, Perdure, Run, agent, tool

paid: dict[str, str] = {}  # what the payment service knows


@tool(effect="keyed", timeout=10)
def refund(order: str, cents: int, call: Call) -> str:
    \"\"\"Pay back an order.\"\"\"
    return paid.setdefault(call.key, f"receipt for {cents}")


@agent(version="1")
async def support(run: Run, order: str) -> str:
    run.status(f"looking at {order}")
    return await refund(order, cents=4900)
""",
    ),
    Group(
        "Run",
        "The first argument of every agent. Everything on it is the same on every replay. More: [waiting](waiting.md).",
        "Run Decision",
        """\
@agent(version="1")
async def ask_first(run: Run, order: str) -> str:
    decision = await run.request_approval("refund", {"order": order}, by="role:finance")
    if not decision.granted:
        return f"no: {decision.note}"
    return await support(order)  # another agent: it is a child run
""",
    ),
    Group(
        "Call and Outcome",
        "What the function of a tool is told about its call, and what a reconcile hook answers. "
        "More: [tools and effects](tools-and-effects.md).",
        "Call Outcome Usage Artifact Secret",
        """\
@tool(effect="once", timeout=10)
def send_letter(order: str, call: Call) -> str:
    call.spend(usd="0.80")
    return paid.setdefault(call.key, f"letter about {order}")


@send_letter.reconcile
def was_it_sent(order: str, call: Call) -> Outcome:
    return Outcome.happened(paid[call.key]) if call.key in paid else Outcome.not_happened()
""",
    ),
    Group(
        "The app and its handles",
        "`Perdure` opens a journal. `perdure.sync.Perdure` has the same methods for code without asyncio: "
        "`with` instead of `async with`, and no `await`. It takes the same arguments apart from `observers`.",
        "Perdure Handle",
        """\
async def main() -> None:
    async with Perdure("sqlite:///shop.db", agents=[support, ask_first]) as app:
        handle = await app.start(support.input("o-81"), id="refund-o-81")
        assert await handle.result() == "receipt for 4900"
        assert await handle.status() == "succeeded"
        [run] = await app.list(agent="support")
        assert run.id == "refund-o-81" and run.finished


if __name__ == "__main__":
    asyncio.run(main())
""",
    ),
    Group(
        "What they return",
        "Records of the app's methods. Times named `…_at` and `ts` are microseconds since 1970, in UTC.",
        "RunInfo RunningCall FailureInfo RunStatus Event RunState CallState ApprovalRow CostRow UndoPlan Reopened ReopenedCall LiveFork Deed "
        "Fork Diff CallPath DiffCall DiffLine Inspection InspectedTask InspectedFrame Variable Awaited RaisedError",
    ),
    Group(
        "Metrics, logs and traces",
        "For a worker in a program of your own; `perdure worker` has options for them. More: [metrics, probes and logs](metrics.md), "
        "[traces](tracing.md). `Telemetry` is in `perdure.otel`.",
        "MetricsServer Metrics RunFilter JsonFormatter Telemetry",
    ),
    Group(
        "Budgets, rates, retries, approvals",
        "Options of `@agent` and `@tool`. More: [limits](limits.md), [approvals](approvals.md).",
        "Approval Budget Circles Rate Retry",
        """\
from datetime import timedelta

from perdure import Approval, Budget, Rate, Retry



def is_large(cents: int) -> bool | str:
    return "over $100" if cents > 10_000 else False


large = Approval(when=is_large, by="role:finance", expires=timedelta(days=1))


@tool(effect="keyed", timeout=10, approval=large, rate=Rate(10, per=1), retry=Retry(attempts=3), cost="0.01")
def pay(order: str, cents: int, call: Call) -> str:
    return paid.setdefault(call.key, f"paid {cents}")


@agent(version="1", budget=Budget(usd=1, calls=20))
async def settle(run: Run, order: str) -> str:
    return await pay(order, 4900)
""",
    ),
    Group(
        "Schedules",
        "When runs start by themselves: `@agent(schedule=…)` and `app.schedule`. More: [schedules](schedules.md).",
        "Schedule Cron Every Tick ScheduleInfo Scheduling TickTime",
        """\
from perdure import Cron, Schedule, Tick


@agent(version="1", schedule=Schedule(Cron("0 7 * * mon-fri", tz="Europe/Berlin"), input={"day": Tick("%Y-%m-%d")}))
async def report(run: Run, day: str) -> str:
    return f"the report of {day}"
""",
    ),
    Group(
        "ReAct, plans, models, MCP",
        "Agents that are put together from parts. The models are in `perdure.models`. "
        "More: [ReAct](react.md), [plans](plans.md), [models](models.md), [MCP](mcp.md).",
        "ReAct Plan Step ref param mcp McpServer Model Anthropic OpenAI Scripted Price "
        "User Assistant ToolUse ToolResult ToolSpec Request Answer Tokens",
        """\
from perdure import Plan, ReAct, Step, param
from perdure.models import Scripted

helper = ReAct("helper", model=Scripted(["Hello."]), tools=[refund], instructions="You help customers.", max_turns=5)
pay_back = Plan("pay_back", [Step("refund", refund, {"order": param("order"), "cents": 4900})], params={"order": str})
""",
    ),
    Group(
        "Settings",
        "Every number that can be turned. More: [operating](operating.md).",
        "Settings Queue",
    ),
)

_HEAD = """\
# API

Every public name of perdure, with its signature and its docstring. This page is made of them
(`python -m tests.docs.api_page > docs/api.md`), and a test compares the two. A name that begins with `_`, or that this
page does not have, may change in any version. The text says what a default of `…` means. If you come from 0.1:
[migrating](migrating.md).
"""


def page() -> str:
    parts = [_HEAD, contents()]
    for group in GROUPS:
        parts.append(f"## {group.title}\n\n{wrapped(group.words)}\n")
        if group.example:
            parts.append(f"```python\n{group.example}```\n")
        parts.extend(entry(name) for name in group.names.split())
    parts.extend((kinds(), error_tree()))
    return "\n".join(parts).rstrip() + "\n"


def contents() -> str:
    titles = [*(group.title for group in GROUPS), "Words in signatures", "Errors"]
    return "".join(f"- [{title}](#{re.sub(r'[^a-z -]', '', title.lower()).replace(' ', '-')})\n" for title in titles)


def named(name: str) -> Public:
    found: Public = EXTRA[name] if name in EXTRA else getattr(perdure, name)
    return found


def covered() -> set[str]:
    """The names that have a place on the page."""
    return {name for group in GROUPS for name in group.names.split()} | {error.__name__ for error in public_errors()}


# -- one name ------------------------------------------------------------------------------------------------------------------


def entry(name: str) -> str:
    what = named(name)
    if not isinstance(what, type):
        overloads = typing.get_overloads(what)
        shown = signature(name, overloads[-1] if overloads else what)
        return f"### {name}\n\n{shown}\n{prose(what)}"
    parts = [f"### {name}\n\n"]
    own_fields = list(fields(what))
    if not own_fields and "__init__" in vars(what) and name not in MADE:
        parts.append(signature(name, vars(what)["__init__"]) + "\n")
    parts.append(prose(what))
    if listed := [*own_fields, *properties(name, what)]:
        parts.append("\n" + "".join(f"{line}\n" for line in listed))
    parts.extend(f"\n{part}" for part in methods(name, what))
    return "".join(parts)


def public(name: str, cls: type[Any]) -> Iterator[tuple[str, Any]]:
    inside = INSIDE.get(name, "").split()
    for key, value in vars(cls).items():
        if (not key.startswith("_") or key == "__call__") and key not in inside:
            yield key, value


def properties(name: str, cls: type[Any]) -> Iterator[str]:
    for key, value in public(name, cls):
        if isinstance(value, property | cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            assert getter is not None
            yield listed(f"- `{key}: {shown_type(getter.__annotations__['return'])}`", inspect.getdoc(getter) or "")


def methods(name: str, cls: type[Any]) -> Iterator[str]:
    for key, value in public(name, cls):
        if isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            owner = name if plain is not value else INSTANCES.get(name, name.lower())
            shown = owner if key == "__call__" else f"{owner}.{key}"
            head = signature(shown, (typing.get_overloads(plain) or [plain])[-1], member=True)
            yield f"{head}\n{prose(plain, shown)}"


def listed(head: str, words: str, indent: str = "") -> str:
    line = f"{head}: {' '.join(words.split())}" if words else head
    return textwrap.fill(
        line, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


def prose(what: Any, shown: str = "") -> str:
    text = inspect.getdoc(what) if not isinstance(what, type) else what.__dict__.get("__doc__")
    assert text, f"{shown or what} has no docstring"
    return "\n\n".join(wrapped(part) for part in inspect.cleandoc(text).split("\n\n")) + "\n"


def wrapped(text: str) -> str:
    whole = re.sub(r"\[[^\]]*\]\(|`[^`]*`", lambda kept: kept[0].replace(" ", "\0"), " ".join(text.split()))  # links and code in one line
    tagless = re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], whole)
    return textwrap.fill(tagless, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


# -- signatures ----------------------------------------------------------------------------------------------------------------


def signature(shown: str, fn: Callable[..., Any], *, member: bool = False) -> str:
    """The call as a reader types it, in a block. Made of the text of the annotations, so that every Python shows the same."""
    made = inspect.signature(fn)
    parameters = list(made.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    parts = list(_parameters(parameters))
    is_async = inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
    returned = made.return_annotation
    arrow = "" if returned is made.empty or (not member and returned == "None") else f" -> {shown_type(returned)}"
    head = f"{'await ' if inspect.iscoroutinefunction(fn) else 'async for … in ' if is_async else ''}{shown}("
    line = f"{head}{', '.join(parts)}){arrow}"
    if len(line) > WIDTH:
        line = "\n".join([head, *(f"    {part}," for part in parts), f"){arrow}"])
    return f"```py\n{line}\n```\n"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for place, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        prefix = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        starred = starred or one.kind is one.VAR_POSITIONAL
        kind = "" if one.annotation is one.empty else f": {shown_type(one.annotation)}"
        default = "" if one.default is one.empty else f" = {shown_default(one.default)}"
        yield f"{prefix}{one.name}{kind}{default if kind else default.replace(' ', '')}"
        is_last_positional = place + 1 == len(parameters) or parameters[place + 1].kind is not one.POSITIONAL_ONLY
        if one.kind is one.POSITIONAL_ONLY and is_last_positional and not one.name.startswith("_"):
            yield "/"


def shown_type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:perdure|typing|collections|datetime|decimal)(?:\.\w+)*\.(?=[A-Z])", "", text)


def shown_default(value: Any) -> str:
    if value is NOTHING:
        return "…"
    return f'"{value}"' if isinstance(value, str) else repr(value).removeprefix("datetime.")


# -- fields of records -----------------------------------------------------------------------------------------------------------


def fields(cls: type[Any]) -> Iterator[str]:
    """One line for each field of a record: its type, its default, and the comment beside or above it."""
    if not hasattr(cls, "__struct_fields__"):
        return
    inside = INSIDE.get(cls.__name__, "").split()
    for name, kind, comment in _declared(inspect.getsource(cls)):
        if name not in inside:
            yield listed(f"- `{name}: {kind}`", comment)


def _declared(source: str) -> Iterator[tuple[str, str, str]]:
    lines = textwrap.dedent(source).splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline)
        if token.type == tokenize.COMMENT
    }
    above: list[str] = []
    for number, line in enumerate(lines, 1):
        found = re.match(r"    (?!_)(\w+): (.+?)(?:  # .*)?$", line)
        if found:
            yield found[1], found[2], comments.get(number) or " ".join(above)
            above = []
        elif line.startswith("    #"):
            above.append(comments[number])
        elif re.match(r"    (?:def|@|async)", line):
            return
        else:
            above = []


# -- kinds and errors ------------------------------------------------------------------------------------------------------------


def kinds() -> str:
    lines = []
    for name, (kind, words) in KINDS.items():
        values = typing.get_args(kind)
        assert typing.get_origin(kind) is Literal, name
        lines.append(wrapped(f"`{name}`: {words}. " + ", ".join(f'`"{value}"`' for value in values) + "."))
    return "## Words in signatures\n\n" + "\n\n".join(lines) + "\n"


def public_errors() -> list[type[BaseException]]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.PerdureError)]
    return sorted(found, key=lambda error: error.__name__)


def error_tree() -> str:
    head = (
        "## Errors\n\n"
        + wrapped(
            "All of them are in `perdure.errors`; most are in `perdure`. Each has one meaning for the code that catches it. "
            "An error below another one is a kind of it."
        )
        + "\n\n"
    )
    return head + "\n".join(_below(errors.PerdureError, 0)) + "\n"


def _below(error: type[BaseException], depth: int) -> Iterator[str]:
    yield listed(f"- `{error.__name__}`", error.__dict__["__doc__"], "  " * depth)
    for below in public_errors():
        if error in below.__bases__:
            yield from _below(below, depth + 1)


assert set(vars(sync.Perdure)) >= {"start", "run", "drive"}, "the page says that the blocking app has the same methods"

if __name__ == "__main__":
    sys.stdout.write(page())
