"""Known gymnasium packages: the import that an id needs, and suitable world options.

This module runs inside worker processes, so neither it nor its imports load torch.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import require_extra
from robopolicy.core.registry import load_dotted


@dataclass(frozen=True)
class Family:
    """Environments registered by one package.

    prefixes: prefixes of their ids; module: module whose import registers them; extra: extra that installs it; options:
    default options of the world; env_options: default keyword arguments of the environment; instructions: part of an id
    -> its task in words; names: elements of a flat observation; action_names: elements of an action [A];
    reward_digits: decimal places to which the reward is rounded; action_low, action_high: true bounds of actions [A],
    when the declared ones are not; wrapper: "package.module:Class" around each environment, "" for none.
    """

    prefixes: tuple[str, ...]
    module: str
    extra: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env_options: Mapping[str, Any] = field(default_factory=dict)
    instructions: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    reward_digits: int | None = None
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    wrapper: str = ""

    def instruction(self, env_id: str) -> str | None:
        """Return the task of an id in words; None when it is not known."""
        return next((text for part, text in self.instructions.items() if part in env_id), None)

    def wrapped(self, environment: gymnasium.Env) -> gymnasium.Env:
        """Return an environment of the package with its corrections."""
        inner = load_dotted(self.wrapper, "Wrapper")(environment) if self.wrapper else environment
        return FamilyMember(inner, self)

    def register(self) -> None:
        """Import the package. Raises ConfigError naming the extra when it is missing."""
        with (
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of the package's own imports
            gymnasium.register_envs(require_extra(self.module, self.extra))


VIPERX_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
VIPERX_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)
VIPERX_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)
"""Limits of a ViperX 300 S's waist, shoulder, elbow, forearm roll, wrist angle and wrist rotation, rad: the ctrlrange
of gym-aloha's scenes, which its physics clamps to."""

MOTION = ("dx", "dy", "dz", "gripper")


def hil_families(task: str, instruction: str, **env_options: Any) -> tuple[Family, Family]:
    """Return the families of a task of gym-hil: in steps of 2.5 cm without the pause at reset, and in metres."""
    steps = Family(
        (f"gym_hil/{task}-",),
        "gym_hil",
        "hil",
        options={"seed_globals": True},  # blocks are placed by numpy's global generator
        env_options={**env_options, "reset_delay_seconds": 0.0},
        instructions={task: instruction},
        action_names=MOTION,
    )
    names = (*MOTION[:3], "rx", "ry", "rz", MOTION[3])
    return steps, replace(steps, prefixes=(f"gym_hil/{task}Base-",), env_options=env_options, action_names=names)


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
            "success_text": "The T covers at least 95 % of its outline.",
        },
        instructions={"PushT": "push the T onto its outline"},
        names=("agent_x", "agent_y", "block_x", "block_y", "block_angle"),
        reward_digits=9,
    ),
    # It declares actions of -1 to 1 and takes joint angles, rad, and grippers from 0 (closed) to 1.
    Family(
        ("gym_aloha/",),
        "gym_aloha",
        "aloha",
        options={"reward": "increase", "reward_scale": 0.5, "image_size": (48, 64)},
        instructions={
            "Insertion": "insert the peg into the socket",
            "TransferCube": "pick up the cube with the right arm and transfer it to the left arm",
        },
        action_names=tuple(f"{arm}_{joint}" for arm in ("left", "right") for joint in VIPERX_JOINTS),
        wrapper="sims.suites.aloha_environment:AlohaStates",
        action_low=(*VIPERX_LOW, 0.0) * 2,
        action_high=(*VIPERX_HIGH, 1.0) * 2,
    ),
    # Its time limit, 1,000 control steps for all but a few tasks, is not registered.
    Family(("dm_control/",), "shimmy", "dmcontrol", options={"horizon": 1000}),
    # As registered, these place the cube at the same point in every episode.
    *hil_families("PandaPickCube", "pick up the cube", random_block_position=True),
    *hil_families("PandaArrangeBoxes", "put every box on its target"),
    Family(
        ("lerobot_env_so101/",),
        "lerobot_env_so101",
        "so101",
        env_options={"random_block_position": True},
        instructions={"PickCube": "pick up the cube", "PickPlace": "put the cube on its goal"},
        action_names=MOTION,
    ),
)
"""Known families; a new package is one more entry. Ids of other packages are written as PACKAGE:ID."""


class FamilyMember(gymnasium.Wrapper):
    """An environment with its family's corrections: names, true action bounds, bit-exact rewards."""

    def __init__(self, environment: gymnasium.Env, family: Family):
        super().__init__(environment)
        flat = environment.observation_space.shape
        self.element_names = family.names if flat == (len(family.names),) else ()
        if environment.action_space.shape == (len(family.action_names),):
            self.action_names = family.action_names
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
