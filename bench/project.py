"""Puts the checkout on the import path. Import it before anything from `tests`, whose helpers start a PostgreSQL server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
