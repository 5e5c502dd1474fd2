"""LeRobot's teleoperators as operators, by their type: leader arms, gamepads, keyboards, phones and installed ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from robopolicy.client.executed import ActingAgent
from robopolicy.client.lerobot_robot import import_all
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import is_dotted, load_dotted
from robopolicy.core.spec import Observation
from robopolicy.core.world import Rows
from robopolicy.operators.operator import Site

PACKAGES = "lerobot_teleoperator_"
"""Prefix of distributions with teleoperators, which LeRobot finds by name."""
OVER = ("terminate_episode", "success", "failure", "rerecord_episode")
"""Events of a teleoperator (LeRobot's TeleopEvents) that hand the robot back."""


class LeRobotOperator:
    """A connected LeRobot teleoperator; operates one robot at a time.

    teleoperator: LeRobot's type of it, such as so101_leader, or the import path of its TeleoperatorConfig; options:
    fields of that configuration ({port: /dev/ttyACM1, id: mine}); rename: its names -> the action's elements, where
    they differ; scale: its names -> the action's units per unit of the teleoperator. Elements are matched by name,
    never by order. Raises ConfigError for an unknown type, invalid fields, and elements that it does not give.
    """

    agent = ActingAgent.HUMAN

    def __init__(
        self,
        site: Site,
        teleoperator: str = "",
        options: Mapping[str, Any] | None = None,
        rename: Mapping[str, str] | None = None,
        scale: Mapping[str, float] | None = None,
    ):
        if not teleoperator:
            raise ConfigError(
                "The operator lerobot needs its option teleoperator, such as {teleoperator: so101_leader}."
            )
        self._names = site.action.names
        self._rename, self._scale = dict(rename or {}), dict(scale or {})
        self._device = _make(teleoperator, dict(options or {}))
        provided_names = [self._rename.get(name, name) for name in _features(self._device.action_features)]
        if missing_names := [name for name in self._names if name not in provided_names] or (
            [""] if not self._names else []
        ):
            raise ConfigError(
                f"The teleoperator '{teleoperator}' does not give the action element '{missing_names[0]}': it gives "
                f"{', '.join(provided_names) or 'nothing'}. Set its option rename={{NAME OF ITS OWN: "
                f"{missing_names[0]}}}."
            )
        self._device.connect()
        self._finished = False

    def start(self, seeds: Array, rows: Rows = None) -> None:
        """Implement `Operator.start`."""

    def begin(self, rows: Array) -> None:
        """Implement `Operator.begin`."""
        self._finished = False

    def act(self, observation: Observation, rows: Array, last: Array) -> Array:
        """Implement `Operator.act`; elements that are not given at this moment hold still."""
        events = getattr(self._device, "get_teleop_events", dict)()
        event_values = {str(getattr(name, "value", name)): value for name, value in events.items()}
        self._finished = any(event_values.get(name) for name in OVER)
        values = {
            self._rename.get(name, name): float(value) * self._scale.get(name, 1.0)
            for name, value in self._device.get_action().items()
            if value is not None
        }
        action = np.array([values.get(name, np.nan) for name in self._names])
        if event_values.get("is_intervention") is False or np.isnan(action).all():
            return np.full(last.shape, np.nan)
        return np.where(np.isnan(action), last, action)

    def finished(self, rows: Array) -> Array:
        """Implement `Operator.finished`: an event of the teleoperator ended the turn."""
        return np.full(len(rows), self._finished)

    def close(self) -> None:
        """Implement `Operator.close`: disconnect."""
        if self._device.is_connected:
            self._device.disconnect()


def _features(features: Mapping[str, Any]) -> list[str]:
    """Return the names of a teleoperator's action elements, from either of LeRobot's two descriptions."""
    names = features.get("names")
    if isinstance(names, Mapping):
        return [str(each) for each in (names.get("motors", names) if "motors" in names else names)]
    return [str(each) for each in (names if names is not None else features)]


def _make(name: str, options: Mapping[str, Any]) -> Any:
    """Create a teleoperator, not yet connected."""
    import draccus
    from lerobot import teleoperators

    if is_dotted(name):
        kind = load_dotted(name, "Teleoperator")
    else:
        failures = import_all([teleoperators], PACKAGES)
        choices = teleoperators.TeleoperatorConfig.get_known_choices()
        if name not in choices:
            problems = "".join(f" {module} could not be imported: {error}." for module, error in failures.items())
            raise ConfigError(f"LeRobot has no teleoperator '{name}'.{did_you_mean(name, choices)}{problems}")
        kind = choices[name]
    try:
        return teleoperators.make_teleoperator_from_config(draccus.decode(kind, dict(options)))
    except Exception as error:  # LeRobot wraps what drivers raise; all of it is about what the user has named
        raise ConfigError(f"The teleoperator '{name}' cannot be created with {dict(options)}: {error}") from error
