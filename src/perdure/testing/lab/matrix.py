"""`crash_matrix`: learn an agent's boundaries, kill the agent at each boundary, and judge the outcome."""

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
_PARK_AFTER_S = 0.05  # if a wait is longer, the run parks: the park is a boundary too, and the warp skips the wait


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
    """Run the agent undisturbed. Then, for each boundary, run it again, kill it there by SIGKILL, and resume it.

    The report says which calls were repeated, and which problems were found.

    `pairs`: also kill the resumed process, at each of its own boundaries. `limit`: the maximum number of trials. If
    more are possible, they are drawn at random, with `seed`. `boundaries`: a function that gets the text of a
    boundary, such as "after_tool_effect: charge (call 3)", and says whether to kill there; or a list of parts of such
    texts. `ledger`: a function that is called for each trial with the trial's working folder, and returns the effects
    outside as JSON values. `world`: a folder; each trial begins with a copy of this folder. The lab decides approvals
    as `approve` says, and sends `signals`.

    At the boundary "late_tool_effect" the effect of the killed process happens after the reconcile hook has looked for
    it, or after the call was made again with its key. Waits are skipped, except while an effect may still become
    visible outside. Then a reconcile hook is asked when perdure would ask it, if that is within half of `timeout_s`.
    If that is later, the hook's "not found" counts as unknown. Every trial is a run with a new id, in a new SQLite
    file or in the database that `url` names.

    `agents`: the agents that the agent calls. `learn_only`: end after the undisturbed run. `fresh`: the command of an
    interpreter that loads `target` itself.

    RunFailed if the undisturbed run neither succeeds nor waits. InvalidInput if it calls a model that costs money, and
    `allow_models` is not set. After the call no process is left. No files are left either, unless `keep` names a
    folder for them.
    """
    if not limit >= 1:
        raise InvalidInput(f"limit={limit}: the number of trials, 1 or more")
    if isinstance(args, str):
        raise InvalidInput(
            f"args={args!r}: the agent's arguments, as a list: crash_matrix(agent, [{args!r}]); the fixture takes them one by one"
        )
    boundaries = [boundaries] if isinstance(boundaries, str) else boundaries
    if url is not None and not is_postgres(url):
        raise InvalidInput(
            f"url={url!r}: only a postgresql://… database can be shared by trials; without url= every trial has a new SQLite file"
        )
    if url is not None:
        open_store(url).close()  # if the database cannot be used, this raises now, before any trial
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
    """The user's settings, but with short waits and without a webhook."""
    lab: dict[str, Any] = {"park_after_s": _PARK_AFTER_S, "webhook_url": "", "webhook_secret": ""}
    # If each trial has its own file, no other process writes to the file, so polling is not needed. A killed process
    # does not lose data that the kernel already has, so commits need no fsync. The lab does not test power losses.
    own: dict[str, Any] = {"synchronous": "normal", "poll_s": 60.0}
    return msgspec.structs.replace(wanted, **lab, **(own if url is None else {"url": url}))


def _folder(keep: Path | str | None, world: Path | None, stack: ExitStack) -> Path:
    place = Path(tempfile.gettempdir() if keep is None else keep).resolve()
    if world is not None and place.is_relative_to(world):
        way_out = "set TMPDIR to another folder" if keep is None else "keep them in another folder"
        raise InvalidInput(
            f"the world {world} contains the folder of the trials, {place}, so that every copy would contain a copy; {way_out}"
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
