"""Plans: an agent that follows fixed steps, or steps that a model has written."""

from perdure.agents.plan.built import Plan
from perdure.agents.plan.refs import Condition, Ref, param, ref
from perdure.agents.plan.step import Step

__all__ = ["Condition", "Plan", "Ref", "Step", "param", "ref"]
