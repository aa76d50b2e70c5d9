"""Mutants of the command line: which recorded code may be loaded."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLI = (
    Mutant(
        name="a_changed_row_names_the_code",
        guard="a run's row says what its first event says, or its code is not loaded",
        promise="security",
        file="inspect/verify.py",
        where="creation_of",
        old="    if (problem := birth_problem(row, created)) is not None:",
        new="    if (problem := birth_problem(row, created)) is not None and False:",
        red="tests/unit/test_inspect_verify.py::test_a_row_that_says_something_else_than_its_first_event_is_named[target]",
        store="sqlite",
        says="Failed",
    ),
    Mutant(
        name="a_changed_chain_names_the_code",
        guard="a run's hash chain is intact, or its code is not loaded",
        promise="security",
        file="inspect/verify.py",
        where="creation_of",
        old="        if one.seq != expected or _link(head, one, expected) != one.hash:",
        new="        if one.seq != expected:",
        red="tests/unit/test_inspect_verify.py::test_a_first_event_is_not_believed_once_anything_in_its_journal_was_changed",
        store="sqlite",
        says="Failed",
    ),
    Mutant(
        name="files_are_imported_unread",
        guard="the recorded file declares the agent (checked by parsing, without running it)",
        promise="security",
        file="cli/target.py",
        where="_judge",
        old="    if name and not holds_agent(",
        new="    if False and not holds_agent(",
        red="tests/unit/test_target.py::test_a_recorded_file_that_does_not_declare_the_agent_is_refused",
        says="Failed",
    ),
    Mutant(
        name="other_users_may_write_to_the_code",
        guard="no other user can write to recorded code or to its folder",
        promise="security",
        file="cli/target.py",
        where="_distrust",
        old="    if (how := changed_by_others(file, place.folder)) is not None:",
        new="    if (how := changed_by_others(file, place.folder)) is not None and False:",
        red="tests/unit/test_target.py::test_a_file_that_other_users_can_write_to_is_refused[438]",
        says="Failed",
    ),
    Mutant(
        name="sticky_folders_are_imported_from",
        guard="no module is imported from a sticky folder, because any user can add files to it",
        promise="security",
        file="cli/target.py",
        where="changed_by_others",
        old="(folder.is_relative_to(top) or not found.st_mode & stat.S_ISVTX)",
        new="not found.st_mode & stat.S_ISVTX",
        red="tests/unit/test_target.py::test_a_folder_that_everybody_can_add_to_is_refused_sticky_or_not",
        says="Failed",
    ),
)
