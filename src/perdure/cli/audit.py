"""`perdure audit`: what happened in all runs, as JSON lines."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import click

from perdure.cli import common
from perdure.errors import InvalidInput
from perdure.inspect.audit import Audit

POLL_S = 0.25
_AGO = re.compile(r"(\d{1,9})([smhd])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.command("audit")
@click.option("--since", metavar="T", help="From then on: an ISO time (UTC unless it says otherwise), or 15m, 2h, 1d ago.")
@click.option("--follow", is_flag=True, help="Go on with what happens, until it is interrupted.")
@common.url_option
@common.json_option
def command(since: str | None, follow: bool, url: str | None, as_json: bool) -> None:
    """Every event of every run as one JSON object per line, with or without --json."""
    start = 0 if since is None else parse_since(since, common.now_us())
    with common.existing_store(url) as store:
        audit = Audit(store, start)
        while True:
            version, begun_s = store.version(), time.monotonic()
            for line in audit.more():
                common.out_json(line)
            if not follow:
                return
            common.flush()
            # A look over very many unfinished runs takes its time: it is to be a small part of what this machine does.
            time.sleep(max(POLL_S, 4 * (time.monotonic() - begun_s)))
            while store.version() == version:
                time.sleep(POLL_S)


def parse_since(text: str, now: int) -> int:
    """The moment that `--since` means, in µs since 1970."""
    ago = _AGO.match(text)
    if ago:
        return max(0, now - int(ago[1]) * _UNIT_S[ago[2]] * 1_000_000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"--since {text!r:.60} is not a time; write 15m, 2h, 1d, or an ISO time such as 2026-01-31T14:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1e6)
