"""What breaks replay, found by reading: files are parsed, never imported and never run."""

from perdure.check.finding import Finding
from perdure.check.look import Seen, look

__all__ = ["Finding", "Seen", "look"]
