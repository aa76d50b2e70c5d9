"""`Plan`: steps that are known beforehand, as an agent. Checked before the first effect, journaled once, and never another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perdure.agent import Agent, BuiltAgent
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.circles import Circles
from perdure.core.codec import shown
from perdure.core.events import Limits
from perdure.errors import InvalidInput
from perdure.plan.check import Problem, Sound, sound
from perdure.plan.file import read_plan
from perdure.plan.follow import Following
from perdure.plan.parts import NO_DEFAULT, dressed, named, pins
from perdure.plan.step import TYPES, Callee, Document, Step, document_of, params_of
from perdure.run import Run
from perdure.tool import Tool

if TYPE_CHECKING:
    from perdure.models import Model


class Plan(BuiltAgent[..., dict[str, Any]]):
    """Steps that are known beforehand, as an agent: `Plan("deploy", steps=[Step("build", build_image, {…}), …])`.

    Steps that do not refer to each other run at the same time; with parallel=False one after the other, in the order given. Its result
    is a dict of each step's result by name; of steps that were skipped, or failed with on_failure="continue", "$not_done" says why.
    `params` are what the plan takes, by name and type, for `param("service")` in the steps. All problems of a plan are one InvalidPlan.
    """

    keeps_its_plan = True

    def __init__(
        self,
        name: str,
        steps: Sequence[Step],
        *,
        params: Mapping[str, Any] | None = None,
        parallel: bool = True,
        version: str | None = None,
        budget: Limits | None = None,
        circles: Circles | None = None,
        queue: str | None = None,
    ) -> None:
        document, callees, problems = _written(name, steps, params, parallel)
        options = {"version": version, "budget": budget, "circles": circles, "queue": queue}
        self._become(sound(document, callees, problems), sys._getframe(1).f_globals, options)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], tools: Iterable[Tool[..., Any] | Agent[..., Any]]) -> Plan:
        """The plan in a TOML or JSON file, whose steps name these tools and agents; InvalidPlan names all its problems."""
        document, version = read_plan(path)
        plan = cls.__new__(cls)
        checked = sound(document, named(tools), label=f"plan {document.get('name')} ({os.fspath(path)})")
        plan._become(checked, sys._getframe(1).f_globals, {"version": version})
        return plan

    @classmethod
    def from_model(
        cls,
        model: Model,
        tools: Sequence[Tool[..., Any] | Agent[..., Any]],
        goal: str | None = None,
        *,
        name: str = "plan",
        max_attempts: int = 3,
        approval: bool | Approval | None = None,
        instructions: str = "",
        version: str | None = None,
        budget: Limits | None = None,
        circles: Circles | None = None,
        queue: str | None = None,
    ) -> BuiltAgent[..., dict[str, Any]]:
        """An agent that has a model write the plan for `goal` (None: the goal is its argument), and then follows it.

        A plan that is wrong goes back to the model with all its problems, `max_attempts` times in all. With `approval` somebody agrees
        to the exact plan first; with True they may edit it. A plan that was written once is never written again.
        """
        from perdure.plan.written import WrittenPlan

        options = {"version": version, "budget": budget, "circles": circles, "queue": queue}
        home = sys._getframe(1).f_globals
        return WrittenPlan(model, tools, goal, name, max_attempts, approval, instructions, home=home, options=options)

    def _become(self, checked: Sound, home: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.sound = checked
        given = {key: value for key, value in options.items() if key != "version"}
        version = options.get("version") or version_of(checked)
        super().__init__(_function(checked, home), name=checked.name, version=version, home=home, **given)

    @property
    def document(self) -> Document:
        """The plan as it is journaled, and as a file may hold it."""
        whole: Document = codec.decode(self.sound.encoded)
        return whole

    @property
    def digest(self) -> str:
        """Of the document: what a run is held to."""
        return self.sound.digest

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        """The agents among its steps, whose runs are children of this one's."""
        return tuple(callee for callee in self.sound.callees.values() if isinstance(callee, Agent))


def version_of(checked: Sound) -> str:
    """The default version: a digest of the plan, and of what its tools are."""
    return codec.digest(codec.encode([checked.digest, pins(checked.callees.values())]))[:12]


def _written(name: str, steps: Any, params: Mapping[str, Any] | None, parallel: bool) -> tuple[Document, dict[str, Callee], list[Problem]]:
    problems: list[Problem] = []
    document: Document = {"name": name, "steps": []}
    callees: dict[str, Callee] = {}
    if parallel is not True:
        document["parallel"] = parallel
    if params:
        document["params"] = params_of(params)
    for place, step in enumerate(steps if isinstance(steps, (list, tuple)) else ()):
        if not isinstance(step, Step):
            problems.append(Problem(place, f"step {place + 1} is {shown(step)}; write Step(name, tool, {{…}})", blind=True))
            document["steps"].append({})
            continue
        where = f"step {step.name}" if isinstance(step.name, str) else f"step {place + 1}"
        try:
            document["steps"].append(document_of(step))
        except InvalidInput as error:
            problems.append(Problem(place, f"{where}: {error}", blind=True))
            # Named, so that whatever refers to it is not told that it does not exist.
            document["steps"].append({"name": step.name, "tool": getattr(step.tool, "name", None)})
        if isinstance(step.tool, (Tool, Agent)) and callees.setdefault(step.tool.name, step.tool) is not step.tool:
            twice = f"{where}: another tool of this plan is called {step.tool.name} too; give one of them a name= of its own"
            problems.append(Problem(place, twice, blind=True))
    return document, callees, problems


def _function(checked: Sound, home: Mapping[str, Any]) -> Any:
    """The coroutine function that follows the plan, with the plan's parameters for its own."""

    async def follow(run: Run, **given: Any) -> dict[str, Any]:
        return await Following(run, checked, given).follow()

    follow.__doc__ = f"Follow the plan {checked.name}, whose steps are {', '.join(step.name for step in checked.steps[:20])}."
    return dressed(
        follow, checked.name, home, {name: (TYPES[one["type"]], one.get("default", NO_DEFAULT)) for name, one in checked.params.items()}
    )
