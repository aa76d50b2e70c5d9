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
        yield "this comment names no rule, and excuses nothing", _WRITE
    for rule in rules:
        if rule not in RULES:
            yield f"there is no rule {rule!r}", f"one of {', '.join(RULES)}"
        elif (line, rule) not in used:
            yield f"there is nothing of {rule} to ignore in this line", "take the comment away, so that it does not hide what comes later"
    if rules and not words["reason"].strip(" \t:–-"):
        yield "nobody can tell later whether this is still right", _WRITE


def _rules(words: re.Match[str]) -> list[str]:
    return [rule.strip() for rule in (words["rules"] or "").split(",") if rule.strip()]


def _comments(text: str) -> Iterator[tuple[int, int, re.Match[str]]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (words := _FORM.search(token.string)) is not None:
                yield token.start[0], token.start[1] + 1 + words.start(), words
    except (tokenize.TokenError, SyntaxError):
        return  # the parser reports the error
