"""Which fields of a tool's arguments and results are stored as a keyed digest, and the key of these digests.

The rules and the key are read when a tool is declared. They come from the environment and not from the settings of an
app: a tool redacts its arguments when it is called, also in a replay or an inspection that has no app, and each of these
processes must do it in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from perdure.core.codec import shown
from perdure.core.redaction import Redaction, rules_of
from perdure.errors import InvalidInput

RULES_VARIABLE = "PERDURE_REDACT"  # rules for all tools, separated by commas
KEY_VARIABLE = "PERDURE_REDACT_KEY"
KEY_FILE_VARIABLE = "PERDURE_REDACT_KEY_FILE"
# The key of the process of an isolated tool: it redacts nothing, and its worker redacts what it returns.
BY_WORKER = "-"
_FEWEST_CHARS = 16


def redaction_of(fields: object, what: str) -> Redaction | None:
    """The redaction by these fields and by the rules for all tools; None if there is no rule.

    InvalidInput if a rule is wrong, or if there are rules and no key.
    """
    environ: Mapping[str, str] = os.environ
    if isinstance(fields, (str, Mapping)) or not isinstance(fields, Collection) or not all(isinstance(one, str) for one in fields):
        raise InvalidInput(f'{what}={shown(fields)} is not a list of fields, such as ["card.number", "items.*.cvv"]')
    lines = [(f"{what}: {one!r:.60}", one if one.startswith(("key:", "path:", "text:")) else f"path:{one}") for one in fields]
    for_all = filter(None, map(str.strip, environ.get(RULES_VARIABLE, "").split(",")))
    lines += [(f"{RULES_VARIABLE}: {one!r:.60}", one) for one in for_all]
    if not lines:
        return None
    rules = rules_of(lines)
    if rules.texts:
        raise InvalidInput(f"{next(where for where, one in lines if one.startswith('text:'))}: a field has a key or a path; no text:REGEX")
    if environ.get(KEY_VARIABLE) == BY_WORKER:
        return None
    return Redaction(_key(what), rules)


def _key(what: str) -> bytes:
    text, file = os.environ.get(KEY_VARIABLE, ""), os.environ.get(KEY_FILE_VARIABLE, "")
    if file and not text:
        try:
            text = Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{what}: the key cannot be read from {KEY_FILE_VARIABLE}={file}: {type(error).__name__}") from None
    if len(text) < _FEWEST_CHARS:
        found = f"has fewer than {_FEWEST_CHARS} characters" if text else "is missing"
        raise InvalidInput(
            f"{what}: the key of the digests {found}; set {KEY_VARIABLE} or {KEY_FILE_VARIABLE}, the same for all workers: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()
