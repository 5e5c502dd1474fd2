"""Best-of-N sampling of action chunks, shared by planning with a world model and selection by a critic."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.returns import returns_to_go
from robopolicy.core.world import Rows

ScoreCandidates = Callable[[TensorObservation, Tensor], Tensor]
"""Function (observations [B * N, H, ...], chunks [B * N, C, A] in world units) -> scores [B, N], higher is better."""


class PlansOverCandidates:
    """Base of policies without memory or instructions that choose among `config.candidates` chunks by their values."""

    config: Any
    memoryless = True

    def planning(self, candidates: int) -> Self:
        """Return this model with shared weights that plans over N candidate chunks; 1 disables planning."""
        other = copy.copy(self)
        other.config = replace(self.config, candidates=candidates)
        return other

    def without_planning(self) -> Self | None:
        """Return the same model without planning; None if it does not plan."""
        return self.planning(1) if self.config.candidates > 1 else None

    @property
    def reads_instructions(self) -> bool:
        """Whether actions depend on the instruction."""
        return False

    def reset(self, rows: Rows = None) -> None:
        """No memory to clear for any rows [R]."""

    def recorded_returns(self, episodes: Episodes) -> Tensor:
        """Return the discounted returns [steps] of recorded steps; raises DataError if there are no rewards."""
        if episodes.reward is None:
            raise DataError("A joint model learns values, but this dataset records no rewards.")
        return returns_to_go(episodes.reward, episodes, self.config.discount)


def best_of(
    policy: Policy,
    observation: TensorObservation,
    generator: torch.Generator,
    count: int,
    score: ScoreCandidates,
    *,
    deterministic: bool = False,
) -> tuple[Decision, Tensor]:
    """Sample `count` action chunks from `policy` for each of B batch rows; return the best one per row and all scores
    [B, N].

    Latents and log-probabilities are those of the policy, so its `log_prob` applies; the selection itself has no
    log-probability. deterministic: candidate 0 is the policy's noise-free action. Raises what `policy` and `score`
    raise.
    """
    repeated_observation = repeat_observation(observation, count)
    decision = policy.act(repeated_observation, generator, deterministic=False)
    rows = len(decision.actions) // count
    first = torch.arange(rows, device=decision.actions.device) * count
    if deterministic:
        sure = policy.act(observation, generator, deterministic=True)
        decision = Decision(
            decision.actions.index_copy(0, first, sure.actions),
            {name: value.index_copy(0, first, sure.latents[name]) for name, value in decision.latents.items()},
            decision.logp.index_copy(0, first, sure.logp),
            decision.mask.index_copy(0, first, sure.mask),
        )
    scores = score(repeated_observation, decision.actions).reshape(rows, count).cpu()
    best = scores.argmax(1).to(first.device) + first
    latents = {name: value[best] for name, value in decision.latents.items()}
    return Decision(decision.actions[best], latents, decision.logp[best], decision.mask[best]), scores


def repeat_observation(observation: TensorObservation, times: int) -> TensorObservation:
    """Repeat every row of an observation `times` times in succession: key -> [B * times, H, ...]."""
    result: TensorObservation = {}
    for key, value in observation.items():
        if isinstance(value, Tensor):
            result[key] = value.repeat_interleave(times, 0)
        else:
            result[key] = [text for text in value for _ in range(times)]
    return result


def rows_of_observation(observation: TensorObservation, rows: Sequence[int]) -> TensorObservation:
    """Return rows of an observation, in this order and as often as they are given: key -> [R, H, ...]."""
    return {
        key: value[list(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]
        for key, value in observation.items()
    }


def majority_mean(scores: Tensor) -> Tensor:
    """Return the mean of the majority of scores [..., F]: those on the side of the midrange with more scores.

    A tie selects the upper side. The result has shape [...].
    """
    middle = (scores.amin(-1, keepdim=True) + scores.amax(-1, keepdim=True)) / 2
    high = scores >= middle
    majority = torch.where(2 * high.sum(-1, keepdim=True) >= scores.shape[-1], high, ~high)
    return (scores * majority).sum(-1) / majority.sum(-1)


def mean_of_successes(scores: Tensor, threshold: float = 0.05) -> Tensor:
    """Return the mean of those of scores [..., F], from 0 to 1, above `threshold`; 0 unless they are at least half.

    The result has shape [...]. Source: Cosmos Policy, whose code calls it the majority mean.
    """
    success = scores > threshold
    count = success.sum(-1)
    mean = (scores * success).sum(-1) / count.clamp(min=1)
    return torch.where(2 * count >= scores.shape[-1], mean, 0.0)


AGGREGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(-1),
    "lower_bound": lambda scores: scores.mean(-1) - scores.std(-1, correction=0),
    "median": lambda scores: scores.quantile(0.5, -1),
    "majority": majority_mean,
    "successes": mean_of_successes,
}
"""Aggregation by name: scores [..., F] of the imagined futures of an action chunk -> its score [...]."""


keep_former_names(__name__, {"repeated": "repeat_observation"})
