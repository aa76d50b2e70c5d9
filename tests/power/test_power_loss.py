"""The power fails at any moment of a run, and the disk has kept any part of the data that was not synced (G1, G2).

No acknowledged event is lost, and the run continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import figures
from tests.power.lab import Lab
from tests.power.scenarios import SCENARIOS, record

# Into how many tests its log is divided: each takes a few seconds.
PARTS = {**dict.fromkeys(SCENARIOS, 2), "one run, from the first byte on": 3, "people": 4, "upgraded": 1}
AT_LEAST = 800  # in each; in all of them 20,000, which tests/figures.py sees to


@pytest.mark.long
@pytest.mark.parametrize(("name", "part"), [(name, part) for name in SCENARIOS for part in range(PARTS[name])])
def test_after_a_power_loss_at_any_point_everything_acknowledged_is_there_and_the_run_goes_on(name: str, part: int, folder: Path) -> None:
    scenario, parts = SCENARIOS[name], PARTS[name]
    (folder / "recorded").mkdir()
    log = record(scenario, folder / "recorded" / "journal.db")
    lab = Lab(folder / "state", scenario, seed=f"{name} {part}")
    lab.survey(log, each=5, resume_every=150, between=((len(log) + 1) * part / parts, (len(log) + 1) * (part + 1) / parts))
    figures.seen(figures.STATES, lab.distinct)
    figures.seen("databases recovered from them", lab.databases)
    figures.seen("resumed to the end", lab.resumed)
    assert lab.distinct >= AT_LEAST, (lab.distinct, lab.kinds)
    assert lab.resumed
    assert set(lab.kinds) >= {"all arrived", "one torn", "one lost", "one alone", "any of them"}, lab.kinds
