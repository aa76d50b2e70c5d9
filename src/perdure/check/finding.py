"""A finding: one place in a file, what is wrong there, and the way out."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Severity = Literal["error", "note"]  # it breaks replay or safety · it is worth knowing


class Finding(Struct, frozen=True, order=True):
    """One thing that was found. Line and column count from 1, the column in characters."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    where: str  # "agent deploy → stamp", "tool refund", or "" for the file itself
    message: str
    way_out: str


# rule → what it looks for, in one sentence. The ids are stable: they stand in people's comments.
RULES: dict[str, str] = {
    "clock": "The wall clock inside an agent: a replay comes later and sees another time.",
    "random": "Chance inside an agent: a replay draws something else.",
    "io": "Files, network, processes, environment inside an agent: not recorded, done again by every replay, or refused.",
    "global": "State that outlives the run, changed or read by an agent: a replay begins with what others have left there.",
    "thread": "Threads, executors and other loops inside an agent: nothing orders them, and the agent's loop refuses them.",
    "order": "Walking a set inside an agent: its order is another one in every process.",
    "swallow": "Catching everything around an await: the agent does not hear that it is cancelled.",
    "print": "Printing inside an agent: every replay prints it again.",
    "effect": "A tool that does not say what is right when its answer is lost, or says something unknown.",
    "key": "A keyed tool that does not hand call.key on: the service cannot drop the duplicate.",
    "reconcile": "A once tool without a reconcile hook: after a crash inside it a person must settle it.",
    "timeout": "A once tool with a reconcile hook and without a timeout: nothing bounds how long a lost request may be on its way.",
    "undecorated": "A plain function where a tool is wanted: it is refused.",
    "syntax": "A file that Python cannot parse.",
    "ignore": "A `# perdure: ignore[…]` that is without a reason, names no rule, or has nothing to ignore.",
}
