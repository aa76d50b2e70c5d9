"""`ReAct`: a model, its tools, and the loop between them, as an agent.

    the model answers → the tools that it wants are called, in parallel → the model gets their results → …

The loop ends when the model answers without a tool use. Each answer and each call is durable, and a resume rebuilds
the conversation from the journal. Whatever the model answers, its provider must accept the conversation that follows
(threat T28). turns.py has the rules for this.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from perdure import shell
from perdure.agent import Agent, AgentFunction, BuiltAgent
from perdure.agents import frames
from perdure.agents.react.frames import RecordedFrames, RecordedKit, change
from perdure.agents.react.toolbox import Kit, NotCallable, Toolbox
from perdure.agents.react.turns import (
    ANSWER_TAKEN,
    CUT_OFF,
    FINAL_ANSWER,
    MAX_USES,
    MESSAGE_TOPIC,
    begun,
    edited,
    ended_meanwhile,
    failed,
    held_back,
    is_blank,
    not_called,
    problem,
    result,
    sound,
    spoken,
    use_ids,
)
from perdure.core import codec
from perdure.core.budget import Budget
from perdure.core.codec import Payload
from perdure.core.events import DecisionMade, Event, FrameChanged
from perdure.core.failures import clean
from perdure.core.loop_detector import Circles
from perdure.core.replay import Frontier
from perdure.core.state import RunState
from perdure.errors import BudgetExceeded, InvalidInput, ModelRefused, NoAnswer, OutputInvalid, ToolFailed, TurnsExceeded
from perdure.models.messages import Answer, Assistant, Message, ToolResult, ToolUse, User
from perdure.models.model import Model
from perdure.run import Run
from perdure.schedule import Cron, Every, Schedule

if TYPE_CHECKING:
    from perdure.agents.react.structured import Output

# How often the model may be asked again: after answers of the wrong type (in the whole run), and after empty or
# cut-off answers (in a row).
MAX_REASKS = 3
MOST_TURNS = 10_000
_REASON_CHARS = 160
_FEW_NAMES = 160  # bytes
# A conversation that has grown by this much takes a checkpoint. That is about 250,000 tokens: few runs come so far, and a
# resume of those that do reads and replays no more than that.
CHECKPOINT_BYTES = 1024 * 1024
_CHECKPOINTS = "perdure.react.checkpoints"  # a run that an older perdure has driven past the first one takes none
_SUMMARIZE = (
    "Summarize this conversation so far, for yourself: you will go on with the summary instead of these messages. Keep the task, what was "
    "decided and why, what was done with which result (ids, amounts, names), what failed, and what is left to do. Answer with the summary "
    "alone, and call no tool."
)
_SUMMARY = "[What has happened since then, in short:]"
_FORM = "react 1"  # a part of every version: change it when new code makes other calls from the same answers


class ReAct(BuiltAgent[..., Any]):
    """An agent that asks a model, calls the tools that the model wants, and sends the results to the model.

    The agent repeats this until the model answers without a tool use.

    The agent's arguments are a `prompt`, and a `history` if an older conversation (from `app.transcript(run_id)`) is
    continued. The agent's result is the model's last text, or a value of the type `output`. Signals on the topic
    "message" are passed to the model. Any change of the model, the tools or the instructions makes another version,
    unless you declare the version.
    """

    def __init__(
        self,
        name: str,
        *,
        model: Model,
        tools: Iterable[Any] = (),
        instructions: str = "",
        output: Any = None,
        max_turns: int = 50,
        budget: Budget | None = None,
        version: str | None = None,
        queue: str | None = None,
        circles: Circles | None = None,
        schedule: Schedule | Cron | Every | None = None,
        max_tokens: int | None = None,
        checkpoint_bytes: int | None = CHECKPOINT_BYTES,
        summarize: bool | str | Model = False,
    ) -> None:
        owner = f"ReAct {name}"
        if not isinstance(model, Model):
            raise InvalidInput(f"{owner}: model={codec.shown(model)} is not a Model; perdure.models has some, and Scripted([…]) for tests")
        if not isinstance(instructions, str):
            raise InvalidInput(f"{owner}: instructions={codec.shown(instructions)}: text")
        self.model = model
        self.instructions = instructions
        self.max_turns = _whole(owner, "max_turns", max_turns, MOST_TURNS)
        self.max_tokens = None if max_tokens is None else _whole(owner, "max_tokens", max_tokens, 1 << 31)
        self.checkpoint_bytes = None if checkpoint_bytes is None else _whole(owner, "checkpoint_bytes", checkpoint_bytes, 1 << 31)
        if not isinstance(summarize, bool | Model) and not (isinstance(summarize, str) and summarize.strip()):
            raise InvalidInput(f"{owner}: summarize={codec.shown(summarize)}: True, an instruction for the model, or another Model")
        if summarize and checkpoint_bytes is None:
            raise InvalidInput(f"{owner}: summarize= is a part of a checkpoint, and checkpoint_bytes=None says that it takes none")
        self.summarize = summarize
        self.output = None if output is None else _output(owner, output)
        self._toolbox = Toolbox(owner, tools, None if self.output is None else self.output.spec)
        self.digest = digest = self._digest(model.pin())  # the version, unless one is declared
        former = self._digest(model.former_pin())
        self.former_versions = (former,) if version is None and former != digest else ()
        options: dict[str, Any] = {"budget": budget, "queue": queue, "circles": circles, "schedule": schedule}

        fn = self._function()
        super().__init__(fn, name=name, version=digest if version is None else version, home=sys._getframe(1).f_globals, **options)

    def _digest(self, model_pin: str) -> str:
        decides = [_FORM, model_pin, self.instructions, self._toolbox.described, self.max_turns, self.max_tokens]
        if self.summarize or self.checkpoint_bytes != CHECKPOINT_BYTES:
            decides.append([self.checkpoint_bytes, self.summarize.pin() if isinstance(self.summarize, Model) else self.summarize])
        return codec.digest(codec.encode(decides))[:12]

    def _function(self) -> AgentFunction[..., Any]:
        async def converse(run: Run, prompt: str, history: list[Any] | None = None) -> Any:
            talk = _Talk(run, begun(prompt, history)) if run.restored is None else _Talk.restored(run)
            return await self._converse(run, talk)

        return converse

    def with_model(self, name: str) -> ReAct:
        """The same agent with another model of the same provider, for rehearsals: it keeps its version.

        The price of the other model comes from the list of prices: a `price=` of this model is not its price.
        """
        other = copy.copy(self)
        other.model = self.model.renamed(name)
        other.fn = other._function()
        return other

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        """The agents among the tools. A worker that drives this agent has to drive the runs of those agents too."""
        return self._toolbox.agents

    @property
    def description(self) -> str:
        """The description for a model that has this agent as a tool: the beginning of this agent's instructions."""
        first = self.instructions.strip().partition("\n\n")[0]
        return f"Ask the agent {self.name}" + (f", which was told: {clean(first, _REASON_CHARS)}" if first else "")

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments that another model passes to this agent: a prompt."""
        return {
            "type": "object",
            "properties": {"prompt": {"type": "string", "description": "Everything that it has to know: it sees nothing else."}},
            "required": ["prompt"],
            "additionalProperties": False,
        }

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of prompt and history. InvalidInput if providers would refuse the conversation."""
        encoded = super().bind(args, kwargs)
        begun(**codec.decode(encoded))
        return encoded

    def encode_result(self, value: Any) -> bytes:
        """Canonical JSON of an answer."""
        if isinstance(value, _Final):
            return value.encoded
        return codec.encode(value) if self.output is None else self.output.encode(value)

    def decode_result(self, encoded: bytes) -> Any:
        """The answer as text, or as a value of the type `output`."""
        return codec.decode(encoded) if self.output is None else self.output.decode(encoded)

    def result_misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value cannot be an answer of the agent; None if it fits the type `output`."""
        if self.output is None:
            return None if isinstance(codec.decode(encoded), str) else "an answer without output= is text"
        return self.output.misfit(encoded)

    def facts_of(self, code: CodeType, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """The turn of the conversation, how many messages it has, and the last one of them."""
        if code is not ReAct._converse.__code__ or "turn" not in variables:
            return {}
        messages = variables["talk"].messages
        return {"turn": f"{variables['turn']} of {self.max_turns}", "messages": len(messages), "last_message": messages[-1]}

    def frame_change(
        self, state: RunState, events: Sequence[Event], load: Callable[[Payload], bytes], *, by: str, note: str | None
    ) -> FrameChanged | None:
        return change(self.version, state, events, load, by=by, note=note)

    def check_open_calls(self, frontier: Frontier, state: RunState, load: Callable[[Payload], bytes]) -> None:
        frames.check_open_calls(self.name, self.version, frontier, state, load)

    async def _converse(self, run: Run, talk: _Talk) -> Any:
        kit_now = await self._toolbox.opened(run)
        recorded = RecordedFrames(kit_now)
        reasks = _Reasks(self.name, talk.reasked)
        for turn in count(talk.turn):
            # A turn that was recorded with an old frame did not end its life.
            if (
                self.checkpoint_bytes is not None
                and recorded.current() is None
                and not talk.held  # the next life would not know these calls
                and talk.has_outgrown(self.checkpoint_bytes)
                and run.patched(_CHECKPOINTS)
            ):
                if self.summarize:
                    await self._summarize(talk, kit_now)
                await run.checkpoint(talk.state(turn, reasks.counts))
            talk.hear()
            # The frame is that of this code, unless this turn was recorded before a person changed the frame.
            old = recorded.current()
            if old is None and turn > self.max_turns:
                break
            if old is None:
                answer = await self.model.ask(talk.messages, system=self.instructions, tools=kit_now.specs, max_tokens=self.max_tokens)
            else:
                answer = await old.ask(self.model, talk.messages)
            # The model may have answered after the frame was changed: then its tool uses are those of this code.
            old = recorded.current()
            kit = kit_now if old is None else old.kit
            if answer.stop == "refusal":
                raise ModelRefused(f"model {self.model.name} will not answer this: {answer.text[:500] or 'it does not say why'}")
            if is_blank(answer):
                talk.tell(reasks.bad(answer))
                continue
            said = talk.add(answer)
            if answer.stop == "length":
                talk.send_back(said, reasks.bad(answer))
                continue
            reasks.reset()
            if old is not None and self.output is None and [use.name for use in said.uses] == [FINAL_ANSWER] and FINAL_ANSWER in kit.names:
                talk.answer([ToolResult(said.uses[0].id, FINAL_ANSWER, ANSWER_TAKEN)])
                talk.withdraw()
                talk.hear()  # only a message of a person made the run go on after its answer
            elif self._takes_typed(kit) and (not said.uses or [use.name for use in said.uses] == [FINAL_ANSWER]):
                final = self._typed(talk, said, reasks)
                if final is not None:
                    talk.withdraw()
                    if not talk.hear():
                        return final
            elif not said.uses:
                talk.withdraw()
                if not talk.hear():
                    return said.text
            elif old is None and turn >= self.max_turns:
                break  # no turn is left in which the model could see the results
            else:
                talk.answer(await _use(talk, kit, answer.uses, said))
        raise TurnsExceeded(
            f"agent {self.name}: no answer after {self.max_turns} turns; if it needs more: ReAct({self.name!r}, …, max_turns={2 * self.max_turns}), "
            f"then {shell.command('retry', run.id)} goes on from here (or a new run with history=await app.transcript({run.id!r}))"
        )

    def _takes_typed(self, kit: Kit | RecordedKit) -> bool:
        return self.output is not None and FINAL_ANSWER in kit.names

    async def _summarize(self, talk: _Talk, kit: Kit) -> None:
        """Replace the older messages by a summary that a model writes. Without a summary, the conversation stays as it is."""
        old = talk.older()
        model = self.summarize if isinstance(self.summarize, Model) else self.model
        wanted = self.summarize if isinstance(self.summarize, str) else _SUMMARIZE
        answer = await model.ask([*old, User(wanted)], system=self.instructions, tools=kit.specs, max_tokens=self.max_tokens)
        if answer.stop == "end" and answer.text.strip():
            talk.replace(len(old), answer.text)

    def _typed(self, talk: _Talk, said: Assistant, reasks: _Reasks) -> _Final | None:
        """The answer. None if the answer does not have the type `output`; then the model gets a message about that."""
        from perdure.agents.react.structured import Unfit

        assert self.output is not None
        try:
            final = self.output.of_arguments(said.uses[0].arguments) if said.uses else self.output.of_text(said.text)
        except Unfit as unfit:
            talk.send_back(said, reasks.unfit(str(unfit)))
            return None
        if said.uses:
            talk.answer([ToolResult(said.uses[0].id, FINAL_ANSWER, ANSWER_TAKEN)])
        return _Final(final)


class _Final(NamedTuple):
    """An answer of the type `output`, as it is recorded."""

    encoded: bytes


class _Talk:
    """The conversation of one run.

    Messages are only added and never changed. So the journal needs to contain each message only once.
    """

    def __init__(self, run: Run, messages: list[Message]) -> None:
        self.run = run
        self.messages = messages
        self.turn = 1  # the turn with which this life begins
        self.reasked = (0, 0)
        self.has_named = False  # True: the journal already contains the names of the available tools
        self.held: list[_Made] = []  # calls that wait for approvals: the model's next answer keeps or withdraws them
        self._to_tell: list[User] = []
        self._prompt = next((message.text for message in messages if isinstance(message, User)), "")
        self._ids = use_ids(messages)
        self._begun_bytes = self._bytes = _size(messages)
        self._measured = len(messages)

    @classmethod
    def restored(cls, run: Run) -> _Talk:
        """The conversation of the last checkpoint."""
        state = run.restored
        talk = cls(run, msgspec.convert(state["messages"], list[Message]))
        talk.turn, talk.reasked, talk._prompt = state["turn"], tuple(state["reasked"]), state["prompt"]
        return talk

    def state(self, turn: int, reasked: tuple[int, int]) -> dict[str, Any]:
        return {"messages": msgspec.to_builtins(self.messages), "turn": turn, "reasked": list(reasked), "prompt": self._prompt}

    def has_outgrown(self, limit: int) -> bool:
        """Is it time for a checkpoint? It stores the whole conversation, so the conversation must have doubled since the last one."""
        self._bytes += _size(self.messages[self._measured :])
        self._measured = len(self.messages)
        return self._bytes - self._begun_bytes > max(limit, self._begun_bytes)

    def older(self) -> list[Message]:
        """The messages that a summary replaces: about three quarters. A tool use and its results stay together."""
        sizes = [_size([message]) for message in self.messages]
        left, place = sum(sizes) // 4, len(sizes)
        while place > 0 and left > 0:
            place -= 1
            left -= sizes[place]
        while place < len(self.messages) and not isinstance(self.messages[place], Assistant):
            place += 1
        return self.messages[:place]

    def replace(self, count: int, summary: str) -> None:
        """Replace the first messages by this summary. The first prompt stays, word for word."""
        self.messages = [User(f"{self._prompt}\n\n{_SUMMARY}\n{summary}"), *self.messages[count:]]

    def hear(self) -> bool:
        """Add the messages that people have sent since the last call of this method. False: there were none."""
        heard = [said for said in map(spoken, self.run.receive_all(MESSAGE_TOPIC)) if said is not None]
        heard, self._to_tell = [*self._to_tell, *heard], []
        self.messages.extend(heard)
        return bool(heard)

    def take_held(self, name: str, args: bytes) -> _Made | None:
        """The call with this tool and these arguments that is held, if there is one: the model wants it again."""
        for one in self.held:
            if (one.use.name, one.args) == (name, args):
                self.held.remove(one)
                return one
        return None

    def withdraw(self) -> None:
        """The model has answered, and does not want the calls that are still held."""
        for one in self.held:
            if not one.outcome.done():
                one.outcome.cancel()
            elif not one.outcome.cancelled() and one.outcome.exception() is None:
                # It has ended meanwhile: a person rejected it, it has expired, or it was made before the run was reopened.
                self._to_tell.append(ended_meanwhile(one.outcome.result()))
        self.held = []

    def add(self, answer: Answer) -> Assistant:
        """Add the model's answer in a valid form (`sound`). The results of its tool uses must be added next."""
        said = sound(answer, self._ids)
        self.messages.append(said)
        return said

    def answer(self, results: Sequence[ToolResult]) -> None:
        self.messages.extend(results)

    def tell(self, text: str) -> None:
        self.messages.append(User(text))

    def send_back(self, said: Assistant, why: str) -> None:
        """Tell the model why its answer was not used: as the results of its tool uses, or as a message."""
        if said.uses:
            self.answer([problem(use, why) for use in said.uses])
        else:
            self.tell(why)


class _Reasks:
    """Counts how often a model was asked again. After too many times the run fails."""

    def __init__(self, name: str, counts: tuple[int, int] = (0, 0)) -> None:
        self._name = name
        self._bad, self._unfit = counts

    @property
    def counts(self) -> tuple[int, int]:
        return self._bad, self._unfit

    def reset(self) -> None:
        self._bad = 0

    def bad(self, answer: Answer) -> str:
        """The message to the model about an answer that is empty or cut off.

        NoAnswer if there were too many such answers in a row.
        """
        cut = answer.stop == "length"
        if self._bad == MAX_REASKS:
            what = "was cut off at its limit of tokens; raise max_tokens" if cut else "was empty"
            raise NoAnswer(f"agent {self._name}: the model was asked {MAX_REASKS + 1} times in a row, and its answer {what}")
        self._bad += 1
        return CUT_OFF if cut else "Your last answer was empty. Please answer."

    def unfit(self, why: str) -> str:
        """The message to the model about an answer of the wrong type. OutputInvalid if there were too many of them."""
        if self._unfit == MAX_REASKS:
            raise OutputInvalid(f"agent {self._name}: {MAX_REASKS + 1} answers were not of the type that is wanted; of the last one: {why}")
        self._unfit += 1
        return f"This is not the answer that is wanted: {why}"


class _Made:
    """A call that the model wants, or why it was not made. `args` is set while the call is held."""

    __slots__ = ("args", "number", "outcome", "use")

    def __init__(self, use: ToolUse, number: int, outcome: Coroutine[Any, Any, ToolResult]) -> None:
        self.use = use  # with the name that the model gave
        self.number = number  # 0: no call was made
        self.outcome = asyncio.ensure_future(outcome)
        self.args = b""


async def _use(talk: _Talk, kit: Kit | RecordedKit, wanted: Sequence[ToolUse], said: Assistant) -> list[ToolResult]:
    """Call the tools that the model wants, in parallel, and wait for all calls.

    `wanted`: the tool uses with the names that the model gave. In `said` the names are valid for providers.

    If a person sends a message while calls wait for approvals, these calls are held, and the model is asked before they
    begin. If the model wants the same call again, it is the same call, with the same approval. Otherwise it is withdrawn.
    """
    run = talk.run
    chosen: list[str | None] = []
    made: list[_Made] = []
    for place, (asked, use) in enumerate(zip(wanted, said.uses, strict=True)):
        why = f"{MAX_USES} tools in one answer are the most; this is one too many" if place >= MAX_USES else None
        if asked.name == FINAL_ANSWER and FINAL_ANSWER in kit.names:
            why = "give the final answer alone, once you have seen what came of the others"
        if why is None:
            try:
                again = talk.take_held(asked.name, kit.args(asked)) if talk.held else None
                if again is None:
                    call = kit.call(asked)
                    made.append(_Made(asked, run.calls, _observe(run, kit, use, run.calls, call)))
                else:
                    run.keep(again.number)
                    made.append(again)
                chosen.append(asked.name)
                continue
            except NotCallable as refusal:
                why = str(refusal)
        made.append(_Made(asked, 0, _said(not_called(use, why))))
        chosen.append(None)
    talk.withdraw()
    _decide(talk, kit, chosen, said)
    await _until_done_or_held(run, made)
    for one in made:
        if one.outcome.done() and (error := one.outcome.exception()) is not None:
            raise error
    talk.held = [one for one in made if not one.outcome.done()]
    for one in talk.held:
        one.args = run.arguments_of(one.number)
    return [
        structs.replace(one.outcome.result(), id=use.id, name=use.name) if one.outcome.done() else held_back(use)
        for one, use in zip(made, said.uses, strict=True)
    ]


async def _until_done_or_held(run: Run, made: Sequence[_Made]) -> None:
    """Wait for all calls: if one call fails, the other calls must not be abandoned.

    After a message of a person, wait only for the calls that cannot be held: they have begun, or need no approval.
    """
    everything: asyncio.Future[Any] = asyncio.gather(*(one.outcome for one in made), return_exceptions=True)
    message: asyncio.Future[Any] = run.arrival(MESSAGE_TOPIC)
    try:
        await asyncio.wait([everything, message], return_when=asyncio.FIRST_COMPLETED)
    finally:
        message.cancel()
    holds = {one.number: run.hold(one.number) for one in made if not one.outcome.done()}
    while waiting := [one for one in made if not one.outcome.done() and not holds[one.number].done()]:
        ends: list[asyncio.Future[Any]] = [*(one.outcome for one in waiting), *(holds[one.number] for one in waiting)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


async def _observe(run: Run, kit: Kit | RecordedKit, use: ToolUse, number: int, call: Coroutine[Any, Any, Any]) -> ToolResult:
    told = await _outcome(kit, use, call)
    edit = run.edit_of(number)
    return told if edit is None else edited(told, edit.by, edit.before, edit.after)


async def _outcome(kit: Kit | RecordedKit, use: ToolUse, call: Coroutine[Any, Any, Any]) -> ToolResult:
    try:
        value = await call
    except BudgetExceeded:
        raise  # the model can do nothing about an exceeded budget
    except ToolFailed as error:
        return failed(use, error, kit.effect(use.name))
    except InvalidInput as refusal:
        return not_called(use, str(refusal))
    encode = kit.encode(use.name)
    return result(use, codec.encode(value) if encode is None else encode(value))


async def _said(told: ToolResult) -> ToolResult:
    return told


def _decide(talk: _Talk, kit: Kit | RecordedKit, chosen: list[str | None], said: Assistant) -> None:
    """Record which tools the model has chosen, in the order of its tool uses. null: this use could not be called.

    The record has no ids and no numbers: the loop detector compares choices, and equal choices must look equal.
    """
    while chosen and chosen[-1] is None:
        chosen.pop()
    names = codec.encode(list(kit.names))
    # A long list of names is recorded only once per run. If it were recorded with every choice, it would need more
    # space than the conversation.
    among = None if talk.has_named and len(names) > _FEW_NAMES else codec.pack(names, codec.MAX_BYTES)[0]
    talk.has_named = True
    reason = clean(said.text.strip(), _REASON_CHARS) or None
    talk.run.record(DecisionMade(codec.pack(codec.encode(chosen), codec.MAX_BYTES)[0], among, reason))


def _size(messages: Sequence[Message]) -> int:
    return sum(len(codec.encode(msgspec.to_builtins(message))) for message in messages)


def _whole(owner: str, what: str, number: int, most: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise InvalidInput(f"{owner}: {what}={codec.shown(number)}: a whole number from 1 to {most:,}")
    return number


def _output(owner: str, wanted: Any) -> Output:
    from perdure.agents.react.structured import Output  # imported only here, because it may import pydantic

    return Output(owner, wanted)
