"""The process behind `Provider`.

HTTP, scripted answers, faults on request, and a ledger that only this process writes.

The process ends when its standard input ends. So it outlives every process of perdure, but not the test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.servers import provider_answers as answers
from tests.servers import provider_rules as rules

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error"}
_PATHS = {"/v1/messages": "anthropic", "/v1/chat/completions": "chat", "/v1/responses": "responses"}


class Gone(Exception):
    """The client is not there any more, or we have cut it off."""


class Connection:
    """One client and what has been written to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def request(self) -> tuple[str, str, dict[str, str], bytes] | None:
        """Method, path, headers and body; None when the client has closed."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split("\r\n", 1)[0].split(" ", 2)
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])}
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ValueError, OSError):
            return None
        return method, path.partition("?")[0], headers, body

    def check(self) -> None:
        if self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing():
            raise Gone

    async def write(self, raw: bytes) -> None:
        self.check()
        self._writer.write(raw)
        try:
            await self._writer.drain()
        except OSError as error:
            raise Gone from error

    async def head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}", *(f"{name}: {value}" for name, value in headers.items())]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def whole(self, status: int, document: Any, headers: dict[str, str]) -> None:
        raw = json.dumps(document).encode()
        await self.head(status, {"content-type": "application/json", "content-length": str(len(raw)), **headers})
        await self.write(raw)

    async def chunk(self, raw: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(raw), raw))

    def reset(self) -> None:
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


class Server:
    """The scripts, the faults that are due, and the ledger."""

    def __init__(self, ledger: Path, key: str, keep_bodies: bool) -> None:
        self._ledger = ledger.open("a", encoding="utf-8")
        self._key = key
        self._keep_bodies = keep_bodies
        self._scripts: list[tuple[str | None, list[answers.Turn]]] = []
        self._faults: list[dict[str, Any]] = []
        self._arrived = 0
        self._open = 0
        self._held = 0
        self._released = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Connection(reader, writer)
        try:
            while (asked := await client.request()) is not None:
                method, path, headers, raw = asked
                if path.startswith("/control/"):
                    await client.whole(200, self._control(path, json.loads(raw or b"{}")), {})
                else:
                    await self._record(client, method, path, headers, raw)
        except Gone:
            pass
        finally:
            client.close()

    # -- control ----------------------------------------------------------------------------------------------------------
    def _control(self, path: str, order: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/control/script":
                # The newest comes first, so that a test can say something else from now on.
                self._scripts.insert(0, (order["when"], order["turns"]))
            case "/control/fault":
                self._faults.append(order)
            case "/control/release":
                self._released.set()
                self._released = asyncio.Event()
        return {"arrived": self._arrived, "open": self._open, "held": self._held}

    # -- one request ------------------------------------------------------------------------------------------------------
    async def _record(self, client: Connection, method: str, path: str, headers: dict[str, str], raw: bytes) -> None:
        self._arrived += 1
        self._open += 1
        line: dict[str, Any] = {
            "number": self._arrived,
            "at": time.time(),
            "provider": _PATHS.get(path),
            "key": headers.get("idempotency-key"),
            "digest": hashlib.sha256(raw).hexdigest(),
            "injected": None,
            "status": None,
            "turn": None,
            "complete": False,
            "tokens": {"input": 0, "output": 0, "cached": 0, "stored": 0},
        }
        try:
            line["complete"] = await self._answer(client, method, path, headers, raw, line)
        finally:
            line["seconds"] = round(time.time() - line["at"], 4)
            self._ledger.write(json.dumps(line) + "\n")
            self._ledger.flush()
            self._open -= 1

    async def _answer(self, client: Connection, method: str, path: str, headers: dict[str, str], raw: bytes, line: dict[str, Any]) -> bool:
        """True if everything there was to say has been written."""
        provider = _PATHS.get(path)
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if self._keep_bodies:
            line["body"] = body
        fault = self._due(line["number"], raw.decode("utf-8", "replace"))
        if fault is not None:
            line["injected"] = fault["kind"]
            if fault["kind"] == "reset":
                client.reset()
                raise Gone
            if fault["kind"] == "hold" and fault["after"] is None:
                await self._hold(client)
            if fault["kind"].isdigit():
                return await self._refuse(client, line, provider, int(fault["kind"]), fault["message"], fault["headers"])
        if provider is None or method != "POST":
            return await self._refuse(client, line, provider, 404, "Not found")
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if given != self._key:
            # The message has the whole key, which is more than real providers show: a caller that passes it on leaks
            # the key.
            return await self._refuse(client, line, provider, 401, f"Incorrect API key provided: {given}.")
        refusal = {"anthropic": rules.anthropic_error, "chat": rules.chat_error, "responses": rules.responses_error}[provider](body)
        if refusal is not None:
            return await self._refuse(client, line, provider, 400, refusal)
        script = next(turns for when, turns in [*self._scripts, (None, [])] if when is None or when in _first_words(provider, body))
        place = turns_so_far(provider, body)
        if fault is not None and fault["turn"] is not None:
            turn = fault["turn"]
        elif place < len(script):
            turn = script[place]
        else:
            return await self._refuse(
                client, line, provider, 400, f"the script has {len(script)} turns, and is asked for number {place + 1}"
            )
        line["turn"], line["status"], line["tokens"] = place, 200, answers.count(body, turn)
        return await self._say(client, provider, body, turn, place, line, fault or {"kind": "none", "after": None, "delay_s": 0.0})

    async def _refuse(
        self,
        client: Connection,
        line: dict[str, Any],
        provider: str | None,
        status: int,
        message: str,
        headers: dict[str, str] | None = None,
    ) -> bool:
        line["status"], line["refused"] = status, message
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        ident = f"req_{line['number']}"
        if provider == "anthropic":
            document: Any = {"type": "error", "error": {"type": kind, "message": message}, "request_id": ident}
            own = {"request-id": ident}
        else:
            document = {"error": {"message": message, "type": kind, "param": None, "code": None}}
            own = {"x-request-id": ident}
        await client.whole(status, document, own | (headers or {}))
        return True

    def _due(self, number: int, text: str) -> dict[str, Any] | None:
        for fault in self._faults:
            if fault["nth"] in (None, number) and (fault["when"] is None or fault["when"] in text):
                fault["times"] -= 1
                if not fault["times"]:
                    self._faults.remove(fault)
                return fault
        return None

    async def _hold(self, client: Connection) -> None:
        self._held += 1
        released = self._released
        try:
            while not released.is_set():
                client.check()
                try:
                    await asyncio.wait_for(released.wait(), 0.02)
                except TimeoutError:
                    continue
        finally:
            self._held -= 1

    async def _say(
        self,
        client: Connection,
        provider: str,
        body: dict[str, Any],
        turn: answers.Turn,
        place: int,
        line: dict[str, Any],
        fault: dict[str, Any],
    ) -> bool:
        ident, model, counted = f"{line['number']}", str(body["model"]), line["tokens"]
        encrypted = "reasoning.encrypted_content" in (body.get("include") or [])
        own = {"request-id" if provider == "anthropic" else "x-request-id": f"req_{ident}"}
        if not body.get("stream"):
            if provider == "anthropic":
                document = answers.anthropic_whole(turn, counted, model, ident, place)
            elif provider == "chat":
                document = answers.chat_whole(turn, counted, model, ident, place)
            else:
                document = answers.responses_whole(turn, counted, model, ident, place, encrypted)
            await client.whole(200, document, own)
            return True
        if provider == "anthropic":
            events = answers.anthropic_events(turn, counted, model, ident, place)
        elif provider == "chat":
            wanted = bool((body.get("stream_options") or {}).get("include_usage"))
            events = answers.chat_events(turn, counted, model, ident, place, wanted)
        else:
            events = answers.responses_events(turn, counted, model, ident, place, encrypted)
        chunks = [_sse(name, data) for name, data in events]
        await client.head(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked", **own})
        return await self._stream(client, provider, chunks, fault)

    async def _stream(self, client: Connection, provider: str, chunks: list[bytes], fault: dict[str, Any]) -> bool:
        kind, after = fault["kind"], fault["after"]
        if isinstance(after, float):
            after = int(len(chunks) * after)
        for at, chunk in enumerate([*chunks, b""]):
            if at == after:
                if kind == "hold":
                    await self._hold(client)
                elif kind in _BREAKS and chunk:
                    await _BREAKS[kind](client, provider, fault)
                    return False
            if chunk:
                await client.chunk(chunk)
            if fault["delay_s"]:
                await asyncio.sleep(fault["delay_s"])
        await client.write(b"0\r\n\r\n")
        return True


async def _break_reset(client: Connection, provider: str, fault: dict[str, Any]) -> None:
    await asyncio.sleep(0.02)  # otherwise the kernel drops data that the client has not read yet
    client.reset()
    raise Gone


async def _break_close(client: Connection, provider: str, fault: dict[str, Any]) -> None:
    client.close()
    raise Gone


async def _break_truncate(client: Connection, provider: str, fault: dict[str, Any]) -> None:
    await client.write(b"0\r\n\r\n")


async def _break_garbage(client: Connection, provider: str, fault: dict[str, Any]) -> None:
    await client.chunk(b'event: content_block_delta\ndata: {"type": "content_blo\n\n')
    await client.write(b"0\r\n\r\n")


async def _break_error(client: Connection, provider: str, fault: dict[str, Any]) -> None:
    error = {"type": fault["type"], "message": fault["message"]}
    if provider == "anthropic":
        await client.chunk(_sse("error", {"type": "error", "error": error}))
    elif provider == "chat":
        await client.chunk(_sse(None, {"error": error | {"code": fault["type"], "param": None}}))
    elif fault["failed"]:
        failed = {"id": "resp_x", "object": "response", "status": "failed", "error": {"code": fault["type"], "message": fault["message"]}}
        await client.chunk(_sse("response.failed", {"type": "response.failed", "sequence_number": 99, "response": failed}))
    else:
        event = {"type": "error", "code": fault["type"], "message": fault["message"], "param": None, "sequence_number": 99}
        await client.chunk(_sse("error", event))
    await client.write(b"0\r\n\r\n")


_BREAKS: dict[str, Callable[[Connection, str, dict[str, Any]], Awaitable[None]]] = {
    "reset_body": _break_reset,
    "close": _break_close,
    "truncate": _break_truncate,
    "garbage": _break_garbage,
    "error_event": _break_error,
}


def _sse(name: str | None, data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _speakers(provider: str, body: dict[str, Any]) -> list[tuple[bool, Any]]:
    """For each message or item: whether the model has said it, and what."""
    if provider != "responses":
        return [(message["role"] == "assistant", message) for message in body["messages"] if message["role"] not in ("system", "developer")]
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    return [(item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning"), item) for item in items]


def turns_so_far(provider: str, body: dict[str, Any]) -> int:
    """How often the model has spoken: neighbouring messages and items of it are one turn."""
    said = [by_model for by_model, _ in _speakers(provider, body)]
    return sum(by_model and (at == 0 or not said[at - 1]) for at, by_model in enumerate(said))


def _first_words(provider: str, body: dict[str, Any]) -> str:
    return next((json.dumps(said, ensure_ascii=False) for by_model, said in _speakers(provider, body) if not by_model), "")


async def _main(ledger: Path, key: str, keep_bodies: bool) -> None:
    server = Server(ledger, key, keep_bodies)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 26, backlog=512)
    print(listening.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()
    shutil.rmtree(ledger.parent, ignore_errors=True)  # here and not in close(): a test that is killed closes nothing
    os._exit(0)  # the ledger is written line by line, and open answers are not needed any more


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "bodies"))
