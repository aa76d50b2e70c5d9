"""Mutants of the version that a run takes, and of code that goes on with runs of another version."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFORMANCE = "tests/conformance/test_sqlite.py::TestSqliteInMemory"
EVOLVE = "tests/unit/test_react_frames.py::test_"
IN_THE_WAY = f"{EVOLVE}an_open_call_that_cannot_go_on_is_named_and_nothing_is_written"

EVOLVING = (
    Mutant(
        name="a_version_is_not_kept",
        guard="the version that a run takes is written in the commit of its first claim",
        promise="G12",
        file="store/claims.py",
        where="Take.__init__",
        old='"version": version or None,',
        new='"version": None,',
        red=f"{CONFORMANCE}::test_a_run_without_a_version_takes_that_of_the_worker_in_the_commit_of_the_claim",
    ),
    Mutant(
        name="a_claimed_run_stays_in_the_line_without_a_version",
        guard="the first claim moves the run to the line of its version, so that no other version takes it later",
        promise="G12",
        file="store/sqlite/queries.sql",
        where="claim_run",
        old=", line = ifnull(:line, line)",
        new="",
        red=f"{CONFORMANCE}::test_the_version_of_the_first_claim_stays",
    ),
    Mutant(
        name="a_run_claimed_at_once_stays_in_the_line_without_a_version",
        guard="on PostgreSQL the claim in one statement moves the run to the line of its version",
        promise="G12",
        file="store/postgres/queries.sql",
        where="claim_at_once",
        old=", line = s.goal",
        new="",
        red="tests/unit/test_postgres_taking.py::test_runs_without_a_version_are_claimed_at_once_beside_others_of_their_agent",
        store="postgres",
    ),
    Mutant(
        name="an_open_call_goes_on_with_another_effect",
        guard="a run is not adopted if the tool of an open call has another effect class in the new code",
        promise="G2",
        file="agents/react/frames.py",
        where="_in_the_way",
        old="    if tool.effect != call.effect:\n",
        new="    if tool is None:\n",
        red=f"{IN_THE_WAY}[tools1-in this code refund is once, not keyed]",
        says="Failed",
    ),
    Mutant(
        name="an_open_call_goes_on_with_other_arguments",
        guard="a run is not adopted if the tool of an open call would take other arguments than the approved ones",
        promise="G9",
        file="agents/react/frames.py",
        where="_in_the_way",
        old="    if tool.rebind(recorded) != recorded:\n",
        new="    if tool is None:\n",
        red=f"{IN_THE_WAY}[tools3-its arguments do not fit refund]",
        says="Failed",
    ),
    Mutant(
        name="an_adoption_ignores_what_happened_meanwhile",
        guard="a run that has moved on since its code was checked is not adopted",
        promise="G12",
        file="app.py",
        where="Perdure.adopt",
        old="        await self.engine.post(run_id, body, seen=seen, tenant=tenant)\n",
        new="        await self.engine.post(run_id, body, tenant=tenant)\n",
        red=f"{EVOLVE}a_run_that_has_moved_on_since_the_check_is_not_adopted",
        says="Failed",
    ),
    Mutant(
        name="a_rewind_keeps_the_old_frame",
        guard="after a rewind behind the change of a frame, the turns that are taken again have the frame of now",
        promise="G12",
        file="reopen.py",
        where="Planner._fitting",
        old="changed.after < state.frames[-1].after",
        new="changed.after < 0",
        red=f"{EVOLVE}a_rewind_behind_the_change_takes_those_turns_with_the_frame_of_now",
        says="IndexError",
    ),
    Mutant(
        name="a_recorded_turn_takes_a_checkpoint_of_now",
        guard="a turn that was recorded with an old frame takes no checkpoint that the old frame did not take",
        promise="G12",
        file="agents/react/agent.py",
        where="ReAct._converse",
        old="                and recorded.current() is None\n",
        new="",
        red=f"{EVOLVE}a_frame_changes_also_when_checkpoints_are_taken_before_or_after_it[None-1]",
    ),
    Mutant(
        name="a_declared_budget_is_forgotten",
        guard="a run that was started by name has the budget that its agent's code declares, before its first call",
        promise="G14",
        file="core/run_core.py",
        where="RunCore._must_declare_budget",
        old="return state.created.by_name and ",
        new="return not state.created.by_name and ",
        red="tests/unit/test_version_at_claim.py::test_the_budget_that_the_code_declares_holds_for_a_run_started_by_name",
        says="Failed",
    ),
)
