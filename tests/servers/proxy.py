"""A TCP proxy that drops messages of PostgreSQL's protocol at the worst moment, on purpose and exactly once."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from tests.servers.listener import Listener, Peer
from tests.servers.wire import CANCEL_REQUEST, READY, Message, Messages, Statements, address_of, through_port

Moment = Literal["before", "after", "late", "silent"]
Direction = Literal["to server", "to client"]

_BATCH_PATIENCE_S = 5.0


@dataclass
class Cut:
    """Lose every nth execution of a statement whose text contains the marker (a regular expression), at most `times` times.

    A statement travels in a batch: a simple query, or everything up to the next Sync of a pipeline.

    before: it never reaches the server; both sides are reset.
    after:  the server executes the batch, its answer is thrown away, then the client is reset.
    late:   the client is reset first, and the batch reaches the server `seconds` later, when the client may have reconnected.
    silent: the server executes the batch, and the client hears nothing, for ever: not even that the connection is gone.
    """

    marker: str
    moment: Moment
    nth: int = 1
    times: int = 1
    seconds: float = 0.0
    seen: int = field(default=0, init=False)
    """Executions that matched."""
    made: int = field(default=0, init=False)
    """Cuts begun."""
    done: int = field(default=0, init=False)
    """Cuts that are over: for `late`, the server has executed it too."""

    def __post_init__(self) -> None:
        self._pattern = re.compile(self.marker)
        self._changed = threading.Condition()

    def takes(self, statement: str) -> bool:
        if not self._pattern.search(statement):
            return False
        self.seen += 1
        if self.made >= self.times or self.seen % self.nth:
            return False
        self.made += 1
        return True

    def finish(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def wait_done(self, count: int = 1, timeout_s: float = 10.0) -> None:
        """Return when so many cuts are over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done >= count, timeout_s):
                raise TimeoutError(f"{self.done} of {count} cuts are done after {timeout_s} s: {self}")


class Proxy:
    """A proxy before the server of a URL. It passes everything on until a rule says otherwise.

    `latency_s` is added to every packet, in both directions.
    """

    def __init__(self, url: str) -> None:
        self._address = address_of(url)
        self._rules: list[Cut] = []
        self._links: set[_Link] = set()
        self._open: dict[Direction, asyncio.Event] = {"to server": asyncio.Event(), "to client": asyncio.Event()}
        for gate in self._open.values():
            gate.set()
        self.latency_s = 0.0
        self.connections = 0
        """Clients that have connected so far."""
        self.cuts: Counter[Moment] = Counter()
        self._listener = Listener(self._serve)
        self.port = self._listener.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def url(self, url: str) -> str:
        """The same database by way of this proxy; any process may use it."""
        return through_port(url, self.port)

    def rule(self, cut: Cut) -> Cut:
        """From now on, for connections that exist already too. The first rule that takes a statement has it."""
        self._listener.call(lambda: self._rules.append(cut))
        return cut

    def clear(self) -> None:
        """Remove the rules. Connections that were cut stay cut."""
        self._listener.call(self._rules.clear)

    def silence(self, *directions: Direction) -> None:
        """Half-open: accept data, forward nothing in that direction and close nothing, even if a side goes away.

        Without a direction: both directions. Data that arrives meanwhile is delivered after speak(), and so is a
        close.
        """
        self._listener.call(lambda: _all(self._open[way].clear for way in directions or self._open))

    def speak(self) -> None:
        """End the silence."""
        self._listener.call(lambda: _all(gate.set for gate in self._open.values()))

    def reset(self) -> None:
        """Cut every connection that there is, on both sides."""
        self._listener.call(lambda: _all(link.reset for link in self._links))

    def close(self) -> None:
        self._listener.close()

    async def _serve(self, client: Peer) -> None:
        self.connections += 1
        await self._open["to server"].wait()
        startup = await client.read_startup()
        await self._open["to server"].wait()
        if not startup:
            return
        try:
            server = await Peer.connect(*self._address)
        except OSError:
            return
        link = _Link(client, server)
        self._links.add(link)
        try:
            await server.write((len(startup) + 4).to_bytes(4) + startup)
            if int.from_bytes(startup[:4]) == CANCEL_REQUEST:
                await server.read()  # the server closes without a word when it is done
                client.close()
                return
            await self._relay(link)
            link.server.close()  # in order, unless it was cut: the last statement of the client is still executed
        finally:
            self._links.discard(link)
            link.reset()

    async def _relay(self, link: _Link) -> None:
        """Both directions, until the client's has ended or been cut; the server's end is news for the client first."""
        answers = asyncio.create_task(self._to_client(link))
        try:
            await self._to_server(link)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def _to_client(self, link: _Link) -> None:
        messages = Messages()
        while chunk := await link.server.read():
            link.note_answers(messages.feed(chunk))
            await asyncio.sleep(self.latency_s)
            await self._open["to client"].wait()
            if link.client_hears:
                await link.client.write(chunk)
        link.server_gone.set()
        await self._open["to client"].wait()
        if link.client_hears:
            link.client.close()

    async def _to_server(self, link: _Link) -> None:
        messages, statements = Messages(), Statements()
        while chunk := await link.client.read():
            await asyncio.sleep(self.latency_s)
            await self._open["to server"].wait()
            batch = messages.feed(chunk)
            for at, sent in enumerate(batch):
                statement = statements.executed_by(sent)
                cut = None if statement is None else self._cut_for(statement)
                if cut is not None:
                    await self._perform(cut, link, batch[at:], messages)
                    return
                await link.forward(sent)
        await self._open["to server"].wait()

    def _cut_for(self, statement: str) -> Cut | None:
        # Every rule counts what it sees, even if another rule takes it.
        taking = [cut for cut in self._rules if cut.takes(statement)]
        for cut in taking[1:]:
            cut.made -= 1
        return taking[0] if taking else None

    async def _perform(self, cut: Cut, link: _Link, begun: list[Message], messages: Messages) -> None:
        self.cuts[cut.moment] += 1
        match cut.moment:
            case "before":
                link.reset()
            case "after":
                link.client_hears = False
                await link.send_and_settle(await link.rest_of_batch(begun, messages))
                link.reset()
            case "late":
                link.client_hears = False
                batch = await link.rest_of_batch(begun, messages)
                link.client.reset()
                await asyncio.sleep(cut.seconds)
                await link.send_and_settle(batch)
                link.reset()
            case "silent":
                link.client_hears = False
                await link.send_and_settle(await link.rest_of_batch(begun, messages))
        cut.finish()
        if cut.moment == "silent":
            await asyncio.Event().wait()  # until the proxy is closed or gets a reset


class _Link:
    """A client, its server, and how far the server's answers have come."""

    def __init__(self, client: Peer, server: Peer) -> None:
        self.client = client
        self.server = server
        self.client_hears = True
        self.server_gone = asyncio.Event()
        self._awaited = 1  # ReadyForQuery ends the startup too
        self._settled = asyncio.Event()

    async def forward(self, sent: Message) -> None:
        if sent.ends_batch:
            self._awaited += 1
            self._settled.clear()
        await self.server.write(sent.raw)

    def note_answers(self, answers: list[Message]) -> None:
        self._awaited -= sum(answer.kind == READY for answer in answers)
        if self._awaited == 0:
            self._settled.set()

    async def rest_of_batch(self, begun: list[Message], messages: Messages) -> list[Message]:
        """From the first message to the last message of the batch, which the client may still have to send."""
        async with asyncio.timeout(_BATCH_PATIENCE_S):
            while True:
                for at, sent in enumerate(begun):
                    if sent.ends_batch:
                        return begun[: at + 1]
                chunk = await self.client.read()
                if not chunk:
                    return begun
                begun = begun + messages.feed(chunk)

    async def send_and_settle(self, batch: list[Message]) -> None:
        """Return when the server has answered everything, or has gone away."""
        for sent in batch:
            await self.forward(sent)
        gone, settled = asyncio.ensure_future(self.server_gone.wait()), asyncio.ensure_future(self._settled.wait())
        await asyncio.wait([gone, settled], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        settled.cancel()

    def reset(self) -> None:
        self.client.reset()
        self.server.reset()


def _all(steps: Iterable[Callable[[], None]]) -> None:
    for step in steps:
        step()
