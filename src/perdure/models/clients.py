"""The clients of the SDKs. A client is created when a loop first needs it, and closed when that loop ends.

Each event loop has its own client: connections belong to the loop that opened them, and a process may have several
loops, one after the other.
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
    """The client that the user gave, or clients that `make` creates.

    No client retries by itself: every attempt must be in the journal.
    """

    def __init__(self, given: Any, make: Callable[[], Any], kind: str) -> None:
        # Refuse a client that is not async: its results cannot be awaited. The check uses the name of the class,
        # because an import of the SDK is slow.
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
            # Make the client in a thread: the import of an SDK and the reading of certificates take half a second, and
            # other runs use this loop.
            client = await asyncio.to_thread(self._make)
            if loop in self._own:
                await client.close()  # another task has created a client for this loop meanwhile
            else:
                await self._keep(loop, client)
        return self._own[loop][0]

    async def _keep(self, loop: asyncio.AbstractEventLoop, client: Any) -> None:
        for other in [other for other in self._own if other.is_closed()]:
            self._own.pop(other)[1].detach()  # the client's connections were closed together with the other loop
        closing = _closing(client)
        # The finalizer keeps a reference to the client. Without this reference, the garbage collector could finalize
        # the client together with this object, while the client's connections are open.
        self._own[loop] = client, weakref.finalize(self, _close_soon, loop, closing)
        await anext(closing)


async def _closing(client: Any) -> AsyncGenerator[None, None]:
    """A generator that waits at `yield` while the loop runs.

    A loop that shuts down closes its async generators, and so this generator closes the client.
    """
    try:
        yield
    finally:
        await client.close()


def _close_soon(loop: asyncio.AbstractEventLoop, closing: AsyncGenerator[None, None]) -> None:
    """Close the client of a model that was garbage-collected before its loop ended.

    This is a finalizer, so it may run in any thread.
    """

    def close() -> None:
        _ = loop.create_task(closing.aclose())

    if not loop.is_closed():
        # Wait _AFTER_S seconds: a model is often collected just before its loop ends. At its end the loop closes the
        # generator, and so the client, but it would cancel a task that was created here.
        loop.call_soon_threadsafe(loop.call_later, _AFTER_S, close)


def secrets_of(client: Any) -> Collection[str]:
    """The API keys of the client, in every form in which an error message may show them."""
    found = [getattr(client, name, None) for name in _SECRETS]
    keys = [key for key in found if isinstance(key, str) and key]
    return {form for key in keys for form in (key, key.strip(), repr(key)[1:-1]) if form}


def made(make: Callable[[], Any], name: str, way_out: str) -> Any:
    """A client created by `make`. NotReady if there is no API key, or if a header cannot contain the key.

    `way_out`: the end of the message of NotReady, which tells the user what to do.
    """
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
    """The error for an SDK that is not installed. The message says what to install."""
    return NotReady(f"model {name}: the package {extra} is not installed; pip install 'perdure[{extra}]'")
