"""`crash_matrix`: learn an agent's boundaries, kill it at each of them, and judge what came of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from perdure.agent import Agent
from perdure.errors import InvalidInput
from perdure.settings import Settings
from perdure.store.open import is_postgres, open_store
from perdure.testing.lab.experiment import Progress, Setup, experiment
from perdure.testing.lab.launch import Forked, Fresh, has_threads, in_process
from perdure.testing.lab.lifeline import Lifeline
from perdure.testing.lab.report import Report
from perdure.testing.lab.spec import Approve
from perdure.testing.lab.trials import Given, Lab, WorldLedger

MOST_TRIALS = 500
_PARK_AFTER_S = 0.05  # a wait above this is a boundary of its own, and costs no time


def crash_matrix(
    agent: Agent[Any, Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    agents: Sequence[Agent[Any, Any]] = (),
    pairs: bool = False,
    limit: int = MOST_TRIALS,
    seed: int = 0,
    boundaries: Callable[[str], bool] | Sequence[str] | None = None,
    ledger: WorldLedger | None = None,
    world: Path | str | None = None,
    approve: Approve = "all",
    signals: Sequence[tuple[str, Any]] = (),
    timeout_s: float = 30.0,
    jobs: int | None = None,
    url: str | None = None,
    settings: Settings | None = None,
    allow_models: bool = False,
    learn_only: bool = False,
    fresh: Sequence[str] = (),
    target: str = "",
    progress: Progress | None = None,
    keep: Path | str | None = None,
) -> Report:
    """Run the agent undisturbed, then once per boundary with a SIGKILL there, resume it, and report what was repeated and what is wrong.

    `pairs` kills the resumed process as well, at every one of its own boundaries; of more than `limit` trials that many are drawn by
    `seed`. `boundaries` chooses by a boundary's words, "after_tool_effect: charge (call 3)", or is a list of parts of them. `ledger` is asked about each trial, with its
    working folder, and answers in JSON values what the world has seen; `world` is the folder that each begins with a copy of. Approvals
    are answered and `signals` sent by the lab. At "late_tool_effect" the effect of the killed process comes after its reconcile hook has
    looked for it, or after the call was made again with its key. Waits cost no time, except for those in which an effect may still show outside: a
    reconcile hook is asked when perdure would ask it, if that is within half of `timeout_s`, and else its "not found" counts as unknown.
    Every trial is a run with a new id, in a new SQLite file or in the database that `url` names.

    `agents` are those that the agent calls, `learn_only` ends after the undisturbed run, `fresh` is the command of an interpreter that
    loads `target` by itself.

    RunFailed when the undisturbed run does not succeed or wait; InvalidInput when it asks a model that costs money, without
    `allow_models`. Nothing of it outlives the call, unless `keep` names a folder for it.
    """
    if not limit >= 1:
        raise InvalidInput(f"limit={limit}: the number of trials, 1 or more")
    if isinstance(args, str):
        raise InvalidInput(
            f"args={args!r}: the agent's arguments, as a list: crash_matrix(agent, [{args!r}]); the fixture takes them one by one"
        )
    boundaries = [boundaries] if isinstance(boundaries, str) else boundaries
    if url is not None and not is_postgres(url):
        raise InvalidInput(f"url={url!r}: without one every trial has a new SQLite file; only postgresql://… can be shared by them")
    if url is not None:
        open_store(url).close()  # what is wrong with it is not the agent's fault, and known before anything is tried
    given = Given(
        input=agent.bind(tuple(args), dict(kwargs or {})),
        settings=_settings(settings or Settings(), url),
        shared=url is not None,
        approve=approve,
        signals=tuple(signals),
        world=None if world is None else Path(world).resolve(strict=True),
        target=target,
    )
    with ExitStack() as stack:
        lifeline = stack.enter_context(Lifeline())
        folder = _folder(keep, given.world, stack)
        forks = not (fresh and has_threads())
        begin_fresh = Fresh(fresh, lifeline).begin if fresh else None
        begin = Forked(in_process(agent, agents), lifeline).begin if forks or begin_fresh is None else begin_fresh
        lab = Lab(folder, given, begin, begin_fresh, ledger=ledger, jobs=jobs or _cores(), timeout_s=timeout_s, keep=keep is not None)
        told = progress or (lambda *_: None)
        setup = Setup(agent, tuple(fresh), target, limit, seed, pairs, boundaries, allow_models, learn_only, told)
        return experiment(lab, setup, given, forks=forks)


def _settings(wanted: Settings, url: str | None) -> Settings:
    """The user's, except for what only costs time, and whom nobody should be told."""
    lab: dict[str, Any] = {"park_after_s": _PARK_AFTER_S, "webhook_url": "", "webhook_secret": ""}
    # A file of its own: nobody else writes there, so that nobody need look; and a killed process takes nothing back that it has
    # handed to the kernel. What power loss takes is not tried here.
    own: dict[str, Any] = {"synchronous": "normal", "poll_s": 60.0}
    return msgspec.structs.replace(wanted, **lab, **(own if url is None else {"url": url}))


def _folder(keep: Path | str | None, world: Path | None, stack: ExitStack) -> Path:
    place = Path(tempfile.gettempdir() if keep is None else keep).resolve()
    if world is not None and place.is_relative_to(world):
        way_out = "have TMPDIR name another one" if keep is None else "keep them in another one"
        raise InvalidInput(
            f"the world {world}: the folder of the trials, {place}, is in there, and every copy would have a copy; {way_out}"
        )
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="perdure-crashtest-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder.resolve()
    kept = Path(keep)
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(kept.iterdir()):
        raise InvalidInput(f"{keep}: the folder to keep the trials in must be new or empty")
    return kept.resolve()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
