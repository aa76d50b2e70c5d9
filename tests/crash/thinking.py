"""The program of a victim whose agent uses a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tests.crash import fate, thinkers
from tests.crash.victims import Shifted, acknowledge, prepare, tell

from perdure import Perdure
from perdure.cli.driving import stop_on_signals
from perdure.errors import WrongVersion
from perdure.store.api import FINISHED

BRINGS = "tests.crash.sdks"  # which take long to import: the nursery does so once, and its children have them


def rest(
    folder: str,
    report: str,
    agent: str,
    args: Sequence[Any],
    run_id: str,
    env: Mapping[str, str],
    die: Sequence[Any] = (),
    settings: dict[str, Any] | None = None,
    change: str = "",
    clock: Sequence[Any] = (),
    history_of: str = "",
) -> None:
    """Start the run, or find it started, and drive it here until it ends, needs a person or waits for one; unless the process dies before."""
    os.environ.update(env)
    url, chosen = prepare(folder, settings)
    if die:
        fate.seal(die)
    agents = dict(thinkers.AGENTS)
    if change:
        agents[agent] = thinkers.changed(agent, change)

    async def main() -> None:
        shifted = Shifted(*clock) if clock else None
        async with Perdure(url, agents=agents.values(), settings=chosen, clock=shifted, observers=[acknowledge]) as app:
            known = app.store.get(run_id) is not None
            history = [await app.transcript(history_of)] if history_of and not known else []
            handle = app.handle(run_id) if known else await app.start(agents[agent], *args, *history, id=run_id)
            row = await handle.row()
            try:
                row = row if row.status in FINISHED else await app.engine.drive(run_id)
            except WrongVersion as wrong:
                tell(report, status=row.status, output=None, error=str(wrong), waiting_for=None)
                return
            output = await handle.result() if row.status == "succeeded" else None
            plain = output.model_dump() if isinstance(output, thinkers.Verdict) else output
            tell(report, status=row.status, output=plain, error=row.error, waiting_for=row.waiting_for)

    asyncio.run(main())


def serve(folder: str, env: Mapping[str, str], settings: dict[str, Any] | None = None) -> None:
    """A worker, until SIGTERM."""
    os.environ.update(env)
    url, chosen = prepare(folder, settings)

    async def main() -> None:
        stop = stop_on_signals(asyncio.get_running_loop())
        async with Perdure(url, agents=thinkers.AGENTS.values(), settings=chosen, observers=[acknowledge]) as app:
            await app.work(stop=stop)

    asyncio.run(main())


def begin(folder: str, agent: str, args: Sequence[Any], run_id: str) -> None:
    """Create a run that no worker drives yet."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            await app.start(thinkers.AGENTS[agent], *args, id=run_id)

    asyncio.run(main())


def say(folder: str, run_id: str, words: str, die: Sequence[Any] = ()) -> None:
    """A signal of a person to a run under way; if it is sent twice, it counts once."""
    url, chosen = prepare(folder)
    if die:
        fate.seal(die)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            await app.signal(run_id, "message", words, key="word", by="ann")

    asyncio.run(main())
