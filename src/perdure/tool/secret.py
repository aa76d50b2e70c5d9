"""Secret: a password or a key by its name. Journals hold the name; only the tool gets the value.

A secret is an argument of a tool, with the annotation `Secret`. An agent passes `Secret("stripe-key")`, and the journal
holds `{"$secret": "stripe-key"}`. Only the annotation makes a secret of it: the same JSON in another argument is plain
data, and for a parameter that takes a secret, JSON from outside (a model, a person, a caller) is refused. So no text
can name a secret that is then resolved.

The values are resolved right before each attempt, so that a retry gets the value of that moment. They are in the `Call`
of the attempt, and nowhere else. The Call also removes them from what the tool says.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from perdure.core.codec import shown
from perdure.core.machine import current as machine_of_agent
from perdure.core.redaction import MIN_CHARS, Scrubber, marker_of
from perdure.errors import InvalidInput, NotAllowedInAgent, NotReady, NotSent
from perdure.tool.artifact import in_call

# Takes the name of a secret, and returns its value. None, or a LookupError: there is no such secret.
Resolver = Callable[[str], "str | Awaitable[str | None] | None"]

RECORDED: Final = "$secret"  # the key of a recorded reference
PREFIX: Final = "PERDURE_SECRET_"
RESOLVE_S = 30.0  # how long a resolver may take
MAX_CHARS = 65_536
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Secret:
    """The name of a secret. A tool whose parameter has the annotation `Secret` can `reveal()` the value.

    A name has 1 to 64 letters, digits, `.`, `_` or `-`. A Secret can be shown, compared and pickled: that is all about
    its name.
    """

    __slots__ = ("_holder", "name")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            # The text is not shown: it may be the secret itself.
            raise InvalidInput(
                "Secret(…): the name of a secret has 1 to 64 letters, digits, . _ and -, and begins with a letter or a digit"
            )
        self.name = name
        # The call that gets this object as its argument. In a thread that a tool has started itself, no call is known.
        self._holder = in_call.get()

    def reveal(self) -> str:
        """The value. Only a tool that has this secret as an argument gets it. It was resolved before the attempt began."""
        if machine_of_agent() is not None:
            raise NotAllowedInAgent(f"secret {self.name}: an agent passes a secret on; a tool reveals it")
        holder = self._holder if self._holder is not None else in_call.get()
        scrubber: Scrubber | None = getattr(holder, "scrubber", None)
        value = None if scrubber is None else scrubber.value_of(self.name)
        if value is None:
            raise InvalidInput(
                f"secret {self.name} is not an argument of this call: pass it to the tool, as a parameter with the annotation Secret"
            )
        return value

    def __repr__(self) -> str:
        return marker_of(self.name)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Secret, self.name))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self.name,)


def recorded(secret: Secret) -> dict[str, str]:
    """The reference as JSON."""
    return {RECORDED: secret.name}


def name_in(reference: object) -> str | None:
    """The name in a recorded reference; None if the value is no reference."""
    if not isinstance(reference, dict) or reference.keys() != {RECORDED}:
        return None
    name = reference[RECORDED]
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


# -- where values come from -------------------------------------------------------------------------------------------
def from_environment(name: str) -> str | None:
    """The variable PERDURE_SECRET_<NAME>: `stripe-key` is PERDURE_SECRET_STRIPE_KEY.

    With the prefix, an agent cannot name any other variable of the environment.
    """
    return os.environ.get(variable_of(name))


def variable_of(name: str) -> str:
    return PREFIX + re.sub(r"[.-]", "_", name).upper()


class FromFolder:
    """One file for each secret, as Docker and Kubernetes mount them. A line break at the end of a file does not count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> str | None:
        try:
            with (self.folder / name).open("rb") as file:
                raw = file.read(4 * MAX_CHARS + 1)
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            raise NotReady(f"secret {name}: its file {self.folder / name} cannot be read: {error.strerror}") from None
        try:
            return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise NotReady(f"secret {name}: its file {self.folder / name} is not UTF-8 text") from None


def source_of(setting: str) -> Resolver:
    """The source that the setting `secrets` names: nothing (the environment), a folder, or a function."""
    if not setting:
        return from_environment
    if setting.startswith("file://"):
        return FromFolder(Path(unquote(setting.removeprefix("file://"))))
    module, _, name = setting.removeprefix("python:").partition(":")

    def by_name(secret: str) -> Any:
        try:
            resolver: Any = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise NotReady(f"the setting secrets names {setting}, which cannot be loaded: {error}") from None
        return resolver(secret)

    by_name.__qualname__ = setting
    return by_name


async def resolve(names: Collection[str], source: Resolver | None, redacted: Mapping[str, str] = {}) -> Scrubber:
    """The values of these secrets. Nothing has begun yet, so both errors prove that nothing was sent.

    NotReady: there is no such secret, or its value cannot be used. NotSent: the resolver failed, and may answer later.
    """
    ask = from_environment if source is None else source
    return Scrubber({name: _checked(name, await _ask(ask, name), ask) for name in sorted(names)}, redacted)


async def _ask(source: Resolver, name: str) -> object:
    try:
        async with asyncio.timeout(RESOLVE_S):
            if source is from_environment or inspect.iscoroutinefunction(source):
                answer: Any = source(name)
            else:
                answer = await asyncio.to_thread(source, name)  # it may read a file, or ask a service
            return await answer if inspect.isawaitable(answer) else answer
    except LookupError:
        return None
    except (NotReady, NotSent):
        raise
    except TimeoutError:
        raise NotSent(f"secret {name}: its resolver did not answer within {RESOLVE_S:g} s") from None
    except Exception as error:
        # The text of the error is not shown: it may have the secret, or the password of the resolver itself.
        raise NotSent(f"secret {name}: its resolver raised {type(error).__name__}") from None


def _checked(name: str, value: object, source: Resolver) -> str:
    if value is None or value == "":
        raise NotReady(f"secret {name} is missing: {_way_out(name, source)}, and resume the run")
    if not isinstance(value, str):
        raise NotReady(f"secret {name}: its resolver returned a {type(value).__name__}; a secret is text")
    if not MIN_CHARS <= len(value) <= MAX_CHARS:
        raise NotReady(
            f"secret {name} has {'fewer than' if len(value) < MIN_CHARS else 'more than'} "
            f"{MIN_CHARS if len(value) < MIN_CHARS else MAX_CHARS:,} characters, so that perdure could not keep it out of texts"
        )
    if value in marker_of(name):
        raise NotReady(f"secret {name}: its value is a part of {marker_of(name)}, the text that would be shown instead of it")
    return value


def _way_out(name: str, source: Resolver) -> str:
    if source is from_environment:
        return f"set {variable_of(name)}"
    if isinstance(source, FromFolder):
        return f"put it into the file {source.folder / name}"
    return f"its resolver {shown(getattr(source, '__qualname__', type(source).__name__))} does not have it"


def check_resolver(source: object) -> None:
    """Raise InvalidInput if `Perdure(secrets=…)` got something that is not a resolver."""
    if not callable(source) or isinstance(source, (type, Mapping)):
        raise InvalidInput("Perdure(secrets=…): a function that takes the name of a secret and returns its value, or None; sync or async")
