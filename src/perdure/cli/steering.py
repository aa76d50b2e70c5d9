"""Shared by verbs that post to runs: who posts, from where, and which process drives the run after the post."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.target import resume_command, top
from perdure.cli.who import os_user
from perdure.core.budget import Budget, micros
from perdure.core.identity import undone_by
from perdure.core.state import RunState
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput
from perdure.inspect.view import begins_later
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
MOST_ADDED = 10**15


def by_option(words: str) -> Callable[[F], F]:
    """The option `--by WHO`. The parameter is `by: str | None`; pass it to `speaker`, which has the default."""
    return click.option("--by", metavar="WHO", help=f"{words} Default: the user of this process.")


def speaker(by: str | None) -> str:
    return os_user() if by is None else by


def add_options(function: F) -> F:
    """The options `--add-usd`, `--add-tokens`, `--add-calls` and `--add-seconds`. The parameter is `add: Budget | None`."""

    @functools.wraps(function)
    def with_budget(
        *args: Any, add_usd: str | None, add_tokens: int | None, add_calls: int | None, add_seconds: str | None, **others: Any
    ) -> object:
        _check_adds(add_usd, "--add-usd")
        _check_adds(add_seconds, "--add-seconds")
        add = Budget(usd=add_usd, tokens=add_tokens, calls=add_calls, seconds=add_seconds)
        return function(*args, add=None if add == Budget() else add, **others)

    count = click.IntRange(1, MOST_ADDED)
    options = (
        click.option("--add-usd", metavar="X", help="Dollars to add to the budget that the run has used up."),
        click.option("--add-tokens", type=count, metavar="N", help="Tokens to add to that budget."),
        click.option("--add-calls", type=count, metavar="N", help="Calls to add to that budget."),
        click.option("--add-seconds", metavar="S", help="Seconds to add to that budget."),
    )
    wrapped: Callable[..., object] = with_budget
    for option in reversed(options):
        wrapped = option(wrapped)
    return cast(F, wrapped)


def _check_adds(text: str | None, option: str) -> None:
    if text is not None and micros(text, option) == 0:
        raise InvalidInput(f"{option} {text!r:.60} adds nothing; an amount above 0")


def source() -> str:
    """The source of a post, for the journal.

    It always names the user of this process, even if --by names another person.
    """
    return f"cli {os_user()}@{socket.gethostname()}"


def speak(settings: Settings, words: Callable[[Perdure], Awaitable[T]], *, create: bool = False) -> T:
    """Open the journal, call `words` with the app, and return the result of `words`.

    The journal must exist, unless `create`.
    """
    if not create:
        common.require_journal(settings.url)
    return asyncio.run(_speak(settings, words))


async def _speak(settings: Settings, words: Callable[[Perdure], Awaitable[T]]) -> T:
    from perdure.app import Perdure

    async with Perdure(settings=settings) as app:
        return await words(app)


def who_goes_on(store: Reading, row: RunRow, settings: Settings, url: str | None) -> str:
    """In words: what happens to the run after a post, and the command to type if no worker claims the run."""
    if row.status in FINISHED:
        return f"it has {row.status}" if row.status != "cancelled" else "it is cancelled"
    if row.holder is not None:
        return "the worker that holds it goes on"
    if row.status == "paused":
        return f"it is paused; let it go on: {shell.command('unpause', row.run_id)}{common.url_words(url)}"
    if row.status == "needs_attention":
        return f"it needs attention: {shell.command('why', row.run_id)}{common.url_words(url)}"
    command = resume_command(store, top(store, row), settings.url, url)
    if begins_later(row, common.now_at(store)):
        return f"a worker begins it at {common.iso(row.ready_at or 0)}, or now and here: {command} --now"
    # No worker serves an undo: only `perdure undo` drives an undo.
    return f"go on with it: {command}" if undone_by(row.run_id) is not None else f"a worker goes on with it, or here: {command}"


def check_can_go_on(row: RunRow, state: RunState, add: Budget | None) -> None:
    """Raise Conflict if a run that needs attention would stop again at once, because a person has to decide first."""
    why = shell.command("why", row.run_id)
    if row.attention == "restored" and add is not None:
        raise Conflict(f"run {row.run_id} was restored from a backup: let it go on first; {why} says how")
    if row.attention == "in_doubt":
        doubts = [f"call {call.number} ({call.tool})" for call in state.open.values() if call.phase == "in_doubt"]
        raise Conflict(f"run {row.run_id} needs attention: {', '.join(doubts[:3])} may have happened; resolve that first: {why} says how")
    if row.attention == "budget" and add is None:
        raise Conflict(f"run {row.run_id} needs attention: its budget is used up; add to it with perdure unpause: {why} says how much")
    if row.attention != "budget" and add is not None:
        raise Conflict(f"run {row.run_id} needs attention, and not because of its budget: {why} says what it needs")
