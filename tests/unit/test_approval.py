"""Who may approve what, and the result of an approval, a rejection or an expiry (G9, T16–T20)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import codec
from perdure.core.approval import (
    MAX_DECIDERS,
    Approval,
    ApprovalFacts,
    ApprovalStatus,
    Expire,
    Ruling,
    Standing,
    Vote,
    Withdraw,
    judge,
    judge_expiry,
    judge_withdrawal,
    may_decide,
    same_name,
)
from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    decode_body,
    encode_body,
)
from perdure.errors import Conflict, InvalidInput, NotPermitted

NOW = 1_000_000_000
HOUR = 3_600_000_000
CALL = {"order": "o-7", "cents": 500}


def asked(input: Any = None, *, tool: str | None = "refund", schema: dict[str, Any] | None = None, **policy: Any) -> Standing:
    """An approval that was requested at NOW."""
    encoded = codec.encode(CALL if input is None else input)
    packed = None if schema is None else codec.pack(codec.encode(schema))[0]
    request = Approval(**policy).request("ap-1", "refund", codec.pack(encoded)[0], encoded, now=NOW, tool=tool, editable_schema=packed)
    return Standing(request)


def load(payload: Payload) -> bytes:
    inline = payload.inline
    assert inline is not None
    return inline


def vote(standing: Standing, by: str = "ann", granted: bool = True, *, requester: str | None = None, now: int = NOW, **more: Any) -> Ruling:
    request = standing.request
    facts = ApprovalFacts(requester, load(request.input), None if request.schema is None else load(request.schema))
    return judge(standing, facts, Vote(by, granted, **more), now)


def decided(ruling: Ruling) -> ApprovalDecided:
    assert isinstance(ruling.body, ApprovalDecided)
    return ruling.body


# --- the request ----------------------------------------------------------------------------------------------------------------


def test_a_request_holds_the_digest_of_the_exact_bytes_and_the_policy():
    request = asked(by=["ann", "role:finance"], expires=timedelta(hours=1), editable="cents", four_eyes=True, reason="over $50").request
    assert request.digest == codec.digest(codec.encode(CALL))
    assert codec.decode(load(request.input)) == CALL
    assert (request.by, request.quorum, request.expires_at) == (("ann", "role:finance"), 1, NOW + HOUR)
    assert (request.editable, request.four_eyes, request.reason, request.tool) == (("cents",), True, "over $50", "refund")
    assert decode_body(encode_body(request)) == request


def test_the_reason_of_the_moment_goes_before_that_of_the_policy():
    encoded = codec.encode(CALL)
    made = Approval(reason="always").request("a", "refund", codec.pack(encoded)[0], encoded, now=NOW, reason="over $50")
    assert made.reason == "over $50"


# --- who may decide -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "who", "roles", "may"),
    [
        ((), "anybody", (), True),
        (("ann",), "ann", (), True),
        (("ann",), "Ann", (), False),
        (("ann",), "bob", ("ann",), False),
        (("role:finance",), "bob", ("finance",), True),
        (("role:finance",), "bob", ("sales", "finance"), True),
        (("role:finance",), "bob", ("role:finance",), False),
        (("role:finance",), "role:finance", (), False),  # a name that a person chose to look like a role
        (("role:finance",), "finance", (), False),
        (("ann", "role:finance"), "ann", (), True),
    ],
)
def test_only_those_who_are_named_or_have_a_role_that_is_may_decide(by, who, roles, may):
    assert may_decide(by, who, roles) is may
    if may:
        assert decided(vote(asked(by=by), who, roles=roles)).by == who
    else:
        with pytest.raises(NotPermitted, match=rf"ap-1 is for .* to decide; {who} is not among them"):
            vote(asked(by=by), who, roles=roles)


def test_who_may_not_approve_may_not_reject_either():
    with pytest.raises(NotPermitted):
        vote(asked(by="ann"), "bob", False)


def test_with_four_eyes_whoever_the_run_acts_for_may_not_decide():
    standing = asked(four_eyes=True, by=["ann", "bob"])
    with pytest.raises(NotPermitted, match="the run acts for ann"):
        vote(standing, "ann", requester="ann")
    assert vote(standing, "bob", requester="ann").standing.status == "approved"


def test_a_no_needs_no_second_pair_of_eyes():
    standing = asked(four_eyes=True, by=["ann", "bob"])
    assert vote(standing, "ann", False, requester="ann").standing.status == "rejected"
    assert vote(standing, "bob", False, requester=None).standing.status == "rejected"
    assert vote(asked(by="bob"), "ann", False, requester="ann").standing.status == "rejected", "whoever it is done for may do without it"
    for requester in (None, "bob"):
        with pytest.raises(NotPermitted, match="eve is not among them"):
            vote(standing, "eve", False, requester=requester)


def test_with_four_eyes_nobody_may_say_yes_for_a_run_that_acts_for_nobody_known():
    with pytest.raises(NotPermitted, match="actor="):
        vote(asked(four_eyes=True), "bob", requester=None)


@pytest.mark.parametrize(
    ("policy", "requester", "why"),
    [
        ({}, None, None),
        ({"by": "ann"}, "ann", None),
        ({"four_eyes": True}, "ann", None),
        ({"four_eyes": True}, None, "actor="),
        ({"four_eyes": True, "by": "role:finance"}, None, "actor="),
        ({"four_eyes": True, "by": "ann"}, "ann", "without ann"),
        ({"four_eyes": True, "by": "bob"}, "ann", None),
        ({"four_eyes": True, "by": ["ann", "bob"], "quorum": 2}, "ann", "2 of ann, bob must agree"),
        ({"four_eyes": True, "by": ["ann", "bob"], "quorum": 2}, "eve", None),
        ({"four_eyes": True, "by": ["ann", "bob", "eve"], "quorum": 2}, "ann", None),
        ({"four_eyes": True, "by": ["ann", "role:finance"], "quorum": 2}, "ann", None),
        ({"four_eyes": True, "by": "ann", "expires": 1, "on_expiry": "escalate", "escalate_to": "bob"}, "ann", None),
        ({"four_eyes": True, "by": "ann", "expires": 1, "on_expiry": "escalate", "escalate_to": "ann"}, "ann", "without ann"),
    ],
)
def test_what_nobody_could_ever_grant_is_told_before_it_is_asked(policy, requester, why):
    said = Approval(**policy).check_for(requester)
    assert (said is None) if why is None else (said is not None and why in said)


@pytest.mark.parametrize("wrong", ["", " ", "ann ", " ann", "a\nnn", "a\u200bnn", "x" * 201, "\ufdfa" * 150, "\udcff", 7, None, b"ann"])
def test_one_check_of_names_for_policies_and_for_who_decides(wrong):
    assert same_name(wrong) is None
    with pytest.raises(InvalidInput, match="no blank at either end"):
        Approval(by=[wrong])


def test_the_same_letters_in_another_encoding_are_the_same_name():
    composed, split = "jos\u00e9", "jose\u0301"
    assert composed != split
    assert Approval(by=[split, composed]).by == (composed,)
    assert same_name(split) == same_name(composed) == composed


# What Unicode's DerivedCoreProperties.txt lists as Default_Ignorable_Code_Point: the first and the last of every range, and the blank
# of Braille, which is as empty.
INVISIBLE = [
    *"\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b\u180d\u180e\u180f\u200b\u200d\u200f\u202a\u202e\u2060\u2065\u206f\u2800\u3164",
    *"\ufe00\ufe0e\ufe0f\ufeff\uffa0\ufff0\ufff8\U0001bca0\U0001bca3\U0001d173\U0001d17a\U000e0000\U000e0041\U000e0100\U000e01ef\U000e0fff",
]


@pytest.mark.parametrize("char", INVISIBLE, ids=ascii)
def test_a_name_with_an_invisible_character_is_refused(char: str):
    for name in (f"{char}ann", f"an{char}n", f"ann{char}"):
        assert same_name(name) is None
        for wrong in ({"by": name}, {"by": "eve", "on_expiry": "escalate", "expires": 1, "escalate_to": name}):
            with pytest.raises(InvalidInput, match="printable characters, none of them invisible"):
                Approval(**wrong)


FULLWIDTH = "\uff41\uff4e\uff4e"  # ann
OLD_ANNS = [
    "ann\ufe0f",
    "a\u034fnn",
    "ann \ufe0f",
    "\u3164ann",
    "ann\U000e0100",
    FULLWIDTH,
    f"{FULLWIDTH}\ufe00",
]  # as older versions took them


def test_names_that_look_alike_by_their_form_alone_are_one_name():
    assert same_name(FULLWIDTH) == "ann"
    assert same_name("ann  lee") == "ann lee"
    assert same_name("Ann") == "Ann"
    assert Approval(by=["ann", FULLWIDTH]).by == ("ann",)
    with pytest.raises(InvalidInput, match="only 1 may decide"):
        Approval(by=["ann", FULLWIDTH], quorum=2)
    assert may_decide(Approval(by="role\uff1afinance").by, "bob", ["finance"])


@pytest.mark.parametrize("actor", OLD_ANNS, ids=ascii)
def test_four_eyes_know_a_run_s_actor_however_an_older_version_recorded_the_name(actor: str):
    with pytest.raises(NotPermitted, match="the run acts for ann"):
        vote(asked(four_eyes=True), "ann", requester=actor)
    assert vote(asked(four_eyes=True), "bob", requester=actor).standing.status == "approved"
    assert Approval(four_eyes=True, by=["ann", "bob"], quorum=2).check_for(actor) is not None
    assert vote(asked(by="eve"), "ann", False, requester=actor).standing.status == "rejected"


@pytest.mark.parametrize("voter", OLD_ANNS, ids=ascii)
def test_a_quorum_counts_a_person_once_however_an_older_version_recorded_the_vote(voter: str):
    one = msgspec.structs.replace(asked(quorum=2), voters=(voter,))
    with pytest.raises(Conflict, match="ann has already approved ap-1; 1 more must agree"):
        vote(one, "ann")
    assert vote(one, "bob").standing.status == "approved"
    both = msgspec.structs.replace(asked(quorum=3), voters=("ann", voter))
    after = vote(both, "bob").standing
    assert (after.status, after.voters, after.agreed) == ("pending", ("ann", voter, "bob"), 2)
    assert vote(after, "eve").standing.status == "approved"


@pytest.mark.parametrize("decider", OLD_ANNS, ids=ascii)
def test_who_may_decide_is_found_however_an_older_version_recorded_the_name(decider: str):
    assert may_decide((decider,), "ann", ())
    assert not may_decide((decider,), "bob", ())
    assert may_decide((f"role:{decider}",), "bob", ["ann"])
    # This is a name and no role: text that only looks like a role is no role.
    assert not may_decide((f"role\uff1a{decider}",), "bob", ["ann"])


def test_without_four_eyes_one_may_approve_for_oneself():
    assert vote(asked(), "ann", requester="ann").standing.status == "approved"


# --- one decision ---------------------------------------------------------------------------------------------------------------


def test_a_yes_says_who_from_where_and_to_which_digest():
    standing = asked()
    ruling = vote(standing, "ann", note="fine", source="cli", digest=standing.request.digest)
    assert ruling.body == ApprovalDecided("ap-1", True, "ann", standing.request.digest, note="fine", source="cli")
    assert (ruling.standing.status, ruling.standing.settled_by, ruling.standing.note) == ("approved", "ann", "fine")
    assert (ruling.standing.digest, ruling.standing.voters) == (standing.request.digest, ("ann",))


def test_a_no_says_why():
    ruling = vote(asked(), "ann", False, note="too much")
    assert decided(ruling).granted is False
    assert decided(ruling).note == "too much"
    assert (ruling.standing.status, ruling.standing.settled_by, ruling.standing.digest) == ("rejected", "ann", "")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_of_two_who_decide_the_second_is_refused_and_told_who_was_first(first, second):
    after = vote(asked(), "ann", first).standing
    with pytest.raises(Conflict, match=r"settled: (approved|rejected) by ann; one decision counts"):
        vote(after, "bob", second)


@pytest.mark.parametrize("status", ["approved", "rejected", "expired", "withdrawn", "consumed"])
def test_what_is_settled_takes_no_decision(status: ApprovalStatus):
    with pytest.raises(Conflict, match=status):
        vote(msgspec.structs.replace(asked(), status=status))


def test_a_decision_about_another_digest_is_refused():
    for granted in (True, False):
        with pytest.raises(Conflict, match="look at it again"):
            vote(asked(), granted=granted, digest="0" * 64)


# --- quorum ---------------------------------------------------------------------------------------------------------------------


def test_a_quorum_is_reached_by_different_people():
    standing = asked(by=["ann", "bob", "eve"], quorum=3)
    first = vote(standing, "ann", note="ok", source="cli")
    assert first.body == ApprovalVoted("ap-1", "ann", standing.request.digest, note="ok", source="cli")
    assert (first.standing.status, first.standing.voters) == ("pending", ("ann",))
    second = vote(first.standing, "bob")
    assert isinstance(second.body, ApprovalVoted)
    third = vote(second.standing, "eve")
    assert (decided(third).granted, decided(third).by) == (True, "ann, bob, eve")
    assert (third.standing.status, third.standing.voters) == ("approved", ("ann", "bob", "eve"))


def test_nobody_counts_twice():
    after = vote(asked(by="role:finance", quorum=2), "ann", roles=("finance",)).standing
    with pytest.raises(Conflict, match="ann has already approved ap-1; 1 more must agree"):
        vote(after, "ann", roles=("finance",))


def test_one_no_suffices_also_from_somebody_who_had_agreed():
    after = vote(asked(by=["ann", "bob"], quorum=2), "ann").standing
    for who in ("ann", "bob"):
        assert vote(after, who, False).standing.status == "rejected"


# --- edits ----------------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"cents": {"type": "integer", "minimum": 1}, "to": {"$ref": "#/$defs/To"}},
    "$defs": {"To": {"enum": ["a"]}},
}


def edit(
    fields: dict[str, Any], *, schema: dict[str, Any] | None = SCHEMA, input: Any = None, editable: Any = ("cents", "to"), **more: Any
) -> Ruling:
    return vote(asked(input, schema=schema, editable=editable), edit=fields, **more)


def test_an_edit_of_a_field_that_may_be_is_what_is_approved():
    ruling = edit({"cents": 300})
    body = decided(ruling)
    assert body.input is not None
    assert codec.decode(load(body.input)) == {"order": "o-7", "cents": 300}
    assert body.digest == ruling.standing.digest == codec.digest(load(body.input)) != ruling.standing.request.digest
    assert codec.decode(load(ruling.standing.request.input)) == CALL  # the original request stays recorded


@pytest.mark.parametrize("fields", [{}, {"cents": 500}])
def test_an_edit_that_changes_nothing_approves_what_was_asked(fields):
    ruling = edit(fields)
    assert (decided(ruling).input, decided(ruling).digest) == (None, ruling.standing.request.digest)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"order": "o-8"}, "'order' may not be edited; cents, to may"),
        ({"cents": 1, "order": "o-8"}, "'order' may not be edited"),
        ({"nothing": 1}, "'nothing' may not be edited"),
        ({"": 1}, "'' may not be edited"),
        ({"cents": 0}, "cents = 0: must be a whole number of at least 1"),
        ({"cents": "300"}, 'cents = "300": must be a whole number'),
        ({"cents": True}, "cents = true: must be"),
        ({"cents": 300.0}, "cents = 300.0: must be"),
        ({"cents": None}, "cents = null: must be"),
        ({"to": "b"}, 'to = "b": must be "a"'),
    ],
)
def test_a_wrong_edit_is_refused_by_field_and_rule(fields, said):
    with pytest.raises(InvalidInput) as refused:
        edit(fields)
    assert said in str(refused.value)
    assert "ap-1" in str(refused.value)


def test_nothing_can_be_edited_where_nothing_is_declared_editable():
    with pytest.raises(InvalidInput, match="nothing may"):
        edit({"cents": 300}, editable=())


@pytest.mark.parametrize(
    ("before", "value", "fits"),
    [
        (500, 300, True),
        (500, 300.5, False),
        (500, True, False),
        (500, "300", False),
        (500, None, False),
        (1.5, 2, True),
        (1.5, 2.5, True),
        (True, False, True),
        (True, 1, False),
        ("a", "b", True),
        ("a", ["b"], False),
        ([1], [], True),
        ({"a": 1}, {}, True),
        ({"a": 1}, [], False),
        (None, None, True),
        (None, 1, False),
    ],
)
def test_without_a_schema_an_edit_keeps_the_kind_of_what_was_asked(before, value, fits):
    if fits:
        body = decided(edit({"x": value}, schema=None, input={"x": before}, editable="x"))
        assert codec.decode(load(body.input)) == {"x": value} if body.input else value == before
    else:
        with pytest.raises(InvalidInput, match=r"x = .*: must be .*, like the value in the request"):
            edit({"x": value}, schema=None, input={"x": before}, editable="x")


def test_what_json_cannot_hold_is_no_edit():
    with pytest.raises(InvalidInput, match="nan"):
        edit({"x": float("nan")}, schema=None, input={"x": 1.5}, editable="x")


@pytest.mark.parametrize("input", ["text", [1], 5])
def test_what_has_no_fields_cannot_be_edited(input):
    with pytest.raises(InvalidInput, match="an edit is an object of fields"):
        edit({"x": 1}, schema=None, input=input, editable="x")


def test_an_edit_is_never_passed_over():
    first_of_two = asked(by=["ann", "bob"], quorum=2)
    with pytest.raises(InvalidInput, match="may not be edited"):
        vote(first_of_two, edit={"cents": 1})
    with pytest.raises(InvalidInput, match="a rejection cannot edit the input"):
        vote(asked(editable="cents"), granted=False, edit={"cents": 1})


@given(
    st.dictionaries(
        st.sampled_from(["order", "cents", "to", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.text(max_size=2)),
    )
)
def test_whatever_is_edited_only_the_editable_fields_differ_and_the_digest_is_of_those_bytes(fields):
    try:
        ruling = edit(fields)
    except InvalidInput:
        return
    body = decided(ruling)
    encoded = load(body.input or ruling.standing.request.input)
    assert body.digest == ruling.standing.digest == codec.digest(encoded)
    after = codec.decode(encoded)
    assert {name: value for name, value in after.items() if name not in ("cents", "to")} == {"order": "o-7"}
    assert after == {**CALL, **fields}


# --- time -----------------------------------------------------------------------------------------------------------------------


def test_a_decision_counts_until_the_last_microsecond_and_not_at_it():
    standing = asked(expires=3600)
    assert vote(standing, now=NOW + HOUR - 1).standing.status == "approved"
    for late in (NOW + HOUR, NOW + HOUR + 1):
        for granted in (True, False):
            with pytest.raises(Conflict, match="has expired"):
                vote(standing, granted=granted, now=late)


def test_silence_expires_at_the_time_and_not_before():
    standing = asked(expires=3600)
    with pytest.raises(Conflict, match="does not expire now"):
        judge_expiry(standing, NOW + HOUR - 1)
    ruling = judge_expiry(standing, NOW + HOUR)
    assert ruling.body == ApprovalExpired("ap-1")
    assert ruling.standing.status == "expired"
    with pytest.raises(Conflict):
        vote(ruling.standing, now=NOW + HOUR + 1)


def test_what_has_no_end_never_expires():
    with pytest.raises(Conflict):
        judge_expiry(asked(), NOW + 10**18)


@pytest.mark.parametrize("status", ["rejected", "expired", "withdrawn", "consumed"])
def test_what_is_settled_does_not_expire(status: ApprovalStatus):
    with pytest.raises(Conflict, match=status):
        judge_expiry(msgspec.structs.replace(asked(expires=1), status=status), NOW + HOUR)


def test_an_escalation_asks_others_for_their_own_time_and_votes_are_void():
    standing = asked(by=["ann", "bob"], quorum=2, expires=3600, on_expiry="escalate", escalate_to=["role:board"], escalate_expires=7200)
    voted = vote(standing, "ann").standing
    ruling = judge_expiry(voted, NOW + HOUR)
    assert ruling.body == ApprovalEscalated("ap-1", ("role:board",), NOW + 3 * HOUR)
    after = ruling.standing
    assert (after.status, after.voters, after.escalated) == ("pending", (), True)
    with pytest.raises(NotPermitted):
        vote(after, "bob", now=NOW + 2 * HOUR)
    one = vote(after, "ann", roles=("board",), now=NOW + 2 * HOUR)
    assert isinstance(one.body, ApprovalVoted)
    assert decided(vote(one.standing, "eve", roles=("board",), now=NOW + 2 * HOUR)).by == "ann, eve"


def test_after_an_escalation_silence_is_the_end():
    escalated = judge_expiry(asked(by="ann", expires=3600, on_expiry="escalate", escalate_to="boss"), NOW + HOUR).standing
    assert escalated.request.expires_at == NOW + 2 * HOUR  # without a time of their own: as long as the first had
    with pytest.raises(Conflict):
        judge_expiry(escalated, NOW + 2 * HOUR - 1)
    with pytest.raises(Conflict, match="has expired"):
        vote(escalated, "boss", now=NOW + 2 * HOUR)
    assert judge_expiry(escalated, NOW + 2 * HOUR).body == ApprovalExpired("ap-1")


def test_an_escalation_that_comes_late_still_gives_them_their_whole_time():
    standing = asked(by="ann", expires=3600, on_expiry="escalate", escalate_to="boss")
    assert judge_expiry(standing, NOW + 50 * HOUR).standing.request.expires_at == NOW + 51 * HOUR


def test_waiting_reminds_the_same_people_once_keeps_their_votes_and_never_ends():
    voted = vote(asked(by=["ann", "bob"], quorum=2, expires=3600, on_expiry="wait"), "ann").standing
    ruling = judge_expiry(voted, NOW + HOUR)
    assert ruling.body == ApprovalEscalated("ap-1", ("ann", "bob"), None)
    with pytest.raises(Conflict):
        judge_expiry(ruling.standing, NOW + 10**18)
    assert vote(ruling.standing, "bob", now=NOW + 10**18).standing.status == "approved"


def test_a_yes_to_a_call_lapses_when_the_call_cannot_start_in_time():
    approved = vote(asked(expires=3600), "ann", note="ok").standing
    with pytest.raises(Conflict):
        judge_expiry(approved, NOW + HOUR - 1)
    ruling = judge_expiry(approved, NOW + HOUR)
    assert ruling.body == ApprovalExpired("ap-1", lapsed=True)
    assert ruling.standing.status == "expired"


@pytest.mark.parametrize(("escalate_expires", "until"), [(None, NOW + 2 * HOUR), (7200, NOW + 3 * HOUR)])
def test_a_yes_before_an_escalation_may_be_used_as_long_as_one_after_it_could(escalate_expires, until):
    policy = {"on_expiry": "escalate", "escalate_to": "boss", "escalate_expires": escalate_expires}
    approved = vote(asked(by="ann", expires=3600, **policy), "ann").standing
    assert approved.request.expires_at == until
    with pytest.raises(Conflict, match="does not expire now"):
        judge_expiry(approved, until - 1)
    assert judge_expiry(approved, until).body == ApprovalExpired("ap-1", lapsed=True)


def test_a_yes_after_an_escalation_may_be_used_until_the_time_of_those_who_gave_it_is_over():
    escalated = judge_expiry(asked(by="ann", expires=3600, on_expiry="escalate", escalate_to="boss"), NOW + HOUR).standing
    approved = vote(escalated, "boss", now=NOW + HOUR).standing
    assert approved.request.expires_at == NOW + 2 * HOUR
    assert judge_expiry(approved, NOW + 2 * HOUR).body == ApprovalExpired("ap-1", lapsed=True)


@pytest.mark.parametrize("reminded", [False, True])
def test_where_time_only_reminds_a_yes_comes_in_time_whenever_and_never_lapses(reminded):
    standing = asked(by="ann", expires=3600, on_expiry="wait")
    if reminded:
        standing = judge_expiry(standing, NOW + HOUR).standing
    for now in (NOW, NOW + 50 * HOUR):
        approved = vote(standing, "ann", now=now).standing
        assert (approved.status, approved.request.expires_at) == ("approved", None)
        with pytest.raises(Conflict, match="does not expire now"):
            judge_expiry(approved, NOW + 100 * HOUR)


def test_a_yes_that_the_agent_asked_for_stays_a_yes():
    approved = vote(asked(tool=None, expires=3600)).standing
    with pytest.raises(Conflict, match="has been decided"):
        judge_expiry(approved, NOW + HOUR)
    with pytest.raises(Conflict, match="approved already"):
        judge_withdrawal(approved)


# --- withdrawal -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["refund", None])
def test_what_is_pending_can_be_withdrawn(tool):
    ruling = judge_withdrawal(asked(tool=tool))
    assert (ruling.body, ruling.standing.status) == (ApprovalWithdrawn("ap-1"), "withdrawn")
    with pytest.raises(Conflict, match="withdrawn"):
        vote(ruling.standing)


def test_a_yes_to_a_call_that_has_not_started_can_be_withdrawn():
    assert judge_withdrawal(vote(asked()).standing).standing.status == "withdrawn"


@pytest.mark.parametrize("status", ["rejected", "expired", "withdrawn", "consumed"])
def test_what_is_settled_cannot_be_withdrawn(status: ApprovalStatus):
    with pytest.raises(Conflict, match=status):
        judge_withdrawal(msgspec.structs.replace(asked(), status=status))


# --- all orders of everything -----------------------------------------------------------------------------------------------------

PEOPLE = ["ann", "bob", "eve"]
STEPS = st.one_of(
    st.tuples(st.just("vote"), st.sampled_from([*PEOPLE, "boss", "role:boss"]), st.booleans(), st.integers(0, 4)),
    st.tuples(st.just("expire"), st.integers(0, 6)),
    st.tuples(st.just("withdraw")),
)


@given(
    steps=st.lists(STEPS, max_size=12),
    quorum=st.integers(1, 3),
    on_expiry=st.sampled_from(["reject", "escalate", "wait"]),
    tool=st.sampled_from(["refund", None]),
)
def test_in_whatever_order_things_come_one_decision_counts_and_enough_allowed_people_made_it(steps, quorum, on_expiry, tool):
    to = ("role:boss",) if on_expiry == "escalate" else ()
    standing = asked(tool=tool, by=PEOPLE, quorum=quorum, expires=3600, on_expiry=on_expiry, escalate_to=to)
    settled: list[str] = []
    now = NOW
    for step in steps:
        now += (step[-1] if step[0] != "withdraw" else 0) * HOUR // 4
        before = standing
        try:
            if step[0] == "vote":
                roles = ("boss",) if step[1] == "boss" else ()
                ruling = vote(standing, step[1], step[2], now=now, roles=roles)
                assert before.status == "pending"
                assert before.request.expires_at is None or now < before.request.expires_at or on_expiry == "wait"
                assert may_decide(before.request.by, step[1], roles)
            elif step[0] == "expire":
                ruling = judge(standing, ApprovalFacts(), Expire(), now)
            else:
                ruling = judge(standing, ApprovalFacts(), Withdraw(), now)
        except (Conflict, NotPermitted):
            assert standing is before
            continue
        standing = ruling.standing
        assert decode_body(encode_body(ruling.body)) == ruling.body
        if standing.status != before.status:
            settled.append(standing.status)
    assert len(set(standing.voters)) == len(standing.voters) <= quorum
    assert len(standing.voters) < quorum or "approved" in settled
    # One answer; after a yes to a call only its end without the call.
    assert settled[:1] == settled or (settled[0] == "approved" and tool is not None and settled[1:] in (["expired"], ["withdrawn"]))


# --- the policy's own mistakes ----------------------------------------------------------------------------------------------------


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NO_CHOICES: list[Any] = ["approve", "", None, 5, [], Hostile()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            ({"expires": value}, "above 0 and at most ten years")
            for value in (0, -1, 1e999, float("nan"), True, "1h", 10**400, 10**5000, Hostile())
        ),
        ({"expires": timedelta(0)}, "expires"),
        ({"expires": timedelta(days=4000)}, "ten years"),
        ({"expires": 1, "escalate_expires": float("inf"), "on_expiry": "escalate", "escalate_to": "x"}, "escalate_expires"),
        ({"escalate_expires": 5}, "escalate_to"),
        *(({"quorum": value}, "a whole number from 1 to 100") for value in (0, -1, True, 1.0, "2", 101, 10**5000, None)),
        ({"quorum": 2, "by": "ann"}, "could never be granted"),
        ({"quorum": 2, "by": ["ann", "ann"]}, "could never be granted"),
        ({"quorum": 2, "expires": 1, "on_expiry": "escalate", "escalate_to": "boss"}, "escalate_to=…\\): only 1 may decide"),
        ({"quorum": 2, "editable": "cents"}, "cannot be edited by one of them"),
        *(
            ({name: value}, name)
            for name in ("by", "escalate_to", "editable")
            for value in ("", " ", "ann ", "a\x00b", "a\nb", "\ud800", "x" * 201)
        ),
        *(({"by": value}, "by=") for value in (5, None, {"ann": 1}, {"ann"}, [5], ["ann", ""], "role:", True, b"ann", Hostile())),
        ({"by": [f"p{number}" for number in range(1000)]}, f"1000 who may decide; at most {MAX_DECIDERS}: use a role"),
        *(({"on_expiry": value}, "one of reject, escalate, wait") for value in NO_CHOICES),
        ({"on_expiry": "wait"}, "say how long they have"),
        ({"on_expiry": "escalate", "escalate_to": "x"}, "say how long they have"),
        ({"on_expiry": "escalate", "expires": 1}, "belong together"),
        ({"escalate_to": "boss", "expires": 1}, "belong together"),
        ({"four_eyes": "no"}, "True or False"),
        ({"reason": 5}, "reason"),
        ({"when": "cents > 5"}, "a function of the call's arguments"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_where_it_is_written(given, said):
    with pytest.raises(InvalidInput, match=said):
        Approval(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"by": "ann"},
        {"by": ["Łucja Żak", "user:17", "ann@example.com", "role:finance"]},
        {"by": [f"p{number}" for number in range(MAX_DECIDERS)], "quorum": MAX_DECIDERS},
        {"quorum": 5},
        {"quorum": 5, "by": ["ann", "role:finance"]},
        {"expires": 1e-9},
        {"expires": timedelta(days=3650)},
        {"editable": ["cents", "order"]},
        {"when": lambda cents: cents > 5000},
    ],
)
def test_a_policy_that_makes_sense_is_taken(given):
    request = asked(**given).request
    assert request.expires_at is None or request.expires_at > NOW
