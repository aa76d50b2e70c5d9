"""Where settings come from, in which order, and the errors about wrong settings."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.servers import forked

from perdure.config import load_settings
from perdure.errors import InvalidInput
from perdure.settings import Queue, Settings


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
        ("PERDURE_CONNECTIONS", "2", "a whole number, 3 or more"),
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


# --- tables, lists, and what must not be shown -------------------------------------------------------------------------------

TABLES = """
webhook_url = "https://hooks.example.com/T0KEN"
webhook_hosts = ["hooks.example.com", "Other.Example.com", "hooks.example.com", "::1"]
[queues.reports]
concurrency = 5
[queues.mail]
per_tenant = 1
[roles]
finance = ["ann", "bob", "ann"]
nobody = []
"""


def test_queues_and_roles_are_tables_of_the_file(tmp_path):
    (tmp_path / "perdure.toml").write_text(TABLES)
    settings = load(tmp_path)
    assert settings.queues == {"reports": Queue(concurrency=5), "mail": Queue(per_tenant=1)}
    assert settings.roles == {"finance": ("ann", "bob"), "nobody": ()}
    assert settings.webhook_hosts == ("hooks.example.com", "other.example.com", "::1")


def test_tables_work_in_the_project_file_too(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.perdure.queues.reports]\nconcurrency = 2\n[tool.perdure.roles]\nfinance = ["ann"]\n')
    settings = load(tmp_path)
    assert (settings.queues, settings.roles) == ({"reports": Queue(concurrency=2)}, {"finance": ("ann",)})


def test_in_the_environment_tables_are_json_and_lists_have_commas(tmp_path):
    (tmp_path / "perdure.toml").write_text(TABLES)
    settings = load(
        tmp_path,
        PERDURE_QUEUES='{"reports": {"concurrency": 7, "per_tenant": 2}}',
        PERDURE_ROLES='{"legal": ["eve"]}',
        PERDURE_WEBHOOK_HOSTS=" a.example.com, b.example.com ,",
        PERDURE_WEBHOOK_URL="https://a.example.com/",
        PERDURE_WEBHOOK_SECRET="hush",
    )
    # A stronger source replaces the whole table: with a merged table, it would be unclear which value counts.
    assert settings.queues == {"reports": Queue(concurrency=7, per_tenant=2)}
    assert settings.roles == {"legal": ("eve",)}
    assert settings.webhook_hosts == ("a.example.com", "b.example.com")
    assert (settings.webhook_url, settings.webhook_secret) == ("https://a.example.com/", "hush")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[queues.reports]\nconcurrency = 0", "perdure.toml: queues.reports.concurrency is 0; it must be a whole number, 1 or more"),
        ('[queues.reports]\nper_tenant = "two"', "perdure.toml: queues.reports.per_tenant is 'two'; it must be a whole number, 1 or more"),
        ("[queues.reports]\nper_tenant = true", "perdure.toml: queues.reports.per_tenant is True; it must be a whole number, 1 or more"),
        ("[queues.reports]\nlimit = 3", "perdure.toml: queues.reports: 'limit' is no setting of a queue; concurrency and per_tenant are"),
        ("[queues]\nreports = 5", "perdure.toml: queues.reports is 5; it must be a table with concurrency and per_tenant"),
        ("queues = 5", "perdure.toml: queues is 5; it must be a table of queues: [queues.NAME] with concurrency and per_tenant"),
        ('roles = ["ann"]', "perdure.toml: roles is ['ann']; it must be a table of roles: "),
        ('[roles]\nfinance = "ann"', "perdure.toml: roles.finance is 'ann'; it must be a list of names"),
        ('[roles]\nfinance = ["ann", 5]', "perdure.toml: roles.finance is ['ann', 5]; it must be a list of names"),
        ('[roles]\nfinance = [""]', "perdure.toml: roles.finance is ['']; it must be a list of names"),
        ('[roles]\nfinance = ["ann", "ann\\uFE0F"]', "perdure.toml: roles.finance is ['ann', 'ann\ufe0f']; it must be a list of names"),
        ('[roles]\n"fin\\u200Bance" = ["ann"]', "perdure.toml: roles.fin\u200bance is ['ann']; it must be a list of names"),
        ('[roles]\n"" = ["ann"]', "perdure.toml: roles. is ['ann']; it must be a list of names"),
        ('webhook_hosts = "a.example.com"', "perdure.toml: webhook_hosts is 'a.example.com'; it must be a list of host names"),
        ("webhook_hosts = [5]", "perdure.toml: webhook_hosts is [5]; it must be a list of host names"),
    ],
)
def test_a_wrong_table_names_the_key_and_the_rule(tmp_path, content, said):
    (tmp_path / "perdure.toml").write_text(content)
    assert refusal(tmp_path).startswith(said)


def test_a_queue_needs_a_name_that_can_be_one(tmp_path):
    (tmp_path / "perdure.toml").write_text('[queues."a b"]\nconcurrency = 1\n')
    assert "perdure.toml: queues: the queue 'a b' is not usable" in refusal(tmp_path)


@pytest.mark.parametrize(
    "host", ["https://a.example.com", "a.example.com:8443", "a.example.com/x", "*.example.com", "a b", "me@a.example.com"]
)
def test_a_host_is_a_name_and_nothing_else(tmp_path, host):
    assert "without scheme, port or path" in refusal(tmp_path, PERDURE_WEBHOOK_HOSTS=f"ok.example.com,{host}")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PERDURE_QUEUES", "reports=5", "PERDURE_QUEUES is not valid JSON"),
        ("PERDURE_QUEUES", "[]", "the environment variable PERDURE_QUEUES is '[]'; it must be a table of queues"),
        ("PERDURE_QUEUES", '{"a": {"concurrency": "5"}}', "PERDURE_QUEUES: a.concurrency is '5'; it must be a whole number"),
        ("PERDURE_QUEUES", '{"a": {}, "a": {}}', "the key 'a' occurs twice"),
        ("PERDURE_ROLES", '{"finance": "ann"}', "PERDURE_ROLES: finance is 'ann'; it must be a list of names"),
    ],
)
def test_a_wrong_table_in_the_environment_names_its_variable(tmp_path, variable, value, words):
    assert words in refusal(tmp_path, **{variable: value})


@pytest.mark.parametrize("name", ["webhook_secret", "webhook_url"])
def test_an_error_does_not_show_what_must_stay_hidden(tmp_path, name):
    (tmp_path / "perdure.toml").write_text(f'{name} = ["hush-hush"]\n')
    assert refusal(tmp_path) == f"perdure.toml: {name} is not shown here; it must be text"


def test_settings_that_are_shown_do_not_show_the_secret():
    settings = Settings(webhook_secret="hush-hush", webhook_url="https://hooks.example.com/T0KEN", lease_s=4.5)
    console = Console(width=10_000)
    with console.capture() as captured:
        console.print(settings)
    for shown in (repr(settings), str(settings), f"{settings}", captured.get()):
        assert "hush" not in shown
        assert "T0KEN" not in shown
        assert "webhook_secret='(set)'" in shown
        assert "lease_s=4.5" in shown
    assert "webhook_secret=''" in repr(Settings())


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_doctor_does_not_show_the_secret(tmp_path, flags):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environ = {**inherited, "PERDURE_WEBHOOK_SECRET": "hush-hush", "PERDURE_URL": f"sqlite:///{tmp_path}/none.db"}
    command = [sys.executable, "-m", "perdure", "doctor", *flags]
    done = forked.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert "python" in done.stdout
    assert "hush" not in done.stdout + done.stderr
    assert not flags or all(json.loads(line) for line in done.stdout.splitlines())
