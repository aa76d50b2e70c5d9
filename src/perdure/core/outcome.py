"""What a reconcile hook can say about an attempt."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class Outcome(Struct, frozen=True):
    """What a reconcile hook knows about an attempt whose outcome is unknown."""

    kind: Literal["happened", "not_happened", "in_progress", "unknown"]
    result: Any = None
    why: str | None = None
    final: bool = False

    @classmethod
    def happened(cls, result: Any = None) -> Outcome:
        """It happened, and this is what the call returns."""
        return cls("happened", result=result)

    @classmethod
    def not_happened(cls, *, final: bool = False) -> Outcome:
        """It did not happen: the call may be made again, once the request can no longer be on its way.

        `final=True`: the service has ruled it out, now and later (it has cancelled the key, or its database is yours). Believed at once.
        """
        return cls("not_happened", final=final)

    @classmethod
    def in_progress(cls) -> Outcome:
        """The service is still at it: ask again later."""
        return cls("in_progress")

    @classmethod
    def unknown(cls, why: str) -> Outcome:
        """The hook cannot tell; a person has to decide."""
        return cls("unknown", why=why)
