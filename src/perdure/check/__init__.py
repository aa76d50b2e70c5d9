"""`perdure check`: finds code that breaks replay or safety. Files are parsed, never imported and never run."""

from perdure.check.finding import Finding
from perdure.check.look import Seen, look

__all__ = ["Finding", "Seen", "look"]
