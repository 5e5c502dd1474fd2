"""Best-of-N sampling of action chunks, shared by planning with a world model and selection by a critic."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Decision, Policy, TensorObservation

ScoreCandidates = Callable[[TensorObservation, Tensor], Tensor]
"""Function (observations [B * N, H, ...], chunks [B * N, C, A] in world units) -> scores [B, N], higher is better."""


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


AGGREGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(-1),
    "lower_bound": lambda scores: scores.mean(-1) - scores.std(-1, correction=0),
    "median": lambda scores: scores.median(-1).values,
    "majority": majority_mean,
}
"""Aggregation by name: scores [..., F] of the imagined futures of an action chunk -> its score [...]."""


keep_former_names(__name__, {"repeated": "repeat_observation"})
