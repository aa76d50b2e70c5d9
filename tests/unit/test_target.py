"""From a TARGET to an agent: what can be loaded, the errors, and which recorded targets are never loaded."""

from __future__ import annotations

import grp
import os
import pwd
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.conformance.suite import new_run

from perdure.cli.target import load_target, load_targets, recorded_target, with_children
from perdure.errors import InvalidInput, NotFound
from perdure.store.open import open_store

AGENT = """
from perdure import Run, agent

@agent(version="1")
async def {name}(run: Run, order: str = "o") -> str:
    return order
"""
DATABASE = "sqlite:///perdure.db"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A new current folder; modules that were loaded from it are unloaded afterwards."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path, modules = list(sys.path), set(sys.modules)
    yield here
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path | str, *names: str, text: str = "") -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(AGENT.format(name=name) for name in names) + textwrap.dedent(text))
    return path.absolute()


def refusal(target: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        load_target(target)
    return str(refused.value)


# --- what loads -------------------------------------------------------------------------------------------------------------


def test_a_file_and_a_name_give_the_agent_and_record_an_absolute_path():
    file = write("support.py", "support", "refunds")
    target = load_target("support.py:refunds")
    assert target.agent.name == "refunds"
    assert target.recorded == f"{file}:refunds"


def test_the_name_may_be_left_out_where_there_is_one_agent():
    file = write("support.py", "support")
    assert load_target("support.py").recorded == f"{file}:support"


def test_an_imported_agent_is_not_the_files_own():
    write("other.py", "helper")
    write("support.py", "support", text="from other import helper")
    assert load_target("support.py").agent.name == "support"


def test_one_agent_under_two_names_is_one_agent():
    write("support.py", "support", text="alias = support")
    assert load_target("support.py").recorded.endswith(":support")


def test_without_a_name_all_agents_of_a_file_can_be_served():
    write("support.py", "support", "refunds")
    assert sorted(target.agent.name for target in load_targets("support.py")) == ["refunds", "support"]


def test_a_files_neighbours_can_be_imported_and_see_the_same_module():
    write("agents/support.py", "support", text="import neighbour")
    write("agents/neighbour.py", text="import support\nagent_seen_by_neighbour = support")
    target = load_target("agents/support.py")
    assert sys.modules["neighbour"].agent_seen_by_neighbour.support is target.agent


def test_a_file_in_a_package_is_loaded_as_its_module_so_that_relative_imports_work():
    write("shop/__init__.py")
    write("shop/words.py", text='GREETING = "hello"')
    write("shop/agents/__init__.py")
    file = write("shop/agents/support.py", "support", text="from ..words import GREETING")
    target = load_target("shop/agents/support.py")
    assert target.agent.fn.__module__ == "shop.agents.support"
    assert target.recorded == f"{file}:support"


def test_a_module_by_name_is_recorded_by_its_file():
    write("shop/__init__.py")
    file = write("shop/support.py", "support")
    assert load_target("shop.support:support").recorded == f"{file}:support"


def test_a_file_called_like_a_module_of_python_does_not_take_its_place():
    write("json.py", "support")
    assert load_target("json.py").agent.name == "support"
    import json

    assert json.loads("[]") == []


def test_a_path_with_a_colon_in_it_is_a_path():
    write("a:b/support.py", "support")
    assert load_target("a:b/support.py").agent.name == "support"
    assert load_target("a:b/support.py:support").agent.name == "support"


def test_loading_twice_gives_the_same_agent():
    write("support.py", "support")
    assert load_target("support.py").agent is load_target("support.py:support").agent


# --- the errors
# --------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_not_found():
    with pytest.raises(NotFound, match=r"there is no file absent\.py"):
        load_target("absent.py:support")


def test_a_missing_module_is_not_found_and_the_ending_is_suggested():
    with pytest.raises(NotFound, match=r"no module 'absent'.*absent\.thing\.py"):
        load_target("absent.thing:support")


def test_a_folder_is_no_target(folder):
    (folder / "support.py").mkdir()
    assert "is not a file" in refusal("support.py")


@pytest.mark.parametrize("target", ["support.py:a b", "a-b", "a-b:c", ":name", "module:", ""])
def test_what_is_no_target_says_what_one_looks_like(target):
    write("support.py", "support")
    with pytest.raises((InvalidInput, NotFound)):
        load_target(target)


def test_a_syntax_error_names_file_and_line():
    write("support.py", text="x = 1\ndef broken(:\n")
    assert refusal("support.py").startswith("support.py, line 2: syntax error: ")


def test_a_syntax_error_in_a_neighbour_names_the_neighbour():
    write("neighbour.py", text="\n\ndef broken(:\n")
    write("support.py", text="import neighbour")
    assert "neighbour.py, line 3: syntax error" in refusal("support.py")


def test_an_import_that_fails_inside_names_the_line_that_imports():
    write("support.py", text="import os\nimport absent_library\n")
    said = refusal("support.py")
    assert said.startswith("support.py, line 2: No module named 'absent_library'")


def test_a_module_that_imports_something_missing_is_not_taken_for_missing():
    write("support.py", text="import absent_library")
    assert refusal("support:support").startswith("support.py, line 1: No module named 'absent_library'")


@pytest.mark.parametrize(
    ("text", "said"),
    [("1 / 0", "ZeroDivisionError"), ("raise SystemExit('no')", "SystemExit: no"), ("raise BaseException('odd')", "BaseException: odd")],
)
def test_whatever_a_file_raises_is_one_line_with_its_place(text, said):
    write("support.py", text=f"import os\n{text}")
    found = refusal("support.py")
    assert found.startswith("support.py, line 2: ")
    assert said in found
    assert "\n" not in found


def test_a_file_that_failed_can_be_loaded_once_it_is_mended():
    write("support.py", text="1 / 0")
    refusal("support.py")
    write("support.py", "support", text="# mended")
    os.utime("support.py", (1, 1))  # the second write may fall into the same second, which a stale .pyc would hide
    assert load_target("support.py").agent.name == "support"


def test_a_missing_name_lists_the_agents_there_are():
    write("support.py", "support", "refunds")
    assert refusal("support.py:suport") == "support.py has nothing called 'suport'; its agents: support, refunds"


def test_something_else_than_an_agent_is_named_by_its_type():
    write("support.py", "support", text="def plain(): ...")
    assert "is a function, not an agent" in refusal("support.py:plain")


def test_a_file_without_agents_and_one_with_several_say_so():
    write("empty.py")
    write("several.py", "support", "refunds")
    assert "has no agent" in refusal("empty.py")
    assert "has 2 agents (refunds, support)" in refusal("several.py")


# --- code is never loaded because a shared database names it -----------------------------------------------------------------


def allowed(recorded: str | None, url: str = DATABASE, *words: str) -> str:
    """What may be loaded for a run that was started with this target."""
    store = open_store("sqlite://")
    new = new_run("r-1", agent="support")
    row, _ = store.create_run(replace(new, created=replace(new.created, target=recorded)))
    try:
        return recorded_target(store, row, url, *words)
    finally:
        store.close()


def recorded_refusal(recorded: str | None, url: str = DATABASE) -> str:
    with pytest.raises(InvalidInput) as refused:
        allowed(recorded, url)
    assert re.search(r": perdure resume r-1 \S+\.py:\w+$", str(refused.value))
    return str(refused.value)


def test_a_recorded_file_below_the_current_folder_is_used():
    file = write("agents/support.py", "support")
    assert allowed(f"{file}:support") == f"{file}:support"


def test_a_recorded_file_beside_the_database_is_used(tmp_path):
    file = write(tmp_path / "elsewhere/support.py", "support")
    assert allowed(f"{file}:support", f"sqlite:///{tmp_path}/elsewhere/perdure.db") == f"{file}:support"


def test_a_file_of_ones_own_is_named_in_the_way_out_with_verb_and_database(tmp_path):
    file = write(tmp_path / "else where/support.py", "support")
    with pytest.raises(InvalidInput) as refused:
        allowed(f"{file}:support", DATABASE, "replay", " --url sqlite:///x.db")
    assert str(refused.value).endswith(f"look at it, then: perdure replay r-1 '{file}:support' --url sqlite:///x.db")


def test_a_recorded_file_elsewhere_is_refused(tmp_path):
    file = write(tmp_path / "elsewhere/support.py", "support")
    assert "neither below the current folder nor beside the database" in recorded_refusal(f"{file}:support")
    below = write(tmp_path / "elsewhere/deeper/support.py", "support")
    assert "neither below" in recorded_refusal(f"{below}:support", f"sqlite:///{tmp_path}/elsewhere/perdure.db")


def test_a_folder_whose_name_only_begins_like_the_current_one_is_elsewhere(tmp_path):
    file = write(tmp_path / "here-not/support.py", "support")
    assert "neither below" in recorded_refusal(f"{file}:support")


def test_a_link_that_leads_out_is_refused(tmp_path, folder):
    outside = write(tmp_path / "elsewhere/support.py", "support")
    (folder / "support.py").symlink_to(outside)
    assert "neither below" in recorded_refusal(f"{folder}/support.py:support")
    (folder / "agents").symlink_to(outside.parent)
    assert "neither below" in recorded_refusal(f"{folder}/agents/support.py:support")


def test_dots_that_lead_out_are_refused(tmp_path, folder):
    write(tmp_path / "elsewhere/support.py", "support")
    assert "neither below" in recorded_refusal(f"{folder}/../elsewhere/support.py:support")


def test_a_package_that_begins_above_the_current_folder_is_refused(tmp_path, folder):
    # Importing it would run __init__.py files from outside.
    (tmp_path / "here/__init__.py").touch()
    file = write("support.py", "support")
    assert "neither below" in recorded_refusal(f"{file}:support")


@pytest.mark.parametrize(
    "recorded", [None, "support.py:support", "package.module:name", "/absent/support.py:support", "/", "\0.py:x", "os:system"]
)
def test_what_is_no_file_here_is_asked_for(recorded):
    write("support.py", "support")
    assert recorded_refusal(recorded).endswith("perdure resume r-1 FILE.py:NAME")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away, or become somebody else")
def test_a_file_of_another_user_is_refused():
    file = write("support.py", "support")
    os.chown(file, 12345, -1)
    refused = recorded_refusal(f"{file}:support")
    assert "a file of another user" in refused
    assert refused.endswith("perdure resume r-1 FILE.py:NAME")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away, or become somebody else")
def test_a_package_of_another_user_is_refused():
    init = write("shop/__init__.py")
    file = write("shop/support.py", "support")
    os.chown(init, 12345, -1)
    assert "whose package has a file of another user" in recorded_refusal(f"{file}:support")


def test_judging_a_recorded_target_imports_nothing(tmp_path):
    marker = tmp_path / "imported"
    write("shop/__init__.py", text=f"open({str(marker)!r}, 'w')")
    file = write("shop/support.py", "support", text=f"open({str(marker)!r}, 'w')")
    assert allowed(f"{file}:support")
    assert not marker.exists()
    # The marker works: loading it does leave one.
    program = f"from perdure.cli.target import load_target\nload_target({str(file)!r})"
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert marker.exists()


def test_a_recorded_file_that_does_not_declare_the_agent_is_refused():
    file = write("script.py", text="import shutil\ndef main():\n    shutil.rmtree('/nowhere')\n")
    refused = recorded_refusal(f"{file}:main")
    assert "does not declare an agent 'main' as far as can be seen without running it" in refused
    assert refused.endswith("perdure resume r-1 FILE.py:NAME")


# -- what other users could have changed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o606])
def test_a_file_that_other_users_can_write_to_is_refused(mode):
    file = write("support.py", "support")
    file.chmod(mode)
    assert f"other users can write to {file}; " in recorded_refusal(f"{file}:support")


@pytest.mark.parametrize(
    "shared", ["shop", "shop/tools.py", "shop/__pycache__", "shop/inner", "beside.py", "pack", "pack/module.py", "space", "space/deep"]
)
def test_what_can_be_imported_with_it_and_other_users_can_write_to_is_refused(shared):
    file = write("shop/support.py", "support")
    for other in (
        "shop/__init__.py",
        "shop/tools.py",
        "shop/inner/__init__.py",
        "beside.py",
        "pack/__init__.py",
        "pack/module.py",
        "space/deep/module.py",
    ):
        write(other)
    Path("shop/__pycache__").mkdir()
    assert allowed(f"{file}:support")
    Path(shared).chmod(0o777)
    assert "other users can write to" in recorded_refusal(f"{file}:support")
    assert f"/{shared}" in recorded_refusal(f"{file}:support")


def test_a_folder_that_everybody_can_add_to_is_refused_sticky_or_not(folder):
    file = write("support.py", "support")
    for mode in (0o777, 0o1777):
        folder.chmod(mode)
        assert f"other users can write to {folder}; " in recorded_refusal(f"{file}:support")


def test_what_no_import_reaches_may_be_writable(folder):
    file = write("support.py", "support")
    (folder / "uploads").mkdir(mode=0o700)
    (folder / "uploads").chmod(0o777)
    (folder / "notes.txt").touch()
    (folder / "notes.txt").chmod(0o666)
    assert allowed(f"{file}:support")


def test_a_folder_above_it_that_other_users_can_write_to_is_refused_unless_it_is_sticky(tmp_path):
    file = write("support.py", "support")
    tmp_path.chmod(0o777)
    assert f"other users can write to {tmp_path}; " in recorded_refusal(f"{file}:support")
    tmp_path.chmod(0o1777)
    assert allowed(f"{file}:support")
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    file = write("support.py", "support")
    os.chown(tmp_path, 12345, -1)
    assert f"{tmp_path} belongs to another user" in recorded_refusal(f"{file}:support")
    os.chown(tmp_path, 0, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a group")
def test_a_group_of_this_user_alone_may_write_and_any_other_group_may_not(folder):
    """With a umask of 002 everything is writable by the group, and on such systems every user has one of their own."""
    file = write("support.py", "support")
    file.chmod(0o664)
    folder.chmod(0o775)
    assert allowed(f"{file}:support")
    os.chown(file, -1, 54321)  # the members of this group are not known
    assert f"other users can write to {file}; " in recorded_refusal(f"{file}:support")
    shared = next(group for group in grp.getgrall() if any(user.pw_gid == group.gr_gid and user.pw_uid != 0 for user in pwd.getpwall()))
    os.chown(file, -1, shared.gr_gid)
    assert f"other users can write to {file}; " in recorded_refusal(f"{file}:support")


FAMILY = """
import asyncio
from perdure import Run, agent

@agent(version="1")
async def grandchild(run: Run) -> int:
    return 1

@agent(version="1")
async def child(run: Run) -> int:
    return await grandchild()

@agent(version="1")
async def helped(run: Run) -> int:
    return 2

async def helper():
    return await helped()

def make():
    @agent(version="1")
    async def hidden(run: Run) -> int:
        return 3

    @agent(version="1")
    async def parent(run: Run) -> int:
        first, *others = await asyncio.gather(*(start() for start in [lambda: child(), helper]))
        return first + await hidden()

    return parent

parent = make()

@agent(version="1")
async def stranger(run: Run) -> int:
    return await parent()
"""


def test_an_agent_comes_with_all_that_its_code_can_call_and_with_no_other():
    file = write("family.py", text=FAMILY)
    parent = load_target(f"{file}:parent").agent
    assert sorted(agent.name for agent in with_children([parent])) == ["child", "grandchild", "helped", "hidden", "parent"]
    assert [agent.name for agent in with_children([load_target(f"{file}:helped").agent])] == ["helped"]


def test_agents_that_were_put_together_are_the_files_own_beside_those_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "from perdure import Plan, ReAct, Run, Step, agent, tool\n"
        "from perdure.models import Scripted\n"
        "@tool(effect='read')\n"
        "async def look() -> int:\n"
        "    return 1\n"
        "@agent(version='1')\n"
        "async def plain(run: Run) -> None: ...\n"
        "bot = ReAct('bot', model=Scripted(['x']))\n"
        "way = Plan('way', [Step('a', look)])\n"
        "goal = Plan.from_model(Scripted(['x']), [look], 'do it', name='goal')\n"
    )
    assert sorted(target.agent.name for target in load_targets(f"{tmp_path}/two.py")) == ["bot", "goal", "plain", "way"]
    with pytest.raises(InvalidInput, match=r"4 agents \(bot, goal, plain, way\); say which"):
        load_target(f"{tmp_path}/two.py")
