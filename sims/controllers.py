"""Hand-written controllers by their dotted path."""

from typing import Any

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import fixed_arguments, load_dotted
from robopolicy.core.spec import WorldSpec
from robopolicy.core.world import Controller


def load_controller(dotted_path: str, spec: WorldSpec) -> Controller:
    """Return the controller that the class or function at `dotted_path` ("package.module:name") makes.

    It is called with the world's spec if it takes an argument, else with none, and must give an object with
    `reset(rows)` and `act(observation) -> actions [B, A]`. Raises ConfigError saying what is wrong with the path.
    """
    make: Any = load_dotted(dotted_path, "Controller")
    if not callable(make):
        raise ConfigError(f"Controller '{dotted_path}' is {make!r}: it must be a class or a function that makes one.")
    arguments = fixed_arguments(make)
    required = [name for name, needed in arguments.items() if needed]
    by_name = {"spec": spec} if "spec" in arguments else {}
    by_place = () if by_name or not required else (spec,)
    if len(set(required) - set(by_name)) > len(by_place):
        raise ConfigError(
            f"Controller '{dotted_path}' needs {', '.join(required)}; it may take one argument, the world's spec."
        )
    try:
        controller: Any = make(*by_place, **by_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"Controller '{dotted_path}' could not be made: {type(error).__name__}: {error}") from error
    missing = [name for name in ("reset", "act") if not callable(getattr(controller, name, None))]
    if missing:
        raise ConfigError(
            f"Controller '{dotted_path}' made {type(controller).__name__}, which lacks {' and '.join(missing)}: a "
            "controller has reset(rows) and act(observation) -> actions [B, A]."
        )
    beyond = [name for name, needed in list(fixed_arguments(controller.act).items())[1:] if needed]
    if beyond:
        what = "is a policy" if "generator" in beyond else "is no controller"
        raise ConfigError(
            f"'{dotted_path}' {what}: its act also needs {', '.join(beyond)}, and a controller is called as "
            "act(observation) -> actions [B, A]."
        )
    return controller
