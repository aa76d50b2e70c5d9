"""Where settings come from, in which order, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.config import load_settings
from perdure.errors import InvalidInput
from perdure.settings import Settings


def load(folder: Path, flags: Any = None, **environ: str) -> Settings:
    return load_settings(flags or {}, environ, folder)


def refusal(folder: Path, flags: Any = None, **environ: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        load(folder, flags, **environ)
    return str(refused.value)


def test_without_any_source_the_defaults_hold(tmp_path):
    assert load(tmp_path) == Settings()


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path):
    (tmp_path / "perdure.toml").write_text('url = "sqlite:///file.db"\nlease_s = 10\nconcurrency = 3\n')
    settings = load(tmp_path, {"url": "sqlite:///flag.db"}, PERDURE_URL="sqlite:///environ.db", PERDURE_LEASE_S="20")
    assert (settings.url, settings.lease_s, settings.concurrency, settings.threads) == ("sqlite:///flag.db", 20.0, 3, Settings().threads)


def test_the_project_file_serves_where_there_is_no_perdure_toml(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.perdure]\nlease_s = 7.5\n[tool.other]\nlease_s = "no"\n')
    assert load(tmp_path).lease_s == 7.5


def test_a_project_file_without_our_table_changes_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (tmp_path / "perdure.toml").write_text("lease_s = 9\n")
    assert load(tmp_path).lease_s == 9


def test_settings_in_both_files_are_refused_since_one_would_be_ignored(tmp_path):
    (tmp_path / "perdure.toml").write_text("lease_s = 9\n")
    (tmp_path / "pyproject.toml").write_text("[tool.perdure]\nlease_s = 7\n")
    assert "keep one" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("PERDURE_LEASE", "PERDURE_LEASE_S"), ("PERDURE_CONCURENCY", "PERDURE_CONCURRENCY"), ("PERDURE_Url", "PERDURE_URL")],
)
def test_a_typo_in_a_variable_is_an_error_that_suggests_the_nearest_name(tmp_path, variable, meant):
    said = refusal(tmp_path, **{variable: "1"})
    assert variable in said
    assert f"did you mean {meant}?" in said


def test_a_typo_in_a_file_is_an_error_that_names_the_file_and_the_nearest_name(tmp_path):
    (tmp_path / "perdure.toml").write_text("drain_timeout = 3\n")
    assert refusal(tmp_path) == "perdure.toml: 'drain_timeout' is not a setting; did you mean 'drain_timeout_s'?"


def test_a_name_that_resembles_nothing_is_refused_without_a_guess(tmp_path):
    said = refusal(tmp_path, PERDURE_QQQQQQQQ="1")
    assert "PERDURE_QQQQQQQQ is not a setting" in said
    assert "did you mean" not in said


def test_what_is_no_setting_of_ours_is_left_alone(tmp_path):
    injected = {"PERDURE_SERVICE_HOST": "10.0.0.1", "PERDURE_PORT": "tcp://10.0.0.1:80", "PERDURE_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert load(tmp_path, PERDURE_DEBUG="1", HOME="/", **injected) == Settings()


def test_an_empty_variable_counts_as_not_set(tmp_path):
    assert load(tmp_path, PERDURE_URL="", PERDURE_LEASE_S="").url == Settings().url


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("PERDURE_LEASE_S", "soon", "a number of seconds above 0"),
        ("PERDURE_LEASE_S", "0", "a number of seconds above 0"),
        ("PERDURE_LEASE_S", "nan", "a number of seconds above 0"),
        ("PERDURE_LEASE_S", "inf", "a number of seconds above 0"),
        ("PERDURE_LEASE_S", "1e999", "a number of seconds above 0"),
        ("PERDURE_DRAIN_TIMEOUT_S", "-1", "a number of seconds, 0 or more"),
        ("PERDURE_DRAIN_TIMEOUT_S", "nan", "a number of seconds, 0 or more"),
        ("PERDURE_CONCURRENCY", "0", "a whole number, 1 or more"),
        ("PERDURE_CONCURRENCY", "1.5", "a whole number, 1 or more"),
        ("PERDURE_CONCURRENCY", "9" * 5000, "a whole number, 1 or more"),
        ("PERDURE_SYNCHRONOUS", "off", '"full" or "normal"'),
    ],
)
def test_a_wrong_value_names_its_variable_and_the_rule(tmp_path, variable, value, rule):
    said = refusal(tmp_path, **{variable: value})
    assert f"the environment variable {variable} is" in said
    assert f"it must be {rule}" in said
    assert len(said) < 300


@pytest.mark.parametrize("value", ["true", '"ten"', "[1]", "10.5"])
def test_a_wrong_type_in_a_file_names_the_file(tmp_path, value):
    (tmp_path / "perdure.toml").write_text(f"concurrency = {value}\n")
    assert refusal(tmp_path).startswith("perdure.toml: concurrency is ")


def test_a_wrong_flag_is_named_as_it_is_typed(tmp_path):
    assert refusal(tmp_path, {"drain_timeout_s": -1.0}).startswith("--drain-timeout is -1.0")


def test_a_wrong_value_is_an_error_even_where_something_stronger_overrides_it(tmp_path):
    assert "PERDURE_CONCURRENCY" in refusal(tmp_path, {"concurrency": 4}, PERDURE_CONCURRENCY="many")


@pytest.mark.parametrize(
    ("name", "content"), [("perdure.toml", b"lease_s = = 3"), ("perdure.toml", b"\xff\xfe"), ("pyproject.toml", b"[tool.perdure")]
)
def test_a_broken_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{name} is not valid TOML")


def test_a_tool_entry_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool]\nperdure = 3\n")
    assert "[tool.perdure]" in refusal(tmp_path)
