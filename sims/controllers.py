"""Loading of custom scripted controllers by import path."""

import sys
import traceback
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, RobopolicyError
from robopolicy.core.registry import load_dotted, named_arguments
from robopolicy.core.spec import Observation, WorldSpec
from robopolicy.core.world import Controller, Rows, begin_episodes


class NamedController:
    """Wrapper of a user's controller that turns its exceptions into a one-sentence error with its name, file and line.

    inner: the wrapped controller; name: the name that the user gave.
    """

    def __init__(self, inner: Controller, name: str):
        self.inner, self.name = inner, name

    def reset(self, rows: Rows = None) -> None:
        """Reset `rows` [R], or all when None; raises ConfigError when the controller raises."""
        try:
            self.inner.reset(rows)
        except Exception as error:
            raise self._said("reset", error) from error

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them; raises ConfigError
        when it raises.
        """
        try:
            begin_episodes(self.inner, seeds, rows)
        except Exception as error:
            raise self._said("begin", error) from error

    def act(self, observation: Observation) -> np.ndarray:
        """Return the controller's actions [B, A] for an observation [B, H, ...]; raises ConfigError when it raises."""
        try:
            return self.inner.act(observation)
        except Exception as error:
            raise self._said("act", error) from error

    def _said(self, call: str, error: Exception) -> RobopolicyError:
        """Convert an exception raised by `call` into a robopolicy error; an existing one is returned unchanged."""
        if isinstance(error, RobopolicyError):
            return error
        file = getattr(sys.modules.get(type(self.inner).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        return ConfigError(
            f"Controller '{self.name}': {call} raised {type(error).__name__}: {error} ({last.filename}, line "
            f"{last.lineno}: {last.line})."
        )


def load_controller(dotted_path: str, spec: WorldSpec) -> NamedController:
    """Load a controller from the class or function at `dotted_path` ("package.module:name"), see `inner`.

    The class or function is called with the world's spec if it takes an argument, else with none. It must return an
    object with `reset(rows)` and `act(observation) -> actions [B, A]`. Raises ConfigError with the reason when the path
    is invalid.
    """
    make: Any = load_dotted(dotted_path, "Controller")
    if not callable(make):
        raise ConfigError(
            f"Controller '{dotted_path}' is {make!r}: it must be a class, or a function that returns a controller."
        )
    arguments = named_arguments(make)
    required_arguments = [name for name, is_required in arguments.items() if is_required]
    by_name = {"spec": spec} if "spec" in arguments else {}
    by_place = () if by_name or not required_arguments else (spec,)
    if len(set(required_arguments) - set(by_name)) > len(by_place):
        raise ConfigError(
            f"Controller '{dotted_path}' needs the arguments {', '.join(required_arguments)}; it may take only one "
            "argument, the world's spec."
        )
    try:
        controller: Any = make(*by_place, **by_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Controller '{dotted_path}' could not be created: {type(error).__name__}: {error}"
        ) from error
    missing_methods = [name for name in ("reset", "act") if not callable(getattr(controller, name, None))]
    if missing_methods:
        raise ConfigError(
            f"Controller '{dotted_path}' returned {type(controller).__name__}, which lacks "
            f"{' and '.join(missing_methods)}: a controller needs reset(rows) and act(observation) -> actions [B, A]."
        )
    beyond = [name for name, is_required in list(named_arguments(controller.act).items())[1:] if is_required]
    if beyond:
        problem = "is a policy" if "generator" in beyond else "is not a controller"
        raise ConfigError(
            f"'{dotted_path}' {problem}: its act also needs {', '.join(beyond)}, but a controller is called as "
            "act(observation) -> actions [B, A]."
        )
    return NamedController(controller, dotted_path)
