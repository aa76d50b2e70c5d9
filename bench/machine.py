"""The machine on which the figures were measured; without this data they mean nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import apsw
import raw

import perdure


def facts(folder: Path) -> dict[str, str]:
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    return {
        "cores": str(os.cpu_count()),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "perdure": perdure.__version__,
        "sqlite": f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})",
        "file system": _file_system(folder),
        "fsyncs of 4 KiB": f"{raw.syncs_per_s(folder, grow=False):,.0f} /s in place, {raw.syncs_per_s(folder, grow=True):,.0f} /s in a file that grows",
        "load before (1, 5, 15 min)": load,
    }


def _file_system(folder: Path) -> str:
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(point, kind) for point, kind in found if folder.is_relative_to(point)]
    # The deepest mount point above the folder counts; of several mounts there, the last mount counts.
    return max(reversed(holding), key=lambda one: len(one[0]), default=("", "unknown"))[1]
