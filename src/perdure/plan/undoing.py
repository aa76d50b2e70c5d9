"""Taking back what a plan has done: the compensate hooks of its steps' tools, the last one first, each a journaled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from perdure import shell
from perdure.core.failures import IN_DOUBT_KINDS
from perdure.core.identity import is_id
from perdure.errors import InvalidInput, ResultNotEncodable, ToolFailed
from perdure.plan.step import Callee
from perdure.run import Run
from perdure.tool import Tool

_NAMED = 20


class Deed(Struct, frozen=True):
    """A step that has happened."""

    step: str
    callee: Callee
    arguments: dict[str, Any]
    result: Any
    told: bool = True  # False: what it returned could not be recorded


class Undone(Struct, frozen=True):
    """What was taken back, and what stays and why."""

    steps: list[str]
    left: list[tuple[str, str]]

    def words(self, run_id: str, doubtful: Sequence[str]) -> str:
        """For the end of the message that a plan fails with."""
        parts = [f"; undone: {', '.join(self.steps[:_NAMED])}{_more(self.steps)}" if self.steps else "; nothing was undone"]
        if self.left:
            named = ", ".join(f"{step} [{why}]" for step, why in self.left[:_NAMED])
            parts.append(f"; could not be undone: {named}{_more(self.left)}; once that is mended: perdure undo {_as_recorded(run_id)}")
        if doubtful:
            parts.append(f"; may have happened all the same: {', '.join(doubtful[:_NAMED])}{_more(doubtful)}")
        return "".join(parts)


def _as_recorded(run_id: str) -> str:
    """The id as a word of a command. The message is recorded and compared on replay, so that an id stands in it as in older journals."""
    return run_id if is_id(run_id) else shell.quote(run_id)


def may_have_happened(error: Exception, callee: Callee) -> bool:
    """Whether a call that has failed may have had its effect."""
    if not isinstance(error, ToolFailed) or error.kind not in IN_DOUBT_KINDS or not error.attempts:
        return False
    if not isinstance(callee, Tool):
        return True
    # A call that was given up between its attempts is in no doubt where a doubt would have been asked about first.
    settled = ("read", "transaction") if error.kind != "cancelled" else ("read", "transaction", "once", "keyed")
    return callee.effect not in settled


async def undo(run: Run, deeds: Sequence[Deed]) -> Undone:
    """Undo them, the last one first. A hook that fails leaves its own step as it is, and the others are still undone."""
    undone = Undone([], [])
    for deed in reversed(deeds):
        callee = deed.callee
        if not isinstance(callee, Tool):
            undone.left.append((deed.step, "it is a run of its own"))
            continue
        if callee.effect == "read":
            continue
        hook = callee.compensation()
        if hook is None or callee.compensator is None:
            undone.left.append((deed.step, "its tool has no compensate hook"))
        elif not deed.told and callee.compensator.takes_result:
            undone.left.append((deed.step, "its result could not be recorded, and its compensate hook needs it"))
        elif (problem := await _undo_one(run, deed, hook)) is not None:
            undone.left.append((deed.step, problem))
        else:
            undone.steps.append(deed.step)
    return undone


async def _undo_one(run: Run, deed: Deed, hook: Tool[..., Any]) -> str | None:
    """Call the hook; why it could not undo the step, None if it has."""
    run.status(f"undoing step {deed.step}")
    try:
        await hook(arguments=deed.arguments, result=deed.result)
    except ResultNotEncodable:
        return None  # it has happened; what it returned is nobody's concern
    except ToolFailed as failed:
        return f"{failed.type}: {failed.message[:200]}"
    except InvalidInput as refused:
        return str(refused)[:200]
    return None


def _more(named: Sequence[Any]) -> str:
    return f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
