"""docs/postgres.md is true about the database: a real server gives the same answers."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psycopg
import pytest
from tests.servers import forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "postgres.md").read_text()


def perdure(folder: Path, *arguments: str, code: int = 0) -> str:
    """The output on stdout and stderr."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")} | {"PYTHONPATH": str(ROOT / "src")}
    ran = forked.run(
        [sys.executable, "-m", "perdure", *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == code, (arguments, ran.returncode, ran.stdout, ran.stderr)
    return str(ran.stdout + ran.stderr)


@pytest.fixture
def shop(tmp_path: Path, postgres_url: str) -> Path:
    """A folder with the README's program, both of whose runs are in the database."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    (tmp_path / "shop.py").write_text(program)
    perdure(tmp_path, "run", "shop.py:support", "order=o-81", "--id", "refund-o-81", "--url", postgres_url)
    perdure(tmp_path, "run", "shop.py:support", "order=o-82", "--id", "refund-o-82", "--url", postgres_url, code=3)
    return tmp_path


def test_the_view_says_what_the_page_shows(shop: Path, postgres_url: str) -> None:
    query, names, table = re.findall(r'^\$ psql -d perdure -c "(.*)"\n(.*)\n-[-+]+\n(.*?)\n\(\d rows\)', PAGE, re.M | re.S)[0]
    with psycopg.connect(postgres_url) as connection:
        cursor = connection.execute(f"{query} ORDER BY run_id".encode())
        found = [[str(cell) for cell in row] for row in cursor]
        assert [column.name for column in cursor.description or ()] == cells(names)
    assert found == [cells(line) for line in table.splitlines()]
    assert len(found) == 2


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]
