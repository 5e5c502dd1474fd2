"""Convert frozen configuration dataclasses to plain values and strictly back."""

import ast
import inspect
import textwrap
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import ConfigError, did_you_mean, in_one_line
from robopolicy.core.former_names import with_present_arguments
from robopolicy.core.ranges import LARGEST
from robopolicy.core.registry import Kinds

SINCE = "0.2.0"
"""Version of robopolicy in which the settings of `fixed` became constants."""

REGISTRY = "registry"
"""Metadata key of a field that contains a name: import path of the `Registry` whose names the help lists."""


@dataclass(frozen=True)
class Tagged:
    """Section with one of several kinds: `kind` is a key of `kinds`, `config` is the configuration of that kind.

    beside: whether the kind's keys are at the same level as `kind` instead of inside `config`.
    """

    kinds: ClassVar[Kinds]
    beside: ClassVar[bool] = False

    kind: str
    config: Any


def to_plain(value: Any) -> Any:
    """Return `value` JSON-ready: dataclasses as dictionaries, enums and paths as strings, tuples as lists."""
    if isinstance(value, Tagged) and value.beside:
        return {"kind": value.kind, **to_plain(value.config)}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if is_mapping(value):
        return {str(key): to_plain(item) for key, item in value.items()}
    if is_sequence(value):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def from_plain[Structure](kind: type[Structure], data: object, where: str = "") -> Structure:
    """Build the dataclass `kind` from plain values; missing keys take the defaults, including defaults that the
    enclosing section overrides.

    Raises ConfigError on an unknown key (with the nearest name), a missing one, or a value of the wrong type or outside
    of the range that its type declares (`core.ranges`), naming the full path of the key. Old names of `renamed`
    settings are accepted, and `fixed` ones with their value; a `Tagged` section may be its kind alone. `where`: path of
    this section.
    """
    if issubclass(kind, Tagged) and isinstance(data, str):
        data = {"kind": data}
    if not is_mapping(data):
        raise ConfigError(f"'{where}' must be a mapping of settings, got {data!r}.")
    if issubclass(kind, Tagged):
        data = _of_kind(kind, data, where)
    data = current(kind, data, where)
    items = {item.name: item for item in fields(cast(Any, kind)) if item.init}
    for key in data:
        if key not in items:
            place = f" in '{where}'" if where else ""
            raise ConfigError(
                f"Unknown configuration key '{_join(where, str(key))}'{place}.{did_you_mean(str(key), items)}"
            )
    hints = typing.get_type_hints(kind, include_extras=True)
    plain_values = {key: _over_default(items[key], data[key], _join(where, key)) for key in items if key in data}
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in plain_values.items()}
    for key, item in items.items():
        if key not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"'{_join(where, key)}' is required: add {_join(where, key)}=VALUE.")
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"In section '{where or kind.__name__}': {error}") from error


def narrowed[Structure](kind: type[Structure], value: Any) -> Structure:
    """Convert `value`, an instance of a subclass with more fields, to its base class `kind`."""
    return kind(**{item.name: getattr(value, item.name) for item in fields(cast(Any, kind)) if item.init})


def fixed(kind: type) -> dict[str, Any]:
    """Return the former settings of a dataclass that are constants now, name -> value.

    A dataclass defines them in a class variable FIXED, for itself and its subclasses, because saved configurations and
    recipes of earlier versions still contain such keys.
    """
    return {name: to_plain(value) for name, value in _of_classes(kind, "FIXED").items()}


def renamed(kind: type) -> dict[str, str]:
    """Return the former names of a dataclass's settings, old name -> new name.

    A dataclass defines them in a class variable RENAMED, for itself and its subclasses. Old names work for one release.
    """
    return _of_classes(kind, "RENAMED")


@cache
def _enumerations(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's settings whose values are members of an enumeration, by setting."""
    hints = typing.get_type_hints(kind)
    return {
        item.name: hints[item.name]
        for item in fields(cast(Any, kind))
        if any(isinstance(each, type) and issubclass(each, Enum) for each in _alternatives(hints[item.name]))
    }


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


class _AcceptsFormerNames(type):
    """Class of classes whose constructor accepts former names of settings, and enumerations by their texts."""

    if not TYPE_CHECKING:  # a checker reads the constructor of each dataclass, which has the present names only

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            kwargs = with_present_arguments(cls.__name__, renamed(cls), kwargs)
            for name, hint in _enumerations(cls).items():
                if isinstance(kwargs.get(name), str):
                    kwargs[name] = _convert(hint, kwargs[name], f"{cls.__name__}.{name}")
            return super().__call__(*args, **kwargs)

        @property
        def __signature__(cls) -> inspect.Signature:
            whole = inspect.signature(cls.__init__)
            return whole.replace(parameters=[*whole.parameters.values()][1:], return_annotation=inspect.Signature.empty)


class FormerNames(metaclass=_AcceptsFormerNames):
    """Base of dataclasses of settings: former names of settings (see `renamed`) work for one release, as arguments of
    the constructor and as attributes, each with a DeprecationWarning. Arguments may be the texts of enumerations, as in
    recipes: denoiser="unet"; another text raises ConfigError.
    """

    def __getattr__(self, name: str) -> Any:
        names = renamed(type(self))
        if name not in names:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        warnings.warn(f"{type(self).__name__}.{name} is now {names[name]}.", DeprecationWarning, stacklevel=2)
        return getattr(self, names[name])


def renamed_values(kind: type) -> dict[str, Mapping[str, str]]:
    """Return the former values of a dataclass's settings, setting -> {old value: new value}, from RENAMED_VALUES."""
    return _of_classes(kind, "RENAMED_VALUES")


def _of_classes(kind: type, variable: str) -> dict[str, Any]:
    """Return the merged entries of a class variable, a mapping, of a class and its base classes."""
    return {key: value for each in reversed(kind.__mro__) for key, value in vars(each).get(variable, {}).items()}


def current(kind: type, data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return plain settings of `kind` under their current names and values, without the `fixed` ones; nested sections
    are left as they are.

    Raises ConfigError when a setting is given under both its old and its new name with different values, and when a
    fixed setting has another value.
    """
    data = with_current_names(kind, data, where)
    constants = fixed(kind)
    for key in constants.keys() & data.keys():
        if data[key] != constants[key]:
            raise ConfigError(
                f"'{_join(where, key)}' is {in_one_line(data[key], 60)}: it is fixed at {constants[key]} since "
                f"{SINCE}; for another value use an earlier version."
            )
    return {key: value for key, value in data.items() if key not in constants}


def with_current_names(kind: type, data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return plain settings of `kind` under their current names and values; raises ConfigError as `current` does."""
    names, values = renamed(kind), renamed_values(kind)
    settings: dict[str, Any] = {}
    for key, value in data.items():
        name = names.get(key, key)
        if isinstance(value, str):
            value = values.get(name, {}).get(value, value)
        if name in settings and settings[name] != value:
            old = next(each for each in data if names.get(each) == name)
            values_text = " and ".join(in_one_line(each, 40) for each in (settings[name], value))
            raise ConfigError(
                f"'{_join(where, old)}' is now '{_join(where, name)}', and both are given ({values_text}): keep one of "
                f"them."
            )
        settings[name] = value
    return settings


def explanations(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields by name, including inherited fields.

    A string directly below a field is its docstring, as in documentation tools.
    """
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]).body
        for above, below in pairwise(body):
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(above.target, ast.Name):
                texts[above.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def choices(kind: Any) -> tuple[str, ...]:
    """Return the allowed values of a field of this type if they are a few names, else ()."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(item.value) for item in kind)
    if typing.get_origin(kind) is typing.Literal:
        return tuple(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return tuple(name for part in typing.get_args(kind) for name in choices(part))
    return ()


def _over_default(item: Field[Any], value: Any, where: str) -> Any:
    """Return the plain value of a section, with missing keys filled in from the field's default."""
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    return _over(default, value, where)


def _over(default: Any, value: Any, where: str) -> Any:
    if not is_dataclass(default) or isinstance(default, type | Tagged) or not is_mapping(value):
        return value
    defaults = {item.name: getattr(default, item.name) for item in fields(default)}
    plain = with_current_names(type(default), value, where)
    return {
        **to_plain(default),
        **{key: _over(defaults.get(key), item, _join(where, key)) for key, item in plain.items()},
    }


def _of_kind(section: type[Tagged], data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the plain values of a tagged section, with `config` as the dataclass of the chosen kind."""
    name = str(data.get("kind", section.kind))
    kind, path = section.kinds.configuration(name), where if section.beside else _join(where, "config")
    without_kind = {key: value for key, value in data.items() if key != "kind"}
    config_data: Any = without_kind if section.beside else data.get("config", {})
    config_keys = {item.name for item in fields(kind) if item.init}
    if not is_mapping(config_data):
        raise ConfigError(f"'{path}' must be a mapping of settings, got {config_data!r}.")
    config_data = current(kind, config_data, path)
    for key in config_data:
        kinds_with_key = [
            other
            for other in section.kinds.ours
            if key in {item.name for item in fields(section.kinds.configuration(other))}
        ]
        if key not in config_keys:
            has = (
                f" Set {where}.kind={kinds_with_key[0]}, which has it."
                if kinds_with_key
                else did_you_mean(f"{path}.{key}", [f"{path}.{name}" for name in config_keys])
            )
            raise ConfigError(f"Unknown configuration key '{path}.{key}': {where}.kind={name} has no '{key}'.{has}")
    tag = {"kind": name} if "kind" in config_keys else {}
    other_keys: Mapping[str, Any] = {} if section.beside else data
    return {**other_keys, "kind": name, "config": from_plain(kind, {**config_data, **tag}, path)}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        return _within(arguments[1:], _convert(arguments[0], value, where), where)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if value is None:
        raise ConfigError(f"'{where}' needs a value of type {_name(hint)}, not null.")
    if is_dataclass(hint):
        return from_plain(cast(type[Any], hint), value, where)
    if origin is tuple or origin is list:
        return _convert_sequence(origin, arguments, value, where)
    if origin in (dict, Mapping, types.MappingProxyType) or hint in (dict, Mapping):
        if not is_mapping(value):
            raise ConfigError(f"'{where}' must be a mapping, not {value!r}.")
        item = arguments[1] if arguments else Any
        return {str(key): _convert(item, element, _join(where, str(key))) for key, element in value.items()}
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"'{where}' is {value!r}.{did_you_mean(str(value), map(str, arguments))}")
        return value
    return _convert_scalar(hint, value, where)


def _within(ranges: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return `value`; raises ConfigError if it lies outside one of `ranges`."""
    for each in ranges:
        if problem := each.wrong(value):
            text = f"{value:g}" if isinstance(value, float) else to_plain(value)
            raise ConfigError(f"{where} is {text}: {problem}.")
    return value


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [item for item in arguments if item is not type(None)]
    errors: list[ConfigError] = []
    for choice in choices:
        try:
            return _convert(choice, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[-1 if is_sequence(value) else 0]


def _convert_sequence(origin: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if not is_sequence(value):
        raise ConfigError(f"'{where}' must be a list, not {value!r}: write {where}=[A,B].")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise ConfigError(f"'{where}' needs {len(arguments)} values, got {len(value)}.")
        hints = arguments
    else:
        hints = (arguments[0] if arguments else Any,) * len(value)
    pairs = enumerate(zip(hints, value, strict=True))
    items = [_convert(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs]
    return tuple(items) if origin is tuple else items


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = [member.value for member in hint]
        if isinstance(value, hint):
            return value
        if value not in members:
            raise ConfigError(f"'{where}' cannot be {value!r}.{did_you_mean(str(value), map(str, members))}")
        return hint(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint is Path:
        raise ConfigError(f"'{where}' must be one path, not {in_one_line(value, 60)}.")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) < _LARGEST_FLOAT:
            raise ConfigError(f"{where} is {in_one_line(value, 60)}: it must be a finite number.")
        return float(value)
    if hint is int and isinstance(value, int | float) and abs(value) > LARGEST:
        raise ConfigError(f"{where} is {in_one_line(value, 60)}: it must be an integer of at most {LARGEST}.")
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"'{where}' needs a value of type {_name(hint)}, got {value!r}.")


_LARGEST_FLOAT = 1e300


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
