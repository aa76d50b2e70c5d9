"""Removes credentials from the URL of a store, for messages, logs and child processes."""

from __future__ import annotations

import re
from urllib.parse import unquote

_SETTING = re.compile(r"([^?&\s=]+)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^&\s#]*)")


def shown_url(url: str) -> str:
    """The URL without user and password, and without settings whose names contain "pass"."""
    if url.startswith("sqlite:///"):
        return url  # the rest is the name of a file, and may contain any characters
    head, at, tail = url.rpartition("@")
    public = f"{head.split('://')[0]}://…@{tail}" if at else url
    return _SETTING.sub(_without_secret, public)


def without_password(url: str) -> str | None:
    """The URL for a driver, without any password; None if it is not clear which part is the password."""
    if url.startswith("sqlite://"):
        return url
    scheme, found, rest = url.partition("://")
    address, mark, query = rest.partition("?")
    login, at, place = address.rpartition("@")
    settings = [setting for setting in query.split("&") if "pass" not in unquote(setting.partition("=")[0]).lower()]
    if not found or "@" in query:
        return None
    return f"{scheme}://{login.partition(':')[0]}{at}{place}{mark}{'&'.join(settings)}"


def _without_secret(setting: re.Match[str]) -> str:
    # A name may be percent-encoded; drivers decode it.
    return f"{setting[1]}{setting[2]}…" if "pass" in unquote(setting[1]).lower() else setting[0]
