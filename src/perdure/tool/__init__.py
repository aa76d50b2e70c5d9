"""Tools: everything that touches the world. `@tool` declares one; `Call` and `Outcome` are what its function is told and can say.

declared.py   Tool and @tool                 signature.py  what a function takes and gives, bound without pydantic where possible
call.py       Call, and what is recorded     convert.py    the part that needs pydantic, imported when a signature needs it
hooks.py      reconcile and compensate       describe.py   docstring and JSON Schema
policy.py     whether a call needs a person  spend.py      what an attempt uses         pins.py  whether a tool has changed
"""

from perdure.core.outcome import Outcome
from perdure.tool.call import Call
from perdure.tool.declared import Tool, tool
from perdure.tool.hooks import Hook

__all__ = ["Call", "Hook", "Outcome", "Tool", "tool"]
