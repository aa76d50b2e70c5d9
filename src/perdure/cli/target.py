"""Finds the agent that a TARGET names, and decides if a target that a run has recorded may be loaded.

A TARGET is `file.py:name`, `package.module:name` or the file of a plan. A recorded target is loaded only if no other
user can have chosen or changed the code: several users may write to the database.
"""

from __future__ import annotations

import errno
import grp
import importlib
import importlib.util
import inspect
import os
import pwd
import stat
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import all_suffixes
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure import shell
from perdure.cli.common import database_file, url_words
from perdure.core.identity import undone_by
from perdure.core.state import FINISHED
from perdure.errors import InvalidInput, NotFound, StoreCorrupt

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.api import Reading
    from perdure.store.api import RunRow

_ROOT = 0
_SUFFIXES = tuple(all_suffixes())


# -- Could another user have changed the code?


def changed_by_others(file: Path, top: Path) -> str | None:
    """How another user could change the code that an import of the file runs; None if only this user and root can.

    `top` is the folder that is put on sys.path: every module in this folder can be imported. Both paths must have no
    symlinks.
    """
    for folder in file.parents:
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{folder} belongs to another user"
        # In a sticky folder only the owner of an entry can rename or remove the entry. But any user can add an entry,
        # and an entry in `top` or below `top` can be imported.
        if _others_write(folder, found) and (folder.is_relative_to(top) or not found.st_mode & stat.S_ISVTX):
            return f"other users can write to {folder}"
    for path in _importable(top):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # a symlink to a missing file, or the file was just removed
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{path}, which it can import, belongs to another user"
        if _others_write(path, found):
            return f"other users can write to {path}, which it can import" if path != file else f"other users can write to {path}"
    return None


def _others_write(path: Path, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and (not _is_private_group(found.st_gid) or _has_access_list(path))


@cache
def _is_private_group(gid: int) -> bool:
    """Is this user the only member of the group? Many systems have such a group for each user, and a umask of 002."""
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return False  # the user or the group has no entry, so the members are not known
    return all(name == own for name in members) and all(
        user.pw_uid in (os.geteuid(), _ROOT) for user in pwd.getpwall() if user.pw_gid == gid
    )


def _has_access_list(path: Path) -> bool:
    """Has the file an access control list? Then the group bits of the file's mode may be rights of other users."""
    if not hasattr(os, "getxattr"):
        return False
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)
    return True


def _importable(top: Path, seen: set[Path] | None = None) -> list[Path]:
    """Every module and package below the folder, and the folders of compiled modules.

    A folder with a module anywhere below it is a package. It need not have an __init__.py (a namespace package).
    """
    seen = {top.resolve()} if seen is None else seen
    found: list[Path] = []
    try:
        entries = list(os.scandir(top))
    except PermissionError:
        return []  # the import system lists a folder before an import, so it can import nothing here
    for entry in entries:
        path = Path(entry.path)
        if not entry.is_dir():
            found += [path] if entry.name.endswith(_SUFFIXES) else []
        elif (entry.name.isidentifier() or entry.name == "__pycache__") and path.resolve() not in seen:
            seen.add(path.resolve())
            inside = _importable(path, seen)
            found += [path, *inside] if inside or entry.name == "__pycache__" else []
    return found


# -- Loading targets


# The message does not say "has no agent": a parser cannot see an agent that the module creates only when it runs. And
# a module is never run only because a database names it.
_NOT_SEEN = "does not declare {} as far as can be seen without running it"
_TOOLS = " --tools "  # between the plan's file and the tools' file, in a recorded target and in a command


class Target(NamedTuple):
    """An agent, and the text with which another process finds this agent."""

    agent: Agent[Any, Any]
    recorded: str  # "/absolute/file.py:name"; for a plan "/absolute/plan.toml --tools /absolute/tools.py"


class _Place(NamedTuple):
    """How a file is imported: the folder for sys.path, and the name of the module below this folder."""

    folder: Path
    module: str


def load_target(target: str, tools: str | None = None) -> Target:
    """The agent that the target names. The name may be omitted if the module has exactly one agent.

    If the target is the file of a plan, `tools` is the file of the plan's tools.
    """
    if tools is not None and not _is_plan(target):
        raise InvalidInput(f"--tools {tools}: {target} is not the file of a plan (.toml or .json), and only a plan needs --tools")
    found = load_targets(target, tools)
    if len(found) > 1:
        names = ", ".join(sorted(_name_of(one) for one in found))
        raise InvalidInput(f"{target} has {len(found)} agents ({names}); say which: {shell.quote(f'{target}:{_name_of(found[0])}')}")
    return found[0]


def load_targets(target: str, tools: str | None = None) -> list[Target]:
    """The agent that the target names. If the target is only a file or a module: every agent of the module."""
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
    """The plan in the file `where`, with the tools of the Python file `tools`."""
    from perdure.agent import Agent
    from perdure.agents.plan import Plan
    from perdure.tool import Tool

    if not tools:
        raise InvalidInput(f"{where} is a plan, which names tools; say in which file they are: --tools FILE.py")
    module = _load(tools)
    # Use the id as key: a tool may have two names in the module. A Model and a class are not a Tool.
    callees = {id(value): value for value in vars(module).values() if isinstance(value, (Tool, Agent))}
    plan = Plan.from_file(where, callees.values())
    assert module.__file__ is not None, module
    return Target(plan, f"{os.path.abspath(where)}{_TOOLS}{os.path.abspath(module.__file__)}")


def with_children(agents: Iterable[Agent[Any, Any]]) -> list[Agent[Any, Any]]:
    """The agents, and the agents that their code names.

    The code may call these other agents, and then this process must drive their runs too.
    """
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
                # Use setdefault: if two agents have the same name and version, the agent from `agents` counts.
                for part in (value, *_parts(value)):
                    found.setdefault((part.name, part.version), part)
                    functions += [part.fn] if isinstance(part.fn, FunctionType) else []
                value = value.fn
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                functions.append(value)
    return list(found.values())


def _parts(agent: Agent[Any, Any]) -> list[Agent[Any, Any]]:
    """The agents from which an agent is built, such as the agents in a plan's steps, and the parts of these agents."""
    parts: tuple[Agent[Any, Any], ...] = getattr(agent, "agents", ())
    return [one for part in parts for one in (part, *_parts(part))]


def _named_by(function: FunctionType) -> list[Any]:
    """The values that the function's code uses by a global name, or by a name of an enclosing function."""
    codes, names = [function.__code__], set(function.__code__.co_freevars)
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    around = inspect.getclosurevars(function).nonlocals
    return [around.get(name, function.__globals__.get(name)) for name in sorted(names)]


def recorded_target(store: Reading, row: RunRow, url: str, verb: str = "resume", options: str = "") -> str:
    """The target that the run has recorded. InvalidInput if this target must not be loaded.

    The target may be loaded if its file belongs to this user, is below the current folder or in the folder of the
    database, and no other user can change it. Several users may write to the database, and they must not choose which
    code this process runs. `options` is added to the command that the error suggests.
    """
    found = _judge_run(store, row, url)
    if found.target is not None:
        return found.target
    way_out = f"{shell.command(verb, row.run_id)} {found.words or 'FILE.py:NAME'}{options}"
    raise InvalidInput(f"run {row.run_id} {found.problem}: {way_out}")


def words_for(store: Reading, row: RunRow, url: str) -> str:
    """The TARGET to type for this run after `resume` or `replay`; "" if these verbs find the code without a TARGET."""
    found = _judge_run(store, row, url)
    return "" if found.target is not None else found.words or shell.quote(f"FILE.py:{row.agent.removesuffix('.undo')}")


def resume_command(store: Reading, row: RunRow, settings_url: str, url: str | None) -> str:
    """The command that resumes the run, ready to type in the current folder. `url` is the value of `--url`."""
    undone = undone_by(row.run_id)
    verb, run_id = ("resume", row.run_id) if undone is None else ("undo", undone)
    code = "" if row.status in FINISHED else words_for(store, row, settings_url)  # reading a result needs no code
    words = [shell.command(verb, run_id), code]
    return " ".join(word for word in words if word) + url_words(url)


def with_tools(target: str | None, tools: str | None) -> str:
    """The TARGET that the user typed, with its --tools, quoted for a command; "" if the user typed none."""
    if target is None:
        return ""
    return " ".join([shell.quote(target), *([] if tools is None else ["--tools", shell.quote(tools)])])


def top(store: Reading, row: RunRow) -> RunRow:
    """The topmost unfinished run of the family. A process that drives this run also drives the runs below it."""
    while row.parent is not None and (parent := store.get(row.parent)) is not None and parent.status not in FINISHED:
        row = parent
    return row


class _Judged(NamedTuple):
    """May a recorded target be loaded?"""

    target: str | None  # the target, if it may be loaded; else None
    words: str = ""  # if the target may not be loaded: the TARGET to type, or "" if it is not known
    problem: str = ""


def _judge_run(store: Reading, row: RunRow, url: str) -> _Judged:
    """Judge the target in the journal's first event, which the hash chain protects; not the target in the row."""
    from perdure.inspect.verify import creation_of

    try:
        created = creation_of(store, row)
    except StoreCorrupt as damage:
        look = f"{shell.command('verify', row.run_id)} tells more; code that a changed database names is not loaded"
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
        # Resolve symlinks before the checks, so that the checked file and the loaded file are the same file.
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
    # If the file belongs to another user, do not suggest its path: the user must name the code.
    words = shell.quote(f"{file}:{name}" if name else str(file)) if own else ""
    refused = "a database alone must not choose code: look at it, then"
    return _Judged(None, words, f"was started from {recorded}, {distrust}; {refused}")


def _judge_plan(recorded: str, url: str) -> _Judged:
    """Judge the files of a plan and its tools with the same rules as code: a plan decides which calls are made."""
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
    refused = "a database alone must not choose code: look at it, then"
    return _Judged(None, words, f"was started from {recorded}, {distrust}; {refused}")


def _distrust(file: Path, url: str) -> tuple[str | None, bool]:
    """(why a file that a database names must not be loaded, or None; does the file belong to this user?)"""
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
    # Check the folder above the package, and not only the file's folder: the import runs every __init__.py between.
    if beside or place.folder.is_relative_to(Path.cwd().resolve()):
        return None, True
    return "which is neither below the current folder nor beside the database", True


def _import_path(file: Path) -> list[str]:
    return [str(_place(file).folder), *sys.path]


# -- finding the module -----------------------------------------------------------------------------------------------
def _split(target: str) -> tuple[str, str]:
    where, colon, name = target.rpartition(":")
    if not colon:
        return target, ""
    if where and name.isidentifier():
        return where, name
    if _is_file(target):
        return target, ""  # the colon is a part of the path
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
    """A module name for the file. It is the stem of the file, so that other modules in the folder can import the file.

    If another module has this name, the module gets another name: `json.py` must not replace `json`.
    """
    loaded = sys.modules.get(stem)
    ours = loaded is not None and getattr(loaded, "__file__", None) == str(file)
    taken = (loaded is not None and not ours) or stem in sys.stdlib_module_names
    return f"perdure_target_{stem}" if taken else stem


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs, as the import system does: a dataclass looks up its module at this time.
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
            raise  # the target itself is missing, and not a module that the target imports
        raise InvalidInput(f"{_where_raised(error, where)}: {error.msg}; install it, or run from the folder that has it") from error
    except BaseException as error:  # a module may raise any exception, also SystemExit
        raise InvalidInput(f"{_where_raised(error, where)}: {type(error).__name__}: {error}") from error


def _where_raised(error: BaseException, where: str) -> str:
    """The innermost line in the traceback that is in the target's file, or else in any other code of the user."""
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


# -- finding the agent ------------------------------------------------------------------------------------------------
def _agents(module: ModuleType) -> dict[str, Agent[Any, Any]]:
    """name in the module → agent. The agents that the module declares; if it declares none, those that it imports."""
    from perdure.agent import Agent

    everything = {name: value for name, value in vars(module).items() if isinstance(value, Agent)}
    # An agent with two names counts once, with its first name.
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
