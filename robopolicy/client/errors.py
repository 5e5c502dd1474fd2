"""Exceptions of the robot's side and the helpers that write their texts; `core.errors` adds those of the suite."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RobopolicyError(Exception):
    """Base class of every error that this project raises on purpose; the command line prints its text without a
    traceback.
    """


class ConfigError(RobopolicyError):
    """A configuration names something unknown or contradicts itself."""


class SpecError(RobopolicyError):
    """An observation or action does not have the keys, shape or dtype that a spec promises."""


class NonFiniteError(RobopolicyError):
    """A NaN or infinity appeared; the text names the quantity and the rows."""


class ServingError(RobopolicyError):
    """A server could not start or a client could not reach it."""


class RobopolicyWarning(UserWarning):
    """Warning that affects the interpretation of a result; the command line prints its text."""


def in_one_line(value: object, length: int = 300) -> str:
    """Return `value` as one line of at most `length` characters; for an exception its text, prefixed with the type if
    needed.
    """
    try:
        text = " ".join(str(value).split())
    except RecursionError:
        text = f"a {type(value).__name__} that is nested without end"
    if isinstance(value, Exception) and not isinstance(value, (RobopolicyError, RuntimeError)):
        text = f"{type(value).__name__}: {text}"
    text = text if len(text) <= length else f"{text[:length]} ..."
    return text[:-1] if text.endswith(".") else text


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the entry of `choices` most similar to `name`, "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)), "")


MANY = 40
"""Maximum number of names that are listed in full."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar of `choices`, else a list of them (of a long list the most
    similar).
    """
    names = sorted({str(choice) for choice in choices})
    suggestion = nearest(name, names)
    if suggestion:
        return f" Did you mean '{suggestion}'?"
    if len(names) > MANY:
        closest = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
        return f" The most similar of {len(names)} names: {', '.join(closest)}."
    return f" Known: {', '.join(names)}." if names else ""
