"""One file under examination: its names, what it declares, the code that runs inside agents, and what was found so far."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from perdure.check.declared import Declarations
from perdure.check.finding import Finding, Severity
from perdure.check.names import Names
from perdure.check.reach import Root, Unit, reached
from perdure.check.scopes import Scope


class File:
    """What the rules look at, and where they say what they have found."""

    def __init__(self, path: str, text: str, tree: ast.Module) -> None:
        self.path = path
        self.names = Names(tree)
        self.declared = Declarations(self.names)
        self.units = reached(self.names, self.declared, [Root(one.function, f"agent {one.name}") for one in self.declared.agents])
        self._inside = {unit.owner for unit in self.units}
        self._lines = re.split("\r\n|\r|\n", text)  # the line ends that Python counts; str.splitlines knows more
        self._found: dict[tuple[int, int, str], Finding] = {}

    @cached_property
    def tool_units(self) -> list[Unit]:
        """The code that runs inside tools and their hooks."""
        tools = [Root(one.function, f"tool {one.name}") for one in self.declared.tools]
        hooks = [Root(one.function, f"tool {one.name}") for _, _, one in self.declared.hooks]
        return reached(self.names, self.declared, [*tools, *hooks])

    def is_shared(self, scope: Scope) -> bool:
        """Whether what is bound in this scope is there for more than one run: it is none of a function that runs inside an agent."""
        return scope.function not in self._inside

    def shared(self, node: ast.AST, scope: Scope) -> Scope | None:
        """The scope of the name, if it outlives a run and is a value: not a function, a tool or a builtin."""
        if not isinstance(node, ast.Name):
            return None
        home = scope.home(node.id)
        return home if home is not None and self.is_shared(home) else None

    def say(self, node: ast.AST, rule: str, where: str, message: str, way_out: str, severity: Severity = "error") -> None:
        """Something was found at this node; only the first thing that a rule says about a place counts."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        finding = Finding(self.path, line, self._column(line, offset), rule, severity, where, message, way_out)
        self._found.setdefault((line, offset, rule), finding)

    @property
    def found(self) -> list[Finding]:
        """All of it, in the order of the file."""
        return sorted(self._found.values())

    def _column(self, line: int, offset: int) -> int:
        """Characters from 1, out of the parser's UTF-8 bytes from 0."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        if text.isascii():  # known without looking: a long line with much in it would be read over and over
            return offset + 1
        return len(text.encode()[:offset].decode(errors="replace")) + 1
