"""CPU time of a control step of Meta-World: its own environments, EnvPool's (where installed) and ours.

All arms of a setting take the same actions and alternate in one process. Times are CPU seconds of this process and all
its threads per control step of one row, so that load on the machine does not decide. With a camera every row is drawn
after each action chunk: by Meta-World and EnvPool with shadows and multisampling, by ours without.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks.rounds import alternating, conditions, conditions_text, median_ratio
from robopolicy.configuration import Config
from robopolicy.core.errors import require_extra
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table
from sims.suites.metaworld_suite import make_metaworld_world

TASKS = ("push-v3", "drawer-open-v3")
STEPS = {1: 96, 16: 16, 64: 8}
"""Rows -> control steps of one measurement, at least a chunk; with a camera one chunk."""
CHUNK = 8
CAMERA, CAMERA_NUMBER = "corner2", 2
"""Name and number in the model of the camera that is drawn."""
SIZE = 128
"""Side of an image, in pixels."""
MOST_CONTEXTS = 16
"""Largest number of rows that Meta-World and EnvPool draw here, with a graphics context of 130 MB for each row."""
OWN, ENVPOOL = "Meta-World's own", "EnvPool"
OURS = "ours"
Step = Callable[[np.ndarray], object]
"""Runs a chunk [C, 4] in every row."""
Arm = tuple[Callable[[], object], Step, Callable[[], object]]
"""Starts episodes, runs a chunk, closes."""


def actions_of(steps: int) -> np.ndarray:
    """Return the actions [C, 4] of every arm: the hand wanders, the gripper opens and closes."""
    actions = np.random.default_rng(0).normal(0.0, 0.5, (steps, 4))
    actions[:, 3] = np.sign(np.sin(np.arange(steps) / 7))
    return np.clip(actions, -1.0, 1.0)


def own_arm(task: str, rows: int, drawn: bool) -> Arm:
    """Meta-World's own environments, one after the other."""
    suite = importlib.import_module("metaworld").MT1(task, seed=0)
    options = {"render_mode": "rgb_array", "camera_name": CAMERA, "width": SIZE, "height": SIZE} if drawn else {}
    environments = [suite.train_classes[task](**options) for _ in range(rows)]
    for row, environment in enumerate(environments):
        environment.set_task(suite.train_tasks[row % len(suite.train_tasks)])

    def step(chunk: np.ndarray) -> None:
        for environment in environments:
            for action in chunk.astype(np.float32):
                environment.step(action)
            if drawn:
                environment.render()

    return lambda: [each.reset() for each in environments], step, lambda: [each.close() for each in environments]


def envpool_arm(task: str, rows: int, drawn: bool) -> Arm:
    """EnvPool's vector environment, on one thread."""
    name = "".join(part.capitalize() for part in task.removesuffix("-v3").split("-"))
    size = {"render_mode": "rgb_array", "render_width": SIZE, "render_height": SIZE, "render_camera_id": CAMERA_NUMBER}
    pool = importlib.import_module("envpool").make(
        f"MetaWorld/{name}-v3", env_type="gymnasium", num_envs=rows, num_threads=1, seed=0, **(size if drawn else {})
    )

    def step(chunk: np.ndarray) -> None:
        for action in chunk.astype(np.float32):
            pool.step(np.tile(action, (rows, 1)))
        if drawn:
            pool.render(np.arange(rows))

    return pool.reset, step, pool.close


def our_arm(task: str, rows: int, drawn: bool) -> Arm:
    """Return our world of several rows, in this process."""
    options: dict[str, Any] = {"cameras": [CAMERA], "image_size": SIZE} if drawn else {}
    world = make_metaworld_world(task, rows, terminate_on_success=False, **options)
    return (
        lambda: world.reset(seeds=np.arange(rows)),
        lambda chunk: world.step(np.broadcast_to(chunk, (rows, *chunk.shape))),
        world.close,
    )


def arms_of(task: str, rows: int, drawn: bool) -> dict[str, Arm]:
    """Return the arms of a setting that this machine can measure."""
    arms = {}
    if not drawn or rows <= MOST_CONTEXTS:
        arms[OWN] = own_arm(task, rows, drawn)
        if importlib.util.find_spec("envpool"):
            arms[ENVPOOL] = envpool_arm(task, rows, drawn)
    return {**arms, OURS: our_arm(task, rows, drawn)}


def seconds(arm: Arm, rows: int, drawn: bool) -> float:
    """Return CPU seconds per control step of a row, after a start that is not counted."""
    start, step, _ = arm
    start()
    actions = actions_of(CHUNK if drawn else STEPS[rows])
    begin = time.process_time()
    for chunk in actions.reshape(-1, CHUNK, 4):
        step(chunk)
    return (time.process_time() - begin) / (len(actions) * rows)


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Measure every arm of every setting bench.rounds times, alternating, after a round that is not counted."""
    require_extra("metaworld", "metaworld")
    rounds = config.bench.rounds
    cases = [(task, rows, drawn) for drawn in (False, True) for task in TASKS for rows in STEPS]
    samples = []
    with progress("bench metaworld", len(cases) * (rounds + 1)) as advance:
        for task, rows, drawn in cases:
            arms = arms_of(task, rows, drawn)
            measures = {name: partial(seconds, arm, rows, drawn) for name, arm in arms.items()}
            times = alternating(measures, rounds, partial(advance, note=f"{task}, {rows} rows"))
            for _, _, close in arms.values():
                close()
            samples.append({"task": task, "rows": rows, "camera": drawn, "seconds": times})
    settings = conditions(rounds, ("mujoco", "numpy", "gymnasium", "metaworld"))
    settings["envpool"] = version("envpool") if importlib.util.find_spec("envpool") else "not installed"
    return {"samples": samples, "settings": settings}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return CPU microseconds of a control step by arm and setting, and our speed next to the others'."""
    lines = []
    for sample in figures["samples"]:
        seconds = sample["seconds"]
        text = [
            f"{1e6 * statistics.median(seconds[arm]):,.0f}" if arm in seconds else "-" for arm in (OWN, ENVPOOL, OURS)
        ]
        lines.append(
            [
                sample["task"],
                str(sample["rows"]),
                "one, 128 px" if sample["camera"] else "none",
                *text,
                *(f"{median_ratio(seconds, arm, OURS):.1f}" if arm in seconds else "-" for arm in (OWN, ENVPOOL)),
            ]
        )
    header = ["task", "rows", "camera", OWN, ENVPOOL, OURS, "own / ours", "EnvPool / ours"]
    return [Table(f"CPU us per control step of a row, median; {conditions_text(figures)}", header, lines)]


BENCHMARK = Benchmark(
    "What does a control step of Meta-World cost in its own environments, in EnvPool's and in ours?",
    ("rounds",),
    benchmark,
    tables,
)
