"""Every boundary of a run, and every fault that perdure must survive, with the tests that show it.

`make test` runs the first test of each case once, with the parameters `quick`; `make test-full` runs all the rest (see
tests/sets.py). test_coverage.py checks that the tests exist, and on which store each test runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A boundary or a fault."""

    name: str
    tests: tuple[str, ...]  # file::function, below tests/
    only: str = ""  # the only store of this case; empty: both stores
    quick: str = ""  # the parameters with which `make test` runs the first of its tests; none, if that has no parameters

    @property
    def quick_test(self) -> str:
        """The one test of this case that belongs to `make test`."""
        return f"{self.tests[0]}[{self.quick}]" if self.quick else self.tests[0]


def _in(file: str, *functions: str) -> tuple[str, ...]:
    return tuple(f"{file}::test_{function}" for function in functions)


_BOUNDARY = _in("crash/test_boundaries.py", "killed_at_a_boundary_the_run_goes_on_as_its_effect_class_says")
_TOLD = _in("crash/test_signals_at_boundaries.py", "told_to_stop_at_a_boundary_the_run_is_handed_over_without_a_doubt")
_QUESTION = _in("crash/test_models_killed.py", "killed_around_a_question_its_answer_is_asked_for_once")
_DECIDED = _in("crash/test_approvals_killed.py", "killed_between_the_decision_and_the_end_the_approved_call_is_made_as_its_class_says")
_DISK = _in("crash/test_disk.py", "killed_before_any_single_write_or_sync_of_a_whole_run_the_run_ends_well")
_WIRE = _in("crash/test_wire.py", "killed_before_any_single_statement_of_a_whole_run_the_run_ends_well")
_GUARDED = _in("crash/test_guards_can_fail.py", "with_the_guard_in_place_the_check_is_green_and_not")
_ROOM = _in("crash/test_full_disk.py", "without_room_the_run_stops_and_with_room_it_goes_on_by_itself")
_BROKEN = _in(
    "models/test_faults.py",
    "an_answer_that_is_not_whole_is_no_answer",
    "every_prefix_of_a_stream_is_a_failure_and_only_the_whole_an_answer",
)

BOUNDARIES = (
    Case("run created", _BOUNDARY, quick="sqlite-once-create-half-1"),
    Case("claimed", (*_BOUNDARY, *_TOLD), quick="postgres-keyed-claim-half-1"),
    Case("model call initiated", _QUESTION, quick="sqlite-asked-kept-1-claude-crash-0-1"),
    Case(
        "model answered, not journaled",
        (
            *_QUESTION,
            *_in("crash/test_models_killed.py", "killed_three_times_over_the_same_answer_it_is_lost_three_times_and_journaled_once"),
        ),
        quick="sqlite-answered-half-1-claude-crash-1-1",
    ),
    Case(
        "decision journaled",
        _in(
            "crash/test_plans_killed.py",
            "killed_around_a_plan_that_a_model_writes_a_journaled_plan_is_never_written_again",
            "killed_around_a_step_the_plan_goes_on_and_no_step_is_made_twice",
        ),
        quick="sqlite-asked-kept-2-*-0-1-False",
    ),
    Case(
        "approval requested",
        _in("crash/test_approvals_killed.py", "killed_while_it_asks_the_run_waits_for_one_answer_and_takes_it"),
        quick="sqlite-True-request-half",
    ),
    Case(
        "approval decided",
        (*_in("crash/test_approvals_killed.py", "a_decider_who_is_killed_has_decided_or_has_not_and_asks_again_to_find_out"), *_DECIDED),
        quick="sqlite-half",
    ),
    Case("before the intent commit", (*_BOUNDARY, *_TOLD), quick="sqlite-once-intent-before-1"),
    Case("during the intent commit", (*_BOUNDARY, *_TOLD), quick="postgres-once-intent-half-1"),
    Case("after the intent commit, before the effect", (*_BOUNDARY, *_TOLD), quick="sqlite-once-start-before-1"),
    Case(
        "effect in flight", _in("crash/test_boundaries.py", "killed_from_outside_while_the_tool_is_inside_its_effect"), quick="sqlite-once"
    ),
    Case("effect done, reply lost", (*_BOUNDARY, *_TOLD), quick="postgres-keyed-effect-after-1"),
    Case("result held, not committed", (*_BOUNDARY, *_TOLD, *_ROOM), quick="sqlite-once-result-before-1"),
    Case("during the result commit", (*_BOUNDARY, *_TOLD), quick="postgres-once_reconcile-result-half-1"),
    Case(
        "timer or approval wait",
        (
            *_in("crash/test_boundaries.py", "killed_while_it_waits_for_a_timer_the_run_goes_on_when_it_is_due"),
            *_in("crash/test_waiting_shared.py", "a_worker_that_is_told_to_stop_loses_nothing_of_what_is_pending"),
        ),
        quick="sqlite",
    ),
    Case("lease renewal", _BOUNDARY, quick="sqlite-keyed_reconcile-renew-half-1"),
    Case("terminal commit", (*_BOUNDARY, *_TOLD), quick="sqlite-transaction-end-half-1"),
    Case(
        "run reopened",
        _in(
            "crash/test_reopened_killed.py",
            "a_person_who_is_killed_while_reopening_a_run_has_reopened_it_or_has_not",
            "killed_after_a_rewind_the_run_goes_on_and_makes_no_call_again",
            "a_call_in_doubt_stays_in_doubt_when_the_run_goes_back_behind_it",
        ),
        quick="postgres-half",
    ),
    Case(
        "run forked",
        _in(
            "crash/test_forked_killed.py",
            "a_person_who_is_killed_while_making_a_fork_has_made_all_of_it_or_nothing",
            "killed_in_a_live_fork_nothing_of_its_parent_happens_again_and_its_own_call_as_its_class_allows",
        ),
        quick="sqlite-live-half",
    ),
    Case(
        "checkpoint",
        (
            *_in("unit/test_store_open.py", "a_checkpoint_that_was_killed_in_the_middle_leaves_a_journal_of_ours"),
            *_DISK,
            *_in("crash/test_full_disk.py", "without_room_for_the_last_checkpoint_a_worker_leaves_in_peace_and_its_log_is_kept"),
        ),
        only="sqlite",
    ),
    Case(
        "migration",
        (*_in("postgres/test_start_together.py", "those_that_are_killed_meanwhile_leave_nothing_half_made"), *_DISK, *_WIRE),
    ),
    Case(
        "drain",
        (*_BOUNDARY, *_in("crash/test_signals_at_boundaries.py", "told_twice_while_it_hands_the_run_over_it_ends_at_once_as_in_a_crash")),
        quick="sqlite-read-handover-half-1",
    ),
    Case(
        "during resume itself",
        _in(
            "crash/test_boundaries.py",
            "killed_again_while_another_process_recovers_the_run",
            "killed_four_times_in_a_row_the_run_still_ends_well",
        ),
        quick="sqlite-keyed-append-kept",
    ),
)

FAULTS = (
    Case("SIGKILL at every boundary", (*_BOUNDARY, *_DISK, *_WIRE), quick="sqlite-idempotent-park-half-1"),
    Case(
        "SIGKILL of one worker after the other",
        _in(
            "crash/test_suspects.py",
            "runs_whose_worker_was_killed_twice_are_all_under_way_at_once_in_the_next_one",
            "a_run_that_kills_its_workers_is_found_by_halving_and_the_runs_beside_it_succeed",
        ),
        quick="sqlite",
    ),
    Case("SIGTERM at every boundary", _TOLD, quick="sqlite-effect-after"),
    Case(
        "SIGTERM twice",
        (
            *_in("crash/test_signals_at_boundaries.py", "told_twice_while_it_hands_the_run_over_it_ends_at_once_as_in_a_crash"),
            *_in("crash/test_signals.py", "a_second_signal_ends_the_worker_at_once_and_nothing_is_lost"),
        ),
        quick="sqlite-handed",
    ),
    Case(
        "SIGINT between effect and record",
        (
            *_in(
                "crash/test_signals_at_boundaries.py",
                "interrupted_between_effect_and_record_the_effect_is_recorded_or_in_doubt_and_never_repeated",
            ),
            *_in("crash/test_signals.py", "sigint_between_effect_and_record_records_the_effect_before_the_process_ends"),
        ),
        quick="sqlite-script-effect-after",
    ),
    Case(
        "out of memory",
        _in("crash/test_scarce.py", "out_of_memory_between_effect_and_record_the_effect_is_recorded_or_in_doubt_and_never_repeated"),
        quick="sqlite-1",
    ),
    Case(
        "out of file descriptors",
        _in(
            "crash/test_scarce.py",
            "a_worker_without_a_free_descriptor_goes_on_with_what_it_has_and_takes_up_new_runs",
            "a_worker_that_cannot_open_its_database_again_keeps_its_result_until_it_can",
            "a_worker_that_may_not_open_enough_files_to_begin_says_so_and_touches_nothing",
        ),
        quick="sqlite",
    ),
    Case(
        "disk full, then space again",
        (
            *_ROOM,
            *_in("crash/test_disk.py", "killed_on_a_full_disk_the_held_result_is_a_doubt_and_the_effect_is_not_repeated"),
            *_in("unit/test_store_full_log.py", "a_log_that_fills_the_disk_is_emptied_for_the_next_write"),
        ),
        only="sqlite",
        quick="full-result-sqlite",
    ),
    Case(
        "read-only file system",
        (
            *_in("crash/test_disk.py", "on_a_read_only_file_system_nothing_begins_and_the_error_says_why"),
            *_in(
                "crash/test_full_disk.py",
                "on_a_volume_that_turns_read_only_under_a_worker_nothing_is_begun_and_what_was_acknowledged_is_there_after_its_repair",
            ),
            *_in("postgres/test_refusals.py", "a_database_that_turns_read_only_under_an_open_store"),
        ),
        quick="sqlite",
    ),
    Case(
        "power loss",
        _in("power/test_power_loss.py", "after_a_power_loss_at_any_point_everything_acknowledged_is_there_and_the_run_goes_on"),
        only="sqlite",
        quick="one run, with checkpoints-0",
    ),
    Case(
        "bit flip",
        _in(
            "power/test_bit_flips.py",
            "a_bit_that_turns_over_elsewhere_is_named_or_changes_nothing_that_is_read",
            "a_bit_that_turns_over_in_any_byte_of_any_event_is_found",
        ),
        only="sqlite",
        quick="runs at rest",
    ),
    Case(
        "fsync fails",
        _in(
            "crash/test_disk.py",
            "after_a_failed_fsync_the_process_goes_on_with_another_connection_and_nothing_acknowledged_is_lost",
            "killed_right_after_a_failed_fsync_the_run_goes_on_with_whatever_reached_the_disk",
        ),
        only="sqlite",
        quick="once-not synced-sqlite",
    ),
    Case(
        "edited, deleted and reordered events",
        _in(
            "unit/test_inspect_verify.py",
            "a_missing_event_is_named",
            "every_edit_of_every_column_of_every_event_is_found",
            "events_that_changed_places_are_called_out_of_place",
        ),
        only="sqlite",
    ),
    Case(
        "truncation, swapped database and log",
        _in(
            "crash/test_wrong_files.py",
            "the_log_of_another_journal_makes_no_mixture_that_passes_for_a_journal",
            "a_file_that_was_cut_off_is_refused_or_named_and_a_log_that_was_cut_off_is_an_older_journal",
        ),
        only="sqlite",
        quick="sqlite",
    ),
    Case(
        "an old backup restored",
        _in("crash/test_wrong_files.py", "from_a_backup_that_was_restored_the_run_goes_on_and_nothing_that_has_a_key_happens_again"),
        quick="postgres",
    ),
    Case(
        "database connection killed",
        _in("postgres/test_server_failures.py", "runs_outlive_a_server_that_restarts_and_ends_connections_all_the_time"),
        only="postgres",
    ),
    Case(
        "COMMIT lost before and after it took effect",
        (
            *_in(
                "postgres/test_unknown_commit.py",
                "a_lost_commit_has_happened_once_or_not_at_all_and_the_caller_learns_which",
                "a_worker_that_loses_commits_at_random_does_everything_once",
            ),
            *_in("crash/test_races.py", "a_commit_that_took_effect_and_was_taken_for_lost_strands_no_run"),
        ),
        quick="after",
    ),
    Case(
        "half-open peer",
        _in(
            "postgres/test_server_failures.py",
            "no_wait_for_a_silent_peer_is_longer_than_it_may_be",
            "a_worker_survives_silence_at_any_moment",
        ),
        only="postgres",
        quick="directions0",
    ),
    Case(
        "server stopped at any moment, its recovery included",
        (
            *_in(
                "postgres/test_server_failures.py",
                "what_was_acknowledged_before_the_server_fell_is_there_afterwards",
                "a_store_is_opened_while_its_server_recovers",
            ),
            *_in("postgres/test_storm.py", "after_a_storm_nothing_is_lost_and_nothing_happened_twice"),
        ),
        only="postgres",
    ),
    Case(
        "SIGSTOP past the lease, then SIGCONT",
        (
            *_in(
                "crash/test_takeover.py",
                "a_worker_that_sleeps_past_its_lease_is_fenced_at_its_first_write_and_its_tools_are_stopped",
                "a_once_call_of_a_sleeping_worker_is_put_to_a_person_and_never_made_twice",
            ),
            *_in(
                "crash/test_wire.py",
                "a_worker_that_sleeps_inside_a_transaction_keeps_its_run_from_others_only_until_the_server_ends_that",
            ),
        ),
        quick="sqlite",
    ),
    Case(
        "wall clock ±1 h",
        (
            *_in(
                "crash/test_wall_clock.py",
                "set_under_two_workers_nobody_takes_a_run_from_the_one_that_lives",
                "set_between_two_workers_the_second_goes_on_where_the_first_was_killed",
                "set_while_runs_wait_timers_and_approvals_are_early_or_late_and_never_lost",
            ),
            *_in("crash/test_takeover.py", "a_wall_clock_that_is_wrong_by_an_hour_harms_no_run"),
        ),
        quick="sqlite-forward",
    ),
    Case(
        "two workers on one run, and on many",
        _in(
            "crash/test_two_workers.py",
            "two_processes_that_want_the_same_run_drive_it_one_after_the_other_each_until_it_is_killed",
            "two_workers_over_many_runs_of_which_one_is_killed_every_few_effects_lose_and_repeat_nothing",
        ),
        quick="sqlite",
    ),
    Case(
        "duplicate, late and reordered signals and decisions",
        (
            *_in("crash/test_waiting_shared.py", "signals_of_killed_senders_to_a_run_of_killed_workers_arrive_once_each_and_in_order"),
            *_in(
                "crash/test_deciders.py",
                "of_two_deciders_one_wins_and_the_other_is_told",
                "a_yes_that_meets_the_expiry_counts_or_comes_too_late_and_never_both",
            ),
        ),
        quick="sqlite",
    ),
    Case("a tool that blocks the loop", _GUARDED, quick="sqlite-leases_are_not_renewed"),
    Case(
        "a tool that swallows its cancellation, never returns, or returns after its deadline",
        _in(
            "unit/test_perform_attempt.py",
            "a_tool_that_swallows_its_cancellation_is_given_up_after_the_grace",
            "a_sync_tool_that_never_returns_is_given_up_after_the_grace",
            "a_result_within_the_grace_is_a_result",
        ),
        only="sqlite",
    ),
    Case(
        "a tool that forks, calls os._exit or segfaults",
        _in(
            "crash/test_misbehaving_tools.py",
            "a_forked_child_that_outlives_its_worker_does_not_keep_it_alive",
            "a_tool_that_calls_os_exit_is_a_crash_like_any_other",
            "an_isolated_tool_that_segfaults_is_a_failed_call_and_not_a_dead_worker",
        ),
        quick="sqlite",
    ),
    Case(
        "an orphaned subprocess of a tool",
        _in(
            "crash/test_misbehaving_tools.py",
            "a_program_that_outlives_its_worker_does_not_keep_the_run_from_being_claimed",
            "what_an_isolated_tool_has_started_dies_with_its_worker",
        ),
        quick="sqlite",
    ),
    Case(
        "a provider that answers and resets, 429, 5xx, a slow body",
        (*_BROKEN, *_in("models/test_faults.py", "a_refusal_is_told_by_its_status_with_the_wait_that_was_asked_for")),
        only="sqlite",
        quick="anthropic",
    ),
)
