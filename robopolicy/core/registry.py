"""Names of what has kinds (worlds, policies, world models, mechanisms): where each is found, imported when used.

A kind is one line, name -> "package.module:Name". Strangers add theirs without a change here: under an entry point of
their own package, or by writing the dotted path where a name is asked for.
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

_asked_for: set[str] = set()
"""Dotted paths that the user has named in this process; a checkpoint may then bring them up again."""


def add_working_folder() -> None:
    """Let imports find modules in the working folder, as they do under `python -m`."""
    folder = os.getcwd()  # noqa: PTH109 (sys.path holds text)
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def is_dotted(name: str) -> bool:
    """Whether `name` is a dotted path, "package.module:Name", not the name of something registered."""
    module, colon, attribute = name.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    return bool(colon) and all(part.isidentifier() for part in parts)


def load_dotted(path: str, what: str) -> Any:
    """Return the object at `path`, "package.module:Name"; `what` says in errors what it is for.

    Raises ConfigError on a malformed path, a module that cannot be imported, or a name that it lacks.
    """
    if not is_dotted(path):
        raise ConfigError(f"{what} '{path}' is not a dotted path: write package.module:name.")
    module_name, _, name = path.partition(":")
    found: Any = import_named(module_name, f"{what} '{path}'")
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(f"{what} '{path}': the module has no '{name}'.{did_you_mean(name, public)}")
        found = getattr(found, part)
    return found


def import_named(module: str, named: str) -> ModuleType:
    """Return a module that the user named, installed or in the working folder; `named` begins the errors.

    Raises ConfigError where it is missing, needs another one that is, or raises.
    """
    add_working_folder()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{named}: module '{module}' needs another one: {error}. Install that.") from error
        raise ConfigError(
            f"{named}: there is no module '{error.name}'. It must be installed, or lie in the working folder "
            f"({os.getcwd()})."  # noqa: PTH109
        ) from error
    except Exception as error:
        raise ConfigError(f"{named}: importing '{module}' raised {type(error).__name__}: {error}") from error


def fixed_arguments(make: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments of a class or function by name, without *args and **kwargs, and whether each is required."""
    parameters = inspect.signature(make).parameters.values()
    fixed = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    return {item.name: item.default is item.empty for item in fixed}


def require_types(make: Callable[..., Any], options: Mapping[str, Any], setting: str = "") -> None:
    """Raise ConfigError on an option whose value is not of the type that the argument of `make` is annotated with.

    setting: the section of the command line that the options are set in, such as "world.options." Annotations other
    than truths, numbers, texts, lists of texts and None are not looked at: `make` knows better.
    """
    hints = typing.get_type_hints(make.__init__ if isinstance(make, type) else make)
    for name, value in options.items():
        kinds = _alternatives(hints.get(name, Any))
        if all(kind in _TYPES for kind in kinds) and not any(_TYPES[kind][1](value) for kind in kinds):
            wanted = " or ".join(_TYPES[kind][0] for kind in kinds)
            raise ConfigError(f"{setting}{name} is {value!r}, which is not {wanted}.")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, int) and value in (0, 1)),
    int: ("a whole number", lambda value: not isinstance(value, bool) and isinstance(value, Integral)),
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
"""Types of options: in words, and whether a value is of them."""


def ask_for(paths: Iterable[str]) -> None:
    """Import what the user names, modules or dotted paths; checkpoints that need it can then be loaded.

    Raises ConfigError.
    """
    for path in paths:
        load_dotted(path, "Plugin") if ":" in path else load_dotted(f"{path}:__name__", "Plugin")
        note(path)


def note(path: str) -> None:
    """Remember that the user has named a module or dotted path, so that a checkpoint may bring it up again."""
    _asked_for.add(path)


def asked_for(path: str) -> bool:
    """Whether the user has named this dotted path, or the module that it is in, in this process."""
    return path in _asked_for or path.partition(":")[0] in _asked_for


class Registry:
    """The kinds of one thing.

    what: in words for errors, e.g. "world model"; group: the entry points that add to it; known: name ->
    "package.module:Name" of those that ship with us.
    """

    def __init__(self, what: str, group: str, known: Mapping[str, str]):
        self.what = what
        self.group = group
        self._known = dict(known)

    @cached_property
    def _installed(self) -> dict[str, str]:
        """Return what other installed packages add; a name of ours is never replaced."""
        if not self.group:
            return {}
        found = {point.name: point.value for point in importlib.metadata.entry_points(group=self.group)}
        return {name: path for name, path in found.items() if name not in self._known}

    def names(self) -> tuple[str, ...]:
        """Return every registered name, ours first; nothing is imported."""
        return (*self._known, *sorted(self._installed))

    @property
    def ours(self) -> tuple[str, ...]:
        """The names that ship with us."""
        return tuple(self._known)

    def paths(self) -> dict[str, str]:
        """Return name -> dotted path of everything registered."""
        return {**self._installed, **self._known}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self._known or name in self._installed

    def path(self, name: str) -> str:
        """Return the dotted path behind `name`; a dotted path is its own. Raises ConfigError with the nearest name."""
        found = self._known.get(name) or self._installed.get(name)
        if found is None and not is_dotted(name):
            raise ConfigError(
                f"There is no {self.what} '{name}'.{did_you_mean(name, self.names())} "
                f"There are {', '.join(self.names())}; your own is named by its dotted path, package.module:Name."
            )
        return found or name

    def load(self, name: str) -> Any:
        """Import and return what `name` (or a dotted path) stands for. Raises ConfigError."""
        path = self.path(name)
        found = load_dotted(path, self.what.capitalize())
        note(path)
        return found

    def load_saved(self, name: str, where: Any) -> Any:
        """Return what a checkpoint at `where` names; raises CheckpointError as `require_saved`, and ConfigError."""
        self.require_saved(name, where)
        return self.load(name)

    def require_saved(self, name: str, where: Any) -> None:
        """Raise CheckpointError, saying what is needed, unless `name`, which a checkpoint at `where` says, is ours,
        installed, or asked for by the user in this process: files do not choose what is imported. Nothing is imported.
        """
        if name in self or asked_for(name):
            return
        if is_dotted(name):
            raise CheckpointError(
                f"{where} needs the {self.what} '{name}', which is not part of robopolicy. If you trust it, name its "
                f"module: run.plugins=[{name.partition(':')[0]}] (in Python: robopolicy.core.registry.ask_for)."
            )
        raise CheckpointError(
            f"{where} holds {name!r:.80}, not a {self.what} that is known here.{did_you_mean(name, self.names())}"
        )

    def name_of(self, kind: type) -> str:
        """Return the name under which `kind` is found again: a registered one, else its dotted path."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, known in self.paths().items() if known == path), path)


class Kinds(Registry):
    """A registry of what is built from a configuration: policies, world models.

    Registered is the configuration, a dataclass that imports nothing heavy and says in `builds` what it belongs to
    ("package.module:Class"); a stranger may register the class itself, with its dataclass as `configuration`.
    """

    def configuration(self, name: str) -> type:
        """Return the dataclass of what can be set about kind `name`; raises ConfigError where there is none."""
        found = self.load(name)
        config = found if _is_configuration(found) else getattr(found, "configuration", None)
        if not (isinstance(config, type) and is_dataclass(config)):
            raise ConfigError(
                f"The {self.what} '{name}' has no configuration: give its class an attribute `configuration`, a "
                "dataclass of what can be set about it, or a dataclass an attribute `builds`, its class's dotted path."
            )
        return config

    def builds(self, name: str) -> Any:
        """Return the class that kind `name` is built with, importing all it needs. Raises ConfigError."""
        return self._class_of(self.load(name))

    def saved(self, name: str, where: Any) -> Any:
        """Return the class of what a checkpoint at `where` holds; see `load_saved`."""
        return self._class_of(self.load_saved(name, where))

    def name_of(self, kind: type) -> str:
        """Return the name under which class `kind` is found again: a registered one, else its dotted path."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        for name, known in self.paths().items():
            if known == path or (name in self.ours and getattr(self.load(name), "builds", "") == path):
                return name
        return path

    def _class_of(self, found: Any) -> Any:
        return load_dotted(found.builds, self.what.capitalize()) if _is_configuration(found) else found


def _is_configuration(found: Any) -> bool:
    return isinstance(found, type) and is_dataclass(found) and hasattr(found, "builds")
