"""COPlanner on push_cube: is a cautious plan truer in imagination, and does a curious one teach the model more?

A model learns from few nearly clean demonstrations, so it is wrong where they never went. Cautious: rollouts inside the
model choose among candidates by reward minus doubt; what is asked is how far they are from what the simulator does
under the same actions. Curious: real episodes choose by reward plus doubt; asked is how much better the model follows
what happens next, wherever anybody goes: play and further episodes of all four, after learning from the first ones too.
The policy alone, and planning without doubt, are beside both.
Source: Wang et al. 2023, arXiv:2310.07220.
"""

from dataclasses import dataclass
from typing import Any

import torch

from robopolicy.benchmarks.replay import TASK, replay
from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators, derive, episode_seeds
from robopolicy.core.world import World
from robopolicy.data.record import record
from robopolicy.policies import DenoisingPolicyConfig, build_policy
from robopolicy.training.fit import FitConfig
from robopolicy.training.pretrain import PretrainConfig, pretrain
from robopolicy.training.stages import fit_stages
from sims.experts import Noise, NoisyController
from sims.registry import load_task, make_world
from worldmodels.diagnostics import open_loop
from worldmodels.ensemble import EnsembleConfig, EnsembleModel
from worldmodels.env import ImaginedWorld
from worldmodels.imagination import recorded_starts
from worldmodels.planning import PlanConfig, PlannedPolicy
from worldmodels.transitions import TransitionData

ACTORS = {"policy": None, "planned": 0.0, "cautious": -1.0, "curious": 1.0}
"""What a unit of doubt adds to a candidate's score; None: no candidates at all."""


@dataclass(frozen=True)
class Scale:
    """demonstrations, explored, held_out (of play and of every actor): episodes; imagined: rollouts of `steps`; fit,
    clone: training steps; doubt: what the signs of ACTORS are multiplied by; candidates: of a plan; exploration: noise
    of the policy, in normalised actions, that candidates differ by.
    """

    demonstrations: int = 60
    explored: int = 60
    held_out: int = 40
    imagined: int = 200
    steps: int = 20
    fit: int = 1500
    clone: int = 1500
    doubt: float = 4.0
    candidates: int = 8
    exploration: float = 0.4


def expert(world: World, noise: float, seed: int) -> NoisyController:
    """Return push_cube's expert with Gaussian noise."""
    return NoisyController(load_task(TASK).expert(), Noise(gaussian=noise), seed, world.spec.action)


def train_model(world: World, episodes: Episodes, scale: Scale, seed: int) -> EnsembleModel:
    """Return an ensemble fitted to `episodes`."""
    model = EnsembleModel.build(EnsembleConfig(), world.spec, episodes, derive(seed, "model"))
    fit_stages(
        model, episodes, FitConfig(steps=scale.fit, learning_rate=3e-3, checkpoint_every=10**9), Generators(seed)
    )
    model.calibrate(episodes)
    return model.eval()


def measure(seed: int, scale: Scale) -> dict[str, dict[str, float]]:
    """Return, for every actor: distance of its imagined rollouts from the truth, and what its exploration is worth."""
    world: Any = make_world(TASK, 64, seed=seed)
    seeds = {name: episode_seeds(seed, name, 256) for name in ("demonstrations", "explored", "held out")}
    shown = record(world, expert(world, 0.1, derive(seed, "expert")), seeds["demonstrations"][: scale.demonstrations])
    played = expert(world, 1.5, derive(seed, "player"))
    later = [record(world, played, seeds["held out"][: scale.held_out])]
    known = {
        "values": {**shown.observation, "action": shown.actions},
        "fps": shown.fps,
        "instructions": world.spec.instructions,
        "seed": derive(seed, "policy"),
    }
    noise = {"min_sampling_std": scale.exploration, "min_logprob_std": scale.exploration}
    config = DenoisingPolicyConfig(chunk=4, prediction_steps=4, sampling_steps=5, **noise)
    policy = build_policy(config, shown.observation_fields, shown.action_field, **known)
    fitting = FitConfig(steps=scale.clone, learning_rate=1e-3, checkpoint_every=10**9)
    pretrain(policy, shown, PretrainConfig(256, fitting), seed=seed)
    model = train_model(world, shown, scale, seed)
    found: dict[str, dict[str, float]] = {}
    models = {"before": model}
    for name, sign in ACTORS.items():
        planning = PlanConfig(candidates=scale.candidates, horizon=12, uncertainty=scale.doubt * (sign or 0.0))
        actor = policy if sign is None else PlannedPolicy(policy, model, planning)
        explored = record(world, actor, seeds["explored"][: scale.explored], generator=Generators(seed)["act"])
        later.append(record(world, actor, seeds["held out"][: scale.held_out], generator=Generators(seed)["act"]))
        models[name] = train_model(world, Episodes.concatenate([shown, explored]), scale, seed)
        found[name] = {
            "imagined_error": imagined_error(model, actor, shown, scale, seed),
            "explored_success": float(explored.success.float().mean()) if explored.success is not None else 0.0,
        }
    world.close()
    anywhere = Episodes.concatenate(later)
    for name, each in models.items():
        found.setdefault(name, {})["model_error"] = followed(each, anywhere)
    return found


def imagined_error(model: EnsembleModel, actor: Any, shown: Episodes, scale: Scale, seed: int) -> float:
    """Return how far imagined rollouts are from the simulator's, in standard deviations of recorded states."""
    dream = ImaginedWorld(model, recorded_starts(shown), scale.imagined)
    played = record(dream, actor, episode_seeds(seed, "imagined", scale.imagined), generator=Generators(seed)["act"])
    data, spread = TransitionData.of(played), TransitionData.of(shown).state.std(0, correction=0).clamp_min(1e-6)
    long = played.lengths >= scale.steps
    first = played.starts[long]
    index = first[:, None] + torch.arange(scale.steps)
    true = replay(data.state[first], data.action[index])
    return float(((data.next_state[index] - true) / spread).square().mean().sqrt())


def followed(model: EnsembleModel, episodes: Episodes, horizon: int = 10) -> float:
    """Return the error of following held-out actions for `horizon` steps, mean over the observation's keys."""
    figures = open_loop(model, episodes, torch.Generator().manual_seed(0), 512, (horizon,))[str(horizon)]
    return sum(each["model"] for each in figures.values()) / len(figures)
