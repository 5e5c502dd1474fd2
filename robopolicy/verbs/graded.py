"""Dataset quality levels for `collect`: measure the anchors (reference scores), find the noise level, record, and
describe the dataset.

Measurements are saved in the run folder at once, so an interrupted run repeats none of them.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.building.origins import origin_of_section
from robopolicy.building.workers import Workers
from robopolicy.building.worlds import build_controller, build_world
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import NOISE_VERSION, Generators, episode_seeds
from robopolicy.core.storage import read_object, write_json
from robopolicy.core.world import World
from robopolicy.data.quality import (
    EXPERT_SUCCESS,
    MEDIUM_SUCCESS,
    NEEDED,
    SEGMENTS,
    VERSION,
    Disturbance,
    Disturbances,
    DisturbedController,
    DisturbedPolicy,
    Idle,
    Quality,
    Schedule,
    Trial,
    columns,
    dataset_name,
    expert_level,
    fingerprint,
    fixed,
    medium_level,
    schedule,
)
from robopolicy.data.record import Recorder, record_with
from robopolicy.evaluation.scores import Anchors, Performance, normalised_score
from robopolicy.evaluation.success import evaluate_policy, require_success
from robopolicy.runs import output
from robopolicy.verbs.unfinished import Unfinished, acting_source

MEASURED = "measured.json"
"""File in the run folder with the measurements so far."""


@dataclass(frozen=True)
class Graded:
    """A dataset with a quality level; columns: per-step columns, each [N]; description: how it was generated, stored in
    the dataset.
    """

    episodes: Episodes
    columns: dict[str, Tensor]
    description: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """Values for result.json."""
        return {name: self.description[name] for name in ("name", "quality", "hash", "levels", "anchors", "score")}


@dataclass(frozen=True)
class Ground:
    """Measurements that a recording is based on: the anchors, the noise levels of "expert" and "medium" if needed, and
    all trials.
    """

    anchors: Anchors
    levels: dict[str, float]
    trials: tuple[Trial, ...]


def record_graded(
    config: Config,
    quality: Quality,
    folder: Path,
    unfinished: Unfinished,
    workers: Workers,
    actor: tuple[Policy | None, torch.device],
) -> Graded:
    """Measure the anchors, find the noise level for `quality`, and record; folder: the run folder; unfinished: its
    episodes recorded so far; actor: the policy (None for a controller) and its device.

    Raises ConfigError (no expert, success not reported, actions without bounds) and DataError (the expert fails,
    returns do not rank it above uniform random actions, or no noise level gives the requested success).
    """
    ground = find_ground(config, quality, folder / MEASURED, *actor)
    output.print(f"uniform random actions: {ground.anchors.random.text}\nexpert: {ground.anchors.expert.text}")
    for name, level in ground.levels.items():
        output.print(f"noise of {name}: {Disturbance.at(level).text}{_tried(ground.trials, level)}")
    recorder, plan = recorder_of(config, quality, ground.levels, *actor)
    elsewhere = workers.recorders(
        "robopolicy.verbs.collect:graded_recorder", quality=quality, levels=dict(ground.levels)
    )
    try:
        seeds = episode_seeds(config.run.seed, f"collect/{quality}", config.collect.episodes)
        cache = unfinished.part(quality, len(seeds))
        episodes = record_with(recorder, seeds, kept=cache, recorders=elsewhere)
        settings = _settings(config, quality, ground, recorder.world.spec.horizon)
    finally:
        recorder.close()
    performance = Performance.of_episodes(episodes)
    score = normalised_score(performance, ground.anchors)
    _say_missed(quality, performance)
    name = dataset_name(settings["world"]["name"], quality)
    output.print(f"{name}: {performance.text}, {score.text}")
    description = {
        "name": name,
        "quality": quality,
        "generator": settings,
        "hash": fingerprint(settings),
        "levels": {key: dataclasses.asdict(Disturbance.at(level)) for key, level in ground.levels.items()},
        "trials": [dataclasses.asdict(trial) for trial in ground.trials],
        "anchors": ground.anchors.to_json(),
        "measured": performance.to_json(),
        "score": score.to_json(),
        "segments": list(SEGMENTS),
    }
    return Graded(episodes, columns(episodes, plan), description)


def recorder_of(
    config: Config, quality: Quality, levels: Mapping[str, float], policy: Policy | None, device: torch.device
) -> tuple[Recorder, Schedule]:
    """Return the recorder of a dataset of graded quality with these noise levels, and the schedule of its noise."""
    section, seed = config.collect, config.run.seed
    world = build_world(config.world, policy, episodes=section.episodes, seed=seed)
    noise = episode_seeds(seed, f"collect/{quality}/noise", section.episodes)
    plan = schedule(quality, noise, world.spec.horizon, **levels)

    def actor(positions: np.ndarray) -> DisturbedController | DisturbedPolicy:
        return _disturbed(config, world, policy, plan.select(positions.tolist()))

    return Recorder(world, actor, Generators(seed, device)["act"], deterministic=True), plan


def find_ground(config: Config, quality: Quality, file: Path, policy: Policy | None, device: torch.device) -> Ground:
    """Measure the anchors and find the noise levels that `quality` needs; file: stores the measurements.

    The anchors' seeds are the same in every run, so all datasets of a task share one scale. Raises as `record_graded`.
    """
    section, measurements = config.collect, _known(file, config)
    scripted = policy is None and not section.controller  # scripted experts read the state, and images take time
    place = dataclasses.replace(config.world, cameras=()) if scripted else config.world
    row_limit = max(section.trial_episodes, section.reference_episodes)
    world = build_world(place, policy, episodes=row_limit, seed=config.run.seed)
    trials: list[Trial] = []

    def measured(name: str, level: float, kind: str, count: int, seed: int) -> Performance:
        if name not in measurements:
            noise = episode_seeds(seed, f"collect/{kind}/noise", count)
            actor = _disturbed(config, world, policy, fixed(np.full(count, level), noise, world.spec.horizon))
            seeds = episode_seeds(seed, f"collect/{kind}", count)
            result = evaluate_policy(world, actor, seeds, generator_seed=seed, device=device, label=name)
            measurements[name] = Performance.of(result.returns, result.success).to_json()
            write_json(file, measurements)
        return Performance(**measurements[name])

    def trial(level: float) -> Trial:
        name = f"trial {len(trials) + 1}: {Disturbance.at(level).text}"
        performance = measured(name, level, "trial", section.trial_episodes, config.run.seed)
        trials.append(Trial(level, performance.success_rate, performance.episodes))
        return trials[-1]

    try:
        require_success(world, "unset collect.quality, which is defined by success rates")
        expert = measured("expert", 0.0, "anchors", section.reference_episodes, 0)
        uniform = measured("uniform actions", 1.0, "anchors", section.reference_episodes, 0)
        anchors = Anchors(world.spec.name, uniform, expert).require_order()
        if quality in ("expert", "mixed") and expert.success_high < EXPERT_SUCCESS:
            raise ConfigError(
                f"collect.quality={quality} requires an expert with at least {EXPERT_SUCCESS:.0%} success. This one "
                f"has {expert.text}: use a better one with collect.controller=package.module:name or "
                "collect.policy=CHECKPOINT, or unset collect.quality."
            )
        find: dict[str, Callable[[], float]] = {
            "expert": lambda: expert_level(trial, expert.success_rate),
            "medium": lambda: medium_level(trial, expert.success_rate, uniform.success_rate),
        }
        return Ground(anchors, {name: find[name]() for name in NEEDED[quality]}, tuple(trials))
    finally:
        world.close()


def _known(file: Path, config: Config) -> dict[str, Any]:
    """Return earlier measurements of this actor, if it has not changed: a checkpoint may have been trained further
    since.
    """
    noise_version = {"noise": NOISE_VERSION} if config.collect.policy is not None else {}
    actor = fingerprint({"version": VERSION, "actor": acting_source(config), **noise_version})
    content = read_object(file) if file.exists() else {}
    return content if content.get("actor") == actor else {"actor": actor}


def _disturbed(
    config: Config, world: World, policy: Policy | None, plan: Schedule
) -> DisturbedController | DisturbedPolicy:
    """Return the actor with noise applied according to `plan`; an idle actor if all actions would be random anyway."""
    disturbances = Disturbances(plan, world.batch_size, world.spec.action)
    if bool((plan.random >= 1).all()):
        return DisturbedController(Idle(world.spec.action), disturbances)
    if policy is not None:
        return DisturbedPolicy(policy, disturbances)
    controller = build_controller(config.world, world, config.collect.controller)
    return DisturbedController(controller, disturbances)


def _settings(config: Config, quality: Quality, ground: Ground, horizon: int) -> dict[str, Any]:
    """Return the settings that determine the recording, JSON-serialisable."""
    section, origin = config.collect, origin_of_section(config.world)
    world = {"name": config.world.simulator or config.world.name} if origin is None else origin.to_json()
    return {
        "version": VERSION,
        "quality": quality,
        "world": world,
        "horizon": horizon,
        "actor": acting_source(config),
        **({"noise": NOISE_VERSION} if config.collect.policy is not None else {}),  # a policy draws its own
        "levels": ground.levels,
        "episodes": section.episodes,
        "seed": config.run.seed,
        "trial_episodes": section.trial_episodes,
        "anchor_episodes": section.reference_episodes,
    }


def _tried(trials: tuple[Trial, ...], level: float) -> str:
    matches = [trial for trial in trials if trial.level == level]
    return f", success {matches[-1].success:.1%} of {matches[-1].episodes} episodes" if matches else ""


def _say_missed(quality: Quality, found: Performance) -> None:
    """Warn when the recording's success rate certainly lies outside the range of its quality level."""
    low, high = {"expert": (EXPERT_SUCCESS, 1.0), "medium": MEDIUM_SUCCESS}.get(quality, (0.0, 1.0))
    if found.success_high < low or found.success_low > high:
        warnings.warn(
            f"Success of quality '{quality}' should be between {low:.0%} and {high:.0%}, but is {found.text}: "
            "increase collect.trial_episodes for a more accurate noise level.",
            RobopolicyWarning,
            stacklevel=3,
        )
