"""What was given to `mcp(…)` and is nobody else's business, and texts without it.

A server knows it all and repeats some of it: a gateway shows the headers that it has refused, a traceback the environment. What a server
says becomes errors in the journal and lines of the log, so it goes through `redacted` first, and before it is cut to a length: half of a
secret is one too. Results of tools are not touched.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "[hidden]"
_FEWEST_CHARS = 6  # `true`, `info`, `8080`: hiding such words would hide what is the matter
_FEWEST_CHARS_OF_PART = 8  # of a path, or of a value of several words: `Bearer` is none


def secrets_of(where: str | tuple[str, ...], headers: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """All that must not be repeated, the longest first."""
    found: set[str] = set()
    for value in (*headers.values(), *env.values()):
        found.update(_spelled([value.strip()], _FEWEST_CHARS))
        found.update(_spelled(value.split(), _FEWEST_CHARS_OF_PART))  # the token after `Bearer`, the lines of a key
        found.update(_of_url(value))
    if isinstance(where, str):
        found.update(_of_url(where))
        found.update(_spelled(urlsplit(where).path.split("/"), _FEWEST_CHARS_OF_PART))
    return tuple(sorted(found, key=lambda secret: (-len(secret), secret)))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """The text without them."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _of_url(text: str) -> Iterator[str]:
    """Who logs in by it, and its query. Environments have URLs too: of databases, of proxies."""
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
    except ValueError:
        return
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else ""  # as it goes over the line
    pieces = [piece.partition("=")[2] or piece for piece in parts.query.split("&")]
    yield from _spelled([parts.username or "", parts.password or "", login, parts.query, *pieces], _FEWEST_CHARS)


def _spelled(texts: Iterable[str], fewest: int) -> Iterator[str]:
    """Each of them that is long enough, in every way in which it may be written."""
    for text in texts:
        if len(text) >= fewest:
            yield from (text, unquote(text), quote(text, safe=""), json.dumps(text)[1:-1])
