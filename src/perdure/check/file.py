"""A file that is checked: its names, its declarations, the code that runs inside agents, and the findings so far."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from perdure.check.declared import Declarations
from perdure.check.finding import Finding, Severity
from perdure.check.names import BoundNames
from perdure.check.reach import Root, Unit, reached
from perdure.check.scopes import Scope


class File:
    """The input of the rules, and the collector of their findings."""

    def __init__(self, path: str, text: str, tree: ast.Module) -> None:
        self.path = path
        self.names = BoundNames(tree)
        self.declared = Declarations(self.names)
        self.units = reached(self.names, self.declared, [Root(one.function, f"agent {one.name}") for one in self.declared.agents])
        self._inside = {unit.owner for unit in self.units}
        self._lines = re.split("\r\n|\r|\n", text)  # as Python splits source; str.splitlines knows more line ends
        self._found: dict[tuple[int, int, str], Finding] = {}

    @cached_property
    def tool_units(self) -> list[Unit]:
        """The code that runs inside tools and their hooks."""
        tools = [Root(one.function, f"tool {one.name}") for one in self.declared.tools]
        hooks = [Root(one.function, f"tool {one.name}") for _, _, one in self.declared.hooks]
        return reached(self.names, self.declared, [*tools, *hooks])

    def is_shared(self, scope: Scope) -> bool:
        """Does a name in this scope outlive a run? Yes, unless the scope is a function that runs inside an agent."""
        return scope.function not in self._inside

    def shared(self, node: ast.AST, scope: Scope) -> Scope | None:
        """The scope that binds this name, if that scope outlives a run. None for a builtin, and for other nodes."""
        if not isinstance(node, ast.Name):
            return None
        home = scope.home(node.id)
        return home if home is not None and self.is_shared(home) else None

    def say(self, node: ast.AST, rule: str, where: str, message: str, way_out: str, severity: Severity = "error") -> None:
        """Add a finding at this node. If the rule already has a finding at this place, the new finding is dropped."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        finding = Finding(self.path, line, self._column(line, offset), rule, severity, where, message, way_out)
        self._found.setdefault((line, offset, rule), finding)

    @property
    def found(self) -> list[Finding]:
        """All findings, in the order of the file."""
        return sorted(self._found.values())

    def _column(self, line: int, offset: int) -> int:
        """The column in characters, from 1. `offset` comes from the parser, which counts UTF-8 bytes, from 0."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        if text.isascii():  # a quick test that avoids encoding a long line for each finding
            return offset + 1
        return len(text.encode()[:offset].decode(errors="replace")) + 1
