"""Learning from groups of episodes as they arrive, while the same policy plays the others (Periodic Asynchrony,
arXiv:2511.18871).

Gradients of groups are accumulated in any order, and one step of the optimiser is taken once all have arrived: exactly
on-policy, and equal to the update on all groups at once but for the order of a sum. So advantages may compare the
episodes of a group, and nothing may compare groups.
"""

from torch import Tensor

from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.registry import SEVERAL, Slot, setting_for
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.update import WHOLE, TotalWeight


def _steps(mask: Tensor, rollouts: Rollouts) -> Tensor:
    return mask.sum()


def _episodes(mask: Tensor, rollouts: Rollouts) -> Tensor:
    return (mask / rollouts.extras["episode_steps"][..., None].clamp(min=1)).sum()


TOTAL_WEIGHTS: dict[str, TotalWeight] = {"step_mean": _steps, "episode_mean": _episodes}
"""Sums of weights by name of the weight: the number of steps, and that of episodes, of which a minibatch may have a
fraction.
"""

WITHIN_GROUPS: dict[Slot, frozenset[str]] = {
    Slot.ALLOCATOR: frozenset({"uniform", "knapsack"}),
    Slot.REWARD: frozenset({"success_only", "hurry", "smooth", "effort"}),
    Slot.ADVANTAGE: frozenset({"grpo", "dr_grpo", "rloo", "mc_grpo"}),
    Slot.CREDIT: frozenset({"denoising_discount"}),
    Slot.COEFFICIENT: frozenset({"ppo", "decoupled_ppo", "cispo"}),
    Slot.WEIGHT: frozenset(TOTAL_WEIGHTS),
    **dict.fromkeys((Slot.SELECTION, Slot.MODEL, Slot.REPLAY, Slot.AUXILIARY, Slot.CONTROLLER), frozenset[str]()),
}
"""Mechanisms by slot that compare nothing beyond a group, and read nothing else of the batch."""


def total_weight_of(algorithm: Algorithm) -> TotalWeight:
    """Return the sum of weights that belongs to the algorithm's weight."""
    return TOTAL_WEIGHTS[algorithm.resolved.slots[Slot.WEIGHT][0].entry.name]


def require_overlap(algorithm: Algorithm, config: FinetuneConfig) -> None:
    """Raise ConfigError, naming the setting, if with overlap_update something needs all groups of an iteration."""
    if not config.overlap_update:
        return
    reason = "overlap_update=true learns from groups before all have arrived"
    if config.shards < 2:
        raise ConfigError(f"{reason}, which arrive in shards: set shards=2 or more, and workers.count.")
    plain = FinetuneConfig()
    for name in ("staleness", "policy_lag", "props_parts", "overprovision", "expert_episode_fraction", "scored_steps"):
        if getattr(config, name) != (default := getattr(plain, name)):
            raise ConfigError(f"{reason}, which {name}={getattr(config, name)} excludes: set {name}={default}.")
    if config.proximal_policy == "average":
        raise ConfigError(f"{reason}, which proximal_policy=average excludes: set proximal_policy=current.")
    for slot, parts in algorithm.resolved.slots.items():
        for part in parts:
            name = part.entry.name
            if slot in WITHIN_GROUPS and name not in WITHIN_GROUPS[slot]:
                fit = ", ".join(sorted(WITHIN_GROUPS[slot]))
                instead = f"choose one of {fit}" if fit else f"set {slot.value}={'[]' if slot in SEVERAL else 'null'}"
                raise ConfigError(f"{reason}, but {setting_for(slot, name)} may read the whole batch: {instead}.")
    if algorithm.needs & WHOLE:
        raise ConfigError(f"{reason}, one decision at a time, but this algorithm needs whole episodes in a minibatch.")
    if replicas.count() > 1:
        raise ConfigError(f"{reason} in one process that trains: set overlap_update=false for a data-parallel run.")
