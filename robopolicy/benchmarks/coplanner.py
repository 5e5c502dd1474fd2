"""COPlanner: does penalising uncertainty make imagined plans more accurate, and does rewarding it improve the model?

The model is trained on a few nearly clean demonstrations, so it is inaccurate elsewhere. Penalty, on push_cube:
rollouts inside the model select among candidates by reward minus uncertainty; measured is their error against the
simulator under the same actions. Bonus, on reach_planar: real episodes select by reward plus uncertainty, and the model
is retrained on all data after each round; measured is its error on held-out actions, from play and from further
episodes of every explorer. All explore for the same number of control steps. Baselines: the policy alone, and planning
without uncertainty. Source: Wang et al. 2023, arXiv:2310.07220.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from robopolicy.benchmarks.rates import mean_text
from robopolicy.benchmarks.replay import TASK, replay
from robopolicy.benchmarks.runs import each_seed, expert
from robopolicy.core.episodes import Episodes
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.world import World
from robopolicy.data.record import record, record_until
from robopolicy.evaluation.world_model import open_loop
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.fit import fit_stages
from robopolicy.training.pretrain import pretrain
from robopolicy.verbs.bench import Benchmark, Table
from sims.registry import make_world
from worldmodels.configuration import EnsembleConfig, PlanConfig
from worldmodels.data import recorded_transitions
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import recorded_starts
from worldmodels.planning import PlannedPolicy

SIGNS = {"policy": None, "planned": 0.0, "cautious": -1.0, "curious": 1.0}
"""Weight of uncertainty in a candidate's score, as a share of the study's; None: the policy decides alone."""

EXPLORERS = ("policy", "planned", "curious")

DEMONSTRATED = 0.1
"""Noise of the demonstrations."""


@dataclass(frozen=True)
class Study:
    """One question on one task.

    demonstrations: recorded episodes; uncertainty: weight, multiplied by the factors in SIGNS; candidates: of a plan;
    exploration: standard deviation of the policy's noise, in normalised actions, by which candidates differ.
    """

    task: str
    demonstrations: int
    uncertainty: float
    candidates: int
    exploration: float


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement.

    cautious: settings of the comparison of imagined rollouts with the simulator; imagined: number of rollouts of
    `steps`. curious: settings of exploration: `rounds` of `explored` control steps each after the demonstrations;
    held_out: episodes of play and of every explorer; play: noise of the expert in play. horizon: of all plans; fit,
    clone: training steps of models and policies.
    """

    cautious: Study = Study(TASK, 60, 4.0, 8, 0.4)
    imagined: int = 200
    steps: int = 20
    curious: Study = Study("reach_planar", 30, 30.0, 32, 0.3)
    explored: int = 400
    rounds: int = 2
    held_out: int = 64
    play: float = 8.0
    horizon: int = 12
    fit: int = 1500
    clone: int = 1500


def measure(seed: int, scale: Scale) -> dict[str, dict[str, float]]:
    """Return, for each actor, the error of its imagined rollouts and the gain of the model from its exploration."""
    results = value_of_exploring(seed, scale)
    for name, error in imagined_errors(seed, scale).items():
        results.setdefault(name, {})["imagined_error"] = error
    return results


def imagined_errors(seed: int, scale: Scale) -> dict[str, float]:
    """Return, for each actor, the error of imagined rollouts on push_cube against the simulator, in standard
    deviations.
    """
    study = scale.cautious
    world = make_world(study.task, 64, seed=seed)
    demonstrations, policy = demonstrations_and_policy(world, study, scale, seed)
    world.close()
    model = train_model(world, demonstrations, scale, seed)
    actors = {name: actor_of(name, policy, model, study, scale) for name in SIGNS}
    return {name: imagined_error(model, actor, demonstrations, scale, seed) for name, actor in actors.items()}


def value_of_exploring(seed: int, scale: Scale) -> dict[str, dict[str, float]]:
    """Return, for each explorer (and "before"), {"model_error", "explored_success"} on reach_planar: the model's error
    on held-out actions after training on the exploration data, and the success rate while exploring.
    """
    study, held_out = scale.curious, episode_seeds(seed, "held out", scale.held_out)
    world = make_world(study.task, 64, seed=seed)
    demonstrations, policy = demonstrations_and_policy(world, study, scale, seed)
    before = train_model(world, demonstrations, scale, seed)
    later = [record(world, expert(world, scale.play, derive_seed(seed, "player")), held_out)]
    models, results = {"before": before}, {}
    for name in EXPLORERS:
        model = before
        actor = actor_of(name, policy, before, study, scale)
        datasets = [demonstrations]
        for turn in range(scale.rounds):
            datasets.append(explore(world, actor, scale.explored, derive_seed(seed, f"explored/{turn}")))
            model = train_model(world, Episodes.concatenate(datasets), scale, seed)
            actor = actor_of(name, policy, model, study, scale)
        later.append(record(world, actor, held_out, generator=Generators(seed)["act"]))
        success = Episodes.concatenate(datasets[1:]).success
        assert success is not None
        models[name], results[name] = model, {"explored_success": float(success.float().mean())}
    world.close()
    for name, model in models.items():
        errors = [following_error(model, each) for each in later]
        results.setdefault(name, {})["model_error"] = sum(errors) / len(errors)
    return results


def actor_of(
    name: str, policy: DenoisingPolicy, model: EnsembleModel, study: Study, scale: Scale
) -> DenoisingPolicy | PlannedPolicy:
    """Return the policy alone, or a planner with the weight of uncertainty that `SIGNS` defines."""
    sign = SIGNS[name]
    if sign is None:
        return policy
    return PlannedPolicy(
        policy, model, PlanConfig(study.candidates, scale.horizon, uncertainty=study.uncertainty * sign)
    )


def demonstrations_and_policy(world: World, study: Study, scale: Scale, seed: int) -> tuple[Episodes, DenoisingPolicy]:
    """Return nearly clean demonstrations and a policy that imitates them, with exploration noise."""
    demonstrations = record(
        world,
        expert(world, DEMONSTRATED, derive_seed(seed, "expert")),
        episode_seeds(seed, "demonstrations", study.demonstrations),
    )
    config = DenoisingPolicyConfig(
        chunk=4,
        prediction_steps=4,
        sampling_steps=5,
        min_sampling_std=study.exploration,
        min_logprob_std=study.exploration,
    )
    policy = DenoisingPolicy(
        config,
        demonstrations.observation_fields,
        demonstrations.action_field,
        values={**demonstrations.observation, "action": demonstrations.actions},
        fps=demonstrations.fps,
        instructions=world.spec.instructions,
        seed=derive_seed(seed, "policy"),
    )
    fitting = FitConfig(steps=scale.clone, learning_rate=1e-3, checkpoint_every=10**9)
    pretrain(policy, demonstrations, PretrainConfig(256, fitting), seed=seed)
    return demonstrations, policy


def explore(world: World, actor: Policy, steps: int, seed: int) -> Episodes:
    """Return complete episodes of an actor, eight at a time, with at least this many control steps."""
    generator = Generators(seed)["act"]
    return record_until(
        steps, lambda turn: record(world, actor, episode_seeds(seed, str(turn), 8), generator=generator)
    )


def train_model(world: World, episodes: Episodes, scale: Scale, seed: int) -> EnsembleModel:
    """Return an ensemble fitted to `episodes`."""
    model = EnsembleModel.build(EnsembleConfig(), world.spec, episodes, derive_seed(seed, "model"))
    fit_stages(
        model, episodes, FitConfig(steps=scale.fit, learning_rate=3e-3, checkpoint_every=10**9), Generators(seed)
    )
    model.calibrate(episodes)
    return model.eval()


def imagined_error(model: EnsembleModel, actor: Policy, shown: Episodes, scale: Scale, seed: int) -> float:
    """Return the error of imagined rollouts in the simulator, in standard deviations of recorded states."""
    imagined_world = ImaginedWorld(model, recorded_starts(shown), scale.imagined)
    episodes = record(
        imagined_world, actor, episode_seeds(seed, "imagined", scale.imagined), generator=Generators(seed)["act"]
    )
    data, spread = (
        recorded_transitions(episodes),
        recorded_transitions(shown).state.std(0, correction=0).clamp_min(1e-6),
    )
    long = episodes.lengths >= scale.steps
    first = episodes.starts[long]
    index = first[:, None] + torch.arange(scale.steps)
    true_states = replay(data.state[first], data.action[index])
    return float(((data.next_state[index] - true_states) / spread).square().mean().sqrt())


def following_error(model: EnsembleModel, episodes: Episodes, horizon: int = 10) -> float:
    """Return the error of predictions for held-out actions over `horizon` steps, mean over the observation's keys."""
    figures = open_loop(model, episodes, torch.Generator().manual_seed(0), 512, (horizon,))[str(horizon)]
    return sum(each["model"] for each in figures.values()) / len(figures)


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the accuracy of imagined rollouts and the gain from exploration."""
    header = ["decides", "error of imagined rollouts", "error of the model after exploring", "success exploring"]
    runs, lines = list(figures["seeds"].values()), []
    for name in runs[0]:
        cells = []
        for key in ("imagined_error", "model_error", "explored_success"):
            values = [run[name][key] for run in runs if key in run[name]]
            cells.append(mean_text(values, 3) if values else "")
        lines.append([name, *cells])
    title = "Mean (each seed), errors in standard deviations: imagined rollouts on push_cube, exploring on reach_planar"
    return [Table(title, header, lines)]


BENCHMARK = Benchmark(
    "Are cautious plans accurate in imagination, and does exploration by uncertainty improve the model?",
    ("seeds",),
    each_seed(lambda seed, folder: measure(seed, Scale())),
    tables,
)
