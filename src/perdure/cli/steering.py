"""Speaking to runs from the command line: who speaks and from where, and who goes on with the run afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.target import resume_command, top
from perdure.cli.who import os_user
from perdure.core.identity import undone_by
from perdure.engine.api import Reading
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


def by_option(words: str) -> Callable[[F], F]:
    """`--by WHO`, the user of this process unless somebody else is named. The parameter is `by: str | None`; give it to `speaker`."""
    return click.option("--by", metavar="WHO", help=f"{words} Default: the user of this process.")


def speaker(by: str | None) -> str:
    return os_user() if by is None else by


def source() -> str:
    """From where it is said: whatever --by claims, the user of the process is on record."""
    return f"cli {os_user()}@{socket.gethostname()}"


def speak(settings: Settings, words: Callable[[Perdure], Awaitable[T]]) -> T:
    """Open the journal, which must exist, say it, and return what comes back."""
    common.require_journal(settings.url)
    return asyncio.run(_speak(settings, words))


async def _speak(settings: Settings, words: Callable[[Perdure], Awaitable[T]]) -> T:
    from perdure.app import Perdure

    async with Perdure(settings=settings) as app:
        return await words(app)


def who_goes_on(store: Reading, row: RunRow, settings: Settings, url: str | None) -> str:
    """What becomes of the run now that it has been spoken to, and what to type if nobody else sees to it."""
    if row.status in FINISHED:
        return f"it has {row.status}" if row.status != "cancelled" else "it is cancelled"
    if row.holder is not None:
        return "the worker that holds it goes on"
    if row.status == "paused":
        return f"it is paused; let it go on: {shell.command('unpause', row.run_id)}{common.url_words(url)}"
    if row.status == "needs_attention":
        return f"it needs attention: {shell.command('why', row.run_id)}{common.url_words(url)}"
    command = resume_command(store, top(store, row), settings.url, url)
    # The code of an undo is the run that it undoes: no worker serves it.
    return f"go on with it: {command}" if undone_by(row.run_id) is not None else f"a worker goes on with it, or here: {command}"
