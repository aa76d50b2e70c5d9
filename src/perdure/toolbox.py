"""The tools that a model may want used: tools, agents, and sets of tools that only a run can open, as those of an MCP server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from perdure.agent import Agent
from perdure.core.codec import shown
from perdure.core.failures import clean
from perdure.errors import InvalidInput, PerdureError
from perdure.models.messages import ToolSpec, ToolUse
from perdure.run import Run
from perdure.tool import Tool
from perdure.turns import FINAL_ANSWER, NAME


class Callee(Protocol):
    """Something that a model may want called. Calling it inside an agent makes a durable call, and gives what is to be awaited."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def schema(self) -> dict[str, Any]: ...
    def __call__(self, **arguments: Any) -> Coroutine[Any, Any, Any]: ...


@runtime_checkable
class Toolset(Protocol):
    """Tools that are known when a run has asked for them."""

    def toolset(self, run: Run) -> Awaitable[Sequence[Callee]]: ...


class NotCallable(Exception):
    """The use names no tool, or its arguments do not fit; nothing was called. The message tells the model."""


class Kit:
    """The tools of one run."""

    def __init__(self, callees: Iterable[Any], final: ToolSpec | None = None) -> None:
        self.callees: dict[str, Any] = {}
        for callee in callees:
            name = _checked_name(callee)
            if self.callees.setdefault(name, callee) is not callee:
                raise InvalidInput(f"two tools are called {name}: a model could not tell them apart; give one another name")
        own = tuple(ToolSpec(name, callee.description, callee.schema()) for name, callee in self.callees.items())
        self.specs = own if final is None else (*own, final)
        self.names = tuple(spec.name for spec in self.specs)
        self._taken = {
            spec.name: tuple(spec.schema.get("properties", ())) for spec in own if spec.schema.get("additionalProperties") is False
        }

    def call(self, use: ToolUse) -> Coroutine[Any, Any, Any]:
        """Make the call; it has its number when this returns. NotCallable says why there is none."""
        callee = self.callees.get(use.name)
        if callee is None:
            raise NotCallable(f"there is no tool of that name; there are {', '.join(self.names) or 'none'}")
        if not isinstance(use.arguments, dict):
            raise NotCallable(f"its arguments are not a JSON object: {use.arguments[:200]!r}")
        taken = self._taken.get(use.name)
        if taken is not None and (unknown := sorted(use.arguments.keys() - set(taken))):
            # Also where the callee would take it: a model gives what it was told of, and nothing else.
            raise NotCallable(f"the argument {clean(unknown[0], 80)} is unknown; it takes {', '.join(taken) or 'nothing'}")
        try:
            called: Coroutine[Any, Any, Any] = callee(**use.arguments)
        except (InvalidInput, TypeError) as error:
            raise NotCallable(str(error)) from None
        except PerdureError:
            raise
        except Exception as error:  # a validator of the user's own, which says no in its own way
            raise NotCallable(f"its arguments were not taken: {type(error).__name__}: {clean(str(error), 300)}") from None
        return called

    def effect(self, name: str) -> str:
        """What may have happened when nobody knows: the effect class of the tool; of anything else, the one that promises least."""
        return getattr(self.callees.get(name), "effect", "once")

    def encode(self, name: str) -> Callable[[Any], bytes] | None:
        """How the callee's results are written down, where it has a way of its own."""
        return getattr(self.callees.get(name), "encode_result", None)


class Toolbox:
    """What an agent was given as its tools, checked when it is declared."""

    def __init__(self, owner: str, tools: Iterable[Any], final: ToolSpec | None = None) -> None:
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise InvalidInput(f"{owner}: tools={shown(tools)} is not a list of tools")
        self._tools = tuple(tools)
        for one in self._tools:
            if not isinstance(one, (Tool, Agent, Toolset)):
                raise InvalidInput(f"{owner}: {shown(one)} is no tool: decorate the function with @tool, or give an agent, or mcp(…)")
        self._final = final
        self._kit = Kit((one for one in self._tools if isinstance(one, (Tool, Agent))), final)
        self._sets = any(isinstance(one, Toolset) for one in self._tools)

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        return tuple(one for one in self._tools if isinstance(one, Agent))

    @property
    def described(self) -> list[Any]:
        """What there is to say about the tools before any run: a version is made of it."""
        pins = [(one.name, one.pin()) for one in self._tools if isinstance(one, Tool)]
        sets = [_pin(one) for one in self._tools if isinstance(one, Toolset)]
        agents = [(one.name, one.version) for one in self.agents]
        return [[[spec.name, spec.description, spec.schema] for spec in self._kit.specs], pins, sets, agents]

    async def opened(self, run: Run) -> Kit:
        """The tools as this run has them."""
        if not self._sets:
            return self._kit
        callees: list[Any] = []
        taken = set(self._kit.names)
        for one in self._tools:
            found = await _opened(one, run, taken) if isinstance(one, Toolset) else (one,)
            taken.update(callee.name for callee in found)
            callees.extend(found)
        return Kit(callees, self._final)


async def _opened(one: Any, run: Run, taken: set[str]) -> Sequence[Any]:
    """The tools of a set. One that can call them otherwise is told which names are taken."""
    names = {"taken": frozenset(taken)} if "taken" in inspect.signature(one.toolset).parameters else {}
    found: Sequence[Any] = await one.toolset(run, **names)
    return found


def _checked_name(callee: Any) -> str:
    name = callee.name
    if not isinstance(name, str) or not NAME.match(name):
        raise InvalidInput(f"tool {shown(name)}: models take names of up to 64 letters, digits, _ and -; give it one with name=")
    if name == FINAL_ANSWER:
        raise InvalidInput(f"tool {FINAL_ANSWER}: that name is kept for an agent's own answer; give it another with name=")
    return name


def _pin(one: Any) -> list[str]:
    pin = getattr(one, "pin", None)
    return [type(one).__name__, str(getattr(one, "name", "")), str(pin()) if callable(pin) else ""]
