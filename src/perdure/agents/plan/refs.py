"""References: placeholders in a step's arguments for results of earlier steps and for parameters of the plan.

A reference takes the place of a whole value. References in the middle of a text do not exist.

In Python a reference is an object. As JSON a reference is `{"$ref": ["build", "image_tag"]}` or
`{"$param": ["image"]}`. A key of the user's data that begins with `$` gets one more `$` in JSON, so data can never be
read as a reference. Data whose only key is `ref` or `param` is written `{"$data": {"ref": …}}`. If such data is
written without `$data`, that is an error: it looks like a reference with a forgotten `$`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable

Key = str | int
Test = Literal["is", "is_not", "below", "at_most", "above", "at_least", "one_of"]
MAX_PATH = 50
MAX_DEPTH = 100
_SHOWN_KEYS = 10
_DATA = "$data"  # encloses data that looks like a reference with a forgotten $


class NotThere(InvalidInput):
    """The value that a reference names does not exist. The message says how far the path leads, and what is there."""


class Condition:
    """A condition of a step: a reference, a comparison and a value. perdure evaluates it when the plan runs."""

    __slots__ = ("ref", "test", "value")

    def __init__(self, ref: Ref, test: Test = "is", value: Any = True) -> None:
        self.ref = ref
        self.test: Test = test
        self.value = value

    def __bool__(self) -> bool:
        raise InvalidInput(f"{self} is not known before the plan runs: pass it to a step as when=, or several as a list")

    def __str__(self) -> str:
        words = self.test.replace("_", " ")
        return f"{self.ref} {words} {_shown(self.value)}"

    __repr__ = __str__


class Ref:
    """A value that is known only when the plan runs: a step's result, a parameter of the plan, or a part of these."""

    __slots__ = ("path", "step")

    def __init__(self, step: str | None, path: tuple[Key, ...]) -> None:
        self.step = step  # None: the reference names a parameter of the plan, and the path begins with its name
        self.path = path

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]  # a comparison returns a Condition
        return Condition(self, "is", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]  # a comparison returns a Condition
        return Condition(self, "is_not", value)

    def __lt__(self, limit: Any) -> Condition:
        return Condition(self, "below", limit)

    def __le__(self, limit: Any) -> Condition:
        return Condition(self, "at_most", limit)

    def __gt__(self, limit: Any) -> Condition:
        return Condition(self, "above", limit)

    def __ge__(self, limit: Any) -> Condition:
        return Condition(self, "at_least", limit)

    __hash__ = object.__hash__

    def one_of(self, *values: Any) -> Condition:
        """The condition that the value is one of these values."""
        return Condition(self, "one_of", list(values))

    def __bool__(self) -> bool:
        raise InvalidInput(f"{self} is not known before the plan runs: use it in a step's arguments, or in when=")

    def __str__(self) -> str:
        where = self.path if self.step is None else (self.step, *self.path)
        return f"{'param' if self.step is None else 'ref'}({', '.join(map(repr, where))})"

    __repr__ = __str__


def ref(step: str, *path: Key) -> Ref:
    """The result of this step, or the part of the result at this path: `ref("build", "images", 0, "tag")`."""
    if not isinstance(step, str) or not step:
        raise InvalidInput(f'ref({_shown(step)}): name a step, and the path into its result: ref("build", "image_tag")')
    return Ref(step, _path(path, f"ref({step!r:.80}, …)"))


def param(name: str, *path: Key) -> Ref:
    """The parameter of the plan with this name, or the part of the parameter at this path."""
    if not isinstance(name, str) or not name:
        raise InvalidInput(f'param({_shown(name)}): name one of the plan\'s parameters: param("image")')
    return Ref(None, _path((name, *path), f"param({name!r:.80}, …)"))


def _path(path: tuple[Any, ...], what: str) -> tuple[Key, ...]:
    for key in path:
        if not isinstance(key, str) and (type(key) is not int or key < 0):
            raise InvalidInput(f"{what}: {_shown(key)} is not a part of a path; use names of fields, and positions in lists (0, 1, …)")
    if len(path) > MAX_PATH:
        raise InvalidInput(f"{what}: {len(path)} steps into a value; at most {MAX_PATH}")
    return path


# -- to JSON and back -------------------------------------------------------------------------------------------------
def written(value: Any, depth: int = 0) -> Any:
    """The value with its references as JSON. InvalidInput names the part that cannot be written as JSON."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"nested deeper than {MAX_DEPTH} levels (or contains itself)")
    if isinstance(value, Ref):
        return {"$param": list(value.path)} if value.step is None else {"$ref": [value.step, *value.path]}
    if isinstance(value, Condition):
        raise InvalidInput(f"{value} is a condition: it belongs into when=")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise NotEncodable(f"the key {codec.shown(key)} is of type {type(key).__name__}; keys must be strings")
        form = {f"${key}" if key.startswith("$") else key: written(item, depth + 1) for key, item in value.items()}
        return {_DATA: form} if _looks_like_a_reference(form) else form
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [written(item, depth + 1) for item in value]
    plain = codec.decode(codec.encode(value))
    # A dict or a list here was a dataclass or a model object: its keys must be escaped too.
    return plain if not isinstance(plain, (dict, list)) else written(plain, depth + 1)


def written_arguments(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with their references as JSON. An argument may have the name `ref`."""
    form: dict[str, Any] = written(args)
    return dict(form.get(_DATA, form))  # `$data` is perdure's key here: a user's key `$data` was written as `$$data`


def read_arguments(form: Any) -> dict[str, Any]:
    """The arguments from their JSON form, with their references."""
    args = read({_DATA: form} if isinstance(form, dict) and _looks_like_a_reference(form) else form)
    if not isinstance(args, dict):
        raise InvalidInput(f"args are the tool's arguments by name, not {_shown(args)}")
    return args


def _looks_like_a_reference(form: dict[str, Any]) -> bool:
    """Is this possibly a reference with a forgotten `$`?"""
    return len(form) == 1 and next(iter(form)) in ("ref", "param")


def read(form: Any, depth: int = 0) -> Any:
    """The value from its JSON form, with its references. InvalidInput if the form is not valid."""
    if depth > MAX_DEPTH + 2:
        raise InvalidInput(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(form, list):
        return [read(item, depth + 1) for item in form]
    if not isinstance(form, dict):
        return form
    if _looks_like_a_reference(form):
        (key,) = form
        raise InvalidInput(
            f'{_shown(form)}: did you mean "${key}"? A reference is {{"$ref": ["step", "field"]}} or {{"$param": "name"}}; '
            f'data whose only key is {key} is written {{"{_DATA}": {{"{key}": …}}}}'
        )
    inside = form[_DATA] if form.keys() == {_DATA} else None
    if isinstance(inside, dict) and _looks_like_a_reference(inside):
        form = inside
    marks = [key for key in form if key.startswith("$") and not key.startswith("$$")]
    if not marks:
        return {key.removeprefix("$") if key.startswith("$$") else key: read(item, depth + 1) for key, item in form.items()}
    mark = marks[0]
    if mark not in ("$ref", "$param") or len(form) > 1:
        raise InvalidInput(
            f'{mark!r:.60} means nothing here: a reference is {{"$ref": ["step", "field"]}} or {{"$param": "name"}} and nothing beside it; '
            f"for data whose key begins with $ write ${mark:.60}"
        )
    return read_ref(mark, form[mark])


def read_ref(mark: str, way: Any) -> Ref:
    """The reference from the value of `$ref` or `$param`."""
    way = [way] if isinstance(way, str) else way
    if not isinstance(way, list) or not way or not isinstance(way[0], str):
        raise InvalidInput(f'{mark} takes a list that begins with a name, such as ["build", "image_tag"], not {_shown(way)}')
    return ref(*way) if mark == "$ref" else param(*way)


def refs_in(value: Any) -> Iterator[Ref]:
    """Every reference in a value, at any depth."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs_in(item)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value, at any depth; keys do not count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


# -- resolving --------------------------------------------------------------------------------------------------------
Look = Callable[[str | None], Any]  # the name of a step → the step's result; None → the plan's parameters


def resolve(value: Any, look: Look) -> Any:
    """The value with every reference replaced by the value that the reference names. NotThere if that is missing."""
    if isinstance(value, Ref):
        return found(value, look)
    if isinstance(value, dict):
        return {key: resolve(item, look) for key, item in value.items()}
    return [resolve(item, look) for item in value] if isinstance(value, list) else value


def found(of: Ref, look: Look) -> Any:
    """The value that the reference names. A missing field is an error, never None."""
    value = look(of.step)
    for place, key in enumerate(of.path):
        inside = isinstance(value, dict) and isinstance(key, str) and key in value
        if not inside and not (isinstance(value, list) and isinstance(key, int) and key < len(value)):
            way = "".join(f"[{step!r}]" for step in of.path[:place])
            whose = "the plan's parameters" if of.step is None else f"what step {of.step} returned"
            raise NotThere(f"{of}: there is no {key!r:.80} in {whose}{f' at {way}' if way else ''}, which is {kind(value)}")
        value = value[key]
    return value


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    match value:
        case dict():
            keys = ", ".join(repr(key)[:40] for key in list(value)[:_SHOWN_KEYS])
            more = f" and {len(value) - _SHOWN_KEYS} more" if len(value) > _SHOWN_KEYS else ""
            return f"an object with {keys}{more}" if value else "an empty object"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case bool():
            return "true or false"
        case str():
            return "text"
        case None:
            return "null"
        case _:
            return "a number"


def _shown(value: Any) -> str:
    return codec.shown(value)
