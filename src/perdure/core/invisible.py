"""Invisible characters: which characters are invisible, and how text that contains them is shown.

There is one rule for names, and one for all other text that people read before they decide. A name contains no
invisible character. In other text, each invisible character is shown escaped. The text in the journal is not changed.
"""

from __future__ import annotations

import re
import unicodedata

# The Default_Ignorable_Code_Point set of Unicode (DerivedCoreProperties.txt), which a terminal may show as nothing,
# and U+2800, the empty pattern of Braille. Python's isprintable() says True for many of these characters, because
# their Unicode category is mark or letter.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def is_visible(char: str) -> bool:
    """Is the character safe to show? It must be visible or a blank. It must not move the cursor or reorder a line."""
    # Python does not count blanks other than the space as printable, such as the ideographic space of Japanese text.
    return not _INVISIBLE.match(char) and (char.isprintable() or unicodedata.category(char) == "Zs")


def all_printable(text: str) -> bool:
    """Is every character printable and visible?"""
    return text.isprintable() and not _INVISIBLE.search(text)


def without_invisible(text: str) -> str:
    return _INVISIBLE.sub("", text)


def escaped(text: str, keep: str = "") -> str:
    """The text with every invisible character escaped, such as \\u200b, except the characters in `keep`."""
    if all_printable(text):
        return text
    return "".join(char if char in keep or is_visible(char) else char.encode("unicode_escape").decode("ascii") for char in text)
