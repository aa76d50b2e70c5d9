"""Does a file have an agent with a given name, or tools? The file and its imports are parsed, and never run.

Some agents are not found: an agent that is bound by `globals()[…]`, or made by a package without source files.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from perdure.check import source
from perdure.check.declared import AGENT, BUILT, TOOL
from perdure.check.names import BoundNames
from perdure.check.scopes import Binding, Scope
from perdure.errors import InvalidInput

_PLANS = ("perdure.Plan", "perdure.agents.plan.Plan", "perdure.agents.plan.built.Plan")
_AGENTS = AGENT | BUILT | {"perdure.Agent", "perdure.agent.Agent", "perdure.agent.BuiltAgent"} | {f"{plan}.from_model" for plan in _PLANS}
_TOOLS = _AGENTS | TOOL | {"perdure.Tool", "perdure.tool.Tool"}


def holds_agent(file: Path, name: str, path: Sequence[str]) -> bool:
    """Does the top level of the file bind the name to an agent? `path` is the search path for absolute imports."""
    try:
        return _Reader(_AGENTS, path).holds(file, name)
    except RecursionError:  # the file is nested more deeply than hand-written code
        return False


def holds_tools(file: Path, path: Sequence[str]) -> bool:
    """Does the top level of the file bind any name to a tool or an agent? A plan can call tools and agents."""
    reader = _Reader(_TOOLS, path)
    names = reader.names(file)
    try:
        return names is not None and any(reader.holds(file, name) for name in names.scopes[names.tree].bound)
    except RecursionError:
        return False


class _Reader:
    """Follows a name to the code that makes its value, through all imported files. Each name is followed once.

    `makers` are the dotted names that make an agent or a tool, such as `perdure.agent`.
    """

    def __init__(self, makers: frozenset[str], path: Sequence[str]) -> None:
        self._makers = makers
        self._path = list(path)
        self._read: dict[Path, BoundNames | None] = {}
        self._seen: set[tuple[Path, str, str]] = set()

    def names(self, file: Path) -> BoundNames | None:
        """The names of the file; None if the file cannot be read or parsed."""
        if file not in self._read:
            try:
                self._read[file] = BoundNames(source.parse(source.decode(source.read(file))))
            except (InvalidInput, source.NotPython):
                self._read[file] = None
        return self._read[file]

    def holds(self, file: Path, name: str) -> bool:
        """Does the top level of the file bind the name to a value that a maker made?"""
        return any(self._is_made(binding, where) for binding, where in self._bound(file, name, "holds"))

    def _makes(self, file: Path, name: str) -> bool:
        """Does the top level of the file bind the name to a maker, or to a function or class that uses a maker?"""
        return any(self._is_maker(binding, where) for binding, where in self._bound(file, name, "makes"))

    def _bound(self, file: Path, name: str, asked: str) -> list[tuple[Binding, Path]]:
        """Every binding of the name, each with its file: this file, or a file from which the name is imported."""
        if (file, name, asked) in self._seen or (names := self.names(file)) is None:
            return []
        self._seen.add((file, name, asked))
        top = names.scopes[names.tree]
        found: list[tuple[Binding, Path]] = []
        for binding in top.bound.get(name, []):
            found += self._imported(binding.means, file, asked) if binding.kind == "import" else [(binding, file)]
        if name not in top.bound:
            for module in names.starred:
                found += self._imported(f"{module}.{name}", file, asked)
        return found

    def _imported(self, dotted: str, file: Path, asked: str) -> list[tuple[Binding, Path]]:
        """The bindings of `package.module.name` in the file of that module."""
        module, _, name = dotted.rpartition(".")
        found = _file_of(module, file, self._path)
        return [] if found is None or not name else self._bound(found, name, asked)

    # -- what a binding is --------------------------------------------------------------------------------------------
    def _is_made(self, binding: Binding, file: Path) -> bool:
        node = binding.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(self._is_making(decorator, binding.scope, file) for decorator in node.decorator_list)
        return binding.kind == "assign" and binding.value is not None and self._is_value(binding.value, binding.scope, file)

    def _is_value(self, node: ast.expr, scope: Scope, file: Path) -> bool:
        """Does a maker make the value of this expression?"""
        match node:
            case ast.Call(func=func):
                return self._is_making(func, scope, file)
            case ast.Name(id=name):
                return self.holds(file, name)
            case ast.Attribute():
                return any(
                    self._is_made(binding, where) for binding, where in self._imported(self._dotted(node, scope, file), file, "holds")
                )
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_value(body, scope, file) or self._is_value(orelse, scope, file)
            case ast.BoolOp(values=values):
                return any(self._is_value(value, scope, file) for value in values)
            case ast.NamedExpr(value=value):
                return self._is_value(value, scope, file)
            case _:
                return False

    def _is_making(self, node: ast.expr, scope: Scope, file: Path) -> bool:
        """Is this expression a maker or a call of a maker: `agent`, `agent(…)`, `partial(agent, …)`, `our_own(…)`?"""
        dotted = self._dotted(node, scope, file)
        if dotted in self._makers:
            return True
        match node:
            case ast.Call(func=func, args=args):
                partial = self._dotted(func, scope, file) == "functools.partial" and bool(args)
                return self._is_making(args[0] if partial else func, scope, file)
            case ast.Name(id=name):
                return self._makes(file, name)
            case ast.Attribute():
                return any(self._is_maker(binding, where) for binding, where in self._imported(dotted, file, "makes"))
            case _:
                return False

    def _is_maker(self, binding: Binding, file: Path) -> bool:
        node = binding.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = self.names(file)
            assert names is not None
            return any(self._mentions(part, names.scopes[node], file) for part in ast.walk(node))
        return binding.kind == "assign" and binding.value is not None and self._is_making(binding.value, binding.scope, file)

    def _mentions(self, node: ast.AST, scope: Scope, file: Path) -> bool:
        """Does this node name a maker, or a function or class that uses a maker?"""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        return self._dotted(node, scope, file) in self._makers or (isinstance(node, ast.Name) and self._makes(file, node.id))

    def _dotted(self, node: ast.expr, scope: Scope, file: Path) -> str:
        names = self.names(file)
        assert names is not None
        return names.dotted(node, scope)


def _file_of(module: str, importer: Path, path: Sequence[str]) -> Path | None:
    """The source file of a module that the importing file imports; None if there is no source. Nothing is imported."""
    absolute = module.lstrip(".")
    places: Sequence[str] | None = path
    if level := len(module) - len(absolute):
        if level > len(importer.parents):
            return None
        package = importer.parents[level - 1]
        if not absolute:
            return _source(package / "__init__.py")
        places = [str(package)]
    parts = absolute.split(".")
    for at, part in enumerate(parts, 1):
        if not part or places is None:
            return None
        # With a dotted name, find_spec would import the parent packages. So this loop looks up each part of the name
        # alone, in the folders of the part before.
        spec = PathFinder.find_spec(part, list(places))
        if spec is None:
            return None
        if at == len(parts):
            return None if spec.origin is None else _source(Path(spec.origin))
        places = spec.submodule_search_locations
    return None


def _source(file: Path) -> Path | None:
    return file.resolve() if file.suffix == ".py" and file.is_file() else None
