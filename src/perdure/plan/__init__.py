"""Plans: steps that are known beforehand, or that a model has written, followed as an agent."""

from perdure.plan.built import Plan
from perdure.plan.refs import Condition, Ref, param, ref
from perdure.plan.step import Step

__all__ = ["Condition", "Plan", "Ref", "Step", "param", "ref"]
