"""Checks a plan before its first effect. The check does not stop at the first problem: one error lists all problems.

A model may have written the plan, and all runs of the worker wait during the check. So every part of the check takes
linear time.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple, get_args

from msgspec import Struct, structs

from perdure.agents.plan.conditions import MAX_CONDITIONS, read_condition, written_condition
from perdure.agents.plan.refs import Condition, Ref, read_arguments, refs_in, texts_in, written_arguments
from perdure.agents.plan.step import TYPES, Callee, Document, OnFailure, read_approval, written_approval
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.codec import shown
from perdure.errors import InvalidInput, InvalidPlan

MAX_STEPS = 1_000
MAX_PARAMS = 100
MAX_PROBLEMS = 100  # after this many problems the check stops
# The most comparisons of a misspelt name with known names in one check: a comparison is slow, and there may be
# thousands of names.
_GUESSES = 1_000
_GUESSED_CHARS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}\Z")
_STEP_WORDS = ("name", "tool", "args", "when", "on_failure", "approval", "after", "description")
MAX_DESCRIPTION_CHARS = 500
# A text that some other tools read as a reference: $build, ${build}, $build.image_tag, $step_0.
_LIKE_A_REFERENCE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_-]{0,63})((?:\.[A-Za-z0-9_-]+|\[[0-9]+\])*)\}?\Z")
_STEP_BY_NUMBER = re.compile(r"step_?([0-9]{1,4})\Z")
_LONGEST_REFERENCE_CHARS = 200
_PLAN_WORDS = ("name", "version", "parallel", "params", "steps")


class CheckedStep(Struct, frozen=True):
    """A step that has passed the check."""

    name: str
    tool: str
    args: dict[str, Any]  # references are still in it, as Ref objects
    when: tuple[Condition, ...]
    on_failure: OnFailure
    approval: Approval | None
    needs: tuple[str, ...]  # the steps whose results this step refers to
    waits_for: tuple[str, ...]  # `needs`, the steps of `after`, and the previous step if steps are not parallel
    description: str | None = None


class Sound(Struct, frozen=True):
    """A plan that has passed the check. Only the results of its steps are still unknown."""

    name: str
    document: Document
    encoded: bytes  # the document, as it is recorded
    parallel: bool
    params: dict[str, dict[str, Any]]
    steps: tuple[CheckedStep, ...]
    callees: Mapping[str, Callee]

    @property
    def digest(self) -> str:
        return codec.digest(self.encoded)


class PlanProblem(NamedTuple):
    """A problem of a plan, and its place."""

    place: int  # the index of the step; -1 for a problem of the plan itself
    said: str
    blind: bool = False  # True: because of this problem, the tool and arguments of the step cannot be checked


def sound(
    document: Any,
    callees: Mapping[str, Callee],
    known: Sequence[PlanProblem] = (),
    *,
    label: str = "",
    as_is: bool = False,
    begun: Collection[str] | None = (),
) -> Sound:
    """The checked plan of this document.

    InvalidPlan lists all problems in the order of the steps, including the problems in `known`.

    The document of the result is normalized: all ways to write the same plan give the same document. With `as_is` the
    document stays unchanged. `begun`: steps of a recorded plan that have begun, so that their tools may have changed since
    or may be gone; None: all steps.
    """
    whole: Document = document if isinstance(document, dict) else {}
    name = whole.get("name")
    check = _Check(callees, known, begun)
    try:
        if isinstance(document, dict):
            check.plan(whole)
        else:
            check.say(f"a plan is an object with its steps, not {shown(document)}")
    except _TooMany:
        check.problems.append(PlanProblem(MAX_STEPS, "and more, which were not looked for; put these right first"))
    if check.problems:
        in_order = sorted(check.problems, key=lambda problem: problem.place)
        said = [problem.said for problem in in_order]
        raise InvalidPlan(label or f"plan {shown(name) if not isinstance(name, str) else name[:80]}", said)
    used = {step.tool: callees[step.tool] for step in check.steps if step.tool in callees}
    whole = whole if as_is else _in_one_form(whole, check)
    try:
        encoded = codec.encode(whole)
    except InvalidInput as error:
        raise InvalidPlan(label or f"plan {name}", [str(error)]) from None
    return Sound(str(name), whole, encoded, whole.get("parallel", True), check.params, tuple(check.steps), used)


def _in_one_form(whole: Document, check: _Check) -> Document:
    """The normalized document: a reformatted file, and the same plan in Python, give the same document."""
    form: Document = {"name": whole["name"], "steps": []}
    if not whole.get("parallel", True):
        form["parallel"] = False
    if check.params:
        form["params"] = check.params
    for given, step in zip(whole["steps"], check.steps, strict=True):
        parts = {
            "args": written_arguments(step.args),
            "when": [written_condition(condition) for condition in step.when],
            "on_failure": step.on_failure if step.on_failure != "stop" else None,
            "approval": None if step.approval is None else written_approval(step.approval),
            "after": given.get("after"),
            "description": step.description,
        }
        form["steps"].append({"name": step.name, "tool": step.tool} | {word: part for word, part in parts.items() if part})
    return form


class _TooMany(Exception):
    """The check has found MAX_PROBLEMS problems and stops."""


class _Check:
    """Checks a plan and collects its problems."""

    def __init__(self, callees: Mapping[str, Callee], known: Sequence[PlanProblem], begun: Collection[str] | None) -> None:
        self.callees = callees
        self._begun = begun
        self.problems = list(known)
        self.steps: list[CheckedStep] = []
        self.params: dict[str, dict[str, Any]] = {}
        self._at = -1  # the index of the step that is being checked
        self._guesses = _GUESSES  # how many comparisons of names are left
        self._blind = {problem.place for problem in known if problem.blind}
        # The names of all parameters, also of those with a wrong declaration. None: the names are not known.
        self._declared: tuple[Any, ...] | None = ()
        self._places: dict[str, int] = {}  # name of a step → index of the step
        self._edges: dict[str, list[str]] = {}
        self._forward: list[tuple[str, str, str]] = []  # (step, the later step that it refers to, the message)

    def say(self, problem: str, place: int | None = None) -> None:
        """Add a problem. Without `place` it is a problem of the step that is being checked."""
        if len(self.problems) >= MAX_PROBLEMS:
            raise _TooMany
        self.problems.append(PlanProblem(self._at if place is None else place, problem))

    def plan(self, whole: Document) -> None:
        """Check the whole plan."""
        self._words(whole, _PLAN_WORDS, "")
        if not isinstance(whole.get("name"), str):
            self.say("it has no name")
        if not isinstance(whole.get("parallel", True), bool):
            self.say(f"parallel is true or false, not {shown(whole['parallel'])}")
        self._params(whole.get("params", {}))
        steps = whole.get("steps")
        if not isinstance(steps, list) or not steps:
            self.say("it has no steps; a plan has a list of at least one")
            return
        if len(steps) > MAX_STEPS:
            self.say(f"it has {len(steps):,} steps; at most {MAX_STEPS:,}: let agents be steps, each with a plan of its own")
            return
        self._names(steps)
        for self._at, step in enumerate(steps):
            if isinstance(step, dict) and isinstance(step.get("name"), str):
                self._step(self._at, step)
        self._order()
        if not whole.get("parallel", True):
            self.steps = [_behind(step, self.steps[place - 1].name if place else None) for place, step in enumerate(self.steps)]

    def _words(self, given: Document, words: Sequence[str], where: str) -> None:
        for word in given:
            if word not in words:
                self.say(f"{where}{shown(word)} is unknown{self._near(word, words)}; it has {', '.join(words)}")

    def _params(self, params: Any) -> None:
        if not isinstance(params, dict) or len(params) > MAX_PARAMS:
            self._declared = None
            self.say(f'params are at most {MAX_PARAMS}, by name: {{"service": {{"type": "string"}}}}')
            return
        self._declared = tuple(params)
        for name, given in params.items():
            declared = {"type": given} if isinstance(given, str) else given
            if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name.startswith("_") or name == "run":
                self.say(f"the parameter {shown(name)} needs a name of letters, digits and _, and another one than run")
            elif not isinstance(declared, dict) or declared.get("type") not in list(TYPES) or declared.keys() - {"type", "default"}:
                kinds = ", ".join(TYPES)
                self.say(f"the parameter {name}: {shown(given)} is no type; one of {kinds}, with a default or without")
            elif "default" in declared and not _is_of(declared["default"], declared["type"]):
                self.say(f"the parameter {name}: its default {shown(declared['default'])} is no {declared['type']}")
            else:
                self.params[name] = declared

    def _names(self, steps: list[Any]) -> None:
        for place, step in enumerate(steps):
            name = step.get("name") if isinstance(step, dict) else None
            if not step and place in self._blind:
                continue  # this problem is already in the list
            if not isinstance(step, dict):
                self.say(f"step {place + 1} is {shown(step)}, and not an object with a name and a tool", place)
            elif not isinstance(name, str) or not _NAME.match(name):
                self.say(f"step {place + 1} is called {shown(name)}; a name is up to 64 letters, digits, _ and -", place)
                if isinstance(name, str):
                    self._places.setdefault(name, place)  # so that references to this step are not reported too
            elif name in self._places:
                self.say(f"step {name} stands there twice, as step {self._places[name] + 1} and step {place + 1}; rename one", place)
            else:
                self._places[name] = place

    # -- one step -----------------------------------------------------------------------------------------------------
    def _step(self, place: int, step: Document) -> None:
        name = step["name"]
        where = f"step {name}: "
        before = len(self.problems)
        self._words(step, _STEP_WORDS, where)
        on_failure = step.get("on_failure", "stop")
        if on_failure not in get_args(OnFailure):
            self.say(f"{where}on_failure is one of {', '.join(get_args(OnFailure))}, not {shown(on_failure)}")
        args = self._reading(where, lambda: read_arguments(step.get("args", {})), None)
        when = self._reading(where, lambda: _conditions(step.get("when", [])), ())
        after = step.get("after", [])
        if not isinstance(after, list) or not all(isinstance(one, str) for one in after):
            self.say(f"{where}after is a list of names of steps, not {shown(after)}")
            after = []
        refs = [*refs_in(args or {}), *(condition.ref for condition in when)]
        needs = self._references(where, place, refs)
        behind = [one for one in after if self._stands_before(where, place, one, f"after names {one!r:.80}")]
        self._edges[name] = [*dict.fromkeys([*(of.step for of in refs if of.step is not None), *after])]
        description = step.get("description")
        if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS):
            self.say(f"{where}description is a text of at most {MAX_DESCRIPTION_CHARS} characters, not {shown(description)}")
        for text in texts_in(args or {}):
            self._literal(where, text)
        approval = self._reading(where, lambda: read_approval(step.get("approval")), None)
        has_begun = self._begun is None or name in self._begun
        callee = self._callee(where, step.get("tool")) if place not in self._blind and not has_begun else None
        if callee is not None:
            self._arguments(where, callee, args, approval)
        if len(self.problems) == before and place not in self._blind:
            waits_for = tuple(dict.fromkeys([*needs, *behind]))
            self.steps.append(CheckedStep(name, step["tool"], args, when, on_failure, approval, needs, waits_for, description))

    def _reading(self, where: str, look: Any, otherwise: Any) -> Any:
        try:
            return look()
        except InvalidInput as error:
            self.say(f"{where}{error}")
            return otherwise

    def _references(self, where: str, place: int, refs: Sequence[Ref]) -> tuple[str, ...]:
        needs: dict[str, None] = {}
        for of in refs:
            if of.step is None:
                self._parameter(where, of)
            elif self._stands_before(where, place, of.step, str(of)):
                needs[of.step] = None
        return tuple(needs)

    def _literal(self, where: str, text: str) -> None:
        """Report a text such as "$build.image_tag": the tool would get this very text, not the result of the step."""
        found = _LIKE_A_REFERENCE.match(text) if text.startswith("$") and len(text) <= _LONGEST_REFERENCE_CHARS else None
        if found is None:
            return
        name, numbered = found[1], _STEP_BY_NUMBER.match(found[1])
        way = [int(part[1:-1]) if part.startswith("[") else part[1:] for part in re.findall(r"\.[^.\[]+|\[[0-9]+\]", found[2])]
        if name in self._places:
            hint = Ref(name, tuple(way))
        elif self._declared is not None and name in self._declared:
            hint = Ref(None, (name, *way))
        elif numbered is not None:
            first = list(self._places)
            place = int(numbered[1])
            hint = Ref(first[place] if place < len(first) else "NAME", tuple(way))
        else:
            return  # any other text may begin with $
        form = {"$param": list(hint.path)} if hint.step is None else {"$ref": [hint.step, *hint.path]}
        self.say(
            f"{where}{shown(text)} is a text, and the tool would get this very text: to refer to a value write {hint}, in a file {shown(form)}; "
            f"if you mean the text, give it to the plan as a parameter"
        )

    def _parameter(self, where: str, of: Ref) -> None:
        name = str(of.path[0])
        if self._declared is None or (name in self._declared and name not in self.params):
            return  # the wrong declaration is already reported
        if name not in self.params:
            has = ", ".join(map(str, self._declared)) or "no parameters"
            self.say(f"{where}{of}: the plan has no such parameter{self._near(name, self._declared)}; it has {has}")
        elif len(of.path) > 1 and self.params[name]["type"] not in ("array", "object", "any"):
            self.say(f"{where}{of}: the parameter {name} is a {self.params[name]['type']}, which has nothing inside")

    def _stands_before(self, where: str, place: int, name: str, what: str) -> bool:
        found, own = self._places.get(name), where.removeprefix("step ").removesuffix(": ")
        if found is None:
            self.say(f"{where}{what}: there is no step {name!r:.80}{self._near(name, self._places)}")
        elif found == place:
            self.say(f"{where}{what}: that is the step itself")
        elif found > place:
            self._forward.append((own, name, f"{where}{what}: step {name} stands after it; move {name} up"))
        return found is not None and found < place

    def _callee(self, where: str, tool: Any) -> Callee | None:
        callee = self.callees.get(tool) if isinstance(tool, str) else None
        if callee is None:
            has = ", ".join(sorted(self.callees)[:20]) or "no tools at all"
            named = "it names no tool" if tool is None else f"there is no tool {shown(tool)}"
            self.say(f"{where}{named}{self._near(tool, self.callees)}; there are {has}")
        return callee

    def _arguments(self, where: str, callee: Callee, args: dict[str, Any] | None, approval: Approval | None) -> None:
        if args is not None:
            later = [name for name, value in args.items() if any(True for _ in refs_in(value))]
            for problem in callee.misfits(args, later):
                self.say(f"{where}{problem}")
        if approval is not None and getattr(callee, "redaction", None) is not None:
            self.say(
                f"{where}approval: {callee.name} has redacted arguments, which this approval would show; give the approval to the tool"
            )
        if approval is not None and approval.editable:
            takes = [name for name in callee.takes if name not in callee.takes_secrets]  # a decision must not name another secret
            unknown = [name for name in approval.editable if name not in takes]
            if unknown:
                self.say(f"{where}approval: {shown(unknown[0])} cannot be edited; {callee.name} takes {', '.join(takes) or 'no arguments'}")

    def _order(self) -> None:
        """Report references to later steps, and circles of steps that wait for each other."""
        knot_of: dict[str, int] = {}
        for number, knot in enumerate(knots(self._edges)):
            knot_of |= dict.fromkeys(knot, number)
            around = circle(self._edges, knot)
            self.say(f"the steps {' → '.join(around)} wait for each other", min(self._places[name] for name in around))
        for name, other, problem in self._forward:
            if name not in knot_of or knot_of[name] != knot_of.get(other):
                self.say(problem, self._places[name])

    def _near(self, name: Any, names: Collection[Any]) -> str:
        """A suggestion: the name that was probably meant. Empty if no comparisons are left."""
        if not isinstance(name, str) or len(name) > _GUESSED_CHARS or len(names) > self._guesses:
            return ""
        self._guesses -= len(names)
        near = difflib.get_close_matches(name, [one for one in names if isinstance(one, str) and len(one) <= _GUESSED_CHARS], n=1)
        return f", did you mean {near[0]}?" if near else ""


def _behind(step: CheckedStep, before: str | None) -> CheckedStep:
    """The step, changed so that it also waits for the previous step (`before`)."""
    if before is None or before in step.waits_for:
        return step
    return structs.replace(step, waits_for=(*step.waits_for, before))


def _conditions(form: Any) -> tuple[Condition, ...]:
    forms = form if isinstance(form, list) else [form]
    if len(forms) > MAX_CONDITIONS:
        raise InvalidInput(f"when has {len(forms)} conditions; at most {MAX_CONDITIONS}")
    return tuple(read_condition(one) for one in forms)


def _is_of(default: Any, kind: str) -> bool:
    exact: Any = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}.get(kind, object)
    return default is None or (isinstance(default, exact) and (kind in ("boolean", "any") or not isinstance(default, bool)))


# -- circles between steps, in linear time ----------------------------------------------------------------------------
Edges = Mapping[str, Sequence[str]]


def circles(edges: Edges) -> list[list[str]]:
    """One circle, such as `["a", "b", "a"]`, for every knot (strongly connected component) of a graph."""
    return [circle(edges, knot) for knot in knots(edges)]


def knots(edges: Edges) -> list[list[str]]:
    """The strongly connected components of more than one name, in the order of the graph (Tarjan, iterative)."""
    found: list[list[str]] = []
    order = {name: place for place, name in enumerate(edges)}
    entered: dict[str, int] = {}
    lowest: dict[str, int] = {}  # name → the lowest number in `entered` that can be reached from this name
    waiting: dict[str, None] = {}  # names that were entered and are in no component yet
    for first in edges:
        trail = _enter(first, edges, entered, lowest, waiting) if first not in entered else []
        while trail:
            name, others = trail[-1]
            other = next(others, None)
            if other is None:
                trail.pop()
                if trail:
                    lowest[trail[-1][0]] = min(lowest[trail[-1][0]], lowest[name])
                if lowest[name] == entered[name]:
                    group = _group(waiting, name)
                    found += [sorted(group, key=order.__getitem__)] if len(group) > 1 else []
            elif other not in edges:
                continue
            elif other not in entered:
                trail += _enter(other, edges, entered, lowest, waiting)
            elif other in waiting:
                lowest[name] = min(lowest[name], entered[other])
    return sorted(found, key=lambda group: order[group[0]])


def _enter(
    name: str, edges: Edges, entered: dict[str, int], lowest: dict[str, int], waiting: dict[str, None]
) -> list[tuple[str, Iterator[str]]]:
    entered[name] = lowest[name] = len(entered)
    waiting[name] = None
    return [(name, iter(edges[name]))]


def _group(waiting: dict[str, None], root: str) -> list[str]:
    group: list[str] = []
    while not group or group[-1] != root:
        group.append(waiting.popitem()[0])
    return group


def circle(edges: Edges, knot: Sequence[str]) -> list[str]:
    """The shortest circle through the first name of a knot."""
    first, inside = knot[0], set(knot)
    came_from: dict[str, str] = {}
    ahead = deque([first])
    while first not in came_from:
        name = ahead.popleft()
        for other in edges[name]:
            if other in inside and other != name and other not in came_from:
                came_from[other] = name
                ahead.append(other)
    way = [first, came_from[first]]
    while way[-1] != first:
        way.append(came_from[way[-1]])
    return way[::-1]
