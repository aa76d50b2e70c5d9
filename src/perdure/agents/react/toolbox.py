"""The tools of a ReAct agent: tools, agents, and toolsets. Only a run can open a toolset, such as an MCP server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from perdure.agent import Agent
from perdure.agents.react.turns import FINAL_ANSWER, NAME
from perdure.core import codec
from perdure.core.codec import shown
from perdure.core.failures import clean
from perdure.errors import InvalidInput, PerdureError
from perdure.models.messages import ToolSpec, ToolUse
from perdure.run import Run
from perdure.tool import Tool

T = TypeVar("T")


class ModelCallable(Protocol):
    """A tool or an agent that a model may call. Inside an agent its `__call__` makes a durable call, to be awaited."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def schema(self) -> dict[str, Any]: ...
    def __call__(self, **arguments: Any) -> Coroutine[Any, Any, Any]: ...


@runtime_checkable
class Toolset(Protocol):
    """A set of tools that become known only when a run asks for them."""

    def toolset(self, run: Run) -> Awaitable[Sequence[ModelCallable]]: ...


class NotCallable(Exception):
    """The tool use names an unknown tool, or its arguments do not fit. No call was made. The message is for models."""


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
        self._schemas = {spec.name: spec.schema for spec in own}

    def call(self, use: ToolUse) -> Coroutine[Any, Any, Any]:
        """Make the call. When this returns, the call has its number. NotCallable says why no call was made."""
        callee: Any = self.callees.get(use.name)
        arguments = check_arguments(use, self.names, None if callee is None else self._schemas[use.name])
        return made(lambda: callee(**arguments))

    def args(self, use: ToolUse) -> bytes:
        """The arguments of the call, with their defaults. NotCallable says why no call could be made."""
        callee: Any = self.callees.get(use.name)
        arguments = check_arguments(use, self.names, None if callee is None else self._schemas[use.name])
        # A callee of a user's toolset may have no `bind`. Then its call is compared by the arguments that the model gave.
        encoded: bytes = made(lambda: callee.bind((), arguments) if hasattr(callee, "bind") else codec.encode(arguments))
        return encoded

    def effect(self, name: str) -> str:
        """The effect class of the tool. For agents and unknown names it is "once", which promises least."""
        return getattr(self.callees.get(name), "effect", "once")

    def encode(self, name: str) -> Callable[[Any], bytes] | None:
        """The callee's own method to encode its results. None if the callee has no such method."""
        return getattr(self.callees.get(name), "encode_result", None)


def check_arguments(use: ToolUse, names: Sequence[str], schema: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of the tool use. NotCallable if there is no such tool (`schema` is None), or it takes no such argument."""
    if schema is None:
        raise NotCallable(f"there is no tool of that name; there are {', '.join(names) or 'none'}")
    if not isinstance(use.arguments, dict):
        raise NotCallable(f"its arguments are not a JSON object: {use.arguments[:200]!r}")
    taken = tuple(schema.get("properties", ()))
    if schema.get("additionalProperties") is False and (unknown := sorted(use.arguments.keys() - set(taken))):
        # Refuse the argument even if the callee has such a parameter: a model may pass only arguments that the schema
        # names.
        raise NotCallable(f"the argument {clean(unknown[0], 80)} is unknown; it takes {', '.join(taken) or 'nothing'}")
    return use.arguments


def made(call: Callable[[], T]) -> T:
    """What `call` returns. NotCallable if it does not take its arguments."""
    try:
        return call()
    except (InvalidInput, TypeError) as error:
        raise NotCallable(str(error)) from None
    except PerdureError:
        raise
    except Exception as error:  # a validator in the user's code raised this error
        raise NotCallable(f"its arguments were not taken: {type(error).__name__}: {clean(str(error), 300)}") from None


class Toolbox:
    """The tools of an agent, as its code declares them. They are checked when the agent is created."""

    def __init__(self, owner: str, tools: Iterable[Any], final: ToolSpec | None = None) -> None:
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise InvalidInput(f"{owner}: tools={shown(tools)} is not a list of tools")
        self._tools = tuple(tools)
        for one in self._tools:
            if not isinstance(one, (Tool, Agent, Toolset)):
                raise InvalidInput(f"{owner}: {shown(one)} is no tool: decorate the function with @tool, or give an agent, or mcp(…)")
            if not isinstance(one, Toolset):
                for name, has_default in one.takes_secrets.items():
                    if not has_default:
                        raise InvalidInput(
                            f"{owner}: parameter {name} of {one.name} takes a Secret, which a model cannot fill in; give it a default: "
                            f'{name}: Secret = Secret("name")'
                        )
        self._final = final
        self._kit = Kit((one for one in self._tools if isinstance(one, (Tool, Agent))), final)
        self._sets = any(isinstance(one, Toolset) for one in self._tools)

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        return tuple(one for one in self._tools if isinstance(one, Agent))

    @property
    def described(self) -> list[Any]:
        """Everything that is known about the tools before a run. It is a part of the agent's version."""
        pins = [(one.name, one.pin()) for one in self._tools if isinstance(one, Tool)]
        sets = [_pin(one) for one in self._tools if isinstance(one, Toolset)]
        agents = [(one.name, one.version) for one in self.agents]
        return [[[spec.name, spec.description, spec.schema] for spec in self._kit.specs], pins, sets, agents]

    async def opened(self, run: Run) -> Kit:
        """The tools of this run."""
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
    """The tools of a toolset.

    If the method `toolset` has a parameter `taken`, it gets the set of names that it must not choose.
    """
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
