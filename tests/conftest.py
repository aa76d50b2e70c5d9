"""What holds for every test: no setting of the developer's shell reaches it, and the machine may be slow."""

from __future__ import annotations

import os

import hypothesis
import pytest

# A deadline per example measures the other tests that share the cores, not our code; the watchdog in pyproject.toml bounds the whole.
hypothesis.settings.register_profile("perdure", deadline=None, print_blob=True)
hypothesis.settings.load_profile("perdure")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
