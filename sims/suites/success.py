"""Success rules of external environments: by `info`, the return, the end of the episode, or a user's function.

This module runs inside worker processes, so neither it nor its imports load torch.
"""

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.registry import load_dotted
from robopolicy.core.spec import NUMBER, least_return

SUCCESS_KEYS = ("is_success", "success", "succeed")
"""Entries of `info` that are checked for success when the user names none; the first that it has is used."""
TERMINATED = "terminated"
"""Value of `success` for tasks that the environment ends when they are done."""
SO_FAR = re.compile(rf"return\s+so\s+far\s*>=\s*({NUMBER})")
"""Pattern of a threshold that the sum of rewards may meet at any step, whatever follows."""
UNEXPECTED = "info contains success after all, as"
"""Prefix of notes that matter when a world reports no success."""
WAYS = "package.module:function, 'return >= NUMBER', 'return so far >= NUMBER' or terminated"

SuccessFunction = Callable[[Mapping[str, np.ndarray]], Any]
"""Observation arrays [n] by key -> whether the task is done."""


class SuccessRule:
    """Reports after every control step whether the episode has succeeded.

    success: one of the following. "package.module:function": a function of the observation. "return >= NUMBER": decided
    by the whole episode's rewards, so it is False until the episode ends. "return so far >= NUMBER": met once and for
    all by the sum at any step. "terminated": the environment itself ends the episode. None: reported in `info`. key:
    entry of `info`, "outer.inner" for a nested one; if it is absent when the episode ends, this counts as failure, with
    a note. None uses the first of SUCCESS_KEYS in `info`. note: called with messages for the user. Raises ConfigError
    when `success` is none of these.
    """

    def __init__(self, success: str | None, key: str | None, note: Callable[[str], None]) -> None:
        self._key, self._note = key, note
        self._terminated = success is not None and success.strip() == TERMINATED
        self._whole = None if success is None else least_return(success)
        so_far = None if success is None else SO_FAR.fullmatch(success.strip())
        self._so_far = None if so_far is None else float(so_far[1])
        self._judge: SuccessFunction | None = None
        if success is not None and self._whole is None and self._so_far is None and not self._terminated:
            self._judge = load_success_function(success)
        self.known = success is not None or key is not None  # whether somebody says it, whatever `info` has

    def __call__(
        self,
        info: Mapping[str, Any],
        observation: Callable[[], Mapping[str, np.ndarray]],
        total: float,
        *,
        terminated: bool,
        over: bool,
    ) -> bool:
        """Return whether the episode has succeeded so far.

        observation: returns arrays [n] by key; total: sum of its rewards so far; terminated: the environment ended it
        here; over: it ends here, for any reason. Raises SpecError on a success value that is not True or False,
        NonFiniteError when the return is not finite.
        """
        if self._terminated:
            return terminated
        threshold = self._so_far if self._whole is None else self._whole
        if threshold is not None:
            if np.isnan(total):
                raise NonFiniteError("A reward of this episode is NaN or missing, so its return is unknown.")
            return total >= threshold and (over or self._whole is None)
        if self._judge is not None:
            return rule_success(self._judge, observation())
        return self._said(info, over)

    def _said(self, info: Mapping[str, Any], over: bool) -> bool:
        if self._key is None:
            key = next((key for key in SUCCESS_KEYS if info.get(key) is not None), None)
            if key is None:
                return False
            for other in SUCCESS_KEYS:
                if other == key or info.get(other) is None:
                    continue
                first, second = to_bool(info[key], f"info['{key}']"), to_bool(info[other], f"info['{other}']")
                if first != second:
                    self._note(
                        f"In one step info has {key} {first} but {other} {second}: {key} is used; to use the other, "
                        f"set world.options.success_key={other}."
                    )
            self._note(f"{UNEXPECTED} '{key}': to use it, set world.options.success_key={key}.")
            return to_bool(info[key], f"info['{key}']")
        value = entry(info, self._key)
        if value is not None:
            return to_bool(value, f"info['{self._key}']")
        if over:
            has = f"info has: {', '.join(map(str, info))}" if info else "info is empty"
            self._note(
                f"An episode ended without '{self._key}' (success_key) in its last info ({has}); it counts as "
                f"failure.{did_you_mean(self._key, info)} If the environment reports it only when it ends the "
                "episode itself, set a later time limit (world.options.horizon)."
            )
        return False


def load_success_function(success: str) -> SuccessFunction:
    """Load the function that `success` names; raises ConfigError when there is none, listing the valid values."""
    try:
        judge = load_dotted(success, "Success")
    except ConfigError as error:
        raise ConfigError(f"{error} Set world.options.success to {WAYS}.") from error
    if not callable(judge):
        raise ConfigError(f"success={success} is {judge!r}: pass a function of the observation.")
    return judge


def entry(info: Mapping[str, Any], key: str) -> Any:
    """Return an entry of `info`, None when it has none; key: a key, or "outer.inner" of nested dictionaries."""
    if key in info:
        return info[key]
    outer, _, inner = key.partition(".")
    return entry(info[outer], inner) if inner and isinstance(info.get(outer), Mapping) else None


SAY = (
    "define success with world.options.success=package.module:function, or use another entry, "
    "world.options.success_key=NAME"
)


def to_bool(value: Any, what: str, remedy: str = SAY) -> bool:
    """Convert an environment's flag to bool: a bool, 0 or 1, an array or tensor of one element. Raises SpecError
    otherwise.
    """
    if isinstance(value, (bool, float)) and value in (0, 1):
        return bool(value)
    try:
        flag = to_array(value)
    except (TypeError, ValueError):
        flag = np.empty(0)
    if flag.size != 1 or flag.dtype.kind not in "biuf" or flag.item() not in (0, 1):
        description = repr(value) if flag.size <= 1 else f"an array {list(flag.shape)}"
        raise SpecError(f"{what} is {description[:60]}, which is not True or False: {remedy}.")
    return bool(flag.item())


def to_array(value: Any) -> np.ndarray:
    """Convert an environment's array, tensor or number of any shape [...] to an array [...]."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def rule_success(success: SuccessFunction, observation: Mapping[str, np.ndarray]) -> bool:
    """Return the result of a user's success function for one observation (arrays [n] by key); raises SpecError when it
    fails.
    """
    name = f"The success function {getattr(success, '__module__', '')}:{getattr(success, '__name__', success)}"
    shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in observation.items())
    try:
        result = np.asarray(success(observation))
    except Exception as error:
        raise SpecError(
            f"{name} failed: {type(error).__name__}: {error} (at {place_of(error)}). It is called with one "
            f"observation at a time, a dictionary of arrays: {shapes}."
        ) from error
    if result.shape != ():
        raise SpecError(f"{name} returned shape {list(result.shape)} for {shapes}: it must return a single boolean.")
    return bool(result)


def place_of(error: Exception) -> str:
    """Return "file:line" of the line that raised `error`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


keep_former_names(
    __name__,
    {
        "truth": "to_bool",
        "numbers": "to_array",
        "judged": "rule_success",
        "Judge": "SuccessFunction",
        "load_judge": "load_success_function",
    },
)
