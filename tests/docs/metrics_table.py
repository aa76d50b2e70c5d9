"""The table of metrics in docs/metrics.md: `python -m tests.docs.metrics_table` prints it."""

from __future__ import annotations

from perdure.metrics import FAMILIES


def table() -> str:
    """One row for each metric, in the order in which they are exposed."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
