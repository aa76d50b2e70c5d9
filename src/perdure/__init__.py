"""perdure: agents that outlive the process that runs them."""

from perdure.agent import Agent, agent
from perdure.app import Handle, Perdure
from perdure.core.retry import Retry
from perdure.errors import (
    AlreadyRunning,
    Conflict,
    Diverged,
    Fatal,
    InvalidInput,
    NeedsAttention,
    NotAllowedInAgent,
    NotEncodable,
    NotFound,
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
)
from perdure.run import Run
from perdure.settings import Settings
from perdure.tool import Call, Outcome, Tool, tool

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "AlreadyRunning",
    "Call",
    "Conflict",
    "Diverged",
    "Fatal",
    "Handle",
    "InvalidInput",
    "NeedsAttention",
    "NotAllowedInAgent",
    "NotEncodable",
    "NotFound",
    "NotSent",
    "Outcome",
    "Perdure",
    "PerdureError",
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
    "agent",
    "tool",
]
