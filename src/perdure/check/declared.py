"""What a file declares: its agents, its tools and their hooks. The file may import perdure's names in any way."""

from __future__ import annotations

import ast
from typing import NamedTuple

from perdure.check.names import BoundNames
from perdure.check.scopes import Function, Scope

AGENT = frozenset(("perdure.agent", "perdure.agent.agent"))
TOOL = frozenset(("perdure.tool", "perdure.tool.tool", "perdure.tool.declared.tool"))
CALL = frozenset(("perdure.Call", "perdure.tool.Call", "perdure.tool.call.Call"))
REACT = frozenset(("perdure.ReAct", "perdure.agents.react.agent.ReAct"))
STEP = frozenset(("perdure.Step", "perdure.agents.plan.Step", "perdure.agents.plan.step.Step"))
BUILT = REACT | {
    f"{plan}{made}"
    for plan in ("perdure.Plan", "perdure.agents.plan.Plan", "perdure.agents.plan.built.Plan")
    for made in ("", ".from_file")
}
_HOOKS = ("reconcile", "compensate")
# These decorators call the decorated function. For any other decorator it is not known which code runs, so the check
# does not enter the decorated function.
_TRANSPARENT = frozenset(
    "functools.cache functools.lru_cache functools.wraps functools.cached_property contextlib.contextmanager "
    "contextlib.asynccontextmanager builtins.staticmethod builtins.classmethod builtins.property typing.final typing.override "
    "typing.no_type_check typing_extensions.override abc.abstractmethod".split()
)


class Declared(NamedTuple):
    """A function that the file declares as an agent, a tool or a hook, with its options."""

    name: str
    function: Function
    scope: Scope  # the scope in which the function is declared
    at: ast.expr  # the decorator, or the call that makes the agent, tool or hook
    options: dict[str, ast.expr]
    complete: bool  # False: the source may hide some options, as in @tool(**shared)


class Declarations:
    """The agents, tools and hooks of a file."""

    def __init__(self, names: BoundNames) -> None:
        self._names = names
        self.agents: list[Declared] = []
        self.tools: list[Declared] = []
        self.hooks: list[tuple[str, str, Declared]] = []  # ("reconcile" or "compensate", name of the tool, hook)
        self.taken: set[Function] = set()  # functions that the check does not enter, see `_decorated`
        for function, scope in names.functions:
            for decorator in function.decorator_list:
                self._decorated(function, scope, decorator)
        for call, scope in names.calls:
            self._called(call, scope)
        self.tool_functions = {tool.function for tool in self.tools}
        self._reconciled = {name for kind, name, _ in self.hooks if kind == "reconcile"}
        self.built = sum(names.dotted(call.func, scope) in BUILT for call, scope in names.calls)  # ReAct, Plan agents

    def reconciled(self, tool: Declared) -> bool:
        """Does this file declare a reconcile hook for the tool?"""
        return not self._reconciled.isdisjoint((tool.function.name, tool.name))

    def _decorated(self, function: Function, scope: Scope, decorator: ast.expr) -> None:
        made = self._making(decorator, scope)
        if made is not None:
            what, options, complete = made
            declared = Declared(_name(function, options), function, scope, decorator, options, complete)
            (self.agents if what == "agent" else self.tools).append(declared)
            self.taken.add(function)
        elif (hook := _hook(decorator)) is not None:
            kind, tool, options, complete = hook
            self.hooks.append((kind, tool, Declared(f"{tool}.{kind}", function, scope, decorator, options, complete)))
            self.taken.add(function)
        else:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self._names.dotted(called, scope) not in _TRANSPARENT:
                self.taken.add(function)

    def _called(self, call: ast.Call, scope: Scope) -> None:
        """Add the agent, tool or hook of `tool(effect="read")(plain)` or `agent(plain)`.

        The name `plain` still is the plain function, so the check enters this function where an agent calls it.
        """
        function = self._names.function_called(call.args[0], scope) if call.args else None
        if function is None:
            return
        made = self._making(call.func, scope)
        if made is not None:
            what, options, complete = made
            outside = self._names.scopes[function].parent
            assert outside is not None
            declared = Declared(_name(function, options), function, outside, call, options, complete)
            (self.agents if what == "agent" else self.tools).append(declared)
        elif isinstance(call.func, (ast.Attribute, ast.Call)) and (hook := _hook(call.func)) is not None:
            self.hooks.append((hook[0], hook[1], Declared(f"{hook[1]}.{hook[0]}", function, scope, call, *hook[2:])))

    def _making(self, node: ast.expr, scope: Scope, deep: int = 4) -> tuple[str, dict[str, ast.expr], bool] | None:
        """("agent" or "tool", the options, are all options known?), if this expression makes an agent or a tool.

        Such an expression is `tool`, `tool(…)`, `partial(tool, …)`, or a name for such an expression. For any other
        expression the result is None.
        """
        dotted = self._names.dotted(node, scope)
        if dotted in AGENT or dotted in TOOL:
            return ("agent" if dotted in AGENT else "tool"), {}, True
        if isinstance(node, ast.Name) and deep and (binding := self._names.only(node.id, scope)) is not None:
            return None if binding.value is None else self._making(binding.value, binding.scope, deep - 1)
        if not isinstance(node, ast.Call):
            return None
        first = node.args[0] if node.args else None
        if self._names.dotted(node.func, scope) == "functools.partial" and first is not None:
            made = self._making(first, scope, deep - 1) if deep else None
        elif first is None:
            made = self._making(node.func, scope, deep - 1) if deep else None
        else:
            return None
        if made is None:
            return None
        what, options, complete = made
        return what, {**options, **_options(node)}, complete and all(keyword.arg for keyword in node.keywords)


def _hook(node: ast.expr) -> tuple[str, str, dict[str, ast.expr], bool] | None:
    """("reconcile" or "compensate", the tool's name, the options, are all options known?), for `@refund.reconcile`.

    If the expression declares no hook, the result is None.
    """
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Attribute) or called.attr not in _HOOKS:
        return None
    owner = called.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "?"
    if not isinstance(node, ast.Call):
        return called.attr, name, {}, True
    return called.attr, name, _options(node), all(keyword.arg for keyword in node.keywords)


def _options(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _name(function: Function, options: dict[str, ast.expr]) -> str:
    given = options.get("name")
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else function.name
