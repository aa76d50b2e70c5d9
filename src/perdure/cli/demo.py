"""`perdure demo`: a real program is killed with SIGKILL inside a step and goes on in a new process.

Nothing is acted: the program is examples/deploy.py, its processes are `perdure run` and `perdure resume`, and what is shown
is read back from the journal and from the ledgers that the tools wrote into the world. deploy.py beside this file is a link
to the one in examples/, so that an installed wheel carries the same program that people read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.demo_stage import RUN, STEPS, Stage, Step, steps_of


@click.command("demo")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Work here, in a new or empty folder; else in a temporary one.",
)
@click.option(
    "--kill-at", "kill_at", type=click.Choice(STEPS), default="shift_traffic", show_default=True, help="Pull the plug inside this step."
)
@click.option("--fast", is_flag=True, help="Do not slow down for the eye.")
@common.json_option
def command(folder: Path | None, kill_at: str, fast: bool, as_json: bool) -> int:
    """See a run survive kill -9.

    Deploys a service in six steps, kills the process inside one of them, and resumes in a new process. Exit code 0 only if
    every effect happened exactly once and the journal verifies.
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
    say("5", "Has anybody touched the journal?", f"perdure verify {RUN}")
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


def _show_steps(steps: list[Step]) -> None:
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
        ("cat world/effects/*.log", "what really happened, in the world's own words"),
        (f"perdure replay {RUN}", "the same decisions again, from the journal alone"),
        ("perdure demo --kill-at migrate_schema", "pull the plug somewhere else"),
    ):
        common.out(f"  {typed:<40}{common.style('# ' + why, dim=True)}")
    if os.environ.get("PERDURE_URL"):
        common.out("  (PERDURE_URL is set: unset it there, or the commands look into that database)")
