"""`Model`: the method `answer` turns a request into an answer, and `ask` makes this a durable call.

To add a model, subclass `Model` and write `answer`. The complete answer is recorded with its cost. A resumed run reads
the recorded answer and does not ask again. If a request was cut off, it is made again, and the journal records that
the first attempt was lost.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from msgspec import ValidationError, structs, to_builtins

from perdure.core import codec
from perdure.core.events import OF_MODEL, Usage
from perdure.core.machine import current
from perdure.core.rate import Rate
from perdure.core.retry import PATIENT, Retry
from perdure.errors import Fatal, InvalidInput, NotEncodable
from perdure.models.messages import Answer, Message, Request, Tokens, ToolSpec, User, answer_of, check, encoded
from perdure.models.prices import Price, cost_of, is_priced, quick_cost_of
from perdure.tool.call import Call
from perdure.tool.spend import MOST

log = logging.getLogger("perdure.models")
Listener = Callable[[Call, str], None]
TIMEOUT_S = 600.0
MAX_NAME_CHARS = 200
_OURS = frozenset(("model", "messages", "input", "system", "instructions", "tools", "tool_choice", "stream", "max_tokens", "temperature"))


class Model(ABC):
    """A model that agents can ask. Subclass `Model` and write `answer`; `ask` makes the answers durable.

    `price`: the price of the model's tokens. Without it, the price comes from the list in the extra `prices`; if the
    model is not listed, or the extra is not installed, its tokens count as $0. `listener`: a function that gets the
    pieces of the answer's text while they arrive. It runs in the process that asks, and what it gets is not recorded.
    `options`: parameters that are passed to the provider unchanged.
    """

    provider = ""  # the provider's name in the list of prices

    def __init__(
        self,
        name: str,
        *,
        price: Price | None = None,
        timeout: float | timedelta = TIMEOUT_S,
        retry: Retry | None = None,
        rate: Rate | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        options: Mapping[str, Any] | None = None,
        listener: Listener | None = None,
    ) -> None:
        check_model_name(name)
        self.name = name
        self.price = price
        self.timeout_s = _seconds(timeout, name)
        self.retry = PATIENT if retry is None else retry
        self.rate = None if rate is None else structs.replace(rate, key=name) if rate.key is None else rate
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.options = dict(codec.decode(codec.encode(dict(options or {}))))
        if ours := sorted(_OURS & self.options.keys()):
            raise InvalidInput(
                f"model {name}: options={{{ours[0]!r}: …}} would replace what perdure sends; leave it out, or pass {ours[0]}= if there is such a parameter"
            )
        self.listener = listener
        self._price_unchecked = True

    @abstractmethod
    async def answer(self, request: Request, call: Call) -> Answer:
        """Ask the model once. Raise an exception if the answer is not complete.

        The exception is classified like an exception of a tool.
        """

    def ask(
        self,
        messages: str | Sequence[Message],
        *,
        system: str = "",
        tools: Sequence[ToolSpec] = (),
        choice: str | None = None,
        max_tokens: int | None = None,
    ) -> Coroutine[Any, Any, Answer]:
        """Ask the model, and await the answer.

        Inside an agent this is a durable call with a number. Outside of an agent the answer is not recorded.
        """
        said: tuple[Message, ...] = (User(messages),) if isinstance(messages, str) else tuple(messages)
        return self.ask_for(
            Request(self.name, said, system, tuple(tools), choice, max_tokens or self.max_tokens, self.temperature, options=self.options)
        )

    def ask_for(self, request: Request) -> Coroutine[Any, Any, Answer]:
        """Like `ask`, for a whole request."""
        said = request.messages
        check(said)
        machine = current()
        if machine is None:
            return self.answer(request, Call.outside())
        frame = to_builtins(structs.replace(request, messages=()))
        del frame["messages"]

        def question(packed: bytes) -> ModelQuestion:
            number, prompts = machine.calls, machine.prompts
            return ModelQuestion(self, request, packed, lambda answer: prompts.answered(number, answer.message))

        return machine.ask_model(question, frame, said)

    def say(self, call: Call, text: str) -> None:
        """Pass a piece of the answer to the listener.

        If the listener raises an exception, that is logged, and the listener is not called again.
        """
        if self.listener is not None and text:
            try:
                self.listener(call, text)
            except Exception:
                log.exception("model %s: its listener raised an exception and is not called again; the answer is still read", self.name)
                self.listener = None

    @property
    def is_priced(self) -> bool:
        """Is the price of the model known?"""
        return is_priced(self.provider, self.name, self.price)

    def say_if_unpriced(self) -> None:
        """If the price of the model is not known, warn once: a budget in dollars cannot limit this model."""
        if self._price_unchecked:
            self._price_unchecked = False
            if not self.is_priced:
                words = "model %s: its price is not known, so it counts as $0 and no budget in dollars limits it; give it price=Price(…), "
                log.warning(words + "or install perdure[prices]", self.name)

    def renamed(self, name: str) -> Self:
        """A model with the same settings and another name. Its price is unknown, or comes from the list of prices."""
        check_model_name(name)
        other = copy.copy(self)
        other.name, other.price, other._price_unchecked = name, None, True
        return other

    def identity(self) -> list[Any]:
        """The values that identify the model, the same for every request. They are a part of every pin."""
        return [type(self).__name__, self.name]

    def former_identity(self) -> list[Any]:
        """The identity of the model in perdure 0.1, if it was another one: there the route to the model was a part of it."""
        return self.identity()

    def pin(self) -> str:
        """16 hex digits: a digest of everything in the model that influences its answers.

        What only changes the route to the model, such as the base URL of a gateway, is no part of it.
        """
        return self._pin(self.identity())

    def former_pin(self) -> str:
        """The pin of this model in perdure 0.1."""
        return self._pin(self.former_identity())

    def _pin(self, identity: list[Any]) -> str:
        return codec.digest(codec.encode([identity, self.max_tokens, self.temperature, self.options]))[:16]

    def __repr__(self) -> str:
        return f"<model {self.name}>"


class ModelQuestion:
    """One request to a model, in the form in which a worker performs calls. It is like a Tool for only one request."""

    events = OF_MODEL
    effect = "idempotent"  # after a crash the model is asked again: that costs money, but changes nothing
    is_async = True
    isolate = False
    reconciler = None
    compensator = None
    approval = None
    key_window_s = 86_400.0
    heartbeat_timeout_s = None
    settle_s = None
    shows_key = True
    keyless = False

    def __init__(self, model: Model, request: Request, packed: bytes, heard: Callable[[Answer], None]) -> None:
        self.name = model.name
        self.model = model
        self.timeout_s = model.timeout_s
        self.retry = model.retry
        self.rate = model.rate
        self._request = request
        self._packed = packed
        self._heard = heard

    @property
    def estimate(self) -> Usage | None:
        """The amount to reserve in the budget: the cost of the longest answer. None if there is no max_tokens."""
        most = self._request.max_tokens
        if most is None:
            return None
        usd = quick_cost_of(self.model.provider, self.name, self.model.price, Tokens(output=most))
        return Usage(usd_micros=round(usd * 1_000_000), tokens_out=most, model=self.name)

    async def fn(self, request: Request, call: Call) -> Answer:
        asked: Any = self.model.answer(request, call)
        if not inspect.isawaitable(asked):
            raise Fatal(f"model {self.name}: its answer() is not async: write `async def answer(self, request, call)`")
        answer = await asked
        if not isinstance(answer, Answer):
            raise Fatal(f"model {self.name}: its answer() returned a {type(answer).__name__}; return Answer(text=…)")
        tokens = answer.tokens
        counted = {
            "tokens_in": _count(tokens.input),
            "tokens_out": _count(tokens.output),
            "tokens_cached": min(_count(tokens.cached), _count(tokens.input)),
        }
        call.spend(usd=cost_of(self.model.provider, self.name, self.model.price, tokens), model=self.name, **counted)
        self.model.say_if_unpriced()
        return answer

    def arguments(self, _: bytes) -> dict[str, Any]:
        return {"request": self._request}

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        return {**arguments, "call": call}

    def encode_result(self, value: Answer) -> bytes:
        whole = encoded(value)
        try:
            answer_of(whole)
        except ValidationError as error:  # a user's own model can return an answer that could not be read back
            raise NotEncodable(f"model {self.name}: its answer() returned an invalid Answer: {error}") from None
        return whole

    def decode_result(self, encoded_answer: bytes) -> Answer:
        answer = answer_of(encoded_answer)
        self._heard(answer)
        return answer

    def result_misfit(self, encoded_answer: bytes) -> str | None:
        """Why this JSON value is not an Answer; None if it is one."""
        try:
            answer_of(encoded_answer)
        except ValidationError as error:
            return str(error)
        return None

    def rebind(self, recorded: bytes) -> bytes | None:
        """The packed request if the recorded request has the same digest, else None.

        The recorded bytes may differ, because the same request can be packed in several ways.
        """
        return self._packed if codec.decode(recorded).get("digest") == codec.decode(self._packed)["digest"] else None

    def asks(self, _: bytes) -> bool:
        return False

    def pin(self) -> str:
        # The pin does not include the settings (max_tokens, temperature, options): every request contains them, and
        # two models with the same name may have different settings.
        return codec.digest(codec.encode(self.model.identity()))[:16]

    def compensation(self) -> None:
        return None


def check_model_name(name: object) -> None:
    """Raise InvalidInput if this cannot be the name of a model."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidInput(f"a model's name is 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.60}")


def _count(tokens: object) -> int:
    """The number of tokens that a model reported, limited to valid values. 0 if the value is not an int."""
    return min(max(tokens, 0), MOST) if isinstance(tokens, int) and not isinstance(tokens, bool) else 0


def _seconds(value: float | timedelta, name: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds) or not 0 < seconds <= 86_400:
        raise InvalidInput(f"model {name}: timeout={value!r:.60}: seconds or a timedelta, above 0 and at most a day")
    return float(seconds)
