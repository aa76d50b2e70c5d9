"""The tools that a server offers, within limits, and the check of a call's arguments against the tool's JSON Schema.

The schemas come from the server and are not trusted. References to other documents are refused. The references that a
check follows are counted. Regular expressions are checked only by the server: a slow regular expression would block
every run of the worker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from perdure.agents.mcp.errors import BadListing
from perdure.agents.mcp.stdio import printable
from perdure.core import codec
from perdure.core.events import Effect
from perdure.errors import InvalidInput, NotEncodable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as Declared

MAX_REFERENCES = 10_000  # how many references one check follows; even a short schema can need billions
_SEARCHING = ("pattern", "patternProperties", "unevaluatedProperties")
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class BadSchema(Exception):
    """The schema cannot be used. The message says why."""


class Arguments:
    """The arguments of one tool, as the tool's schema describes them."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]
        from referencing import Registry

        if schema.get("type") != "object":
            raise BadSchema("its schema is not that of an object")
        self._followed = 0
        self._schema = dict(schema)
        found: Any = validator_for(self._schema)
        try:
            wrong: Any = next(_of_schemas(found).iter_errors(self._schema), None)
        except RecursionError:
            raise BadSchema("its schema is no JSON Schema: it is nested too deep") from None
        if wrong is not None:
            raise BadSchema(f"its schema is no JSON Schema: {wrong.message:.200}")
        self._validator: Any = self._bounded(found)(self._schema, registry=Registry())

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that the schema names."""
        properties = self._schema.get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()

    def encoded(self, label: str, arguments: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the arguments. If an argument does not fit the schema, InvalidInput names the argument."""
        encoded = codec.encode(dict(arguments))
        self.check(label, codec.decode(encoded))
        return encoded

    def check(self, label: str, arguments: Any) -> None:
        """InvalidInput unless the arguments fit the schema."""
        from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
        from referencing.exceptions import Unresolvable

        self._followed = 0
        try:
            error: Any = best_match(self._validator.iter_errors(arguments))
        except (Unresolvable, RecursionError, BadSchema) as unusable:
            why = unusable if isinstance(unusable, BadSchema) else f"{type(unusable).__name__} in its schema"
            raise InvalidInput(f"{label}: its arguments cannot be checked: {why}") from None
        if error is not None:
            raise InvalidInput(f"{label}: {_words(error)}")

    def _bounded(self, validator: Any) -> Any:
        known: Mapping[str, Any] = validator.VALIDATORS
        changed: dict[str, Any] = dict.fromkeys(_SEARCHING, _left_to_the_server)
        changed |= {name: self._counted(known[name]) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in known}
        changed["uniqueItems"] = _unique
        changed["additionalProperties"] = _additional(known["additionalProperties"])
        return _extended(validator, changed)

    def _counted(self, follow: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def counted(*given: Any) -> Iterator[Any]:
            self._followed += 1
            if self._followed > MAX_REFERENCES:
                raise BadSchema(f"its schema follows more than {MAX_REFERENCES:,} references")
            yield from follow(*given) or ()

        return counted


@cache
def _of_schemas(validator: Any) -> Any:
    """A validator that checks whether a schema is valid in this draft.

    In old drafts this check applies `uniqueItems` to every `enum`. The library's rule is slow for long lists, so
    `_unique` replaces it.
    """
    return _extended(validator, {"uniqueItems": _unique})(validator.META_SCHEMA)


def _extended(validator: Any, changed: Mapping[str, Any]) -> Any:
    """The validator with these rules replaced, also for parts of a schema that have their own `$schema`."""
    from attrs import evolve
    from jsonschema.validators import extend

    extended: Any = extend(validator, changed)
    extended.evolve = evolve
    return extended


def _left_to_the_server(*_: Any) -> Iterator[Any]:
    """A rule that perdure does not check; only the server does.

    The rule must be a function: on some paths through a schema, the validator would call a rule that is None.
    """
    return iter(())


def _unique(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    """The rule `uniqueItems`: compare a set of the encoded items.

    The library compares each item with each other item, and that takes seconds for 2,000 objects.
    """
    from jsonschema.exceptions import ValidationError

    if wanted is True and validator.is_type(instance, "array") and len({codec.encode(item) for item in instance}) < len(instance):
        yield ValidationError("it has the same item twice")


def _additional(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """The rule `additionalProperties`. If the schema has `patternProperties`, only the server checks this rule."""

    def additional(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if "patternProperties" not in schema:
            yield from check(validator, value, instance, schema) or ()

    return additional


def _words(error: Any) -> str:
    """The argument, and the rule that the argument breaks. The value is not shown, because it may be a secret."""
    where = "".join(f"[{step!r}]" if place else str(step) for place, step in enumerate(error.absolute_path))
    at = f"{where}: " if where else ""
    rule, value, instance = error.validator, error.validator_value, error.instance
    match rule:
        case "required":
            missing = next((name for name in value if name not in instance), "something")
            return f"{at}{missing} is missing"
        case "additionalProperties":
            known = error.schema.get("properties", {})
            extra = next((name for name in instance if name not in known), "something")
            return f"{at}there is no {codec.shown(extra)}; it takes {', '.join(known) or 'no arguments'}"
        case "type":
            wanted = value if isinstance(value, str) else " or ".join(map(str, value))
            return f"{at}it must be of type {wanted}, not {_KINDS.get(type(instance), type(instance).__name__)}"
        case _:
            return f"{at}it does not fit {rule}: {codec.shown(value)}"


# -- the list of tools, as it is recorded with a run ------------------------------------------------------------------
MAX_PAGES = 100
MAX_TOOLS = 1_000
MAX_BYTES = 4 * 1024 * 1024  # of all schemas of one server together
MAX_SCHEMA_BYTES = 64 * 1024
MAX_DESCRIPTION_CHARS = 10_000
MAX_NAME_CHARS = 200
NAME_CHARS = 64  # the longest name that models accept
_FOR_MODELS = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")


class Offered(Struct, frozen=True):
    """A tool that a server offers."""

    name: str
    description: str
    schema: dict[str, Any]
    effect: Effect  # from the tool's annotations, which are only hints; `mcp(effects=…)` can override the effect class

    @property
    def fingerprint(self) -> str:
        """A digest of the name, the schema and the effect class. A call does not depend on the description."""
        return codec.digest(codec.encode([self.name, self.schema, self.effect]))


class LeftOut(Struct, frozen=True):
    """A tool that the server lists but perdure cannot use."""

    name: str
    why: str


class Listing(Struct, frozen=True):
    """A server's tools at one moment."""

    server: str  # the name and version that the server reports
    protocol: str
    address: str
    tools: tuple[Offered, ...]
    left_out: tuple[LeftOut, ...] = ()

    def by_name(self) -> dict[str, Offered]:
        return {tool.name: tool for tool in self.tools}


async def list_tools(client: Client, address: str) -> Listing:
    """All tools that the server offers now. BadListing if the list is too long or not valid."""
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
            raise BadListing(f"its list of tools breaks the MCP protocol: {printable(where, 200)}: {first['msg']}") from None
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
    """The name of each tool for models: the tool's own name, or `<server>_<tool>`.

    The second form is used if the tool's own name is not valid for models or is already taken.
    """
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
