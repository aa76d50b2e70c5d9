"""The SDKs' clients: made when they are needed, one for each event loop, and closed with it.

Connections belong to the loop that opened them, and a process may see several loops in its life.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

from perdure.errors import InvalidInput, NotReady
from perdure.models.streams import redacted

_AFTER_S = 1.0
_SECRETS = ("api_key", "auth_token", "admin_api_key", "webhook_key", "webhook_secret")


class Clients:
    """The client that the user has given, or those that `make` makes. None of them tries again on its own: the journal owns attempts."""

    def __init__(self, given: Any, make: Callable[[], Any], kind: str) -> None:
        # A class that is not the async one answers with things that cannot be awaited; by name, as its SDK need not be imported for this.
        if given is not None and not any(base.__name__ == kind for base in type(given).__mro__):
            raise InvalidInput(f"client={type(given).__name__}: give an async one, such as AsyncAnthropic(…) or AsyncOpenAI(…)")
        self._given = given
        self._make = make
        self._own: dict[asyncio.AbstractEventLoop, tuple[Any, weakref.finalize[..., Any]]] = {}

    async def here(self) -> Any:
        """The client for this loop."""
        if self._given is not None:
            if self._given.max_retries != 0:
                self._given = self._given.with_options(max_retries=0)
            return self._given
        loop = asyncio.get_running_loop()
        if loop not in self._own:
            # In a thread: importing an SDK and reading certificates takes half a second, and other runs are on this loop.
            client = await asyncio.to_thread(self._make)
            if loop in self._own:
                await client.close()  # somebody else was faster
            else:
                await self._keep(loop, client)
        return self._own[loop][0]

    async def _keep(self, loop: asyncio.AbstractEventLoop, client: Any) -> None:
        for other in [other for other in self._own if other.is_closed()]:
            self._own.pop(other)[1].detach()  # its connections went with it
        closing = _closing(client)
        # Held from outside, and not by us: what the garbage collector finds together with us it takes apart in any order, and it
        # would find the connections open.
        self._own[loop] = client, weakref.finalize(self, _close_soon, loop, closing)
        await anext(closing)


async def _closing(client: Any) -> AsyncGenerator[None, None]:
    """Suspended as long as the loop runs. A loop that is shut down closes its generators: the one moment to close connections."""
    try:
        yield
    finally:
        await client.close()


def _close_soon(loop: asyncio.AbstractEventLoop, closing: AsyncGenerator[None, None]) -> None:
    """The model is gone before its loop. From any thread: the garbage collector comes where it likes."""

    def close() -> None:
        _ = loop.create_task(closing.aclose())

    if not loop.is_closed():
        # Not at once: a model often ends with the loop's last task, and whoever ends a loop cancels the tasks that are left. A
        # generator that is left is closed in peace.
        loop.call_soon_threadsafe(loop.call_later, _AFTER_S, close)


def secrets_of(client: Any) -> Collection[str]:
    """What the client authenticates with, in every form in which an error may show it."""
    found = [getattr(client, name, None) for name in _SECRETS]
    keys = [key for key in found if isinstance(key, str) and key]
    return {form for key in keys for form in (key, key.strip(), repr(key)[1:-1]) if form}


def made(make: Callable[[], Any], name: str, way_out: str) -> Any:
    """A client by `make`; NotReady with the way out where there is no key, or one that no header can carry."""
    try:
        client = make()
    except Exception as error:
        raise NotReady(f"model {name}: its client cannot be made: {redacted(str(error), ())}; {way_out}") from None
    keys = secrets_of(client)
    if not keys and getattr(client, "credentials", None) is None:
        raise NotReady(f"model {name}: there is no API key; {way_out}")
    if any(not key.isprintable() or key != key.strip() for key in keys):
        raise NotReady(f"model {name}: its API key has a line break or a space at its end, or characters that no header takes; {way_out}")
    return client


def missing(name: str, extra: str) -> NotReady:
    """What to do where the SDK is not installed."""
    return NotReady(f"model {name}: the package {extra} is not installed; pip install 'perdure[{extra}]'")
