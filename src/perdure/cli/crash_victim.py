"""One process of `perdure crashtest` in an interpreter of its own: python -m perdure.cli.crash_victim SPEC LIFELINE."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from perdure.cli.target import load_target, with_children
from perdure.testing.lab.launch import hang_on
from perdure.testing.lab.spec import Spec
from perdure.testing.lab.victim import live


def main(told: str, lifeline: str) -> None:
    """Do what the file says."""
    hang_on(int(lifeline))
    spec = msgspec.json.decode(Path(told).read_bytes(), type=Spec)
    agent = load_target(spec.target).agent
    live(spec, agent, with_children([agent]))


if __name__ == "__main__":
    main(*sys.argv[1:])
