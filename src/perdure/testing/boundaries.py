"""The boundaries of a run: the points at which a process may die, and leaves something else behind than a moment before.

Their names are one vocabulary for `perdure crashtest`, `crash_matrix` and `run_until`:

    before_tool_result_persisted   the tool has answered, and the commit that says so has not been made
    after_tool_result_persisted    that commit is durable, and the process has not heard of it
    before_tool_effect             the intent is durable, and the function has not been called
    after_tool_effect              the function has returned, and nobody but the process knows what

What can be persisted is one of WHAT; in the place of `tool_effect` stands `model_effect` for a question to a model. Several things that
share a commit are one point in time with several names.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import Lock
from typing import Any, Literal

from msgspec import Struct

from perdure.core.events import OF_MODEL, AnyBody, ApprovalRequested, RunReleased, ToolCallInitiated
from perdure.core.identity import Sealed
from perdure.store.api import Append, Claimed, NewRun, Store
from perdure.tool import Call

Moment = Literal["before", "after"]

# What events are called here; the others go by their own type.
_NAMES = {
    "tool_call_proposed": "tool_proposal",
    "tool_call_initiated": "tool_intent",
    "tool_call_completed": "tool_result",
    "tool_call_failed": "tool_failure",
    "tool_call_in_doubt": "tool_doubt",
    "tool_call_resolved": "tool_resolution",
    "model_call_initiated": "model_request",
    "model_call_completed": "model_answer",
    "model_call_failed": "model_failure",
    "approval_requested": "approval_request",
    "child_started": "child_start",
    "child_finished": "child_result",
    "thought_recorded": "note",
    "decision_made": "decision",
    "status_reported": "status",
    "run_claimed": "claim",
    "run_succeeded": "end",
    "run_failed": "end",
    "run_cancelled": "end",
}


class Boundary(Struct, frozen=True, order=True):
    """One name of a point in a run. The nth visit to it counts from 1, in one process or over many, as whoever counts says."""

    name: str  # "before_tool_result_persisted"
    run: str = ""  # below the run that was started: "" itself, "/2" its child of call 2
    call: int = 0  # 0: of no call
    tool: str = ""
    nth: int = 1

    def __str__(self) -> str:
        who = f"{self.tool} (call {self.call})" if self.tool else f"call {self.call}" if self.call else ""
        whose = f"child {self.run}" if self.run else ""
        again = f"visit {self.nth}" if self.nth > 1 else ""
        about = ", ".join(part for part in (who, whose, again) if part)
        return f"{self.name}: {about}" if about else self.name


Watch = Callable[[Sequence[Boundary]], None]  # told of a point, in the thread that has come to it, before anything else happens there


def what_of(body: AnyBody) -> str:
    """What the event is called in the name of a boundary."""
    if isinstance(body, RunReleased):
        return "park" if body.status.startswith("waiting") else "release"
    type_ = type(body).__struct_config__.tag
    assert isinstance(type_, str)
    return _NAMES.get(type_, type_)


def names() -> list[str]:
    """Every name that a boundary can have."""
    types = [str(body.__struct_config__.tag) for body in AnyBody.__args__ if body is not RunReleased]
    what = sorted({_NAMES.get(type_, type_) for type_ in types} | {"park", "release"})
    of_effects = [f"{kind}_effect" for kind in ("tool", "model")]
    return [f"{moment}_{name}" for name in (*of_effects, *(f"{one}_persisted" for one in what)) for moment in ("before", "after")]


class Points:
    """Turns what a process does into boundaries, and tells the watch. One for each process; it may be told from any thread."""

    def __init__(self, watch: Watch, root: str) -> None:
        self._watch = watch
        self._root = root
        self._tools: dict[tuple[str, int], str] = {}
        self._visits: Counter[Boundary] = Counter()
        self._lock = Lock()

    def tell(self, found: Iterable[Boundary]) -> None:
        """The process has come to this point, which has these names."""
        with self._lock:
            visits = []
            for boundary in dict.fromkeys(found):
                self._visits[boundary] += 1
                visits.append(Boundary(boundary.name, boundary.run, boundary.call, boundary.tool, self._visits[boundary]))
        if visits:
            self._watch(visits)

    def of_events(self, moment: Moment, run_id: str, events: Iterable[Sealed]) -> list[Boundary]:
        """The names of the commit that these events are in."""
        found = []
        for sealed in events:
            call, body = sealed.event.call or 0, sealed.event.body
            if isinstance(body, ToolCallInitiated):
                self._tools[run_id, call] = body.tool
            # The question's own name, where one is asked; it is no tool, and what comes of it goes by the number of the call.
            who = body.action if isinstance(body, ApprovalRequested) else self._tools.get((run_id, call), "")
            found.append(Boundary(f"{moment}_{what_of(body)}_persisted", self.below(run_id), call, who))
        return found

    def of_effect(self, moment: Moment, call: Call, tool: Any) -> Boundary:
        kind = "model" if tool.events is OF_MODEL else "tool"
        return Boundary(f"{moment}_{kind}_effect", self.below(call.run_id), call.number, tool.name)

    def below(self, run_id: str) -> str:
        """Where a run is, below the one that was started; another one's whole id."""
        return run_id.removeprefix(self._root) if run_id == self._root or run_id.startswith(f"{self._root}/") else run_id


class WatchedStore:
    """A store that tells of each commit before it is made and after it is durable. Everything else goes straight through."""

    def __init__(self, store: Store, points: Points) -> None:
        self._store: Any = store
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_run(self, new: NewRun) -> Any:
        below = self._points.below(new.run_id)
        self._points.tell([Boundary("before_run_created_persisted", below)])
        answer = self._store.create_run(new)
        self._points.tell([Boundary("after_run_created_persisted", below)])
        return answer

    def create_runs(self, news: Sequence[NewRun]) -> Any:
        below = [self._points.below(new.run_id) for new in news]
        self._points.tell([Boundary("before_run_created_persisted", one) for one in below])
        answers = self._store.create_runs(news)
        self._points.tell([Boundary("after_run_created_persisted", one) for one in below])
        return answers

    def claim(self, *args: Any, **kwargs: Any) -> list[Claimed]:
        self._points.tell([Boundary("before_claim_persisted")])
        claimed: list[Claimed] = self._store.claim(*args, **kwargs)
        self._points.tell([Boundary("after_claim_persisted", self._points.below(one.lease.run_id)) for one in claimed])
        return claimed

    def append(self, batch: Sequence[Append]) -> Any:
        self._tell("before", batch)
        answers = self._store.append(batch)
        self._tell("after", batch)
        return answers

    def send(self, batch: Sequence[Append], loop: Any, done: Callable[[list[Any]], None]) -> list[Append]:
        # What comes back is appended in the ordinary way, and told of there.
        left: list[Append] = []

        def landed(answers: list[Any]) -> None:
            back = set(map(id, left))
            sent = [append for append in batch if id(append) not in back]
            self._tell("after", [append for append, answer in zip(sent, answers, strict=True) if answer is not None])
            done(answers)

        self._tell("before", batch)
        left.extend(self._store.send(batch, loop, landed))
        return left

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> Any:
        made: list[Append] = [head]

        def watched(connection: Any) -> tuple[Append, Any]:
            after, value = work(connection)
            made.append(after)
            self._tell("before", made)
            return after, value

        answer = self._store.transact(head, watched)
        self._tell("after", made)
        return answer

    def _tell(self, moment: Moment, batch: Sequence[Append]) -> None:
        self._points.tell([name for append in batch for name in self._points.of_events(moment, append.lease.run_id, append.events)])


def around(tool: Any, before: Callable[[Call], None], after: Callable[[Call, Any], None]) -> Any:
    """The tool, or the question to a model, with something done right before its function is called and right after it has returned."""
    fn = tool.fn
    watched = copy.copy(tool)
    # Whatever its function is called with goes through `with_call`, which has the Call that the function itself may not take.
    given: dict[str, Call] = {}
    with_call = tool.with_call

    def noting(arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        given["call"] = call
        kwargs: dict[str, Any] = with_call(arguments, call)
        return kwargs

    if inspect.iscoroutinefunction(fn):

        @wraps(fn)
        async def calling(**kwargs: Any) -> Any:
            before(given["call"])
            value = await fn(**kwargs)
            after(given["call"], value)
            return value

    else:

        @wraps(fn)
        def calling(**kwargs: Any) -> Any:
            before(given["call"])
            value = fn(**kwargs)
            after(given["call"], value)
            return value

    watched.fn, watched.with_call = calling, noting
    return watched
