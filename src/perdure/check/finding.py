"""Finding (a place in a file, what is wrong there, and what to do), the list of rules, and `# perdure: ignore`."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

Severity = Literal["error", "note"]  # error: the code breaks replay or safety. note: the code may be right


class Finding(Struct, frozen=True, order=True):
    """One problem in a file. Line and column begin at 1; the column counts characters."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    where: str  # "agent deploy → stamp", "tool refund", or "" for the file itself
    message: str
    way_out: str


# id of a rule → what the rule reports, in one sentence. Never change an id: users write it in `# perdure: ignore[…]`.
RULES: dict[str, str] = {
    "clock": "The wall clock inside an agent: a replay comes later and sees another time.",
    "random": "Randomness inside an agent: a replay gets other values.",
    "io": "Files, network, processes, environment inside an agent: not recorded, done again by every replay, or refused.",
    "global": "State that outlives the run, changed or read by an agent: a replay finds other values there.",
    "thread": "Threads, executors and other loops inside an agent: their order is not recorded, and the agent's loop refuses them.",
    "order": "Iterating over a set inside an agent: the order differs from process to process.",
    "swallow": "Catching everything around an await: the agent swallows its own cancellation.",
    "print": "Printing inside an agent: every replay prints it again.",
    "checkpoint": "An agent that loops for ever without a checkpoint, or takes checkpoints and never reads run.restored.",
    "effect": "A tool without an effect class, or with an unknown one.",
    "key": "A keyed tool that does not send call.key: the service cannot drop the duplicate.",
    "reconcile": "A once tool without a reconcile hook: after a crash inside a call a person must resolve it.",
    "timeout": "A once tool with a reconcile hook and without a timeout: no limit says how late a lost request may arrive.",
    "undecorated": "A plain function where a tool is needed: perdure refuses it.",
    "syntax": "A file that Python cannot parse.",
    "ignore": "A `# perdure: ignore[…]` that is without a reason, names no rule, or has nothing to ignore.",
}


# -- `# perdure: ignore[clock] why`: findings that the user has accepted


_MARK = "perdure: ignore"
_FORM = re.compile(r"#\s*perdure: ignore\b(?:\[(?P<rules>[^\]]*)\])?(?P<reason>.*)")
_WRITE = "write # perdure: ignore[RULE] and why"


def without_ignored(path: str, text: str, found: Iterable[Finding]) -> list[Finding]:
    """The findings that no ignore comment accepts, and a note for each useless or incomplete ignore comment."""
    if _MARK not in text:  # most files have no such comment, and tokenizing takes longer than all other checks
        return list(found)
    excuses = {line: (column, _rules(words), words) for line, column, words in _comments(text)}
    used: set[tuple[int, str]] = set()
    left: list[Finding] = []
    for finding in found:
        if finding.line in excuses and finding.rule in excuses[finding.line][1]:
            used.add((finding.line, finding.rule))
        else:
            left.append(finding)
    for line, (column, rules, words) in excuses.items():
        left += [Finding(path, line, column, "ignore", "note", "", *said) for said in _useless(line, rules, words, used)]
    return sorted(left)


def _useless(line: int, rules: list[str], words: re.Match[str], used: set[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    if not rules:
        yield "this comment names no rule, and ignores nothing", _WRITE
    for rule in rules:
        if rule not in RULES:
            yield f"there is no rule {rule!r}", f"one of {', '.join(RULES)}"
        elif (line, rule) not in used:
            yield f"rule {rule} has no finding in this line", "remove the comment, so that it does not hide a later finding"
    if rules and not words["reason"].strip(" \t:–-"):
        yield "this comment gives no reason, so its readers cannot tell whether it is still right", _WRITE


def _rules(words: re.Match[str]) -> list[str]:
    return [rule.strip() for rule in (words["rules"] or "").split(",") if rule.strip()]


def _comments(text: str) -> Iterator[tuple[int, int, re.Match[str]]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (words := _FORM.search(token.string)) is not None:
                yield token.start[0], token.start[1] + 1 + words.start(), words
    except (tokenize.TokenError, SyntaxError):
        return  # the parser reports the error
