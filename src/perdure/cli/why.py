"""`perdure why`: the one page for whoever has to look at a run now."""

from __future__ import annotations

import shlex

import click
import msgspec

from perdure.cli import common
from perdure.inspect.doubts import Doubt
from perdure.inspect.why import FIRST_SHOWN, Why, why

KEY_SHOWN = 12


@click.command("why")
@common.run_argument
@common.url_option
@common.json_option
def command(run_id: str, url: str | None, as_json: bool) -> None:
    """One page about RUN: what is done, in doubt, waited for and never started, and what to type next."""
    settings = common.settings_with(url=url)
    options = f" --url {shlex.quote(url)}" if url else ""
    with common.existing_store(url) as store:
        page = why(store, run_id, now=common.now_us(), lease_us=round(settings.lease_s * 1e6), options=options)
    if as_json:
        common.out_json(msgspec.to_builtins(page))
    else:
        _print(page)


def _print(page: Why) -> None:
    common.out(
        common.style(common.clean(f"run {page.run_id}"), bold=True) + common.clean(f"  {page.agent}@{page.version}, tenant {page.tenant}")
    )
    common.out(common.style(common.clean(page.sentence), common.STATUS_COLOURS.get(page.status), bold=True))
    if page.said:
        common.out(common.clean(f'the agent last reported: "{page.said}"'))
    _section(f"done: {page.done_count:,}" if page.done_count else "done: nothing yet", _done(page))
    _section("in doubt: nobody knows whether it happened", [line for doubt in page.in_doubt for line in _doubt(doubt)])
    _section("under way", [f"{open_.call:>4}  {open_.asked}: {open_.state} (event {open_.seq})" for open_ in page.under_way])
    _section("waiting for", [f"      {wait}" for wait in page.waiting])
    _section("never started", [f"      {what}" for what in page.never_started])
    common.out()
    common.out(common.style("next", bold=True))
    for step in page.next:
        common.out(f"  {common.style(common.clean(step.command), 'cyan')}")
        common.out(common.clean(f"      {step.does}"))


def _section(title: str, lines: list[str]) -> None:
    if lines or title.startswith("done"):
        common.out()
        common.out(common.style(title, bold=True))
        for line in lines:
            common.out(common.clean(line))


def _done(page: Why) -> list[str]:
    lines = []
    hidden, today = page.done_count - len(page.done), common.iso(common.now_us())[:10]
    for place, done in enumerate(page.done):
        if hidden and place == FIRST_SHOWN:
            lines.append(f"   …  {hidden:,} more: perdure show {page.run_id}")
        tries = f", {done.attempts} attempts" if done.attempts > 1 else ""
        settled = f", settled by {done.settled_by}" if done.settled_by else ""
        day, _, time = done.at[:19].partition("T")
        at = time if day == today else f"{day} {time}"
        evidence = f"event {done.seq}, {at} UTC, key {done.key[:KEY_SHOWN]}…{tries}{settled}"
        lines.append(f"{done.call:>4}  {done.asked} {done.outcome}  ({evidence})")
    return lines


def _doubt(doubt: Doubt) -> list[str]:
    by = f" by worker {doubt.worker}" if doubt.worker else ""
    since = f"in doubt since {doubt.since} ({doubt.age})" if doubt.recorded else f"open for {doubt.age}"
    return [
        f"{doubt.call:>4}  {doubt.asked}",
        f"      asked at {doubt.asked_at}{by}, attempt {doubt.attempt}; {since}: {doubt.why}",
        f"      key {doubt.key}",
        f"      {doubt.effect}: {doubt.meaning}",
        f"      check: {doubt.check}",
    ]
