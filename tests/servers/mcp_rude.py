"""An MCP server that breaks the rules: it speaks the protocol of 2025, and lies, cuts off and exaggerates on request.

    python tests/servers/mcp_rude.py [--port PORT] [--endless] [--untyped] [--many N] [--locked] [--flood]

Over HTTP it also answers with the statuses of gateways: an argument of the tool `status` chooses the status. It
repeats its secrets: the Authorization header in its pages, and RUDE_SECRET in its errors.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import time
from typing import Any, ClassVar

OBJECT: dict[str, Any] = {"type": "object"}
ANY = {"readOnlyHint": True}


def bomb(levels: int) -> dict[str, Any]:
    """A few lines that ask for 2 to the power of `levels` checks."""
    steps = {f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(levels)}
    return {**OBJECT, "properties": {"x": {"$ref": "#/$defs/s0"}}, "$defs": {**steps, f"s{levels}": {"type": "integer"}}}


def takes(**properties: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": properties, "required": list(properties), "additionalProperties": False}


def tool(name: str, schema: dict[str, Any] = OBJECT, words: str = "", **annotations: Any) -> dict[str, Any]:
    return {"name": name, "description": words, "inputSchema": schema, "annotations": annotations}


TOOLS = [
    tool("rpc", takes(code={"type": "integer"})),
    tool("rpc_read", takes(code={"type": "integer"}), readOnlyHint=True),
    tool("status", takes(status={"type": "integer"})),
    tool("nonsense"),
    tool("echo", readOnlyHint=True),
    tool("with spaces", readOnlyHint=True),
    tool("with_spaces"),
    tool("größe/2", readOnlyHint=True),
    tool("n" * 128, readOnlyHint=True),
    tool("n" * 300),
    tool(""),
    tool("twice", readOnlyHint=True),
    tool("twice"),
    tool("huge", {**OBJECT, "properties": {f"p{n}": {"description": "y" * 100} for n in range(1000)}}),
    tool("broken", {**OBJECT, "properties": {"x": {"type": "no such type"}}}),
    tool("outside", {**OBJECT, "properties": {"x": {"$ref": "http://127.0.0.1:1/schema"}}}),
    tool("bomb", bomb(40)),
    tool("loop", {**OBJECT, "properties": {"x": {"$ref": "#/properties/x"}}}),
    tool("regex", {**OBJECT, "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}, readOnlyHint=True),
    tool("loud", words="\x1b[31mred\x07 \u202eevil\nsecond line"),
    tool("wordy", words="w" * 50_000),
    tool("forget", takes(name={"type": "string"}), readOnlyHint=True),
    tool("pid", readOnlyHint=True),
    tool("environment", readOnlyHint=True),
    tool("unanswered", readOnlyHint=True),
    tool("how_many_unanswered", readOnlyHint=True),
    tool("flood"),
    tool("flood_read", readOnlyHint=True),
    tool("drip", takes(**{name: {"type": "integer"} for name in ("lines", "mib", "drips")}), readOnlyHint=True),
    tool("shout", takes(mib={"type": "integer"}), readOnlyHint=True),
]


UNANSWERED: list[Any] = []


class Cut(Exception):
    """Answer with this status, or with nothing at all."""

    def __init__(self, status: int) -> None:
        self.status = status


def listed(params: dict[str, Any], told: argparse.Namespace) -> dict[str, Any]:
    if told.endless:
        return {"tools": [], "nextCursor": "more"}
    if told.untyped:
        return {"tools": [tool("untyped", {"type": "string"})]}
    if told.many:
        return {"tools": [tool(f"t{n}") for n in range(told.many)]}
    if "cursor" not in params:  # in two pages
        return {"tools": TOOLS[:5], "nextCursor": "second"}
    return {"tools": TOOLS[5:]}


def pour(stream: Any, mib: int) -> None:
    """So much, and no line break in it."""
    for _ in range(mib):
        stream.buffer.write(b"x" * 2**20)
    stream.buffer.flush()


def drip(lines: int, mib: int, drips: int) -> None:
    """Long lines, and the end of the last one in single characters, each of which can be read before the next is written."""
    for line in range(lines):
        os.write(1, b"\n" * bool(line))
        pour(sys.stdout, mib)
    for _ in range(drips):
        time.sleep(0.001)
        os.write(1, b"x")
    os.write(1, b"\n")


def called(params: dict[str, Any]) -> dict[str, Any]:
    name, arguments = params["name"], params.get("arguments", {})
    match name:
        case "pid":
            return {"content": [{"type": "text", "text": str(os.getpid())}]}
        case "how_many_unanswered":
            return {"content": [{"type": "text", "text": str(len(UNANSWERED))}]}
        case "environment":
            return {"content": [{"type": "text", "text": json.dumps(dict(os.environ))}]}
        case "flood" | "flood_read":
            drip(lines=1, mib=64, drips=0)
            return {"content": []}
        case "drip":
            drip(**arguments)
            return {"content": []}
        case "shout":
            pour(sys.stderr, arguments["mib"])
            return {"content": []}
        case "status":
            raise Cut(arguments["status"])
        case "forget":  # without telling the client
            TOOLS[:] = [tool for tool in TOOLS if tool["name"] != arguments["name"]]
            return {"content": []}
        case "nonsense":
            return {"content": 5}
        case _:
            return {"content": [{"type": "text", "text": json.dumps([name, arguments])}]}


def answer(message: dict[str, Any], told: argparse.Namespace) -> dict[str, Any] | None:
    method, params = message.get("method"), message.get("params", {})
    said: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
    match method:
        case "initialize" if told.locked:
            return said | {"error": {"code": -32603, "message": f"not with {os.environ.get('RUDE_SECRET')}"}}
        case "initialize":
            info = {"name": "rude\x1b[2J", "version": "0"}
            found = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}}, "serverInfo": info}
            return said | {"result": found}
        case "tools/list":
            return said | {"result": listed(params, told)}
        case "tools/call" if params["name"] in ("rpc", "rpc_read"):
            return said | {
                "error": {"code": params["arguments"]["code"], "message": f"as you wish\x1b[31m{os.environ.get('RUDE_SECRET', '')}"}
            }
        case "tools/call" if params["name"] == "unanswered":
            UNANSWERED.append(message)
            return None
        case "tools/call":
            return said | {"result": called(params)}
        case _ if "id" in message:
            return said | {"error": {"code": -32601, "message": "no such method"}}
        case _:
            return None


def over_stdio(told: argparse.Namespace) -> None:
    if told.flood:
        drip(lines=1, mib=64, drips=0)
    print("this is no JSON at all", flush=True)
    sys.stdout.buffer.write(b"\xff\xfe not UTF-8 either\n")
    for line in sys.stdin:
        try:
            said = answer(json.loads(line), told)
        except Cut:
            os._exit(3)
        if said is not None:
            print(json.dumps(said), flush=True)


def handler(told: argparse.Namespace) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        sessions: ClassVar[set[str]] = set()

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if told.locked:
                self._send(401, self._page(), "text/html")
                return
            if message.get("method") == "initialize":
                self.sessions.clear()  # one at a time: who comes last is known
                self.sessions.add(f"session-{os.urandom(4).hex()}")
            elif self.headers.get("mcp-session-id", "") not in self.sessions and message.get("method") != "server/discover":
                self._send(404, b"", "text/plain")
                return
            try:
                said = answer(message, told)
            except Cut as cut:
                self._cut(cut.status)
                return
            if said is None:
                self._send(202, b"", "text/plain")
            else:
                self._send(200, json.dumps(said).encode(), "application/json")

        def _cut(self, status: int) -> None:
            if status == 404:  # the server has forgotten all sessions
                self.sessions.clear()
            if status == 0:  # the connection is cut before a word was said
                self.close_connection = True
            elif status == 1:  # and in the middle of the answer
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"jsonrpc": ')
                self.close_connection = True
            else:
                self._send(status, self._page(), "text/html")

        def _page(self) -> bytes:
            return f"<html>{self.path} is not for {self.headers.get('authorization', '')}</html>".encode()

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            for session in self.sessions:
                self.send_header("mcp-session-id", session)
            if status == 429:
                self.send_header("retry-after", "7")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._send(405, b"", "text/plain")

        def do_DELETE(self) -> None:
            print("deleted", self.headers["mcp-session-id"], flush=True)
            self._send(200, b"", "text/plain")

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--untyped", action="store_true")
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--locked", action="store_true", help="let nobody in")
    parser.add_argument("--flood", action="store_true", help="begin with a line of 64 MiB")
    told = parser.parse_args()
    if told.port is None:
        over_stdio(told)
    else:
        http.server.ThreadingHTTPServer(("127.0.0.1", told.port), handler(told)).serve_forever()


if __name__ == "__main__":
    main()
