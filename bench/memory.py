"""The peak memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_mb() -> float:
    """The peak memory of this program. getrusage on Linux would include the copy of the parent process before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        kilobytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kilobytes) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
