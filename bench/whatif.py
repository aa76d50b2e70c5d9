"""How long `perdure whatif` takes: 100 recorded runs of 20 turns, rehearsed with another prompt and a scripted model.

    .venv/bin/python bench/whatif.py

Each run asks the model 20 times and calls a tool 19 times. The other prompt changes every request, so the model is
asked 2,000 times. A scripted model answers at once: the time is that of perdure alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS, TURNS = 100, 20
AGENT = f"""
import os
from perdure import ReAct, tool
from perdure.models import Scripted
from perdure.models.scripted import use, uses

@tool(effect="once")
async def act(number: int) -> str:
    return f"done {{number}}: " + "x" * 300

lines = [uses(use("act", number=number)) for number in range({TURNS - 1})]
helper = ReAct("helper", model=Scripted([*lines, "all is done"]), tools=[act], instructions=os.environ["PROMPT"])
"""
RECORD = f"""
import asyncio
from agent import helper
from perdure import Perdure

async def main():
    async with Perdure("sqlite:///perdure.db", [helper]) as app:
        for number in range({RUNS}):
            await app.run(helper, f"job {{number}}", id=f"r-{{number}}")

asyncio.run(main())
"""


def main() -> None:
    """Record the runs, rehearse them twice, and print both times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        (folder / "record.py").write_text(RECORD)
        _timed(folder, "be kind", "record.py")
        print(f"{RUNS} runs of {TURNS} turns")
        for prompt, words in (("be kind", "the same prompt"), ("be brief", "another prompt")):
            seconds = _timed(folder, prompt, "-m", "perdure", "whatif", "agent.py:helper", "--limit", str(RUNS))
            print(f"{words}: {seconds:.1f} s")


def _timed(folder: Path, prompt: str, *words: str) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ, "PROMPT": prompt}, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
