"""Does a tool do what it declares?"""

from __future__ import annotations

import pytest

from perdure.check import look

TOOL = """
from perdure import Call, tool
import logging
import perdure
LOG = logging.getLogger(__name__)
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
        # The key is shown to people or ignored, and is sent to no service.
        ("@tool(effect='keyed')\ndef pay(call: Call): print(call)", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call: Call): print(f'paying {call.key}', str(call))", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call: Call): call.key", [("key", "error")]),
        ("@tool(effect='keyed')\ndef pay(call: Call): key = call.key", [("key", "error")]),
        # Too indirect to be recognised.
        ("@tool(effect='keyed')\ndef pay(call: Call):\n    key = it = call.key\n    LOG.info('%s', it)", []),
        (
            "@tool(effect='keyed')\ndef pay(call: Call):\n    text = f'{call.key}'\n    LOG.info('%s', text)\n    logging.warning(call)",
            [("key", "error")],
        ),
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
        (
            "@tool(effect='keyed')\ndef pay(call: Call):\n    headers = {'Idempotency-Key': call.key}\n    print(headers)\n    return send(headers)",
            [],
        ),
        ("@tool(effect='keyed')\ndef pay(call: Call):\n    body = {}\n    body['key'] = call.key\n    return send(body)", []),
        ("@tool(effect='keyed')\ndef pay(call: Call):\n    key = call.key\n    same = key\n    return client.info(same)", []),
        ("@tool(effect='keyed')\ndef pay(call: Call): print(send(f'order-{str(call.key)}'))", []),
        ("@tool(effect='once')\ndef pay(): ...\n@pay.reconcile\ndef _(): ...", [("timeout", "note")]),
        ("@tool(effect='once', timeout=20)\ndef pay(): ...\n@pay.reconcile\ndef _(): ...", []),
        ("@tool(effect='once', timeout=20)\ndef pay(): ...\ndef ask(): ...\npay.reconcile(ask)", []),
        ("@tool(effect='read')\ndef book(): ...\n@book.compensate(effect='keyed')\ndef _(call: Call): return call.key", []),
        ("@tool(**SHARED)\ndef pay(): ...", []),  # the arguments are not known without running the code
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
