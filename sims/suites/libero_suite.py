"""LIBERO and LIBERO-PRO as worlds (extra `libero`): a task, "libero/libero_goal:3", or a suite, "libero/libero_goal".

Episodes start in the official initial states and succeed by LIBERO's own predicates. Observations have LeRobot's keys,
so that published policies are evaluated as they are. A world of a suite plays all its tasks; the episode's seed selects
task and initial state, so that 50 consecutive seeds per task play each of them once.
"""

from functools import partial
from typing import Any

import numpy as np

from robopolicy.core.returns import SUCCESS
from robopolicy.core.spec import ImageSize
from sims.suites.gymnasium_suite import SEED_LIMIT, GymnasiumWorld, check_options
from sims.suites.libero_environment import LIGHT, OPENPI, STATES, open_libero, start_of
from sims.suites.libero_scene import tasks_of
from sims.suites.rewards import INCREASE, PROGRESS, Reward

HORIZONS = {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Control steps until the time limit, as in LeRobot; a suite of LIBERO-PRO has that of the suite that it perturbs."""
OTHER_HORIZON, OPENPI_SPATIAL = 500, 220
"""Time limits of other suites, and of libero_spatial in openpi."""
IMAGE_SIZE = 256
"""Side of images in the published datasets, in pixels."""


class LiberoWorld(GymnasiumWorld):
    """A world whose episodes belong to tasks that have names of their own."""

    def __init__(self, name: str, *arguments: Any, **options: Any):
        self._tasks = [f"{task.index} {task.text}" for task in tasks_of(name)]
        super().__init__(f"libero/{name}", *arguments, **options)

    def task_names(self, seeds: np.ndarray) -> list[str]:
        """Return the name of the task that each episode with these seeds [E] plays."""
        return [self._tasks[task] for task, _ in self._starts(seeds)]

    def episode_notes(self, seeds: np.ndarray) -> list[str]:
        """Return notes on tasks that no episode with these seeds [E] plays, and on initial states that several play."""
        starts, notes = self._starts(seeds), list[str]()
        played, tasks = len({task for task, _ in starts}), len(self._tasks)
        if played < tasks:
            notes.append(
                f"Only {played} of the {tasks} tasks of '{self.spec.name}' are played (episodes: {len(starts)}): "
                f"success is not that of the suite, which {STATES * tasks:,} episodes play completely."
            )
        if len(set(starts)) < len(starts):
            notes.append(
                f"'{self.spec.name}' has {STATES * tasks:,} official initial states, so {len(starts):,} episodes "
                "repeat some of them: the interval is too narrow where a repeated episode takes the same course."
            )
        return notes

    def _starts(self, seeds: np.ndarray) -> list[tuple[int, int]]:
        """Return task and initial state of the episodes with these seeds [E]."""
        return [start_of(int(seed) % SEED_LIMIT, len(self._tasks)) for seed in seeds]


def make_libero_world(
    name: str,
    batch_size: int,
    *,
    protocol: str | None = None,
    fixtures: int = 0,
    settle_steps: int = 10,
    sleep: bool = False,
    look: str = LIGHT,
    initial_state: int | None = None,
    image_size: ImageSize | None = None,
    reward: str | None = None,
    variation: Any = None,
    **options: Any,
) -> GymnasiumWorld:
    """Build the world of a suite or task of LIBERO, such as "libero_spatial" or "libero_spatial:3".

    protocol: time limits and placement of the fixtures (cabinets, stoves, racks), which are not part of the initial
    states: "lerobot" or "openpi", the two published ones; None places them alike in all episodes of a task, by the seed
    `fixtures`, with LeRobot's time limits. settle_steps, sleep, look, initial_state: see `LiberoEnvironment`. reward:
    None for success alone, LIBERO's own; "progress", the increase of `Scene.progress` times reward_scale, 2 by default,
    plus 1 at success; or as for any gymnasium environment. options: of `GymnasiumWorld`. Raises ConfigError on unknown
    names and options, and when the extra is missing or does not fit.
    """
    check_options(options, make_libero_world)
    tasks = tasks_of(name)
    environment = {
        "protocol": protocol,
        "fixtures": fixtures,
        "settle_steps": settle_steps,
        "sleep": sleep,
        "look": look,
        "initial_state": initial_state,
        "shaped": reward == PROGRESS,
        "variation": variation,
    }
    settings = {
        "horizon": horizon_of(tasks[0].suite, protocol),
        "instruction": tasks[0].text,
        "own_task": options.get("instruction") is None,
        "success_key": "success",
        "success_text": "LIBERO's own check of the goal",
        "clip_actions": True,
        "reward": INCREASE if reward == PROGRESS else Reward(SUCCESS) if reward is None else reward,
        "reward_scale": 2.0,
        "image_size": IMAGE_SIZE if image_size is None and options.get("cameras") else image_size,
    }
    return LiberoWorld(name, partial(open_libero, name, environment), batch_size, **{**settings, **options})


def horizon_of(suite: str, protocol: str | None) -> int:
    """Return the time limit of a suite's episodes, in control steps."""
    base = next((each for each in sorted(HORIZONS, key=len, reverse=True) if f"{suite}_".startswith(f"{each}_")), "")
    if base == "libero_spatial" and protocol == OPENPI:
        return OPENPI_SPATIAL
    return HORIZONS.get(base, OTHER_HORIZON)
