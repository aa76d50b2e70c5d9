"""`@agent`: a plain coroutine function whose first parameter is its Run, and how it becomes a machine."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from perdure.core import keys
from perdure.core.machine import Facts, Machine, current
from perdure.errors import InvalidInput, NotAllowedInAgent
from perdure.run import Run
from perdure.tool.signature import Signature

P = ParamSpec("P")
R = TypeVar("R")
AgentFunction = Callable[Concatenate[Run, P], Coroutine[Any, Any, R]]


class Agent(Generic[P, R]):
    """An agent: started, driven and resumed by an app or a worker. It is never called directly."""

    def __init__(
        self, fn: AgentFunction[P, R], *, name: str | None = None, version: str | None = None, names: Mapping[str, Any] | None = None
    ) -> None:
        label = getattr(fn, "__qualname__", repr(fn))
        if not inspect.iscoroutinefunction(fn):
            raise InvalidInput(
                f"agent {label}: an agent is a coroutine function: write `async def {getattr(fn, '__name__', 'name')}(run: Run, …)`"
            )
        self.fn = fn
        self.name = keys.check_id(fn.__name__ if name is None else name, "the agent name")
        self._signature = Signature(f"agent {self.name}", fn, names or {}, skip=1)
        self.version = source_digest(fn) if version is None else keys.check_id(version, f"agent {self.name}: the version")
        self.__name__, self.__qualname__, self.__module__, self.__doc__ = fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, R]:
        inside = "from inside another agent" if current() is not None else "directly"
        raise NotAllowedInAgent(
            f"agent {self.name} cannot be called {inside}: start it with app.start({self.name}, …) or app.run({self.name}, …)"
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the agent's named arguments; InvalidInput names the parameter and the rule."""
        return self._signature.bind(args, kwargs)

    def machine(self, facts: Facts, encoded_input: bytes, max_steps: int) -> Machine:
        """A fresh machine for one run of this agent."""
        arguments = self._signature.arguments(encoded_input)
        fn: Callable[..., Coroutine[Any, Any, Any]] = self.fn
        return Machine(facts, lambda machine: fn(Run(machine), **arguments), max_steps)

    def __repr__(self) -> str:
        return f"<agent {self.name}@{self.version}>"


def source_digest(fn: Callable[..., Any]) -> str:
    """The default version: a digest of the agent's source (of its bytecode where there is no source)."""
    try:
        text = inspect.getsource(fn).encode()
    except (OSError, TypeError):
        text = fn.__code__.co_code
    return hashlib.sha256(text).hexdigest()[:12]


@overload
def agent(fn: AgentFunction[P, R], /) -> Agent[P, R]: ...
@overload
def agent(*, name: str | None = None, version: str | None = None) -> Callable[[AgentFunction[P, R]], Agent[P, R]]: ...
def agent(fn: Any = None, /, *, name: str | None = None, version: str | None = None) -> Any:
    """Declare an agent: `@agent`, or `@agent(name=, version=)`, on an `async def` whose first parameter is its Run."""
    if fn is not None:
        return Agent(fn, names=sys._getframe(1).f_locals)

    def declare(fn: Any) -> Agent[Any, Any]:
        return Agent(fn, name=name, version=version, names=sys._getframe(1).f_locals)

    return declare
