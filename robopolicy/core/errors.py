"""Errors that say what is wrong, where, and the way out."""

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from types import ModuleType


class RobopolicyError(Exception):
    """Base of every error this project raises on purpose; the command line prints its text without a traceback."""


class ConfigError(RobopolicyError):
    """A configuration names something unknown or contradicts itself."""


class CameraError(ConfigError):
    """A world has no camera of this name; known: those that it has."""

    def __init__(self, text: str, known: Iterable[str] = ()):
        super().__init__(text)
        self.known = tuple(known)


class ScoreError(RobopolicyError, RuntimeError):
    """A policy scores its own decisions differently from when it took them, so ratios do not begin at 1."""


class SpecError(RobopolicyError):
    """An observation or action does not have the keys, shape or dtype that a spec promises."""


class DataError(RobopolicyError):
    """A dataset is missing, incomplete or inconsistent."""


class CheckpointError(RobopolicyError):
    """A checkpoint is missing, corrupt or of another kind than asked for."""


class NonFiniteError(RobopolicyError):
    """A NaN or infinity appeared; the text names the quantity and the rows."""


class StorageError(RobopolicyError):
    """A file could not be written (disk full, folder not writable)."""


class ServingError(RobopolicyError):
    """A server could not start or a client could not reach it."""


class RobopolicyWarning(UserWarning):
    """Something that a figure's reader must know; the command line prints its text."""


class RobopolicyNote(RobopolicyWarning):
    """Something that happened and may well be meant, such as exploration beyond an action's bounds."""


def in_one_line(value: object, length: int = 300) -> str:
    """Return `value` as one line of at most so many characters; an error's text, with its type where that is needed."""
    try:
        text = " ".join(str(value).split())
    except RecursionError:
        text = f"a {type(value).__name__} nested without end"
    if isinstance(value, Exception) and not isinstance(value, RobopolicyError | RuntimeError):
        text = f"{type(value).__name__}: {text}"
    return (text if len(text) <= length else f"{text[:length]} ...").removesuffix(".")


def in_a_sentence(error: BaseException) -> str:
    """Return what the user is told of an error: ours, the system's, or that memory ran out; "" of any other one."""
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
            f"This takes more memory than there is ({in_one_line(error, 200)}). Choose smaller sizes, such as "
            "world.batch_size or the verb's batch_size, or end what else runs here."
        )
    return ""


def is_interruption(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or made of one by a library that it came through."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or (type(error).__module__ == "ctypes" and INTERRUPT in str(error)):
            return True
        error = error.__cause__
    return False


INTERRUPT = "KeyboardInterrupt"
"""How ctypes names the error that a call ended with, in an error of its own without a cause."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the one of `choices` that is most like `name`, "" where none is near."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)), "")


MANY = 40
"""Names of which a list helps nobody."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest of `choices`, else the list of them, of many the most alike."""
    known = sorted({str(choice) for choice in choices})
    near = nearest(name, known)
    if near:
        return f" Did you mean '{near}'?"
    if len(known) > MANY:
        alike = difflib.get_close_matches(name, known, n=5, cutoff=0.0)
        return f" Of {len(known)} names the most alike: {', '.join(alike)}."
    return f" Known: {', '.join(known)}." if known else ""


def as_setting(name: str, pairs: Mapping[str, str]) -> str:
    """Return a setting whose value is a mapping, quoted as a shell and the command line take it."""

    def key(text: str) -> str:
        return re.sub(r"([\\\[\](){}:=,'\"])", r"\\\1", text)

    def value(text: str) -> str:
        return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", r"\'") + "'"

    return f'"{name}={{' + ", ".join(f"{key(own)}: {value(other)}" for own, other in pairs.items()) + '}"'


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; where that fails, raise a `ConfigError` that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        if not missing or error.name is None or not (module + ".").startswith(error.name + "."):
            raise ConfigError(
                f"'{module}' is installed, but cannot be imported ({in_one_line(error, 120)}). Install it with what it "
                f"needs: pip install 'robopolicy[{extra}]'"
            ) from error
        raise ConfigError(f"'{module}' is not installed. Install it with: pip install 'robopolicy[{extra}]'") from error
