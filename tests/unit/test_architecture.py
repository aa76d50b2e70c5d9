"""The rules about the structure of the code. For each rule, a test shows that the rule can fail."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "perdure"


# --- which module may import which: the contracts are in pyproject.toml
# ------------------------------------------------


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """The verdict of import-linter on the package in `folder`, whatever else is installed."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_imports_point_down_only():
    verdict = lint_imports(ROOT / "src")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("importer", "statement", "contract"),
    [
        ("core/identity.py", "import perdure.store.api", "arrows point down only"),
        ("errors.py", "import perdure.settings", "arrows point down only"),
        ("store/api.py", "import perdure.testing", "arrows point down only"),
        ("planted.py", "", "arrows point down only"),  # a module that no layer names
        ("core/identity.py", "import perdure.settings", "core knows errors and itself"),
        ("core/identity.py", "import pydantic", "core knows errors and itself"),
        ("core/events.py", "import perdure.core.identity", "no cycles"),
        ("store/journal.py", "import perdure.store.sqlite", "the store's logic knows no database"),
        ("store/planted.py", "", "the store's logic knows no database"),
        ("app.py", "import perdure.store.journal", "the app, inspect and the command line know engines"),
        ("app.py", "import perdure.engine.local.engine", "the app, inspect and the command line know engines"),
        ("inspect/__init__.py", "import perdure.store.sqlite", "the app, inspect and the command line know engines"),
        ("cli/__init__.py", "import perdure.store.journal", "the app, inspect and the command line know engines"),
    ],
)
def test_a_forbidden_import_breaks_a_contract(tmp_path, importer, statement, contract):
    modules = (
        "errors settings core/__init__ core/events store/__init__ store/api store/journal store/sqlite/__init__ testing/__init__ "
        "engine/__init__ engine/local/__init__ engine/local/engine control undo reopen fork inspect/__init__ app sync cli/__init__"
    )
    for module in ("__init__", *modules.split()):
        write(tmp_path / f"perdure/{module}.py", "")
    write(tmp_path / "perdure/core/identity.py", "import perdure.core.events, perdure.errors")
    assert lint_imports(tmp_path).returncode == 0

    write(tmp_path / "perdure" / importer, statement)

    verdict = lint_imports(tmp_path)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert re.search(rf"{contract}.*BROKEN", verdict.stdout), verdict.stdout


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


# --- the core does no I/O and reads no clock
# ---------------------------------------------------------------------------

# Modules that the core has no business with at all, and names out of modules that it may use otherwise.
FORBIDDEN_MODULES = frozenset(
    "concurrent ctypes fcntl glob http io multiprocessing os queue secrets select selectors shutil signal socket sqlite3 ssl "
    "subprocess tempfile threading time urllib".split()
)
FORBIDDEN_NAMES = frozenset(
    "asyncio.create_subprocess_exec asyncio.create_subprocess_shell asyncio.new_event_loop asyncio.open_connection asyncio.run "
    "asyncio.start_server asyncio.to_thread builtins.breakpoint builtins.open builtins.print "
    "datetime.date.today datetime.datetime.now datetime.datetime.today datetime.datetime.utcnow pathlib.Path "
    "uuid.getnode uuid.uuid1 uuid.uuid4 uuid.uuid6 uuid.uuid7".split()
)


class Purity(ast.NodeVisitor):
    """Collects the uses of I/O, clocks and chance in a module.

    It follows names through imports, so that an alias hides nothing.
    """

    def __init__(self) -> None:
        self.means: dict[str, str] = {name.removeprefix("builtins."): name for name in FORBIDDEN_NAMES if name.startswith("builtins.")}
        self.found: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._look(name.name, node)
            top = name.name.partition(".")[0]
            self.means[name.asname or top] = name.name if name.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self.means[name.asname or name.name] = f"{node.module}.{name.name}"
            self._look(f"{node.module}.{name.name}", node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._look(self._dotted(node), node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._look(self._dotted(node), node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._dotted(node.func) == "random.Random" and not node.args and not node.keywords:
            self.found.append(f"line {node.lineno}: random.Random() without a seed")
        self.generic_visit(node)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        return self.means.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _look(self, name: str, node: ast.stmt | ast.expr) -> None:
        module, _, rest = name.partition(".")
        by_chance = module == "random" and bool(rest) and rest.partition(".")[0] != "Random"
        if module in FORBIDDEN_MODULES or name in FORBIDDEN_NAMES or by_chance:
            self.found.append(f"line {node.lineno}: {name}")


def impurities(source: str) -> list[str]:
    """Every place where the source looks at a clock, rolls dice, or does I/O."""
    purity = Purity()
    purity.visit(ast.parse(source))
    return purity.found


def test_core_has_no_clock_no_chance_and_no_io():
    found = {str(path.relative_to(ROOT)): impurities(path.read_text()) for path in sorted((PACKAGE / "core").rglob("*.py"))}
    assert found, "there is no core to look at"
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import datetime\nnow = datetime.datetime.now(datetime.UTC)",
        "from datetime import datetime as dt\nnow = dt.utcnow()",
        "from datetime import datetime\nclock = datetime.now",
        "import datetime as d\nd.date.today()",
        "import random\nrandom.random()",
        "from random import choice",
        "import random as r\nr.Random()",
        "import random\nrandom.SystemRandom()",
        "import os\nos.urandom(8)",
        "import os.path",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid1",
        "import uuid\nmake = uuid.uuid7",
        "import secrets",
        "import threading",
        "def late():\n    import socket",
        "import subprocess",
        "import selectors",
        "import concurrent.futures",
        "import asyncio\nasyncio.to_thread(len, '')",
        "from pathlib import Path\nPath('x').read_text()",
        "open('x')",
        "print('x')",
        "say = print",
    ],
)
def test_looking_at_the_world_is_noticed(source):
    assert impurities(source)


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.Random(7).random()",
        "import datetime\ndatetime.datetime.fromtimestamp(0, datetime.UTC)",
        "import uuid\nuuid.UUID(int=1)",
        "import asyncio\nloop.time()\nrun.now()",
        "class File:\n    def open(self): ...\nFile().open()",
        "from pathlib import PurePath",
    ],
)
def test_what_the_core_is_told_is_fine(source):
    assert impurities(source) == []


# --- import perdure is cheap ------------------------------------------------------------------------------------------------

LATE = ("pydantic", "click", "rich", "docstring_parser")


def loaded_by(statement: str) -> set[str]:
    """The late modules that a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport sys\nprint(*(name for name in {LATE!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout.split())


def test_import_perdure_leaves_the_heavy_modules_alone():
    assert loaded_by("import perdure") == set()


def test_a_heavy_import_is_noticed():
    assert loaded_by("import rich, pydantic") == {"rich", "pydantic"}


# --- the repository knows nothing of the machine it was written on ----------------------------------------------------------

TRACES = {
    "a path of somebody's machine": re.compile(r"(?<![\w.}~-])/(?:(?:home|Users)/[A-Za-z]|(?:root|work|workspace)/)\w*|[A-Z]:\\Users\\"),
    "a package registry": re.compile(
        r"(?i)\b(?:pypi|registry|artifactory|nexus)\.(?:[a-z0-9-]+\.)*(?:cloud|com|corp|dev|internal|io|local|net|org)\b"
        r"|pythonhosted\.org|https?://\S+/simple\b|--(?:extra-)?index-url"
    ),
}
UNTRACKED = frozenset(".git .boot .newer .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache __pycache__ node_modules".split())


def traces(text: str) -> list[str]:
    """What the text reveals about the machine on which it was written."""
    return [f"{what}: {match.group()}" for what, pattern in TRACES.items() for match in pattern.finditer(text)]


def repository_files() -> Iterator[Path]:
    """Every file that is, or could be, committed; in an unpacked archive without git, every file."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not UNTRACKED & set(path.relative_to(ROOT).parts)]
    yield from (path for path in paths if path.is_file())


def test_no_file_names_a_machine_or_a_registry():
    # latin-1 reads any bytes: a recorded journal in tests/golden can give a path away as well.
    found = {str(path.relative_to(ROOT)): traces(path.read_bytes().decode("latin-1")) for path in repository_files()}
    assert "pyproject.toml" in found
    assert {path: given_away for path, given_away in found.items() if given_away} == {}


@pytest.mark.parametrize(
    "words",
    [
        ("see /", "home/ann/project/x.py"),
        ("sqlite:////", "root/perdure.db"),
        ("cd /", "work/tree"),
        ("C:", "\\Users\\ann"),
        ("https://pypi", ".org/project/x"),
        ("https://files.python", "hosted.org/x"),
        ("http://mirror.corp", "/simple"),
        ("registry", ".npmjs.org"),
        ("--index", "-url x"),
    ],
)
def test_a_trace_is_noticed(words):
    assert traces("".join(words))
