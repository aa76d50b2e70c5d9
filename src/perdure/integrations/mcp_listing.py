"""What a server offers, as it is recorded with a run: every tool within limits, with the class that its annotations choose.

A server is not trusted with its own list. Names, words and schemas are bounded here; a tool that cannot be used is left out, with the
reason beside it, and one that is listed twice is left out altogether, since nobody could tell which of the two would be called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from perdure.core import codec
from perdure.core.events import Effect
from perdure.errors import NotEncodable
from perdure.integrations.mcp_errors import BadListing
from perdure.integrations.mcp_schema import Arguments, BadSchema
from perdure.integrations.mcp_stdio import printable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as Declared

MAX_PAGES = 100
MAX_TOOLS = 1_000
MAX_BYTES = 4 * 1024 * 1024  # of all schemas
MAX_SCHEMA_BYTES = 64 * 1024
MAX_DESCRIPTION_CHARS = 10_000
MAX_NAME_CHARS = 200
NAME_CHARS = 64  # what models take
_FOR_MODELS = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")


class Offered(Struct, frozen=True):
    """A tool, as its server offers it."""

    name: str
    description: str
    schema: dict[str, Any]
    effect: Effect  # what its annotations say: a hint, until somebody overrides it

    @property
    def fingerprint(self) -> str:
        """Changes with what a call depends on; its words are not among that."""
        return codec.digest(codec.encode([self.name, self.schema, self.effect]))


class LeftOut(Struct, frozen=True):
    """A tool that is listed and cannot be used."""

    name: str
    why: str


class Listing(Struct, frozen=True):
    """A server's tools at one moment."""

    server: str  # by its own word
    protocol: str
    address: str
    tools: tuple[Offered, ...]
    left_out: tuple[LeftOut, ...] = ()

    def by_name(self) -> dict[str, Offered]:
        return {tool.name: tool for tool in self.tools}


async def list_tools(client: Client, address: str) -> Listing:
    """Everything that the server offers now; BadListing when there is no end to it."""
    from mcp.types import PaginatedRequestParams
    from pydantic import ValidationError

    declared: list[Declared] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        try:
            page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise BadListing(f"its list of tools is none that MCP knows: {printable(where, 200)}: {first['msg']}") from None
        declared += page.tools
        if len(declared) > MAX_TOOLS:
            raise BadListing(f"it lists more than {MAX_TOOLS:,} tools")
        cursor = page.next_cursor
        if cursor is None:
            break
    else:
        raise BadListing(f"its list of tools has no end: {MAX_PAGES} pages, and it has more")
    info = client.server_info
    who = "anonymous" if info is None else printable(f"{info.name} {info.version}", MAX_NAME_CHARS)
    tools, left_out = _usable(declared)
    return Listing(who, client.protocol_version, address, tools, left_out)


def _usable(declared: Sequence[Declared]) -> tuple[tuple[Offered, ...], tuple[LeftOut, ...]]:
    times = Counter(tool.name for tool in declared)
    tools: dict[str, Offered] = {}
    left_out: dict[str, LeftOut] = {}
    used = 0
    for tool in declared:
        shown = printable(tool.name, MAX_NAME_CHARS)
        try:
            if times[tool.name] > 1:
                raise BadSchema(f"it is listed {times[tool.name]} times")
            if not tool.name or len(tool.name) > MAX_NAME_CHARS:
                raise BadSchema(f"its name has {len(tool.name):,} characters; the limit is {MAX_NAME_CHARS}")
            used += _size(tool.input_schema)
            Arguments(tool.input_schema)
        except BadSchema as unusable:
            left_out[shown] = LeftOut(shown, str(unusable))
            continue
        if used > MAX_BYTES:
            raise BadListing(f"the schemas of its tools take more than {MAX_BYTES:,} bytes")
        words = printable(tool.description or "", MAX_DESCRIPTION_CHARS, keep="\n\t")
        tools[tool.name] = Offered(tool.name, words, tool.input_schema, _effect(tool))
    return tuple(tools.values()), tuple(left_out.values())


def _size(schema: Mapping[str, Any]) -> int:
    try:
        size = len(codec.encode(schema))
    except NotEncodable as refused:
        raise BadSchema(f"its schema cannot be recorded: {refused}") from None
    if size > MAX_SCHEMA_BYTES:
        raise BadSchema(f"its schema takes {size:,} bytes; the limit is {MAX_SCHEMA_BYTES:,}")
    return size


def _effect(tool: Declared) -> Effect:
    hints = tool.annotations
    if hints is not None and hints.read_only_hint is True:
        return "read"
    return "idempotent" if hints is not None and hints.idempotent_hint is True else "once"


def names_for_models(server: str, names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """What models call each tool: its own name, or `<server>_<tool>` where that is no name for them or taken already."""
    given: dict[str, str] = {}
    used = set(taken)
    waiting: list[str] = []
    for name in names:
        if _FOR_MODELS.match(name) and name not in used:
            given[name] = name
            used.add(name)
        else:
            waiting.append(name)
    for name in waiting:
        chosen = _FOREIGN.sub("_", f"{server}_{name}")[:NAME_CHARS]
        if chosen in used:
            chosen = f"{chosen[: NAME_CHARS - 9]}_{codec.digest(name.encode('utf-8', 'backslashreplace'))[:8]}"
        given[name] = chosen
        used.add(chosen)
    return given
