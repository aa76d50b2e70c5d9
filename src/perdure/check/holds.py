"""Whether a file holds an agent under some name, or tools: found by reading it and what it imports, never by running any of it.

What is not found this way may still be there: a name that is made by `globals()[…]`, or by a package that has no source here.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from perdure.check import source
from perdure.check.declared import AGENT, BUILT, TOOL
from perdure.check.names import Names
from perdure.check.scopes import Binding, Scope
from perdure.errors import InvalidInput

_PLANS = ("perdure.Plan", "perdure.plan.Plan", "perdure.plan.built.Plan")
_AGENTS = AGENT | BUILT | {"perdure.Agent", "perdure.agent.Agent", "perdure.agent.BuiltAgent"} | {f"{plan}.from_model" for plan in _PLANS}
_TOOLS = _AGENTS | TOOL | {"perdure.Tool", "perdure.tool.Tool"}


def holds_agent(file: Path, name: str, path: Sequence[str]) -> bool:
    """Whether the file binds the name, at its top level, to an agent. `path` is where its absolute imports are looked for."""
    try:
        return _Reader(_AGENTS, path).holds(file, name)
    except RecursionError:  # nested more deeply than anything that a person has written
        return False


def holds_tools(file: Path, path: Sequence[str]) -> bool:
    """Whether the file binds any name, at its top level, to a tool or an agent: a plan can call both."""
    reader = _Reader(_TOOLS, path)
    names = reader.names(file)
    try:
        return names is not None and any(reader.holds(file, name) for name in names.scopes[names.tree].bound)
    except RecursionError:
        return False


class _Reader:
    """Follows names to what makes them, through as many files as that takes. Each name of each file is looked at once."""

    def __init__(self, makers: frozenset[str], path: Sequence[str]) -> None:
        self._makers = makers
        self._path = list(path)
        self._read: dict[Path, Names | None] = {}
        self._seen: set[tuple[Path, str, str]] = set()

    def names(self, file: Path) -> Names | None:
        """The file's names; None when it is no Python that can be read."""
        if file not in self._read:
            try:
                self._read[file] = Names(source.parse(source.decode(source.read(file))))
            except (InvalidInput, source.NotPython):
                self._read[file] = None
        return self._read[file]

    def holds(self, file: Path, name: str) -> bool:
        """Whether the name, at the top level of the file, is bound to what a maker has made."""
        return any(self._is_made(binding, where) for binding, where in self._bound(file, name, "holds"))

    def _makes(self, file: Path, name: str) -> bool:
        """Whether the name, at the top level of the file, is bound to something that makes what is looked for: a maker, or code that uses one."""
        return any(self._is_maker(binding, where) for binding, where in self._bound(file, name, "makes"))

    def _bound(self, file: Path, name: str, asked: str) -> list[tuple[Binding, Path]]:
        """Every binding of the name, and the file that it stands in: this one, or one that it was imported from."""
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

    # -- what a binding is ---------------------------------------------------------------------------------------------------
    def _is_made(self, binding: Binding, file: Path) -> bool:
        node = binding.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(self._is_making(decorator, binding.scope, file) for decorator in node.decorator_list)
        return binding.kind == "assign" and binding.value is not None and self._is_value(binding.value, binding.scope, file)

    def _is_value(self, node: ast.expr, scope: Scope, file: Path) -> bool:
        """Whether this expression gives what is looked for."""
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
        """Whether calling this, or decorating with it, makes what is looked for: `agent`, `agent(…)`, `partial(agent, …)`, `our_own(…)`."""
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
        """Whether this node names a maker, or one of the file's own functions or classes that use one."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        return self._dotted(node, scope, file) in self._makers or (isinstance(node, ast.Name) and self._makes(file, node.id))

    def _dotted(self, node: ast.expr, scope: Scope, file: Path) -> str:
        names = self.names(file)
        assert names is not None
        return names.dotted(node, scope)


def _file_of(module: str, importer: Path, path: Sequence[str]) -> Path | None:
    """The source of a module as the importing file would find it; None when there is none. Nothing is imported on the way."""
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
        # Asked by the last part of its name and the folders of its package: so no package has to be imported to find what is in it.
        spec = PathFinder.find_spec(part, list(places))
        if spec is None:
            return None
        if at == len(parts):
            return None if spec.origin is None else _source(Path(spec.origin))
        places = spec.submodule_search_locations
    return None


def _source(file: Path) -> Path | None:
    return file.resolve() if file.suffix == ".py" and file.is_file() else None
