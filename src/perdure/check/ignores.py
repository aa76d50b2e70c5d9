"""`# perdure: ignore[clock] why`: what somebody has looked at and found right."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from perdure.check.finding import RULES, Finding

_MARK = "perdure: ignore"
_FORM = re.compile(r"#\s*perdure: ignore\b(?:\[(?P<rules>[^\]]*)\])?(?P<reason>.*)")
_WRITE = "write # perdure: ignore[RULE] and why"


def without_ignored(path: str, text: str, found: Iterable[Finding]) -> list[Finding]:
    """The findings that nobody has excused, and a note about every excuse that is of no use."""
    if _MARK not in text:  # most files have none, and reading their tokens takes longer than all the rest
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
        return  # the parser has said what is wrong with it
