"""Rollouts scored by a critic and flattened to rows: what one iteration of fine-tuning learns from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import TASK
from robopolicy.rl.advantages import chunk_rewards, gae, next_values, standardise
from robopolicy.rl.returns import ReturnScale


@dataclass(frozen=True)
class Experience:
    """One iteration's decisions as rows, N = B * T; logp and mask are [N, K]; advantages (standardised), returns and
    values (both in scaled rewards) are [N].
    """

    observation: TensorObservation
    units: Mapping[str, Tensor]
    logp: Tensor
    mask: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.returns)

    def rows(self, index: Tensor) -> "Experience":
        """Gather rows by index [n]."""
        return Experience(
            {key: _gather(value, index) for key, value in self.observation.items()},
            {key: value[index] for key, value in self.units.items()},
            *(getattr(self, name)[index] for name in ("logp", "mask", "advantages", "returns", "values")),
        )

    def only_units(self, chosen: Tensor) -> "Experience":
        """Keep k units of every row, by index [N, k]; the policy scores those named by units["unit"]."""
        logp, mask = self.logp.gather(1, chosen), self.mask.gather(1, chosen)
        return replace(self, units={**self.units, "unit": chosen}, logp=logp, mask=mask)

    @torch.no_grad()
    def with_executed(self, policy: Policy, rollouts: Rollouts) -> "Experience":
        """Score only what was executed of chunks that ended early: units["executed"] [N, C] tells the policy.

        The rows concerned get fresh behaviour scores from `policy`, which must be the one that acted, unchanged.
        """
        executed = rollouts.valid.flatten(0, 1)
        cut = (~executed).any(-1).nonzero().squeeze(-1)
        if not len(cut):
            return self
        marked = replace(self, units={**self.units, "executed": executed}, logp=self.logp.clone())
        rows = marked.rows(cut)
        marked.logp[cut] = policy.evaluate(rows.observation, rows.units).logp
        return marked


@torch.no_grad()
def score(
    rollouts: Rollouts,
    critic: nn.Module,
    return_scale: ReturnScale,
    discount: float,
    gae_lambda: float,
    instructions: tuple[str, ...] = (),
) -> Experience:
    """Estimate advantages and returns of `rollouts` and flatten them; `return_scale` takes in their rewards first.

    critic: observation [N, H, ...] -> values [N]; it is asked for the pre-reset next observation only where an episode
    was cut without being over and in the last column. Decisions without a valid step are masked out.
    """
    rewards = torch.stack(list(rollouts.rewards.values())).sum(0)
    per_chunk = chunk_rewards(rewards, rollouts.valid, discount)
    return_scale.update(per_chunk, rollouts.ended, discount ** rollouts.duration.float())
    rewards = rewards / return_scale.scale.to(rewards.dtype)
    flat: TensorObservation = {key: _flatten(value) for key, value in rollouts.observation.items()}
    values = critic_values(critic, flat).reshape(rollouts.shape)
    needed = rollouts.ended & ~rollouts.terminated
    needed[:, -1] = True
    at_end = torch.zeros_like(values)
    at_end[needed] = critic_values(
        critic, {key: _at(value, needed) for key, value in rollouts.next_observation.items()}
    )
    advantages, returns = gae(
        rewards,
        rollouts.valid,
        values,
        next_values(values, at_end, rollouts.ended),
        rollouts.terminated,
        rollouts.ended,
        discount,
        gae_lambda,
    )
    alive = rollouts.duration > 0
    if "task" in rollouts.extras:
        flat[TASK] = [instructions[index] for index in rollouts.extras["task"].flatten().tolist()]
    return Experience(
        flat,
        {key: value.flatten(0, 1) for key, value in rollouts.units.items()},
        rollouts.logp_behaviour.flatten(0, 1),
        (rollouts.mask & alive[..., None]).flatten(0, 1),
        standardise(advantages, alive).flatten(),
        returns.flatten(),
        values.flatten(),
    )


def critic_values(critic: nn.Module, observation: Mapping[str, Any], rows_at_once: int = 8192) -> Tensor:
    """Return the critic's values [N] of N observations, a few thousand rows at a time."""
    count = len(next(iter(observation.values())))
    parts = []
    for start in range(0, count, rows_at_once):
        parts.append(critic({key: value[start : start + rows_at_once] for key, value in observation.items()}))
    return torch.cat(parts)


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return success and return over the episodes that ended in these rollouts, their number, reward per decision."""
    ended = rollouts.ended
    count = int(ended.sum())
    reward = torch.stack(list(rollouts.rewards.values())).sum()
    metrics = {"episodes": float(count), "reward_per_decision": float(reward) / max(1, ended.numel())}
    if count:
        metrics["success"] = float(rollouts.success[ended].float().mean())
        metrics["return"] = float(rollouts.extras["episode_return"][ended].mean())
    return metrics


def _flatten(value: Any) -> Tensor:
    return value.flatten(0, 1)


def _at(value: Any, where: Tensor) -> Tensor:
    return value[where]


def _gather(value: Tensor | list[str], index: Tensor) -> Any:
    return value[index] if isinstance(value, Tensor) else [value[row] for row in index.tolist()]
