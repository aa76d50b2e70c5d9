"""The policy of `@tool(approval=…)`: which calls need an approval?

The policy is checked when the tool is declared, and asked before each call. If the policy itself fails, the call needs
an approval, and the request says what went wrong.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from perdure.core.approval import Approval
from perdure.core.codec import shown
from perdure.core.failures import clean, describe
from perdure.errors import InvalidInput
from perdure.interrupts import is_interrupt

Predicate = Callable[..., bool | str]
MAX_REASON_CHARS = 1_000
_SLOW_S = 0.1
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

log = logging.getLogger("perdure.worker")


class Policy:
    """An Approval, and the arguments that its predicate takes."""

    def __init__(self, tool: str, approval: Approval, takes: Collection[str]) -> None:
        self.approval = approval
        self._tool = tool
        unknown = [name for name in approval.editable if name not in takes]
        if unknown:
            raise InvalidInput(
                f"tool {tool}: Approval(editable=…) names {unknown[0]!a}; the tool takes {', '.join(takes) or 'no arguments'}"
            )
        self._looks_at = [] if approval.when is None else _looks_at(tool, approval.when, takes)

    def asks(self, arguments: Callable[[], dict[str, Any]]) -> str | bool:
        """Does the call need an approval? False, True, or the reason to show."""
        when = self.approval.when
        if when is None:
            return True
        begun_s = time.monotonic()
        try:
            typed = arguments()
            answer = when(**{name: typed[name] for name in self._looks_at})
        except BaseException as error:  # even SystemExit must not end the worker, and must not allow the call
            if is_interrupt(error):
                raise
            failure = describe(error)
            return clean(f"the approval policy of {self._tool} raised {failure.type}: {failure.message}", MAX_REASON_CHARS)
        finally:
            if (took_s := time.monotonic() - begun_s) > _SLOW_S:
                log.warning("the approval policy of tool %s took %.1f s, and every run of this worker waited for it", self._tool, took_s)
        if isinstance(answer, bool):
            return answer
        if isinstance(answer, str) and answer:
            return clean(str.__str__(answer), MAX_REASON_CHARS)
        if inspect.iscoroutine(answer):
            answer.close()
        found = "empty text" if isinstance(answer, str) else "None" if answer is None else f"a {type(answer).__name__}"
        return clean(f"the approval policy of {self._tool} answered with {found}; it must be True, False or a reason", MAX_REASON_CHARS)


def policy_of(tool: str, given: bool | Predicate | Approval | None, takes: Collection[str]) -> Policy | None:
    """The policy for the value of `approval=`. Raises InvalidInput if that policy cannot work."""
    if given is None or given is False:
        return None
    if given is True:
        return Policy(tool, Approval(), takes)
    if isinstance(given, Approval):
        return Policy(tool, given, takes)
    if not callable(given):
        raise InvalidInput(
            f"tool {tool}: approval={shown(given)} is neither True, nor an Approval(…), nor a function of the tool's arguments"
        )
    return Policy(tool, Approval(when=given), takes)


def _looks_at(tool: str, when: Predicate, takes: Collection[str]) -> list[str]:
    try:
        parameters = inspect.signature(when).parameters.values()
    except (TypeError, ValueError):
        raise InvalidInput(f"tool {tool}: the parameters of its approval policy {when!r:.60} are not known; write a function") from None
    if inspect.iscoroutinefunction(when) or inspect.isgeneratorfunction(when) or inspect.isasyncgenfunction(when):
        raise InvalidInput(
            f"tool {tool}: its approval policy must answer at once: a plain function of the tool's arguments, not an async one"
        )
    for parameter in parameters:
        if parameter.name not in takes or parameter.kind not in _BY_NAME:
            raise InvalidInput(
                f"tool {tool}: its approval policy takes {parameter}; it can take only the tool's arguments, by name: {', '.join(takes)}"
            )
    return [parameter.name for parameter in parameters]
