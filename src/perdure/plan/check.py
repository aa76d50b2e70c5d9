"""Everything about a plan that can be known before its first effect. Nothing stops at the first problem: one error names them all.

A model may have written it, and every run of the worker waits while it is checked: no check takes longer than in proportion to its size.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple, get_args

from msgspec import Struct

from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.codec import shown
from perdure.errors import InvalidInput, InvalidPlan
from perdure.plan.circles import circle, knots
from perdure.plan.conditions import MAX_CONDITIONS, read_condition, written_condition
from perdure.plan.refs import Condition, Ref, read_arguments, refs_in, written_arguments
from perdure.plan.step import TYPES, Callee, Document, OnFailure, read_approval, written_approval

MAX_STEPS = 1_000
MAX_PARAMS = 100
MAX_PROBLEMS = 100  # that are looked for: who has made more begins with these
_GUESSES = 1_000  # names that a misspelt one is compared with, in one plan: it takes long, and a model can misspell thousands
_GUESSED_CHARS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}\Z")
_STEP_WORDS = ("name", "tool", "args", "when", "on_failure", "approval", "after")
_PLAN_WORDS = ("name", "version", "parallel", "params", "steps")


class Checked(Struct, frozen=True):
    """A step that can be made."""

    name: str
    tool: str
    args: dict[str, Any]  # with its references
    when: tuple[Condition, ...]
    on_failure: OnFailure
    approval: Approval | None
    needs: tuple[str, ...]  # steps whose results it refers to
    waits_for: tuple[str, ...]  # those, and what it comes after


class Sound(Struct, frozen=True):
    """A plan that can be followed: nothing in it is left to find out but what its steps return."""

    name: str
    document: Document
    encoded: bytes  # the document, as it is journaled
    parallel: bool
    params: dict[str, dict[str, Any]]
    steps: tuple[Checked, ...]
    callees: Mapping[str, Callee]

    @property
    def digest(self) -> str:
        return codec.digest(self.encoded)


class Problem(NamedTuple):
    """What is wrong with a plan, and where."""

    place: int  # of the step, from 0; -1: the plan's own
    said: str
    blind: bool = False  # whether the step's tool and its arguments are what was meant cannot be known, for this reason


def sound(document: Any, callees: Mapping[str, Callee], known: Sequence[Problem] = (), *, label: str = "", as_is: bool = False) -> Sound:
    """The plan of this document; InvalidPlan names all its problems in the order of the steps, those that are `known` already included.

    Its own document is in the one form that every way of writing the same plan has; `as_is` it is the very one that was given.
    """
    whole: Document = document if isinstance(document, dict) else {}
    name = whole.get("name")
    check = _Check(callees, known)
    try:
        if isinstance(document, dict):
            check.plan(whole)
        else:
            check.say(f"a plan is an object with its steps, not {shown(document)}")
    except _TooMany:
        check.problems.append(Problem(MAX_STEPS, "and more, which were not looked for; put these right first"))
    if check.problems:
        in_order = sorted(check.problems, key=lambda problem: problem.place)
        said = [problem.said for problem in in_order]
        raise InvalidPlan(label or f"plan {shown(name) if not isinstance(name, str) else name[:80]}", said)
    used = {step.tool: callees[step.tool] for step in check.steps}
    whole = whole if as_is else _in_one_form(whole, check)
    try:
        encoded = codec.encode(whole)
    except InvalidInput as error:
        raise InvalidPlan(label or f"plan {name}", [str(error)]) from None
    return Sound(str(name), whole, encoded, whole.get("parallel", True), check.params, tuple(check.steps), used)


def _in_one_form(whole: Document, check: _Check) -> Document:
    """So that a file that is laid out anew, or a plan that moves from a file to Python, is still the same plan."""
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
        }
        form["steps"].append({"name": step.name, "tool": step.tool} | {word: part for word, part in parts.items() if part})
    return form


class _TooMany(Exception):
    """There are as many problems as anybody will read."""


class _Check:
    """Collects what is wrong."""

    def __init__(self, callees: Mapping[str, Callee], known: Sequence[Problem]) -> None:
        self.callees = callees
        self.problems = list(known)
        self.steps: list[Checked] = []
        self.params: dict[str, dict[str, Any]] = {}
        self._at = -1  # the step that is looked at
        self._guesses = _GUESSES  # that are left
        self._blind = {problem.place for problem in known if problem.blind}
        self._declared: tuple[Any, ...] | None = ()  # parameters, rightly or wrongly; None: nobody can tell
        self._places: dict[str, int] = {}  # of the steps, by name
        self._edges: dict[str, list[str]] = {}
        self._forward: list[tuple[str, str, str]] = []  # (step, the later one that it names, what to say of that)

    def say(self, problem: str, place: int | None = None) -> None:
        """Something is wrong, with the step that is looked at unless it is another."""
        if len(self.problems) >= MAX_PROBLEMS:
            raise _TooMany
        self.problems.append(Problem(self._at if place is None else place, problem))

    def plan(self, whole: Document) -> None:
        """All of it."""
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
                continue  # said already
            if not isinstance(step, dict):
                self.say(f"step {place + 1} is {shown(step)}, and not an object with a name and a tool", place)
            elif not isinstance(name, str) or not _NAME.match(name):
                self.say(f"step {place + 1} is called {shown(name)}; a name is up to 64 letters, digits, _ and -", place)
                if isinstance(name, str):
                    self._places.setdefault(name, place)  # so that whatever refers to it is not told that it does not exist
            elif name in self._places:
                self.say(f"step {name} stands there twice, as step {self._places[name] + 1} and step {place + 1}; rename one", place)
            else:
                self._places[name] = place

    # -- one step ---------------------------------------------------------------------------------------------------------
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
        approval = self._reading(where, lambda: read_approval(step.get("approval")), None)
        callee = self._callee(where, step.get("tool")) if place not in self._blind else None
        if callee is not None:
            self._arguments(where, callee, args, approval)
        if len(self.problems) == before and place not in self._blind:
            waits_for = tuple(dict.fromkeys([*needs, *behind]))
            self.steps.append(Checked(name, step["tool"], args, when, on_failure, approval, needs, waits_for))

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

    def _parameter(self, where: str, of: Ref) -> None:
        name = str(of.path[0])
        if self._declared is None or (name in self._declared and name not in self.params):
            return  # said where it is declared
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
        if approval is not None and approval.editable:
            takes = callee.takes
            unknown = [name for name in approval.editable if name not in takes]
            if unknown:
                self.say(f"{where}approval: {shown(unknown[0])} cannot be edited; {callee.name} takes {', '.join(takes) or 'no arguments'}")

    def _order(self) -> None:
        """References to steps that come later, and those that can come in no order at all."""
        knot_of: dict[str, int] = {}
        for number, knot in enumerate(knots(self._edges)):
            knot_of |= dict.fromkeys(knot, number)
            around = circle(self._edges, knot)
            self.say(f"the steps {' → '.join(around)} wait for each other", min(self._places[name] for name in around))
        for name, other, problem in self._forward:
            if name not in knot_of or knot_of[name] != knot_of.get(other):
                self.say(problem, self._places[name])

    def _near(self, name: Any, names: Collection[Any]) -> str:
        """The name that was probably meant, as long as guessing it is cheap."""
        if not isinstance(name, str) or len(name) > _GUESSED_CHARS or len(names) > self._guesses:
            return ""
        self._guesses -= len(names)
        near = difflib.get_close_matches(name, [one for one in names if isinstance(one, str) and len(one) <= _GUESSED_CHARS], n=1)
        return f", did you mean {near[0]}?" if near else ""


def _behind(step: Checked, before: str | None) -> Checked:
    """The step, after the one that stands before it."""
    if before is None or before in step.waits_for:
        return step
    return Checked(step.name, step.tool, step.args, step.when, step.on_failure, step.approval, step.needs, (*step.waits_for, before))


def _conditions(form: Any) -> tuple[Condition, ...]:
    forms = form if isinstance(form, list) else [form]
    if len(forms) > MAX_CONDITIONS:
        raise InvalidInput(f"when has {len(forms)} conditions; at most {MAX_CONDITIONS}")
    return tuple(read_condition(one) for one in forms)


def _is_of(default: Any, kind: str) -> bool:
    exact: Any = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}.get(kind, object)
    return default is None or (isinstance(default, exact) and (kind in ("boolean", "any") or not isinstance(default, bool)))
