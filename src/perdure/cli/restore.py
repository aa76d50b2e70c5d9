"""`perdure restore`: restore a backup into an empty database. Unfinished runs wait until a person has decided about them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import click
import msgspec

from perdure.cli import common
from perdure.cli.backup import part_of
from perdure.cli.copy import Bar
from perdure.cli.steering import by_option, speaker
from perdure.core.query import EVERYTHING
from perdure.core.state import restored_words
from perdure.engine.clock import Clock
from perdure.errors import NotFound
from perdure.inspect.text import plural
from perdure.settings import Settings
from perdure.store.backup import check_backup, restore
from perdure.store.open import open_store
from perdure.store.sqlite import owner
from perdure.store.transfer import some_tables
from perdure.store.url import shown_url


@click.command("restore")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--to", "to", metavar="URL", required=True, help="An empty database: sqlite:///FILE or postgresql://…. A journal is created there."
)
@by_option("Who says so.")
@common.json_option
def command(file: Path, to: str, by: str | None, as_json: bool) -> int:
    """Restore the backup FILE into an empty database. Stop all workers of the old one first.

    Since the backup was taken, runs may have had effects that it does not have. So no worker goes on with an unfinished
    run before a person says so: perdure why RUN, then perdure unpause RUN, or for many: perdure unpause --where
    attention:restored. Until then nothing wakes the run: no signal, decision or timer, no answer about a call in doubt, and
    no cancel (but cancel --force ends it). Schedules are paused. Notices that were not sent yet are not sent. If the command
    is killed, type it again: it continues, and no worker can start before it has ended.
    """
    settings = common.settings_with(url=to)
    if not file.exists():
        raise NotFound(f"there is no file {file}")
    owner.require_journal(file.absolute())
    who, bar = speaker(by), Bar()
    with part_of(file.absolute()) as part:
        # FILE itself is only read: opening a journal may write to it, for example to bring its schema up to date.
        shutil.copyfile(file, part)
        source = open_store(f"sqlite:///{part}")
        try:
            check_backup(source)
            target = common.open_with(settings)
            try:
                now = common.now_at(target)
                done = restore(source, target, to_url=to, by=who, now=now, new_id=Clock().new_id, progress=bar.show)
                paused = asyncio.run(_pause_schedules(settings, who, restored_words(done.taken_at)))
                target.end_batch(done.batch, common.now_at(target))
                marked = sum(target.count(EVERYTHING.also(attention="restored")).values())
            finally:
                bar.end()
                target.close()
        finally:
            source.close()
    copied = done.copied
    if as_json:
        counts = {"marked": marked, "schedules_paused": paused, "notices_not_sent": done.notices, "batch": done.batch}
        common.out_json({"to": shown_url(to), "taken_at": common.iso(done.taken_at), **counts, **msgspec.to_builtins(copied)})
        return common.DIFFERENT if copied.damaged else common.SUCCEEDED
    common.out(
        common.clean(
            f"restored {plural(copied.runs, 'run')} with {plural(copied.events, 'event')} to {shown_url(to)}, as of "
            f"{common.iso(done.taken_at)}"
        )
    )
    if marked:
        see, on = (f"perdure {verb} --where attention:restored{common.url_words(to)}" for verb in ("list", "unpause"))
        common.out(f"{plural(marked, 'unfinished run waits', 'unfinished runs wait')} for a person: {see}; when it is clear: {on}")
    if paused:
        common.out(f"{plural(paused, 'schedule is', 'schedules are')} paused: perdure schedules list, then perdure schedules resume ID")
    if done.notices:
        common.out(f"{plural(done.notices, 'notice')} that were not sent at that time will not be sent")
    if copied.tables:
        common.out(common.clean(f"tables beside the journal in the backup, which were not restored: {some_tables(copied.tables)}"))
    for run_id in copied.damaged:
        common.out(common.clean(f"run {run_id} is not as it was written, in the backup and here"))
    return common.DIFFERENT if copied.damaged else common.SUCCEEDED


async def _pause_schedules(settings: Settings, by: str, note: str) -> int:
    """Pause the schedules that are active: otherwise the ticks since the backup would start by `missed`."""
    from perdure.app import Perdure

    paused = 0
    async with Perdure(settings=settings) as app:
        for one in await app.schedules.list():
            if one.status == "active":
                await app.schedules.pause(one.id, by=by, note=note)
                paused += 1
    return paused
