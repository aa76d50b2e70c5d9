"""Shell commands that perdure suggests to the reader. All these commands are built here, so that all are quoted.

Ids, targets, file names and URLs may come from untrusted databases, folders and settings. When a command is pasted
into sh, bash, zsh or fish, each of these values must be one word of plain text.
"""

from __future__ import annotations

import re
import unicodedata

# A word that needs no quotes in any of these shells. It must not begin with `=`, which zsh expands to the path of a
# program, and it must not contain `~`.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-][A-Za-z0-9_./:@+=-]*")
_WORD, _TARGET = r"[A-Za-z0-9_./:@+][A-Za-z0-9_./:@+=-]*+", r"[A-Za-z0-9_./:@+][A-Za-z0-9_./:@+=-]*\.py:\w+"
# A command inside a sentence: the verb, and the arguments if they need no quotes.
_COMMAND = re.compile(
    r"\bperdure (?:(?:why|show|events|resume|replay|cancel|pause|unpause|undo|retry|rewind|approve|reject|worker)"
    rf"(?: {_WORD}(?: {_TARGET})?+|(?= [-']))|prune(?= --specimen )|(?:list|approvals|verify|migrate)\b)(?! [^;,`]*--url )"
)


def command(verb: str, *words: str) -> str:
    """`perdure VERB WORDS`, ready to be pasted. The caller may append options."""
    # A word from a database must not act as an option: `--url=…` would choose the server that receives a password.
    guard = ["--"] if any(word.startswith("-") for word in words) else []
    return " ".join(["perdure", verb, *guard, *map(quote, words)])


def quote(text: str) -> str:
    """The text as one word of a command line.

    Control characters are escaped. A word with such an escape differs from the original text.
    """
    shown = "".join(char if _is_shown(char) else char.encode("unicode_escape").decode("ascii") for char in text)
    if _PLAIN.fullmatch(shown):
        return shown
    # shlex.quote is not used: inside quotes, fish treats a backslash as an escape, so '\' would not end at the second
    # quote. Outside of quotes, all these shells treat a backslash in the same way.
    inside = re.sub(r"['\\]", lambda char: f"'\\{char[0]}'", shown)
    # Break up "perdure ", so that with_options finds no command inside a quoted word: the quotes in inserted options
    # would end that word.
    return f"'{inside}'".replace("perdure ", "perdure'\\ '")


def with_options(text: str, options: str) -> str:
    """The text with these options added to every suggested command that has no --url yet."""
    return _COMMAND.sub(lambda found: found[0] + options, text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # Zs: blanks such as the ideographic space
