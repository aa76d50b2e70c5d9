"""Connections to a server: each event loop has one. The first call opens the connection, and all runs share it.

A connection runs in its own task, the keeper. The task groups of the SDK cannot run inside an attempt, which may be
cancelled at any moment. Calls only borrow the session. When a connection has ended, the next call opens a new
connection. Before that it waits, and the wait grows with every connection that ended without a useful answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from perdure.agents.mcp.errors import innermost, is_closed, while_opening
from perdure.agents.mcp.listing import Listing, list_tools
from perdure.agents.mcp.secrets import redacted
from perdure.agents.mcp.stdio import Ending, Stdio, printable
from perdure.errors import NotSent

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

log = logging.getLogger("perdure.mcp")
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 10.0


class Live:
    """A connection that is not known to have ended."""

    def __init__(self, client: Client, listing: Listing, asked_at: float, address: str, ending: Ending | None) -> None:
        self.client = client
        self._ending = ending
        self.useful = False  # the connection has answered a request
        self.stale = False  # the server says that its tools have changed
        self.over = asyncio.Event()
        self._listing = listing
        self._asked_at = asked_at
        self._address = address
        self._borrowed = 0
        self._retired = False
        self._relisting = asyncio.Lock()

    @property
    def usable(self) -> bool:
        return not self._retired and not self.over.is_set()

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Client]:
        """The client. The client stays open until the context is left, unless the connection breaks."""
        if not self.usable:
            raise NotSent("the connection has just ended")
        self._borrowed += 1
        try:
            yield self.client
        finally:
            self._borrowed -= 1
            self._end_if_idle()

    def retire(self) -> None:
        """Accept no new requests on this connection. Requests that are under way can still complete."""
        self._retired = True
        self._end_if_idle()

    async def last_words(self) -> str:
        """How the server's process ended. The text is empty if the server has no process or the process still runs."""
        return await self._ending.words() if self._ending is not None and self.over.is_set() else ""

    def _end_if_idle(self) -> None:
        if self._retired and not self._borrowed:
            self.over.set()

    async def listing(self, since: float) -> Listing:
        """The server's list of tools.

        The list was requested at `since` (monotonic clock) or later, and the server has not reported a change since.
        """
        if self._is_old(since):
            async with self._relisting:
                if self._is_old(since):  # look again: another task may have got the list while this task waited
                    self.stale = False  # before the request: a change during the request makes the list stale again
                    asked_at = time.monotonic()
                    try:
                        async with self.borrowed() as client:
                            self._listing = await list_tools(client, self._address)
                    except BaseException:
                        self.stale = True
                        raise
                    self._asked_at = asked_at
        return self._listing

    def _is_old(self, since: float) -> bool:
        return self.stale or self._asked_at < since


class ServerConnections:
    """The connections to one server from one event loop. There is one connection at a time."""

    def __init__(
        self,
        name: str,
        address: str,
        transport: Callable[[], Transport],
        open_s: float,
        recover: Callable[[BaseException], BaseException],
        secrets: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._address = address
        self._transport = transport
        self._open_s = open_s
        self._recover = recover  # a function: an error of the SDK → the HTTP error behind it, else the same error
        self._secrets = secrets
        self._live: Live | None = None
        self._opening: asyncio.Future[Live | Exception] | None = None
        self._keepers: dict[asyncio.Task[None], Live | None] = {}  # keeper → the connection, once the keeper opened it
        self._failures = 0

    async def live(self) -> Live:
        """The connection. If there is no usable connection, a new connection is opened.

        Raises the errors of `while_opening`. Sends no call.
        """
        live = self._live
        if live is not None and live.usable:
            return live
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
            # The keeper is a task of the loop itself. The caller's task may be cancelled, and so may a task group.
            keeper = asyncio.get_running_loop().create_task(self._keep(self._opening), name=f"mcp {self._name}")
            self._keepers[keeper] = None
            keeper.add_done_callback(lambda _: self._keepers.pop(keeper))
        found = await asyncio.shield(self._opening)
        if isinstance(found, Exception):
            raise type(found)(*found.args)  # each waiting task raises its own copy, and adds its traceback to the copy
        return found

    def retire(self) -> None:
        """Accept no new requests on the connection. It ends when the requests under way have completed."""
        if self._live is not None:
            self._live.retire()

    async def close(self) -> None:
        """End the connection and the requests under way, and wait until the server's process has ended."""
        for keeper, live in self._keepers.items():
            if live is None:
                keeper.cancel()
            else:
                live.over.set()  # do not cancel the keeper: it may be ending the server's process right now
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, opening: asyncio.Future[Live | Exception]) -> None:
        live: Live | None = None
        problem: BaseException | None = None
        transport = self._transport()
        ending = transport.ending if isinstance(transport, Stdio) else None
        try:
            await asyncio.sleep(self._delay_s())
            async with AsyncExitStack() as stack:
                # Use asyncio.timeout, not anyio's: a cancel scope of anyio must not end while contexts that were
                # entered inside it are still open.
                async with asyncio.timeout(self._open_s):
                    live = await self._open(stack, transport, ending)
                self._live = live
                self._opening = None
                if (keeper := asyncio.current_task()) in self._keepers:
                    self._keepers[keeper] = live
                opening.set_result(live)
                await live.over.wait()
        except BaseException as error:  # every error: `_ended` gives it to the tasks that wait for the connection
            problem = self._recover(error)
            if isinstance(error, asyncio.CancelledError):
                raise
            if ending is not None and is_closed(problem) and (words := await ending.words()):
                problem = NotSent(words)
        finally:
            self._ended(opening, live, problem)

    async def _open(self, stack: AsyncExitStack, transport: Transport, ending: Ending | None) -> Live:
        from mcp import Client
        from mcp.types import Implementation, ToolListChangedNotification

        made: list[Live] = []
        ended = False

        async def heard(message: Any) -> None:
            if made and isinstance(message, ToolListChangedNotification):
                made[0].stale = True

        def end() -> None:
            nonlocal ended
            ended = True
            if made:
                made[0].over.set()

        ours = Implementation(name="perdure", version=_version())
        client = Client(_Watched(transport, end), client_info=ours, message_handler=heard, cache=None)
        await stack.enter_async_context(client)
        asked_at = time.monotonic()
        live = Live(client, await list_tools(client, self._address), asked_at, self._address, ending)
        made.append(live)
        if ended:
            raise ConnectionResetError("it ended right after it had begun")
        await self._listen(stack, client, live)
        return live

    async def _listen(self, stack: AsyncExitStack, client: Client, live: Live) -> None:
        """Listen for changes of the tool list, if the server has a stream for them.

        In versions of the protocol before 2026 a change is sent as a notification: see `heard` in `_open`.
        """
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
        from mcp.shared.exceptions import MCPError

        try:
            changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        except (ListenNotSupportedError, MCPError, SubscriptionLost, TimeoutError):
            return  # the stream is optional

        async def watch() -> None:
            try:
                async for _ in changes:
                    live.stale = True
            except (MCPError, SubscriptionLost):
                live.stale = True  # the stream is lost: later changes are not reported

        group = await stack.enter_async_context(asyncio.TaskGroup())
        watching = group.create_task(watch(), name=f"mcp {self._name}: changes")
        stack.callback(watching.cancel)

    def _delay_s(self) -> float:
        return min(_FIRST_DELAY_S * 2 ** (self._failures - 1), _LONGEST_DELAY_S) if self._failures else 0.0

    def _ended(self, opening: asyncio.Future[Live | Exception], live: Live | None, problem: BaseException | None) -> None:
        self._failures = 0 if live is not None and live.useful else self._failures + 1
        if live is not None:
            live.over.set()
        if self._live is live:
            self._live = None
        if problem is not None and not isinstance(problem, asyncio.CancelledError):
            found = innermost(problem)
            log.warning("server %s: %s", self._name, printable(f"{type(found).__name__}: {redacted(str(found), self._secrets)}", 1_000))
        if not opening.done():
            self._opening = None
            opening.set_result(while_opening(problem or ConnectionResetError("it ended"), self._name, self._secrets))


class _Watched:
    """A transport that reports the end of its input.

    It is needed because the SDK does not report that an idle connection has ended.
    """

    def __init__(self, transport: Transport, end: Callable[[], None]) -> None:
        self._transport = transport
        self._end = end

    async def __aenter__(self) -> TransportStreams:
        reading, writing = await self._transport.__aenter__()
        return _Reading(reading, self._end), writing

    async def __aexit__(self, *how: Any) -> bool | None:
        return await self._transport.__aexit__(*how)


class _Reading:
    def __init__(self, stream: Any, end: Callable[[], None]) -> None:
        self._stream = stream
        self._end = end

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except Exception:
            self._end()
            raise

    def __aiter__(self) -> _Reading:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except Exception:  # including the end of the stream
            self._end()
            raise

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()

    async def __aenter__(self) -> _Reading:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *how: Any) -> Any:
        return await self._stream.__aexit__(*how)


def _version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:  # perdure runs from a checkout and is not installed
        return "0"
