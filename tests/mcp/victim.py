"""A worker process for the crash tests: python -m tests.mcp.victim JOURNAL LEDGER EFFECT"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.mcp.warehouse import POLITE

from perdure import Perdure, Run, Settings, agent, mcp

SETTINGS = Settings(poll_s=0.01, reconcile_margin_s=0, unknown_deadline_s=0, cancel_grace_s=0.5, lease_s=2)
_, JOURNAL, LEDGER, EFFECT = sys.argv
effects: dict[str, Any] = {"slow": EFFECT}
server = mcp([sys.executable, POLITE, LEDGER, "--stubborn"], name="warehouse", effects=effects)


@agent(version="1")
async def errand(run: Run) -> Any:
    await server.call("put", name="a", value=1)
    child = await server.call("beget")
    return [child, await server.call("slow", seconds=1)]


async def main() -> None:
    async with Perdure(f"sqlite:///{JOURNAL}", [errand], settings=SETTINGS) as app:
        await app.start(errand, id="r")
        row = await app.engine.drive("r")
        print(row.status, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
