"""The boundaries of a run: the points before and after each commit and each effect, at which a process may die.

A process that dies before such a commit or effect leaves another state behind than a process that dies after it.
`perdure crashtest`, `crash_matrix` and `run_until` use the same names:

    before_tool_result_persisted   the tool has returned, and the commit with its result has not been made
    after_tool_result_persisted    the commit with the result is durable, and the process does not know it yet
    before_tool_effect             the intent is durable, and the function has not been called
    after_tool_effect              the function has returned, and only the process knows the result

`names()` lists all boundaries. For a model call the last two are `before_model_effect` and `after_model_effect`. If
several events share a commit, the point before it and the point after it have several names.
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

# Type of event → its name in boundaries. For an event that is not listed, the name is the type.
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
    """One name of a point in a run. `nth` counts how often one process has reached this point, from 1."""

    name: str  # such as "before_tool_result_persisted"
    run: str = ""  # relative to the run that was started: "" is that run itself, "/2" is the child of its call 2
    call: int = 0  # 0: the boundary does not belong to a call
    tool: str = ""
    nth: int = 1

    def __str__(self) -> str:
        who = f"{self.tool} (call {self.call})" if self.tool else f"call {self.call}" if self.call else ""
        whose = f"child {self.run}" if self.run else ""
        again = f"visit {self.nth}" if self.nth > 1 else ""
        about = ", ".join(part for part in (who, whose, again) if part)
        return f"{self.name}: {about}" if about else self.name


# A function that is called at each point, with the names of the point. It runs in the thread that reached the point.
Watch = Callable[[Sequence[Boundary]], None]


def what_of(body: AnyBody) -> str:
    """The part of a boundary's name that names the event, such as "tool_result"."""
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
    """Counts the boundaries that a process reaches, and calls the watch. All threads of a process use one object."""

    def __init__(self, watch: Watch, root: str) -> None:
        self._watch = watch
        self._root = root
        self._tools: dict[tuple[str, int], str] = {}
        self._visits: Counter[Boundary] = Counter()
        self._lock = Lock()

    def tell(self, found: Iterable[Boundary]) -> None:
        """The process has reached a point that has the names `found`: call the watch."""
        with self._lock:
            visits = []
            for boundary in dict.fromkeys(found):
                self._visits[boundary] += 1
                visits.append(Boundary(boundary.name, boundary.run, boundary.call, boundary.tool, self._visits[boundary]))
        if visits:
            self._watch(visits)

    def of_events(self, moment: Moment, run_id: str, events: Iterable[Sealed]) -> list[Boundary]:
        """The boundaries, one for each event, that the process reaches before or after (`moment`) the commit of these events."""
        found = []
        for sealed in events:
            call, body = sealed.event.call or 0, sealed.event.body
            if isinstance(body, ToolCallInitiated):
                self._tools[run_id, call] = body.tool
            # For an approval request the action is shown as the tool. The action is not remembered as a tool, so later
            # events of the approval show only the call.
            who = body.action if isinstance(body, ApprovalRequested) else self._tools.get((run_id, call), "")
            found.append(Boundary(f"{moment}_{what_of(body)}_persisted", self.below(run_id), call, who))
        return found

    def of_effect(self, moment: Moment, call: Call, tool: Any) -> Boundary:
        kind = "model" if tool.events is OF_MODEL else "tool"
        return Boundary(f"{moment}_{kind}_effect", self.below(call.run_id), call.number, tool.name)

    def below(self, run_id: str) -> str:
        """The run's id relative to the run that was started. If the run is not below that run: the whole id."""
        return run_id.removeprefix(self._root) if run_id == self._root or run_id.startswith(f"{self._root}/") else run_id


class WatchedStore:
    """A store that reports each commit before it is made and after it is durable. Other methods are not changed."""

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
        # The caller passes the returned appends to `append`, and `append` reports them again.
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
    """A copy of the tool or model call. It calls `before` right before the function, and `after` right after it."""
    fn = tool.fn
    watched = copy.copy(tool)
    # The worker passes all arguments through `with_call`. `with_call` gets the Call even if the function has no
    # parameter for it.
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
