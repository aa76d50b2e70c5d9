"""What an isolated tool's process inherits: the worker's environment without the secrets of perdure and of its models."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.test_perform_isolated import failure_of, loaded, performed

from perdure import InvalidInput, tool
from perdure.core.outcomes import Returned
from perdure.store.url import without_password

SECRET = "kT9-very-secret-7Qx"
SECRETS = [
    *("PERDURE_WEBHOOK_SECRET", "PERDURE_WEBHOOK_URL", "PERDURE_SOME_SECRET_OF_TOMORROW", "PGPASSWORD", "PGPASSFILE"),
    *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_WEBHOOK_SIGNING_KEY", "ANTHROPIC_WORK_SECRET"),
    *("ANTHROPIC_FOUNDRY_API_KEY", "ANTHROPIC_IDENTITY_TOKEN", "OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS"),
    *("OPENAI_WEBHOOK_SECRET", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AWS_BEARER_TOKEN_BEDROCK"),
]
INHERITED = ["STRIPE_API_KEY", "MY_SECRET", "PERDURE_CONCURRENCY", "PGHOST", "PGUSER", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"]

TOOLS = """
import os
from perdure.tool import tool

def seen() -> dict:
    # What the kernel shows of it too: of this process, and of its supervisor.
    of_kernel = "".join(open(f"/proc/{pid}/environ").read() for pid in (os.getpid(), os.getppid()))
    return {"environ": dict(os.environ), "kernel": of_kernel}

@tool(isolate=True)
def looks() -> dict:
    return seen()

@tool(isolate=True, pass_env=["OPENAI_API_KEY", "PERDURE_URL", "NOT_SET_ANYWHERE"])
def is_trusted() -> dict:
    return seen()

@tool(isolate=True)
def needs_a_key() -> str:
    return os.environ["OPENAI_API_KEY"]
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return loaded(tmp_path_factory.mktemp("tools") / "looking.py", TOOLS)


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *INHERITED):
        monkeypatch.setenv(name, f"{SECRET}-{name}")
    monkeypatch.setenv("PERDURE_URL", f"postgresql://app:{SECRET}@db.example.com:5433/perdure?sslmode=require&sslpassword={SECRET}")


def seen_by(declared: Any) -> tuple[dict[str, str], str]:
    answer = performed(declared)
    assert isinstance(answer, Returned)
    seen = json.loads(answer.result)
    return seen["environ"], seen["kernel"]


def test_the_process_of_a_tool_has_the_environment_without_our_secrets(tools):
    environ, kernel = seen_by(tools.looks)
    assert not environ.keys() & set(SECRETS)
    for name in SECRETS:
        assert f"{SECRET}-{name}" not in kernel
    assert {name: environ.get(name) for name in INHERITED} == {name: f"{SECRET}-{name}" for name in INHERITED}
    assert "PATH" in environ


def test_the_url_of_the_journal_is_inherited_without_its_passwords(tools):
    """Without the variable the tool's own perdure would take the journal of the default for it, and say nothing."""
    environ, kernel = seen_by(tools.looks)
    assert environ["PERDURE_URL"] == "postgresql://app@db.example.com:5433/perdure?sslmode=require"
    assert f":{SECRET}@" not in kernel


def test_a_tool_gets_the_secrets_that_it_asks_for_and_no_others(tools):
    environ, kernel = seen_by(tools.is_trusted)
    assert environ["OPENAI_API_KEY"] == f"{SECRET}-OPENAI_API_KEY"
    assert f":{SECRET}@db.example.com" in environ["PERDURE_URL"]
    assert environ.keys() & set(SECRETS) == {"OPENAI_API_KEY"}
    assert f"{SECRET}-ANTHROPIC_API_KEY" not in kernel
    assert "NOT_SET_ANYWHERE" not in environ


def test_a_tool_that_misses_a_secret_is_told_the_way_out(tools):
    kind, message = failure_of(performed(tools.needs_a_key))
    assert kind == "error"
    assert message == "'OPENAI_API_KEY'; it was not given OPENAI_API_KEY: name it in @tool(isolate=True, pass_env=[…]) if it needs it"


def test_a_module_that_misses_a_secret_while_it_is_loaded_is_told_the_way_out(tmp_path: Path):
    source = "import os\nfrom perdure.tool import tool\nKEY = os.environ['PGPASSWORD']\n@tool(isolate=True)\ndef f() -> None: ...\n"
    kind, message = failure_of(performed(loaded(tmp_path / "keyed.py", source).f))
    assert kind == "not_sent"
    assert "could not be loaded" in message
    assert message.endswith("it was not given PGPASSWORD: name it in @tool(isolate=True, pass_env=[…]) if it needs it")


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("postgresql://app:secret@host/db", "postgresql://app@host/db"),
        ("postgresql://app:se:c@ret@host/db", "postgresql://app@host/db"),
        ("postgresql://:secret@host/db", "postgresql://@host/db"),
        ("postgresql://app:secret@h1:1,h2:2/db?sslmode=require", "postgresql://app@h1:1,h2:2/db?sslmode=require"),
        ("postgresql://host/db?user=app&password=secret", "postgresql://host/db?user=app"),
        ("postgresql://host/db?PassWord=secret&p%61ssfile=/secret&x=1", "postgresql://host/db?x=1"),
        ("postgresql://app@host/db", "postgresql://app@host/db"),
        ("sqlite:///a:b@c?password=d", "sqlite:///a:b@c?password=d"),
        ("sqlite://", "sqlite://"),
        ("postgresql://app:sec?ret@host/db", None),
        ("postgresql://app:s@c?ret@host/db", None),
        ("host=h user=app password=secret", None),
    ],
)
def test_a_url_without_its_passwords(url, left):
    assert without_password(url) == left


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pass_env": ["A"]}, "pass_env needs isolate=True; without it the tool has the worker's whole environment"),
        ({"isolate": True, "pass_env": "OPENAI_API_KEY"}, "pass_env='OPENAI_API_KEY' is not a list of names"),
        ({"isolate": True, "pass_env": {"A": "b"}}, "is not a list of names"),
        ({"isolate": True, "pass_env": 7}, "pass_env=7 is not a list of names"),
        ({"isolate": True, "pass_env": [7]}, "pass_env has 7, which is not the name"),
        ({"isolate": True, "pass_env": ["A=b"]}, "pass_env has 'A=b', which is not the name"),
        ({"isolate": True, "pass_env": [""]}, "pass_env has '', which is not the name"),
    ],
)
def test_what_is_declared_wrong_is_refused_where_it_is_declared(options, words):
    with pytest.raises(InvalidInput, match=words):
        tool(**options)(declared)


def declared(n: int) -> int:
    return n


def test_what_a_tool_is_given_of_the_environment_does_not_change_what_it_is_to_its_caller():
    """Or a run under way would stop when a key is added: the pin is about arguments and effects."""
    assert tool(isolate=True)(declared).pin() == tool(isolate=True, pass_env=["OPENAI_API_KEY"])(declared).pin()
