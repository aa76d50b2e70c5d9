"""perdure: durable agents. When the process that runs an agent dies, another process continues the run."""

import importlib
from typing import TYPE_CHECKING, Any

from perdure import moved
from perdure.agent import Agent, AgentInput, agent
from perdure.app import FailureInfo, Handle, Perdure, RunInfo, RunningCall, RunStatus
from perdure.core.approval import Approval, Decision
from perdure.core.budget import Budget
from perdure.core.events import Event, Usage
from perdure.core.loop_detector import Circles
from perdure.core.rate import Rate
from perdure.core.retry import Retry
from perdure.core.state import CallState, RunState
from perdure.errors import (
    AlreadyRunning,
    ArtifactNotSaved,
    BudgetExceeded,
    ChildFailed,
    Conflict,
    Diverged,
    Fatal,
    InvalidInput,
    InvalidPlan,
    InvalidQuery,
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
from perdure.reopen import LiveFork, Reopened, ReopenedCall
from perdure.run import Run
from perdure.schedule import Cron, Every, Schedule, Tick
from perdure.scheduling import ScheduleInfo
from perdure.settings import Queue, Settings
from perdure.store.api import ApprovalRow, CostRow
from perdure.tool import Artifact, Call, Outcome, Secret, Tool, tool
from perdure.undo import UndoPlan

if TYPE_CHECKING:
    from perdure.agents.mcp.tools import mcp
    from perdure.agents.plan import Plan, Step, param, ref
    from perdure.agents.react.agent import ReAct
    from perdure.fork import Fork
    from perdure.inspect.diff import Diff
    from perdure.inspect.inside import Inspection
    from perdure.logs import JsonFormatter, RunFilter
    from perdure.metrics import Metrics, MetricsServer

__version__ = "0.2.0.dev0"
__all__ = [
    "Agent",
    "AgentInput",
    "AlreadyRunning",
    "Approval",
    "ApprovalRow",
    "Artifact",
    "ArtifactNotSaved",
    "Budget",
    "BudgetExceeded",
    "Call",
    "CallState",
    "ChildFailed",
    "Circles",
    "Conflict",
    "CostRow",
    "Cron",
    "Decision",
    "Diff",
    "Diverged",
    "Event",
    "Every",
    "FailureInfo",
    "Fatal",
    "Fork",
    "Handle",
    "Inspection",
    "InvalidInput",
    "InvalidPlan",
    "InvalidQuery",
    "JsonFormatter",
    "LiveFork",
    "Metrics",
    "MetricsServer",
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
    "Reopened",
    "ReopenedCall",
    "ResultNotEncodable",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "Run",
    "RunCancelled",
    "RunEnded",
    "RunFailed",
    "RunFilter",
    "RunInfo",
    "RunState",
    "RunStatus",
    "RunningCall",
    "Schedule",
    "ScheduleInfo",
    "Secret",
    "Settings",
    "Step",
    "StoreError",
    "Tick",
    "Tool",
    "ToolFailed",
    "TurnsExceeded",
    "UndoPlan",
    "UnknownAgent",
    "Usage",
    "WrongVersion",
    "agent",
    "mcp",
    "param",
    "ref",
    "tool",
]


# These names are imported at first use: a worker without plans and models starts faster without these imports.
_LATER = {
    "Diff": "perdure.inspect.diff",
    "Fork": "perdure.fork",
    "Inspection": "perdure.inspect.inside",
    "JsonFormatter": "perdure.logs",
    "Metrics": "perdure.metrics",
    "MetricsServer": "perdure.metrics",
    "Plan": "perdure.agents.plan",
    "ReAct": "perdure.agents.react.agent",
    "RunFilter": "perdure.logs",
    "Step": "perdure.agents.plan",
    "mcp": "perdure.agents.mcp.tools",
    "param": "perdure.agents.plan",
    "ref": "perdure.agents.plan",
}


moved.install()


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value
