"""Commands that a reader is told to type. All of them are made here, so that none executes what it only names.

Ids, targets, file names and URLs come from databases, folders and settings of others. Pasted into sh, bash, zsh or fish, each is
one word of plain text, whatever is in it.
"""

from __future__ import annotations

import re
import unicodedata

# What needs no quotes in any of these shells. Not a `=` in front, which zsh takes for the name of a program, and no `~` at all.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-][A-Za-z0-9_./:@+=-]*")
_WORD, _TARGET = r"[A-Za-z0-9_./:@+][A-Za-z0-9_./:@+=-]*+", r"[A-Za-z0-9_./:@+][A-Za-z0-9_./:@+=-]*\.py:\w+"
# A command inside a sentence: its verb, and what it is about where that needs no quotes.
_COMMAND = re.compile(
    r"\bperdure (?:(?:why|show|events|resume|replay|cancel|pause|unpause|undo|approve|reject|worker)"
    rf"(?: {_WORD}(?: {_TARGET})?+|(?= [-']))|(?:list|approvals|verify|migrate)\b)(?! [^;,`]*--url )"
)


def command(verb: str, *words: str) -> str:
    """`perdure VERB WORDS`, ready to be pasted. Options of ours are put behind it by the caller."""
    # A word from a database must not be an option either: `--url=…` would choose the server that a password goes to.
    guard = ["--"] if any(word.startswith("-") for word in words) else []
    return " ".join(["perdure", verb, *guard, *map(quote, words)])


def quote(text: str) -> str:
    """The text as one word of a command line; characters that a terminal acts on are shown as escapes, and name nothing then."""
    shown = "".join(char if _is_shown(char) else char.encode("unicode_escape").decode("ascii") for char in text)
    if _PLAIN.fullmatch(shown):
        return shown
    # Not shlex.quote: in fish a backslash inside of quotes escapes, and '\' does not end. Outside of them it means the same in all.
    inside = re.sub(r"['\\]", lambda char: f"'\\{char[0]}'", shown)
    # So that with_options finds no command inside of a word: options put there would end the quotes.
    return f"'{inside}'".replace("perdure ", "perdure'\\ '")


def with_options(text: str, options: str) -> str:
    """The text, with these options in every command that it tells the reader to type, unless that has a --url already."""
    return _COMMAND.sub(lambda found: found[0] + options, text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # other blanks, such as the one of Japanese text
