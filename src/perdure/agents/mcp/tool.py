"""One tool of an MCP server: as agents use the tool, as a worker performs its calls, and the value of an answer.

The value of a call is the structured content of the answer. If the answer has no structured content that can be
recorded, the value is the answer's text. Images, audio and binary resources are not recorded, only their type, size
and digest: a model reads results as text.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perdure.agents.mcp.errors import McpRefused, McpToolError
from perdure.agents.mcp.listing import Arguments, Listing, Offered
from perdure.agents.mcp.secrets import redacted
from perdure.agents.mcp.stdio import printable
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.events import OF_TOOL, Effect
from perdure.core.machine import current
from perdure.core.redaction import filled_in
from perdure.core.retry import PATIENT
from perdure.errors import InvalidInput, NotEncodable
from perdure.tool.call import Call
from perdure.tool.policy import Predicate, policy_of

MAX_CHARS = 1_000_000
MAX_STRUCTURED_BYTES = 4 * 1024 * 1024


def value_of(answer: Mapping[str, Any], secrets: Sequence[str] = ()) -> Any:
    """The value of the call. McpToolError if the tool reports a failure."""
    if answer.get("resultType") == "input_required":
        raise McpRefused("the server asks for more input before it begins, and an agent's call has no user to ask")
    text = _text(answer.get("content"))
    if answer.get("isError"):
        raise McpToolError(redacted(text, secrets) or "the tool failed, and says nothing about it")
    structured = answer.get("structuredContent")
    if structured is not None and _fits(structured):
        return structured
    return text


def _fits(structured: Any) -> bool:
    try:
        return len(codec.encode(structured)) <= MAX_STRUCTURED_BYTES
    except NotEncodable:
        return False  # `value_of` returns the text of the answer then: the call has happened, so it must have a value


def _text(content: Any) -> str:
    parts = list(_parts(content)) if isinstance(content, list) else []
    text = "\n".join(parts)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… (cut: {len(text):,} characters)"


def _parts(content: list[Any]) -> Iterator[str]:
    for block in content:
        if not isinstance(block, dict):
            continue
        held = block.get("resource") if isinstance(block.get("resource"), dict) else block
        assert isinstance(held, dict)
        if isinstance(held.get("text"), str):
            yield held["text"]
        elif "uri" in held and "blob" not in held:
            yield f"[a link: {printable(str(held['uri']), 1_000)}]"
        else:
            yield _described(held)


def _described(held: Mapping[str, Any]) -> str:
    kind = printable(str(held.get("mimeType") or held.get("type") or "something"), 100)
    try:
        data = base64.b64decode(held.get("data") or held.get("blob") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return f"[{kind}, unreadable]"
    return f"[{kind}, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}; not kept]"


# -- the tool ---------------------------------------------------------------------------------------------------------
PIN_CHARS = 16
Policy = bool | Predicate | Approval


def described(policy: Policy) -> Any:
    """A description of a policy, to see whether a policy has changed.

    For a function this is its name. For an Approval these are all its fields.
    """
    if isinstance(policy, Approval):
        said = {name: value for name, value in vars(policy).items() if name != "when"}
        return said | {"when": None if policy.when is None else described(policy.when)}
    if isinstance(policy, bool):
        return policy
    return getattr(policy, "__qualname__", type(policy).__name__)


class McpTool:
    """One tool of a server.

    Inside an agent a call of the tool is durable. Outside of an agent the call is not recorded. Arguments are passed
    by name.
    """

    def __init__(self, name: str, offered: Offered, callee: McpCallee) -> None:
        self.name = name  # the tool's name for models
        self.description = offered.description
        self.effect = callee.effect
        self.offered = offered
        self._callee = callee

    def __call__(self, /, **arguments: Any) -> Coroutine[Any, Any, Any]:
        """Make a call of the tool. Await the returned coroutine for the result.

        When this method returns, the arguments are checked, and inside an agent the call has its number.
        """
        encoded = self.bind((), arguments)
        machine = current()
        if machine is None:
            return self._callee.fn(codec.decode(encoded), Call.outside())
        return machine.call_tool(self._callee, encoded)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the arguments. If an argument does not fit the schema, InvalidInput names the argument."""
        if args:
            raise InvalidInput(f"tool {self._callee.name}: its arguments have names only; say {self.name}(name=value)")
        label = f"tool {self._callee.name}"
        return filled_in(self._callee.takes.encoded(label, kwargs), {}, label)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, from the run's recorded list of tools."""
        return copy.deepcopy(self.offered.schema)

    def pin(self) -> str:
        return self._callee.pin()

    def __repr__(self) -> str:
        return f"<tool {self._callee.name} effect={self.effect}>"


class _Callee:
    """Everything that a worker needs to know about a call, with its defaults."""

    events = OF_TOOL
    is_async = True
    isolate = False
    # With PATIENT a call is not repeated if the tool itself reports the failure. A `once` call in doubt is never
    # repeated, with any policy.
    retry = PATIENT
    rate = None
    estimate = None
    reconciler = None
    compensator = None
    approval: Approval | None = None
    key_window_s = 86_400.0
    heartbeat_timeout_s = None
    settle_s = None
    shows_key = True
    keyless = False
    secrets: frozenset[str] = frozenset()

    def __init__(self, name: str, effect: Effect, timeout_s: float) -> None:
        self.name = name
        self.effect = effect
        self.timeout_s = timeout_s

    def secrets_in(self, encoded: bytes) -> frozenset[str]:
        """The secrets of the server's headers or environment. The arguments of an MCP tool cannot have secrets."""
        return self.secrets

    def arguments(self, encoded: bytes) -> dict[str, Any]:
        return {"arguments": codec.decode(encoded)}

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        return {**arguments, "call": call}

    def encode_result(self, value: Any) -> bytes:
        return codec.encode(value)

    def decode_result(self, encoded: bytes) -> Any:
        return codec.decode(encoded)

    def result_misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value cannot be a result; None if it can be one. A server may return any value."""
        return None

    def rebind(self, _: bytes) -> bytes | None:
        return None  # nothing to do: the run uses the recorded schema, so equal arguments have equal bytes

    def asks(self, _: bytes) -> str | bool:
        return False

    def compensation(self) -> None:
        return None


class McpCallee(_Callee):
    """The calls of one tool, as a worker performs them. The tool's name in the journal is `<server>.<tool>`."""

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
        """Does a call with these arguments need an approval? The policy gets None for arguments that are left out."""
        if self._policy is None:
            return False
        return self._policy.asks(lambda: {**dict.fromkeys(self.takes.names), **codec.decode(encoded)})

    def editable_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments that a decision may change."""
        schema = self._offered.schema
        properties = {name: schema["properties"][name] for name in self._editable}
        return {"properties": properties} | ({"$defs": schema["$defs"]} if "$defs" in schema else {})

    def edited(self, args: bytes, edited: bytes) -> bytes:
        """The edited arguments, byte for byte.

        InvalidInput if they do not fit the schema, or if an argument was changed that may not be edited.
        """
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
        """16 hex digits: a digest of the tool's name, schema and effect class, and of whether it has a policy."""
        whole = [self.name, self._offered.fingerprint, self.effect, self._policy is not None]
        return codec.digest(codec.encode(whole))[:PIN_CHARS]


class ListCallee(_Callee):
    """The call that records the list of tools of a server: `<server>.tools/list`."""

    def __init__(self, server: str, timeout_s: float, perform: Callable[[Call], Coroutine[Any, Any, Listing]]) -> None:
        super().__init__(f"{server}.tools/list", "read", timeout_s)
        self._perform = perform

    async def fn(self, arguments: dict[str, Any], call: Call) -> Any:
        return msgspec.to_builtins(await self._perform(call))

    def decode_result(self, encoded: bytes) -> Listing:
        return msgspec.convert(codec.decode(encoded), Listing)

    def result_misfit(self, encoded: bytes) -> str | None:
        try:
            self.decode_result(encoded)
        except msgspec.ValidationError as error:
            return str(error)
        return None

    def pin(self) -> str:
        return codec.digest(self.name.encode())[:PIN_CHARS]
