"""A small MCP server: notes in a file, `notes.json` or the given one, with a few notes at the beginning.

    perdure run examples/mcp_agent.py:librarian prompt="What do I know about whales?" --id whales --no-wait

starts this server. Any other MCP client can start it too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

NOTES = Path(sys.argv[1] if len(sys.argv) > 1 else "notes.json")
AT_FIRST = {
    "Blue whale": "Up to 30 m long and 180 t: no animal has ever been larger. It lives on krill.",
    "Sperm whale": "This whale dives more than 1,000 m deep for squid, and stays down for an hour.",
    "Octopus": "Three hearts, and blue blood.",
}
server = MCPServer("notes", version="1", log_level="WARNING")


def stored() -> dict[str, Any]:
    return dict(json.loads(NOTES.read_text())) if NOTES.exists() else {"notes": dict(AT_FIRST), "published": []}


def store(everything: dict[str, Any]) -> None:
    NOTES.write_text(json.dumps(everything, indent=1))


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_notes(words: str) -> dict[str, str]:
    """The notes that contain all these words, by title."""
    wanted = words.lower().split()
    return {title: text for title, text in stored()["notes"].items() if all(word in f"{title} {text}".lower() for word in wanted)}


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def write_note(title: str, text: str) -> str:
    """Write a note. It replaces a note with the same title."""
    everything = stored()
    everything["notes"][title] = text
    store(everything)
    return f"written: {title}"


@server.tool()
def publish(title: str, ctx: Context[Any, Any]) -> str:
    """Publish a note. This cannot be undone, but requests with the same key publish only once."""
    everything = stored()
    if title not in everything["notes"]:
        raise ToolError(f"there is no note called {title}")
    key = (ctx.request_context.meta or {}).get("perdure/idempotency-key")
    if key not in [each["key"] for each in everything["published"]]:
        everything["published"].append({"title": title, "key": key})
        store(everything)
    return f"published: {title}"


if __name__ == "__main__":
    server.run("stdio")
