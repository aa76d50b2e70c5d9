"""`perdure doctor`: check the database, the workers, the runs and this machine. Each problem has a way out."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.serving import gap, unserved
from perdure.core.identity import undone_by
from perdure.core.query import EVERYTHING, UNFINISHED
from perdure.engine.api import Reading
from perdure.errors import InvalidInput
from perdure.inspect.artifacts import check_artifacts
from perdure.inspect.health import Check, check_guards, check_runs
from perdure.inspect.retention import check_retention
from perdure.inspect.schedules import check_schedules
from perdure.inspect.text import plural
from perdure.inspect.view import all_rows
from perdure.settings import Settings
from perdure.store.open import is_postgres

_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


@click.command("doctor")
@common.url_option
@common.json_option
def command(url: str | None, as_json: bool) -> int:
    """Check the database, its file or server, the workers, the runs and this machine. Code 1 when a check fails."""
    settings = common.settings_with(url=url)
    checks = [msgspec.structs.replace(check, way_out=_told(check, url)) for check in _checks(settings)]
    for check in checks:
        if as_json:
            common.out_json(msgspec.to_builtins(check))
        else:
            common.out(f"{common.style(f'{check.verdict:<4}', _COLOURS[check.verdict])}  {check.name:<12}  {common.clean(check.found)}")
            if check.way_out is not None:
                common.out(common.clean(f"{'':<20}→ {check.way_out}"))
    return common.FAILED if any(check.verdict == "FAIL" for check in checks) else common.SUCCEEDED


def _told(check: Check, url: str | None) -> str | None:
    return None if check.way_out is None else common.with_url(check.way_out, url)


def _checks(settings: Settings) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}")
    yield Check("now", "ok", common.iso(common.now_us()))
    # Import here: each of these modules loads the library of one database, and only one library is needed.
    if is_postgres(settings.url):
        from perdure.cli.doctor_postgres import server_checks as database_checks
    else:
        from perdure.cli.doctor_sqlite import file_checks as database_checks
    yield from database_checks(settings, lambda store: _inside(store, settings))


def _inside(store: Reading, settings: Settings) -> Iterator[Check]:
    """The checks for every kind of database."""
    yield check_guards(store)
    now, lease_us = common.now_at(store), round(settings.lease_s * 1e6)
    yield from check_runs(store, now, lease_us)
    yield from _service(store, now, lease_us)
    yield _undos(store)
    yield check_schedules(store, store.workers(now, lease_us), now)
    yield from check_retention(store)
    yield from check_artifacts(store)
    yield _webhook(settings)
    yield _notices(store.facts())


def _service(store: Reading, now: int, lease_us: int) -> Iterator[Check]:
    """The agents that the live workers serve, and the runs that no live worker can drive."""
    workers = store.workers(now, lease_us)
    for worker in workers:
        if worker.alive:
            served = ", ".join(f"{one.agent}@{one.version}" for one in worker.serves) or "nothing"
            only = f", of the queues {', '.join(worker.queues)} alone" if worker.queues is not None else ""
            yield Check("serving", "ok", f"{worker.name}: {served}{only}")
    if not any(worker.alive for worker in workers):
        return  # if no worker is alive, the check "workers" reports this
    stuck = list(unserved(store, workers))
    if not stuck:
        yield Check("versions", "ok", "every unfinished run has a worker that can go on with it")
        return
    why = Counter(str(gap(row, workers)) for row in stuck)
    found = "; ".join(f"{words}: {plural(count, 'run')}" for words, count in why.most_common(5))
    yield Check(
        "versions",
        "warn",
        found,
        "perdure list --unserved names them; start a worker with that code, or let other code go on, if it can: perdure adopt RUN FILE.py:AGENT",
    )


def _undos(store: Reading) -> Check:
    """Is an undo unfinished, with no holder? No worker serves an undo, so the user must run `perdure undo` again."""
    query = EVERYTHING.within(status=UNFINISHED)
    rows = (row for row in all_rows(store, query) if row.holder is None and row.specimen is None)
    left = [undone for row in rows if (undone := undone_by(row.run_id)) is not None]
    if not left:
        return Check("undo", "ok", "no undo is unfinished")
    return Check("undo", "warn", f"{plural(len(left), 'undo')} unfinished: of {', '.join(left[:5])}", shell.command("undo", left[0]))


def _webhook(settings: Settings) -> Check:
    """Can notices be sent? The check shows neither the secret nor the part of the URL after the host."""
    if not settings.webhook_url:
        return Check("webhook", "ok", "none is set: notices go to the workers' log alone")
    from perdure.engine.notify.webhook import Endpoint

    try:
        endpoint = Endpoint(settings.webhook_url, settings.webhook_secret, settings.webhook_hosts)
    except InvalidInput as error:
        return Check("webhook", "FAIL", f"no notice can be sent: {error}", "correct it where the workers run; notices wait until then")
    return Check("webhook", "ok", f"{endpoint.place}, signed, by the settings of this process; workers may have other settings")


def _notices(facts: dict[str, str]) -> Check:
    failing = int(facts["notices_failing"])
    if not failing:
        return Check("notices", "ok", "no notice has failed to be sent")
    found = f"{plural(failing, 'notice')} could not be sent yet; the last one: {facts['notice_error']}"
    return Check("notices", "warn", found, "check the receiver; a worker tries again, with growing pauses")
