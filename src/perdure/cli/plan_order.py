"""`perdure run PLAN --check`: check a plan, and print the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.cli import common
from perdure.errors import InvalidInput
from perdure.inspect.text import plural

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.agents.plan.check import CheckedStep


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def show_order(agent: Agent[Any, Any], target: str, given: Arguments | None, *, as_json: bool) -> int:
    """Print the steps in the order in which they can begin.

    InvalidInput if the agent is no plan, or if the arguments `given` do not fit. `given` is None if there are no
    arguments to check. The plan itself was checked when it was loaded.
    """
    from perdure.agents.plan import Plan

    if not isinstance(agent, Plan):
        raise InvalidInput(f"--check: {target} is agent {agent.name}, and no plan whose steps are known beforehand")
    if given is not None:
        agent.bind(*given)
    plan = agent.sound
    turns = _turns(plan.steps)
    if as_json:
        steps = [{"name": step.name, "tool": step.tool, "turn": turns[step.name], "waits_for": list(step.waits_for)} for step in plan.steps]
        common.out_json({"plan": agent.name, "version": agent.version, "digest": plan.digest, "params": plan.params, "steps": steps})
        return common.SUCCEEDED
    checked = "it" if given is None else "it or its arguments"
    common.out(f"plan {agent.name}@{agent.version}: {plural(len(plan.steps), 'step')}, no problem in {checked}")
    for name, declared in plan.params.items():
        default = f" (default {common.to_json(declared['default'])})" if "default" in declared else ", which must be given"
        common.out(common.clean(f"  takes {name}: {declared['type']}{default}"))
    for step in sorted(plan.steps, key=lambda step: turns[step.name]):
        common.out(common.clean(f"  {turns[step.name]:>3}. {step.name}: {step.tool}{_about(step)}"))
    return common.SUCCEEDED


def _turns(steps: Sequence[CheckedStep]) -> dict[str, int]:
    """step → the earliest turn in which the step can begin. The steps of one turn can run at the same time."""
    turns: dict[str, int] = {}
    for step in steps:  # the steps are sorted: a step comes after all steps that it waits for
        turns[step.name] = 1 + max((turns[name] for name in step.waits_for), default=0)
    return turns


def _about(step: CheckedStep) -> str:
    parts = [
        step.description or "",
        f"after {', '.join(step.waits_for)}" if step.waits_for else "",
        f"when {' and '.join(map(str, step.when))}" if step.when else "",
        f"skipped without {', '.join(step.needs)}" if step.needs else "",
        "asks first" if step.approval is not None else "",
        f"on failure: {step.on_failure}" if step.on_failure != "stop" else "",
    ]
    return "".join(f"; {part}" for part in parts if part)
