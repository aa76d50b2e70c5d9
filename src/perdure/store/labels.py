"""The labels of runs. Each change is an event; the rows here follow from the events, so that a query finds the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from perdure.store.cursor import Cursor
from perdure.store.part import Part


class Labels(Part):
    def labels(self, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {run_id: {} for run_id in run_ids}
        for run_id, key, value in self._database.read("labels_of_runs", {"run_ids": msgspec.json.encode(run_ids).decode()}):
            found[run_id][key] = value
        return found


def change(cursor: Cursor, key: int, labels: Mapping[str, str | None]) -> None:
    """Set the labels of the run with this key; None removes a label."""
    cursor.each("set_label", [(name, value, key) for name, value in labels.items() if value is not None])
    cursor.each("remove_label", [(key, name) for name, value in labels.items() if value is None])
