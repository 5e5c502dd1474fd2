"""Known gymnasium packages: the import that an id needs, and suitable world options.

This module runs inside worker processes, so neither it nor its imports load torch.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import require_extra


@dataclass(frozen=True)
class Family:
    """Environments registered by one package.

    prefixes: prefixes of their ids; module: module whose import registers them; extra: extra that installs it; options:
    default options of the world; env_options: default keyword arguments of the environment; names: elements of a flat
    observation; reward_digits: decimal places to which the reward is rounded; action_low, action_high: true bounds of
    actions [A], when the declared ones are not.
    """

    prefixes: tuple[str, ...]
    module: str
    extra: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env_options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    reward_digits: int | None = None
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()

    def register(self) -> None:
        """Import the package. Raises ConfigError naming the extra when it is missing."""
        with (
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of the package's own imports
            gymnasium.register_envs(require_extra(self.module, self.extra))


VIPERX_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)
VIPERX_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)
"""Limits of a ViperX 300 S's waist, shoulder, elbow, forearm roll, wrist angle and wrist rotation, rad: the ctrlrange
of gym-aloha's scenes, which its physics clamps to."""

FAMILIES = (
    # These clip actions themselves.
    Family(
        ("Fetch", "Hand", "Adroit", "Franka", "PointMaze", "AntMaze"),
        "gymnasium_robotics",
        "robotics",
        options={"clip_actions": True},
    ),
    # The coverage of the outline comes from a geometry library whose last bit is not repeatable: hence the rounding.
    Family(
        ("gym_pusht/",),
        "gym_pusht.envs",
        "pusht",
        options={
            "reward": "increase",
            "reward_scale": 2.0,
            "instruction": "push the T onto its outline",
            "success_text": "The T covers at least 95 % of its outline.",
        },
        names=("agent_x", "agent_y", "block_x", "block_y", "block_angle"),
        reward_digits=9,
    ),
    # Where the objects lie is seen in images alone, and the robot's joints are not part of the package's own default.
    # It declares actions of -1 to 1 and takes joint angles, rad, and grippers from 0 (closed) to 1.
    Family(
        ("gym_aloha/",),
        "gym_aloha",
        "aloha",
        options={"reward": "increase", "reward_scale": 0.5, "cameras": ("top",), "image_size": 64},
        env_options={"obs_type": "pixels_agent_pos"},
        action_low=(*VIPERX_LOW, 0.0) * 2,
        action_high=(*VIPERX_HIGH, 1.0) * 2,
    ),
    # Its time limit, 1,000 control steps for all but a few tasks, is not registered.
    Family(("dm_control/",), "shimmy", "dmcontrol", options={"horizon": 1000}),
)
"""Known families; a new package is one more entry. Ids of other packages are written as PACKAGE:ID."""


class FamilyMember(gymnasium.Wrapper):
    """An environment with its family's corrections: `element_names`, true action bounds, bit-exact rewards."""

    def __init__(self, environment: gymnasium.Env, family: Family):
        super().__init__(environment)
        flat = environment.observation_space.shape
        self.element_names = family.names if flat == (len(family.names),) else ()
        self._digits = family.reward_digits
        if environment.action_space.shape == (len(family.action_low),):
            low, high = (np.array(bound, np.float32) for bound in (family.action_low, family.action_high))
            self.action_space = spaces.Box(low, high, dtype=np.float32)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        """Act; action: [A] -> observation, rounded reward, terminated, truncated, info."""
        observation, reward, *ends, info = self.env.step(action)
        reward = float(reward) if self._digits is None else round(float(reward), self._digits)
        return observation, reward, ends[0], ends[1], info


def family_of(env_id: str) -> Family | None:
    """Return the family of an id, or None; env_id: gymnasium's id, or "module:id"."""
    name = env_id.rpartition(":")[2]
    return next((family for family in FAMILIES if name.startswith(family.prefixes)), None)
