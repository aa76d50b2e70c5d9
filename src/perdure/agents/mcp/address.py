"""The location of a server (a command or a URL), how the location is shown, and the name of the server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from perdure.core.codec import digest, shown
from perdure.errors import InvalidInput

NAME_CHARS = 32
_DIGEST_CHARS = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}\Z")
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]+")
# Programs that only run other programs. Their names are not useful as the name of a server.
_RUNNERS = re.compile(r"(python[0-9.]*|pypy[0-9.]*|node|npx|uvx?|bunx?|deno|docker|podman|env|sh|bash|run|exec|tool)\Z")


def located(server: str | Sequence[str]) -> str | tuple[str, ...]:
    """The location of a server: its URL unchanged, or the words of its command."""
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        try:
            parts = urlsplit(server)
            if parts.hostname and parts.port != 0:
                return server
        except ValueError:
            pass
        # Do not show the URL: perdure cannot parse it, so it cannot find and remove the secrets in the URL.
        raise InvalidInput("mcp('http…'): this is not a URL with a host and, if any, a port; such as https://example.com/mcp")
    if isinstance(server, str):
        try:
            words = shlex.split(server)
        except ValueError as error:
            raise InvalidInput(f"mcp(…): the command cannot be read: {error}; give it as a list of words") from None
    else:
        words = list(server) if isinstance(server, (list, tuple)) else []
    if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
        raise InvalidInput(f"mcp({shown(server)}): a server is a command, as text or as a list of words, or an http(s) URL")
    return tuple(words)


def address_of(where: str | tuple[str, ...]) -> str:
    """The location without possible secrets: only the host and port of a URL, or the program of a command.

    The path and the query of a URL are shown as a digest, so that two servers behind one host differ. The login is
    left out: the same server with another login is the same location.
    """
    if isinstance(where, tuple):
        more = len(where) - 1
        return where[0] if not more else f"{where[0]} (and {more} argument{'s' if more > 1 else ''})"
    parts = urlsplit(where)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    rest = f"{parts.path.rstrip('/')}?{parts.query}"
    return f"{parts.scheme}://{host}{port}{'' if rest == '?' else f' (#{digest(rest.encode())[:_DIGEST_CHARS]})'}"


def checked_name(name: str | None, where: str | tuple[str, ...]) -> str:
    """The server's name in journals: the given name, or a name that is derived from the host or the program."""
    if name is None:
        return _default_name(where)
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidInput(
            f"mcp(name={shown(name)}): a server's name is 1 to {NAME_CHARS} characters out of A-Z a-z 0-9 _ -, the first one a letter or _"
        )
    return name


def _default_name(where: str | tuple[str, ...]) -> str:
    if isinstance(where, str):
        found = urlsplit(where).hostname or "server"
    else:
        telling = (PurePath(word).stem for word in where if not word.startswith("-"))
        found = next((word for word in telling if word and not _RUNNERS.match(word)), "server")
    plain = _FOREIGN.sub("_", found).strip("_") or "server"
    return (plain if _NAME.match(plain[:1]) else f"_{plain}")[:NAME_CHARS]
