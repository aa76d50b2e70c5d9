"""A process that drives a run whose tool holds a secret: python -m tests.crash.keyholder URL LEDGER ISOLATE"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from pathlib import Path

from perdure import Call, Perdure, Run, Secret, Settings, agent, tool


def _use(ledger: str, key: Secret, call: Call) -> str:
    value = key.reveal()
    with Path(ledger).open("a") as file:
        file.write(f"{hashlib.sha256(value.encode()).hexdigest()} {call.attempt}\n")
    call.heartbeat({"holding": value})
    while Path(ledger + ".hold").exists():
        time.sleep(0.02)
    return f"used {value}"


@tool(effect="keyed", timeout=200)
def holds(ledger: str, key: Secret, call: Call) -> str:
    return _use(ledger, key, call)


@tool(effect="keyed", timeout=200, isolate=True)
def holds_isolated(ledger: str, key: Secret, call: Call) -> str:
    return _use(ledger, key, call)


@agent(version="1")
async def holder(run: Run, ledger: str, isolate: bool) -> str:
    return await (holds_isolated if isolate else holds)(ledger, Secret("held"))


async def main(url: str, ledger: str, isolate: bool) -> None:
    async with Perdure(url, [holder], settings=Settings(lease_s=1.0, progress_s=0, reconcile_margin_s=0)) as app:
        print(await app.run(holder, ledger, isolate, id="r"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "True"))
