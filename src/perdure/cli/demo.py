"""`perdure demo`: a real program is killed with SIGKILL inside a step, and its run continues in a new process.

The demo counts the effects in files that perdure does not write ("the world"), and not in the journal.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from perdure import shell
from perdure.cli import common

RUN = "shop-v42"
STEPS = ("migrate_schema", "build_image", "push_image", "shift_traffic", "join_mesh", "check_health")
LONGEST_S = 90.0  # if a process takes longer, the demo has failed
LOOK_EVERY_S = 0.01


class Ended(Struct, frozen=True):
    """A process of the demo that has ended."""

    pid: int
    code: int
    output: str

    @property
    def parsed(self) -> Any:
        """The --json output of the process: one document, or a list of documents if there are several lines."""
        found = [json.loads(line) for line in self.output.splitlines()]
        return found[0] if len(found) == 1 else found


class Stage:
    """A folder with the program, its journal and its world."""

    def __init__(self, folder: Path, *, fast: bool, quiet: bool) -> None:
        self.folder = folder
        self._quiet = quiet
        # Leave out the user's settings: the demo has a separate database.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "DEPLOY_"))}
        if fast:
            # The margin is for requests that arrive after their process has died. The tools of the demo send no such
            # requests.
            self._env.update(DEPLOY_PACE_S="0.1", PERDURE_RECONCILE_MARGIN_S="0.1")

    def start_and_kill(self, step: str) -> Ended:
        """Start the run. Kill the process with SIGKILL after the step's effect, before the step has its answer."""
        # check_health is a read and has no effect. So wait for its request.
        ledger = self._ledger("requests" if step == "check_health" else "effects", step)
        arguments = ("run", "deploy.py:deploy", "service=shop", "release=v42", "--id", RUN)
        with self._started(1, arguments, {"DEPLOY_SLOW_REPLY": step}) as process:
            self._watch(process, "process 1", until=lambda: _lines(ledger) != [])
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        ended = self._ended(1, process)
        if ended.code != -signal.SIGKILL:
            common.fail(
                f"the demo's first process ended by itself with code {ended.code}; its output is in {self.folder}/process-1.log",
                common.FAILED,
            )
        return ended

    def resume(self) -> Ended:
        """Drive the run to its end in a new process."""
        with self._started(2, ("resume", RUN), {}) as process:
            self._watch(process, "process 2", until=lambda: False)
        return self._ended(2, process)

    def look(self, *arguments: str) -> Ended:
        """Run a verb that only reads. Its output goes to stdout; if the demo is quiet, its JSON output is captured."""
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
        """How many requests or effects the world has for each step. `what` is "requests" or "effects"."""
        return {step: len(_lines(self._ledger(what, step))) for step in STEPS}

    def effects(self) -> dict[str, list[str]]:
        """The keys of the effects in the world, by step."""
        return {step: [line.partition(" ")[0] for line in _lines(self._ledger("effects", step))] for step in STEPS}

    # -- processes ----------------------------------------------------------------------------------------------------
    def _perdure(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "perdure", *arguments]

    @contextmanager
    def _started(self, number: int, arguments: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start the process. At the end of the `with` block the process has ended."""
        with self._output_file(number, "out").open("wb") as out, self._output_file(number, "log").open("wb") as log:
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
        return Ended(process.pid, process.returncode, self._output_file(number, "out").read_text())

    def _output_file(self, number: int, kind: str) -> Path:
        return self.folder / f"process-{number}.{kind}"

    def _watch(self, process: subprocess.Popen[bytes], who: str, until: Callable[[], bool]) -> None:
        """Wait until the process has ended or `until` returns true. During the wait, show the requests and effects."""
        give_up = time.monotonic() + LONGEST_S
        with _progress(f"{who} (pid {process.pid})") as show:
            while process.poll() is None and not until():
                show(self.counts("requests"), self.counts("effects"))
                if time.monotonic() > give_up:
                    process.kill()
                    common.fail(f"the demo's {who} has not ended within {LONGEST_S:g} s; its output is in {self.folder}", common.FAILED)
                time.sleep(LOOK_EVERY_S)

    def _ledger(self, what: str, step: str) -> Path:
        return self.folder / "world" / what / f"{step}.log"


def _lines(ledger: Path) -> list[str]:
    try:
        return ledger.read_text().splitlines()
    except FileNotFoundError:
        return []


# -- progress ---------------------------------------------------------------------------------------------------------
@contextmanager
def _progress(title: str) -> Iterator[Callable[[Mapping[str, int], Mapping[str, int]], None]]:
    """If stderr is a terminal: show the six steps while they happen, and remove the lines at the end."""
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


# -- afterwards -------------------------------------------------------------------------------------------------------
class DemoStep(Struct, frozen=True):
    """The outcome of one step, from the journal and from the world."""

    name: str
    effect: str
    key: str | None
    in_first: str
    in_second: str
    skipped: bool
    asked_first: int
    asked: int
    keys: tuple[str, ...]  # the key of each effect in the world

    @property
    def reads(self) -> bool:
        return self.effect == "read"

    @property
    def effects(self) -> int:
        return len(self.keys)

    @property
    def exactly_once(self) -> bool:
        """Has the step exactly one effect, with the key of the call? A read must have no effect.

        If process 2 skipped the step, there must also be no request from process 2.
        """
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
) -> list[DemoStep]:
    """The six steps.

    `before` and `after` are the journal before and after the resume. `asked_first` and `asked` are the counts of the
    requests in the world, before and after the resume. `effects` has the keys of the effects in the world.
    """
    known = {event["seq"] for event in before}
    found = []
    for name in STEPS:
        events = [event for event in after if event["tool"] == name]
        first = [event for event in events if event["seq"] in known]
        second = [event for event in events if event["seq"] not in known]
        skipped = _ended_in(first)
        in_first = "done" if skipped else "killed inside" if asked_first[name] else "–"
        found.append(
            DemoStep(
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
    """How the new process got the step's result."""
    outcomes = {event["data"]["outcome"] for event in events if event["type"] == "tool_call_resolved"}
    if "happened" in outcomes:
        return "asked: it happened"
    if not _ended_in(events):
        return "not done"
    if "did_not_happen" in outcomes:
        return "asked: not yet; done"
    return "again (same key)" if was_inside else "done"


# -- The verb


@click.command("demo")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="A new or empty folder to work in. Default: a temporary folder.",
)
@click.option(
    "--kill-at", "kill_at", type=click.Choice(STEPS), default="shift_traffic", show_default=True, help="Kill the process inside this step."
)
@click.option("--fast", is_flag=True, help="Do not slow down for the viewer.")
@common.json_option
def command(folder: Path | None, kill_at: str, fast: bool, as_json: bool) -> int:
    """See a run survive kill -9.

    Deploys a service in six steps, kills the process inside one of them, and resumes in a new process. Exit code 0
    only if every effect happened exactly once and the journal verifies.
    """
    began = time.monotonic()
    stage = Stage(_prepared(folder), fast=fast, quiet=as_json)
    say = _silence if as_json else _say
    say("1", f"Deploying shop v42: six steps, in {stage.folder}", f"perdure run deploy.py:deploy service=shop release=v42 --id {RUN}")
    first = stage.start_and_kill(kill_at)
    acted = "It had asked" if kill_at == "check_health" else "The world had acted"
    say("!", f"kill -9 {first.pid}: process 1 died inside {kill_at}. {acted}; the answer never arrived.")
    before = stage.journal()
    asked_before = stage.counts("requests")
    say("2", "What does the journal know?", f"perdure why {RUN}")
    why = stage.look("why", RUN)
    say("3", "A new process takes over.", f"perdure resume {RUN}")
    second = stage.resume()
    after = stage.journal()
    steps = steps_of(before, after, asked_before, stage.counts("requests"), stage.effects())
    if not as_json:
        common.out(f"{common.clean(second.output.strip())}\n")
        _show_steps(steps)
    last = after[-1]["seq"]
    say("4", "Why did the last event happen? The chain of causes, back to the beginning:", shell.command("trace", RUN, str(last)))
    trace = stage.look("trace", RUN, str(last))
    say("5", "Was the journal changed after it was written?", f"perdure verify {RUN}")
    verified = stage.look("verify", RUN)
    ok = second.code == 0 and trace.code == 0 and verified.code == 0 and all(step.exactly_once for step in steps)
    if as_json:
        common.out_json(
            {
                "ok": ok,
                "run_id": RUN,
                "folder": str(stage.folder),
                "killed": {"pid": first.pid, "at": kill_at, "code": first.code},
                "resumed": {"pid": second.pid, "code": second.code},
                "status": after[-1]["type"].removeprefix("run_"),
                "steps": [step.as_dict() for step in steps],
                "why": why.parsed,
                "trace": trace.parsed,
                "verify": verified.parsed,
                "seconds": round(time.monotonic() - began, 2),
            }
        )
    else:
        _show_verdict(stage.folder, ok, time.monotonic() - began)
    return common.SUCCEEDED if ok else common.DIFFERENT


def _prepared(folder: Path | None) -> Path:
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        common.fail(f"--dir {folder}: there are files in it, and the demo counts files; name a new or an empty folder")
    shutil.copyfile(Path(__file__).with_name("deploy.py"), folder / "deploy.py")
    return folder.resolve()


def _silence(mark: str, words: str, typed: str = "") -> None:
    pass


def _say(mark: str, words: str, typed: str = "") -> None:
    colour = "red" if mark == "!" else "cyan"
    common.out(f"\n{common.style(mark, colour, bold=True)}  {common.style(common.clean(words), bold=True)}")
    if typed:
        common.out(f"   {common.style('$ ' + common.clean(typed), dim=True)}")


def _show_steps(steps: list[DemoStep]) -> None:
    common.table(
        ("step", "effect", "process 1", "process 2", "requests", "effects"),
        [
            (step.name, step.effect, step.in_first, step.in_second, str(step.asked), "reads only" if step.reads else str(step.effects))
            for step in steps
        ],
    )
    skipped = sum(step.skipped for step in steps)
    common.out(
        f"{skipped} skipped on resume: their results came from the journal. Requests and effects are counted in the world, not in the journal."
    )


def _show_verdict(folder: Path, ok: bool, seconds: float) -> None:
    common.out()
    if ok:
        common.out(common.style(f"Every effect happened exactly once, and the journal verifies. ({seconds:.1f} s)", "green", bold=True))
    else:
        common.out(
            common.style(
                "NOT every effect happened exactly once, or the journal does not verify: this is a bug. Please keep the folder.",
                "red",
                bold=True,
            )
        )
    common.out("\nType next:")
    common.out(f"  cd {shell.quote(str(folder))}")
    for typed, why in (
        (f"perdure show {RUN}", "the run and its calls"),
        (f"perdure events {RUN}", "the whole journal"),
        ("cat world/effects/*.log", "what really happened, recorded by the world"),
        (f"perdure replay {RUN}", "the same decisions again, from the journal alone"),
        ("perdure demo --kill-at migrate_schema", "kill the process in another step"),
    ):
        common.out(f"  {typed:<40}{common.style('# ' + why, dim=True)}")
    if os.environ.get("PERDURE_URL"):
        common.out("  (PERDURE_URL is set: unset it there, or the commands look into that database)")
