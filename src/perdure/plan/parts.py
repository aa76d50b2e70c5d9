"""What an agent that is put together from tools is made of: their names, what they are, and a function that looks written."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from perdure.agent import Agent
from perdure.core.codec import shown
from perdure.errors import InvalidInput
from perdure.plan.step import Callee
from perdure.run import Run
from perdure.tool import Tool

NO_DEFAULT = inspect.Parameter.empty


def named(callees: Iterable[Any]) -> dict[str, Callee]:
    """Tools and agents by their names; InvalidInput when two have the same."""
    found: dict[str, Callee] = {}
    for callee in callees:
        if not isinstance(callee, (Tool, Agent)):
            raise InvalidInput(f"{shown(callee)} is neither a tool nor an agent; decorate the function with @tool")
        if found.setdefault(callee.name, callee) is not callee:
            raise InvalidInput(f"two different tools are called {callee.name}: nobody could tell which a step means; rename one")
    return found


def pins(callees: Iterable[Callee]) -> dict[str, str]:
    """What each tool or agent is, in short: it changes with them."""
    return {callee.name: callee.pin() if isinstance(callee, Tool) else callee.version for callee in callees}


def dressed(function: Any, name: str, home: Mapping[str, Any], takes: Mapping[str, tuple[Any, Any]]) -> Any:
    """The function as if it had been written in its home, under this name, with these parameters: (type, default) each."""
    parameters = [inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Run)]
    # What must be given can be given by place too; what has a default cannot stand before it, so that it goes by name alone.
    for one, (annotation, default) in sorted(takes.items(), key=lambda item: item[1][1] is not NO_DEFAULT):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if default is NO_DEFAULT else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one, kind, annotation=annotation, default=default))
    function.__signature__ = inspect.Signature(parameters, return_annotation=dict[str, Any])
    function.__name__ = function.__qualname__ = name
    function.__module__ = home.get("__name__", function.__module__)
    return function
