"""TARGET: `file.py:name`, `package.module:name` or a plan's file, to the agent it names; and which recorded target may be loaded at all.

A file that lies in a package is loaded as the module it is there, so that its relative imports work. Every error is one line
that names the file and, where it is inside the file, the line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure import shell
from perdure.cli.common import database_file, url_words
from perdure.cli.writable import changed_by_others
from perdure.core.identity import undone_by
from perdure.core.state import FINISHED
from perdure.errors import InvalidInput, NotFound, StoreCorrupt

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.api import Reading
    from perdure.store.api import RunRow


# Not: "has no agent". What a program makes only when it runs cannot be seen, and such a file is not run because a database names it.
_NOT_SEEN = "does not declare {} as far as can be seen without running it"
_TOOLS = " --tools "  # between a plan's file and that of its tools, as it is recorded and as it is typed


class Target(NamedTuple):
    """An agent, and the words by which another process finds it."""

    agent: Agent[Any, Any]
    recorded: str  # "/absolute/file.py:name", or of a plan "/absolute/plan.toml --tools /absolute/tools.py"


class _Place(NamedTuple):
    """How a file is imported: what goes on sys.path, and the module's name from there."""

    folder: Path
    module: str


def load_target(target: str, tools: str | None = None) -> Target:
    """The one agent that the target names; its name may be left out where the module has exactly one. `tools` is where a plan's are."""
    if tools is not None and not _is_plan(target):
        raise InvalidInput(f"--tools {tools}: {target} is no plan's file, which would end in .toml or .json, and has its tools with it")
    found = load_targets(target, tools)
    if len(found) > 1:
        names = ", ".join(sorted(_name_of(one) for one in found))
        raise InvalidInput(f"{target} has {len(found)} agents ({names}); say which: {shell.quote(f'{target}:{_name_of(found[0])}')}")
    return found[0]


def load_targets(target: str, tools: str | None = None) -> list[Target]:
    """The agent that the target names, or without a name every agent of its module."""
    if _is_plan(target):
        plan, _, recorded = target.partition(_TOOLS)
        return [_load_plan(plan, tools or recorded)]
    where, name = _split(target)
    module = _load(where)
    agents = _agents(module)
    if name:
        return [Target(_named(module, name, agents, where), _recorded(module, name))]
    if not agents:
        raise InvalidInput(f"{where} has no agent; decorate one of its functions with @agent")
    return [Target(agent, _recorded(module, own)) for own, agent in agents.items()]


def load_function(target: str) -> Callable[..., Any]:
    """The function that the target names."""
    where, name = _split(target)
    found = getattr(_load(where), name, None)
    if not callable(found):
        raise InvalidInput(f"{where} has no function called {name!r}; write FILE.py:FUNCTION")
    function: Callable[..., Any] = found
    return function


def _load_plan(where: str, tools: str) -> Target:
    """The plan in a file that is no code, with the tools of one that is."""
    from perdure.agent import Agent
    from perdure.plan import Plan
    from perdure.tool import Tool

    if not tools:
        raise InvalidInput(f"{where} is a plan, which names tools; say in which file they are: --tools FILE.py")
    module = _load(tools)
    # One tool under two names is one tool; Model is no tool, and neither is a class.
    callees = {id(value): value for value in vars(module).values() if isinstance(value, (Tool, Agent))}
    plan = Plan.from_file(where, callees.values())
    assert module.__file__ is not None, module
    return Target(plan, f"{os.path.abspath(where)}{_TOOLS}{os.path.abspath(module.__file__)}")


def with_children(agents: Iterable[Agent[Any, Any]]) -> list[Agent[Any, Any]]:
    """The agents, and those that their code names, which it may call: their children must be gone on with while they themselves rest."""
    from perdure.agent import Agent

    found = {(agent.name, agent.version): agent for agent in agents}
    for part in [part for agent in found.values() for part in _parts(agent)]:
        found.setdefault((part.name, part.version), part)
    seen: set[int] = set()
    functions: list[FunctionType] = [agent.fn for agent in found.values() if isinstance(agent.fn, FunctionType)]
    while functions:
        function = functions.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for value in _named_by(function):
            if isinstance(value, Agent):
                # Of two that claim one name the one that was asked for counts.
                for part in (value, *_parts(value)):
                    found.setdefault((part.name, part.version), part)
                    functions += [part.fn] if isinstance(part.fn, FunctionType) else []
                value = value.fn
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                functions.append(value)
    return list(found.values())


def _parts(agent: Agent[Any, Any]) -> list[Agent[Any, Any]]:
    """The agents that an agent was put together from, as a plan is from its steps; those of theirs too."""
    parts: tuple[Agent[Any, Any], ...] = getattr(agent, "agents", ())
    return [one for part in parts for one in (part, *_parts(part))]


def _named_by(function: FunctionType) -> list[Any]:
    """What the function's code refers to by a name of its module, or of the functions around it."""
    codes, names = [function.__code__], set(function.__code__.co_freevars)
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    around = inspect.getclosurevars(function).nonlocals
    return [around.get(name, function.__globals__.get(name)) for name in sorted(names)]


def recorded_target(store: Reading, row: RunRow, url: str, verb: str = "resume", options: str = "") -> str:
    """The target recorded with a run, if it may be loaded: this user's own agent, below the current folder or beside the database.

    A database can be shared, and other users who write to it must not choose what runs here. `options` goes into the command to type.
    """
    found = _judge_run(store, row, url)
    if found.target is not None:
        return found.target
    way_out = f"{shell.command(verb, row.run_id)} {found.words or 'FILE.py:NAME'}{options}"
    raise InvalidInput(f"run {row.run_id} {found.problem}: {way_out}")


def words_for(store: Reading, row: RunRow, url: str) -> str:
    """What `resume` and `replay` have to be told, from here, about where the run's code is: "" when they find it by themselves."""
    found = _judge_run(store, row, url)
    return "" if found.target is not None else found.words or shell.quote(f"FILE.py:{row.agent.removesuffix('.undo')}")


def resume_command(store: Reading, row: RunRow, settings_url: str, url: str | None) -> str:
    """The command that drives the run on, as it can be typed here; `url` is what the command line named."""
    undone = undone_by(row.run_id)
    verb, run_id = ("resume", row.run_id) if undone is None else ("undo", undone)
    code = "" if row.status in FINISHED else words_for(store, row, settings_url)  # a result is read without code
    words = [shell.command(verb, run_id), code]
    return " ".join(word for word in words if word) + url_words(url)


def top(store: Reading, row: RunRow) -> RunRow:
    """The run at the top of the family: whoever drives it drives those below it too."""
    while row.parent is not None and (parent := store.get(row.parent)) is not None and parent.status not in FINISHED:
        row = parent
    return row


class _Judged(NamedTuple):
    """What is to be thought of a recorded target."""

    target: str | None  # what may be loaded
    words: str = ""  # else the TARGET to type; empty when nobody knows it
    problem: str = ""


def _judge_run(store: Reading, row: RunRow, url: str) -> _Judged:
    """The row is a projection that can be changed without a trace, so the target is the one that the journal's first event has."""
    from perdure.inspect.verify import creation_of

    try:
        created = creation_of(store, row)
    except StoreCorrupt as damage:
        look = f"{shell.command('verify', row.run_id)} tells more; no code is loaded because a changed database names it"
        return _Judged(None, problem=f"is not as it was written: {damage}; {look}; name its code")
    return _judge(created.target, url)


def _judge(recorded: str | None, url: str) -> _Judged:
    if recorded is None:
        return _Judged(None, problem="does not say where its agent's code is; name it")
    if _is_plan(recorded):
        return _judge_plan(recorded, url)
    name = ""
    try:
        where, name = _split(recorded)
        # Links are followed before anything is judged, and what is loaded is what was judged.
        file = Path(where).resolve(strict=True) if os.path.isabs(where) else None
    except (OSError, ValueError, RuntimeError):
        file = None
    if file is None or not file.is_file():
        return _Judged(None, problem=f"was started from {recorded}, which is not here; name its code")
    from perdure.check.holds import holds_agent

    if name and not holds_agent(file, name, _import_path(file)):
        return _Judged(None, problem=f"was started from {recorded}, and that file {_NOT_SEEN.format(f'an agent {name!r}')}; name its code")
    distrust, own = _distrust(file, url)
    if distrust is None:
        return _Judged(f"{file}:{name}" if name else str(file))
    # Of somebody else's file the path is not repeated: whoever types it shall have looked for the right one first.
    words = shell.quote(f"{file}:{name}" if name else str(file)) if own else ""
    refused = "code is not loaded because a database names it: look at it, then"
    return _Judged(None, words, f"was started from {recorded}, {distrust}; {refused}")


def _judge_plan(recorded: str, url: str) -> _Judged:
    """A plan and the file of its tools are judged like any code: a plan says what is called, and with what."""
    try:
        files = [Path(where).resolve(strict=True) for where in recorded.split(_TOOLS) if os.path.isabs(where)]
    except (OSError, ValueError, RuntimeError):
        files = []
    if len(files) != 2 or not all(file.is_file() for file in files):
        return _Judged(None, problem=f"was started from {recorded}, which is not here; name its plan and its tools")
    from perdure.check.holds import holds_tools

    if not holds_tools(files[1], _import_path(files[1])):
        return _Judged(
            None, problem=f"was started from {recorded}, and the second file {_NOT_SEEN.format('any tool')}; name its plan and its tools"
        )
    judged = [_distrust(file, url) for file in files]
    distrust = next((why for why, _ in judged if why is not None), None)
    if distrust is None:
        return _Judged(_TOOLS.join(map(str, files)))
    words = _TOOLS.join(shell.quote(str(file)) for file in files) if all(own for _, own in judged) else ""
    refused = "code is not loaded because a database names it: look at it, then"
    return _Judged(None, words, f"was started from {recorded}, {distrust}; {refused}")


def _distrust(file: Path, url: str) -> tuple[str | None, bool]:
    """Why this file must not be loaded on a database's word, None if it may; and whether it is this user's own."""
    place = _place(file)
    loaded = [file, *(parent / "__init__.py" for parent in file.parents if parent.is_relative_to(place.folder) and parent != place.folder)]
    for one in loaded:
        found = one.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return ("a file of another user" if one == file else f"whose package has a file of another user ({one})"), False
    if (how := changed_by_others(file, place.folder)) is not None:
        return f"and {how}", True
    database = database_file(url)
    beside = database is not None and place.folder == database.resolve().parent and file.parent == place.folder
    # The folder of a package counts, not the file's: importing it runs every __init__.py on the way.
    if beside or place.folder.is_relative_to(Path.cwd().resolve()):
        return None, True
    return "which is neither below the current folder nor beside the database", True


def _import_path(file: Path) -> list[str]:
    return [str(_place(file).folder), *sys.path]


# -- finding the module -----------------------------------------------------------------------------------------------------
def _split(target: str) -> tuple[str, str]:
    where, colon, name = target.rpartition(":")
    if not colon:
        return target, ""
    if where and name.isidentifier():
        return where, name
    if _is_file(target):
        return target, ""  # the colon belongs to the path
    raise InvalidInput(f"{target!r} is not a target; write FILE.py:NAME or package.module:NAME")


def _is_plan(target: str) -> bool:
    return target.partition(_TOOLS)[0].endswith((".toml", ".json"))


def _load(where: str) -> ModuleType:
    return _load_file(where) if _is_file(where) else _load_module(where)


def _is_file(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def _place(file: Path) -> _Place:
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return _Place(folder, ".".join(parts))


def _load_file(where: str) -> ModuleType:
    file = Path(os.path.abspath(where))
    if not file.exists():
        raise NotFound(f"there is no file {where}; a target is FILE.py:NAME or package.module:NAME")
    if not file.is_file():
        raise InvalidInput(f"{where} is not a file; a target is FILE.py:NAME or package.module:NAME")
    place = _place(file)
    _on_path(place.folder)
    if "." in place.module:
        return _import(lambda: importlib.import_module(place.module), where)
    name = _free_name(place.module, file)
    if name in sys.modules:
        return sys.modules[name]
    return _import(lambda: _execute(name, file), where)


def _load_module(where: str) -> ModuleType:
    if not all(part.isidentifier() for part in where.split(".")):
        raise InvalidInput(f"{where!r} is neither a file that ends in .py nor the name of a module")
    _on_path(Path.cwd())
    try:
        return _import(lambda: importlib.import_module(where), where)
    except ModuleNotFoundError as error:
        raise NotFound(f"there is no module {error.name!r} to import here; a file is named with its ending: {where}.py") from None


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _free_name(stem: str, file: Path) -> str:
    """The file's own name, as its neighbours import it, unless something else has that name: `json.py` is not `json`."""
    loaded = sys.modules.get(stem)
    ours = loaded is not None and getattr(loaded, "__file__", None) == str(file)
    taken = (loaded is not None and not ours) or stem in sys.stdlib_module_names
    return f"perdure_target_{stem}" if taken else stem


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    # Registered first, as the import system does: type hints and dataclasses look their module up while it loads.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(load: Callable[[], ModuleType], where: str) -> ModuleType:
    try:
        return load()
    except SyntaxError as error:
        raise InvalidInput(f"{_short(error.filename or where)}, line {error.lineno}: syntax error: {error.msg}") from None
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if not _is_file(where) and error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise  # the target itself is missing, not something that it imports
        raise InvalidInput(f"{_where_raised(error, where)}: {error.msg}; install it, or run from the folder that has it") from error
    except BaseException as error:  # a module may raise anything, SystemExit too
        raise InvalidInput(f"{_where_raised(error, where)}: {type(error).__name__}: {error}") from error


def _where_raised(error: BaseException, where: str) -> str:
    """The last line of the user's own code on the way to the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    ending = os.path.abspath(where) if _is_file(where) else os.path.join(*where.split(".")) + ".py"
    own = [frame for frame in inside if frame.filename.endswith(ending)] or inside
    return f"{_short(own[-1].filename)}, line {own[-1].lineno}" if own else where


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


# -- finding the agent ------------------------------------------------------------------------------------------------------
def _agents(module: ModuleType) -> dict[str, Agent[Any, Any]]:
    """The module's agents by the name they have in it: its own, or if it has none of its own those that it imports."""
    from perdure.agent import Agent

    everything = {name: value for name, value in vars(module).items() if isinstance(value, Agent)}
    # One agent under two names is one agent.
    unique = {id(agent): name for name, agent in reversed(everything.items())}
    agents = {name: agent for name, agent in everything.items() if unique[id(agent)] == name}
    own = {name: agent for name, agent in agents.items() if agent.home == module.__name__}
    return own or agents


def _named(module: ModuleType, name: str, agents: dict[str, Agent[Any, Any]], where: str) -> Agent[Any, Any]:
    from perdure.agent import Agent

    if not hasattr(module, name):
        has = f"its agents: {', '.join(agents)}" if agents else "it has no agent at all"
        raise InvalidInput(f"{where} has nothing called {name!r}; {has}")
    value = getattr(module, name)
    if not isinstance(value, Agent):
        raise InvalidInput(f"{where}:{name} is a {type(value).__name__}, not an agent; decorate the function with @agent")
    return value


def _recorded(module: ModuleType, name: str) -> str:
    assert module.__file__ is not None, module
    return f"{os.path.abspath(module.__file__)}:{name}"


def _name_of(target: Target) -> str:
    return target.recorded.rpartition(":")[2]
