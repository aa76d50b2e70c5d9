"""`@tool`: a plain function, and what perdure has to know to call it durably."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, get_args, overload

from perdure.core import codec
from perdure.core.events import Effect
from perdure.core.machine import current
from perdure.core.retry import Retry
from perdure.errors import InvalidInput
from perdure.tool.call import Call
from perdure.tool.signature import EMPTY, Signature

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")
_LONGEST_S = 366 * 86_400.0
_KEY_WINDOW = timedelta(hours=24)


class Hook:
    """A function beside a tool that takes the same arguments: its reconcile or its compensate."""

    def __init__(self, fn: Callable[..., Any], call_parameter: str | None) -> None:
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(fn)
        self._call_parameter = call_parameter

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        """The arguments with the Call under the name that the function gives it, if it takes it."""
        return arguments if self._call_parameter is None else {**arguments, self._call_parameter: call}


class Tool(Generic[P, R]):
    """A function that touches the world. Called inside an agent it is a durable call; outside one it just runs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        effect: Effect = "once",
        name: str | None = None,
        timeout: float | timedelta | None = None,
        retry: Retry | None = None,
        key_window: float | timedelta = _KEY_WINDOW,
        isolate: bool = False,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        self.fn = fn
        self.name = _checked_name(fn, name)
        self.effect = effect
        self.timeout_s = None if timeout is None else _seconds(timeout, f"tool {self.name}: timeout")
        self.retry = retry
        self.key_window_s = _seconds(key_window, f"tool {self.name}: key_window")
        self.isolate = isolate
        self.is_async = inspect.iscoroutinefunction(fn)
        self.reconciler: Hook | None = None
        self.compensator: Hook | None = None
        self._check_options()
        self._signature = Signature(f"tool {self.name}", fn, names or {})
        self._function = Hook(fn, self._signature.call_parameter)
        self.__name__, self.__qualname__, self.__module__, self.__doc__ = fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__
        self.__wrapped__ = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call it. Arguments are checked, and inside an agent the call has its number, when this returns; await the result."""
        encoded = self._signature.bind(args, kwargs)
        machine = current()
        return self._run_here(encoded) if machine is None else machine.call_tool(self, encoded)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of all named arguments, defaults applied; InvalidInput names the parameter and the rule."""
        return self._signature.bind(args, kwargs)

    def rebind(self, encoded: bytes) -> bytes | None:
        """Recorded arguments as today's signature would record them; None if they do not fit it. A new parameter with a default fits."""
        try:
            return self._signature.bind((), codec.decode(encoded))
        except InvalidInput:
            return None

    def arguments(self, encoded: bytes) -> dict[str, Any]:
        """What the function is called with, typed by its annotations; without the Call. The same live and after a crash."""
        return self._signature.arguments(encoded)

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        """The arguments with the Call under the name that the function gives it, if it takes it."""
        return self._function.with_call(arguments, call)

    def encode_result(self, value: Any) -> bytes:
        """Canonical JSON of what the function returned; NotEncodable says why not."""
        converter = self._signature.result_converter
        return codec.encode(value) if converter is None else converter.encode(value)

    def decode_result(self, encoded: bytes) -> R:
        """The result as the return annotation has it; the plain JSON value when that cannot be rebuilt."""
        converter = self._signature.result_converter
        return cast(R, codec.decode(encoded) if converter is None else converter.decode(encoded))

    @property
    def description(self) -> str:
        """What the docstring says the tool does, without its sections."""
        return self._documented[0]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, for models. The Call is not one of them."""
        return copy.deepcopy(self._schema)

    def reconcile(self, hook: F) -> F:
        """Declare the function that is asked when nobody knows whether an attempt happened. It answers with an Outcome."""
        if self.reconciler is not None:
            raise InvalidInput(f"tool {self.name} has a reconcile hook already: {self.reconciler.fn.__qualname__}")
        if self.effect == "transaction":
            raise InvalidInput(f"tool {self.name}: a transaction cannot be in doubt, so that its reconcile hook would never be asked")
        self.reconciler = self._hook(hook, "reconcile", sys._getframe(1).f_locals)
        return hook

    def compensate(self, hook: F) -> F:
        """Declare the function that undoes a completed call; `perdure undo` calls it with the same arguments."""
        if self.compensator is not None:
            raise InvalidInput(f"tool {self.name} has a compensate hook already: {self.compensator.fn.__qualname__}")
        self.compensator = self._hook(hook, "compensate", sys._getframe(1).f_locals)
        return hook

    def __repr__(self) -> str:
        return f"<tool {self.name} effect={self.effect}>"

    async def _run_here(self, encoded: bytes) -> R:
        kwargs = self.with_call(self.arguments(encoded), Call.outside())
        if self.is_async:
            return cast(R, await self.fn(**kwargs))
        return cast(R, await asyncio.to_thread(self.fn, **kwargs))

    def _check_options(self) -> None:
        if self.effect not in get_args(Effect):
            raise InvalidInput(f"tool {self.name}: effect={self.effect!r} is unknown; one of {', '.join(get_args(Effect))}")
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidInput(f"tool {self.name}: retry={self.retry!r} is not a Retry(attempts=…)")
        if not self.isolate:
            return
        if self.effect == "transaction":
            raise InvalidInput(f"tool {self.name}: a transaction runs inside the journal's own connection, which no other process has")
        if "." in self.fn.__qualname__:
            raise InvalidInput(
                f"tool {self.name}: isolate=True starts a process that finds the function by its name; move {self.fn.__qualname__} to module level"
            )
        if "__file__" not in inspect.unwrap(self.fn).__globals__:
            raise InvalidInput(f"tool {self.name}: isolate=True starts a process that loads the function from its file, but it has none")

    def _hook(self, fn: Any, what: str, names: Mapping[str, Any]) -> Hook:
        label = f"{self.name}.{what}"
        _check_function(fn, label)
        signature = Signature(f"tool {label}", fn, names)
        if set(signature.names) != set(self._signature.names):
            raise InvalidInput(
                f"tool {label}: the hook takes ({', '.join(signature.names)}), but it is called with the tool's arguments ({', '.join(self._signature.names)})"
            )
        return Hook(fn, signature.call_parameter)

    @cached_property
    def _documented(self) -> tuple[str, dict[str, str]]:
        """The description, and one for each parameter."""
        from docstring_parser import ParseError, parse

        text = inspect.getdoc(self.fn) or ""
        try:
            parsed = parse(text)
        except ParseError:
            return text, {}
        words = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
        return words, {found.arg_name: found.description for found in parsed.params if found.description}

    @cached_property
    def _schema(self) -> dict[str, Any]:
        from perdure.tool.convert import json_schemas

        parameters = self._signature.parameters
        wanted = {parameter.name: Any if parameter.annotation is EMPTY else parameter.annotation for parameter in parameters}
        properties, shared = json_schemas(wanted)
        for parameter in parameters:
            described = self._documented[1].get(parameter.name)
            if described is not None:
                properties[parameter.name].setdefault("description", described)
            if parameter.default is not EMPTY:
                exact = parameter.exact is None or type(parameter.default) in parameter.exact
                properties[parameter.name].setdefault("default", parameter.default if exact else parameter.coerce(parameter.default))
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [parameter.name for parameter in parameters if parameter.default is EMPTY]
        return schema | ({"required": required} if required else {}) | ({"$defs": shared} if shared else {})


# A function that takes its Call last. What remains for the caller to give cannot be said in types, so that its arguments are
# checked when it is called; without a Call the type checker knows them.
TakesCall = (
    Callable[[Call], R]
    | Callable[[Any, Call], R]
    | Callable[[Any, Any, Call], R]
    | Callable[[Any, Any, Any, Call], R]
    | Callable[[Any, Any, Any, Any, Call], R]
    | Callable[[Any, Any, Any, Any, Any, Call], R]
)


class Declare(Protocol):
    """What `@tool(…)` returns."""

    @overload
    def __call__(self, fn: TakesCall[Coroutine[Any, Any, R]], /) -> Tool[..., R]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: TakesCall[R], /) -> Tool[..., R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(fn: TakesCall[Coroutine[Any, Any, R]], /) -> Tool[..., R]: ...
@overload
def tool(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...  # type: ignore[overload-overlap]
@overload
def tool(fn: TakesCall[R], /) -> Tool[..., R]: ...
@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    effect: Effect = "once",
    name: str | None = None,
    timeout: float | timedelta | None = None,
    retry: Retry | None = None,
    key_window: float | timedelta = _KEY_WINDOW,
    isolate: bool = False,
) -> Declare: ...
def tool(fn: Any = None, /, **options: Any) -> Any:
    """Declare a tool: `@tool`, or `@tool(effect=, name=, timeout=, retry=, key_window=, isolate=)`, on a sync or async function."""
    if fn is not None:
        return Tool(fn, **options, names=sys._getframe(1).f_locals)
    unknown = options.keys() - {"effect", "name", "timeout", "retry", "key_window", "isolate"}
    if unknown:
        raise InvalidInput(f"@tool has no option {min(unknown)}; effect, name, timeout, retry, key_window, isolate")

    def declare(fn: Any) -> Tool[..., Any]:
        return Tool(fn, **options, names=sys._getframe(1).f_locals)

    return declare


def _checked_name(fn: Any, name: str | None) -> str:
    shown = name if isinstance(name, str) else getattr(fn, "__qualname__", type(fn).__name__)
    _check_function(fn, shown)
    chosen: object = fn.__name__ if name is None else name
    if not isinstance(chosen, str) or not _NAME.match(chosen):
        raise InvalidInput(
            f"{chosen!a} cannot name a tool: 1 to 64 characters out of A-Z a-z 0-9 and _ . -, the first one a letter or _; say @tool(name=…)"
        )
    return chosen


def _check_function(fn: Any, shown: str) -> None:
    if isinstance(fn, Tool):
        raise InvalidInput(f"tool {fn.name} is a tool already; decorate the function once")
    if not inspect.isfunction(fn):
        raise InvalidInput(f"tool {shown}: a {type(fn).__name__} cannot be a tool; decorate a function (def or async def)")
    if fn.__name__ == "<lambda>":
        raise InvalidInput(f"tool {shown}: a lambda has no name to be recorded by; write it as a function with def")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidInput(f"tool {shown}: a generator cannot be recorded; return a list")
    first = next(iter(inspect.signature(fn).parameters), None)
    if first in ("self", "cls") and "." in fn.__qualname__.rpartition("<locals>.")[2]:
        raise InvalidInput(f"tool {shown}: a method cannot be a tool, since its object is not recorded; write a function")


def _seconds(value: object, what: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds) or not 0 < seconds <= _LONGEST_S:
        raise InvalidInput(f"{what}={value!r}: seconds or a timedelta, above 0 and at most {_LONGEST_S:,.0f} s")
    return float(seconds)
