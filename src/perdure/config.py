"""Where settings come from: a flag, then PERDURE_<NAME>, then perdure.toml or [tool.perdure], then the default.

The error about an unknown name suggests the nearest known name. The error about a wrong value names the source of the
value. Nothing is ignored silently. In an environment variable, tables (queues, roles) are JSON, and the items of a
list are separated by commas.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import unquote

import msgspec

from perdure.core import codec
from perdure.core.approval import A_NAME, same_name
from perdure.core.identity import check_id
from perdure.errors import InvalidInput
from perdure.settings import HIDDEN, Queue, Settings

PREFIX = "PERDURE_"
_TYPES = get_type_hints(Settings, include_extras=True)
_NAMES = frozenset(Settings.__struct_fields__)
_QUEUE_TYPES = get_type_hints(Queue, include_extras=True)
_PLACE = re.compile(r"file:///[^?#\0]+|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#\0]*)?")
_SECRETS = re.compile(r"file:///[^?#\0]+|python:[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
# These parameters of a URL decide which secrets the client reveals to the server. A settings file in the current
# folder may come from another person. With such a parameter, the file could make the client send the user's PGPASSWORD
# in clear text to any server. The only harmless value is require_auth=scram-sha-256.
_NOT_IN_A_FILE = ("require_auth", "gssdelegation", "servicefile")
_HARMLESS = re.compile(r"[?&]require_auth=scram-sha-256(?=&|\Z)")
# Variables that are no settings: PERDURE_DEBUG, the values of secrets (tool/secret.py), the rules and the key of redaction
# (tool/redact.py), and the variables that Kubernetes sets for a service named "perdure".
_NOT_SETTINGS = re.compile(
    r"PERDURE_(DEBUG|SECRET_\w+|REDACT(_KEY(_FILE)?)?|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)\Z"
)


class _Given(NamedTuple):
    name: str
    value: Any
    source: str
    textual: bool  # an environment variable is text; a flag or a TOML value has its type already
    in_file: bool = False


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], folder: Path) -> Settings:
    """The settings for a process in this folder."""
    chosen: dict[str, Any] = {}
    for given in (*_from_files(folder), *_from_environ(environ), *_from_flags(flags)):
        # Every value is checked, even if a stronger source overrides it: the stronger source may be removed later.
        chosen[given.name] = _checked(given)
    return Settings(**chosen)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Given]:
    for name, value in flags.items():
        assert name in _NAMES, name
        yield _Given(name, value, f"--{name.removesuffix('_s').replace('_', '-')}", textual=False)


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, value in sorted(environ.items()):
        if variable.startswith(PREFIX) and not _NOT_SETTINGS.match(variable):
            name = variable.removeprefix(PREFIX).lower()
            if name not in _NAMES or variable != variable.upper():
                near = _nearest(name)
                meant = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
                raise InvalidInput(f"the environment variable {variable} is not a setting{meant}")
            if value:  # an empty variable counts as no variable
                yield _Given(name, value, f"the environment variable {variable}", textual=True)


def _from_files(folder: Path) -> Iterator[_Given]:
    own, project = folder / "perdure.toml", folder / "pyproject.toml"
    values = _read(own)
    shared = _tool_table(_read(project), project)
    if values is not None and shared is not None:
        raise InvalidInput("perdure.toml and [tool.perdure] in pyproject.toml both hold settings; keep one of them")
    source = "perdure.toml" if values is not None else "[tool.perdure] in pyproject.toml"
    for name, value in (values or shared or {}).items():
        if name not in _NAMES:
            near = _nearest(name)
            raise InvalidInput(f"{source}: {name!r} is not a setting{f'; did you mean {near!r}?' if near else ''}")
        if name == "url" and isinstance(value, str) and not value.startswith("sqlite:"):
            _check_url_of_file(value, source)
        yield _Given(name, value, f"{source}: {name}", textual=False, in_file=True)


def _check_url_of_file(url: str, source: str) -> None:
    # Search the whole text of the URL and do not parse it: libpq has its own rules about where the parameters begin,
    # and it decodes the names of parameters.
    rest = unquote(_HARMLESS.sub("", url))
    for name in _NOT_IN_A_FILE:
        if name in rest:
            raise InvalidInput(
                f"{source}: url must not set {name}: a file would decide how your password is sent to the server that it names; "
                f"give this URL by {PREFIX}URL or --url"
            )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file.name} is not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidInput(f"{file.name} cannot be read: {error.strerror}") from None


def _tool_table(project: dict[str, Any] | None, file: Path) -> dict[str, Any] | None:
    tools = (project or {}).get("tool", {})
    table = tools.get("perdure") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InvalidInput(f"{file.name}: tool.perdure must be a table: [tool.perdure]")
    return table


def _nearest(name: str) -> str | None:
    # The most likely mistake is a name without its unit, such as "lease" for "lease_s". difflib does not find every
    # such mistake, because the names are short.
    by_unit = f"{name}_s"
    return by_unit if by_unit in _NAMES else next(iter(difflib.get_close_matches(name.lower(), _NAMES, n=1)), None)


def _checked(given: _Given) -> Any:
    match given.name:
        case "queues":
            return {check_id(name, f"{given.source}: the queue"): _queue(name, table, given) for name, table in _table(given).items()}
        case "roles":
            return {name: _people(name, people, given) for name, people in _table(given).items()}
        case "key_namespace":
            text = _converted(given, _TYPES[given.name])
            return text and check_id(text, f"{given.source}: the namespace")
        case "webhook_hosts":
            return _hosts(given)
        case "secrets":
            return _source_of_secrets(_converted(given, _TYPES[given.name]), given)
        case "artifacts":
            return checked_place(_converted(given, _TYPES[given.name]), given.source)
        case _:
            return _converted(given, _TYPES[given.name])


def _converted(given: _Given, wanted: Any) -> Any:
    try:
        return msgspec.convert(given.value, wanted, strict=not given.textual)
    except msgspec.ValidationError:
        raise _refusal(given, _rule(wanted)) from None


def _refusal(given: _Given, rule: str) -> InvalidInput:
    shown = "not shown here" if given.name in HIDDEN else f"{given.value!r:.80}"
    return InvalidInput(f"{given.source} is {shown}; it must be {rule}")


def _rule(wanted: Any) -> str:
    """The description of an annotated type. For `Count | None`, the description of Count."""
    annotated = next((member for member in get_args(wanted) if hasattr(member, "__metadata__")), wanted)
    return next(meta.description for meta in annotated.__metadata__ if isinstance(meta, msgspec.Meta) and meta.description)


def _table(given: _Given) -> dict[str, Any]:
    value = codec.parse(given.value, given.source) if given.textual else given.value
    if not isinstance(value, dict):
        raise _refusal(given, _rule(_TYPES[given.name]))
    return value


def _queue(name: str, table: Any, given: _Given) -> Queue:
    source = f"{given.source}: {name}" if given.textual else f"{given.source}.{name}"
    if not isinstance(table, dict):
        raise _refusal(given._replace(value=table, source=source), f"a table with {' and '.join(_QUEUE_TYPES)}")
    unknown = [key for key in table if key not in _QUEUE_TYPES]
    if unknown:
        raise InvalidInput(f"{source}: {unknown[0]!r:.80} is no setting of a queue; {' and '.join(_QUEUE_TYPES)} are")
    limits = {
        key: _converted(given._replace(value=value, source=f"{source}.{key}", textual=False), _QUEUE_TYPES[key])
        for key, value in table.items()
    }
    return Queue(**limits)


def _people(role: str, people: Any, given: _Given) -> tuple[str, ...]:
    source = f"{given.source}: {role}" if given.textual else f"{given.source}.{role}"
    names = [role, *people] if isinstance(people, list) else [None]
    if any(same_name(name) is None for name in names):
        rule = f'a list of names, such as ["ann", "bob"], the role and each name of {A_NAME}'
        raise _refusal(given._replace(value=people, source=source), rule)
    return tuple(dict.fromkeys(people))


def checked_place(text: str, source: str) -> str:
    """The URL of the place for artifacts, or empty text. InvalidInput names the source of a wrong URL."""
    if not isinstance(text, str) or (text and _PLACE.fullmatch(text) is None):
        raise InvalidInput(f"{source} is {text!r:.80}; it must be the URL of a place: file:///absolute/folder or s3://bucket/prefix")
    return text


def _source_of_secrets(text: str, given: _Given) -> str:
    if text and _SECRETS.fullmatch(text) is None:
        raise InvalidInput(
            f"{given.source} is {text!r:.80}; it must be file:///absolute/folder or python:MODULE:FUNCTION, or empty: the environment"
        )
    if text.startswith("python:") and given.in_file:
        # A settings file in the current folder may come from another person, and must not choose code to run.
        raise InvalidInput(f"{given.source}: a settings file cannot name a function; set {PREFIX}SECRETS")
    return text


def _hosts(given: _Given) -> tuple[str, ...]:
    value = [part.strip() for part in given.value.split(",") if part.strip()] if given.textual else given.value
    # An entry with a scheme, a path or a port would never match the host of an address.
    if not isinstance(value, list) or not all(isinstance(host, str) and _HOST.fullmatch(host) for host in value):
        raise _refusal(given, f"{_rule(_TYPES[given.name])}, without scheme, port or path")
    return tuple(dict.fromkeys(host.lower() for host in value))
