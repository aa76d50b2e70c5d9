"""Tools: all code with effects outside the agent.

`@tool` declares a tool, `Call` is passed to the tool's function, and `Outcome` is the answer of a reconcile hook.

declared.py   Tool and @tool; pins, which show whether a tool has changed
signature.py  parameters and result of a function, bound without pydantic if possible
convert.py    the part that needs pydantic, imported when a signature needs it
call.py       Call, and how a result is recorded
artifact.py   Artifact: large bytes by pointer
secret.py     Secret: a value by its name, which only the tool gets
hooks.py      reconcile and compensate hooks
describe.py   docstring and JSON Schema
policy.py     which calls need an approval
spend.py      what an attempt uses
"""

from perdure.core.outcomes import Outcome
from perdure.tool.artifact import Artifact
from perdure.tool.call import Call
from perdure.tool.declared import Tool, tool
from perdure.tool.hooks import Hook
from perdure.tool.secret import Secret

__all__ = ["Artifact", "Call", "Hook", "Outcome", "Secret", "Tool", "tool"]
