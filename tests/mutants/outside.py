"""Mutants of what stands between this user and text, files and servers of others."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OUTSIDE = (
    Mutant(
        name="completion_offers_whatever_the_database_has",
        guard="completion puts nothing on a command line that is not an id",
        promise="security",
        file="cli/common.py",
        where="_complete",
        old="if is_id(one) and one.startswith(incomplete)",
        new="if one.startswith(incomplete)",
        red="tests/e2e/test_completion.py::test_only_what_is_an_id_is_offered_as_a_run[bash]",
        store="sqlite",
    ),
    Mutant(
        name="completion_connects_to_any_server",
        guard="completion connects to no server that a settings file names",
        promise="security",
        file="cli/common.py",
        where="_store_for_completion",
        old='    if not named and not settings.url.startswith("sqlite:"):',
        new="    if False:",
        red="tests/e2e/test_completion.py::test_tab_connects_to_no_server_that_a_settings_file_names[perdure.toml-why]",
    ),
    Mutant(
        name="a_server_may_ask_for_the_password_in_any_way",
        guard="a password goes to no server that asks for it in clear text or as MD5",
        promise="security",
        file="store/postgres/connect.py",
        where="parameters",
        old="        **own_word,\n",
        new="",
        red="tests/postgres/test_hostile_server.py::"
        "test_the_password_does_not_reach_a_server_that_asks_for_it_in_clear_text_or_as_md5[environment-password]",
    ),
    Mutant(
        name="a_settings_file_chooses_how_the_password_is_sent",
        guard="a settings file does not decide how a server asks for the password",
        promise="security",
        file="config.py",
        where="_check_url_of_file",
        old="        if name in rest:",
        new="        if False:",
        red="tests/postgres/test_hostile_server.py::test_a_settings_file_cannot_choose_how_the_password_is_sent[?require_auth=password]",
    ),
)
