"""`perdure run PLAN --check`: the plan is sound, and this is the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.cli import common
from perdure.errors import InvalidInput
from perdure.inspect.words import plural

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.plan.check import Checked


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def show_order(agent: Agent[Any, Any], target: str, given: Arguments | None, *, as_json: bool) -> int:
    """Print the steps by when they begin; InvalidInput when the agent is no plan, or the arguments that are given are not what it takes.

    That it could be loaded has checked it. Without any arguments (None) it is checked without them.
    """
    from perdure.plan import Plan

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
    common.out(f"plan {agent.name}@{agent.version}: {plural(len(plan.steps), 'step')}, and nothing wrong with {checked}")
    for name, declared in plan.params.items():
        default = f" (default {common.to_json(declared['default'])})" if "default" in declared else ", which must be given"
        common.out(common.clean(f"  takes {name}: {declared['type']}{default}"))
    for step in sorted(plan.steps, key=lambda step: turns[step.name]):
        common.out(common.clean(f"  {turns[step.name]:>3}. {step.name}: {step.tool}{_about(step)}"))
    return common.SUCCEEDED


def _turns(steps: Sequence[Checked]) -> dict[str, int]:
    """When each step can begin at the earliest; those of one turn run at the same time."""
    turns: dict[str, int] = {}
    for step in steps:  # whatever it waits for stands before it
        turns[step.name] = 1 + max((turns[name] for name in step.waits_for), default=0)
    return turns


def _about(step: Checked) -> str:
    parts = [
        f"after {', '.join(step.waits_for)}" if step.waits_for else "",
        f"when {' and '.join(map(str, step.when))}" if step.when else "",
        f"skipped without {', '.join(step.needs)}" if step.needs else "",
        "asks first" if step.approval is not None else "",
        f"on failure: {step.on_failure}" if step.on_failure != "stop" else "",
    ]
    return "".join(f"; {part}" for part in parts if part)
