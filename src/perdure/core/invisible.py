"""Characters that a reader cannot see: which they are, and how text that holds some is shown.

The one rule behind names and behind all text that people read before they decide: a name holds none of these characters, and
other text is shown with each of them as its escape. Text in the journal stays as it was written.
"""

from __future__ import annotations

import re
import unicodedata

# The Default_Ignorable_Code_Point set of Unicode (DerivedCoreProperties.txt), which a terminal may show as nothing, and U+2800, the
# empty pattern of Braille. Python's isprintable() counts many of them as printable: those are marks and letters by their category.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def is_visible(char: str) -> bool:
    """Whether the character is safe to show: it can be seen, or is a blank, and it neither moves the cursor nor reorders a line."""
    # Other blanks than the space are not printable to Python, such as the one of Japanese text.
    return not _INVISIBLE.match(char) and (char.isprintable() or unicodedata.category(char) == "Zs")


def all_printable(text: str) -> bool:
    """Whether every character is printable, and none of them invisible."""
    return text.isprintable() and not _INVISIBLE.search(text)


def without_invisible(text: str) -> str:
    return _INVISIBLE.sub("", text)


def escaped(text: str, keep: str = "") -> str:
    """The text with every character that is not visible as its escape, such as \\u200b, except those in `keep`."""
    if all_printable(text):
        return text
    return "".join(char if char in keep or is_visible(char) else char.encode("unicode_escape").decode("ascii") for char in text)
