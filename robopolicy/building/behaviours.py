"""Recorded and imagined success of the behaviours that a world model was trained on: the cheapest test of its bias.

Every policy and noisy expert that was recorded for a model acts in it, from the initial states of its recorded
episodes, as it acted there. A model whose behaviours succeed more often in imagination than they did flatters policies;
open-loop errors do not show that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.building.policies import adapt_policy_to_world, model_for
from robopolicy.building.worlds import state_criterion
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import RobopolicyError, SpecError
from robopolicy.core.policy import Policy, is_policy
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE
from robopolicy.core.world import Controller
from robopolicy.evaluation.success import evaluate_policy
from worldmodels.env import ImaginedWorld, StateCriterion
from worldmodels.initial_states import context_at
from worldmodels.protocol import Context, LearnedModel

LARGEST_GAP = 0.1
"""Difference of imagined and recorded success from which on a warning is due."""


@dataclass(frozen=True)
class Behaviour:
    """A recorded behaviour: its name, the policy or controller that acted, and its episodes."""

    name: str
    actor: Policy | Controller
    episodes: Episodes


def imagined_success(
    section: WorldSection, model: LearnedModel, behaviours: Sequence[Behaviour], count: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Return {name: {"recorded", "imagined": success rates, "episodes": their number}} of behaviours in the imagination
    of `model`, in at most `count` episodes each; {} for models that imagine images, which take too long.

    section: the simulated world, with the settings of imagination. Behaviours that read something that the model does
    not output are left out, as are worlds with inference latency or without recorded success. Raises ConfigError, even
    without behaviours, when success is to be decided by a state that the model does not have.
    """
    fields = model.spec.observation
    if any(key.startswith(IMAGE_PREFIX) for key in fields) or QUEUE in fields:
        return {}
    criterion = state_criterion(section, model) if section.imagination.success == "state" else None
    figures: dict[str, dict[str, Any]] = {}
    for behaviour in behaviours:
        success = behaviour.episodes.success
        if success is None:
            continue
        seeds = np.arange(min(count, len(behaviour.episodes)))
        try:
            rate = _imagined_rate(section, model, behaviour, seeds, seed, criterion)
        except RobopolicyError:  # it does not fit: it reads pixels, or the latent of another model
            continue
        real_rate = float(success[: len(seeds)].float().mean())
        figures[behaviour.name] = {"recorded": real_rate, "imagined": rate, "episodes": len(seeds)}
    return figures


def _imagined_rate(
    section: WorldSection,
    model: LearnedModel,
    behaviour: Behaviour,
    seeds: np.ndarray,
    seed: int,
    criterion: StateCriterion | None,
) -> float:
    """Return the success of a behaviour in imagination, from the first states of its episodes `seeds` [E]."""
    policy = behaviour.actor if is_policy(behaviour.actor) else None
    episodes = behaviour.episodes

    def starts(index: np.ndarray) -> Context:
        return context_at(episodes, episodes.starts[torch.from_numpy(index)], model.context)

    world = ImaginedWorld(
        model_for(policy, model, () if criterion is None else criterion.keys),
        starts,
        min(len(seeds), section.batch_size),
        history=1 if policy is None else policy.spec.history,
        debounce=section.imagination.debounce,
        criterion=criterion,
        noises=section.imagination.noises,
    )
    lacking = [key for key in episodes.observation.keys() - world.spec.observation if not key.startswith(IMAGE_PREFIX)]
    if policy is None and lacking:  # a scripted expert declares nothing: it may read every vector
        raise SpecError(f"{behaviour.name} may read {', '.join(sorted(lacking))}, which the model does not output.")
    actor = behaviour.actor if policy is None else adapt_policy_to_world(world, policy)
    device = next(iter(model.parameters())).device
    label = f"imagined: {behaviour.name}"
    result = evaluate_policy(world, actor, seeds, deterministic=False, generator_seed=seed, device=device, label=label)
    return result.success_rate


def warnings_of(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for every behaviour whose imagined success differs from the recorded by more than
    `LARGEST_GAP`.
    """
    return [
        f"The model {'flatters' if row['imagined'] > row['recorded'] else 'undercounts'} {name}: "
        f"{row['imagined']:.0%} of its episodes succeed in imagination, {row['recorded']:.0%} of the recorded did."
        for name, row in figures.items()
        if abs(row["imagined"] - row["recorded"]) > LARGEST_GAP
    ]
