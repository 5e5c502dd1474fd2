"""Planning towards goal pictures: our models of image features next to LeWM's own code (`benchmarks.lewm`).

The recordings are the same (demonstrations, noisy experts, play and a policy), as are starts, goals
and simulator. Every model sees the top camera at 64 px; ours reads the robot's own vector, too. Ours plans 16 control
steps and executes 2, theirs plans and executes 5 blocks of 5. Two kinds of goals: the last frame of the expert's own
episode from that start, where the task decides about success; and, as in LeWM's evaluation, a frame 25 steps later in
held-out play, where success is that within 50 steps what is pushed lies where it lies in the frame, within the task's
tolerances. Moments after which it moves by less than twice these are left out.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from robopolicy.benchmarks import lewm
from robopolicy.benchmarks.rates import mean_text, pooled, rate_of, rate_text
from robopolicy.benchmarks.runs import Changes, chosen_from, each_row, modelled, pretrained
from robopolicy.configuration import Config
from robopolicy.core.action_bounds import bounds_of
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import TensorObservation
from robopolicy.core.randomness import derive_seed, episode_seeds, numpy_generator
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, Observation
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.world import Snapshot, World, begin_episodes
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.play import PlayingController
from sims.registry import load_task
from sims.task import elements
from sims.tasks import push_cube, push_t
from worldmodels.checkpoint import load_world_model
from worldmodels.configuration import PlanConfig
from worldmodels.goals import Goal
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.mpc import ModelPredictivePolicy
from worldmodels.protocol import Context

CAMERA, IMAGE_SIZE = "top", 64
PICTURE = IMAGE_PREFIX + CAMERA
AHEAD, LIMIT = 25, 50
"""Control steps between start and goal in play, and within which a planner reaches it."""
MOVED = 2.0
"""Tolerances of the task by which what is pushed moves between start and goal in play, at least."""
STARTS, TINY_STARTS = 64, 4
LONGER = 10
"""Factor on the steps of training of LeWM, whose transformers learn slowly."""
MODEL = Changes(
    (
        "worldmodel.kind=latent_ensemble",
        f"world.cameras=[{CAMERA}]",
        f"world.image_size={IMAGE_SIZE}",
        "worldmodel.transitions=20000",
        "worldmodel.fit.steps=2000",
        "worldmodel.config.ensemble.members=3",
    ),
    {"push_t": ("worldmodel.transitions=80000",)},
)
"""Settings of our model and of the recordings: minutes of training."""
BLOCK = elements(push_t.BLOCK_FIELD, "block_x block_y")


def cube_reached(state: np.ndarray, goal: np.ndarray, tolerances: float = 1.0) -> np.ndarray:
    """Return whether the cubes of environment states [..., 13] lie where those of `goal` do, [...] bool."""
    offset = state[..., push_cube.CUBE] - goal[..., push_cube.CUBE]
    return np.linalg.norm(offset, axis=-1) < tolerances * push_cube.TOLERANCE


def block_reached(state: np.ndarray, goal: np.ndarray, tolerances: float = 1.0) -> np.ndarray:
    """Return whether the T blocks of environment states [..., 13] lie as those of `goal` do, [...] bool."""
    distance = np.linalg.norm(state[..., BLOCK] - goal[..., BLOCK], axis=-1)
    yaw, goal_yaw = (np.arctan2(each[..., push_t.SINE], each[..., push_t.COSINE])[..., 0] for each in (state, goal))
    turn = np.abs((yaw - goal_yaw + np.pi) % (2 * np.pi) - np.pi)
    near = distance < tolerances * push_t.POSITION_TOLERANCE
    return near & (turn < tolerances * push_t.ANGLE_TOLERANCE)


REACHED: dict[str, Callable[..., np.ndarray]] = {"push_cube": cube_reached, "push_t": block_reached}
"""By task: environment states, those of goals, and how many of the task's tolerances -> whether goals are reached."""

PLACES = {
    "push_cube": elements(push_cube.CUBE_FIELD, "cube_x cube_y"),
    "push_t": elements(push_t.BLOCK_FIELD, "block_x block_y block_cos block_sin"),
}
"""By task: elements of the environment state that say where goals are."""


@dataclass(frozen=True)
class Attempts:
    """Starts and goals of N attempts.

    starts: states of the world; pictures: uint8 [N, height, width, 3] and states: [N, 13], environment states, of the
    goals; limit: control steps; by_task: the task decides about success, not the place in the picture.
    """

    starts: Snapshot
    pictures: np.ndarray
    states: np.ndarray
    limit: int
    by_task: bool


class Plans(Protocol):
    """What decides, with a goal for every row."""

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, int]:
        """Return actions [B, C, A], of which those of rows that are not `running` [B] do not matter, and the number of
        rows that were planned.
        """
        ...


def opened(task: str, rows: int, seed: int, *, to_the_end: bool) -> MujocoWorld:
    """Return the simulator with the camera; to_the_end: success does not end an episode."""
    images = {"cameras": (CAMERA,), "image_size": IMAGE_SIZE}
    return MujocoWorld(load_task(task), rows, seed=seed, terminate_on_success=not to_the_end, **images)


def last_frames(task: str, count: int, seed: int) -> Attempts:
    """Return attempts at the last frames of the expert's own episodes."""
    world = opened(task, count, seed, to_the_end=False)
    observation = world.reset(seeds=episode_seeds(seed, "goals", count))
    starts, expert = world.snapshot(), load_task(task).expert()
    horizon = world.spec.horizon
    for _ in range(horizon):
        step = world.step(expert.act(observation)[:, None])
        observation = step.observation
        if step.ended.all():
            break
    pictures, states = observation[PICTURE][:, -1], observation[ENVIRONMENT_STATE][:, -1]
    world.close()
    return Attempts(starts, pictures, states, horizon, by_task=True)


def later_frames(task: str, count: int, seed: int) -> Attempts:
    """Return attempts at frames of held-out play, `count` or fewer, one an episode: the start is a random moment of
    those after which what is pushed moves by more than MOVED tolerances.
    """
    world = opened(task, 2 * count, seed, to_the_end=True)
    player = PlayingController(load_task(task).expert(), derive_seed(seed, "play"), world.spec)
    seeds = episode_seeds(seed, "goals in play", world.batch_size)
    observation = world.reset(seeds=seeds)
    moments, frames = list[Snapshot](), list[Observation]()
    begin_episodes(player, seeds)
    for _ in range(world.spec.horizon - LIMIT + AHEAD):
        moments.append(world.snapshot())
        frames.append(observation)
        observation = world.step(player.act(observation)[:, None]).observation
    world.close()
    states = np.stack([each[ENVIRONMENT_STATE][:, -1] for each in frames])
    stays = REACHED[task](states[:-AHEAD], states[AHEAD:], MOVED)
    draws = numpy_generator(seed, "moments")
    starts, goals = list[Snapshot](), list[tuple[int, int]]()
    for row in np.flatnonzero(~stays.all(0))[:count]:
        moment = int(draws.choice(np.flatnonzero(~stays[:, row])))
        starts.append(moments[moment].take([row]))
        goals.append((moment + AHEAD, row))
    joined = {name: np.concatenate([each.arrays[name] for each in starts]) for name in starts[0].arrays}
    pictures = np.stack([frames[moment][PICTURE][row, -1] for moment, row in goals])
    return Attempts(Snapshot(joined), pictures, np.stack([states[place] for place in goals]), LIMIT, by_task=False)


class Ours:
    """CEM in a model of image features: towards the features of the goal pictures or, with a `place` in the environment
    state, towards the elements there that the model reads off the pictures.
    """

    def __init__(self, checkpoint: Path, goals: np.ndarray, seed: int, place: slice | None = None):
        model = load_world_model(checkpoint)
        assert isinstance(model, LatentEnsembleModel)
        self.model, self.goals = model, goals
        self.place = place
        self.policy = ModelPredictivePolicy(model, PlanConfig(kind="cem", horizon=16))
        self.generator = torch.Generator().manual_seed(derive_seed(seed, "plans"))

    def goal(self, observation: Observation) -> Goal:
        """Return the goals, for the first observation [B, 1, ...] of their attempts."""
        if self.place is None:
            return Goal(self.model, {PICTURE: torch.from_numpy(self.goals)})
        # The robot's own vector is not known there: that of the start stands in for it.
        context = Context({STATE: observation[STATE], PICTURE: self.goals[:, None]})
        latent = self.model.initial(context, np.arange(len(self.goals)))
        state = self.model.read(latent, (ENVIRONMENT_STATE,))[ENVIRONMENT_STATE]
        target = torch.full_like(state, torch.nan)
        target[:, self.place] = state[:, self.place]
        return Goal(self.model, {ENVIRONMENT_STATE: target})

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, int]:
        """Return 2 control steps of all rows, [B, 2, A]."""
        if self.policy.goal is None:
            self.policy.goal = self.goal(observation)
        tensors: TensorObservation = {key: torch.from_numpy(observation[key]) for key in self.policy.spec.observation}
        return self.policy.act(tensors, self.generator).actions.numpy(), len(running)


class Random:
    """Uniformly random actions."""

    def __init__(self, bounds: tuple[np.ndarray, np.ndarray], seed: int):
        self.bounds, self.draws = bounds, numpy_generator(seed, "random")

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, int]:
        """Return 2 control steps of all rows, [B, 2, A]."""
        low, high = self.bounds
        return self.draws.uniform(low, high, (len(running), 2, len(low))), len(running)


def attempt(world: MujocoWorld, task: str, attempts: Attempts, plans: Plans) -> dict[str, float]:
    """Return success with its Wilson interval, "successes", and processor milliseconds a decision and control steps of
    one.
    """
    count = len(attempts.states)
    world.reset(seeds=np.arange(count))
    observation = world.restore(attempts.starts)
    running, reached = np.ones(count, bool), np.zeros(count, bool)
    seconds, decisions = 0.0, 0
    chunk, steps = 1, 0
    while steps < attempts.limit and running.any():
        begin = time.process_time()
        actions, rows = plans.act(observation, running)
        seconds, decisions = seconds + time.process_time() - begin, decisions + rows
        chunk = actions.shape[1]
        step = world.step(actions[:, : attempts.limit - steps])
        if attempts.by_task:
            reached = step.success
        else:
            is_near = REACHED[task](step.trace[ENVIRONMENT_STATE], attempts.states[:, None]) & step.valid
            reached = reached | is_near.any(1)
        running = ~reached & ~step.ended
        observation, steps = step.observation, steps + chunk
    successes = int(reached.sum())
    decision = {"milliseconds": 1000 * seconds / decisions, "steps": chunk}
    return {**rate_of(successes, count), "successes": successes, **decision}


Making = tuple[Callable[[World, np.ndarray], Plans], float]
"""(world, goal pictures) -> what decides, and minutes of its training."""


def recorded(config: Config, root: Path, task: str, seed: int) -> Path:
    """Return the run folder of our model, with the recordings of all in `dataset`."""
    base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    return modelled(config, root, task, "latent_ensemble", seed, (*MODEL.of(task), f"worldmodel.policies=[{base}]"))


def ours(
    config: Config, root: Path, task: str, seed: int, *, predicting: bool = False, reading: bool = False
) -> Making:
    """Train a model of image features, if it is missing.

    predicting: its encoder predicts its features; reading: goals are places that it reads off the pictures.
    """
    folder = recorded(config, root, task, seed)
    if predicting:
        settings = *MODEL.of(task), "worldmodel.config.encoder_loss=predict"
        data = f"worldmodel.data=[{folder / 'dataset'}]", "worldmodel.transitions=1"
        folder = modelled(config, root, task, "predicting", seed, (*settings, *data))
    minutes = read_json(folder / "result.json")["seconds"] / 60
    place = PLACES[task] if reading else None
    return lambda world, pictures: Ours(folder / "checkpoint", pictures, seed, place), minutes


def theirs(config: Config, root: Path, task: str, seed: int, *, times: int = 1) -> Making:
    """Train LeWM on the recordings of our model; times: factor on the steps that take as long as training ours."""
    lewm.require_package()
    size = lewm.TINY if config.bench.tiny else lewm.Size()
    size = replace(size, steps=times * size.steps)
    dataset = recorded(config, root, task, seed) / "dataset"
    episodes = read_dataset(dataset, cameras=(CAMERA,))
    folder = root / task / ("lewm" if times == 1 else f"lewm_{times}_times") / str(seed)
    model, seconds = lewm.trained(episodes, CAMERA, size, seed, folder)
    statistics = lewm.action_statistics(episodes)

    def make(world: World, pictures: np.ndarray) -> Plans:
        bounds = bounds_of(world.spec.action)
        return lewm.Planner(model, size, PICTURE, statistics, bounds, pictures, seed)

    return make, seconds / 60


def undecided(config: Config, root: Path, task: str, seed: int) -> Making:
    """Act at random."""
    return lambda world, pictures: Random(bounds_of(world.spec.action), seed), 0.0


ARMS: dict[str, tuple[str, Callable[[Config, Path, str, int], Making]]] = {
    "latent_ensemble": ("`latent_ensemble`", ours),
    "readout": ("`latent_ensemble`, places read off the pictures", partial(ours, reading=True)),
    "predicting": ("`latent_ensemble`, its encoder predicts", partial(ours, predicting=True)),
    "lewm": ("LeWM's own code", theirs),
    "lewm_longer": (f"LeWM's own code, {LONGER} times the training", partial(theirs, times=LONGER)),
    "random": ("random actions", undecided),
}
"""What bench.only names: as it is shown, and what prepares it."""


GOALS: dict[str, tuple[str, Callable[[str, int, int], Attempts]]] = {
    "end": ("the expert's last frame", last_frames),
    "later": (f"{AHEAD} steps later in play", later_frames),
}


def measure(config: Config, root: Path, task: str, arm: str, seed: int) -> dict[str, Any]:
    """Return {"minutes" of training, GOALS: results of `attempt`}, measured once."""
    path = root / task / "rows" / arm / f"{seed}.json"
    results: dict[str, Any] = read_json(path) if path.exists() else {}
    if results.keys() >= GOALS.keys():
        return results
    count = TINY_STARTS if config.bench.tiny else STARTS
    make, results["minutes"] = ARMS[arm][1](config, root, task, seed)
    for goal, (_, choose) in GOALS.items():
        if goal in results:
            continue
        attempts = choose(task, count, seed)
        world = opened(task, len(attempts.states), seed, to_the_end=not attempts.by_task)
        results[goal] = attempt(world, task, attempts, make(world, attempts.pictures))
        world.close()
        write_json(path, results)
    return results


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {arm: {seed: results}}}}, measuring what is missing; raises ConfigError for a task whose
    tolerances are not known here, and without LeWM's package.
    """
    for task in config.bench.tasks:
        if task not in REACHED:
            raise ConfigError(f"Goals are not measured on '{task}': set bench.tasks=[{','.join(REACHED)}].")
    return {"tasks": each_row(config, root, chosen_from(config, ARMS), measure)}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task: a row per arm and goal."""
    header = ["plans in", "goal", "reached [Wilson 95 %]", "CPU ms a decision", "of steps", "minutes of training"]
    result_tables = []
    for task, arms in figures["tasks"].items():
        lines = []
        for arm, seeds in arms.items():
            for goal, (text, _) in GOALS.items():
                rows = [row[goal] for row in seeds.values()]
                milliseconds = mean_text((row["milliseconds"] for row in rows), 0)
                minutes = mean_text((row["minutes"] for row in seeds.values()), 1)
                rate = f"{rate_text(pooled(rows))} of {sum(row['episodes'] for row in rows)}"
                lines.append([ARMS[arm][0], text, rate, milliseconds, str(rows[0]["steps"]), minutes])
        result_tables.append(Table(f"{task}: goals given as pictures, seeds pooled", header, lines))
    return result_tables


BENCHMARK = Benchmark(
    "How often are goals given as pictures reached by planning in our models of image features, and by LeWM's own "
    "code on the same recordings?",
    ("tasks", "seeds", "only", "tiny", "overrides"),
    benchmark,
    tables,
)
