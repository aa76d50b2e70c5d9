"""Puts the checkout on the import path. Import this module before anything from `tests`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
