"""Labels: short texts by which people find runs, such as customer=c-7. The rules for their names and values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perdure.core.codec import shown
from perdure.core.invisible import all_printable
from perdure.errors import InvalidInput

MAX_LABELS = 32
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 256
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")


def is_label_key(text: str) -> bool:
    return len(text) <= MAX_KEY_CHARS and _KEY.match(text) is not None


def is_label_value(text: str) -> bool:
    return 0 < len(text) <= MAX_VALUE_CHARS and all_printable(text)


def checked_labels(given: Mapping[str, str | None], what: str, *, removable: bool = False) -> dict[str, str | None]:
    """These labels, sorted by key. InvalidInput if a key or a value is not usable.

    `removable`: a value may be None, which removes the label.
    """
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what}: {shown(given)} is not a dict of labels, such as {{'customer': 'c-7'}}")
    for key, value in given.items():
        if not isinstance(key, str) or not is_label_key(key):
            raise InvalidInput(
                f"{what}: {shown(key)} cannot be the key of a label: 1 to {MAX_KEY_CHARS} characters out of A-Z a-z 0-9 and _ - ., the first one "
                "a letter, digit or _"
            )
        if value is None and removable:
            continue
        if not isinstance(value, str) or not is_label_value(value):
            removed = "; None removes the label" if removable else ""
            raise InvalidInput(
                f"{what}: {shown(value)} cannot be the value of label {key}: a text of 1 to {MAX_VALUE_CHARS} visible characters{removed}"
            )
    # Plain texts, also for subclasses of str such as members of a StrEnum.
    return {str.__str__(key): None if value is None else str.__str__(value) for key, value in sorted(given.items())}


def with_labels(labels: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after these changes."""
    merged = {**labels, **changes}
    return {key: value for key, value in sorted(merged.items()) if value is not None}


def check_number(labels: Mapping[str, str], what: str) -> None:
    if len(labels) > MAX_LABELS:
        raise InvalidInput(f"{what}: {len(labels)} labels; a run has at most {MAX_LABELS}: remove some")
