"""Signing webhooks, and verifying on the receiving side that a notice is authentic, unchanged and recent.

    notice = verify(secret, request.headers, request.body)      # if this raises InvalidWebhook, answer 400
    if notice["id"] not in handled: ...                         # the same notice may arrive more than once

This file uses only the standard library. A receiver without perdure can copy this file without changes.
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
    """Header names and values: a dict, or the headers of a request in any framework."""

    def items(self) -> Iterable[tuple[str, str]]: ...


class InvalidWebhook(ValueError):
    """The webhook was not signed with the secret, is too old, or was changed. Ignore it."""


def sign(secret: str, *, timestamp: str, notice_id: str, body: bytes) -> str:
    """The value of Perdure-Signature: `v1=`, and then the HMAC-SHA256 of `timestamp.id.body` in hex."""
    if not secret:
        raise ValueError("a webhook cannot be signed with an empty secret: every sender could make that signature")
    # Python decodes invalid UTF-8 in the environment to lone surrogates. This restores the original bytes.
    key = secret.encode("utf-8", "surrogateescape")
    signed = b".".join((timestamp.encode(), notice_id.encode(), body))
    return f"v1={hmac.new(key, signed, hashlib.sha256).hexdigest()}"


def verify(secret: str, headers: Headers, body: bytes, *, tolerance_s: float = 300, now: float | None = None) -> dict[str, Any]:
    """The notice in the body.

    Raises InvalidWebhook if the body was not signed with the secret, or if it was signed more than `tolerance_s`
    seconds before or after `now` (in seconds since 1970). Pass the body as it was received: JSON that was decoded and
    encoded again has other bytes.
    """
    timestamp, notice_id, signature = (_single_header(headers, name) for name in (TIMESTAMP_HEADER, ID_HEADER, SIGNATURE_HEADER))
    expected = sign(secret, timestamp=timestamp, notice_id=notice_id, body=body)
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise InvalidWebhook("the signature does not fit: it was made with another secret, or the body was changed")
    # The signature is right, so the id and the time are authentic. Now check the time against the current time, and
    # the id against the body.
    off_s = (time.time() if now is None else now) - _seconds(timestamp)
    if abs(off_s) > tolerance_s:
        raise InvalidWebhook(f"signed {abs(off_s):.0f} s {'ago' if off_s > 0 else 'in the future'}; at most {tolerance_s:g} s are accepted")
    try:
        notice = json.loads(body)
    except ValueError:
        raise InvalidWebhook("the body is not JSON") from None
    if not isinstance(notice, dict) or notice.get("id") != notice_id:
        raise InvalidWebhook(f"the id in the body is not the id in the header {ID_HEADER}")
    return notice


def _single_header(headers: Headers, wanted: str) -> str:
    """The value of the header `wanted`. Upper and lower case are the same.

    The header must occur exactly once: if there were two values, it would not be clear which value counts.
    """
    found = [value for name, value in headers.items() if name.lower() == wanted.lower()]
    if len(found) != 1:
        raise InvalidWebhook(f"the header {wanted} is {'missing' if not found else 'present more than once'}")
    if not isinstance(found[0], str) or not found[0].isascii():
        raise InvalidWebhook(f"the header {wanted} is not plain text")
    return found[0]


def _seconds(timestamp: str) -> int:
    if not timestamp.isdigit() or len(timestamp) > 12:
        raise InvalidWebhook(f"the header {TIMESTAMP_HEADER} is not a number of seconds")
    return int(timestamp)
