"""The robot's side of a policy server: client, driver, action limits and LeRobot's robots.

This package imports nothing of robopolicy: `pip install robopolicy-client` installs the same files as
`robopolicy_client` on a robot's computer, for Python 3.8 and newer, with numpy, msgpack and websockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import Clock, Driver
    from .errors import ConfigError, NonFiniteError, RobopolicyError, RobopolicyWarning, ServingError, SpecError
    from .policy_client import PolicyClient, RefusedError
    from .policy_description import ActionLimits
    from .supervision import Supervised

_ERRORS = ("ConfigError", "NonFiniteError", "RobopolicyError", "RobopolicyWarning", "ServingError", "SpecError")
_MODULES = {
    "ActionLimits": "policy_description",
    "Clock": "driver",
    "Driver": "driver",
    "PolicyClient": "policy_client",
    "RefusedError": "policy_client",
    "Supervised": "supervision",
    **dict.fromkeys(_ERRORS, "errors"),
}
"""Name -> its module, imported when the name is first used: settings are read without numpy and websockets."""

__all__ = [
    "ActionLimits",
    "Clock",
    "ConfigError",
    "Driver",
    "NonFiniteError",
    "PolicyClient",
    "RefusedError",
    "RobopolicyError",
    "RobopolicyWarning",
    "ServingError",
    "SpecError",
    "Supervised",
]


def __getattr__(name: str) -> Any:
    """Load one of the names."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names for completion."""
    return [*globals(), *__all__]
