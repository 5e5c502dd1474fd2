"""OGBench's manipulation tasks as worlds, with OGBench's own oracles as experts (extra `ogbench`)."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium

from robopolicy.core.spec import WorldSpec
from robopolicy.core.world import Controller
from sims.suites.gymnasium_suite import GymnasiumWorld, check_options, words
from sims.suites.ogbench_environment import open_ogbench, require_id, split_name

HORIZON = 1000
"""Control steps per episode of play; tasks have the time limits registered by OGBench."""
INSTRUCTIONS = {
    "cube": "move every cube to its goal",
    "scene": "bring cube, buttons, drawer and window into the goal's state",
    "puzzle": "bring every button into the goal's state",
}
"""Instructions by the first word of a task's name."""
SINGLE = {
    "scene-1": "open the drawer and the window",
    "scene-2": "unlock, close and lock the drawer and the window",
    "scene-3": "move the cube, open the drawer, and close and lock the window",
    "scene-4": "unlock the drawer and put the cube into it",
    "scene-5": "put the cube into the drawer and open the window, and lock both",
}
"""Instructions of single tasks whose goal can be described in words."""
SUCCESS = {
    "cube": "Every cube is within 4 cm of its goal.",
    "scene": "Cube, drawer and window are within 4 cm of their goals, and the buttons in their goal's state.",
    "puzzle": "Every button is in its goal's state.",
}


def make_ogbench_world(
    name: str, batch_size: int, *, env_options: Mapping[str, Any] | None = None, **options: Any
) -> GymnasiumWorld:
    """Build the world of an OGBench manipulation task such as "cube-single-v0"; options are those of `GymnasiumWorld`.

    name: "cube-single-v0" (the seed selects one of five goals, which is observed), "cube-single-singletask-task1-v0"
    (one goal, not observed). With "play" or "noisy" in it, as in the names of OGBench's data sets
    ("cube-single-play-v0", "scene-noisy-singletask-v0"), episodes start anywhere, last 1,000 control steps and do not
    end at success. observation.state: the robot [19]; environment_state: objects, then the goal; numbers and scaling
    are OGBench's. The reward is OGBench's own. env_options: keyword arguments of OGBench's environment, such as
    use_oracle_rep=true for the short goal. Raises ConfigError on an unknown task or option, or without the extra.
    """
    check_options(options, make_ogbench_world)
    env_id, style = split_name(name)
    require_id(env_id)
    play_settings = {"horizon": HORIZON, "terminate_on_success": False} if style else {}
    settings = {
        "horizon": gymnasium.registry[env_id].max_episode_steps,
        "instruction": instruction(env_id),
        "success_text": SUCCESS.get(env_id.partition("-")[0], "OGBench's own check of the task."),
        "success_key": "success",
        "clip_actions": True,
        **play_settings,
    }
    return GymnasiumWorld(
        f"ogbench/{name}",
        partial(open_ogbench, name, dict(env_options or {})),
        batch_size,
        **{**settings, **options},
    )


def instruction(env_id: str) -> str:
    """Return a task in words: "scene-singletask-task1-v0" -> "open the drawer and the window"."""
    scene = env_id.partition("-")[0]
    single = re.search(r"-singletask(?:-task(\d+))?-", env_id)
    return SINGLE.get(f"{scene}-{single[1] or 2}" if single else "", INSTRUCTIONS.get(scene, words(env_id)))


def ogbench_expert(name: str, spec: WorldSpec) -> Controller:
    """Return OGBench's oracles: goal-directed, or in play or noisy mode if the name ends in it.

    Raises ConfigError when OGBench lacks the task or the world lacks an observation that they read, or without the
    extra.
    """
    from sims.suites.controllers.ogbench_oracles import OGBenchOracles

    return OGBenchOracles(name, spec)
