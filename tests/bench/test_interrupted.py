"""`make bench` that is interrupted: what was measured is printed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref

import pytest
from bench import litter
from bench.race.lanes import ROOT
from tests.bench.contestants import heeds_signals


@pytest.mark.long
def test_an_interrupt_prints_what_was_measured_and_no_traceback() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--only", "sqlite"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeds_signals
    ) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("One run of 1,000 sequential calls")
        os.killpg(bench.pid, signal.SIGINT)  # like a terminal: the signal goes to all processes of the command
        table, complaints = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in table + complaints
    assert complaints.splitlines()[-1].startswith("interrupted")
    assert "one run, 1,000 calls" in table
    assert "conversation" not in table


class _Litter:
    def __init__(self) -> None:
        self.itself = self  # only the garbage collector can free this object


def test_an_interrupt_while_litter_is_collected_is_not_lost() -> None:
    thrown_away = _Litter()
    witness = weakref.ref(thrown_away, lambda _: signal.raise_signal(signal.SIGINT))
    del thrown_away
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            litter.collect()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert witness() is None
