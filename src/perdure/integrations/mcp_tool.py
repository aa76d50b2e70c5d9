"""A tool of an MCP server: what an agent holds, and what the worker performs for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.events import OF_TOOL, Effect
from perdure.core.machine import current
from perdure.core.retry import PATIENT
from perdure.errors import InvalidInput
from perdure.integrations.mcp_listing import Listing, Offered
from perdure.integrations.mcp_schema import Arguments
from perdure.tool.call import Call
from perdure.tool.policy import Predicate, policy_of

PIN_CHARS = 16
Policy = bool | Predicate | Approval


def described(policy: Policy) -> Any:
    """What can be said of a policy, to tell it from another: a function is known by its name, and an Approval by all that it says."""
    if isinstance(policy, Approval):
        said = {name: value for name, value in vars(policy).items() if name != "when"}
        return said | {"when": None if policy.when is None else described(policy.when)}
    if isinstance(policy, bool):
        return policy
    return getattr(policy, "__qualname__", type(policy).__name__)


class McpTool:
    """One tool of a server. Called inside an agent it is a durable call; outside one it just runs. Arguments go by name."""

    def __init__(self, name: str, offered: Offered, callee: McpCallee) -> None:
        self.name = name  # what models call it
        self.description = offered.description
        self.effect = callee.effect
        self.offered = offered
        self._callee = callee

    def __call__(self, /, **arguments: Any) -> Coroutine[Any, Any, Any]:
        """Call it. Arguments are checked, and inside an agent the call has its number, when this returns; await the result."""
        encoded = self.bind((), arguments)
        machine = current()
        if machine is None:
            return self._callee.fn(codec.decode(encoded), Call.outside())
        return machine.call_tool(self._callee, encoded)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the arguments; InvalidInput names the one that does not fit its schema."""
        if args:
            raise InvalidInput(f"tool {self._callee.name}: its arguments have names only; say {self.name}(name=value)")
        return self._callee.takes.encoded(f"tool {self._callee.name}", kwargs)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, as the server gave it when the run's list was recorded."""
        return copy.deepcopy(self.offered.schema)

    def pin(self) -> str:
        return self._callee.pin()

    def __repr__(self) -> str:
        return f"<tool {self._callee.name} effect={self.effect}>"


class _Callee:
    """What the worker needs to know of a call, where there is nothing special about it."""

    events = OF_TOOL
    is_async = True
    isolate = False
    # What a tool says that it failed with is not among what it repeats, and no doubt about a `once` call is settled by another attempt.
    retry = PATIENT
    rate = None
    estimate = None
    reconciler = None
    compensator = None
    approval: Approval | None = None
    key_window_s = 86_400.0
    settle_s = None
    shows_key = True

    def __init__(self, name: str, effect: Effect, timeout_s: float) -> None:
        self.name = name
        self.effect = effect
        self.timeout_s = timeout_s

    def arguments(self, encoded: bytes) -> dict[str, Any]:
        return {"arguments": codec.decode(encoded)}

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        return {**arguments, "call": call}

    def encode_result(self, value: Any) -> bytes:
        return codec.encode(value)

    def decode_result(self, encoded: bytes) -> Any:
        return codec.decode(encoded)

    def rebind(self, _: bytes) -> bytes | None:
        return None  # the schema is the recorded one: the same arguments are the same bytes

    def asks(self, _: bytes) -> str | bool:
        return False

    def compensation(self) -> None:
        return None


class McpCallee(_Callee):
    """A call of one tool, as the worker performs it. Its name in the journal says which server: `<server>.<tool>`."""

    def __init__(
        self,
        name: str,
        offered: Offered,
        effect: Effect,
        timeout_s: float,
        approval: Policy | None,
        perform: Callable[[Offered, dict[str, Any], Call], Coroutine[Any, Any, Any]],
    ) -> None:
        super().__init__(name, effect, timeout_s)
        self.takes = Arguments(offered.schema)
        self._offered = offered
        self._perform = perform
        self._policy = policy_of(name, approval, self.takes.names)
        self.approval = None if self._policy is None else self._policy.approval

    def fn(self, arguments: dict[str, Any], call: Call) -> Coroutine[Any, Any, Any]:
        return self._perform(self._offered, arguments, call)

    def asks(self, encoded: bytes) -> str | bool:
        """Whether a call with these arguments needs an approval. A policy sees None for what was not given."""
        if self._policy is None:
            return False
        return self._policy.asks(lambda: {**dict.fromkeys(self.takes.names), **codec.decode(encoded)})

    def editable_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments that whoever approves a call may change."""
        schema = self._offered.schema
        properties = {name: schema["properties"][name] for name in self._editable}
        return {"properties": properties} | ({"$defs": schema["$defs"]} if "$defs" in schema else {})

    def edited(self, args: bytes, edited: bytes) -> bytes:
        """The arguments as they were approved, to the byte; InvalidInput unless they fit, and differ in editable ones only."""
        before, after = codec.decode(args), codec.decode(edited)
        self.takes.check(f"tool {self.name}", after)
        for name in {**before, **after}:
            same = name in before and name in after and codec.encode(before[name]) == codec.encode(after[name])
            if not same and name not in self._editable:
                raise InvalidInput(f"tool {self.name}: {name} may not be edited; {', '.join(self._editable) or 'nothing'} may")
        return edited

    @property
    def _editable(self) -> tuple[str, ...]:
        return () if self.approval is None else self.approval.editable

    def pin(self) -> str:
        """16 hex digits that change with its schema, its effect class, and whether it asks."""
        whole = [self.name, self._offered.fingerprint, self.effect, self._policy is not None]
        return codec.digest(codec.encode(whole))[:PIN_CHARS]


class ListCallee(_Callee):
    """The call that records what a server offers: its method, under the server's name."""

    def __init__(self, server: str, timeout_s: float, perform: Callable[[Call], Coroutine[Any, Any, Listing]]) -> None:
        super().__init__(f"{server}.tools/list", "read", timeout_s)
        self._perform = perform

    async def fn(self, arguments: dict[str, Any], call: Call) -> Any:
        return msgspec.to_builtins(await self._perform(call))

    def decode_result(self, encoded: bytes) -> Listing:
        return msgspec.convert(codec.decode(encoded), Listing)

    def pin(self) -> str:
        return codec.digest(self.name.encode())[:PIN_CHARS]
