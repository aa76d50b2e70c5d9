"""The old names of modules, from version 0.1. They work until 0.3, with a DeprecationWarning that has the new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old name → (new name, what a user writes instead). An old package has only the submodules that are listed here.
MOVED = {
    "perdure.integrations": ("perdure.agents.mcp", "from perdure import mcp"),
    "perdure.integrations.mcp": ("perdure.agents.mcp.tools", "from perdure import mcp"),
    "perdure.plan": ("perdure.agents.plan", "from perdure import Plan, Step, param, ref"),
    "perdure.react": ("perdure.agents.react.agent", "from perdure import ReAct"),
}


class Finder:
    """Finds a module by its old name: creates an empty module, and copies all names of the new module into it.

    The class has no base class, because importing `importlib.abc` takes longer than this whole module.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        loader: Any = self  # this object has all methods of a Loader, but not its base class
        return ModuleSpec(fullname, loader, is_package=True) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python then creates the usual empty module

    def exec_module(self, module: ModuleType) -> None:
        new, instead = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is called {new} since 0.2; 0.3 removes the old name: {instead}", DeprecationWarning, stacklevel=2)
        moved = importlib.import_module(new)
        module.__doc__ = moved.__doc__
        module.__dict__.update({name: value for name, value in vars(moved).items() if not name.startswith("__") or name == "__all__"})


def install() -> None:
    """Install the finder before all other finders.

    Otherwise a folder that an old version of perdure has left on the disk would be imported as the module.
    """
    sys.meta_path.insert(0, Finder())
