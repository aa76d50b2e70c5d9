"""Deploy a service in six steps, and survive `kill -9` in any of them.

    perdure run examples/deploy.py:deploy service=shop release=v42 --id shop-v42

The tools act on the folder `world`, which is independent of perdure's journal: every effect is one line that the tool
appends to `world/effects/<tool>.log`, and every request of a tool is one line in `world/requests/<tool>.log`.
The number of lines shows what really happened, and how often. `perdure demo` counts them while it kills this program.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from pathlib import Path

from perdure import Call, Outcome, Run, agent, tool

WORLD = Path(os.environ.get("DEPLOY_WORLD", "world"))
PACE_S = float(os.environ.get("DEPLOY_PACE_S", "0.6"))  # how long each step takes
SLOW_REPLY = os.environ.get("DEPLOY_SLOW_REPLY")  # this tool's answer takes 20 s: time enough to kill the process


# -- the six tools, each with its correct effect class ----------------------------------------------------------------
@tool(effect="once", timeout=30)
async def migrate_schema(service: str, release: str, call: Call) -> str:
    """Run the release's migration. A second run would fail half way: nothing drops duplicates here."""
    async with Request("migrate_schema", call) as request:
        request.happened(f"{service}: ALTER TABLE orders ADD COLUMN note ({release})")
    return f"schema of {release}"


@migrate_schema.reconcile
async def _(service: str, release: str, call: Call) -> Outcome:
    # A person would do the same: look in the database for the migration.
    return Outcome.happened(f"schema of {release}") if found("migrate_schema", call.key) else Outcome.not_happened()


@tool(effect="idempotent", timeout=30)
async def build_image(service: str, release: str, call: Call) -> str:
    """Build the image. The same source gives the same image, so a second build changes nothing."""
    image = f"{service}@{hashlib.sha256(f'{service} {release}'.encode()).hexdigest()[:12]}"
    async with Request("build_image", call) as request:
        request.happened(image, unless_there=image)
    return image


@tool(effect="keyed", timeout=30)
async def push_image(image: str, call: Call) -> str:
    """Push the image. If the registry knows the key already, it only answers."""
    async with Request("push_image", call) as request:
        request.happened(image, unless_there=call.key)
    return f"registry.example/{image}"


@tool(effect="once", timeout=30)
async def shift_traffic(service: str, image: str, call: Call) -> str:
    """Point the load balancer at the new image. The load balancer drops no duplicates, but can tell what it did."""
    async with Request("shift_traffic", call) as request:
        request.happened(f"{service} -> {image}")
    return f"{service} -> {image}"


@shift_traffic.reconcile
async def _(service: str, image: str, call: Call) -> Outcome:
    return Outcome.happened(f"{service} -> {image}") if found("shift_traffic", call.key) else Outcome.not_happened()


@tool(effect="keyed", timeout=30)
async def join_mesh(service: str, call: Call) -> str:
    """Register the service in the mesh, whose control plane drops duplicates of a key."""
    async with Request("join_mesh", call) as request:
        request.happened(f"{service} has mTLS", unless_there=call.key)
    return "mTLS on"


@tool(effect="read", timeout=30)
async def check_health(service: str, call: Call) -> bool:
    """Ask the service for its health. This changes nothing, so a repeated call is safe."""
    async with Request("check_health", call):
        return bool(found("shift_traffic", service) and found("join_mesh", service))


# -- the agent: plain asyncio -----------------------------------------------------------------------------------------
@agent(version="1")
async def deploy(run: Run, service: str, release: str) -> str:
    """Bring one release of one service into production."""
    run.status(f"preparing {service} {release}")
    await migrate_schema(service, release)
    image = await build_image(service, release)
    await push_image(image)

    run.status(f"switching {service} over to {release}")
    await shift_traffic(service, image)
    await join_mesh(service)

    healthy = await check_health(service)
    verdict = run.decide("live" if healthy else "unhealthy", among=["live", "unhealthy"], reason="the health check says so")
    return f"{service} {release} is {verdict}"


# -- the world: a folder ----------------------------------------------------------------------------------------------
class Request:
    """A request of a tool to an external service: it is sent, its effect happens, and the answer comes later."""

    def __init__(self, step: str, call: Call) -> None:
        self._step, self._call = step, call

    async def __aenter__(self) -> Request:
        append(WORLD / "requests" / f"{self._step}.log", f"{self._call.key} attempt {self._call.attempt}")
        await asyncio.sleep(PACE_S / 2)
        return self

    def happened(self, what: str, *, unless_there: str | None = None) -> None:
        """The effect: one line. A service that drops duplicates finds `unless_there` in its ledger and does nothing."""
        append(WORLD / "effects" / f"{self._step}.log", f"{self._call.key} {what}", unless_there)

    async def __aexit__(self, *_: object) -> None:
        # The dangerous crash window: the effect has happened, and its result is not recorded yet.
        await asyncio.sleep(20 if self._step == SLOW_REPLY else PACE_S / 2)


def append(ledger: Path, line: str, unless_there: str | None = None) -> None:
    """Append one line to the ledger. The lock stands for a service that handles one request at a time."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(ledger, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if unless_there is None or unless_there not in ledger.read_text():
            os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def found(step: str, words: str) -> bool:
    """Does the step's ledger have an effect with these words (a key, for example)?"""
    ledger = WORLD / "effects" / f"{step}.log"
    return ledger.exists() and words in ledger.read_text()
