"""Explore scenarios by name: see explorer.py."""

from __future__ import annotations

import argparse
import time

from tests.core.explorer import explore
from tests.core.scenario import CHECKPOINTED, FORKED, REOPENED, SCENARIOS, WALKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.core", description=__doc__)
    parser.add_argument("names", nargs="*", help="of scenarios; all")
    parser.add_argument("--effort", nargs="*", default=["1,200", "1,4"], help="for each number of deaths: DIFFERENCES,PATHS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, default=None)
    asked = parser.parse_args()
    effort = [(int(one.partition(",")[0]), int(one.partition(",")[2])) for one in asked.effort]
    for scenario in [*SCENARIOS, *REOPENED, *CHECKPOINTED, *FORKED, *WALKS]:
        if asked.names and scenario.name not in asked.names:
            continue
        begun = time.process_time()
        tally = explore(scenario, effort, seed=asked.seed, most_points=asked.points)
        took = time.process_time() - begun
        print(f"{scenario.name}: {tally}; {took:.1f} s, {took / max(tally.points, 1) * 1e6:.0f} µs each", flush=True)


if __name__ == "__main__":
    main()
