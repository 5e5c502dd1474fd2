"""Imitates everything that was recorded, told which of it was better than usual, and acts as told "better": RECAP."""

from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import Generators
from robopolicy.policies.advantage_conditioned import (
    IMPROVEMENT,
    AdvantageConditioned,
    Improvement,
    condition_on_advantage,
)
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.offline.configuration import RecapConfig
from robopolicy.training.offline.improvers import Lesson, imitate


class Recap:
    """See `RecapConfig`."""

    def __init__(self, config: RecapConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Give the network an input for the indicator, which changes nothing yet; see `Improver`."""
        if not isinstance(policy, DenoisingPolicy):
            raise ConfigError(
                f"recap tells the policy's network what to do, and {type(policy).__name__} is no DenoisingPolicy: "
                "weighted_imitation and best_of take any policy."
            )
        condition_on_advantage(policy)

    def improve(
        self, policy: Trainable, lesson: Lesson, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate all decisions under their indicators; see `Improver`."""
        config, data, spec = self.config, lesson.data, policy.spec
        assert isinstance(policy, DenoisingPolicy) and isinstance(policy.network, AdvantageConditioned)
        policy.network.guidance.fill_(config.guidance)
        better = improvements(advantages(lesson, config.advantage), config.positive)
        told = torch.where(better, int(Improvement.POSITIVE), int(Improvement.NEGATIVE))
        draws = generators["indicator"]

        def batch(rows: Tensor) -> dict[str, Any]:
            found = lesson.episodes.windows(data.step[rows], spec.history, spec.prediction)
            hidden = torch.rand(len(rows), generator=draws, device=draws.device).to(told.device) < config.dropout
            found["observation"][IMPROVEMENT] = told[rows].masked_fill(hidden, int(Improvement.NONE))
            return found

        loss = imitate(policy, batch, len(data), config, step, generators, where)
        return {"loss": loss, "positive": float(better.float().mean())}


def advantages(lesson: Lesson, kind: str) -> Tensor:
    """Return the advantage of every recorded decision, [N].

    kind: "critic", min Q - V; "steps", what was paid during the decision, and V after it, minus V before it.
    """
    data, critic = lesson.data.transitions, lesson.critic
    if kind == "critic":
        q, v = lesson.values(data.state, data.action)
        return q - v
    with torch.no_grad():
        return data.backup(critic.value(data.next_state), critic.discount) - critic.value(data.state)


def improvements(advantage: Tensor, share: float, corrected: Tensor | None = None) -> Tensor:
    """Return which decisions are positive [N] bool: the best `share` by advantage [N], and all that are `corrected`."""
    better = advantage > torch.quantile(advantage, 1 - share)
    return better if corrected is None else better | corrected
