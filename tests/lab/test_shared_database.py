"""The lab in a database with other users: its runs have new ids, and no other run is changed."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.lab import wards
from tests.lab.matrices import about, matrix, rules

from perdure import sync
from perdure.store.open import open_store


@pytest.mark.long
def test_on_postgres_every_trial_is_a_run_with_a_new_id_and_other_runs_stay_as_they_are(postgres_url: str) -> None:
    with sync.Perdure(postgres_url, agents=[wards.says]) as app:
        app.start(wards.says, "append_twice", id="somebody-elses")
        before = app.reading.get("somebody-elses")
    effects = about("after_tool_effect: ")
    honest = matrix(wards.says, "heeds_key", url=postgres_url, boundaries=effects)
    assert honest.ok, honest.table()
    assert honest.subject.store == "PostgreSQL"
    # Each run has another key: that alone makes neither the files nor the outputs differ.
    assert {trial.output_equal for trial in honest.trials} == {True}
    wrong = matrix(wards.says, "append_twice", url=postgres_url, boundaries=effects)
    assert rules(wrong) == {("effect_twice", "append_twice")}
    with closing(open_store(postgres_url)) as store:
        ids = [row.run_id for row in store.list(limit=1000)]
        assert store.get("somebody-elses") == before
    assert len(ids) == len(set(ids)) == 1 + 2 * 2 + len(honest.trials) + len(wrong.trials)
    assert all(run_id == "somebody-elses" or run_id.startswith("crashtest-") for run_id in ids)
