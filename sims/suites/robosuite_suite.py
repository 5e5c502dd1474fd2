"""robosuite's tasks as worlds, with a scripted expert for some (extra `robosuite`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.spec import WorldSpec
from robopolicy.core.world import Controller
from sims.suites.controllers.robosuite import JOBS, RobosuiteExpert
from sims.suites.gymnasium_suite import GymnasiumWorld, check_options, words
from sims.suites.robosuite_environment import open_robosuite, robosuite_tasks

HORIZON = 400
HORIZONS = {"NutAssembly": 1000, "PickPlace": 1000, "ToolHang": 700, "TwoArmTransport": 700}
"""Control steps until the time limit (robosuite itself has none), by task; other tasks use HORIZON."""
INSTRUCTIONS = {
    "Door": "open the door",
    "Lift": "lift the cube",
    "NutAssembly": "put both nuts on their pegs",
    "NutAssemblyRound": "put the round nut on its peg",
    "NutAssemblySquare": "put the square nut on its peg",
    "PickPlace": "put every object in its bin",
    "PickPlaceCan": "put the can in its bin",
    "Stack": "stack the red cube on the green cube",
    "ToolHang": "assemble the stand and hang the tool on it",
    "TwoArmHandover": "hand the hammer from one arm to the other",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg in the hole",
    "TwoArmTransport": "move the hammer to the other side, and the trash out of the bin",
    "Wipe": "wipe the table clean",
}
"""Instructions by task; the instructions of other tasks are derived from their names."""
NOT_LEVELS = ("Wipe",)
"""Tasks whose reward marks single events instead of progress."""
OBJECT_BY_CHANCE = {
    "NutAssemblySingle": "NutAssemblySquare or NutAssemblyRound",
    "PickPlaceSingle": "PickPlaceCan, PickPlaceMilk, PickPlaceBread or PickPlaceCereal",
}
"""Tasks that choose an object in every episode without a seed and show its entries alone -> tasks with one object."""


def make_robosuite_world(
    task: str,
    batch_size: int,
    *,
    reward: str | None = None,
    reward_scale: float = 2.0,
    env_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> GymnasiumWorld:
    """Build the world of a robosuite task such as "Lift"; options are those of `GymnasiumWorld`.

    env_options: robots, controller, keys, fast and other arguments of `RobosuiteEnvironment`. observation.state:
    entries of robosuite's observation that start with a robot's name; environment_state: the others. reward: None, the
    increase of robosuite's shaped reward, 0 to reward_scale per episode, plus 1 at success (the reward itself when it
    does not measure progress); or as for any gymnasium environment. Raises ConfigError on an unknown task or option,
    and when the extra is missing or does not work.
    """
    check_options(options, make_robosuite_world)
    if task in OBJECT_BY_CHANCE:
        raise ConfigError(
            f"robosuite's '{task}' chooses an object without a seed in every episode, and shows it alone: use "
            f"{OBJECT_BY_CHANCE[task]}."
        )
    tasks = robosuite_tasks()
    if task not in tasks:
        raise ConfigError(f"robosuite has no task '{task}'.{did_you_mean(task, tasks)}")
    settings = {
        "horizon": HORIZONS.get(task, HORIZON),
        "instruction": INSTRUCTIONS.get(task, words(task)),
        "success_text": "robosuite's own check of the task",
        "success_key": "success",
        "clip_actions": True,
    }
    return GymnasiumWorld(
        f"robosuite/{task}",
        partial(open_robosuite, task, dict(env_options or {})),
        batch_size,
        reward=("environment" if task in NOT_LEVELS else "increase") if reward is None else reward,
        reward_scale=reward_scale,
        **{**settings, **options},
    )


def robosuite_expert(task: str, spec: WorldSpec) -> Controller | None:
    """Return the scripted expert of `task`, or None when it has none."""
    return RobosuiteExpert(task, spec) if task in JOBS else None
