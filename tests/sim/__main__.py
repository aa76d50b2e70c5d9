"""python -m tests.sim SEED [--trace] [--shrink].

Run a seed again, print its operations, or find its shortest fault list.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from tests.sim.faults import Fault, draw
from tests.sim.shrink import shrink
from tests.sim.world import OPERATIONS, let_go, outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="print every operation")
    parser.add_argument("--shrink", action="store_true", help="find the shortest list of faults that still fails")
    told = parser.parse_args()
    trace: list[str] | None = [] if told.trace else None
    world, error = outcome(told.seed, trace=trace)
    if trace is not None:
        print(*trace, sep="\n")
    where = "remote" if world.remote else "near"
    print(f"seed {told.seed} ({where}): {world.number} operations, {world.crash_points} crash points, digest {world.digest}")
    if error is None:
        return 0
    traceback.print_exception(error)
    if told.shrink:
        print(f"    ({told.seed}, {_shortest(told.seed)}),  # {error}")
    return 1


def _shortest(seed: int) -> list[Fault]:
    def fails(plan: Sequence[Fault]) -> bool:
        error = outcome(seed, plan)[1]
        let_go()
        return error is not None

    return shrink(draw(seed, OPERATIONS), fails)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the threads of the simulation wait for ever
