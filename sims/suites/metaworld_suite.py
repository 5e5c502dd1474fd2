"""Meta-World's tasks as worlds, and its scripted experts as controllers (extra `metaworld`)."""

import warnings
from functools import partial
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, did_you_mean, require_extra
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Observation, WorldSpec
from robopolicy.core.world import Rows
from sims.suites.gymnasium_suite import GymnasiumWorld, check_options
from sims.suites.metaworld_environment import HORIZON, joined, metaworld_tasks, open_metaworld
from sims.suites.rewards import Reward

INSTRUCTIONS = {
    "assembly": "pick up the wrench and put its ring on the peg",
    "basketball": "dunk the basketball into the hoop",
    "bin-picking": "move the cube from one bin to the other",
    "box-close": "put the lid on the box",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "press the button behind the wall from above",
    "button-press-wall": "press the button behind the wall",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "disassemble": "take the wrench off the peg",
    "hand-insert": "push the hand into the hole",
    "hammer": "hit the nail with the hammer",
    "peg-insert-side": "insert the peg into the hole in the side of the box",
    "peg-unplug-side": "pull the peg out of the socket",
    "pick-out-of-hole": "pick the puck out of the hole",
    "pick-place": "pick up the puck and bring it to the goal",
    "pick-place-wall": "bring the puck over the wall to the goal",
    "push": "push the puck to the goal",
    "push-back": "pull the puck back to the goal",
    "push-wall": "push the puck around the wall to the goal",
    "reach": "reach the goal with the gripper",
    "reach-wall": "reach the goal behind the wall with the gripper",
    "shelf-place": "put the cube on the shelf",
    "soccer": "kick the ball into the goal",
    "stick-pull": "grasp the stick and pull the mug with it",
    "stick-push": "grasp the stick and push the mug with it",
    "sweep": "sweep the cube off the table",
    "sweep-into": "sweep the cube into the hole",
}
"""Instructions by task; the instructions of other tasks are derived from their names."""


def instruction(task: str) -> str:
    """Return the task in words: "drawer-open-v3" -> "open the drawer"."""
    name = task.removesuffix("-v3")
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    parts = name.split("-")
    for verb in ("open", "close", "press", "pull", "push", "lock", "unlock", "turn", "slide"):
        if verb in parts[1:]:
            at = parts.index(verb)
            place = f" ({' '.join(parts[at + 1 :])})" if parts[at + 1 :] else ""
            return f"{verb} the {' '.join(parts[:at])}{place}"
    return " ".join(parts)


def make_metaworld_world(
    task: str, batch_size: int, *, reward: str | None = None, reward_scale: float = 2.0, **options: Any
) -> GymnasiumWorld:
    """Build the world of a Meta-World task such as "push-v3"; options are those of `GymnasiumWorld`.

    observation.state: hand position and gripper opening, current and one control step ago [8]; environment_state:
    object poses, current and one step ago, and the goal [31]. Object and goal positions are sampled with the episode's
    seed. reward: None, progress of Meta-World's own shaped reward, 0 to reward_scale per episode, plus 1 at success; or
    "package.module:function", a potential. Raises ConfigError on an unknown task or option, or without the extra.
    """
    check_options(options, make_metaworld_world)
    tasks = metaworld_tasks()
    if task not in tasks:
        raise ConfigError(f"Meta-World has no task '{task}'.{did_you_mean(task, tasks)}")
    return GymnasiumWorld(
        f"metaworld/{task}",
        partial(open_metaworld, task),
        batch_size,
        reward=Reward("progress", bonus=1.0, scale=reward_scale) if reward is None else reward,
        reward_scale=reward_scale,
        **{
            "success_key": "success",
            "clip_actions": True,
            "horizon": HORIZON,
            "instruction": instruction(task),
            **options,
        },
    )


def metaworld_expert(task: str, spec: WorldSpec) -> "MetaworldExpert":
    """Return Meta-World's scripted expert for `task`. Raises ConfigError when it has none, or without the extra."""
    return MetaworldExpert(task, spec)


class MetaworldExpert:
    """Meta-World's scripted policy, one instance per row, clipped to the action's bounds."""

    def __init__(self, task: str, spec: WorldSpec):
        policies = require_extra("metaworld.policies", "metaworld").ENV_POLICY_MAP
        if task not in policies:
            raise ConfigError(f"Meta-World has no expert for '{task}'.{did_you_mean(task, policies)}")
        self._make, self._action = policies[task], spec.action
        self._policies: list[Any] = []

    def reset(self, rows: Rows = None) -> None:
        """Reset the policies of `rows` [R], None for all."""
        for row in range(len(self._policies)) if rows is None else np.asarray(rows).tolist():
            if row < len(self._policies):
                self._policies[row] = self._make()

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, 4] for an observation whose state is [B, H, 8] and environment state [B, H, 31]."""
        flat = joined(observation[STATE][:, -1], observation[ENVIRONMENT_STATE][:, -1])
        self._policies += [self._make() for _ in range(len(flat) - len(self._policies))]
        with warnings.catch_warnings():
            # The scripted policies warn at every step that the world clips their action.
            warnings.filterwarnings("ignore", message="Constant")
            pairs = zip(self._policies[: len(flat)], flat, strict=True)
            actions = np.stack([policy.get_action(row) for policy, row in pairs])
        return np.clip(actions, np.asarray(self._action.low), np.asarray(self._action.high)).astype(np.float64)
