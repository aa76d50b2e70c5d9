"""The most memory that this process has ever held."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_mb() -> float:
    """The peak of this program. What getrusage tells on Linux includes the moment before exec, when this was still its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        kilobytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kilobytes) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
