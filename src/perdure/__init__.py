"""perdure: agents that outlive the process that runs them."""

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
    NeedsAttention,
    NotAllowedInAgent,
    NotApproved,
    NotEncodable,
    NotFound,
    NotPermitted,
    NotSent,
    PerdureError,
    ResultNotEncodable,
    ResultTimeout,
    RetryLater,
    RunCancelled,
    RunEnded,
    RunFailed,
    StoreError,
    ToolFailed,
    UnknownAgent,
    WrongVersion,
)
from perdure.run import Run
from perdure.settings import Queue, Settings
from perdure.tool import Call, Outcome, Tool, tool

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
    "NeedsAttention",
    "NotAllowedInAgent",
    "NotApproved",
    "NotEncodable",
    "NotFound",
    "NotPermitted",
    "NotSent",
    "Outcome",
    "Perdure",
    "PerdureError",
    "Queue",
    "Rate",
    "ResultNotEncodable",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "Run",
    "RunCancelled",
    "RunEnded",
    "RunFailed",
    "Settings",
    "StoreError",
    "Tool",
    "ToolFailed",
    "UnknownAgent",
    "Usage",
    "WrongVersion",
    "agent",
    "tool",
]
