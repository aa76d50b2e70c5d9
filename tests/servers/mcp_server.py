"""An MCP server with tools of every kind, over stdio or streamable HTTP, with a ledger of what it really did.

    python tests/servers/mcp_server.py LEDGER [--port PORT] [--legacy] [--without TOOL] [--changed TOOL] [--writable TOOL]

A line of the ledger is one fact: `begun` or `done`, the tool, its arguments, and the `_meta` that came with the call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations

READ = ToolAnnotations(read_only_hint=True)
IDEMPOTENT = ToolAnnotations(idempotent_hint=True)
DESTRUCTIVE = ToolAnnotations(destructive_hint=True)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

server = MCPServer("warehouse", version="3.1", log_level="WARNING")
told = argparse.Namespace()


def note(what: str, tool: str, ctx: Context[Any, Any], **arguments: Any) -> None:
    """Write the line completely and at once: the process may be killed right after."""
    meta = {name: value for name, value in (ctx.request_context.meta or {}).items() if str(name).startswith("perdure/")}
    line = json.dumps({"what": what, "tool": tool, "arguments": arguments, "meta": meta, "pid": os.getpid()}) + "\n"
    descriptor = os.open(told.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def times(tool: str) -> int:
    with open(told.ledger) as lines:
        return sum(json.loads(line)["tool"] == tool for line in lines)


@server.tool(annotations=READ)
def search(query: str, ctx: Context[Any, Any], limit: int = 10) -> list[TextContent]:
    """Find things."""
    note("done", "search", ctx, query=query, limit=limit)
    return [TextContent(type="text", text=f"found {query}"), TextContent(type="text", text=f"at most {limit}")]


@server.tool(annotations=IDEMPOTENT)
def put(name: str, value: int, ctx: Context[Any, Any]) -> dict[str, int]:
    """Store a value."""
    note("done", "put", ctx, name=name, value=value)
    return {name: value}


@server.tool(annotations=DESTRUCTIVE)
def delete(name: str, ctx: Context[Any, Any], force: bool = False) -> str:
    """Delete for good."""
    note("done", "delete", ctx, name=name, force=force)
    return f"deleted {name}"


@server.tool()
def fail(why: str, ctx: Context[Any, Any]) -> str:
    """Fail, after having done it."""
    note("done", "fail", ctx, why=why)
    raise ToolError(why)


@server.tool()
async def slow(seconds: float, ctx: Context[Any, Any]) -> str:
    """Take some time, and leave a permanent effect."""
    note("begun", "slow", ctx, seconds=seconds)
    await asyncio.sleep(seconds)
    note("done", "slow", ctx, seconds=seconds)
    return "done at last"


@server.tool(annotations=READ)
async def ponder(seconds: float, ctx: Context[Any, Any]) -> str:
    """Take its time and leave nothing."""
    note("begun", "ponder", ctx, seconds=seconds)
    await asyncio.sleep(seconds)
    return f"pondered {seconds}"


@server.tool()
def crash(ctx: Context[Any, Any]) -> str:
    """Have the effect, and die before the answer."""
    note("done", "crash", ctx)
    os._exit(9)


@server.tool(annotations=READ)
def faint(ctx: Context[Any, Any]) -> str:
    """Die the first time."""
    note("done", "faint", ctx)
    if times("faint") == 1:
        os._exit(9)
    return f"awake in {os.getpid()}"


@server.tool(annotations=READ)
def picture() -> list[TextContent | ImageContent]:
    """A picture and words about it."""
    return [TextContent(type="text", text="one pixel"), ImageContent(type="image", data=PIXEL, mime_type="image/png")]


@server.tool(annotations=READ)
def large(chars: int) -> list[TextContent]:
    """Much text."""
    return [TextContent(type="text", text="x" * chars)]


@server.tool()
def beget() -> list[TextContent]:
    """Start a process in its own session, which would outlive all others."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return [TextContent(type="text", text=str(child.pid))]


@server.tool(annotations=READ)
def complain(words: str) -> str:
    """Say something on stderr."""
    print(words, file=sys.stderr, flush=True)
    return "said"


def renamed(name: str, ctx: Context[Any, Any], reason: str) -> str:
    """The tool `delete` after a change: it requires a reason."""
    note("done", "delete", ctx, name=name, reason=reason)
    return f"deleted {name} for {reason}"


def searched(query: str, ctx: Context[Any, Any], limit: int = 10, offset: int = 0) -> list[TextContent]:
    """The tool `search` after a change: it has one more parameter."""
    note("done", "search", ctx, query=query, limit=limit, offset=offset)
    return [TextContent(type="text", text=f"found {query} from {offset}")]


CHANGED: dict[str, tuple[Callable[..., Any], ToolAnnotations]] = {"delete": (renamed, DESTRUCTIVE), "search": (searched, READ)}


def change(tool: str) -> None:
    fn, annotations = CHANGED[tool]
    server.remove_tool(tool)
    server.add_tool(fn, name=tool, annotations=annotations)


@server.tool()
async def rearrange(without: str, ctx: Context[Any, Any]) -> str:
    """Take a tool away, and say that the list has changed."""
    server.remove_tool(without)
    await ctx.notify_tools_changed()
    return f"{without} is gone"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("--port", type=int)
    parser.add_argument("--json", action="store_true", help="answer with JSON and not with a stream")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--changed", action="append", default=[])
    parser.add_argument("--writable", action="append", default=[], help="tools that only read are said to do more")
    parser.add_argument("--stubborn", action="store_true", help="do not end when asked to")
    parser.parse_args(namespace=told)
    if told.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for tool in told.without:
        server.remove_tool(tool)
    for tool in told.changed:
        change(tool)
    for tool in told.writable:
        server.remove_tool(tool)
        server.add_tool(globals()[tool], name=tool)
    if told.port is None:
        try:
            server.run("stdio")
        finally:
            while told.stubborn:  # whatever happens to its pipes
                signal.pause()
    else:
        server.run("streamable-http", host="127.0.0.1", port=told.port, json_response=told.json)


if __name__ == "__main__":
    main()
