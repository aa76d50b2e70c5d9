"""`mcp(server)`: the tools of an MCP server, as durable tools.

The other modules of this folder:

    tool.py        one tool, as agents use it and as a worker performs it; answers as values
    listing.py     the tools that a server offers, and the check of arguments against their JSON Schemas
    address.py     the location and the name of a server
    connection.py  one connection for each event loop
    stdio.py       the stdio transport
    launcher.py    the program that ends the server's process when the worker ends
    http.py        the streamable HTTP transport
    errors.py      failures as exceptions
    secrets.py     the secrets that must be removed from a server's messages
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args
from weakref import WeakKeyDictionary

from perdure.agents.mcp import errors
from perdure.agents.mcp.address import address_of, checked_name, located
from perdure.agents.mcp.errors import BadAnswer, ToolChanged, ToolGone
from perdure.agents.mcp.listing import Listing, Offered, names_for_models
from perdure.agents.mcp.secrets import secrets_of
from perdure.agents.mcp.tool import PIN_CHARS, ListCallee, McpCallee, McpTool, Policy, described
from perdure.core.codec import digest, encode, shown
from perdure.core.events import Effect
from perdure.core.machine import Machine, current
from perdure.errors import InvalidInput, NotReady, NotSent
from perdure.run import Run
from perdure.tool.call import Call
from perdure.tool.secret import Secret, resolve

if TYPE_CHECKING:
    from perdure.agents.mcp.connection import Live, ServerConnections
    from perdure.agents.mcp.http import Faults

__all__ = ["McpServer", "McpTool", "mcp"]

_EFFECTS = tuple(effect for effect in get_args(Effect) if effect != "transaction")
_LONGEST_S = 86_400.0
# Before a call the run's recorded tool is compared with the server's list of tools. The list is at most this old. For
# a `read` call it may be older.
FRESH_S = 30.0
# This time is long, because a server's program may have to be downloaded first. If the call's own time-out is shorter,
# that time-out ends the wait, and nothing was sent.
_OPEN_S = 60.0


def mcp(
    server: str | Sequence[str],
    *,
    name: str | None = None,
    env: Mapping[str, str | Secret] | None = None,
    headers: Mapping[str, str | Secret] | None = None,
    timeout: float | timedelta = 60,
    effects: Mapping[str, Effect] | None = None,
    approval: Mapping[str, Policy] | None = None,
    only: Iterable[str] | None = None,
) -> McpServer:
    """The tools of an MCP server. Starts nothing yet.

    `server`: a command (stdio) or an http(s) URL (streamable HTTP). `name`: the server's name in journals. `env`:
    environment variables for the server's process, which inherits only a few others. `headers`: sent with every HTTP
    request. A value in `env` or `headers` may be a Secret, or a text with one: f"Bearer {Secret('warehouse')}".
    `timeout`: the time limit of each attempt of a call. `effects`: the server's name of a tool → the effect class, which
    replaces the annotations of the tool. `approval`: the server's name of a tool → a policy, as in `@tool(approval=…)`.
    `only`: the tools to use; other tools are not offered.
    """
    return McpServer(
        server, name=name, env=env, headers=headers, timeout=timeout, effects=effects, approval=approval, only=only
    )  # fmt: skip


class McpServer:
    """An MCP server: `await server.toolset(run)` returns its tools, `await server.call(name, …)` calls one tool."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        name: str | None,
        env: Mapping[str, str | Secret] | None,
        headers: Mapping[str, str | Secret] | None,
        timeout: float | timedelta,
        effects: Mapping[str, Effect] | None,
        approval: Mapping[str, Policy] | None,
        only: Iterable[str] | None,
    ) -> None:
        if find_spec("mcp") is None:
            raise InvalidInput("mcp(…) needs the MCP SDK, which is not installed: pip install 'perdure[mcp]'")
        self._where = located(server)
        self.name = checked_name(name, self._where)
        self.address = address_of(self._where)
        self._env = _texts(env, "env")
        self._headers = _texts(headers, "headers")
        texts = (*self._headers.values(), *self._env.values())
        self._named = frozenset(name for text in texts for name in _MARKED.findall(text))
        if isinstance(self._where, tuple) and headers:
            raise InvalidInput(f"mcp({self.address}): headers are for a URL; a process has env={{…}}")
        if isinstance(self._where, str) and env:
            raise InvalidInput(f"mcp({self.address}): env is for a process; a URL has headers={{…}}")
        self._timeout_s = _seconds(timeout)
        self._effects = dict(effects or {})
        for tool, effect in self._effects.items():
            if effect not in _EFFECTS:
                raise InvalidInput(f"mcp(effects=…): {tool!r} has {effect!r}, which is no class for it; one of {', '.join(_EFFECTS)}")
        self._approval = dict(approval or {})
        if isinstance(only, str):
            raise InvalidInput(f"mcp(only={only!r:.60}): a list of tool names")
        self._only = None if only is None else tuple(only)
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connected] = WeakKeyDictionary()
        # Event loop → the number of workers on this loop that use the server.
        self._users: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
        self._pinned: WeakKeyDictionary[Machine, Listing] = WeakKeyDictionary()
        self._list = ListCallee(self.name, self._timeout_s, self._listing_now)
        self._list.secrets = self._named

    async def toolset(self, run: Run | None = None, taken: Collection[str] = ()) -> list[McpTool]:
        """The tools of the server.

        Inside an agent the first list is recorded. The run keeps this list, even if the server's tools change.

        A tool has its own name, or `<server>_<tool>` if its own name is not valid for models or is among `taken`.
        """
        listing = await self._listing()
        chosen = [tool for tool in listing.tools if self._only is None or tool.name in self._only]
        names = names_for_models(self.name, [tool.name for tool in chosen], taken)
        # The names in the journal must not depend on `only` and `taken`.
        in_journal = names_for_models(self.name, [tool.name for tool in listing.tools])
        return [self._tool(tool, names[tool.name], in_journal[tool.name], listing) for tool in chosen]

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool by the name that the server gives it. Inside an agent this is a durable call."""
        found = {each.offered.name: each for each in await self.toolset()}
        if tool not in found:
            raise InvalidInput(f"server {self.name} has no tool {tool!a:.80} for this run; it has {_few(found)}")
        return await found[tool](**arguments)

    async def _leave(self) -> None:
        """A worker that used the server has ended. When the last such worker on a loop ends, close the connection."""
        loop = asyncio.get_running_loop()
        self._users[loop] -= 1
        if not self._users[loop]:
            await self.close()

    async def close(self) -> None:
        """End this loop's connection, and with it the server's process. The next call opens a new connection."""
        connected = self._connections.pop(asyncio.get_running_loop(), None)
        if connected is not None:
            await connected.connections.close()

    def pin(self) -> str:
        """16 hex digits: a digest of the server's name, its URL, and the options `effects`, `approval` and `only`.

        A command is not included: the path of a program may differ between machines.
        """
        approval = {tool: described(policy) for tool, policy in self._approval.items()}
        url = self.address if isinstance(self._where, str) else None
        declared = [self.name, url, self._effects, approval, None if self._only is None else sorted(self._only)]
        return digest(encode(declared))[:PIN_CHARS]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<mcp server {self.name}: {self.address}>"

    # -- the list of tools --------------------------------------------------------------------------------------------
    async def _listing(self) -> Listing:
        machine = current()
        if machine is None:
            return await self._listing_now(Call.outside())
        pinned = self._pinned.get(machine)
        if pinned is None:
            pinned = await machine.call_tool(self._list, b"{}")
            # Another task of the agent may have asked for the list at the same time. The run uses the first answer.
            pinned = self._pinned.setdefault(machine, pinned)
        return pinned

    async def _listing_now(self, call: Call) -> Listing:
        # For a run the list is requested now. Outside of a run a list that is at most FRESH_S old is enough.
        since = time.monotonic() - (0.0 if call.run_id else FRESH_S)
        live = await self._live(call)
        listing = await self._listing_of(live, call, since)
        self._check_names(listing)
        live.useful = True
        return listing

    def _check_names(self, now: Listing, pinned: Listing | None = None) -> None:
        """NotReady if an option names an unknown tool.

        A misspelt name must not leave a tool without its approval, or with the wrong effect class. The error is
        NotReady because the code is wrong, and the run can wait for corrected code. A tool is known if the server
        offers it now, or the run's recorded list has it. So older runs do not stop when the code names a newer tool.
        """
        left_out = {tool.name: tool.why for tool in now.left_out}
        known = now.by_name() | (pinned.by_name() if pinned is not None else {})
        for option, names in (("effects", self._effects), ("approval", self._approval), ("only", self._only or ())):
            for name in names:
                if name in known:
                    continue
                named = f"mcp({option}=…) names {name!a:.80}"
                if name in left_out:
                    raise NotReady(f"{named}, a tool of server {self.name} that cannot be used: {left_out[name]}")
                raise NotReady(f"{named}, which server {self.name} does not offer; it has {_few(known)}. Correct it, and resume the run")

    def _tool(self, offered: Offered, name: str, in_journal: str, pinned: Listing) -> McpTool:
        effect = self._effects.get(offered.name, offered.effect)
        perform, approval = partial(self._perform, pinned), self._approval.get(offered.name)
        callee = McpCallee(f"{self.name}.{in_journal}", offered, effect, self._timeout_s, approval, perform)
        callee.secrets = self._named
        return McpTool(name, offered, callee)

    # -- a call -------------------------------------------------------------------------------------------------------
    async def _perform(self, listing: Listing, pinned: Offered, arguments: dict[str, Any], call: Call) -> Any:
        from perdure.agents.mcp.tool import value_of

        live = await self._live(call)
        # Do not rely on reports of changed tools: not every server sends them, and not every connection delivers them.
        reads = self._effects.get(pinned.name, pinned.effect) == "read"
        now = await self._listing_of(live, call, -math.inf if reads else time.monotonic() - FRESH_S)
        self._check_names(now, listing)
        self._compare(pinned, now, arguments)
        answer = await self._request(live, pinned.name, arguments, call)
        live.useful = True
        return value_of(answer, self._secrets)

    async def _live(self, call: Call) -> Live:
        """The connection. If the attempt is cancelled while it waits for the connection, nothing was sent."""
        loop = asyncio.get_running_loop()
        if call.at_end(self, self._leave):
            self._users[loop] = self._users.get(loop, 0) + 1
        try:
            return await (await self._connections_here(call)).live()
        except asyncio.CancelledError:
            if not call.run_id:  # outside of a run the CancelledError is not replaced
                raise
            raise NotSent(f"server {self.name}: it was told to stop while it waited for a connection; nothing was sent") from None

    async def _listing_of(self, live: Live, call: Call, since: float) -> Listing:
        from mcp.shared.exceptions import MCPError

        try:
            return await live.listing(since)
        except asyncio.CancelledError:
            if not call.run_id:
                raise
            raise NotSent(f"server {self.name}: it was told to stop while it compared the tools; nothing was sent") from None
        except MCPError as error:
            words = await live.last_words()
            found = NotSent(words) if words else self._recovered(error)
            self._retire_if_lost(live, found)
            raise errors.while_opening(found, self.name, self._secrets) from None

    def _compare(self, pinned: Offered, now: Listing, arguments: dict[str, Any]) -> None:
        """Refuse a tool that is gone, or that has changed since the run's list was recorded.

        A changed `read` tool is still called if the arguments fit its new schema (threat T30).
        """
        offered = now.by_name().get(pinned.name)
        if offered is None:
            raise ToolGone(
                f"server {self.name} does not offer {pinned.name!a:.80} any more; this run began when it did. Nothing was called"
            )
        if offered.fingerprint == pinned.fingerprint:
            return
        if self._effects.get(pinned.name, pinned.effect) != "read" or self._effects.get(pinned.name, offered.effect) != "read":
            raise ToolChanged(
                f"tool {pinned.name!a:.80} of server {self.name} has changed since this run's list was recorded; nothing was called. "
                "A new run takes it as it is now"
            )
        from perdure.agents.mcp.listing import Arguments

        Arguments(offered.schema).check(f"tool {self.name}.{pinned.name:.80} has changed", arguments)

    async def _request(self, live: Live, tool: str, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        from mcp.shared.exceptions import MCPError
        from mcp.types import CallToolRequest, CallToolRequestParams
        from pydantic import TypeAdapter, ValidationError

        meta: Any = {
            "perdure/idempotency-key": call.key,
            "perdure/run": call.run_id,
            "perdure/call": call.number,
            "perdure/attempt": call.attempt,
        }
        as_it_came: Any = TypeAdapter(dict[str, Any])
        request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=arguments, _meta=meta))
        try:
            async with live.borrowed() as client:
                # Take the raw answer: the call has happened even if the answer does not fit the schema that the SDK
                # would check.
                answer: dict[str, Any] = await client.session.send_request(request, as_it_came)
                return answer
        except ValidationError:
            raise BadAnswer(f"server {self.name}: its answer to {tool!a:.80} breaks the MCP protocol") from None
        except MCPError as error:
            found = self._recovered(error)
            if found is error:
                words = await live.last_words() if errors.is_closed(error) else ""
                raise errors.of_rpc(error.code, words or error.message, self.name, self._secrets) from None
            self._retire_if_lost(live, found)
            raise found from None

    def _retire_if_lost(self, live: Live, found: BaseException) -> None:
        from perdure.agents.mcp.http import loses_session

        if loses_session(found):  # the URL may lead to another server now: the next call connects and lists again
            live.retire()

    # -- the connection -----------------------------------------------------------------------------------------------
    async def _connections_here(self, call: Call) -> ServerConnections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            await asyncio.to_thread(_import_sdk)  # the import takes almost a second and must not block the loop
        if self._named and call.scrubber is None:  # outside of a run
            call.scrubber = await resolve(self._named, call.secrets)
        values = {} if call.scrubber is None else call.scrubber.values
        connected = self._connections.get(loop)
        if connected is not None and connected.values != values:
            connected.connections.retire()  # a secret has another value now
            connected = None
        if connected is None:
            connected = self._connections[loop] = self._new_connections(values)
        return connected.connections

    @property
    def _secrets(self) -> tuple[str, ...]:
        """What must not be shown of what the server says."""
        connected = self._connections.get(asyncio.get_running_loop())
        return secrets_of(self._where, self._headers, self._env) if connected is None else connected.secrets

    def _new_connections(self, values: dict[str, str]) -> _Connected:
        from perdure.agents.mcp.connection import ServerConnections
        from perdure.agents.mcp.stdio import Stdio

        where = self._where
        headers, env = ({name: _filled(text, values) for name, text in texts.items()} for texts in (self._headers, self._env))
        secrets = secrets_of(where, headers, env)
        if isinstance(where, tuple):
            process = partial(Stdio, self.name, where, env, secrets)
            return _Connected(ServerConnections(self.name, self.address, process, _OPEN_S, self._recovered, secrets), None, values, secrets)
        from perdure.agents.mcp.http import Faults, streamable

        faults = Faults()
        transport = partial(streamable, where, headers, self._timeout_s, faults, secrets)
        return _Connected(ServerConnections(self.name, self.address, transport, _OPEN_S, self._recovered, secrets), faults, values, secrets)

    def _recovered(self, error: BaseException) -> BaseException:
        """The original error of an HTTP request, if this error has a ticket. If it has no ticket, the error itself."""
        connected = self._connections.get(asyncio.get_running_loop())
        faults = None if connected is None else connected.faults
        innermost = errors.innermost(error)
        return error if faults is None else faults.redeem(getattr(innermost, "data", None)) or error


def _import_sdk() -> None:
    for module in ("mcp", "jsonschema.validators"):
        import_module(module)


class _Connected(NamedTuple):
    """The connections of one event loop, and the values of the secrets that they were opened with."""

    connections: ServerConnections
    faults: Faults | None
    values: dict[str, str]
    secrets: tuple[str, ...]


# How a Secret in a text looks: f"Bearer {Secret('warehouse')}".
_MARKED = re.compile(r"<secret ([A-Za-z0-9][A-Za-z0-9._-]{0,63})>")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _MARKED.sub(lambda found: values[found[1]], text)


def _texts(given: Mapping[str, str | Secret] | None, what: str) -> dict[str, str]:
    texts: dict[Any, Any] = {key: str(value) if isinstance(value, Secret) else value for key, value in (given or {}).items()}
    for key, value in texts.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInput(f"mcp({what}=…): {shown(key)} is not text with a text for its value")
    return texts


def _seconds(timeout: object) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds) or not 0 < seconds <= _LONGEST_S:
        raise InvalidInput(f"mcp(timeout={shown(timeout)}): seconds or a timedelta, above 0 and at most a day")
    return float(seconds)


def _few(names: Iterable[str]) -> str:
    listed = [f"{name!a:.80}" for name in names]
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "") if listed else "none"
