"""`Report`: the findings, and what people make of them."""

from __future__ import annotations

from perdure.testing.lab.page import page
from perdure.testing.lab.records import Findings
from perdure.testing.lab.table import text


class Report(Findings, frozen=True):
    """What crash_matrix returns."""

    def table(self) -> str:
        """What is wrong, the table of trials, and the figures, as text."""
        return text(self)

    def as_html(self) -> str:
        """One self-contained page, for somebody who was not there."""
        return page(self)
