"""Exceptions: each text names the problem, its location and the remedy."""

import importlib
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from types import ModuleType

from robopolicy.client.errors import ConfigError as ConfigError
from robopolicy.client.errors import NonFiniteError as NonFiniteError
from robopolicy.client.errors import RobopolicyError as RobopolicyError
from robopolicy.client.errors import RobopolicyWarning as RobopolicyWarning
from robopolicy.client.errors import ServingError as ServingError
from robopolicy.client.errors import SpecError as SpecError
from robopolicy.client.errors import did_you_mean as did_you_mean
from robopolicy.client.errors import in_one_line as in_one_line
from robopolicy.client.errors import nearest as nearest


class CameraError(ConfigError):
    """A world has no camera with this name; known: the cameras that it has."""

    def __init__(self, text: str, known: Iterable[str] = ()):
        super().__init__(text)
        self.known = tuple(known)


class ScoreError(RobopolicyError, RuntimeError):
    """A policy's recomputed log-probabilities differ from those at sampling time, so importance ratios do not start at
    1.
    """


class DataError(RobopolicyError):
    """A dataset is missing, incomplete or inconsistent."""


class CheckpointError(RobopolicyError):
    """A checkpoint is missing, corrupt or of a different kind than requested."""


class StorageError(RobopolicyError):
    """A file could not be written (disk full, folder not writable)."""


class RobopolicyNote(RobopolicyWarning):
    """Note about an event that may be intended, such as exploration beyond the action bounds."""


def in_a_sentence(error: BaseException) -> str:
    """Return the user-facing text of an error: robopolicy's, the operating system's, or out of memory; "" for any
    other.
    """
    if isinstance(error, RobopolicyError):
        return str(error)
    if isinstance(error, OSError):
        places = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{places}: {error.strerror}." if places and error.strerror else f"{in_one_line(error)}."
    if isinstance(error, RecursionError):
        return f"A file or a setting is nested too deeply ({in_one_line(error, 80)})."
    text = str(error).lower()
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    ):
        return (
            f"Out of memory ({in_one_line(error, 200)}). Reduce sizes such as world.batch_size or the command's "
            "batch_size, or stop other processes."
        )
    return ""


def is_interruption(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, directly or wrapped by a library that it passed through."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or (type(error).__module__ == "ctypes" and INTERRUPT in str(error)):
            return True
        error = error.__cause__
    return False


INTERRUPT = "KeyboardInterrupt"
"""Name that ctypes gives to the interrupting error in its own error, which has no cause."""


def as_setting(name: str, pairs: Mapping[str, str]) -> str:
    """Return a setting with a mapping as its value, quoted for the shell and the command line."""

    def key(text: str) -> str:
        return re.sub(r"([\\\[\](){}:=,'\"])", r"\\\1", text)

    def value(text: str) -> str:
        return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", r"\'") + "'"

    return f'"{name}={{' + ", ".join(f"{key(column)}: {value(other)}" for column, other in pairs.items()) + '}"'


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; raise a `ConfigError` that names the pip extra if the import fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        not_found = isinstance(error, ModuleNotFoundError)
        if not not_found or error.name is None or not (module + ".").startswith(error.name + "."):
            raise ConfigError(
                f"'{module}' is installed but cannot be imported ({in_one_line(error, 120)}). Install it with its "
                f"dependencies: pip install 'robopolicy[{extra}]'"
            ) from error
        raise ConfigError(f"'{module}' is not installed. Install it with: pip install 'robopolicy[{extra}]'") from error


def extra_conflict(extra: str) -> str:
    """Return a sentence on the first installed package whose version the pip extra does not allow; "" if all fit."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("robopolicy") or ():
        requirement = Requirement(text)
        if (
            requirement.marker is None
            or not requirement.marker.evaluate({"extra": extra})
            or requirement.marker.evaluate()
        ):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            return (
                f" {requirement.name} {version} is installed, and {extra} works with "
                f"{requirement.name}{requirement.specifier}: pip install 'robopolicy[{extra}]', in an environment of "
                f"its own where another package needs that version."
            )
    return ""
