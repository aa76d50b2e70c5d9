"""A folder in memory.

The tests are about the disk in the log; the real folder is written tens of thousands of times.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not MEMORY.is_dir():
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="perdure-test-", dir=MEMORY))
    yield made
    shutil.rmtree(made)
