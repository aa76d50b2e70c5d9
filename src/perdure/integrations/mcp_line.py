"""The line to one server: one connection for each event loop, opened when it is first needed and shared by every run there.

The SDK's task groups live in one task of their own, the keeper, and never inside an attempt, which may be cancelled at any moment. Who
calls only borrows the session. When the connection has ended, the next one who needs it opens another, slower each time that none of
them had been of any use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from perdure.errors import NotSent
from perdure.integrations.mcp_errors import innermost, is_closed, while_opening
from perdure.integrations.mcp_listing import Listing, list_tools
from perdure.integrations.mcp_secrets import redacted
from perdure.integrations.mcp_stdio import Ending, Stdio, printable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

log = logging.getLogger("perdure.mcp")
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 10.0


class Live:
    """A connection that works, as far as anybody knows."""

    def __init__(self, client: Client, listing: Listing, asked_at: float, address: str, ending: Ending | None) -> None:
        self.client = client
        self._ending = ending
        self.useful = False  # has answered somebody
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
        """The client, which is not closed before this is left, unless it breaks."""
        if not self.usable:
            raise NotSent("the connection has just ended")
        self._borrowed += 1
        try:
            yield self.client
        finally:
            self._borrowed -= 1
            self._end_if_idle()

    def retire(self) -> None:
        """Nobody shall begin anything here any more; what is under way is left to end."""
        self._retired = True
        self._end_if_idle()

    async def last_words(self) -> str:
        """How the process at its other end has ended, if there is one and it has."""
        return await self._ending.words() if self._ending is not None and self.over.is_set() else ""

    def _end_if_idle(self) -> None:
        if self._retired and not self._borrowed:
            self.over.set()

    async def listing(self, since: float) -> Listing:
        """What the server has said that it offers, asked at this time of the monotonic clock or later, and not known to have changed."""
        if self._is_old(since):
            async with self._relisting:
                if self._is_old(since):  # who has waited here meanwhile shares the answer
                    self.stale = False  # before the question: a change after it makes it stale again
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


class Line:
    """Connects to one server from one event loop."""

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
        self._recover = recover  # what was really wrong, where the SDK only has a stand-in for it
        self._secrets = secrets
        self._live: Live | None = None
        self._opening: asyncio.Future[Live | Exception] | None = None
        self._keepers: dict[asyncio.Task[None], Live | None] = {}  # and what each has opened
        self._failures = 0

    async def live(self) -> Live:
        """The connection, opened if there is none; raises what `while_opening` makes of a failure. Nothing of a call is sent by this."""
        live = self._live
        if live is not None and live.usable:
            return live
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
            # Not in the caller's task, which may be cancelled, nor in a group of its own: the line has no parent but the loop.
            keeper = asyncio.get_running_loop().create_task(self._keep(self._opening), name=f"mcp {self._name}")
            self._keepers[keeper] = None
            keeper.add_done_callback(lambda _: self._keepers.pop(keeper))
        found = await asyncio.shield(self._opening)
        if isinstance(found, Exception):
            raise type(found)(*found.args)  # its own for each of those who wait: they add their tracebacks
        return found

    async def close(self) -> None:
        """End the connection, with whatever is under way on it, and wait until the server's process is gone."""
        for keeper, live in self._keepers.items():
            if live is None:
                keeper.cancel()
            else:
                live.over.set()  # no cancel: it may be ending the server's process already, and would leave it where it is
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, opening: asyncio.Future[Live | Exception]) -> None:
        live: Live | None = None
        problem: BaseException | None = None
        transport = self._transport()
        ending = transport.ending if isinstance(transport, Stdio) else None
        try:
            await asyncio.sleep(self._delay_s())
            async with AsyncExitStack() as stack:
                # asyncio's time-out and not the SDK's kind: that one would have to be left before what was entered inside it.
                async with asyncio.timeout(self._open_s):
                    live = await self._open(stack, transport, ending)
                self._live = live
                self._opening = None
                if (keeper := asyncio.current_task()) in self._keepers:
                    self._keepers[keeper] = live
                opening.set_result(live)
                await live.over.wait()
        except BaseException as error:  # whatever ended it, who waits for it must hear of it, and the next one opens another
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
        """Hear of changed tools, where the protocol has a stream for that; before 2026 they come unasked."""
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
        from mcp.shared.exceptions import MCPError

        try:
            changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        except (ListenNotSupportedError, MCPError, SubscriptionLost, TimeoutError):
            return  # it is not obliged to offer one

        async def watch() -> None:
            try:
                async for _ in changes:
                    live.stale = True
            except (MCPError, SubscriptionLost):
                live.stale = True  # what came after this nobody has told us

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
    """A transport that says when there is nothing more to read: the SDK has no word for an idle connection that has ended."""

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
        except Exception:  # the end among others
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
    except PackageNotFoundError:  # run from a checkout
        return "0"
