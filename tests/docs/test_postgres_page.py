"""docs/postgres.md is true about the database: a real server gives the same answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
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


_PROGRAM = """
import asyncio, sys
from perdure import Perdure, Run, agent
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Ticket(Base):
    __tablename__ = "tickets"
    id: Mapped[str] = mapped_column(primary_key=True)

@agent(version="1")
async def triage(run: Run, ticket: str) -> str:
    return ticket

async def main(url):
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    async with engine.begin() as owner:
        await owner.run_sync(Base.metadata.create_all)
    async with Perdure(url, [triage]) as app:
{example}
        print(await app.handle("triage-t-7").result())
    await engine.dispose()

asyncio.run(main(sys.argv[1]))
"""


def test_the_example_with_a_session_of_sqlalchemy_runs(tmp_path: Path, postgres_url: str) -> None:
    (example,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "web-service.md").read_text(), re.S)
    program = tmp_path / "tickets.py"
    program.write_text(_PROGRAM.replace("{example}", textwrap.indent(example, " " * 8)))
    ran = subprocess.run([sys.executable, str(program), postgres_url], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.returncode) == ("t-7\n", 0), ran.stderr
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT id FROM tickets").fetchall() == [("t-7",)]
