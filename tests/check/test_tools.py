"""What tools declare, and whether they keep it."""

from __future__ import annotations

import pytest

from perdure.check import look

TOOL = """
from perdure import Call, tool
import perdure
SENT = {{}}
KIND = "keyed"
{0}
"""


def found_in(source: str) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in look("app.py", TOOL.format(source).encode()).findings]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@tool\ndef pay(): ...", [("effect", "note")]),
        ("@tool()\ndef pay(): ...", [("effect", "note")]),
        ("@perdure.tool(timeout=3)\ndef pay(): ...", [("effect", "note")]),
        ("@tool(effect='idempotant')\ndef pay(): ...", [("effect", "error")]),
        ("@tool(effect='keyed')\ndef pay(): ...", [("key", "error")]),
        ("@tool(effect=KIND)\ndef pay(): ...", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call: Call): return call.attempt, call.number", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call: 'Call'): return None", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call): return send(call.key)", [("key", "error")]),  # not annotated: it is an argument
        ("def pay(): ...\npaid = tool(effect='keyed')(pay)", [("key", "error")]),
        ("@tool(effect='once')\ndef pay(): ...", [("reconcile", "note")]),
        ("@tool(effect='read')\ndef book(): ...\n@book.compensate(effect='keyed')\ndef _(): ...", [("key", "error")]),
        # and what is fine
        ("@tool(effect='read')\ndef look(): ...", []),
        ("@tool(effect='keyed')\ndef pay(order: str, call: Call): return send(order, key=call.key)", []),
        ("@tool(effect='keyed')\ndef pay(order: str, call: perdure.Call): return send(order, call)", []),
        (
            "@tool(effect='keyed')\nasync def pay(it: Call):\n    async def inner():\n        return SENT[it.key]\n    return await inner()",
            [],
        ),
        ("@tool(effect='once')\ndef pay(): ...\n@pay.reconcile\ndef _(): ...", []),
        ("@tool(effect='once')\ndef pay(): ...\ndef ask(): ...\npay.reconcile(ask)", []),
        ("@tool(effect='read')\ndef book(): ...\n@book.compensate(effect='keyed')\ndef _(call: Call): return call.key", []),
        ("@tool(**SHARED)\ndef pay(): ...", []),  # nobody can tell
        ("@tool(effect=chosen())\ndef pay(): ...", []),
    ],
)
def test_tools_are_held_to_what_they_declare(source, found):
    assert found_in(source) == found


def test_agents_and_tools_are_counted():
    seen = look(
        "app.py",
        b"from perdure import agent, tool\n@agent\nasync def a(run): ...\n@tool(effect='read')\ndef b(): ...\n@tool(effect='read')\ndef c(): ...\n",
    )
    assert (seen.agents, seen.tools, seen.findings) == (1, 2, [])
