"""Who may say yes to what, and what a yes, a no or silence does. Pure: told the standing and the time, it says what follows.

    pending ──→ approved ──→ consumed (by the commit that starts the call)
       │            └──────→ expired  (lapsed: the call could not start in time) | withdrawn (nobody wants the call any more)
       └──→ rejected | expired | withdrawn

A change is asked for as data, a `Judgement`: somebody votes, time is over, or nobody wants the answer any more. `judge` says what
follows, inside one transaction of the store, so that of two who decide at once the second one sees what the first has left (T17).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, assert_never, get_args

import msgspec
from msgspec import Struct

from perdure.core import codec, schema
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
from perdure.errors import Conflict, InvalidInput, NotPermitted

Outcome = Literal["approved", "rejected", "expired", "withdrawn"]
ApprovalStatus = Literal["pending", "approved", "rejected", "expired", "withdrawn", "consumed"]
MAX_WHO_CHARS = 200
MAX_DECIDERS = 100
LONGEST_S = 10 * 366 * 86_400.0
A_NAME = f"1 to {MAX_WHO_CHARS} printable characters, none of them invisible, with no blank at either end"
_ROLE = "role:"


class Decision(Struct, frozen=True):
    """What the agent learns about its approval. `granted` is True for "approved" alone."""

    granted: bool
    outcome: Outcome
    by: str | None = None
    note: str | None = None
    input: Any = None  # what was approved: as asked, or as edited


class Approval:
    """When a call needs a person, and which.

    `by` names who may decide ("ann", "role:finance"; nobody: anybody), of whom `quorum` must agree and one suffices to reject.
    `expires` is how long they have; then `on_expiry`: "reject", "escalate" (to `escalate_to`, for `escalate_expires`), or "wait"
    (they are reminded). `editable` are the arguments that a decision may change. With `four_eyes` whoever the run acts for may not
    say yes. `when` is asked with the call's arguments, and answers True, False, or with the reason to show.
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
            raise InvalidInput("Approval(escalate_expires=…) without escalate_to= gives nobody any time")
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
            raise InvalidInput(f"Approval(on_expiry={self.on_expiry!r}) without expires= never comes to that; say how long they have")
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
        """Why nobody could ever grant this to a run that acts for `requester`; None if somebody can."""
        if not self.four_eyes:
            return None
        if requester is None:
            return "it needs a second pair of eyes, and nobody knows whose the first is: start the run with actor="
        if not self.by or self._suffices(self.by, requester) or self._suffices(self.escalate_to, requester):
            return None
        return (
            f"{self.quorum} of {', '.join(self.by)} must agree, and without {requester}, for whom the run acts, that cannot be: "
            "name more who may decide, or lower the quorum"
        )

    def _suffices(self, asked: tuple[str, ...], requester: str) -> bool:
        # Who is in a role is known only when somebody decides.
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
        """The request as it is journaled."""
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
    """What somebody says about an approval."""

    by: str
    granted: bool
    roles: tuple[str, ...] = ()
    note: str | None = None
    source: str | None = None
    digest: str | None = None  # of what they have seen, where they can tell
    edit: dict[str, Any] | None = None


class Expire(Struct, frozen=True, gc=False):
    """Its time is over: pending, or granted and not used."""


class Withdraw(Struct, frozen=True, gc=False):
    """The run does not want the answer any more."""


Judgement = Vote | Expire | Withdraw


class Standing(Struct, frozen=True, gc=False):
    """How an approval stands."""

    request: ApprovalRequested  # `by` and `expires_at` as they are after an escalation; once approved, until when it may be used
    status: ApprovalStatus = "pending"
    digest: str = ""  # of what is approved
    voters: tuple[str, ...] = ()  # who has agreed so far
    settled_by: str | None = None
    note: str | None = None
    escalated: bool = False

    @property
    def agreed(self) -> int:
        return count_people(self.voters)


class Ruling(Struct, frozen=True, gc=False):
    """What follows: the approval's new standing, and what the run is told."""

    standing: Standing
    body: AnyBody


class ApprovalFacts(Struct, frozen=True, gc=False):
    """What a judgement must know beside the standing. The two texts are JSON, and only a vote that edits needs them."""

    requester: str | None = None  # whom the run acts for
    input: bytes | None = None  # what is proposed
    schema: bytes | None = None  # of its editable fields, where the request has one


def judge(standing: Standing, facts: ApprovalFacts, judgement: Judgement, now: int) -> Ruling:
    """What follows from the judgement; the error says why nothing does."""
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
    """What a vote does; Conflict when it is too late, NotPermitted when it is not theirs to say, InvalidInput for a wrong edit."""
    request = standing.request
    _check_pending(standing, now)
    _check_permitted(request, vote, facts.requester)
    if vote.digest is not None and vote.digest != request.digest:
        raise Conflict(
            f"approval {request.approval} is about {request.digest[:12]}, not about {vote.digest[:12]}; look at it again: perdure approvals"
        )
    # Checked whatever the vote comes to: an edit that is passed over would have somebody agree to what they wanted to change.
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
    """Until when a yes may be used: as long as the question itself could have stayed open."""
    if request.expires_at is None or request.on_expiry == "wait":
        return None  # the time was that of a reminder
    if request.on_expiry == "escalate" and not escalated and request.escalate_us is not None:
        return request.expires_at + request.escalate_us
    return request.expires_at


def judge_expiry(standing: Standing, now: int) -> Ruling:
    """What the passing of time does; Conflict when it is settled already, or has not passed."""
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
    # Who has agreed before may not be among those who are asked now: they decide afresh.
    voters = standing.voters if request.on_expiry == "wait" else ()
    after = msgspec.structs.replace(standing, request=asked_of, escalated=True, voters=voters)
    return Ruling(after, ApprovalEscalated(request.approval, to, expires_at))


def judge_withdrawal(standing: Standing) -> Ruling:
    """What it means that nobody wants the answer any more; Conflict when there is one already."""
    # The agent that asked with run.approve has its answer with the yes; only a call can still be given up.
    if standing.status != "pending" and (standing.status != "approved" or standing.request.tool is None):
        raise Conflict(f"approval {standing.request.approval} is {standing.status} already")
    return Ruling(_settled(standing, "withdrawn", None, None), ApprovalWithdrawn(standing.request.approval))


def same_name(who: Any) -> str | None:
    """A name as it is compared and recorded, in a policy and of who decides: one person has one; None if it is no name."""
    if not isinstance(who, str) or not 0 < len(who.strip()) == len(who) <= MAX_WHO_CHARS or not all_printable(who):
        return None
    name = _compared(who)
    return name if 0 < len(name) <= MAX_WHO_CHARS and all_printable(name) else None


def may_decide(by: Sequence[str], who: str, roles: Iterable[str]) -> bool:
    """Whether somebody is among those who may decide."""
    if not by:
        return True
    # A person who is called "role:finance" is not in that role, and a recorded name is no role because it looks like one once compared.
    named = {_compared(one) for one in by if not one.startswith(_ROLE)}
    asked = {_compared(one.removeprefix(_ROLE)) for one in by if one.startswith(_ROLE)}
    return (_compared(who) in named and not who.startswith(_ROLE)) or any(_compared(role) in asked for role in roles)


def count_people(names: Iterable[str]) -> int:
    """How many different people these names are: an older version may have recorded one person under two spellings."""
    return len({*map(_compared, names)})


def _compared(name: str) -> str:
    """What all spellings of one name have in common: NFKC, single blanks, and without invisible characters.

    `same_name` refuses invisible characters. Older versions took some of them, and their journals hold such names.
    """
    if name.isascii():
        shape = name
    else:
        # Twice: a compatibility form can stand for an invisible letter, and what stood on both sides of one may combine.
        shape = unicodedata.normalize("NFKC", without_invisible(unicodedata.normalize("NFKC", name)))
    return " ".join(shape.split())


def _is_same(one: str, other: str) -> bool:
    return _compared(one) == _compared(other)


def _check_pending(standing: Standing, now: int) -> None:
    request = standing.request
    if standing.status != "pending":
        by = f" by {standing.settled_by}" if standing.settled_by else ""
        raise Conflict(f"approval {request.approval} has been settled: {standing.status}{by}; one decision counts")
    # Where time only reminds, it does not matter whether a worker has been there to do so.
    if request.expires_at is not None and now >= request.expires_at and request.on_expiry != "wait":
        raise Conflict(f"approval {request.approval} has expired; nothing can be decided about it any more")


def _check_permitted(request: ApprovalRequested, vote: Vote, requester: str | None) -> None:
    if not vote.granted and requester is not None and _is_same(vote.by, requester):
        return  # whoever it is done for may always do without it
    if vote.granted and request.four_eyes and (requester is None or _is_same(vote.by, requester)):
        who = f"{vote.by} is who the run acts for" if requester else "nobody knows who the run acts for (start it with actor=)"
        raise NotPermitted(f"approval {request.approval} needs a second pair of eyes, and {who}")
    if not may_decide(request.by, vote.by, vote.roles):
        raise NotPermitted(f"approval {request.approval} is for {', '.join(request.by)} to decide; {vote.by} is not among them")


def _settled(standing: Standing, status: ApprovalStatus, by: str | None, note: str | None) -> Standing:
    return msgspec.structs.replace(standing, status=status, settled_by=by, note=note)


def _edited(request: ApprovalRequested, facts: ApprovalFacts, vote: Vote) -> bytes:
    """The input as edited; InvalidInput names the field and the rule."""
    assert facts.input is not None, request.approval
    before, edit = codec.decode(facts.input), vote.edit
    if not isinstance(edit, dict) or not isinstance(before, dict):
        raise InvalidInput(f"approval {request.approval}: an edit is an object of fields, and so must be what is edited")
    if not vote.granted:
        raise InvalidInput(f"approval {request.approval}: what is rejected is not edited; say in the note what should change")
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
        return schema.problem(value, whole.get("properties", {}).get(name, {}), whole.get("$defs", {}))
    if _kind(value) != _kind(before) and not (type(before) is float and type(value) is int):
        return f"must be {_kind(before)}, as what was asked for"
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
