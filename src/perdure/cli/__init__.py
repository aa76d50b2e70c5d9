"""The command line: one module per verb. The module of a verb is loaded only if the user types the verb.

A verb module has `command`, a click.Command. Its function returns the exit code (None means 0). A verb raises its
errors and never prints them: `Verbs.main` turns each error into one line on stderr and an exit code.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO, cast

import click

from perdure import __version__
from perdure.cli import common

# verb → (module, what the verb does). The descriptions are here so that `perdure --help` loads no verb module.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("perdure.cli.run_verb", "Start a run, or resume the run with that id, and drive it here."),
    "start": ("perdure.cli.start", "Start a run by its agent's name, without the code, for a worker to drive."),
    "resume": ("perdure.cli.resume", "Drive an existing run here."),
    "worker": ("perdure.cli.worker", "Serve the queue until SIGTERM, then drain."),
    "schedules": ("perdure.cli.schedules", "Start runs at given times: list, add, pause, resume, run-now, remove, next."),
    "list": ("perdure.cli.list_runs", "Runs, newest first."),
    "errors": ("perdure.cli.errors", "The runs that failed or need attention, grouped by their error."),
    "show": ("perdure.cli.show", "The state of a run, now or as of an event."),
    "events": ("perdure.cli.events", "The journal of a run."),
    "why": ("perdure.cli.why", "One page: done, in doubt, waiting, never started, and what to type next."),
    "inspect": ("perdure.cli.inspect_run", "The tasks, lines and variables of an agent at an event."),
    "trace": ("perdure.cli.trace", "The causal chain from the beginning to an event, with the decisions on the way."),
    "approvals": ("perdure.cli.approvals", "Approvals that wait for a decision."),
    "approve": ("perdure.cli.approve", "Approve what an approval proposes."),
    "reject": ("perdure.cli.reject", "Reject what an approval proposes."),
    "signal": ("perdure.cli.signal", "Send a signal to a run."),
    "resolve": ("perdure.cli.resolve", "Resolve a call that is in doubt."),
    "pause": ("perdure.cli.pause", "Stop a run at its next step, until it is unpaused."),
    "unpause": ("perdure.cli.unpause", "Continue a run that is paused, needs attention or is over its budget."),
    "cancel": ("perdure.cli.cancel", "Ask a run to stop."),
    "adopt": ("perdure.cli.adopt", "Let the code of another version go on with unfinished runs, one or many."),
    "retry": ("perdure.cli.retry", "Let runs that have failed or were cancelled go on, one or many."),
    "rewind": ("perdure.cli.rewind", "Let a run go on from an earlier event of its journal."),
    "undo": ("perdure.cli.undo", "Undo the calls of a finished run whose tools have compensate hooks."),
    "replay": ("perdure.cli.replay", "Check recorded runs against this code."),
    "fork": ("perdure.cli.fork", "Rehearse a recorded run from any event on, without effects: what would it do?"),
    "diff": ("perdure.cli.diff", "Compare two runs: calls, results, outcome, cost."),
    "whatif": ("perdure.cli.whatif", "Rehearse many recorded runs with this code, prompt or model, without effects."),
    "check": ("perdure.cli.check", "Find code that would break replay, without running it."),
    "crashtest": ("perdure.cli.crashtest", "Kill an agent at each of its boundaries, and check that its run survives."),
    "verify": ("perdure.cli.verify", "Check the hash chain of one run or of all."),
    "sign": ("perdure.cli.sign", "Sign the heads of all runs, so that history cannot be rewritten unseen."),
    "export": ("perdure.cli.export", "Write a run to one portable file: to look at, verify, replay or test it."),
    "import": ("perdure.cli.import_run", "Take an exported run into this journal, to look at it: it is never driven."),
    "audit": ("perdure.cli.audit", "What happened in all runs, as JSON lines."),
    "costs": ("perdure.cli.costs", "What runs have used: calls, time, tokens, money."),
    "doctor": ("perdure.cli.doctor", "Check the database, the workers and this machine."),
    "migrate": ("perdure.cli.migrate", "Bring the database's schema up to date."),
    "copy": ("perdure.cli.copy", "Move the journal to another database, or copy its history there."),
    "backup": ("perdure.cli.backup", "Write the whole journal to one file, while workers write, and verify it."),
    "restore": ("perdure.cli.restore", "Restore a backup; unfinished runs wait until a person has decided about them."),
    "prune": ("perdure.cli.prune", "Delete runs that ended long ago; a tombstone of each stays."),
    "demo": ("perdure.cli.demo", "See a run survive kill -9."),
    "completion": ("perdure.cli.completion", "Print the shell completion script."),
}


# Words that users of other tools type → what perdure has instead. docs/glossary.md has the terms.
_LIST, _EVENTS, _SHOW = "perdure list", "perdure events RUN", "perdure show RUN"
_CANCEL = "perdure cancel RUN, or with --force without its agent; a worker drains after SIGTERM"
_AT = "the state after any event: perdure show RUN --at SEQ; its lines and variables: perdure inspect RUN --at SEQ"
_UNDO = "perdure undo RUN undoes what a finished run has done, as far as its tools say how"
_AGAIN = "perdure retry RUN lets a run go on that has failed or was cancelled; a run from the beginning: perdure run TARGET --id NEW_ID"
_REWIND = "perdure rewind RUN --to SEQ lets a run go on from an earlier event"
_WORKERS = "perdure list --workers shows the workers with their leases, and the queues"
OTHER_WORDS: dict[str, str] = {
    **dict.fromkeys(("ps", "ls", "runs", "jobs", "workflows", "threads", "workflow", "thread"), f"{_LIST} shows the runs"),
    **dict.fromkeys(("status", "state", "describe", "get", "query"), f"{_SHOW} shows one run, {_LIST} all of them"),
    **dict.fromkeys(("history", "log", "logs", "journal", "event"), f"{_EVENTS} shows the journal; a worker logs to its stderr"),
    **dict.fromkeys(("tail", "watch", "follow"), f"{_EVENTS} --follow"),
    "explain": f"perdure why RUN says what to do; {_SHOW} shows its state, {_EVENTS} its journal",
    **dict.fromkeys(("debug", "pdb", "stack", "locals", "breakpoint"), "perdure inspect RUN --at SEQ shows lines and variables; --pdb"),
    **dict.fromkeys(("effects", "calls", "steps", "activities"), f"{_SHOW} shows every call with its result"),
    **dict.fromkeys(("checkpoint", "checkpoints", "snapshot", "snapshots"), f"every step is recorded without a command; {_AT}"),
    **dict.fromkeys(("time-travel", "timetravel", "at"), f"{_AT}; {_REWIND}"),
    **dict.fromkeys(("reset", "reopen", "goto", "jump"), f"{_REWIND}, and perdure retry RUN from where it failed"),
    **dict.fromkeys(("branch", "clone"), f"perdure fork RUN --at SEQ rehearses a run from any event on; {_REWIND}; {_AT}"),
    **dict.fromkeys(("compare", "delta"), "perdure diff RUN RUN"),
    **dict.fromkeys(
        ("simulate", "rehearse", "dry-run", "eval", "backtest"), "perdure fork RUN for one run, perdure whatif TARGET for many"
    ),
    **dict.fromkeys(("lease", "leases", "heartbeat", "heartbeats", "workers", "queues", "queue"), _WORKERS),
    **dict.fromkeys(("kill", "stop", "abort", "terminate", "end"), _CANCEL),
    **dict.fromkeys(("rollback", "revert", "compensate", "saga"), _UNDO),
    **dict.fromkeys(("rerun", "restart", "redo", "redrive", "again"), _AGAIN),
    "requeue": "perdure retry RUN; a run that is paused or needs attention: perdure unpause RUN",
    **dict.fromkeys(("exec", "execute", "submit", "enqueue", "invoke"), "perdure run TARGET, with --detach for a worker to drive it"),
    **dict.fromkeys(("continue", "recover", "go"), "perdure resume RUN"),
    **dict.fromkeys(("serve", "work", "up"), "perdure worker TARGET"),
    **dict.fromkeys(("suspend", "hold", "freeze"), "perdure pause RUN"),
    **dict.fromkeys(("unsuspend", "release", "thaw"), "perdure unpause RUN"),
    **dict.fromkeys(("send", "notify", "publish"), "perdure signal RUN TOPIC JSON"),
    **dict.fromkeys(("accept", "grant"), "perdure approve ID; the pending approvals: perdure approvals"),
    **dict.fromkeys(("deny", "decline"), "perdure reject ID --reason TEXT; the pending approvals: perdure approvals"),
    **dict.fromkeys(("settle", "reconcile", "fix"), "perdure resolve RUN CALL settles a call in doubt; perdure why RUN shows it"),
    **dict.fromkeys(("upgrade-run", "patch"), "perdure adopt RUN TARGET"),
    **dict.fromkeys(("init", "upgrade", "setup", "createdb"), "perdure migrate makes the journal, or brings its schema up to date"),
    **dict.fromkeys(("delete", "rm", "remove", "gc", "clean", "vacuum"), "perdure prune --older-than 90d deletes runs that ended long ago"),
    **dict.fromkeys(("move", "mv"), "perdure copy --from URL --to URL moves a journal"),
    **dict.fromkeys(("dump", "save"), "perdure backup FILE writes the whole journal to one file; perdure export RUN one run"),
    **dict.fromkeys(("health", "diagnose", "info"), "perdure doctor checks the database, the workers and this machine"),
    **dict.fromkeys(("cost", "usage", "spend"), "perdure costs"),
    **dict.fromkeys(("lint", "validate"), "perdure check FILE"),
    **dict.fromkeys(("test", "chaos"), "perdure crashtest TARGET kills an agent at every boundary"),
    **dict.fromkeys(("schedule", "cron", "crontab", "timer", "timers"), "perdure schedules list shows the schedules"),
    "version": "perdure --version",
}


class Verbs(click.Group):
    """The `perdure` program: looks verbs up by name and reports every error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[name][0]).command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`perdure help VERB` is `perdure VERB --help`, and `perdure help` is `perdure --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not ctx.resilient_parsing:
            if name in OTHER_WORDS:
                common.fail(f"there is no verb {name!r}; {OTHER_WORDS[name]}; all verbs: perdure --help", common.USAGE)
            near = difflib.get_close_matches(name, VERBS, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            common.fail(f"there is no verb {name!r}; {meant}all verbs: perdure --help", common.USAGE)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, words) for name, (_, words) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            common.flush()
        except BrokenPipeError:
            # Do not leave this error to click: click would exit with code 1, and 1 means that the run failed.
            raise common.PipeClosed from None
        return code

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> NoReturn:
        """Run the verb, and end the process with the verb's exit code."""
        _prepare_streams()
        extra.update(prog_name="perdure", standalone_mode=False)
        try:
            code = super().main(args, **extra) or 0
        except BaseException as error:
            code = common.report(error)
        common.flush_stderr()
        sys.exit(code)


def _prepare_streams() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The parent process closed this stream. The next file that this process opens would get the descriptor,
            # and error messages would be written into that file.
            os.open(os.devnull, os.O_RDWR)
    # Python sets a closed stream to None. After these two lines stdout and stderr can be written.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        # If the encoding of the stream lacks a character, write the character as an escape and raise no error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, common.Stdout(sys.stdout))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, subcommand_metavar="VERB …")
@click.version_option(__version__, message="perdure %(version)s")
def cli() -> None:
    """Durable agents: recorded in a journal, resumed after kill -9.

    Results go to stdout, progress and errors to stderr. Exit codes: 0 succeeded, 1 the run failed, 2 wrong usage,
    3 the run waits, 4 needs attention, 5 cancelled, 6 not found, 7 difference found, 8 a live worker holds the run.
    """


def main() -> NoReturn:
    """The entry point of the `perdure` script and of `python -m perdure`."""
    cli.main()
    raise AssertionError("main ends the process")


__all__ = ["cli", "main"]
