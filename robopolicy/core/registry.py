"""Registries of kinds (worlds, policies, world models, mechanisms): name -> import path, imported on use.

A kind is one line, name -> "package.module:Name". Other packages add theirs without a change here: through an entry
point, or by passing an import path in place of a name.
"""

import importlib
import importlib.metadata
import inspect
import math
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property
from numbers import Integral, Real
from types import ModuleType, UnionType
from typing import Any

from robopolicy.core.errors import CheckpointError, ConfigError, did_you_mean
from robopolicy.core.former_names import keep_former_names

_asked_for: set[str] = set()
"""Import paths that the user has named in this process, which checkpoints may load."""
_plugins: dict[str, None] = {}
"""Plugins that the user has named in this process, in order: they are imported in workers too."""


def add_working_folder() -> None:
    """Make modules in the working folder importable, as with `python -m`."""
    folder = os.getcwd()  # noqa: PTH109 (sys.path holds text)
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def is_dotted(name: str) -> bool:
    """Whether `name` is an import path, "package.module:Name", rather than a registered name."""
    module, colon, attribute = name.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    return bool(colon) and all(part.isidentifier() for part in parts)


def load_dotted(path: str, what: str) -> Any:
    """Import the object at `path`, "package.module:Name"; `what` describes its purpose in errors.

    Raises ConfigError on a malformed path, a module that cannot be imported, or a missing name.
    """
    if not is_dotted(path):
        raise ConfigError(f"{what} '{path}' is not an import path: write package.module:name.")
    module_name, _, name = path.partition(":")
    target: Any = import_named(module_name, f"{what} '{path}'")
    for part in name.split("."):
        if not hasattr(target, part):
            public = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            raise ConfigError(f"{what} '{path}': the module has no '{name}'.{did_you_mean(name, public)}")
        target = getattr(target, part)
    return target


def import_named(module: str, named: str) -> ModuleType:
    """Import a module named by the user, installed or in the working folder; `named` is the prefix of error messages.

    Raises ConfigError when it is missing, lacks a dependency, or raises on import.
    """
    add_working_folder()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{named}: the module '{module}' needs another module: {error}. Install that.") from error
        raise ConfigError(
            f"{named}: there is no module '{error.name}'. Install it, or put it into the working directory "
            f"({os.getcwd()})."  # noqa: PTH109
        ) from error
    except Exception as error:
        raise ConfigError(f"{named}: importing '{module}' raised {type(error).__name__}: {error}") from error


def named_arguments(make: Callable[..., Any]) -> dict[str, bool]:
    """Return name -> whether required for the arguments of a class or function, without *args and **kwargs."""
    parameters = inspect.signature(make).parameters.values()
    named_parameters = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    return {item.name: item.default is item.empty for item in named_parameters}


def require_types(make: Callable[..., Any], options: Mapping[str, Any], setting: str = "") -> None:
    """Raise ConfigError if an option's value does not have the annotated type of the argument of `make`.

    setting: command-line section of the options, such as "world.options." Annotations other than bool, number, string,
    list of strings and None are not checked here but by `make`.
    """
    hints = typing.get_type_hints(make.__init__ if isinstance(make, type) else make)
    for name, value in options.items():
        kinds = _alternatives(hints.get(name, Any))
        if all(kind in _TYPES for kind in kinds) and not any(_TYPES[kind][1](value) for kind in kinds):
            expected = " or ".join(_TYPES[kind][0] for kind in kinds)
            raise ConfigError(f"{setting}{name} is {value!r}, which is not {expected}.")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, int) and value in (0, 1)),
    int: ("an integer", lambda value: not isinstance(value, bool) and isinstance(value, Integral)),
    float: (
        "a number",
        lambda value: not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value),
    ),
    str: ("a text", lambda value: isinstance(value, str)),
    Sequence[str]: (
        "a list of names",
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
    ),
    type(None): ("null", lambda value: value is None),
}
"""Option type -> its description and a check of values."""


def import_plugins(paths: Iterable[str]) -> None:
    """Import modules or import paths named by the user, so that checkpoints that need them can be loaded.

    Raises ConfigError when an import fails.
    """
    for path in paths:
        load_dotted(path, "Plugin") if ":" in path else load_dotted(f"{path}:__name__", "Plugin")
        trust_path(path)
        _plugins[path] = None


def trust_path(path: str) -> None:
    """Mark a module or import path as trusted because the user named it, so that a checkpoint may load it."""
    _asked_for.add(path)


def trusted_names() -> dict[str, list[str]]:
    """Return the modules that the user has named in this process, for `trust` in a worker."""
    return {"plugins": list(_plugins), "named": sorted(_asked_for)}


def trust(named: Mapping[str, Iterable[str]]) -> None:
    """Trust what the user has named in another process (`trusted_names`): import its plugins, mark the other paths."""
    import_plugins(path for path in named["plugins"] if path not in _plugins)
    _asked_for.update(named["named"])


def is_trusted(path: str) -> bool:
    """Whether the user has named this import path, or its module, in this process."""
    return path in _asked_for or path.partition(":")[0] in _asked_for


class Registry:
    """Registry of the implementations of one concept.

    what: name for errors, e.g. "world model"; group: entry-point group for extensions; known: name ->
    "package.module:Name" of the built-in ones.
    """

    def __init__(self, what: str, group: str, known: Mapping[str, str]):
        self.what = what
        self.group = group
        self._known = dict(known)

    @cached_property
    def _installed(self) -> dict[str, str]:
        """Return the entries of other installed packages; built-in names are never replaced."""
        if not self.group:
            return {}
        paths = {point.name: point.value for point in importlib.metadata.entry_points(group=self.group)}
        return {name: path for name, path in paths.items() if name not in self._known}

    def names(self) -> tuple[str, ...]:
        """Return every registered name, built-in ones first; nothing is imported."""
        return (*self._known, *sorted(self._installed))

    @property
    def ours(self) -> tuple[str, ...]:
        """Names of the built-in entries."""
        return tuple(self._known)

    def paths(self) -> dict[str, str]:
        """Return name -> import path of all entries."""
        return {**self._installed, **self._known}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self._known or name in self._installed

    def path(self, name: str) -> str:
        """Return the import path of `name`; an import path is returned unchanged. Raises ConfigError with the most
        similar name.
        """
        path = self._known.get(name) or self._installed.get(name)
        if path is None and not is_dotted(name):
            raise ConfigError(
                f"There is no {self.what} '{name}'.{did_you_mean(name, self.names())} For a custom one pass its import "
                "path, package.module:Name."
            )
        return path or name

    def load(self, name: str) -> Any:
        """Import and return the object for `name` (or an import path). Raises ConfigError."""
        path = self.path(name)
        target = load_dotted(path, self.what.capitalize())
        trust_path(path)
        return target

    def load_saved(self, name: str, where: Any) -> Any:
        """Return the object that a checkpoint at `where` names; raises CheckpointError as `require_saved`, and
        ConfigError.
        """
        self.require_saved(name, where)
        return self.load(name)

    def require_saved(self, name: str, where: Any) -> None:
        """Raise CheckpointError unless `name`, read from a checkpoint at `where`, is built in, installed, or was named
        by the user in this process: files must not choose imports. Nothing is imported.
        """
        if name in self or is_trusted(name):
            return
        if is_dotted(name):
            raise CheckpointError(
                f"{where} needs the {self.what} '{name}', which is not part of robopolicy. If you trust it, allow "
                f"its module: run.plugins=[{name.partition(':')[0]}] (in Python: "
                f"robopolicy.core.registry.import_plugins)."
            )
        raise CheckpointError(
            f"{where} contains {name!r:.80}, which is not a known {self.what}.{did_you_mean(name, self.names())}"
        )

    def name_of(self, kind: type) -> str:
        """Return the registered name of `kind`, else its import path."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, known_path in self.paths().items() if known_path == path), path)


class Kinds(Registry):
    """Registry of classes that are built from a configuration: policies, world models.

    Each entry is the configuration, a dataclass without heavy imports whose `builds` is the import path of its class
    ("package.module:Class"). Other packages may instead register the class, with its dataclass as `configuration`.
    """

    def configuration(self, name: str) -> type:
        """Return the configuration dataclass of kind `name`; raises ConfigError if it has none."""
        target = self.load(name)
        config = target if _is_configuration(target) else getattr(target, "configuration", None)
        if not (isinstance(config, type) and is_dataclass(config)):
            raise ConfigError(
                f"The {self.what} '{name}' has no configuration: add to its class an attribute `configuration` (the "
                "dataclass of its settings), or to that dataclass an attribute `builds` (the import path of the "
                "class)."
            )
        return config

    def builds(self, name: str) -> Any:
        """Return the class of kind `name`, importing all it needs. Raises ConfigError."""
        return self._class_of(self.load(name))

    def saved(self, name: str, where: Any) -> Any:
        """Return the class needed by a checkpoint at `where`; see `load_saved`."""
        return self._class_of(self.load_saved(name, where))

    def name_of(self, kind: type) -> str:
        """Return the registered name of class `kind`, else its import path."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        for name, known_path in self.paths().items():
            if known_path == path or (name in self.ours and getattr(self.load(name), "builds", "") == path):
                return name
        return path

    def _class_of(self, found: Any) -> Any:
        return load_dotted(found.builds, self.what.capitalize()) if _is_configuration(found) else found


def _is_configuration(found: Any) -> bool:
    return isinstance(found, type) and is_dataclass(found) and hasattr(found, "builds")


keep_former_names(
    __name__,
    {
        "ask_for": "import_plugins",
        "note": "trust_path",
        "trusted": "trusted_names",
        "asked_for": "is_trusted",
        "fixed_arguments": "named_arguments",
    },
)
