"""Deciding several times and taking the best: what planning in a model and choosing by a critic have in common."""

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.policy import Decision, Policy, TensorObservation

ScoreCandidates = Callable[[TensorObservation, Tensor], Tensor]
"""(observations [B * N, H, ...], chunks [B * N, C, A] in the world's units) -> how good they are, [B, N]."""


def best_of(
    policy: Policy,
    observation: TensorObservation,
    generator: torch.Generator,
    count: int,
    score: ScoreCandidates,
    *,
    deterministic: bool = False,
) -> tuple[Decision, Tensor]:
    """Let `policy` decide `count` times for each of B rows; return the best decision of each, and all scores [B, N].

    Decisions are the policy's, latents and log-probabilities included, so that its `log_prob` scores them; choosing
    among them is not scored. deterministic: candidate 0 is the policy's own noise-free choice. Raises what they raise.
    """
    several = repeated(observation, count)
    tried = policy.act(several, generator, deterministic=False)
    rows = len(tried.actions) // count
    first = torch.arange(rows, device=tried.actions.device) * count
    if deterministic:
        sure = policy.act(observation, generator, deterministic=True)
        tried = Decision(
            tried.actions.index_copy(0, first, sure.actions),
            {name: value.index_copy(0, first, sure.latents[name]) for name, value in tried.latents.items()},
            tried.logp.index_copy(0, first, sure.logp),
            tried.mask.index_copy(0, first, sure.mask),
        )
    scores = score(several, tried.actions).reshape(rows, count).cpu()
    best = scores.argmax(1).to(first.device) + first
    latents = {name: value[best] for name, value in tried.latents.items()}
    return Decision(tried.actions[best], latents, tried.logp[best], tried.mask[best]), scores


def repeated(observation: TensorObservation, times: int) -> TensorObservation:
    """Return every row of an observation `times` times in a row: key -> [B * times, H, ...]."""
    result: TensorObservation = {}
    for key, value in observation.items():
        if isinstance(value, Tensor):
            result[key] = value.repeat_interleave(times, 0)
        else:
            result[key] = [text for text in value for _ in range(times)]
    return result


def majority_mean(scores: Tensor) -> Tensor:
    """Return the mean of the majority of scores [..., F]: those on the side of their midrange that more are on.

    A tie goes to the high side; the result is [...].
    """
    middle = (scores.amin(-1, keepdim=True) + scores.amax(-1, keepdim=True)) / 2
    high = scores >= middle
    chosen = torch.where(2 * high.sum(-1, keepdim=True) >= scores.shape[-1], high, ~high)
    return (scores * chosen).sum(-1) / chosen.sum(-1)


AGGREGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(-1),
    "lower_bound": lambda scores: scores.mean(-1) - scores.std(-1, correction=0),
    "median": lambda scores: scores.median(-1).values,
    "majority": majority_mean,
}
"""Name -> scores [..., F] of the futures of a decision -> its score [...]."""
