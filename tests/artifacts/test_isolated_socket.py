"""The socket on which an isolated tool's process asks its worker for artifacts.

If the process sends garbage, the worker closes the socket and opens no artifact.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.artifacts import makers
from tests.artifacts.makers import body
from tests.artifacts.test_artifacts import app, pointer
from tests.unit.drive_tools import run

from perdure import Artifact, Call, NotFound
from perdure.core.failures import describe
from perdure.engine.artifacts import Vaults
from perdure.engine.local.isolated_vault import AskedVault, Service
from perdure.errors import ArtifactNotSaved
from perdure.store.api import Store


@pytest.fixture
def journal() -> Iterator[tuple[Store, Vaults, Artifact]]:
    """A journal in which `mine` has saved an artifact and `other` has not."""

    async def main() -> tuple[Store, Vaults, Artifact]:
        opened = app("sqlite://")
        await opened.__aenter__()
        saved = await opened.run(makers.one, 1000, id="mine")
        await opened.start(makers.waiter, id="other")
        return opened.store, Vaults(opened.store, opened.settings, opened.clock), saved

    found = run(main())
    yield found
    found[0].close()


def service(vaults: Vaults, run_id: str) -> tuple[Service, socket.socket]:
    call = Call(key="k", run_id=run_id, number=1, attempt=1, deadline=None, tenant="default", actor=None, vaults=vaults)
    made = Service(lambda: call.vault)
    return made, made.there


def test_it_saves_and_opens_with_the_rights_of_its_call(journal: tuple[Store, Vaults, Artifact]) -> None:
    _, vaults, mine = journal
    made, theirs = service(vaults, "mine")
    asked = AskedVault(theirs.detach())
    assert b"".join(asked.chunks(mine)) == body(1000)
    saving = asked.begin("text/plain", None)
    saving.write(b"new")
    assert saving.finish().size == 3
    made.close()
    end(asked)
    made, theirs = service(vaults, "other")
    stranger = AskedVault(theirs.detach())
    with pytest.raises(NotFound, match="may open"):
        list(stranger.chunks(mine))
    made.close()
    with pytest.raises(ArtifactNotSaved, match="does not answer"):
        stranger.begin("text/plain", 1)
    end(stranger)


def end(asked: AskedVault) -> None:
    """Do what the end of the tool's process does."""
    asked._file.close()
    asked._socket.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"garbage\n",
        b"[1]\n",
        b'{"do":"explode"}\n',
        b'{"do":"write","number":1,"bytes":3}\nabc',
        b'{"do":"write","number":1,"bytes":-1}\n',
        b'{"do":"write","number":1,"bytes":99999999999}\n',
        b'{"do":"begin","content_type":"text/plain","size":"7"}\n',
        b'{"do":"next","number":[]}\n',
        b'{"do":"open","pointer":7}\n',
        b'{"do":"open","pointer":{"path":"/etc/passwd"}}\n',
        b"x" * 10_000,
    ],
)
def test_a_message_that_breaks_the_protocol_ends_the_conversation(journal: tuple[Store, Vaults, Artifact], said: bytes) -> None:
    store, vaults, _ = journal
    made, theirs = service(vaults, "mine")
    theirs.sendall(said)
    theirs.settimeout(60)
    with suppress(ConnectionResetError):  # it was closed before it had read everything
        assert theirs.recv(1) == b""
    assert len(store.artifacts_of("mine")) == 1
    made.close()
    theirs.close()


def test_a_wrong_pointer_is_an_answer_and_what_was_not_finished_is_deleted_at_the_end(journal: tuple[Store, Vaults, Artifact]) -> None:
    store, vaults, mine = journal
    made, theirs = service(vaults, "mine")
    file = theirs.makefile("rb")

    def ask(line: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        theirs.sendall(json.dumps(line).encode() + b"\n" + data)
        answer: dict[str, Any] = json.loads(file.readline())
        return answer

    assert ask({"do": "open", "pointer": pointer(mine) | {"uri": "file:///etc/passwd"}})["error"] == "InvalidInput"
    number = ask({"do": "begin", "content_type": "text/plain", "size": None})["ok"]
    assert ask({"do": "write", "number": number, "bytes": 4}, b"half") == {"ok": None}
    assert len(store.artifacts_of("mine")) == 2
    theirs.shutdown(socket.SHUT_RDWR)
    for _ in range(6000):
        if len(store.artifacts_of("mine")) == 1:
            break
        time.sleep(0.01)
    assert len(store.artifacts_of("mine")) == 1
    made.close()
    file.close()
    theirs.close()


def test_streams_that_a_tool_leaves_early_are_closed(journal: tuple[Store, Vaults, Artifact]) -> None:
    _, vaults, mine = journal
    made, theirs = service(vaults, "mine")
    asked = AskedVault(theirs.detach())
    for _ in range(1_100):
        chunks = asked.chunks(mine)
        assert next(chunks) == body(1000)
        chunks.close()  # type: ignore[attr-defined]
    assert len(made._open) == 1, "the last one is closed by the next request"
    made.close()
    end(asked)


def test_too_many_artifacts_at_once_leave_a_call_that_may_have_acted_in_doubt(journal: tuple[Store, Vaults, Artifact]) -> None:
    store, vaults, mine = journal
    made, theirs = service(vaults, "mine")
    asked = AskedVault(theirs.detach())
    held = []
    for _ in range(1_000):
        held.append(asked.chunks(mine))
        next(held[-1])
    for attempt in (lambda: asked.begin("text/plain", 1), lambda: next(asked.chunks(mine))):
        with pytest.raises(ArtifactNotSaved, match="1,000 artifacts open at the same time") as raised:
            attempt()
        assert describe(raised.value).kind == "not_saved"
    assert len(store.artifacts_of("mine")) == 1, "the one that was refused has no row"
    made.close()
    end(asked)
