"""Imported before anything of `tests`: the tests know how to start a server, and their package lies beside this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
