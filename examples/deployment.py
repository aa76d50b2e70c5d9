"""A deployment as a plan: checked as a whole, independent steps in parallel, undone if it fails.

    perdure run examples/deployment.py:deployment service=shop --check
    perdure run examples/deployment.py:deployment service=shop --id shop-1
    perdure approvals
    perdure approve ID --by ann
    perdure resume shop-1 examples/deployment.py:deployment

deployment.toml has the same plan, with these tools. The tools act on the folder `world/`; each effect is one line in
`world/effects.log`. If the file `world/broken` exists, the roll-out fails, and the completed steps are undone.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from perdure import Approval, Call, Fatal, Plan, Step, param, ref, tool

WORLD = Path(os.environ.get("DEPLOYMENT_WORLD", "world"))


def happened(what: str, key: str = "") -> None:
    """Append one line to the ledger of effects. A second request with the same key is dropped."""
    WORLD.mkdir(parents=True, exist_ok=True)
    ledger = WORLD / "effects.log"
    if not key or not ledger.exists() or key not in ledger.read_text():
        with ledger.open("a") as file:
            file.write(f"{what} {key}".rstrip() + "\n")


@tool(effect="keyed")
async def build_image(service: str, call: Call) -> dict[str, Any]:
    """Build the service's image.

    Args:
        service: the name of the service
    """
    happened(f"built {service}", call.key)
    return {"image_tag": f"{service}:{hashlib.sha256(service.encode()).hexdigest()[:8]}"}


@build_image.compensate(effect="idempotent")
async def _(result: dict[str, Any]) -> None:
    happened(f"deleted {result['image_tag']}")


@tool(effect="read")
async def run_tests(image: str) -> dict[str, int]:
    """Run the tests of an image."""
    return {"passed": 41, "failures": 0}


@tool(effect="read")
async def scan_image(image: str) -> list[str]:
    """Look for known vulnerabilities in an image."""
    raise Fatal("the scanner is down")


@tool(effect="keyed")
async def roll_out(image: str, replicas: int, call: Call) -> dict[str, str]:
    """Replace the running image by this image."""
    if (WORLD / "broken").exists():
        raise Fatal("the cluster is full")
    happened(f"rolled {image} out to {replicas}", call.key)
    return {"message": f"{image} is live"}


@tool(effect="once")
async def announce(text: str) -> str:
    """Announce the deployment."""
    happened(f"announced: {text}")
    return "told"


deployment = Plan(
    "deployment",
    params={"service": str, "replicas": {"type": int, "default": 2}},
    steps=[
        Step("build", build_image, {"service": param("service")}, description="Build the image of the service"),
        Step("test", run_tests, {"image": ref("build", "image_tag")}),
        Step("scan", scan_image, {"image": ref("build", "image_tag")}, on_failure="continue"),
        Step(
            "roll_out",
            roll_out,
            {"image": ref("build", "image_tag"), "replicas": param("replicas")},
            when=ref("test", "failures") == 0,
            after=["scan"],
            approval=Approval(by=["ann", "bob"], reason="customers see this", editable="replicas"),
            on_failure="undo",
            description="Replace what customers use",
        ),
        Step("announce", announce, {"text": ref("roll_out", "message")}, on_failure="ask"),
    ],
)
