"""Who may approve what, and what a vote, an expiry or a withdrawal does.

Everything here is pure: the state of the approval (its standing) and the time are arguments.

    pending ──→ approved ──→ consumed (by the commit that starts the call)
       │            └──────→ expired (the call could not start in time) | withdrawn (the agent stopped waiting)
       └──→ rejected | expired | withdrawn

A change is requested as data, a `Judgement`: a vote, an expiry or a withdrawal. `judge` computes the result inside one
transaction of the store. So if two people decide at the same time, the second person gets the decision of the first
person as an answer (T17).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, assert_never, get_args

import msgspec
from msgspec import Struct

from perdure.core import codec, json_schema
from perdure.core.codec import Payload, shown
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    OnExpiry,
)
from perdure.core.invisible import all_printable, without_invisible
from perdure.core.times import iso
from perdure.errors import Conflict, InvalidInput, NotPermitted

Outcome = Literal["approved", "rejected", "expired", "withdrawn"]
ApprovalStatus = Literal["pending", "approved", "rejected", "expired", "withdrawn", "consumed"]
MAX_WHO_CHARS = 200
MAX_DECIDERS = 100
LONGEST_S = 10 * 366 * 86_400.0
A_NAME = f"1 to {MAX_WHO_CHARS} printable characters, none of them invisible, with no blank at either end"
_ROLE = "role:"


class Decision(Struct, frozen=True):
    """What `run.request_approval` returns."""

    granted: bool  # True only if the outcome is "approved"
    outcome: Outcome  # "approved", "rejected", "expired" or "withdrawn"
    by: str | None = None  # the people who approved, or the person who rejected
    note: str | None = None  # the note of the person whose vote decided
    input: Any = None  # only if granted: the approved input, with the changes that a person made


class Approval:
    """When a call needs an approval, and who may decide.

    Used in `@tool(approval=…)`, in steps of plans, and in `run.request_approval(policy=…)`.

    `by` names the people and roles that may decide, such as "ann" or "role:finance". If `by` is empty, every person
    may decide. `quorum` people must agree; one rejection is enough to reject. `expires` is how long these people have,
    in seconds or as a timedelta. After that time `on_expiry` says what happens: "reject"; "escalate", which asks the
    people in `escalate_to` and gives them the time `escalate_expires`; or "wait", which reminds the same people.
    `editable` names the arguments that a decision may change. With `four_eyes`, the actor of the run may not approve.
    `reason` is shown to the people who decide. `when` is a plain function of some of the call's arguments. It returns
    True (ask), False (do not ask), or the reason to show.
    """

    def __init__(
        self,
        *,
        by: str | Sequence[str] = (),
        quorum: int = 1,
        expires: float | timedelta | None = None,
        on_expiry: OnExpiry = "reject",
        escalate_to: str | Sequence[str] = (),
        escalate_expires: float | timedelta | None = None,
        editable: str | Sequence[str] = (),
        four_eyes: bool = False,
        reason: str | None = None,
        when: Callable[..., bool | str] | None = None,
    ) -> None:
        self.by = _deciders(by, "by")
        self.quorum = quorum
        self.expires_us = None if expires is None else _micros(expires, "expires")
        self.on_expiry: OnExpiry = on_expiry
        self.escalate_to = _deciders(escalate_to, "escalate_to")
        self.escalate_us = self.expires_us if escalate_expires is None else _micros(escalate_expires, "escalate_expires")
        self.editable = _names(editable, "editable")
        self.four_eyes = four_eyes
        self.reason = reason
        self.when = when
        if escalate_expires is not None and not self.escalate_to:
            raise InvalidInput("Approval(escalate_expires=…) has no effect without escalate_to=: name the people to ask then")
        self._check()

    def _check(self) -> None:
        if not isinstance(self.quorum, int) or isinstance(self.quorum, bool) or not 1 <= self.quorum <= MAX_DECIDERS:
            raise InvalidInput(f"Approval(quorum={shown(self.quorum)}): a whole number from 1 to {MAX_DECIDERS}")
        for name, asked in (("by", self.by), ("escalate_to", self.escalate_to)):
            if asked and len(asked) < self.quorum and not any(who.startswith(_ROLE) for who in asked):
                raise InvalidInput(f"Approval(quorum={self.quorum}, {name}=…): only {len(asked)} may decide: it could never be granted")
        if self.on_expiry not in get_args(OnExpiry):
            raise InvalidInput(f"Approval(on_expiry={shown(self.on_expiry)}): one of {', '.join(get_args(OnExpiry))}")
        if self.on_expiry != "reject" and self.expires_us is None:
            raise InvalidInput(f"Approval(on_expiry={self.on_expiry!r}) has no effect without expires=: say how long they have")
        if (self.on_expiry == "escalate") != bool(self.escalate_to):
            raise InvalidInput('Approval: on_expiry="escalate" and escalate_to= belong together')
        if self.quorum > 1 and self.editable:
            raise InvalidInput("Approval: what several people must agree on cannot be edited by one of them; reject it with a note instead")
        if not isinstance(self.four_eyes, bool):
            raise InvalidInput(f"Approval(four_eyes={shown(self.four_eyes)}): True or False")
        if self.reason is not None and not isinstance(self.reason, str):
            raise InvalidInput(f"Approval(reason={shown(self.reason)}): text")
        if self.when is not None and not callable(self.when):
            raise InvalidInput("Approval(when=…): a function of the call's arguments that answers True, False or with a reason")

    def check_for(self, requester: str | None) -> str | None:
        """Why this approval could never be granted to a run that acts for `requester`; None if it can be granted."""
        if not self.four_eyes:
            return None
        if requester is None:
            return "it needs a second person (four_eyes), and it is not known for whom the run acts: start the run with actor="
        if not self.by or self._suffices(self.by, requester) or self._suffices(self.escalate_to, requester):
            return None
        return (
            f"{self.quorum} of {', '.join(self.by)} must agree, and without {requester}, for whom the run acts, that is impossible: "
            "name more who may decide, or lower the quorum"
        )

    def _suffices(self, asked: tuple[str, ...], requester: str) -> bool:
        # The members of a role are not known here. The roles of a voter are checked when that person votes.
        return any(who.startswith(_ROLE) for who in asked) or len({*map(_compared, asked)} - {_compared(requester)}) >= self.quorum

    def request(
        self,
        approval: str,
        action: str,
        payload: Payload,
        encoded: bytes,
        *,
        now: int,
        reason: str | None = None,
        tool: str | None = None,
        editable_schema: Payload | None = None,
    ) -> ApprovalRequested:
        """The request as it is recorded."""
        return ApprovalRequested(
            approval=approval,
            action=action,
            input=payload,
            digest=codec.digest(encoded),
            reason=reason or self.reason,
            by=self.by,
            quorum=self.quorum,
            expires_at=None if self.expires_us is None else now + self.expires_us,
            on_expiry=self.on_expiry,
            escalate_to=self.escalate_to,
            escalate_us=self.escalate_us,
            editable=self.editable,
            schema=editable_schema,
            four_eyes=self.four_eyes,
            tool=tool,
        )


class Vote(Struct, frozen=True, gc=False):
    """One person's vote on an approval."""

    by: str
    granted: bool
    roles: tuple[str, ...] = ()
    note: str | None = None
    source: str | None = None
    digest: str | None = None  # the digest of the input that the voter has seen, if it is known
    edit: dict[str, Any] | None = None


class Expire(Struct, frozen=True, gc=False):
    """The time of an approval is over. The approval is pending, or it is granted and not consumed."""


class Withdraw(Struct, frozen=True, gc=False):
    """The run no longer waits for the decision about this approval."""


Judgement = Vote | Expire | Withdraw


class Standing(Struct, frozen=True, gc=False):
    """The current state of an approval."""

    # `by` and `expires_at` include an escalation. After the grant `expires_at` says until when the approval may be
    # consumed.
    request: ApprovalRequested
    status: ApprovalStatus = "pending"
    digest: str = ""  # the digest of the approved input
    voters: tuple[str, ...] = ()  # the people who have agreed so far
    settled_by: str | None = None
    note: str | None = None
    escalated: bool = False

    @property
    def agreed(self) -> int:
        return count_people(self.voters)


class Ruling(Struct, frozen=True, gc=False):
    """The result of a judgement: the approval's new standing, and the event for the run."""

    standing: Standing
    body: AnyBody


class ApprovalFacts(Struct, frozen=True, gc=False):
    """The facts that a judgement needs in addition to the standing.

    `input` and `schema` are JSON. They are needed only for a vote with an edit.
    """

    requester: str | None = None  # the person for whom the run acts
    input: bytes | None = None  # the input as the run requested it
    schema: bytes | None = None  # JSON Schema of the editable fields, if the request has one
    settled_at: int | None = None  # when the approval was settled; None: it is pending


def judge(standing: Standing, facts: ApprovalFacts, judgement: Judgement, now: int) -> Ruling:
    """The result of the judgement. Conflict, NotPermitted or InvalidInput says why the judgement changes nothing."""
    match judgement:
        case Vote():
            return judge_vote(standing, facts, judgement, now)
        case Expire():
            return judge_expiry(standing, now)
        case Withdraw():
            return judge_withdrawal(standing)
        case _:
            assert_never(judgement)


def judge_vote(standing: Standing, facts: ApprovalFacts, vote: Vote, now: int) -> Ruling:
    """The result of a vote. Conflict: too late. NotPermitted: the voter may not decide. InvalidInput: a wrong edit."""
    request = standing.request
    _check_pending(standing, facts.settled_at, now)
    _check_permitted(request, vote, facts.requester)
    if vote.digest is not None and vote.digest != request.digest:
        raise Conflict(
            f"approval {request.approval} is about {request.digest[:12]}, not about {vote.digest[:12]}",
            hint="look at it again: perdure approvals",
        )
    # The edit is always checked, also if this vote does not decide yet. If the edit were ignored, a person would
    # approve input that differs from what this person wanted.
    encoded = None if vote.edit is None else _edited(request, facts, vote)
    if not vote.granted:
        body = ApprovalDecided(request.approval, False, vote.by, request.digest, note=vote.note, source=vote.source)
        return Ruling(_settled(standing, "rejected", vote.by, vote.note), body)
    if any(_is_same(vote.by, voter) for voter in standing.voters):
        raise Conflict(f"{vote.by} has already approved {request.approval}; {request.quorum - standing.agreed} more must agree")
    voters = (*standing.voters, vote.by)
    after = msgspec.structs.replace(standing, voters=voters)
    if after.agreed < request.quorum:
        voted = ApprovalVoted(request.approval, vote.by, request.digest, note=vote.note, source=vote.source)
        return Ruling(after, voted)
    edited, digest = None, request.digest
    if encoded is not None:
        edited, digest = codec.pack(encoded, codec.MAX_BYTES)[0], codec.digest(encoded)
    decided = ApprovalDecided(
        request.approval,
        True,
        ", ".join(voters),
        digest,
        note=vote.note,
        source=vote.source,
        input=edited if digest != request.digest else None,
    )
    settled = _settled(standing, "approved", decided.by, vote.note)
    until = msgspec.structs.replace(request, expires_at=usable_until(request, escalated=standing.escalated))
    return Ruling(msgspec.structs.replace(settled, request=until, voters=voters, digest=digest), decided)


def usable_until(request: ApprovalRequested, *, escalated: bool) -> int | None:
    """Until when a granted approval may be consumed: for as long as the request itself could have stayed open."""
    if request.expires_at is None or request.on_expiry == "wait":
        return None  # `expires_at` was only the time of a reminder
    if request.on_expiry == "escalate" and not escalated and request.escalate_us is not None:
        return request.expires_at + request.escalate_us
    return request.expires_at


def judge_expiry(standing: Standing, now: int) -> Ruling:
    """The result of an expiry. Conflict: the approval is settled already, or its time is not over."""
    request = standing.request
    if request.expires_at is None or now < request.expires_at or standing.status not in ("pending", "approved"):
        raise Conflict(f"approval {request.approval} is {standing.status} and does not expire now")
    if standing.status == "approved":
        if request.tool is None:
            raise Conflict(f"approval {request.approval} has been decided")
        return Ruling(_settled(standing, "expired", None, standing.note), ApprovalExpired(request.approval, lapsed=True))
    if request.on_expiry == "reject" or standing.escalated:
        return Ruling(_settled(standing, "expired", None, None), ApprovalExpired(request.approval))
    to = request.escalate_to if request.on_expiry == "escalate" else request.by
    expires_at = now + request.escalate_us if request.on_expiry == "escalate" and request.escalate_us is not None else None
    asked_of = msgspec.structs.replace(request, by=to, expires_at=expires_at)
    # Earlier votes do not count after an escalation: the voters may not be among the people who are asked now.
    voters = standing.voters if request.on_expiry == "wait" else ()
    after = msgspec.structs.replace(standing, request=asked_of, escalated=True, voters=voters)
    return Ruling(after, ApprovalEscalated(request.approval, to, expires_at))


def judge_withdrawal(standing: Standing) -> Ruling:
    """The result of a withdrawal. Conflict: the approval is settled already."""
    # After run.request_approval the agent has its answer as soon as the approval is granted. Only the approval of a
    # tool call can be withdrawn after it was granted.
    if standing.status != "pending" and (standing.status != "approved" or standing.request.tool is None):
        raise Conflict(f"approval {standing.request.approval} is {standing.status} already")
    return Ruling(_settled(standing, "withdrawn", None, None), ApprovalWithdrawn(standing.request.approval))


def same_name(who: Any) -> str | None:
    """The form of a name that is recorded and compared: one form for each person. None if the name is not valid."""
    if not isinstance(who, str) or not 0 < len(who.strip()) == len(who) <= MAX_WHO_CHARS or not all_printable(who):
        return None
    name = _compared(who)
    return name if 0 < len(name) <= MAX_WHO_CHARS and all_printable(name) else None


def may_decide(by: Sequence[str], who: str, roles: Iterable[str]) -> bool:
    """Is `who`, with these roles, among the people who may decide?"""
    if not by:
        return True
    # A person with the name "role:finance" does not get the role "finance". A name that becomes "role:…" only through
    # normalization is no role.
    named = {_compared(one) for one in by if not one.startswith(_ROLE)}
    asked = {_compared(one.removeprefix(_ROLE)) for one in by if one.startswith(_ROLE)}
    return (_compared(who) in named and not who.startswith(_ROLE)) or any(_compared(role) in asked for role in roles)


def count_people(names: Iterable[str]) -> int:
    """How many different people have these names. Older versions may have recorded one person under two spellings."""
    return len({*map(_compared, names)})


def _compared(name: str) -> str:
    """The normalized form of a name, the same for all its spellings: NFKC, single blanks, no invisible characters.

    `same_name` refuses names with invisible characters. Older versions accepted some of these characters, so journals
    may contain such names.
    """
    if name.isascii():
        shape = name
    else:
        # Normalize twice: NFKC can produce an invisible character, and when an invisible character is removed, the
        # characters around it may combine.
        shape = unicodedata.normalize("NFKC", without_invisible(unicodedata.normalize("NFKC", name)))
    return " ".join(shape.split())


def _is_same(one: str, other: str) -> bool:
    return _compared(one) == _compared(other)


def _check_pending(standing: Standing, settled_at: int | None, now: int) -> None:
    request = standing.request
    if standing.status == "withdrawn":
        at = "" if settled_at is None else f" at {iso(settled_at)}"
        raise Conflict(f"approval {request.approval} was withdrawn by the run{at}; there is nothing to decide any more")
    if standing.status != "pending":
        by = f" by {standing.settled_by}" if standing.settled_by else ""
        raise Conflict(f"approval {request.approval} has been settled: {standing.status}{by}; one decision counts")
    # With on_expiry="wait" the time only causes a reminder. A vote counts before and after that reminder.
    if request.expires_at is not None and now >= request.expires_at and request.on_expiry != "wait":
        raise Conflict(f"approval {request.approval} has expired; nothing can be decided about it any more")


def _check_permitted(request: ApprovalRequested, vote: Vote, requester: str | None) -> None:
    if not vote.granted and requester is not None and _is_same(vote.by, requester):
        return  # the person for whom the run acts may always reject
    if vote.granted and request.four_eyes and (requester is None or _is_same(vote.by, requester)):
        who = f"the run acts for {vote.by}" if requester else "it is not known for whom the run acts (start it with actor=)"
        raise NotPermitted(f"approval {request.approval} needs a second person (four_eyes), and {who}")
    if not may_decide(request.by, vote.by, vote.roles):
        raise NotPermitted(f"approval {request.approval} is for {', '.join(request.by)} to decide; {vote.by} is not among them")


def _settled(standing: Standing, status: ApprovalStatus, by: str | None, note: str | None) -> Standing:
    return msgspec.structs.replace(standing, status=status, settled_by=by, note=note)


def _edited(request: ApprovalRequested, facts: ApprovalFacts, vote: Vote) -> bytes:
    """The edited input. InvalidInput names the wrong field and the rule that is broken."""
    assert facts.input is not None, request.approval
    before, edit = codec.decode(facts.input), vote.edit
    if not isinstance(edit, dict) or not isinstance(before, dict):
        raise InvalidInput(f"approval {request.approval}: an edit is an object of fields, so the input must be an object too")
    if not vote.granted:
        raise InvalidInput(f"approval {request.approval}: a rejection cannot edit the input; say in the note what should change")
    for name, value in edit.items():
        if name not in request.editable:
            allowed = ", ".join(request.editable) or "nothing"
            raise InvalidInput(f"approval {request.approval}: {shown(name)} may not be edited; {allowed} may")
        wrong = _wrong(facts, before.get(name), name, value)
        if wrong is not None:
            raise InvalidInput(f"approval {request.approval}: {name} = {codec.encode(value)[:80].decode('utf-8', 'replace')}: {wrong}")
    return codec.encode({**before, **edit})


def _wrong(facts: ApprovalFacts, before: Any, name: str, value: Any) -> str | None:
    if facts.schema is not None:
        whole = codec.decode(facts.schema)
        return json_schema.problem(value, whole.get("properties", {}).get(name, {}), whole.get("$defs", {}))
    if _kind(value) != _kind(before) and not (type(before) is float and type(value) is int):
        return f"must be {_kind(before)}, like the value in the request"
    return None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((int, "a whole number"), (float, "a number"), (str, "text"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "null"


def _deciders(who: str | Sequence[str], name: str) -> tuple[str, ...]:
    deciders = tuple(dict.fromkeys(known for one in _names(who, name) if (known := same_name(one)) is not None))
    if len(deciders) > MAX_DECIDERS:
        raise InvalidInput(f"Approval({name}=…): {len(deciders)} who may decide; at most {MAX_DECIDERS}: use a role")
    if _ROLE in deciders:
        raise InvalidInput(f'Approval({name}=…): "{_ROLE}" names no role')
    return deciders


def _names(given: Any, name: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else None
    if names is None or any(same_name(one) is None for one in names):
        raise InvalidInput(f"Approval({name}={shown(given)}): a name or a list of names, each of {A_NAME}")
    return tuple(dict.fromkeys(names))


def _micros(value: Any, name: str) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_S:
        raise InvalidInput(f"Approval({name}={shown(value)}): seconds or a timedelta, above 0 and at most ten years")
    return max(1, round(seconds * 1e6))
