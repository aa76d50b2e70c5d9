"""A recorded plan in words: its name and its steps."""

from __future__ import annotations

from typing import Any

from perdure.core.codec import Payload
from perdure.inspect.models import Load
from perdure.inspect.words import clip, plain, plural, shown

STEPS_NAMED = 8


def plan_words(plan: Payload, load: Load | None = None) -> str:
    """The plan deploy: build, lb, dns (3 steps)."""
    found = plain(plan, load)
    steps = found.get("steps") if isinstance(found, dict) else None
    if not isinstance(steps, list):
        return f"a plan: {shown(plan)}"
    names = [_name(step) for step in steps]
    more = ", …" if len(names) > STEPS_NAMED else ""
    called = f"the plan {clip(str(found['name']), 60)}" if found.get("name") else "a plan"
    return f"{called}: {', '.join(names[:STEPS_NAMED])}{more} ({plural(len(names), 'step')})"


def _name(step: Any) -> str:
    name = step.get("name") if isinstance(step, dict) else step
    return clip(str(name), 40)
