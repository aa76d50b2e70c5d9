"""One process of `perdure crashtest` in a fresh interpreter: python -m perdure.cli.crash_victim LIFELINE <SPEC."""

from __future__ import annotations

import os
import sys

import msgspec

from perdure.cli.target import load_target, with_children
from perdure.testing.lab.lifeline import end_with_lab
from perdure.testing.lab.spec import Spec
from perdure.testing.lab.victim import live


def main(lifeline: str) -> None:
    """Run the trial that the spec on stdin describes."""
    end_with_lab(int(lifeline))
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)
    # The tools must not read stdin: the spec has passwords. So replace stdin by /dev/null.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    agent = load_target(spec.target).agent
    live(spec, agent, with_children([agent]))


if __name__ == "__main__":
    main(*sys.argv[1:])
