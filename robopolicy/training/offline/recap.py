"""Advantage-conditioned imitation of all recorded data (RECAP), or imitation of the best of it (filtered BC).

RECAP acts with the indicator "better"; filtered imitation ignores the rest of the data.
"""

from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.interventions import intervention_mask
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.segments import quantile
from robopolicy.policies.advantage_conditioned import (
    IMPROVEMENT,
    AdvantageConditioned,
    Improvement,
    condition_on_advantage,
)
from robopolicy.policies.denoising import require_denoising
from robopolicy.rl.offline.decisions import ROWS, actions_at
from robopolicy.training.offline.configuration import FilteredImitationConfig, RecapConfig
from robopolicy.training.offline.improvers import OfflineContext, imitate


class Recap:
    """Improver with the settings `RecapConfig`, which describes the method."""

    def __init__(self, config: RecapConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Add a network input for the indicator, which has no effect yet; see `Improver`."""
        indicator_network(policy)

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate all chunks conditioned on their indicators; see `Improver`."""
        config, data = self.config, lesson.data
        indicator_network(policy).guidance.fill_(config.guidance)
        better = improvements(
            advantages(policy, lesson, config, generators), config.positive_fraction, corrections(lesson)
        )
        indicators = torch.where(better, int(Improvement.POSITIVE), int(Improvement.NEGATIVE))
        draws = generators["indicator"]

        def batch(rows: Tensor) -> dict[str, Any]:
            minibatch = lesson.recorded(rows, policy.spec)
            # Classifier-free guidance needs the network without its condition as well.
            hidden = (
                torch.rand(len(rows), generator=draws, device=draws.device).to(indicators.device)
                < config.indicator_dropout
            )
            minibatch["observation"][IMPROVEMENT] = indicators[rows].masked_fill(hidden, int(Improvement.NONE))
            return minibatch

        loss = imitate(policy, batch, len(data), config, step, generators, where)
        return {"loss": loss, "positive": float(better.float().mean())}


def indicator_network(policy: Trainable) -> AdvantageConditioned:
    """Return the network of `policy` with an input for the indicator; raises ConfigError when it cannot have one."""
    message = (
        f"recap adds an advantage input to the policy's network, which {type(policy).__name__} (not a "
        "DenoisingPolicy) does not support: weighted_imitation and best_of work with any policy."
    )
    return condition_on_advantage(require_denoising(policy, message))


class FilteredImitation:
    """Improver with the settings `FilteredImitationConfig`, which describes the method."""

    def __init__(self, config: FilteredImitationConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Do nothing."""

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate the better chunks; see `Improver`. Raises ConfigError when there are none, or success is not
        recorded.
        """
        config = self.config
        if config.advantage == "success":
            better = successful(lesson)
        else:
            better = improvements(
                advantages(policy, lesson, config, generators), config.positive_fraction, corrections(lesson)
            )
        indices = better.nonzero().flatten()
        if not len(indices):
            raise ConfigError(
                "filtered_imitation: no recorded action chunk is better than the others, so there is nothing to "
                "imitate."
            )

        def batch(rows: Tensor) -> dict[str, Any]:
            return lesson.recorded(indices[rows], policy.spec)

        loss = imitate(policy, batch, len(indices), config, step, generators, where)
        return {"loss": loss, "positive": float(better.float().mean())}


def advantages(
    policy: Policy, lesson: OfflineContext, config: RecapConfig | FilteredImitationConfig, generators: Generators
) -> Tensor:
    """Return the advantage of every recorded chunk, [N], by `config.advantage`: own, critic or steps."""
    data, critic = lesson.data.transitions, lesson.critic
    q, v = lesson.values(data.state, data.action)
    if config.advantage == "critic":
        return q - v
    if config.advantage == "steps":
        with torch.no_grad():
            # One-step advantage r + gamma V(s') - V(s): no Q of actions is asked.
            return data.backup(critic.value(data.next_state), critic.discount) - v
    means = list[Tensor]()
    for rows in torch.split(torch.arange(len(q), device=q.device), ROWS // config.samples_per_observation):
        frames, generator = lesson.data.frame[rows], generators["own"]
        chunks = actions_at(policy, lesson.episodes, frames, generator, samples=config.samples_per_observation)
        state = data.state[rows].repeat_interleave(config.samples_per_observation, 0)
        values, _ = lesson.values(state, lesson.interface.to_agent(chunks.flatten(0, 1)))
        means.append(values.reshape(len(rows), -1).mean(1))
    return q - torch.cat(means)


def successful(lesson: OfflineContext) -> Tensor:
    """Return a mask [N] bool of the chunks from successful episodes; raises ConfigError without recorded success."""
    episodes = lesson.episodes
    if episodes.success is None:
        raise ConfigError("advantage=success needs to know which episodes succeeded, and the data does not record it.")
    return episodes.success[episodes.episode_of_step[lesson.data.step]]


def corrections(lesson: OfflineContext) -> Tensor | None:
    """Return a mask [N] bool of the chunks from operator interventions; None when the episodes do not record them."""
    in_intervention = intervention_mask(lesson.episodes)
    return None if in_intervention is None else in_intervention[lesson.data.step]


def improvements(advantage: Tensor, share: float, corrected: Tensor | None = None) -> Tensor:
    """Return a mask [N] bool of positive chunks: the best fraction `share` by advantage [N], and all that are
    `corrected`.
    """
    better = advantage > quantile(advantage, 1 - share)
    return better if corrected is None else better | corrected


keep_former_names(__name__, {"network_to_tell": "indicator_network"})
