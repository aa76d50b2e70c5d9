"""The secrets that were passed to `mcp(…)`, and how they are removed from text.

A server may repeat secrets: a gateway shows the headers that the gateway refused, and a traceback may show the
environment. The server's messages become errors in the journal and lines of the log. So every message passes through
`redacted` first, and only then it is cut to a length: a part of a secret must not be shown either. Results of tools
are not changed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "[hidden]"
# Shorter values (`true`, `info`, `8080`) are not secrets. If they were hidden, the cause of an error would be hidden.
_FEWEST_CHARS = 6
_FEWEST_CHARS_OF_PART = 8  # for one part of a path or one word of a value: `Bearer` is not a secret


def secrets_of(where: str | tuple[str, ...], headers: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """All texts that must not be shown, the longest first."""
    found: set[str] = set()
    for value in (*headers.values(), *env.values()):
        found.update(_spelled([value.strip()], _FEWEST_CHARS))
        # The words of a value, such as the token after `Bearer` or the lines of a key.
        found.update(_spelled(value.split(), _FEWEST_CHARS_OF_PART))
        found.update(_of_url(value))
    if isinstance(where, str):
        found.update(_of_url(where))
        found.update(_spelled(urlsplit(where).path.split("/"), _FEWEST_CHARS_OF_PART))
    return tuple(sorted(found, key=lambda secret: (-len(secret), secret)))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _of_url(text: str) -> Iterator[str]:
    """The secrets in a URL: its login and its query. Environments contain URLs too, for databases and proxies."""
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
    except ValueError:
        return
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    # The login in the form in which HTTP sends it.
    login = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else ""
    pieces = [piece.partition("=")[2] or piece for piece in parts.query.split("&")]
    yield from _spelled([parts.username or "", parts.password or "", login, parts.query, *pieces], _FEWEST_CHARS)


def _spelled(texts: Iterable[str], fewest: int) -> Iterator[str]:
    """Each text with at least `fewest` characters, in every spelling in which the text may appear."""
    for text in texts:
        if len(text) >= fewest:
            yield from (text, unquote(text), quote(text, safe=""), json.dumps(text)[1:-1])
