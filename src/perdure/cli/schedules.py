"""`perdure schedules`: start runs of an agent at given times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.run_verb import arguments, budget_of
from perdure.cli.steering import by_option, speak, speaker
from perdure.cli.times import parse_future, parse_length
from perdure.core.events import OnExceed
from perdure.core.schedule import Missed, Overlap
from perdure.core.times import iso, micros_of
from perdure.engine.schedules import state_of
from perdure.errors import InvalidInput
from perdure.inspect.schedules import event_of, event_record, event_words
from perdure.inspect.text import labels_words, moment
from perdure.schedule import Cron, Every, Schedule
from perdure.scheduling import ScheduleInfo, TickTime, next_ticks, no_such_schedule, schedule_info

if TYPE_CHECKING:
    from perdure.app import Perdure
    from perdure.core.schedule import Spec

F = TypeVar("F", bound=Callable[..., Any])


@click.group("schedules", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Start runs of an agent at given times. Any worker that serves the agent starts them, once for each tick.

    A schedule that belongs to the code of an agent is declared there: @agent(schedule=Cron("0 7 * * mon-fri")).
    """


def _schedule_argument(function: F) -> F:
    return click.argument("schedule_id", metavar="ID", shell_complete=_complete)(function)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return common.complete_ids(ctx, incomplete, lambda store: [row.schedule_id for row in store.schedules()])


def _note_option(function: F) -> F:
    return click.option("--note", metavar="TEXT", help="Why; a note for the journal.")(function)


def _times(function: F) -> F:
    """The options that say when: --cron with --tz, or --every; and --jitter."""
    for option in (
        click.option("--jitter", metavar="T", help="Delay each tick by up to this time, such as 30s; always the same for the same tick."),
        click.option("--every", metavar="T", help="At equal distances: 30s, 5m, 2h, counted from 1970 in UTC."),
        click.option("--tz", metavar="ZONE", help="The time zone of --cron, such as Europe/Berlin. Default: UTC."),
        click.option("--cron", metavar="EXPR", help="Minute, hour, day of month, month, day of week: '0 7 * * mon-fri'."),
    ):
        function = option(function)
    return function


def _when(cron: str | None, tz: str | None, every: str | None, jitter: str | None) -> Cron | Every:
    if (cron is None) == (every is None):
        raise InvalidInput("say when: either --cron '0 7 * * mon-fri', with --tz if it is not UTC, or --every 5m")
    delay = 0.0 if jitter is None else parse_length(jitter, "--jitter")
    if cron is not None:
        return Cron(cron, tz=tz or "UTC", jitter=delay)
    if tz is not None:
        raise InvalidInput("--tz belongs to --cron: --every is the same in every zone")
    return Every(seconds=round(parse_length(str(every), "--every")), jitter=delay)


# -- list, show, next -------------------------------------------------------------------------------------------------
@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Also schedules that were removed.")
@common.url_option
@common.json_option
def list_schedules(everything: bool, url: str | None, as_json: bool) -> None:
    """All schedules, by id."""
    with common.existing_runs(url) as store:
        now = common.now_at(store)
        infos = [info for info in map(schedule_info, store.schedules()) if everything or info.status != "removed"]
    if as_json:
        for info in infos:
            common.out_json(_record(info))
        return
    if not infos:
        common.note("there is no schedule; add one: perdure schedules add AGENT --cron '0 7 * * mon-fri'")
        return
    rows = [(info.id, info.status, info.agent, info.when, _at(info.next_tick, now), _at(info.last_tick, now)) for info in infos]
    common.table(("id", "status", "agent", "when", "next tick", "last tick"), rows)


def _at(when: datetime | None, now: int) -> str:
    return "–" if when is None else moment(iso(micros_of(when)), now)


def _record(info: ScheduleInfo) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(info)
    return record


@command.command("show")
@_schedule_argument
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="The last N events.")
@common.url_option
@common.json_option
def show(schedule_id: str, limit: int, url: str | None, as_json: bool) -> None:
    """A schedule and its journal: who changed it, and what its ticks have started."""
    with common.existing_runs(url) as store:
        row = store.schedule(schedule_id)
        if row is None:
            raise no_such_schedule(schedule_id)
        events = [event_of(one) for one in store.schedule_events(schedule_id, max(row.seq - limit, 0))]
        now = common.now_at(store)
    info = schedule_info(row)
    if as_json:
        common.out_json(
            {
                **_record(info),
                "events": [
                    {"seq": one.seq, "ts": iso(one.ts), "type": one.body.__struct_config__.tag} | _by(one.body) | event_record(one.body)
                    for one in events
                ],
            }
        )
        return
    common.out(common.clean(f"schedule {info.id}: {info.status}, {info.when}, agent {info.agent}"))
    common.out(common.clean(f"  input {common.to_json(info.input)}; overlap {info.overlap}, missed {info.missed}, queue {info.queue}"))
    if info.labels:
        common.out(common.clean(f"  labels of its runs: {labels_words(info.labels)}"))
    common.out(common.clean(f"  next tick {_at(info.next_tick, now)}; last run {info.last_run or '–'}"))
    for one in events:
        common.out(common.clean(f"{one.seq:>5}  {moment(iso(one.ts), now)}  {event_words(one.body)}"))


def _by(body: Any) -> dict[str, Any]:
    return {"by": body.by} if hasattr(body, "by") else {}


@command.command("next")
@click.argument("schedule_id", metavar="[ID]", required=False, shell_complete=_complete)
@click.option("--number", "-n", type=click.IntRange(min=1, max=10_000), default=5, show_default=True, metavar="N", help="How many ticks.")
@click.option("--after", metavar="T", help="Ticks after this time: 2h or 1d from now, or an ISO time. Default: now.")
@_times
@common.url_option
@common.json_option
def next_command(
    schedule_id: str | None,
    number: int,
    after: str | None,
    cron: str | None,
    tz: str | None,
    every: str | None,
    jitter: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """The next ticks of a schedule, or of an expression that you try out with --cron or --every."""
    if schedule_id is None:
        name, spec, now = "", Schedule(_when(cron, tz, every, jitter)).spec("any"), common.now_us()
    else:
        if cron is not None or every is not None or tz is not None or jitter is not None:
            raise InvalidInput("give the ID of a schedule, or an expression to try out: one of them")
        name, (spec, now) = schedule_id, _recorded(schedule_id, url)
    start = now if after is None else parse_future(after, now, "--after")
    ticks = next_ticks(name, spec, start, number)
    if as_json:
        for one in ticks:
            common.out_json({"tick": iso(micros_of(one.tick)), "local": one.local.isoformat(), "due": iso(micros_of(one.due))})
        return
    common.table(("local", "utc", "due"), [_tick_cells(one) for one in ticks])


def _recorded(schedule_id: str, url: str | None) -> tuple[Spec, int]:
    with common.existing_runs(url) as store:
        row = store.schedule(schedule_id)
        if row is None:
            raise no_such_schedule(schedule_id)
        return state_of(row).spec, common.now_at(store)


def _tick_cells(one: TickTime) -> tuple[str, str, str]:
    late_s = (one.due - one.tick).total_seconds()
    return f"{one.local:%a %Y-%m-%d %H:%M:%S %z}", f"{one.tick:%Y-%m-%dT%H:%M:%SZ}", "at once" if late_s == 0 else f"{late_s:.0f} s later"


# -- add --------------------------------------------------------------------------------------------------------------
@command.command("add")
@click.argument("target", metavar="AGENT")
@click.argument("pairs", metavar="[KEY=VALUE | KEY:=JSON]…", nargs=-1)
@_times
@click.option("--declared", is_flag=True, help="Take the schedule that the code of the agent declares. AGENT is FILE.py:NAME.")
@click.option("--id", "schedule_id", metavar="ID", help="The schedule's id. Default: the agent's name.")
@click.option("--input", "input_text", metavar="JSON", help='The arguments, as a JSON object. {"$tick": "%Y-%m-%d"} stands for the tick.')
@click.option("--overlap", type=click.Choice(get_args(Overlap)), default="skip", show_default=True, help="If the run before has not ended.")
@click.option(
    "--missed", type=click.Choice(get_args(Missed)), default="last", show_default=True, help="Which missed ticks are made up for."
)
@click.option("--limit", type=int, default=100, show_default=True, metavar="N", help="With --missed all: at most the last N.")
@click.option("--queue", metavar="Q", help='The queue of the runs. Default: the agent\'s, else "default".')
@click.option("--priority", type=int, default=0, metavar="N", help="In a queue, of one tenant's runs, the highest goes first.")
@click.option("--tenant", default="default", show_default=True)
@click.option("--budget-usd", metavar="X", help="Dollars that each run and its children may spend together.")
@click.option("--on-exceed", type=click.Choice(get_args(OnExceed)), help="With --budget-usd, when the budget is used up: pause, or fail.")
@common.label_option
@click.option("--replace", is_flag=True, help="Change the schedule if there is one with this id.")
@by_option("Who adds it.")
@common.url_option
@common.json_option
def add(
    target: str,
    pairs: tuple[str, ...],
    cron: str | None,
    tz: str | None,
    every: str | None,
    jitter: str | None,
    declared: bool,
    schedule_id: str | None,
    input_text: str | None,
    overlap: Overlap,
    missed: Missed,
    limit: int,
    queue: str | None,
    priority: int,
    tenant: str,
    budget_usd: str | None,
    on_exceed: OnExceed | None,
    labels: tuple[str, ...],
    replace: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Add a schedule of AGENT: its name, or FILE.py:NAME, whose code is then used to check the arguments.

    Example: perdure schedules add report 'date:={"$tick": "%Y-%m-%d"}' --cron '0 7 * * mon-fri' --tz Europe/Berlin
    """
    settings = common.settings_with(url=url)
    agent = _loaded(target)
    if declared:
        if agent is None or agent.scheduled is None:
            raise InvalidInput(f"--declared: {target} declares no schedule; name FILE.py:NAME of an agent with @agent(schedule=…)")
        if pairs or labels or input_text is not None or cron is not None or every is not None or schedule_id is not None:
            raise InvalidInput("--declared takes everything from the code: leave out the other options")
        name, spec = agent.scheduled
    else:
        args, given = arguments(pairs, input_text)
        if args:
            raise InvalidInput('--input: the arguments need their names: give an object, such as \'{"order": "o-7"}\'')
        schedule = Schedule(
            _when(cron, tz, every, jitter),
            id=schedule_id,
            input=given,
            overlap=overlap,
            missed=missed,
            limit=limit,
            queue=queue,
            priority=priority,
            tenant=tenant,
            budget=budget_of(None, budget_usd, on_exceed),
            labels=common.labels_of(labels),
        )
        spec = schedule.spec(target) if agent is None else agent.spec_of(schedule)
        name = schedule_id or spec.agent

    async def add(app: Perdure) -> ScheduleInfo:
        return await app.schedules.set(name, spec, by=speaker(by), replace=replace or declared, declared=declared)

    info = speak(settings, add, create=True)
    _told(info, f"schedule {info.id} of agent {info.agent}: {info.when}", as_json)


def _loaded(target: str) -> Any:
    """The agent, if the target names its code; None if it is the name of an agent."""
    if ":" not in target and "/" not in target and not target.endswith((".py", ".toml", ".json")):
        return None
    from perdure.cli.target import load_target

    return load_target(target).agent


def _told(info: ScheduleInfo, words: str, as_json: bool) -> None:
    if as_json:
        common.out_json(_record(info))
        return
    then = f"; the next tick: {iso(micros_of(info.next_tick))}" if info.next_tick is not None else ""
    common.out(common.clean(f"{words}{then}"))


# -- pause, resume, remove, run-now -----------------------------------------------------------------------------------
@command.command("pause")
@_schedule_argument
@_note_option
@by_option("Who asks.")
@common.url_option
@common.json_option
def pause(schedule_id: str, note: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Start no more ticks of a schedule. It stays paused until a person resumes it, also when workers are deployed."""

    async def act(app: Perdure) -> ScheduleInfo:
        return await app.schedules.pause(schedule_id, by=speaker(by), note=note)

    info = speak(common.settings_with(url=url), act)
    on = shell.command("schedules", "resume", schedule_id) + common.url_words(url)
    _told(info, f"schedule {schedule_id} is paused; let it go on: {on}", as_json)


@command.command("resume")
@_schedule_argument
@_note_option
@by_option("Who asks.")
@common.url_option
@common.json_option
def resume(schedule_id: str, note: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Go on with the next tick of a schedule that was paused. The ticks of the pause are not made up for."""

    async def act(app: Perdure) -> ScheduleInfo:
        return await app.schedules.resume(schedule_id, by=speaker(by), note=note)

    _told(speak(common.settings_with(url=url), act), f"schedule {schedule_id} is active", as_json)


@command.command("remove")
@_schedule_argument
@_note_option
@by_option("Who asks.")
@common.url_option
@common.json_option
def remove(schedule_id: str, note: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """End a schedule. Its journal and its runs stay. If code declares it, that same declaration does not bring it back."""

    async def act(app: Perdure) -> ScheduleInfo:
        return await app.schedules.remove(schedule_id, by=speaker(by), note=note)

    _told(speak(common.settings_with(url=url), act), f"schedule {schedule_id} is removed", as_json)


@command.command("run-now")
@_schedule_argument
@by_option("Who asks.")
@common.url_option
@common.json_option
def run_now(schedule_id: str, by: str | None, url: str | None, as_json: bool) -> None:
    """Start a run of a schedule now, beside its ticks, for a worker to drive. Prints its id."""

    async def act(app: Perdure) -> str:
        return await app.schedules.start_now(schedule_id, by=speaker(by))

    run_id = speak(common.settings_with(url=url), act)
    if as_json:
        common.out_json({"run_id": run_id, "schedule": schedule_id})
    else:
        common.out(run_id)
