"""`@tool` and Tool, a function with everything that perdure has to know for a durable call; and the pin of a tool.

A pin is a short digest of the parts of a tool that its callers see. A run records the pin with its first call of the
tool, and later notices if the tool has changed.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, get_args, overload

from msgspec import structs

from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.events import OF_TOOL, Effect
from perdure.core.machine import current
from perdure.core.rate import Rate
from perdure.core.redaction import MARK, Found, filled_in
from perdure.core.retry import Retry
from perdure.errors import InvalidInput, NotEncodable
from perdure.tool import hooks
from perdure.tool.artifact import in_call
from perdure.tool.call import Call
from perdure.tool.describe import argument_schema, documented, properties_of
from perdure.tool.hooks import Compensator, Hook, Simulator
from perdure.tool.policy import Predicate, policy_of
from perdure.tool.redact import redaction_of
from perdure.tool.secret import resolve
from perdure.tool.signature import EMPTY, Parameter, Signature
from perdure.tool.spend import Cost, estimated

# -- pins -------------------------------------------------------------------------------------------------------------
PIN_CHARS = 16
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def pin_of(
    name: str, effect: Effect, key_window_s: float, *, reconciles: bool, asks: bool, parameters: Sequence[Parameter], module: str
) -> str:
    """The pin of a tool.

    Every process with the same declaration has the same pin, even if the module has another name in that process.
    """
    # If a parameter needs pydantic, the pin contains the fields of its class and not only the name. For all other
    # parameters pydantic is not used, so that it need not be loaded.
    structured = [parameter for parameter in parameters if parameter.exact == frozenset() and not parameter.is_secret]
    whole = {
        "name": name,
        "effect": effect,
        "key_window_s": key_window_s,
        "reconcile": reconciles,
        "approval": asks,
        "parameters": [[parameter.name, _annotation(parameter, module), _default(parameter)] for parameter in parameters],
        "structured": properties_of(structured, {}) if structured else None,
    }
    return codec.digest(codec.encode(whole))[:PIN_CHARS]


def _annotation(parameter: Parameter, module: str) -> str:
    annotation: Any = parameter.annotation
    text = annotation.__qualname__ if isinstance(annotation, type) else repr(annotation)
    return _ADDRESS.sub("", text).replace(f"{module}.", "")


def _default(parameter: Parameter) -> str | None:
    if parameter.default is EMPTY:
        return None
    try:
        default = parameter.coerce(parameter.default) if parameter.is_secret else parameter.default
        return codec.encode(default).decode("utf-8", "replace")
    except NotEncodable:
        return type(parameter.default).__qualname__


# -- Tool and @tool ---------------------------------------------------------------------------------------------------
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# Models accept 64 characters. Only perdure itself calls a tool with the suffix `.undo`.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}(\.undo)?\Z")
_OPTIONS = (
    *("effect", "name", "timeout", "heartbeat_timeout", "settle", "retry", "key_window"),
    *("isolate", "pass_env", "approval", "rate", "cost", "redact", "redact_result"),
)
_NO_SECRETS: frozenset[str] = frozenset()
_LONGEST_S = 366 * 86_400.0
_KEY_WINDOW = timedelta(hours=24)


class Tool(Generic[P, R]):
    """A function with effects outside the agent, made by `@tool`.

    If an agent calls the tool, that is a durable call. Outside of an agent, the function just runs. A Tool has a
    `name`, an `effect`, and the other options of `@tool` as they were declared.
    """

    events = OF_TOOL  # the event types of the tool's calls

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        effect: Effect = "once",
        name: str | None = None,
        timeout: float | timedelta | None = None,
        heartbeat_timeout: float | timedelta | None = None,
        settle: float | timedelta | None = None,
        retry: Retry | None = None,
        key_window: float | timedelta = _KEY_WINDOW,
        isolate: bool = False,
        pass_env: Collection[str] = (),
        approval: bool | Predicate | Approval | None = None,
        rate: Rate | None = None,
        cost: Cost | None = None,
        redact: Collection[str] = (),
        redact_result: Collection[str] = (),
        names: Mapping[str, Any] | None = None,
    ) -> None:
        self.fn = fn
        self.name = _checked_name(fn, name)
        self.effect = effect
        self.timeout_s = None if timeout is None else _seconds(timeout, f"tool {self.name}: timeout")
        silent = heartbeat_timeout
        self.heartbeat_timeout_s = None if silent is None else _seconds(silent, f"tool {self.name}: heartbeat_timeout")
        self.settle_s = None if settle is None else _seconds(settle, f"tool {self.name}: settle", zero=True)
        self.retry = retry
        self.key_window_s = _seconds(key_window, f"tool {self.name}: key_window")
        self.isolate = isolate
        self.pass_env = _variables(pass_env, self.name)
        self.is_async = inspect.iscoroutinefunction(fn)
        self.rate = _rate(rate, self.name)
        self.estimate = estimated(cost, f"tool {self.name}: cost")
        self.redaction = redaction_of(redact, f"tool {self.name}: redact")
        self.result_redaction = redaction_of(redact_result, f"tool {self.name}: redact_result")
        self.redacted: dict[str, Found] = {}  # of one call: the values of its redacted arguments, by their digests
        self.reconciler: Hook | None = None
        self.compensator: Compensator | None = None
        self.simulator: Simulator | None = None
        self._check_options()
        self._signature = Signature(f"tool {self.name}", fn, names or {})
        # The arguments of a recorded call, typed by the function's annotations: the same live and after a crash.
        self.arguments = self._signature.arguments
        # Is the key of a call needed outside of perdure? Either the function receives the key in its Call, or people
        # need the key to resolve a doubt.
        self.shows_key = self._signature.call_parameter is not None or effect not in ("read", "idempotent")
        # May a call be in doubt, although no service can know its key? The journal says so, for the person who looks.
        self.keyless = self._signature.call_parameter is None and effect in ("once", "keyed")
        self._policy = policy_of(self.name, approval, self._signature.names)
        # None: the calls of this tool need no approval.
        self.approval: Approval | None = None if self._policy is None else self._policy.approval
        self._pin: str | None = None
        self.__name__, self.__qualname__, self.__module__, self.__doc__ = fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__
        self.__wrapped__ = fn

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the tool. To get the result, await the returned coroutine.

        When this returns, the arguments have been checked, and inside an agent the number of the call is fixed. Raises
        InvalidInput for arguments that do not fit. The coroutine raises ToolFailed, or a subclass of it, if the call
        failed and is not tried again.
        """
        encoded = self.bind(args, kwargs)
        machine = current()
        if machine is None:
            return self._run_here(encoded)
        return machine.call_tool(self, encoded) if self.redaction is None else machine.call_tool(*self.for_call(encoded))

    def for_call(self, encoded: bytes) -> tuple[Tool[..., Any], bytes]:
        """The callee and the recorded arguments of a call with these arguments."""
        if self.redaction is None:
            return self, encoded
        # The machine and the journal get the digests. The values are in the callee of this call, in memory: an agent that
        # is replayed computes its arguments again, so that they are here again.
        callee: Tool[..., Any] = copy.copy(self)
        recorded, callee.redacted = self.redaction.redacted(encoded)
        return callee, recorded

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of all named arguments, with defaults. InvalidInput names the parameter that is wrong.

        A value that was redacted in a journal, so that only its digest is left, is refused.
        """
        bound = self._signature.bind(args, kwargs)
        return bound if MARK not in bound else filled_in(bound, {}, f"tool {self.name}")

    def clear(self, encoded: bytes) -> bytes:
        """The arguments of this call with the values of their redacted fields. InvalidInput if a value is not known."""
        return encoded if MARK not in encoded else filled_in(encoded, self.redacted, f"tool {self.name}")

    @property
    def takes(self) -> list[str]:
        """The names of the tool's arguments, without the Call."""
        return self._signature.names

    @property
    def takes_secrets(self) -> dict[str, bool]:
        """The parameters that take a secret; True: the parameter has a default."""
        return self._signature.secrets_with_default

    def misfits(self, given: Mapping[str, Any], later: Collection[str]) -> list[str]:
        """All problems with these named arguments. For the names in `later`, the values are not known yet."""
        return self._signature.misfits(given, later)

    def rebind(self, encoded: bytes) -> bytes | None:
        """The recorded arguments in the form that the current signature gives them; None if they do not fit.

        For example, they still fit after a parameter with a default was added.
        """
        try:
            bound = self._signature.rebind(self.clear(encoded))
            return bound if self.redaction is None else self.redaction.redacted(bound)[0]
        except InvalidInput:
            return None

    def secrets_in(self, encoded: bytes) -> frozenset[str]:
        """The names of the secrets in the arguments of a recorded call."""
        # A secret has no fields, so it is never redacted.
        return self._signature.secrets_in(encoded) if self._signature.secrets else _NO_SECRETS

    def with_secrets(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that `bind` has made, with a Secret for each reference: to call the tool with them."""
        return self._signature.with_secrets(bound)

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        """The arguments, plus the Call if the function has a parameter for the Call."""
        name = self._signature.call_parameter
        return arguments if name is None else {**arguments, name: call}

    def encode_result(self, value: Any) -> bytes:
        """Canonical JSON of what the function returned. NotEncodable says why the value cannot be encoded."""
        converter = self._signature.result_converter
        return self.redact_encoded(codec.encode(value) if converter is None else converter.encode(value))

    def redact_encoded(self, encoded: bytes) -> bytes:
        """The result as it is recorded. The agent gets it like this too, live and in a replay."""
        return encoded if self.result_redaction is None else self.result_redaction.redacted(encoded)[0]

    def decode_result(self, encoded: bytes) -> R:
        """The result in the type of the return annotation, or as plain JSON if that type cannot be rebuilt."""
        converter = self._signature.result_converter
        result: R = codec.decode(encoded) if converter is None else converter.decode(encoded)
        return result

    def result_misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value cannot be a result of the tool; None if it fits the return annotation."""
        return self._signature.result_misfit(encoded)

    def asks(self, args: bytes) -> str | bool:
        """Does a call with these arguments need an approval?

        False, True, or the reason to show. If the policy fails, the call needs an approval.
        """
        return False if self._policy is None else self._policy.asks(lambda: self.arguments(self.clear(args)))

    def editable_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments that a decision may change."""
        parameters = [parameter for parameter in self._signature.parameters if parameter.name in self._editable]
        return properties_of(parameters, self._documented[1]) if parameters else {"properties": {}}

    def edited(self, args: bytes, edited: bytes) -> bytes:
        """The edited arguments, byte for byte.

        Raises InvalidInput if they do not fit the tool, or if an argument was changed that is not editable.
        """
        before, after = codec.decode(args), codec.decode(edited)
        if not isinstance(after, dict):
            raise InvalidInput(f"tool {self.name}: the edited arguments are not an object")
        if self.redaction is not None and self.redaction.redacted(edited)[1]:
            raise InvalidInput(f"tool {self.name}: a field that is redacted may not be edited: the journal would have it")
        self._signature.bind((), self._signature.with_secrets(codec.decode(self.clear(edited))))
        fixed = [name for name in {**before, **after} if name not in self._editable]
        for name in fixed:
            if name not in before or name not in after or codec.encode(after[name]) != codec.encode(before[name]):
                raise InvalidInput(f"tool {self.name}: {name} may not be edited; {', '.join(self._editable) or 'nothing'} may")
        # Do not return the result of bind(): the call may use only the approved bytes (G9), and the store checks their
        # digest.
        return edited

    def pin(self) -> str:
        """The pin: 16 hex digits.

        It is a digest of the name, the effect class, the parameters and the key window. It also changes if the tool
        gets or loses its reconcile hook or its approval policy.
        """
        if self._pin is None:
            self._pin = pin_of(
                self.name,
                self.effect,
                self.key_window_s,
                reconciles=self.reconciler is not None,
                asks=self._policy is not None,
                parameters=self._signature.parameters,
                module=self.fn.__module__,
            )
        return self._pin

    @property
    def description(self) -> str:
        """The description in the tool's docstring, without its sections. Models read it."""
        return self._documented[0]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments without the Call, for models."""
        return copy.deepcopy(self._schema)

    def reconcile(self, hook: F) -> F:
        """Declare the function that perdure asks if it does not know whether an attempt happened.

        The function takes the same arguments as the tool, and returns an `Outcome`.
        """
        if self.reconciler is not None:
            raise InvalidInput(f"tool {self.name} has a reconcile hook already: {self.reconciler.fn.__qualname__}")
        if self.effect == "transaction":
            raise InvalidInput(f"tool {self.name}: a transaction cannot be in doubt, so that its reconcile hook would never be asked")
        label = f"tool {self.name}.reconcile"
        signature = _hook_signature(label, hook, sys._getframe(1).f_locals)
        self.reconciler = hooks.reconciler(label, hook, signature, self._signature.names)
        self._pin = None
        return hook

    def simulate(self, hook: F) -> F:
        """Declare a stand-in: the function that answers calls of this tool in a rehearsal (`perdure fork`, `whatif`).

        The function may take any of the tool's arguments by name, and returns what the tool would return. If it raises
        an exception, the call fails. It must compute its result from its arguments alone: like an agent, it cannot do
        I/O, wait or call tools. Runs never use it, and the pin of the tool does not change.
        """
        if self.simulator is not None:
            raise InvalidInput(f"tool {self.name} has a stand-in already: {self.simulator.fn.__qualname__}")
        label = f"tool {self.name}.simulate"
        signature = _hook_signature(label, hook, sys._getframe(1).f_locals)
        self.simulator = hooks.simulator(label, hook, signature, self._signature.names)
        return hook

    @overload
    def compensate(self, hook: F) -> F: ...
    @overload
    def compensate(self, *, effect: Effect = "once") -> Callable[[F], F]: ...
    def compensate(self, hook: Any = None, *, effect: Effect = "once") -> Any:
        """Declare the function that undoes a completed call. `perdure undo` calls this function.

        Undoing is an effect too, and `effect` is its own effect class. The function may take any of the tool's
        arguments by name, `result` (what the call returned), and its own Call.
        """
        if hook is not None:
            return self._compensate(hook, effect, sys._getframe(1).f_locals)
        return lambda fn: self._compensate(fn, effect, sys._getframe(1).f_locals)

    def compensation(self) -> Tool[..., Any] | None:
        """The tool that undoes a call of this tool. Its arguments are the `arguments` and the `result` of that call.

        None: this tool has no compensate hook.
        """
        hook = self.compensator
        if hook is None:
            return None

        def given(arguments: dict[str, Any], result: Any, call: Call) -> dict[str, Any]:
            taken = hook.given(self.arguments(codec.encode(arguments)), call)
            return {**taken, hooks.RESULT: self.decode_result(codec.encode(result))} if hook.takes_result else taken

        def undo(arguments: dict[str, Any], result: Any, call: Call) -> Any:
            return hook.fn(**given(arguments, result, call))

        async def undo_async(arguments: dict[str, Any], result: Any, call: Call) -> Any:
            return await hook.fn(**given(arguments, result, call))

        undoing: Tool[..., Any] = Tool(
            undo_async if hook.is_async else undo,
            effect=hook.effect,
            name=f"{self.name}.undo",
            timeout=self.timeout_s,
            heartbeat_timeout=self.heartbeat_timeout_s,
            settle=self.settle_s,
            retry=self.retry,
            key_window=self.key_window_s,
            rate=self.rate,
        )
        # The hook gets the secrets of the call that it undoes.
        undoing.secrets_in = lambda encoded: self.secrets_in(codec.encode(codec.decode(encoded)["arguments"]))  # type: ignore[method-assign]
        return undoing

    def __repr__(self) -> str:
        return f"<tool {self.name} effect={self.effect}>"

    async def _run_here(self, encoded: bytes) -> R:
        caller = in_call.get()
        if isinstance(caller, Call) and caller.reads_only and self.effect != "read":
            raise InvalidInput(
                f"tool {self.name} ({self.effect}) is not called: a rehearsal calls only read tools, and the body of a read tool calls this one"
            )
        call = Call.outside()
        if names := self.secrets_in(encoded):
            call.scrubber = await resolve(names, caller.secrets if isinstance(caller, Call) else None)
            token = in_call.set(call)  # so that the secrets in the arguments are those of this call
            try:
                arguments = self.arguments(encoded)
            finally:
                in_call.reset(token)
        else:
            arguments = self.arguments(encoded)
        kwargs = self.with_call(arguments, call)
        if self.is_async:
            return cast(R, await self.fn(**kwargs))
        return cast(R, await asyncio.to_thread(self.fn, **kwargs))

    def _check_options(self) -> None:
        if self.effect not in get_args(Effect):
            raise InvalidInput(f"tool {self.name}: effect={self.effect!r} is unknown; one of {', '.join(get_args(Effect))}")
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidInput(f"tool {self.name}: retry={self.retry!r} is not a Retry(attempts=…)")
        if self.heartbeat_timeout_s is not None and self.effect == "transaction":
            raise InvalidInput(
                f"tool {self.name}: heartbeat_timeout cannot end a transaction, which has the journal's own connection; leave it out"
            )
        if not self.isolate and self.pass_env:
            raise InvalidInput(f"tool {self.name}: pass_env needs isolate=True; without it the tool has the worker's whole environment")
        if not self.isolate:
            return
        if self.effect == "transaction":
            raise InvalidInput(f"tool {self.name}: a transaction runs on the journal's own connection, which no other process has")
        if "." in self.fn.__qualname__:
            raise InvalidInput(
                f"tool {self.name}: isolate=True starts a process that finds the function by its name; move {self.fn.__qualname__} to module level"
            )
        if "__file__" not in inspect.unwrap(self.fn).__globals__:
            raise InvalidInput(f"tool {self.name}: isolate=True starts a process that loads the function from its file, but it has none")

    def _compensate(self, hook: F, effect: Effect, names: Mapping[str, Any]) -> F:
        if self.compensator is not None:
            raise InvalidInput(f"tool {self.name} has a compensate hook already: {self.compensator.fn.__qualname__}")
        label = f"tool {self.name}.compensate"
        self.compensator = hooks.compensator(label, hook, _hook_signature(label, hook, names), self._signature.names, effect)
        return hook

    @property
    def _editable(self) -> tuple[str, ...]:
        if self._policy is None:
            return ()
        # A person who decides must not name another secret.
        return tuple(name for name in self._policy.approval.editable if name not in self._signature.secrets)

    @cached_property
    def _documented(self) -> tuple[str, dict[str, str]]:
        """The description of the tool, and the descriptions of its parameters."""
        return documented(self.fn)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return argument_schema(self._signature.parameters, self._documented[1])


# A function whose last parameter is its Call. Python's types cannot express the remaining parameters, so the arguments
# are checked only when the tool is called. If the function takes no Call, the type checker knows all parameters.
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
    heartbeat_timeout: float | timedelta | None = None,
    settle: float | timedelta | None = None,
    retry: Retry | None = None,
    key_window: float | timedelta = _KEY_WINDOW,
    isolate: bool = False,
    pass_env: Collection[str] = (),
    approval: bool | Predicate | Approval | None = None,
    rate: Rate | None = None,
    cost: Cost | None = None,
    redact: Collection[str] = (),
    redact_result: Collection[str] = (),
) -> Declare: ...
def tool(fn: Any = None, /, **options: Any) -> Any:
    """Declare a tool: `@tool` or `@tool(effect="keyed", …)` on a sync or async function.

    `effect` says what perdure may do if it does not know whether an attempt happened. `timeout` is the time limit of
    each attempt, in seconds or as a timedelta. `heartbeat_timeout` is the longest time from the start of an attempt to
    its first `call.heartbeat`, and from one heartbeat to the next; after that, the attempt is ended as by a time-out.
    `settle` says how long after the time-out of a lost attempt its request may still arrive at the service. `retry`
    says when another attempt is made. `key_window` is how long the service remembers an idempotency key.

    With `approval`, people are asked before a call: True, an `Approval`, or a function of the tool's arguments that
    returns True, False or a reason. `rate` says how often calls may start, over all workers. `cost` is the expected
    cost of one attempt, in dollars or as a `Usage`. It is reserved in the budget until the attempt has ended. The tool
    reports the real cost with `call.spend`.

    With `isolate`, the function runs in its own process. That process gets the worker's environment without the
    secrets of perdure and of its models. `pass_env` names secrets that the process gets too.

    `redact` names fields of the arguments, and `redact_result` fields of the result, that are stored only as a keyed
    digest: paths such as "card.number" or "items.*.cvv", or "key:cvv" for this key at any depth.
    """
    if fn is not None:
        return Tool(fn, **options, names=sys._getframe(1).f_locals)
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise InvalidInput(f"@tool has no option {min(unknown)}; its options are {', '.join(_OPTIONS)}")

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
        raise InvalidInput(f"tool {shown}: a lambda has no name, and calls are recorded by name; write a function with def")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidInput(f"tool {shown}: a generator cannot be recorded; return a list")
    first = next(iter(inspect.signature(fn).parameters), None)
    if first in ("self", "cls") and "." in fn.__qualname__.rpartition("<locals>.")[2]:
        raise InvalidInput(f"tool {shown}: a method cannot be a tool, since its object is not recorded; write a function")


def _hook_signature(label: str, fn: Any, names: Mapping[str, Any]) -> Signature:
    _check_function(fn, label.removeprefix("tool "))
    return Signature(label, fn, names)


def _rate(rate: object, name: str) -> Rate | None:
    if rate is None:
        return None
    if not isinstance(rate, Rate):
        raise InvalidInput(f"tool {name}: rate={codec.shown(rate)} is not a Rate(limit, per=…)")
    return structs.replace(rate, key=name) if rate.key is None else rate


def _variables(names: object, tool: str) -> tuple[str, ...]:
    if isinstance(names, (str, Mapping)) or not isinstance(names, Collection):
        raise InvalidInput(f"tool {tool}: pass_env={codec.shown(names)} is not a list of names of environment variables")
    for name in names:
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InvalidInput(f"tool {tool}: pass_env has {codec.shown(name)}, which is not the name of an environment variable")
    return tuple(names)


def _seconds(value: object, what: str, *, zero: bool = False) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= _LONGEST_S or (seconds == 0 and not zero):
        least = "0 or more" if zero else "above 0"
        raise InvalidInput(f"{what}={value!r}: seconds or a timedelta, {least} and at most {_LONGEST_S:,.0f} s")
    return float(seconds)
