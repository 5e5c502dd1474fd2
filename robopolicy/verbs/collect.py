"""Records episodes of the scripted expert, a custom controller or a policy as a LeRobotDataset v3.

collect.noise=[none,medium] records half the episodes with a noise-free expert and half with a noisy one. For offline
RL, collect.quality=expert|medium|replay|mixed|play|random finds the noise level that gives the requested success on
this task. It stores the source of every step, and the returns of uniform random actions and of the expert for
normalised scores. Failed episodes are kept, because world models need them; collect.successes_only=true drops them.
Finished episodes are saved at once, so an interrupted run plays only the missing ones. collect.policy with plan.model
plans with a world model; plan.uncertainty above 0 prefers actions where the model is uncertain. collect.chains=true
also records the policy's denoising chains (for gate.evaluators=[importance]). collect.correct.no_progress_steps=20 lets
the expert (or collect.controller, or another collect.correct.operator) take over after 20 steps without progress: it
goes back to where it can try again (collect.correct.recover_steps=20), or undoes the last steps
(collect.correct.rewind=10), and completes the task. collect.correct.detector=FOLDER calls it when a failure detector
alarms, collect.correct.operators=1 lets all rows share one, operator_steps hands back, and frames is a budget of their
steps. Every step records the agent that acted; train and offline use this.
collect.label_policy=expert stores the noise-free expert's action for every step, as complete chunks if the world has
snapshots. collect.label_policy=TEACHER stores another policy's actions in the states that collect.policy=STUDENT
visits; train imitates these actions. workers.count=N records batches of world.batch_size episodes in N processes, with
equal results.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.building.origins import origin_of_section
from robopolicy.building.planning import with_planning
from robopolicy.building.policies import choose_device, fitted_for, load_acting, load_policy
from robopolicy.building.workers import Workers, open_workers
from robopolicy.building.worlds import EXPERT, build_controller, build_lookahead, build_noisy_expert, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.act import AUTO
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.interventions import intervention_counts, interventions_in_words
from robopolicy.core.origin import prefix_errors
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.spec import require_fit
from robopolicy.core.world import Controller, World
from robopolicy.data.corrections import with_recovery
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.lookahead import LookaheadController
from robopolicy.data.quality import Quality
from robopolicy.data.record import Recorder, corrected, of_one_world, record_chains, record_with
from robopolicy.evaluation.importance import with_densities
from robopolicy.evaluation.intervals import mean_interval, wilson
from robopolicy.failures.alarms import DetectorAlarm
from robopolicy.failures.watcher import load_watcher
from robopolicy.operators.operator import Site, make_operator
from robopolicy.runs import finish, finished, open_run, output
from robopolicy.verbs.graded import record_graded, recorder_of
from robopolicy.verbs.unfinished import Unfinished
from robopolicy.verbs.verb import Verb
from sims.controllers import NamedController

VERB = Verb(
    summary="Record demonstrations as a LeRobotDataset",
    sections=("run", "world", "workers", "plan", "inference", "collect"),
    example="robopolicy collect recipe=push_cube collect.episodes=200",
    world_from={"collect.policy": ""},
    resumes=True,
)


def run(config: Config) -> int:
    """Record episodes, write the dataset, and print its success rate."""
    folder = open_run(config, "collect", VERB.sections)
    unfinished = Unfinished(config, folder.path)
    if (done := finished(folder)) is not None:
        unfinished.remove()
        output.print(
            f"{folder.path} already contains {done['episodes']} episodes; run.overwrite=true records them again."
        )
        return 0
    section, quality = config.collect, config.collect.quality
    graded, columns = None, None
    helped: dict[str, Any] = {}
    with open_workers(config) as workers:
        if quality:
            graded = record_graded(config, quality, folder.path, unfinished, workers, acting(config))
            episodes, columns = graded.episodes, graded.columns
        elif section.chains:
            episodes, columns = collect_chains(config, unfinished, workers)
        elif section.correct.wanted:
            episodes = collect_corrected(config, unfinished, workers)
            output.print(interventions_in_words(episodes))
            helped = {"interventions": intervention_counts(episodes)}
        else:
            episodes = collect(config, unfinished, workers)
    write_dataset(
        episodes,
        folder.path / "dataset",
        images=section.images,
        existing="replace",
        origin=origin_of_section(config.world),
        columns=columns,
        quality=None if graded is None else graded.description,
    )
    result = summary(episodes) | ({} if graded is None else graded.figures) | unfinished.figures | helped
    finish(config, folder, result)
    unfinished.remove()
    output.print(
        f"Recorded {result['episodes']} episodes, {result['steps']} steps, {outcome(result)}"
        f" -> {folder.path / 'dataset'}"
    )
    return 0


@dataclass(frozen=True)
class Cast:
    """What acts in a recording and labels it: the policy (None for a controller) and the teacher, in their world."""

    config: Config
    world: World
    policy: Policy | None
    device: torch.device
    teacher: Policy | Controller | LookaheadController | None

    @staticmethod
    def of(config: Config) -> "Cast":
        """Load policy and teacher, and build their world, with no more rows than the largest share of episodes."""
        section = config.collect
        policy, device = acting(config)
        teacher = None if section.label_policy in ("", EXPERT) else load_policy(section.label_policy, device)
        episodes = max(shares_of(config).values())
        world = build_world(config.world, policy, episodes=episodes, seed=config.run.seed, filmed=True)
        if teacher is not None:
            with prefix_errors(teacher):
                require_fit(teacher.spec, world.spec)
        elif section.label_policy == EXPERT:
            teacher = build_lookahead(config.world, world, section.label_steps, section.controller)
        return Cast(config, world, policy, device, teacher)

    def close(self) -> None:
        """Close the worlds of policy and teacher."""
        self.world.close()
        if isinstance(self.teacher, LookaheadController):
            self.teacher.close()

    @cached_property
    def generator(self) -> torch.Generator:
        """Random generator of the noise of the policy's actions."""
        return Generators(self.config.run.seed, self.device)["act"]

    def recorder(self, index: int, level: str) -> Recorder:
        """Return the recorder of the episodes at noise level number `index`."""
        section, seed = self.config.collect, derive_seed(self.config.run.seed, f"collect/noise/{index}")
        actor = self.policy or build_noisy_expert(self.config.world, self.world, level, seed, section.controller)
        return Recorder(self.world, lambda _: actor, self.generator, section.deterministic, self.teacher)


def shares_of(config: Config) -> dict[tuple[int, str], int]:
    """Return the number of episodes of each noise level, by its index and name, without empty levels."""
    section = config.collect
    levels, episodes = section.noise if section.policy is None else ("",), section.episodes
    shares = {
        (index, level): episodes // len(levels) + (index < episodes % len(levels)) for index, level in enumerate(levels)
    }
    return {level: share for level, share in shares.items() if share}


def in_worker(config: Config, index: int, level: str) -> Recorder:
    """Build in a worker the recorder of the episodes at noise level number `index`."""
    return Cast.of(config).recorder(index, level)


def collect(config: Config, unfinished: Unfinished, workers: Workers) -> Episodes:
    """Record an equal number of episodes at each noise level, from seeds that no evaluation uses."""
    team, parts = Cast.of(config), []
    for (index, level), share in shares_of(config).items():
        episodes = record_with(
            team.recorder(index, level),
            episode_seeds(config.run.seed, f"collect/{index}", share),
            successes_only=config.collect.successes_only,
            kept=unfinished.part(str(index), share),
            recorders=workers.recorders("robopolicy.verbs.collect:in_worker", index=index, level=level),
        )
        parts.append(episodes)
    team.close()
    return of_one_world(parts)


def chains_recorder(config: Config) -> Recorder:
    """Return the recorder of a policy with its denoising chains."""
    policy, device = acting(config)
    assert policy is not None  # which the section asks for
    world = build_world(config.world, policy, episodes=config.collect.episodes, seed=config.run.seed)
    return Recorder(world, lambda _: policy, Generators(config.run.seed, device)["act"], chains=True)


def collect_chains(config: Config, unfinished: Unfinished, workers: Workers) -> tuple[Episodes, dict[str, Tensor]]:
    """Return a policy's episodes as `collect` records them, and columns with its denoising chains and their
    log-densities.

    Raises ConfigError when the policy plans with a world model: the choice among candidates has no density.
    """
    section = config.collect
    if config.plan.model is not None:
        raise ConfigError(
            "collect.chains=true needs log-probabilities of the actions, which planning (plan.model) does not "
            "provide: unset one of them."
        )
    recorder = chains_recorder(config)
    policy, device = cast(Policy, recorder.actor(np.arange(0))), recorder.generator.device
    seeds = episode_seeds(config.run.seed, "collect/0", section.episodes)
    options = {
        "kept": unfinished.part("chains", section.episodes),
        "recorders": workers.recorders("robopolicy.verbs.collect:chains_recorder"),
    }
    episodes, chains = record_chains(recorder.world, policy, seeds, generator=recorder.generator, **options)
    recorder.close()
    scored_chains = with_densities(policy, episodes.to(device), chains.to(device)).to("cpu")
    return episodes, scored_chains.columns(episodes.step_count)


def corrected_recorder(config: Config) -> Recorder:
    """Return the recorder of a policy that operators correct."""
    section = config.collect
    policy, device = acting(config)
    assert policy is not None  # which the section asks for
    correct = section.correct
    world = build_world(config.world, policy, episodes=section.episodes, seed=config.run.seed)
    site = Site(
        world.spec.action,
        world.spec.fps,
        world.batch_size,
        lambda: build_controller(config.world, world, section.controller),
    )
    operator = make_operator(correct.operator, site, correct.operator_options)
    if correct.recover_steps:
        expert = build_controller(config.world, world, section.controller)
        expert = expert.inner if isinstance(expert, NamedController) else expert
        operator = with_recovery(operator, expert, correct, world.spec, world.batch_size)
    alarms = [] if correct.detector is None else [_detector_alarm(config, correct.detector, policy, world, device)]
    generator = Generators(config.run.seed, device)["act"]
    return Recorder(world, lambda _: corrected(world, policy, operator, correct, generator, alarms), generator)


def _detector_alarm(config: Config, folder: Path, policy: Policy, world: World, device: torch.device) -> DetectorAlarm:
    """Return the alarm of the detectors in a folder, which were calibrated for the acting policy."""
    section = config.collect
    assert section.policy is not None
    described = fitted_for(config.inference, section.policy, policy)
    watcher = load_watcher(folder, policy, load_policy(section.policy, device), described)
    return DetectorAlarm(watcher, world.batch_size, derive_seed(config.run.seed, "detect/samples"), device)


def collect_corrected(config: Config, unfinished: Unfinished, workers: Workers) -> Episodes:
    """Return episodes of a policy with expert corrections, from the seeds of `collect`; each step records who acted."""
    recorder, count = corrected_recorder(config), config.collect.episodes
    seeds = episode_seeds(config.run.seed, "collect/0", count)
    elsewhere = workers.recorders("robopolicy.verbs.collect:corrected_recorder")
    cache, frames = unfinished.part("corrected", count), config.collect.correct.frames
    episodes = record_with(recorder, seeds, kept=cache, recorders=elsewhere, frames=frames)
    recorder.close()
    return episodes


def graded_recorder(config: Config, quality: Quality, levels: dict[str, float]) -> Recorder:
    """Build in a worker the recorder of a dataset of graded quality; see `robopolicy.verbs.graded.recorder_of`."""
    return recorder_of(config, quality, levels, *acting(config))[0]


def acting(config: Config) -> tuple[Policy | None, torch.device]:
    """Return the acting policy, with planning if configured (None for a controller), and its device."""
    section, device = config.collect, choose_device(config.run)
    if config.plan.model is not None and section.policy is None:
        raise ConfigError("plan.model plans with a policy: set collect.policy=CHECKPOINT as well.")
    if section.policy is None:
        return None, device
    if section.chains:  # an engine acts, and does not say how it came to a decision
        if config.inference.engine not in (AUTO, "reference"):
            raise ConfigError(
                f"collect.chains=true records denoising chains, which inference.engine={config.inference.engine} "
                "does not return: unset inference.engine."
            )
        return load_policy(section.policy, device), device
    return with_planning(config.plan, load_acting(config.inference, section.policy, device), device), device


def summary(episodes: Episodes) -> dict[str, Any]:
    """Return the number of recorded episodes and steps, and the success rate with its Wilson interval. If the world
    reports no success, return the mean return with its bootstrap interval.
    """
    counts = {"episodes": len(episodes), "steps": episodes.step_count}
    if episodes.success is None:
        totals = np.zeros(len(episodes)) if episodes.returns is None else episodes.returns.cpu().numpy()
        low, high = mean_interval(totals)
        return {**counts, "success_rate": None, "return_mean": float(totals.mean()), "low": low, "high": high}
    successes = int(episodes.success.sum())
    low, high = wilson(successes, len(episodes))
    return {**counts, "success_rate": successes / len(episodes), "low": low, "high": high}


def outcome(result: Mapping[str, Any]) -> str:
    """Describe the success rate or return of recorded episodes in words."""
    if result["success_rate"] is not None:
        return f"success {result['success_rate']:.0%}"
    return f"no success reported, return {result['return_mean']:.4g} [{result['low']:.4g}, {result['high']:.4g}]"
