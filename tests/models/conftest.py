"""Both SDKs use the provider of the test, and never a key or an address from the developer's shell."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _sdks_speak_to_the_provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ANTHROPIC_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    if "provider" in request.fixturenames:
        for name, value in request.getfixturevalue("provider").env.items():
            monkeypatch.setenv(name, value)
