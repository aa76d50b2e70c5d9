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


def _without_secret(setting: re.Match[str]) -> str:
    # A name may be written in percents too, and is the same name to a driver.
    return f"{setting[1]}{setting[2]}…" if "pass" in unquote(setting[1]).lower() else setting[0]
