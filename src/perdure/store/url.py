"""The URL of a store as it may be shown: in messages and logs, without what lets anybody in."""

from __future__ import annotations

import re
from urllib.parse import unquote

_SETTING = re.compile(r"([^?&\s=]+)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^&\s#]*)")


def shown_url(url: str) -> str:
    """The URL without user, password, and whatever else in it is named like one."""
    if url.startswith("sqlite:///"):
        return url  # a file, whatever characters are in its name
    head, at, tail = url.rpartition("@")
    public = f"{head.split('://')[0]}://…@{tail}" if at else url
    return _SETTING.sub(_without_secret, public)


def without_password(url: str) -> str | None:
    """The URL for a driver, without any password in it; None where one cannot be told from the rest."""
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
    # A name may be written in percents too, and is the same name to a driver.
    return f"{setting[1]}{setting[2]}…" if "pass" in unquote(setting[1]).lower() else setting[0]
