"""A robot of somebody else's that LeRobot finds by the name of its distribution: one of our arms behind its interface.

It shows every number of the task's state under its name, in alphabetical order, and takes actions by name; cameras are
uint8. With degrees=True its joints are called and measured as LeRobot's own robots do: `shoulder_pan.pos`, in degrees.
Every action is one control step; when the task ends it begins anew by itself, and what succeeded is counted.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot.utils.errors import DeviceAlreadyConnectedError, DeviceNotConnectedError

from robopolicy.core.spec import IMAGE_PREFIX
from sims.registry import make_world


@RobotConfig.register_subclass("simulated_arm")
@dataclass
class SimulatedArmConfig(RobotConfig):
    """task: a world of one arm; camera_names, image_size: what it sees; seed: of the first episode."""

    task: str = "pick_place"
    camera_names: list[str] = field(default_factory=list)
    image_size: int = 64
    degrees: bool = False
    calibrated: bool = True
    seed: int = 0


class SimulatedArm(Robot):
    """LeRobot's Robot over one row of a world."""

    config_class = SimulatedArmConfig
    name = "simulated_arm"

    def __init__(self, config: SimulatedArmConfig):
        super().__init__(config)
        self.config = config
        self.world = make_world(
            config.task,
            1,
            **({"cameras": config.camera_names, "image_size": config.image_size} if config.camera_names else {}),
        )
        self.commands: list[dict[str, float]] = []
        self.ended = self.won = 0
        self._seed, self._shown, self._connected = config.seed, {}, False

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        """Fields of the world that are vectors -> this robot's names of their elements."""
        fields = {key: item for key, item in self.world.spec.observation.items() if not key.startswith(IMAGE_PREFIX)}
        return {key: tuple(map(self._own_name, item.names)) for key, item in fields.items()}

    def _own_name(self, name: str) -> str:
        return name.replace("_position", ".pos") if self.config.degrees else name

    @property
    def observation_features(self) -> dict[str, Any]:
        size = self.config.image_size
        numbers: dict[str, Any] = dict.fromkeys(sorted(sum(self._names.values(), ())), float)
        return {**numbers, **dict.fromkeys(self.config.camera_names, (size, size, 3))}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(sorted(self.world.spec.action.names), float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return self.config.calibrated

    def connect(self, calibrate: bool = True) -> None:
        if self._connected:
            raise DeviceAlreadyConnectedError(f"{self} is connected already.")
        self._connected = True
        self._begin()

    def calibrate(self) -> None:
        self.config.calibrated = True

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        self._require_connection()
        values: dict[str, Any] = {}
        for key, names in self._names.items():
            values |= dict(zip(names, map(float, self._shown[key][0, -1]), strict=True))
        for name in values:
            if name.endswith(".pos"):
                values[name] = math.degrees(values[name])
        images = {name: self._shown[IMAGE_PREFIX + name][0, -1].copy() for name in self.config.camera_names}
        return {**{name: values[name] for name in sorted(values)}, **images}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self._require_connection()
        if set(action) != set(self.action_features):
            raise ValueError(f"This robot takes {sorted(self.action_features)}, not {sorted(action)}.")
        self.commands.append(dict(action))
        step = self.world.step(np.array([[[action[name] for name in self.world.spec.action.names]]]))
        self._shown = step.observation
        if step.ended[0]:
            self.ended, self.won = self.ended + 1, self.won + int(step.success[0])
            self._begin()
        return action

    def disconnect(self) -> None:
        self._require_connection()
        self._connected = False
        self.world.close()
        print(f"{self.name}: {self.won} of {self.ended} episodes succeeded")

    def _begin(self) -> None:
        self._shown = self.world.reset(seeds=[self._seed])
        self._seed += 1

    def _require_connection(self) -> None:
        if not self._connected:
            raise DeviceNotConnectedError(f"{self} is not connected.")
