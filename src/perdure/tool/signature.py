"""Signature: converts the arguments and the result of a tool's or agent's function to canonical JSON and back.

Arguments are converted to JSON and back before the first attempt too. So a live attempt gets exactly the same
arguments as a retry after a crash. If the type of a value is exactly the annotated JSON type, pydantic is not needed.
For each parameter, these exact types are determined once.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from perdure.core.codec import decode, encode
from perdure.errors import InvalidInput, NotEncodable
from perdure.tool.call import Call
from perdure.tool.secret import Secret, name_in, recorded

if TYPE_CHECKING:
    from perdure.tool.convert import Converter

EMPTY: Final = inspect.Parameter.empty
_ANYTHING = (Any, object, EMPTY)
_EXACT: dict[Any, type] = {
    **{kind: kind for kind in (str, int, float, bool, dict, list, type(None))},
    None: type(None),
    dict[str, Any]: dict,
    list[Any]: list,
}


class Parameter:
    """One named argument of a tool."""

    def __init__(self, label: str, parameter: inspect.Parameter, annotation: Any) -> None:
        self._label = label
        self.name = parameter.name
        self.default = parameter.default
        self.positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Many people write `cents: int = None` and mean `int | None`.
        optional = parameter.default is None and exact_types(annotation) is not None
        self.annotation = typing.Optional[annotation] if optional else annotation  # noqa: UP045 – `|` does not work with every annotation
        self.exact = exact_types(self.annotation)
        self.is_secret = _is_secret(self.annotation)

    @cached_property
    def converter(self) -> Converter:
        from perdure.tool.convert import Converter, Unusable

        try:
            converter = Converter(self.annotation)
        except Unusable as unusable:
            raise self.refuse(str(unusable)) from None
        if converter.has_set:
            # The hash of a string differs between processes, and with it the order of a set. So a replay would see
            # other arguments than the journal.
            raise self.refuse("a set has no order that a replay could repeat; take a list")
        return converter

    def coerce(self, value: Any) -> Any:
        """The argument as a JSON value."""
        if self.is_secret:
            return self._reference(value)
        from perdure.tool.convert import Unusable

        try:
            return self.converter.coerce(value)
        except Unusable as unusable:
            raise self.refuse(str(unusable)) from None

    def rebuild(self, plain: Any) -> Any:
        """The typed argument, made from a JSON value whose type is not one of the exact types."""
        if self.is_secret:
            name = name_in(plain)
            if name is None and (plain is not None or self.annotation is Secret):
                raise self.refuse("the recorded value is no reference to a secret")
            return None if name is None else Secret(name)  # a new object: it belongs to the call that gets it
        try:
            return self.converter.rebuild(plain)
        except ValueError as error:
            raise self.refuse(f"the recorded value does not fit any more: {error}") from None

    def _reference(self, value: Any) -> Any:
        """The reference to a secret. Only code makes a Secret: JSON that looks like one is refused, and not shown."""
        if isinstance(value, Secret):
            return recorded(value)
        if value is None and self.annotation is not Secret:
            return None
        raise self.refuse(f'it takes a Secret, not a {type(value).__name__}: the agent\'s own code passes Secret("name")')

    def refuse(self, why: str) -> InvalidInput:
        return InvalidInput(f"{self._label}, parameter {self.name}: {why}")


class Signature:
    """The parameters of a function, which of them receives the Call, and what the function returns.

    `label`: the name of the function in errors ("tool refund"). `names`: the local names at the place where the
    function is declared. `skip`: how many parameters at the beginning are not arguments.
    """

    def __init__(self, label: str, fn: Callable[..., Any], names: Mapping[str, Any], *, skip: int = 0) -> None:
        self._label = label
        self._fn = fn
        found = inspect.signature(fn)
        taken = dict(list(found.parameters.items())[skip:])
        for parameter in taken.values():
            _check_kind(label, parameter)
        # Annotations that are strings (PEP 563) are resolved now if possible, because local names of the declaring
        # function are not available later. The others are resolved at first use, when the whole module is loaded.
        self._declared = {name: (parameter, resolve(parameter.annotation, fn, names)) for name, parameter in taken.items()}
        self._returns = resolve(found.return_annotation, fn, names)
        takers = [name for name, (_, annotation) in self._declared.items() if _is_call(annotation)]
        if len(takers) > 1:
            raise InvalidInput(f"{label}: parameters {takers[0]} and {takers[1]} are both annotated Call; one receives it")
        self.call_parameter: str | None = takers[0] if takers else None

    @property
    def names(self) -> list[str]:
        """The names of the arguments, in order, without the parameter that receives the Call."""
        return [name for name in self._declared if name != self.call_parameter]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(Parameter(self._label, *self._resolved(name)) for name in self.names)

    @cached_property
    def secrets(self) -> tuple[str, ...]:
        """The names of the parameters that take a secret."""
        return tuple(parameter.name for parameter in self.parameters if parameter.is_secret)

    @property
    def secrets_with_default(self) -> dict[str, bool]:
        """The parameters that take a secret; True: the parameter has a default."""
        return {name: self._by_name[name].default is not EMPTY for name in self.secrets}

    def secrets_in(self, encoded: bytes) -> frozenset[str]:
        """The names of the secrets in these recorded arguments."""
        if not self.secrets:
            return frozenset()
        plain = decode(encoded)
        # An argument that the recorded call does not have is the default of the parameter.
        given = (plain[name] if name in plain else self._by_name[name].coerce(self._by_name[name].default) for name in self.secrets)
        return frozenset(name for one in given if (name := name_in(one)) is not None)

    @cached_property
    def result_converter(self) -> Converter | None:
        """The converter for the result; None if the return annotation contains only JSON types."""
        returns = resolve(self._returns, self._fn, {})
        if isinstance(returns, str) or is_json(returns):
            return None
        from perdure.tool.convert import Converter, Unusable

        try:
            return Converter(returns)
        except Unusable:
            return None

    def result_misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value cannot be a result of the function; None if it fits the return annotation.

        Results of the function itself are recorded without this check, because the call has happened then.
        """
        returns = resolve(self._returns, self._fn, {})
        if isinstance(returns, str) or returns is EMPTY:
            return None
        from perdure.tool.convert import Converter, Unusable

        try:
            return Converter(returns).misfit(encoded)
        except Unusable:
            return None

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def _positional(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters if parameter.positional)

    @cached_property
    def _exact(self) -> tuple[tuple[str, frozenset[type] | None], ...]:
        return tuple((parameter.name, parameter.exact) for parameter in self.parameters)

    @cached_property
    def _by_place(self) -> int:
        """How many positional arguments give a value to all parameters; -1 if some parameters are keyword-only."""
        return len(self.parameters) if len(self._positional) == len(self.parameters) else -1

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Canonical JSON of all named arguments, with defaults. InvalidInput names the parameter that is wrong."""
        values = self._in_order(args, kwargs) if kwargs or len(args) != self._by_place else args
        bound = {}
        for (name, exact), value in zip(self._exact, values, strict=True):
            bound[name] = value if exact is None or type(value) in exact else self._by_name[name].coerce(value)
        try:
            return encode(bound)
        except NotEncodable as error:
            raise NotEncodable(f"{self._label}: {error}") from None

    def rebind(self, encoded: bytes) -> bytes:
        """`bind` for arguments that were recorded before. Only here, a reference in JSON becomes a Secret again."""
        return self.bind((), self.with_secrets(decode(encoded)))

    def with_secrets(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that `bind` has made of named values, with a Secret for each reference."""
        secrets = {name: Secret(found) for name in self.secrets if (found := name_in(bound.get(name))) is not None}
        return {**bound, **secrets}

    def misfits(self, given: Mapping[str, Any], later: Collection[str]) -> list[str]:
        """All problems with these named arguments. For the names in `later`, the values are not known yet."""
        found = [f"the argument {ascii(name)[1:-1]} is unknown; it takes {self._takes()}" for name in given if name not in self._by_name]
        for parameter in self.parameters:
            value = given.get(parameter.name, parameter.default)
            if value is EMPTY:
                found.append(f"the argument {parameter.name} is missing; it takes {self._takes()}")
            elif (
                parameter.name in given
                and parameter.name not in later
                and parameter.exact is not None
                and type(value) not in parameter.exact
            ):
                try:
                    parameter.coerce(value)
                except InvalidInput as error:
                    found.append(str(error).removeprefix(f"{self._label}, "))
        return [f"{self._label}: {problem}" for problem in found]

    def arguments(self, encoded: bytes) -> dict[str, Any]:
        """Keyword arguments for the function, typed by their annotations."""
        plain = decode(encoded)
        typed = {}
        for parameter in self.parameters:
            value = plain.pop(parameter.name, parameter.default)
            if value is EMPTY:
                raise parameter.refuse("the recorded call does not have it, and it has no default")
            exact = parameter.exact
            if parameter.is_secret and value is parameter.default:
                value = parameter.coerce(value)
            typed[parameter.name] = value if exact is None or type(value) in exact else parameter.rebuild(value)
        if plain:
            raise InvalidInput(f"{self._label}: the recorded call has {', '.join(map(ascii, plain))}, but it takes {self._takes()}")
        return typed

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """The value of each parameter, or its default.

        The values are yielded one by one, so that the error is about the first wrong parameter.
        """
        given = dict(zip(self._positional, args, strict=False))
        if kwargs or len(args) > len(given):
            self._add_named(given, args, kwargs)
        for parameter in self.parameters:
            value = given.get(parameter.name, parameter.default)
            if value is EMPTY:
                raise InvalidInput(f"{self._label}: the argument {parameter.name} is missing; it takes {self._takes()}")
            yield value

    def _add_named(self, given: dict[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(args) > len(given):
            raise InvalidInput(f"{self._label}: {len(args)} positional arguments given; it takes {self._takes()}")
        for name, value in kwargs.items():
            if name in given:
                raise InvalidInput(f"{self._label}: the argument {name} is given twice")
            if name not in self._by_name:
                hint = " is the Call, which perdure passes" if name == self.call_parameter else " is unknown"
                raise InvalidInput(f"{self._label}: the argument {ascii(name)[1:-1]}{hint}; it takes {self._takes()}")
            given[name] = value

    def _takes(self) -> str:
        return ", ".join(self.names) or "no arguments"

    def _resolved(self, name: str) -> tuple[inspect.Parameter, Any]:
        parameter, annotation = self._declared[name]
        annotation = resolve(annotation, self._fn, {})
        if isinstance(annotation, str):
            raise InvalidInput(
                f"{self._label}, parameter {name}: its annotation {annotation!r} means nothing in {self._fn.__module__}; define or import it there"
            )
        return parameter, annotation


def exact_types(annotation: Any) -> frozenset[type] | None:
    """The types whose values need no conversion. None: no value needs a conversion. Empty: every value needs one."""
    if any(annotation is anything for anything in _ANYTHING):
        return None
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    found = [_EXACT.get(member) if _hashable(member) else None for member in members]
    return frozenset(kind for kind in found if kind is not None) if None not in found else frozenset()


def is_json(annotation: Any) -> bool:
    """Are values of this annotation the same after they were converted to JSON and back?"""
    if exact_types(annotation) != frozenset() or _is_typed_dict(annotation):
        return True
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return all(type(member) in (str, int, bool, type(None)) for member in members)
    if origin is dict:
        return members[0] is str and is_json(members[1])
    return (origin is list or _is_union(annotation)) and all(is_json(member) for member in members)


def _check_kind(label: str, parameter: inspect.Parameter) -> None:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
            stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            raise InvalidInput(f"{label}: {stars}{parameter.name} has no name and no type to be recorded by; name each argument")
        case inspect.Parameter.POSITIONAL_ONLY:
            raise InvalidInput(f"{label}: {parameter.name} is positional-only, but arguments are recorded by name; remove the /")


def resolve(annotation: Any, fn: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """The annotation that a string means; the string itself if it has a name that is not known (yet)."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, inspect.unwrap(fn).__globals__, names)
    except Exception:  # an annotation is code: it can raise anything
        return annotation


def _is_call(annotation: Any) -> bool:
    if isinstance(annotation, str):
        # If Call is imported only under `if TYPE_CHECKING:`, the annotation can never be resolved: compare the text.
        return annotation.replace(" ", "").removesuffix("|None").rpartition(".")[2] == "Call"
    return annotation is Call or (_is_union(annotation) and set(typing.get_args(annotation)) == {Call, type(None)})


def _is_secret(annotation: Any) -> bool:
    return annotation is Secret or (_is_union(annotation) and set(typing.get_args(annotation)) == {Secret, type(None)})


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_typed_dict(annotation: Any) -> bool:
    # Rebuilding a TypedDict would drop undeclared keys. typing.is_typeddict is not used, because it does not recognise
    # a TypedDict of typing_extensions.
    return isinstance(annotation, type) and issubclass(annotation, dict) and hasattr(annotation, "__total__")


def _hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True
