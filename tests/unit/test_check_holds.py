"""Does a file declare an agent? perdure sees this without running the file, for every form of declaration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.check.holds import holds_agent, holds_tools

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = "from perdure import Agent, Plan, ReAct, Run, Step, Tool, agent, tool\nimport perdure\n"

AGENTS = {
    "a decorator": "@agent\nasync def support(run: Run): ...",
    "with options": "@agent(version='1')\nasync def support(run: Run): ...",
    "by its module": "@perdure.agent(version='1')\nasync def support(run: Run): ...",
    "under another name": "from perdure import agent as durable\n@durable\nasync def support(run: Run): ...",
    "with everything imported": "from perdure import *\n@agent\nasync def support(run: Run): ...",
    "options kept for many": "from functools import partial\nours = partial(agent, version='1')\n@ours()\nasync def support(run: Run): ...",
    "a decorator of the file's own": "def ours(fn):\n    return agent(version='1')(fn)\n@ours\nasync def support(run: Run): ...",
    "among other decorators": "from x import traced\n@agent\n@traced\nasync def support(run: Run): ...",
    "a call": "async def plain(run: Run): ...\nsupport = agent(plain)",
    "a call with options": "async def plain(run: Run): ...\nsupport = agent(version='1')(plain)",
    "the class": "async def plain(run: Run): ...\nsupport = Agent(plain)",
    "ReAct": "support = ReAct('support', model=m)",
    "ReAct with a type": "support: Agent = ReAct('support', model=m)",
    "a class of its own": "class Ours(ReAct):\n    pass\nsupport = Ours('support', model=m)",
    "Plan": "support = Plan('support', [])",
    "a plan's file": "support = Plan.from_file('plan.toml', [])",
    "a plan that a model makes": "support = Plan.from_model(m, [], 'goal', name='support')",
    "a function that makes agents": "def make():\n    @agent\n    async def inner(run: Run): ...\n    return inner\nsupport = make()",
    "one that calls another": "def base(n):\n    return ReAct(n, model=m)\ndef make():\n    return base('x')\nsupport = make()",
    "another name for one": "@agent\nasync def other(run: Run): ...\nsupport = other",
    "one of two": "@agent\nasync def a(run: Run): ...\nsupport = a if perdure.__doc__ else None",
    "under a condition": "if True:\n    @agent\n    async def support(run: Run): ...",
    "behind a try": "try:\n    from none_such import support\nexcept ImportError:\n    @agent\n    async def support(run: Run): ...",
    "several at once": "support, other = ReAct('a', model=m), ReAct('b', model=m)",
}
NONE = {
    "nothing of that name": "@agent\nasync def other(run: Run): ...",
    "a plain function": "async def support(run: Run): ...",
    "a tool": "@tool(effect='read')\nasync def support(): ...",
    "a function that uses an agent": "@agent\nasync def a(run: Run): ...\ndef support():\n    return a",
    "a command of a script": "import click\n@click.command()\ndef support(): ...",
    "another library's agent": "from other_library import agent\n@agent\nasync def support(run: Run): ...",
    "inside a function": "def outside():\n    @agent\n    async def support(run: Run): ...",
    "inside a class": "class C:\n    @agent\n    async def support(run: Run): ...",
    "a value": "support = 3",
    "what a program makes when it runs": "globals()['support'] = ReAct('support', model=m)",
    "itself": "support = support",
    "a module": "import perdure as support",
}


@pytest.mark.parametrize("text", AGENTS.values(), ids=AGENTS)
def test_it_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.py").write_text(f"{IMPORTS}{text}\n")
    assert holds_agent(tmp_path / "file.py", "support", [str(tmp_path), *sys.path])


@pytest.mark.full
@pytest.mark.parametrize("text", NONE.values(), ids=NONE)
def test_it_is_not_seen_in(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.py").write_text(f"{IMPORTS if 'other_library' not in text else ''}{text}\n")
    assert not holds_agent(tmp_path / "file.py", "support", [str(tmp_path), *sys.path])


@pytest.mark.parametrize("data", [b"", b"\xff", b"def (", b"\0", b"(" * 5000, b"support = " + b"f" + b"()" * 3000])
def test_what_is_no_python_holds_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file.py").write_bytes(data)
    assert not holds_agent(tmp_path / "file.py", "support", [str(tmp_path)])
    assert not holds_tools(tmp_path / "file.py", [str(tmp_path)])
    assert not holds_agent(tmp_path / "absent.py", "support", [str(tmp_path)])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("file.py", "from agents import support"),
        ("file.py", "from agents import bot as support"),
        ("file.py", "from agents import *"),
        ("file.py", "import agents\nsupport = agents.support"),
        ("file.py", "from shop.agents import support"),
        ("file.py", "import shop.agents\nsupport = shop.agents.support"),
        ("file.py", "from shop import support"),
        ("file.py", "from installed import support"),
        ("file.py", "from shop.making import make\nsupport = make('support')"),
        ("file.py", "from shop import making\nsupport = making.make('support')"),
        ("file.py", "from shop.making import ours\n@ours\nasync def support(run): ..."),
        ("shop/file.py", "from .agents import support"),
        ("shop/file.py", "from . import support"),
        ("shop/inner/file.py", "from ..agents import support"),
        ("shop/inner/file.py", "from agents import support"),
    ],
)
def test_a_name_is_followed_into_the_file_that_it_is_imported_from(tmp_path: Path, file: str, text: str) -> None:
    top, site = tmp_path / "top", tmp_path / "site"
    one = "from perdure import Run, agent\n@agent\nasync def support(run: Run): ...\nbot = support\n"
    for path, content in {
        top / "agents.py": one,
        top / "shop/__init__.py": "from .agents import support\nraise SystemExit('it was imported')\n",
        top / "shop/agents.py": one,
        top
        / "shop/making.py": "from perdure import ReAct, agent\ndef make(name):\n    return ReAct(name)\ndef ours(fn):\n    return agent(fn)\n",
        top / "shop/inner/__init__.py": "",
        site / "installed/__init__.py": one,
        top / file: text,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    where = [str(top), str(site)]
    assert holds_agent(top / file, "support", where)
    assert not holds_agent(top / file, "nothing", where)


def test_files_that_import_each_other_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import support\nfrom b import *\n")
    (tmp_path / "b.py").write_text("from a import support\nfrom a import *\n")
    assert not holds_agent(tmp_path / "a.py", "support", [str(tmp_path)])


def test_every_agent_of_the_examples_is_seen() -> None:
    """The agents that `perdure run` would load.

    They are loaded in a separate process, because this leaves modules behind.
    """
    load = (
        "import sys\nfrom perdure.cli.target import load_targets\n"
        "print(*(target.recorded for file in sys.argv[1:] for target in load_targets(file)), sep='\\n')"
    )
    # Not the server of MCP, and what needs one.
    files = [str(file) for file in sorted((ROOT / "examples").glob("*.py")) if not file.stem.startswith("mcp_")]
    loaded = subprocess.run([sys.executable, "-c", load, *files], capture_output=True, text=True, timeout=60, check=True)
    targets = loaded.stdout.splitlines()
    assert len(targets) >= len(files) >= 11
    for target in targets:
        file, _, name = target.rpartition(":")
        assert holds_agent(Path(file), name, [str(Path(file).parent), *sys.path]), target


def test_tools_are_seen_and_a_file_without_any_is_not_taken_for_one(tmp_path: Path) -> None:
    files = {
        "tools.py": f"{IMPORTS}@tool(effect='read')\nasync def look(): ...\n",
        "agents.py": f"{IMPORTS}@agent\nasync def look(run: Run): ...\n",
        "again.py": "from tools import look\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert holds_tools(tmp_path / name, [str(tmp_path)]), name
    (tmp_path / "script.py").write_text(f"{IMPORTS}import os\ndef main():\n    os.remove('x')\n")
    assert not holds_tools(tmp_path / "script.py", [str(tmp_path)])
