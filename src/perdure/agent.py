"""The `@agent` decorator, and Agent: the name, version, arguments and result of an agent, and machines for its runs."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import CodeType
from typing import Any, Concatenate, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, cast, overload

from perdure import shell
from perdure.core import codec, identity
from perdure.core.budget import Budget, limits_of
from perdure.core.codec import Payload
from perdure.core.events import Event, FrameChanged, RunAdopted, RunCreated
from perdure.core.history import History
from perdure.core.loop_detector import Circles
from perdure.core.machine import CallTool, Facts, Machine, current
from perdure.core.replay import Frontier, replay
from perdure.core.schedule import Spec, check_schedule_id
from perdure.core.state import RunState, fold
from perdure.errors import Conflict, Diverged, InvalidInput, NotAllowedInAgent
from perdure.interrupts import is_interrupt
from perdure.run import Run
from perdure.schedule import Cron, Declared, Every, Schedule, schedule_of
from perdure.tool.describe import argument_schema, documented
from perdure.tool.signature import EMPTY, Signature, resolve

P = ParamSpec("P")
R = TypeVar("R")
MAX_DEPTH = 30  # how many ancestors a run may have
Load = Callable[[Payload], bytes]  # returns the JSON of a payload, from the event or from a blob
AgentFunction = Callable[Concatenate[Run, P], Coroutine[Any, Any, R]]


class AgentInput(NamedTuple):
    """An agent and the arguments of one run, made by `agent.input(…)`.

    Example: `app.start(support.input(id=7), id="run-7")`.
    """

    agent: Agent[Any, Any]
    encoded: bytes  # canonical JSON of the arguments


class Agent(Generic[P, R]):
    """An agent, made by `@agent`: an app or a worker starts, drives and resumes its runs.

    An agent has a `name`, a `version`, a `budget`, `circles` and a `queue`, as declared. If an agent calls another
    agent, the call starts a child run.
    """

    # Versions that earlier releases of perdure gave to the very same code: runs of them go on with it, too.
    former_versions: tuple[str, ...] = ()

    def __init__(
        self,
        fn: AgentFunction[P, R],
        *,
        name: str | None = None,
        version: str | None = None,
        budget: Budget | None = None,
        circles: Circles | None = None,
        queue: str | None = None,
        schedule: Schedule | Cron | Every | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        label = getattr(fn, "__qualname__", repr(fn))
        if not inspect.iscoroutinefunction(fn):
            raise InvalidInput(
                f"agent {label}: an agent is a coroutine function: write `async def {getattr(fn, '__name__', 'name')}(run: Run, …)`"
            )
        _check_first_parameter(label, fn, names or {})
        self.fn = fn
        self.name = identity.check_id(fn.__name__ if name is None else name, "the agent name")
        self._signature = Signature(f"agent {self.name}", fn, names or {}, skip=1)
        self.version = source_digest(fn) if version is None else identity.check_id(version, f"agent {self.name}: the version")
        self.budget = limits_of(budget, f"agent {self.name}: budget=")
        self.circles = circles
        self.queue = None if queue is None else identity.check_id(queue, f"agent {self.name}: the queue")
        self._check_limits()
        self._schedule = None if schedule is None else schedule_of(schedule)
        self.scheduled  # noqa: B018 (an input that does not fit is an error at the declaration)
        self.__name__, self.__qualname__, self.__module__, self.__doc__ = fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__

    def _check_limits(self) -> None:
        if self.circles is not None and not isinstance(self.circles, Circles):
            raise InvalidInput(f"agent {self.name}: circles={codec.shown(self.circles)} is not a Circles(repeats=…)")

    @property
    def scheduled(self) -> Declared | None:
        """The schedule that the code declares: workers that serve the agent register it."""
        if self._schedule is None:
            return None
        schedule_id = check_schedule_id(self.name) if self._schedule.id is None else self._schedule.id
        return Declared(schedule_id, self.spec_of(self._schedule))

    def spec_of(self, schedule: Schedule) -> Spec:
        """What is recorded about a schedule of this agent. InvalidInput if its input does not fit."""
        return schedule.spec(self.name, queue=self.queue, target=self.target, bind=lambda given: self.bind((), given))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Start a child run inside another agent. To get the child's result, await the returned coroutine.

        The number of the child is fixed when this returns, before the await. The coroutine raises ChildFailed if the
        child failed or was cancelled. Outside of an agent this raises NotAllowedInAgent: use `app.start` or `app.run`.
        """
        machine = current()
        if machine is None:
            raise NotAllowedInAgent(
                f"agent {self.name} cannot be called directly: start it with app.start({self.name}, …) or app.run({self.name}, …)"
            )
        if machine.facts.depth >= MAX_DEPTH:
            raise InvalidInput(f"agent {self.name}: the run has {MAX_DEPTH} ancestors, the limit; does an agent call itself without end?")
        return machine.start_child(self, self.bind(args, kwargs))

    def input(self, /, *args: P.args, **kwargs: P.kwargs) -> AgentInput:
        """The arguments of one run, for `app.start` and `app.run`.

        Use this if an argument of the agent has the same name as an option of `app.start`, such as `id`.
        """
        return AgentInput(self, self.bind(args, kwargs))

    @property
    def description(self) -> str:
        """The agent's docstring without its sections. A model that has the agent as a tool reads this text."""
        return documented(self.fn)[0]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments without the Run, for models."""
        return argument_schema(self._signature.parameters, documented(self.fn)[1])

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names of the agent's parameters, without the Run."""
        return frozenset(list(inspect.signature(self.fn).parameters)[1:])

    @property
    def takes(self) -> list[str]:
        """The names of the agent's parameters, without the Run, in order."""
        return self._signature.names

    @property
    def takes_secrets(self) -> dict[str, bool]:
        """The parameters that take a secret; True: the parameter has a default."""
        return self._signature.secrets_with_default

    def misfits(self, given: Mapping[str, Any], later: Collection[str]) -> list[str]:
        """All problems with these named arguments. For the names in `later`, the values are not known yet."""
        return self._signature.misfits(given, later)

    def rebind(self, encoded: bytes) -> bytes | None:
        """The recorded arguments in the form that the current signature gives them; None if they do not fit."""
        try:
            return self._signature.rebind(encoded)
        except InvalidInput:
            return None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the agent's named arguments. InvalidInput names the parameter that is wrong."""
        return self._signature.bind(args, kwargs)

    def with_secrets(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that `bind` has made, with a Secret for each reference: to start the agent with them."""
        return self._signature.with_secrets(bound)

    def encode_result(self, value: Any) -> bytes:
        """Canonical JSON of what the agent returned. NotEncodable says why the value cannot be encoded."""
        converter = self._signature.result_converter
        return codec.encode(value) if converter is None else converter.encode(value)

    def decode_result(self, encoded: bytes) -> R:
        """The result in the type of the return annotation, or as plain JSON if that type cannot be rebuilt."""
        converter = self._signature.result_converter
        return cast(R, codec.decode(encoded) if converter is None else converter.decode(encoded))

    def result_misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value cannot be a result of the agent; None if it fits the return annotation."""
        return self._signature.result_misfit(encoded)

    @property
    def home(self) -> str:
        """The module that declares the agent."""
        return self.fn.__module__

    @property
    def target(self) -> str | None:
        """`FILE:NAME`, to load the agent again. None if its function is not at the top level of a file."""
        path = os.path.abspath(self.fn.__code__.co_filename)
        return f"{path}:{self.fn.__name__}" if "." not in self.fn.__qualname__ and os.path.isfile(path) else None

    def machine(self, facts: Facts, encoded_input: bytes, max_steps: int) -> Machine:
        """A new machine for one run of this agent."""
        arguments = self._signature.arguments(encoded_input)
        fn: Callable[..., Coroutine[Any, Any, Any]] = self.fn
        return Machine(facts, lambda machine: fn(Run(machine), **arguments), max_steps, self.encode_result, is_interrupt)

    def input_misfit(self, created: RunCreated, load: Load) -> str | None:
        """Why the input of this run does not fit this code; None if it fits."""
        try:
            self._signature.arguments(self._input_of(created, load))
        except InvalidInput as error:
            return str(error)
        return None

    def _input_of(self, created: RunCreated, load: Load) -> bytes:
        encoded = load(created.input)
        # If the run was started without the code, its arguments are checked and converted here, as a start does it.
        return self.bind((), codec.decode(encoded)) if created.by_name else encoded

    def machine_of(self, state: RunState, load: Load, max_steps: int) -> Machine:
        """A new machine for a recorded run, with the same facts and input. The caller still has to replay the run."""
        created = state.created
        assert created is not None
        frames = tuple((one.after, load(one.frame)) for one in state.frames)
        facts = Facts(
            created.rehearses or created.run_id,
            created.tenant,
            created.actor,
            created.agent,
            state.version,
            created.parent,
            created.depth,
            created.forked_from or "",
            frames,
            created.labels,
            created.tick,
        )
        try:
            return self.machine(facts, self._input_of(created, load), max_steps)
        except InvalidInput as misfit:
            if not _is_first_look(state, created):
                raise  # the input did fit: the code of this version has changed since
            # The run fails with this error as soon as it begins, before any code of the agent runs.
            why = (
                f"the input of the run does not fit agent {self.name} in version {state.version}: {misfit}; start another run with arguments "
                "that fit, or retry this one with code that takes these"
            )
            return Machine(facts, lambda _: _refuse_input(why), max_steps, self.encode_result, is_interrupt)

    def replayed(self, state: RunState, events: Sequence[Event], load: Load, max_steps: int, past: History | None = None) -> Frontier:
        """Replay the journal of the run `state` with this code. Nothing is performed or recorded. `past`: as for `replay`.

        Raises Diverged if the code asks for other calls than the journal has.
        """
        machine = self.machine_of(state, load, max_steps)
        try:
            return replay(machine, events, load, past=past)
        finally:
            machine.close()

    def adoption(
        self, state: RunState, events: Sequence[Event], load: Load, max_steps: int, *, by: str, note: str | None
    ) -> RunAdopted | FrameChanged:
        """The event that lets this code go on with a run of another version. Nothing is recorded.

        Raises Diverged if this code asks for other calls than the journal has, and Conflict if the input, a step that has
        begun or an open call of the run is in the way.
        """
        assert state.created is not None
        if (misfit := self.input_misfit(state.created, load)) is not None:
            raise Conflict(
                f"run {state.created.run_id} cannot go on with version {self.version} of agent {self.name}: its input does not fit: {misfit}",
                hint="let the new version take the arguments that the run has; a new parameter needs a default",
            )
        adopted = RunAdopted(self.version, by, note)
        body: RunAdopted | FrameChanged = adopted
        try:
            frontier, after = self._replayed_with(adopted, state, events, load, max_steps)
        except Diverged:
            changed = self.frame_change(state, events, load, by=by, note=note)
            if changed is None:
                raise
            body = changed
            frontier, after = self._replayed_with(changed, state, events, load, max_steps)
        if after.frames:
            # What was recorded with an old frame is not compared with this code. So its open calls have to be checked.
            self.check_open_calls(frontier, after, load)
        _check_approved_arguments(self, frontier, after, load)
        return body

    def _replayed_with(
        self, body: RunAdopted | FrameChanged, state: RunState, events: Sequence[Event], load: Load, max_steps: int
    ) -> tuple[Frontier, RunState]:
        last = events[-1]
        whole = [*events, Event(last.seq + 1, "0" * 32, last.ts, last.epoch, None, last.seq, body)]
        after = fold(whole)
        return self.replayed(after, whole, load, max_steps), after

    def frame_change(self, state: RunState, events: Sequence[Event], load: Load, *, by: str, note: str | None) -> FrameChanged | None:
        """The event after which the run goes on with the frame of this code. None: runs of this agent have no frame."""
        return None

    def check_open_calls(self, frontier: Frontier, state: RunState, load: Load) -> None:
        """Raise Conflict if an open call of the run cannot go on with this code, after its frame was changed."""

    def with_model(self, name: str) -> Agent[P, R]:
        """The same agent with another model. Raises InvalidInput if the agent is not built with a model."""
        raise InvalidInput(f"agent {self.name} is not a ReAct agent, so that its model cannot be set to {name}; change its code instead")

    def facts_of(self, code: CodeType, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Facts for a person about a frame of perdure itself, whose source lines `perdure inspect` does not show.

        Agents that are built from parts have such facts: the turn of a conversation, the step of a plan.
        """
        return {}

    def __repr__(self) -> str:
        return f"<agent {self.name}@{self.version}>"


def _check_approved_arguments(agent: Agent[Any, Any], frontier: Frontier, state: RunState, load: Load) -> None:
    """Conflict if an open call needs an approval, and this code would make it with other arguments than people are asked about."""
    for number, call in sorted(state.open.items()):
        asked = frontier.calls.get(number)
        if call.approval is None or call.begun or call.args is None or not isinstance(asked, CallTool):
            continue
        recorded = load(call.args)
        if asked.tool.rebind(recorded) != recorded:
            assert state.created is not None
            run_id = state.created.run_id
            raise Conflict(
                f"run {run_id} cannot go on with version {agent.version} of agent {agent.name} yet: its call {number} ({call.tool}) waits for an "
                "approval, and this code would make it with other arguments than those in question",
                hint=f"let it end first, with the code of version {state.began_with} (what it waits for: {shell.command('why', run_id)})",
            )


class BuiltAgent(Agent[P, R]):
    """An agent that is built from parts, such as a plan, and not from a function of the user.

    `home`: the globals of the module that built the agent.
    """

    def __init__(self, fn: AgentFunction[P, R], *, name: str, version: str, home: Mapping[str, Any], **options: Any) -> None:
        self._home = home
        super().__init__(fn, name=name, version=version, **options)

    @property
    def home(self) -> str:
        return str(self._home.get("__name__", ""))

    @property
    def target(self) -> str | None:
        """`FILE:NAME`, to load the agent again. None if the agent has no name in its module."""
        path = self._home.get("__file__")
        name = next((name for name, value in list(self._home.items()) if value is self), None)
        return None if name is None or not isinstance(path, str) or not os.path.isfile(path) else f"{os.path.abspath(path)}:{name}"


def _is_first_look(state: RunState, created: RunCreated) -> bool:
    """Does code of the run's version see the input of the run for the first time?

    A run that was started by name may be released once before its agent begins, for the budget that its code declares.
    """
    if created.by_name:
        return state.epoch == 1 or (state.epoch == 2 and not state.numbers and not state.timers)
    return not created.version and state.epoch == 1


async def _refuse_input(why: str) -> NoReturn:
    raise InvalidInput(why)


def _check_first_parameter(label: str, fn: Callable[..., Any], names: Mapping[str, Any]) -> None:
    """Raise InvalidInput if the first parameter is certainly not meant for the Run.

    Without this check, that parameter would silently receive the Run.
    """
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    if first is None:
        found = "it has none"
    elif first.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        found = f"{first.name} is only given by name"
    else:
        annotation = resolve(first.annotation, fn, names)
        # A string that cannot be resolved may be an alias of Run that only the type checker knows.
        if isinstance(annotation, str) or annotation in (Run, Any, object, EMPTY) or Run in typing.get_args(annotation):
            return
        found = f"{first.name} is annotated {inspect.formatannotation(annotation)}"
    raise InvalidInput(f"agent {label}: its first parameter receives its Run, but {found}; write `async def {fn.__name__}(run: Run, …)`")


def source_digest(fn: Callable[..., Any]) -> str:
    """The default version: a digest of the agent's source, or of its bytecode if there is no source.

    The digest includes strings, numbers and bytes in the closure of the function: they change what the agent does.
    """
    try:
        text = inspect.getsource(fn).encode()
    except (OSError, TypeError):
        text = fn.__code__.co_code
    enclosed = [(name, _cell(cell)) for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)]
    plain = [(name, value) for name, value in enclosed if isinstance(value, (str, int, float, bool, bytes, type(None)))]
    return hashlib.sha256(text + (repr(plain).encode("utf-8", "surrogatepass") if plain else b"")).hexdigest()[:12]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell, such as the agent's own name: the decorator runs before that assignment
        return ...


@overload
def agent(fn: AgentFunction[P, R], /) -> Agent[P, R]: ...
@overload
def agent(
    *,
    name: str | None = None,
    version: str | None = None,
    budget: Budget | None = None,
    circles: Circles | None = None,
    queue: str | None = None,
    schedule: Schedule | Cron | Every | None = None,
) -> Callable[[AgentFunction[P, R]], Agent[P, R]]: ...
def agent(fn: Any = None, /, **options: Any) -> Any:
    """Declare an agent: `@agent` or `@agent(version="1", …)` on an `async def` whose first parameter is its `Run`.

    Without `name`, the agent has the name of the function. A run keeps the `version` of the worker that
    begins it. Without `version`, the version is a digest of the function's source, so each edit of the source is a new
    version. `budget` is what each run and
    its children may use together. `circles` stops a run that repeats the same calls. `queue` is the queue of the
    agent's runs; the start of a run may name another queue. `schedule` starts runs at given times: Cron(…), Every(…)
    or Schedule(…).
    """
    if fn is not None:
        return Agent(fn, names=sys._getframe(1).f_locals)
    unknown = options.keys() - {"name", "version", "budget", "circles", "queue", "schedule"}
    if unknown:
        raise InvalidInput(f"@agent has no option {min(unknown)}; its options are name, version, budget, circles, queue, schedule")

    def declare(fn: Any) -> Agent[Any, Any]:
        return Agent(fn, **options, names=sys._getframe(1).f_locals)

    return declare
