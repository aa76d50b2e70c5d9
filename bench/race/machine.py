"""The machine on which the figures were measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

_SYNC_S = 0.5
_PYTHON_S = 30.0
_BUSY = 1.5


def facts(folder: Path) -> dict[str, str]:
    return {
        "processor": f"{os.cpu_count()} cores, {_first_value(Path('/proc/cpuinfo'), 'model name') or platform.machine()}",
        "memory": f"{_memory_gb():.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "file system": file_system(folder),
        "disk, 4 KiB at the end of a file": f"{_syncs_per_s(folder):,.0f} fsyncs/s",
        "Python": python(Path(sys.executable)),
        "load before (1, 5, 15 min)": load(),
    }


def load() -> str:
    return ", ".join(f"{one:.2f}" for one in os.getloadavg())


def busy(before: float) -> str | None:
    """The warning about the load of the last minute before the race, if it is too high."""
    if before <= _BUSY:
        return None
    return f"The machine was busy in the minute before this began (load {before:.2f}): if that went on, it was measured, too."


def python(executable: Path) -> str:
    """The implementation and version of this Python interpreter."""
    asked = "import platform; print(platform.python_implementation(), platform.python_version())"
    return subprocess.run([executable, "-I", "-c", asked], capture_output=True, text=True, timeout=_PYTHON_S, check=True).stdout.strip()


def _first_value(path: Path, name: str) -> str | None:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def file_system(folder: Path) -> str:
    """The kind of the file system of this folder: ext4, tmpfs, …"""
    mounts = Path("/proc/self/mounts")
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()] if mounts.exists() else []
    holding = [(point, kind) for point, kind in found if folder.is_relative_to(point)]
    # The deepest mount point above the folder counts; if several are mounted on it, the last one counts.
    return max(reversed(holding), key=lambda one: len(one[0]), default=("", "unknown"))[1]


def _syncs_per_s(folder: Path) -> float:
    path = folder / "sync"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        count, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < _SYNC_S:
            os.write(descriptor, b"x" * 4096)
            os.fsync(descriptor)
            count += 1
        return count / elapsed
    finally:
        os.close(descriptor)
        path.unlink()
