"""How an attempt of a call can end, and what a reconcile hook can answer about it. Plain data, no exceptions."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from perdure.core.events import Failure


class Returned(Struct, frozen=True, gc=False):
    """The effect happened. `result` is canonical JSON of what the tool returned."""

    result: bytes


class Unrecordable(Struct, frozen=True, gc=False):
    """The effect happened, but its result cannot be recorded.

    That is no reason for another attempt (T2).
    """

    failure: Failure


class Raised(Struct, frozen=True, gc=False):
    """The attempt ended without a result. `failure.kind` says whether the effect may have happened."""

    failure: Failure


class Abandoned(Struct, frozen=True, gc=False):
    """The attempt was told to stop and did not. The effect may have happened, and the attempt may still be running."""

    failure: Failure


Performed = Returned | Unrecordable | Raised | Abandoned


# -- answers of a reconcile hook ----------------------------------------------------------------------------------------
class Outcome(Struct, frozen=True):
    """What a reconcile hook knows about an attempt whose outcome is unknown."""

    kind: Literal["happened", "not_happened", "in_progress", "unknown"]
    result: Any = None
    why: str | None = None
    final: bool = False

    @classmethod
    def happened(cls, result: Any = None) -> Outcome:
        """The effect happened, and `result` is what the call returns."""
        return cls("happened", result=result)

    @classmethod
    def not_happened(cls, *, final: bool = False) -> Outcome:
        """The effect did not happen. The call may be made again once its request can no longer arrive at the service.

        `final=True`: the effect cannot happen later either, for example because the service has cancelled the key.
        Then the call may be made again at once.
        """
        return cls("not_happened", final=final)

    @classmethod
    def in_progress(cls) -> Outcome:
        """The service is still working on the request: perdure asks again later."""
        return cls("in_progress")

    @classmethod
    def unknown(cls, why: str) -> Outcome:
        """The hook cannot tell.

        If the tool is `keyed` and its key is still valid, the call is made again with the same key. If not, a person
        has to find out what happened.
        """
        return cls("unknown", why=why)
