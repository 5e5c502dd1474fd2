"""Speed of the native engine compared with pure physics, Gymnasium's vector environments and Meta-World.

All arms alternate in one process (Gymnasium's AsyncVectorEnv has its own workers) and report control steps per second:
median, minimum and interquartile range over the rounds, and the CPU time of a step, summed over threads. Arms with
several threads are also measured with one, because Meta-World's environments have one.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from mujoco.rollout import Rollout

from robopolicy.benchmarks.push_cube_env import PushCubeEnv
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, require_extra
from robopolicy.core.machine import usable_threads
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.registry import load_task
from sims.suites.metaworld_environment import open_metaworld
from sims.suites.metaworld_suite import make_metaworld_world

STEPS = 8192
"""Control steps of one run of a native arm, at most one episode per row; vector environments run an eighth."""

ADAPTED = "metaworld push-v3: our adapter"
BARE = "metaworld push-v3: its environment as our adapter opens it"


class Timing(NamedTuple):
    """Control steps (or frames) per second, and CPU seconds per step, over all threads of this process."""

    rate: float
    cpu: float


Arm = Callable[[], Timing]
"""Runs for a fraction of a second; workers' processor time is not seen from here, so arms with workers tell NaN."""


def timed(steps: int, run: Callable[[], object]) -> Timing:
    """Time `run`, which executes `steps` control steps."""
    begin, cpu_start = time.perf_counter(), time.process_time()
    run()
    return Timing(steps / (time.perf_counter() - begin), (time.process_time() - cpu_start) / steps)


def native_arm(name: str, batch: int, chunk: int, threads: int) -> Arm:
    """Measure the engine with random actions, resets included."""
    task = load_task(name)
    world = MujocoWorld(task, batch, threads=threads, terminate_on_success=False)
    count = max(1, min(task.horizon, STEPS // batch) // chunk)
    actions = np.random.default_rng(0).uniform(-1, 1, (count, batch, chunk, *task.action.shape))
    seeds = np.arange(batch)

    def run() -> None:
        world.reset(seeds=seeds)
        for each in actions:
            world.step(each)

    return lambda: timed(count * batch * chunk, run)


def physics_arm(name: str, batch: int, chunk: int, threads: int) -> Arm:
    """Measure `mujoco.rollout` alone with the same model, threads, states and controls: no observation, reward or
    reset.
    """
    task = load_task(name)
    world = MujocoWorld(task, batch, threads=1)
    world.reset(seeds=np.arange(batch))
    arrays, model = world.snapshot().arrays, world.model
    count = max(1, min(task.horizon, STEPS // batch) // chunk)
    actions = np.random.default_rng(0).uniform(-1, 1, (count, batch, chunk, *task.action.shape))
    controls, previous = [], arrays["control"]
    for each in actions:
        control = task.control(each, previous)
        previous = control[:, -1]
        controls.append(np.repeat(control, task.substeps, axis=1))
    states = np.empty((batch, chunk * task.substeps, arrays["state"].shape[1]))
    sensors = np.empty((batch, chunk * task.substeps, model.nsensordata))
    pool, data = Rollout(nthread=threads if threads > 1 else 0), [mujoco.MjData(model) for _ in range(threads)]
    models = [model] * batch

    def run() -> None:
        state = arrays["state"]
        for control in controls:
            pool.rollout(
                models,
                data,
                state,
                control,
                skip_checks=True,
                nstep=control.shape[1],
                state=states,
                sensordata=sensors,
            )
            state = states[:, -1].copy()

    return lambda: timed(count * batch * chunk, run)


def gymnasium_arm(envs: SyncVectorEnv | AsyncVectorEnv, steps: int) -> Arm:
    """Measure a Gymnasium vector environment with random actions; it resets ended environments itself."""
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, envs.num_envs, 2)).astype(np.float32)
    envs.reset(seed=0)

    def run() -> None:
        for each in actions:
            envs.step(each)

    def arm() -> Timing:
        timing = timed(steps * envs.num_envs, run)
        return timing if isinstance(envs, SyncVectorEnv) else timing._replace(cpu=math.nan)

    return arm


def adapter_arms(chunk: int, rows: int = 4) -> tuple[Arm, Arm]:
    """Measure robopolicy's world of push-v3 in this process, and the same environments, initial states and actions
    without it.
    """
    world = make_metaworld_world("push-v3", rows, terminate_on_success=False)
    environments = [open_metaworld("push-v3") for _ in range(rows)]
    count = max(1, 96 // chunk)
    actions = np.random.default_rng(0).uniform(-1, 1, (count, rows, chunk, 4)).astype(np.float32)
    seeds = np.arange(rows)

    def ours() -> None:
        for each in actions:
            world.step(each)

    def bare() -> None:
        for each in actions:
            for environment, row in zip(environments, each, strict=True):
                for action in row:
                    environment.step(action)

    def adapted() -> Timing:
        world.reset(seeds=seeds)
        return timed(count * rows * chunk, ours)

    def alone() -> Timing:
        for seed, environment in enumerate(environments):
            environment.reset(seed=seed)
        return timed(count * rows * chunk, bare)

    return adapted, alone


def metaworld_arms() -> tuple[Arm, Arm]:
    """Measure Meta-World's own push-v3 environment, and the physics inside it alone."""
    metaworld = require_extra("metaworld", "metaworld")
    suite = metaworld.MT1("push-v3", seed=0)
    env = suite.train_classes["push-v3"]()
    env.set_task(suite.train_tasks[0])
    steps = 200
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 4))

    def run() -> None:
        for each in actions:
            env.step(each)

    def own() -> Timing:
        env.reset()
        return timed(steps, run)

    def physics() -> Timing:
        env.reset()
        return timed(steps, lambda: mujoco.mj_step(env.model, env.data, env.frame_skip * steps))

    return own, physics


def render_arm(name: str, size: int = 64, frames: int = 200) -> Arm:
    """Measure frames per second of the task's default camera on the calling thread."""
    world = MujocoWorld(load_task(name), frames, threads=1)
    world.reset(seeds=np.arange(frames))
    return lambda: timed(frames, lambda: world.render(height=size, width=size))


def benchmark_sims(
    rounds: int = 13,
    batch_size: int = 256,
    chunk: int = 8,
    threads: int | None = None,
    tasks: Sequence[str] = ("push_cube", "push_t", "pick_place"),
    like_metaworld: str = "stack",
    gymnasium_envs: Sequence[int] = (4, 16),
) -> dict[str, Any]:
    """Measure every arm `rounds` times, alternating, and return rates, ratios, thresholds and versions.

    like_metaworld: the built-in task whose physics cost per control step is about that of Meta-World's push-v3 (both
    costs are reported); gymnasium_envs: sizes of the vector environments, the fastest of which counts. Raises
    ConfigError without a round, or without the extra `metaworld`.
    """
    if rounds < 1:
        raise ConfigError("A benchmark needs at least one round.")
    threads = threads or usable_threads()
    vectors = [SyncVectorEnv([PushCubeEnv] * n) for n in gymnasium_envs]
    multiprocessing.set_forkserver_preload(["robopolicy.benchmarks.push_cube_env"])
    workers = [AsyncVectorEnv([PushCubeEnv] * n, context="forkserver") for n in gymnasium_envs]
    arms: dict[str, Arm] = {}
    for name in dict.fromkeys((*tasks, like_metaworld)):
        arms[f"{name}: native engine"] = native_arm(name, batch_size, chunk, threads)
        arms[f"{name}: pure physics"] = physics_arm(name, batch_size, chunk, threads)
        arms[f"{name}: native engine, one thread"] = native_arm(name, batch_size, chunk, 1)
        arms[f"{name}: pure physics, one thread"] = physics_arm(name, batch_size, chunk, 1)
    arms["push_cube: native engine, single steps"] = native_arm("push_cube", batch_size, 1, threads)
    arms["push_cube: native engine, single steps, one thread"] = native_arm("push_cube", batch_size, 1, 1)
    for env in vectors:
        arms[f"push_cube: gymnasium SyncVectorEnv x{env.num_envs}"] = gymnasium_arm(env, STEPS // 8 // env.num_envs)
    for env in workers:
        arms[f"push_cube: gymnasium AsyncVectorEnv x{env.num_envs}"] = gymnasium_arm(env, STEPS // 8 // env.num_envs)
    arms["metaworld push-v3: its own environment"], arms["metaworld push-v3: physics alone"] = metaworld_arms()
    arms[ADAPTED], arms[BARE] = adapter_arms(chunk)
    for name in dict.fromkeys((*tasks, like_metaworld)):
        arms[f"{name}: frames/s at 64 px"] = render_arm(name)
    try:
        samples = measure(arms, rounds)
    finally:
        for env in (*vectors, *workers):
            env.close()
    result = report(samples, tasks, like_metaworld)
    result["settings"] |= {"rounds": rounds, "batch_size": batch_size, "chunk": chunk, "threads": threads}
    return result


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[Timing]]:
    """Run every arm once to warm up, then round-robin; returns timings by arm."""
    samples: dict[str, list[Timing]] = {name: [] for name in arms}
    with progress("bench sims", (rounds + 1) * len(arms)) as advance:
        for index in range(rounds + 1):
            for name, arm in arms.items():
                value = arm()
                if index:
                    samples[name].append(value)
                advance(note=name)
    return samples


def report(timings: dict[str, list[Timing]], tasks: Sequence[str], like_metaworld: str) -> dict[str, Any]:
    """Summarise timings; ratios are medians of the ratios within a round, so that a constant load on the machine
    cancels out.
    """
    samples = {name: [each.rate for each in values] for name, values in timings.items()}
    figures = {}
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        figures[name] = {"median": middle, "min": min(values), "iqr": high - low}
        cpu_seconds = statistics.median(each.cpu for each in timings[name])
        if math.isfinite(cpu_seconds):
            figures[name]["cpu"] = cpu_seconds

    def ratio(first: str, second: str) -> float:
        return statistics.median(a / b for a, b in zip(samples[first], samples[second], strict=True))

    def cpu_ratio(first: str, second: str) -> float:
        return statistics.median(a.cpu / b.cpu for a, b in zip(timings[first], timings[second], strict=True))

    def best(kind: str) -> str:
        return max((name for name in samples if kind in name), key=lambda name: figures[name]["median"])

    native = "push_cube: native engine"
    ratios = {
        f"{name}: native engine / pure physics": ratio(f"{name}: native engine", f"{name}: pure physics")
        for name in dict.fromkeys((*tasks, like_metaworld))
    }
    ratios |= {
        "native engine / SyncVectorEnv": ratio(native, best("SyncVectorEnv")),
        "native engine / AsyncVectorEnv": ratio(native, best("AsyncVectorEnv")),
        "native engine / Meta-World": ratio(
            f"{like_metaworld}: native engine", "metaworld push-v3: its own environment"
        ),
        "native engine, one thread / Meta-World": ratio(
            f"{like_metaworld}: native engine, one thread", "metaworld push-v3: its own environment"
        ),
        "our adapter of Meta-World / Meta-World": ratio(ADAPTED, "metaworld push-v3: its own environment"),
        "CPU time of a step, adapter / bare environment": cpu_ratio(ADAPTED, BARE),
        "physics cost, ours / Meta-World": ratio(
            "metaworld push-v3: physics alone", f"{like_metaworld}: pure physics, one thread"
        ),
    }
    frames = min(row["median"] for name, row in figures.items() if "frames/s" in name)
    bars = {
        "at least 85 % of pure physics (push_cube)": ratios["push_cube: native engine / pure physics"] >= 0.85,
        "faster than SyncVectorEnv": ratios["native engine / SyncVectorEnv"] > 1.0,
        "faster than AsyncVectorEnv": ratios["native engine / AsyncVectorEnv"] > 1.0,
        "at least 8 x Meta-World on one thread each": ratios["native engine, one thread / Meta-World"] >= 8.0,
        "our adapter costs at most 5 %": ratios["CPU time of a step, adapter / bare environment"] <= 1.05,
        "at least 1000 frames/s at 64 px": frames >= 1000.0,
    }
    packages = ("mujoco", "numpy", "gymnasium", "metaworld")
    settings = {"python": platform.python_version(), "machine": platform.machine()}
    settings |= {name: version(name) for name in packages}
    return {"figures": figures, "ratios": ratios, "bars": bars, "settings": settings}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return rates, ratios, and whether each threshold is reached; results without CPU time have no such column."""
    rates = [
        [name, *(f"{row[key]:,.0f}" for key in ("median", "min", "iqr"))] for name, row in figures["figures"].items()
    ]
    header = ["arm", "median /s", "minimum /s", "interquartile range /s"]
    if any("cpu" in row for row in figures["figures"].values()):
        header.append("CPU time of one / us")
        for line, row in zip(rates, figures["figures"].values(), strict=True):
            line.append(f"{1e6 * row['cpu']:,.1f}" if "cpu" in row else "in workers")
    settings = ", ".join(f"{name} {value}" for name, value in figures["settings"].items())
    ratios = [[name, f"{value:.2f}"] for name, value in figures["ratios"].items()]
    bars = [[name, "met" if is_met else "MISSED"] for name, is_met in figures["bars"].items()]
    return [
        Table(f"Control steps (or frames) a second; {settings}", header, rates),
        Table("Ratios, medians of those within a round", ["of", "ratio"], ratios),
        Table("Bars", ["bar", ""], bars),
    ]


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Measure every arm bench.rounds times."""
    return benchmark_sims(rounds=config.bench.rounds)


BENCHMARK = Benchmark(
    "How fast is robopolicy's engine compared with pure physics, gymnasium's vector environments and Meta-World?",
    ("rounds",),
    benchmark,
    tables,
)
