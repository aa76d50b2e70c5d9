"""The stage of the demo: its folder, its two processes, and what journal and world say afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from perdure.cli import common

RUN = "shop-v42"
STEPS = ("migrate_schema", "build_image", "push_image", "shift_traffic", "join_mesh", "check_health")
LONGEST_S = 90.0  # a process that takes longer has gone wrong
LOOK_EVERY_S = 0.01


class Ended(Struct, frozen=True):
    """A process of the demo that is over."""

    pid: int
    code: int
    output: str

    @property
    def parsed(self) -> Any:
        """Its --json output: one document, or a list of them when it printed a line each."""
        found = [json.loads(line) for line in self.output.splitlines()]
        return found[0] if len(found) == 1 else found


class Stage:
    """A folder with the program, its journal and its world."""

    def __init__(self, folder: Path, *, fast: bool, quiet: bool) -> None:
        self.folder = folder
        self._quiet = quiet
        # Nothing of the caller's own settings: the demo has a database of its own.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "DEPLOY_"))}
        if fast:
            # The margin is for effects that outlive their process; these tools have none.
            self._env.update(DEPLOY_PACE_S="0.1", PERDURE_RECONCILE_MARGIN_S="0.1")

    def start_and_kill(self, step: str) -> Ended:
        """Start the run; once the step has acted on the world, and before it hears the answer, SIGKILL."""
        # A read has no effect to wait for: that it has asked is all that the world can tell.
        ledger = self._ledger("requests" if step == "check_health" else "effects", step)
        arguments = ("run", "deploy.py:deploy", "service=shop", "release=v42", "--id", RUN)
        with self._started(1, arguments, {"DEPLOY_SLOW_REPLY": step}) as process:
            self._watch(process, "process 1", until=lambda: _lines(ledger) != [])
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        ended = self._ended(1, process)
        if ended.code != -signal.SIGKILL:
            common.fail(
                f"the demo's first process ended by itself with code {ended.code}; its words are in {self.folder}/process-1.log",
                common.FAILED,
            )
        return ended

    def resume(self) -> Ended:
        """Drive the run to its end in a new process."""
        with self._started(2, ("resume", RUN), {}) as process:
            self._watch(process, "process 2", until=lambda: False)
        return self._ended(2, process)

    def look(self, *arguments: str) -> Ended:
        """Run a reading verb: its own output goes to the screen, or is kept as JSON when the demo is quiet."""
        command = [*self._perdure(arguments), *(["--json"] if self._quiet else [])]
        sys.stdout.flush()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE if self._quiet else None,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        return Ended(0, done.returncode, done.stdout or "")

    def journal(self) -> list[dict[str, Any]]:
        """All events of the run, as `perdure events --json` prints them."""
        command = self._perdure(("events", RUN, "--json"))
        done = subprocess.run(command, cwd=self.folder, env=self._env, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=False)
        if done.returncode != 0:
            common.fail(f"the demo cannot read its journal in {self.folder}", common.FAILED)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def counts(self, what: str) -> dict[str, int]:
        """How many lines the world has for each step, of `requests` or `effects`."""
        return {step: len(_lines(self._ledger(what, step))) for step in STEPS}

    def effects(self) -> dict[str, list[str]]:
        """The keys of the effects in the world, by step."""
        return {step: [line.partition(" ")[0] for line in _lines(self._ledger("effects", step))] for step in STEPS}

    # -- processes ----------------------------------------------------------------------------------------------------
    def _perdure(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "perdure", *arguments]

    @contextmanager
    def _started(self, number: int, arguments: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """The process, which does not outlive the block, whatever happens in it."""
        with self._words(number, "out").open("wb") as out, self._words(number, "log").open("wb") as log:
            process = subprocess.Popen(
                self._perdure(arguments), cwd=self.folder, env={**self._env, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()

    def _ended(self, number: int, process: subprocess.Popen[bytes]) -> Ended:
        return Ended(process.pid, process.returncode, self._words(number, "out").read_text())

    def _words(self, number: int, kind: str) -> Path:
        return self.folder / f"process-{number}.{kind}"

    def _watch(self, process: subprocess.Popen[bytes], who: str, until: Callable[[], bool]) -> None:
        """Return when the process has ended or the moment has come; meanwhile show what happens in the world."""
        give_up = time.monotonic() + LONGEST_S
        with _progress(f"{who} (pid {process.pid})") as show:
            while process.poll() is None and not until():
                show(self.counts("requests"), self.counts("effects"))
                if time.monotonic() > give_up:
                    process.kill()
                    common.fail(
                        f"the demo's {who} has not come to its end within {LONGEST_S:g} s; its words are in {self.folder}", common.FAILED
                    )
                time.sleep(LOOK_EVERY_S)

    def _ledger(self, what: str, step: str) -> Path:
        return self.folder / "world" / what / f"{step}.log"


def _lines(ledger: Path) -> list[str]:
    try:
        return ledger.read_text().splitlines()
    except FileNotFoundError:
        return []


# -- while it waits ---------------------------------------------------------------------------------------------------------
@contextmanager
def _progress(title: str) -> Iterator[Callable[[Mapping[str, int], Mapping[str, int]], None]]:
    """On a terminal: the six steps as they happen, gone when it is over. Elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda requests, effects: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table

    spinner = Spinner("dots", style="cyan")

    def drawn(requests: Mapping[str, int], effects: Mapping[str, int]) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("", f"[dim]{title}[/]")
        working = max((number for number, step in enumerate(STEPS) if requests[step]), default=-1)
        for number, step in enumerate(STEPS):
            mark = "[green]✓[/]" if number < working else spinner if number == working else "[dim]·[/]"
            told = "[green]it has happened[/]" if effects[step] and number == working else "asking …" if number == working else ""
            grid.add_row(mark, f"{step}  [dim]{told}[/]" if number <= working else f"[dim]{step}[/]")
        return grid

    nothing = dict.fromkeys(STEPS, 0)
    with Live(drawn(nothing, nothing), console=Console(stderr=True), transient=True, refresh_per_second=20) as live:
        yield lambda requests, effects: live.update(drawn(requests, effects))


# -- afterwards -------------------------------------------------------------------------------------------------------------
class Step(Struct, frozen=True):
    """What became of one step, by the journal and by the world."""

    name: str
    effect: str
    key: str | None
    in_first: str
    in_second: str
    skipped: bool
    asked_first: int
    asked: int
    keys: tuple[str, ...]  # of the effects in the world, one each

    @property
    def reads(self) -> bool:
        return self.effect == "read"

    @property
    def effects(self) -> int:
        return len(self.keys)

    @property
    def exactly_once(self) -> bool:
        """One effect, under the key of the call; none for a read; and a skipped step was not even asked again."""
        expected = () if self.reads else (self.key,)
        return self.keys == expected and not (self.skipped and self.asked != self.asked_first)

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "effect": self.effect,
            "key": self.key,
            "process_1": self.in_first,
            "process_2": self.in_second,
            "skipped": self.skipped,
            "requests": self.asked,
            "effects": self.effects,
            "exactly_once": self.exactly_once,
        }


def steps_of(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    asked_first: Mapping[str, int],
    asked: Mapping[str, int],
    effects: Mapping[str, Sequence[str]],
) -> list[Step]:
    """The six steps: the journal before the resume and after it, the world's requests before and after, its effects."""
    known = {event["seq"] for event in before}
    found = []
    for name in STEPS:
        events = [event for event in after if event["tool"] == name]
        first = [event for event in events if event["seq"] in known]
        second = [event for event in events if event["seq"] not in known]
        skipped = _ended_in(first)
        in_first = "done" if skipped else "killed inside" if asked_first[name] else "–"
        found.append(
            Step(
                name=name,
                effect=events[0]["data"]["effect"] if events else "?",
                key=events[0]["key"] if events else None,
                in_first=in_first,
                in_second="skipped" if skipped else _settled(second, in_first == "killed inside"),
                skipped=skipped,
                asked_first=asked_first[name],
                asked=asked[name],
                keys=tuple(effects[name]),
            )
        )
    return found


def _ended_in(events: Sequence[Mapping[str, Any]]) -> bool:
    return any(event["type"] == "tool_call_completed" for event in events)


def _settled(events: Sequence[Mapping[str, Any]], was_inside: bool) -> str:
    """How the new process came to the step's result."""
    outcomes = {event["data"]["outcome"] for event in events if event["type"] == "tool_call_resolved"}
    if "happened" in outcomes:
        return "asked: it happened"
    if not _ended_in(events):
        return "not done"
    if "did_not_happen" in outcomes:
        return "asked: not yet; done"
    return "again (same key)" if was_inside else "done"
