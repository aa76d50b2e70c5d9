"""perdure: agents that outlive the process that runs them."""

import importlib
from typing import TYPE_CHECKING, Any

from perdure.agent import Agent, agent
from perdure.app import Handle, Perdure
from perdure.core.approval import Approval, Decision
from perdure.core.budget import Budget
from perdure.core.circles import Circles
from perdure.core.events import Usage
from perdure.core.rate import Rate
from perdure.core.retry import Retry
from perdure.errors import (
    AlreadyRunning,
    BudgetExceeded,
    ChildFailed,
    Conflict,
    Diverged,
    Fatal,
    InvalidInput,
    InvalidPlan,
    ModelRefused,
    NeedsAttention,
    NoAnswer,
    NotAllowedInAgent,
    NotApproved,
    NotEncodable,
    NotFound,
    NotPermitted,
    NotReady,
    NotSent,
    OutputInvalid,
    PerdureError,
    PlanFailed,
    ResultNotEncodable,
    ResultTimeout,
    RetryLater,
    RunCancelled,
    RunEnded,
    RunFailed,
    StoreError,
    ToolFailed,
    TurnsExceeded,
    UnknownAgent,
    WrongVersion,
)
from perdure.run import Run
from perdure.settings import Queue, Settings
from perdure.tool import Call, Outcome, Tool, tool

if TYPE_CHECKING:
    from perdure.integrations.mcp import mcp
    from perdure.plan import Plan, Step, param, ref
    from perdure.react import ReAct

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "AlreadyRunning",
    "Approval",
    "Budget",
    "BudgetExceeded",
    "Call",
    "ChildFailed",
    "Circles",
    "Conflict",
    "Decision",
    "Diverged",
    "Fatal",
    "Handle",
    "InvalidInput",
    "InvalidPlan",
    "ModelRefused",
    "NeedsAttention",
    "NoAnswer",
    "NotAllowedInAgent",
    "NotApproved",
    "NotEncodable",
    "NotFound",
    "NotPermitted",
    "NotReady",
    "NotSent",
    "Outcome",
    "OutputInvalid",
    "Perdure",
    "PerdureError",
    "Plan",
    "PlanFailed",
    "Queue",
    "Rate",
    "ReAct",
    "ResultNotEncodable",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "Run",
    "RunCancelled",
    "RunEnded",
    "RunFailed",
    "Settings",
    "Step",
    "StoreError",
    "Tool",
    "ToolFailed",
    "TurnsExceeded",
    "UnknownAgent",
    "Usage",
    "WrongVersion",
    "agent",
    "mcp",
    "param",
    "ref",
    "tool",
]


# What not every process uses is loaded when it is asked for: a worker that serves neither plans nor models does not wait for them.
_LATER = {
    "Plan": "perdure.plan",
    "ReAct": "perdure.react",
    "Step": "perdure.plan",
    "mcp": "perdure.integrations.mcp",
    "param": "perdure.plan",
    "ref": "perdure.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value
