"""`perdure trace`: the chain of causes that led to an event."""

from __future__ import annotations

import click
import msgspec

from perdure.cli import common
from perdure.inspect.trace import Link, trace
from perdure.inspect.view import loader, read_run


@click.command("trace")
@common.run_argument
@click.argument("seq", type=click.IntRange(min=1), metavar="[SEQ]", required=False)
@common.url_option
@common.json_option
def command(run_id: str, seq: int | None, url: str | None, as_json: bool) -> None:
    """The causal chain in RUN from its beginning to event SEQ, with the decisions, thoughts and plans on the way.

    Without SEQ: to the event that stopped the run, if it needs attention; else to its last event.
    """
    with common.existing_runs(url) as store:
        links = trace(run_id, read_run(store, run_id).events, seq, store.read, loader(store))
    if as_json:
        for link in links:
            common.out_json(msgspec.to_builtins(link))
        return
    for link in links:
        for line in _lines(link):
            common.out(common.clean(line))


def _lines(link: Link) -> list[str]:
    lines = [f"     event {stated.seq}: {stated.says}" for stated in link.stated]
    lines += [f"     meanwhile, {change}" for change in link.meanwhile]
    if link.because is not None:
        lines.append(f"     {link.because}:")
    lines.append(f"{link.step:>3}. event {link.seq}, {link.ts[:23]}Z: {link.says}")
    lines += [f"       it had received: {heard}" for heard in link.heard]
    if link.elsewhere is not None:
        lines.append(f"     from {link.elsewhere}")
    return lines
