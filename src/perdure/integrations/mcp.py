"""`mcp(server)`: the tools of an MCP server, as durable tools.

mcp_address.py   where a server is, and its name       mcp_tool.py    a tool as agents hold it and as the worker performs it
mcp_listing.py   what it offers, within limits         mcp_schema.py  arguments checked against somebody else's JSON Schema
mcp_line.py      one connection for each event loop    mcp_result.py  answers as values      mcp_errors.py  failures in our words
mcp_stdio.py     a process that ends with the worker   mcp_launcher.py the program that sees to that
mcp_http.py      streamable HTTP, with what went wrong kept apart      mcp_secrets.py what a server's words must not repeat
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, get_args
from weakref import WeakKeyDictionary

from perdure.core.codec import digest, encode, shown
from perdure.core.events import Effect
from perdure.core.machine import Machine, current
from perdure.errors import InvalidInput, NotReady, NotSent
from perdure.integrations import mcp_errors
from perdure.integrations.mcp_address import address_of, checked_name, located
from perdure.integrations.mcp_errors import BadAnswer, ToolChanged, ToolGone
from perdure.integrations.mcp_listing import Listing, Offered, names_for_models
from perdure.integrations.mcp_secrets import secrets_of
from perdure.integrations.mcp_tool import PIN_CHARS, ListCallee, McpCallee, McpTool, Policy, described
from perdure.run import Run
from perdure.tool.call import Call

if TYPE_CHECKING:
    from perdure.integrations.mcp_http import Faults
    from perdure.integrations.mcp_line import Line, Live

__all__ = ["McpServer", "McpTool", "mcp"]

_EFFECTS = tuple(effect for effect in get_args(Effect) if effect != "transaction")
_LONGEST_S = 86_400.0
FRESH_S = 30.0  # how old the list may be against which a call is compared that does more than read
_OPEN_S = 60.0  # a server may have to be fetched before it can start; calls that cannot wait so long have sent nothing


def mcp(
    server: str | Sequence[str],
    *,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | timedelta = 60,
    effects: Mapping[str, Effect] | None = None,
    approval: Mapping[str, Policy] | None = None,
    only: Iterable[str] | None = None,
) -> McpServer:
    """The tools of an MCP server. `server` is a command, for stdio, or an http(s) URL, for streamable HTTP. Nothing is started yet.

    `name` is the server's in journals. `env` is for its process, which inherits little else; `headers` go with every HTTP request.
    `timeout` is for each attempt of a call. `effects` overrides, by the server's own tool names, what their annotations say; `approval`
    has people asked, as `@tool(approval=…)` does; `only` names the tools to use, and the others are not offered to anybody.
    """
    return McpServer(
        server, name=name, env=env, headers=headers, timeout=timeout, effects=effects, approval=approval, only=only
    )  # fmt: skip


class McpServer:
    """An MCP server as agents use it: `await server.toolset(run)` gives its tools, `await server.call(name, …)` calls one."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        name: str | None,
        env: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
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
        self._secrets = secrets_of(self._where, self._headers, self._env)
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
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Line, Faults | None]] = WeakKeyDictionary()
        self._users: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()  # workers on that loop that have called it
        self._pinned: WeakKeyDictionary[Machine, Listing] = WeakKeyDictionary()
        self._list = ListCallee(self.name, self._timeout_s, self._listing_now)

    async def toolset(self, run: Run | None = None, taken: Collection[str] = ()) -> list[McpTool]:
        """Its tools. Inside an agent the list is recorded the first time, and is the run's from then on, whatever the server offers later.

        A tool is called by its own name, or `<server>_<tool>` where models could not take that or it is among the `taken` ones.
        """
        listing = await self._listing()
        chosen = [tool for tool in listing.tools if self._only is None or tool.name in self._only]
        names = names_for_models(self.name, [tool.name for tool in chosen], taken)
        in_journal = names_for_models(self.name, [tool.name for tool in listing.tools])  # whatever is chosen or taken
        return [self._tool(tool, names[tool.name], in_journal[tool.name], listing) for tool in chosen]

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call one of its tools by the server's own name for it. Inside an agent this is a durable call."""
        found = {each.offered.name: each for each in await self.toolset()}
        if tool not in found:
            raise InvalidInput(f"server {self.name} has no tool {tool!a:.80} for this run; it has {_few(found)}")
        return await found[tool](**arguments)

    async def _leave(self) -> None:
        """A worker has ended that has used it. The last of them on a loop ends the connection."""
        loop = asyncio.get_running_loop()
        self._users[loop] -= 1
        if not self._users[loop]:
            await self.close()

    async def close(self) -> None:
        """End this loop's connection, and the server's process with it. The next call opens another."""
        line, _ = self._lines.pop(asyncio.get_running_loop(), (None, None))
        if line is not None:
            await line.close()

    def pin(self) -> str:
        """16 hex digits that change with what is declared here about its tools, and with the URL they come from.

        A command is not in it: where a program lies is each machine's own business.
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

    # -- the list -------------------------------------------------------------------------------------------------------
    async def _listing(self) -> Listing:
        machine = current()
        if machine is None:
            return await self._listing_now(Call.outside())
        pinned = self._pinned.get(machine)
        if pinned is None:
            pinned = await machine.call_tool(self._list, b"{}")
            # Whoever asked at the same moment has a call of their own; the first answer is the run's.
            pinned = self._pinned.setdefault(machine, pinned)
        return pinned

    async def _listing_now(self, call: Call) -> Listing:
        # A run's list is one that the server gave when it was asked for it; one for nobody's journal may be a little older.
        since = time.monotonic() - (0.0 if call.run_id else FRESH_S)
        live = await self._live(call)
        listing = await self._listing_of(live, call, since)
        self._check_names(listing)
        live.useful = True
        return listing

    def _check_names(self, now: Listing, pinned: Listing | None = None) -> None:
        """A name that is written wrong must not leave a tool without its approval, or with a class that was not meant.

        NotReady: it is the code that is wrong, and a run that waits for better code loses nothing. Checked where a worker performs, against
        what is offered now too: code that names a tool which has come since must not stop the runs that do not know of it.
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
        return McpTool(name, offered, callee)

    # -- a call ---------------------------------------------------------------------------------------------------------
    async def _perform(self, listing: Listing, pinned: Offered, arguments: dict[str, Any], call: Call) -> Any:
        from perdure.integrations.mcp_result import value_of

        live = await self._live(call)
        # Not every server says that its tools have changed, and not every connection would carry the news.
        reads = self._effects.get(pinned.name, pinned.effect) == "read"
        now = await self._listing_of(live, call, -math.inf if reads else time.monotonic() - FRESH_S)
        self._check_names(now, listing)
        self._compare(pinned, now, arguments)
        answer = await self._request(live, pinned.name, arguments, call)
        live.useful = True
        return value_of(answer, self._secrets)

    async def _live(self, call: Call) -> Live:
        """The connection. However it is interrupted, nothing was sent."""
        loop = asyncio.get_running_loop()
        if call.at_end(self, self._leave):
            self._users[loop] = self._users.get(loop, 0) + 1
        try:
            return await (await self._line()).live()
        except asyncio.CancelledError:
            if not call.run_id:  # no worker has to be told that nothing was sent, and whoever cancels means it
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
            raise mcp_errors.while_opening(found, self.name, self._secrets) from None

    def _compare(self, pinned: Offered, now: Listing, arguments: dict[str, Any]) -> None:
        """Refuse what is not any more what the run was told: a changed tool is called only if it just reads, and takes the same (T30)."""
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
        from perdure.integrations.mcp_schema import Arguments

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
                # The answer as it came: what the SDK would refuse for its schema has happened all the same.
                answer: dict[str, Any] = await client.session.send_request(request, as_it_came)
                return answer
        except ValidationError:
            raise BadAnswer(f"server {self.name}: its answer to {tool!a:.80} is none that MCP knows") from None
        except MCPError as error:
            found = self._recovered(error)
            if found is error:
                words = await live.last_words() if mcp_errors.is_closed(error) else ""
                raise mcp_errors.of_rpc(error.code, words or error.message, self.name, self._secrets) from None
            self._retire_if_lost(live, found)
            raise found from None

    def _retire_if_lost(self, live: Live, found: BaseException) -> None:
        from perdure.integrations.mcp_http import loses_session

        if loses_session(found):  # who knows what is behind the URL now: the next call opens another, and finds out what is offered there
            live.retire()

    # -- the connection ---------------------------------------------------------------------------------------------------
    async def _line(self) -> Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            await asyncio.to_thread(_import_sdk)  # most of a second: not on a loop that others wait for
        if loop not in self._lines:
            self._lines[loop] = self._new_line()
        return self._lines[loop][0]

    def _new_line(self) -> tuple[Line, Faults | None]:
        from perdure.integrations.mcp_line import Line
        from perdure.integrations.mcp_stdio import Stdio

        where = self._where
        if isinstance(where, tuple):
            process = partial(Stdio, self.name, where, self._env, self._secrets)
            return Line(self.name, self.address, process, _OPEN_S, self._recovered, self._secrets), None
        from perdure.integrations.mcp_http import Faults, streamable

        faults = Faults()
        transport = partial(streamable, where, self._headers, self._timeout_s, faults, self._secrets)
        return Line(self.name, self.address, transport, _OPEN_S, self._recovered, self._secrets), faults

    def _recovered(self, error: BaseException) -> BaseException:
        """What was really wrong with a request over HTTP, where the SDK has been given a stand-in for it."""
        _, faults = self._lines.get(asyncio.get_running_loop(), (None, None))
        innermost = mcp_errors.innermost(error)
        return error if faults is None else faults.redeem(getattr(innermost, "data", None)) or error


def _import_sdk() -> None:
    for module in ("mcp", "jsonschema.validators"):
        import_module(module)


def _texts(given: Mapping[str, str] | None, what: str) -> dict[str, str]:
    texts = dict(given or {})
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
