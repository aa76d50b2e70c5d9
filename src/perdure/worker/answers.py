"""The four answers that there are about an attempt. None of them is an exception."""

from perdure.core.attempts import Abandoned, Performed, Raised, Returned, Unrecordable
from perdure.tool.call import recordable

__all__ = ["Abandoned", "Performed", "Raised", "Returned", "Unrecordable", "recordable"]
