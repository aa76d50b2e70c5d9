"""`Step`, and the documents of plans: the journal, plan files and models use the same form.

`named`, `pins` and `with_signature` help to build a plan as an agent.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from perdure.agent import Agent
from perdure.agents.plan.conditions import written_condition
from perdure.agents.plan.refs import Condition, Ref, written_arguments
from perdure.core.approval import Approval
from perdure.core.codec import shown
from perdure.errors import InvalidInput
from perdure.run import Run
from perdure.tool import Tool

NO_DEFAULT = inspect.Parameter.empty


def named(callees: Iterable[Any]) -> dict[str, Callee]:
    """Tools and agents by name. InvalidInput if two have the same name."""
    found: dict[str, Callee] = {}
    for callee in callees:
        if not isinstance(callee, (Tool, Agent)):
            raise InvalidInput(f"{shown(callee)} is neither a tool nor an agent; decorate the function with @tool")
        if found.setdefault(callee.name, callee) is not callee:
            raise InvalidInput(f"two different tools are called {callee.name}, so a step could mean either; rename one of them")
    return found


def pins(callees: Iterable[Callee]) -> dict[str, str]:
    """A dict: name → the pin of the tool, or the version of the agent."""
    return {callee.name: callee.pin() if isinstance(callee, Tool) else callee.version for callee in callees}


def with_signature(function: Any, name: str, home: Mapping[str, Any], takes: Mapping[str, tuple[Any, Any]]) -> Any:
    """Give the function this name, this module (`home`) and the parameters `takes`: name → (type, default)."""
    parameters = [inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Run)]
    # Required parameters come first and may be positional. Parameters with a default are keyword-only.
    for one, (annotation, default) in sorted(takes.items(), key=lambda item: item[1][1] is not NO_DEFAULT):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if default is NO_DEFAULT else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one, kind, annotation=annotation, default=default))
    function.__signature__ = inspect.Signature(parameters, return_annotation=dict[str, Any])
    function.__name__ = function.__qualname__ = name
    function.__module__ = home.get("__name__", function.__module__)
    return function


# -- steps and documents ----------------------------------------------------------------------------------------------
OnFailure = Literal["stop", "continue", "undo", "ask"]
Callee = Tool[..., Any] | Agent[..., Any]
Document = dict[str, Any]
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict, "any": Any}
_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", Any: "any"}


class Step:
    """One call of a plan: a tool or an agent with its arguments.

    In the arguments `ref(…)` and `param(…)` are placeholders for values that are known only when the plan runs.

    `when`: a condition such as `ref("test", "failures") == 0`, or a list of conditions. If a condition does not hold,
    the step is skipped. `on_failure`: what to do if the step fails: "stop" the plan, "continue" without the step
    (steps that refer to this step are skipped), "undo" the completed steps and stop, or "ask" a person. `approval`:
    True or an Approval; a person must approve the exact arguments before the call. `after`: names of steps that must
    have ended, with any outcome, before this step begins. `description`: what the step is for, in a sentence;
    `perdure show`, `events`, `audit` and `trace` show it with the calls of the step.
    """

    def __init__(
        self,
        name: str,
        tool: Callee,
        args: Mapping[str, Any] | None = None,
        *,
        when: Ref | Condition | Sequence[Ref | Condition] | None = None,
        on_failure: OnFailure = "stop",
        approval: bool | Approval | None = None,
        after: str | Sequence[str] = (),
        description: str | None = None,
    ) -> None:
        self.name = name
        self.tool = tool
        self.args = args
        self.when = when
        self.on_failure = on_failure
        self.approval = approval
        self.after = after
        self.description = description

    def __repr__(self) -> str:
        return f"<step {shown(self.name)} {getattr(self.tool, 'name', shown(self.tool))}>"


def document_of(step: Step) -> Document:
    """The step as a document. InvalidInput if it cannot be written as JSON. check.py checks its meaning later."""
    document: Document = {"name": step.name, "tool": getattr(step.tool, "name", None)}
    if not isinstance(step.tool, (Tool, Agent)):
        raise InvalidInput(f"{shown(step.tool)} is neither a tool nor an agent; decorate the function with @tool")
    if step.args is not None and not isinstance(step.args, Mapping):
        raise InvalidInput(f"its arguments are {shown(step.args)}, not a dict: name → value")
    if step.args:
        document["args"] = written_arguments(dict(step.args))
    if step.when is not None and not (isinstance(step.when, (list, tuple)) and not step.when):
        conditions = step.when if isinstance(step.when, (list, tuple)) else [step.when]
        document["when"] = [written_condition(condition) for condition in conditions]
    if step.on_failure != "stop":
        document["on_failure"] = step.on_failure
    if step.approval not in (None, False):
        document["approval"] = written_approval(step.approval)
    if step.after:
        document["after"] = [step.after] if isinstance(step.after, str) else list(step.after)
    if step.description is not None:
        document["description"] = step.description
    return document


def params_of(params: Mapping[str, Any] | None) -> Document:
    """The plan's parameters as a document: `{"replicas": {"type": "integer", "default": 2}}`."""
    if params is not None and not isinstance(params, Mapping):
        raise InvalidInput(f'params={shown(params)} is no dict; write params={{"service": str}}')
    return {name: _param(given) for name, given in (params or {}).items()}


def _param(given: Any) -> Any:
    if isinstance(given, dict):
        kind = given.get("type")
        return {**given, "type": _name(kind)}
    return {"type": _name(given)}


def _name(kind: Any) -> Any:
    try:
        return _NAMES.get(kind, kind)
    except TypeError:  # the type is not hashable: check.py reports this
        return kind


# -- approvals as documents -------------------------------------------------------------------------------------------
APPROVAL_WORDS = ("by", "quorum", "expires", "on_expiry", "escalate_to", "escalate_expires", "editable", "four_eyes", "reason")


def written_approval(approval: Any) -> Any:
    """The approval as a document. InvalidInput if it contains a function."""
    if approval is True:
        return True
    if not isinstance(approval, Approval):
        raise InvalidInput(f"approval={shown(approval)} is neither True nor an Approval(…)")
    if approval.when is not None:
        raise InvalidInput("Approval(when=…) is a function, and a plan is data: give it to the tool, or the step a when=")
    same = approval.escalate_us == approval.expires_us
    words = {
        "by": list(approval.by),
        "quorum": approval.quorum if approval.quorum != 1 else None,
        "expires": None if approval.expires_us is None else approval.expires_us / 1e6,
        "on_expiry": approval.on_expiry if approval.on_expiry != "reject" else None,
        "escalate_to": list(approval.escalate_to),
        "escalate_expires": None if approval.escalate_us is None or same or not approval.escalate_to else approval.escalate_us / 1e6,
        "editable": list(approval.editable),
        "four_eyes": approval.four_eyes or None,
        "reason": approval.reason,
    }
    return {word: value for word, value in words.items() if value not in (None, [])} or True


def read_approval(form: Any) -> Approval | None:
    """The approval from a document. InvalidInput if the document is not valid."""
    if form is None or form is False:
        return None
    if form is True:
        return Approval()
    if not isinstance(form, dict):
        raise InvalidInput(f'approval is true, or who and how, such as {{by = "role:ops", expires = 3600}}; not {shown(form)}')
    unknown = [word for word in form if word not in APPROVAL_WORDS]
    if unknown:
        raise InvalidInput(f"approval has no {shown(unknown[0])}; it has {', '.join(APPROVAL_WORDS)}")
    return Approval(**form)
