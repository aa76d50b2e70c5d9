"""How a webhook is signed, and how whoever receives one finds out that it came from perdure, unchanged and just now.

    notice = verify(secret, request.headers, request.body)      # raises InvalidWebhook; answer 400 then
    if notice["id"] not in handled: ...                         # it may arrive more than once

Nothing but Python's own library in here, so that a receiver that has no perdure can take the file as it is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable
from typing import Any, Protocol

ID_HEADER = "Perdure-Id"
TIMESTAMP_HEADER = "Perdure-Timestamp"
SIGNATURE_HEADER = "Perdure-Signature"


class Headers(Protocol):
    """Anything with names and values: a dict, or the headers of a request in any framework."""

    def items(self) -> Iterable[tuple[str, str]]: ...


class InvalidWebhook(ValueError):
    """Not from whoever knows the secret, not now, or not as it was sent. Do nothing with it."""


def sign(secret: str, *, timestamp: str, notice_id: str, body: bytes) -> str:
    """The value of Perdure-Signature: v1= and the HMAC-SHA256, in hex, of `timestamp.id.body`."""
    if not secret:
        raise ValueError("a webhook cannot be signed with an empty secret: anybody could do the same")
    # Bytes that are no UTF-8 come out of the environment as lone surrogates, and go back to those bytes here.
    key = secret.encode("utf-8", "surrogateescape")
    signed = b".".join((timestamp.encode(), notice_id.encode(), body))
    return f"v1={hmac.new(key, signed, hashlib.sha256).hexdigest()}"


def verify(secret: str, headers: Headers, body: bytes, *, tolerance_s: float = 300, now: float | None = None) -> dict[str, Any]:
    """The notice in the body, once it is certain that it was signed with the secret, less than `tolerance_s` from `now`.

    Give the body as it came in: JSON that was decoded and encoded again has other bytes. `now` is in seconds since 1970.
    """
    timestamp, notice_id, signature = (_the_one(headers, name) for name in (TIMESTAMP_HEADER, ID_HEADER, SIGNATURE_HEADER))
    expected = sign(secret, timestamp=timestamp, notice_id=notice_id, body=body)
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise InvalidWebhook("the signature does not fit: another secret, or the body is not the one that was sent")
    # An id and a time that were signed are as the sender wrote them; what is left to ask is whether they fit this moment and body.
    off_s = (time.time() if now is None else now) - _seconds(timestamp)
    if abs(off_s) > tolerance_s:
        raise InvalidWebhook(f"signed {abs(off_s):.0f} s {'ago' if off_s > 0 else 'in the future'}; at most {tolerance_s:g} s are accepted")
    try:
        notice = json.loads(body)
    except ValueError:
        raise InvalidWebhook("the body is not JSON") from None
    if not isinstance(notice, dict) or notice.get("id") != notice_id:
        raise InvalidWebhook(f"the body is not about what {ID_HEADER} says")
    return notice


def _the_one(headers: Headers, wanted: str) -> str:
    """The header's value; one that is there twice, in whatever case, could be read as either."""
    found = [value for name, value in headers.items() if name.lower() == wanted.lower()]
    if len(found) != 1:
        raise InvalidWebhook(f"the header {wanted} is {'missing' if not found else 'there more than once'}")
    if not isinstance(found[0], str) or not found[0].isascii():
        raise InvalidWebhook(f"the header {wanted} is not plain text")
    return found[0]


def _seconds(timestamp: str) -> int:
    if not timestamp.isdigit() or len(timestamp) > 12:
        raise InvalidWebhook(f"the header {TIMESTAMP_HEADER} is not a number of seconds")
    return int(timestamp)
