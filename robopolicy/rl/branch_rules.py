"""Rules by which episodes branch where their policy becomes uncertain, within a fixed number of episodes per group.

Some of a group's episodes begin at the initial state, the others branch off running ones; what no episode has branched
off by the end begins at the initial state, too. A chunk's uncertainty decides about a split after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.policy import Decision, Policy, ScoredPolicy, TensorObservation

FIRST_TOKENS = 20
"""Number of a chunk's first tokens whose entropy is its uncertainty (ARPO)."""


class BranchRule(Protocol):
    """Decides how many of a group's episodes begin at its initial state, and where running ones split.

    levels: uncertainty of an episode's chunks so far; in_a_row: chunks at which it has split, up to the one before;
    measures_first: a group's first episode is played alone, without branches, before the others begin; by_forks: levels
    are those of `forks`, not of `uncertainty`; lookahead: numbers of chunks after which a branch that is still `alike`
    its parent is dropped (see `EpisodePlayer`), and until the last of which it does not split.
    """

    @property
    def measures_first(self) -> bool:
        """See the class."""
        ...

    @property
    def by_forks(self) -> bool:
        """See the class."""
        ...

    @property
    def lookahead(self) -> tuple[int, ...]:
        """See the class."""
        ...

    @property
    def alike(self) -> float:
        """See the class."""
        ...

    def share_of_group(self, version: int) -> float:
        """Return the fraction of a group's episodes that belong to its tree, after `version` updates of the policy; the
        others begin at the initial state and do not split.
        """
        ...

    def first_roots(self, size: int) -> int:
        """Return the number of a tree's `size` episodes that begin at once."""
        ...

    def more_roots(self, size: int, levels: Sequence[float]) -> int:
        """Return the number that begin once the first episode, with these levels, has ended."""
        ...

    def splits(self, levels: Sequence[float], in_a_row: int, draw: float) -> bool:
        """Whether the episode splits in two, given a uniform draw in [0, 1)."""
        ...


@dataclass(frozen=True)
class EveryGroup:
    """Defaults of `BranchRule`: a group is one tree, and no branch is dropped."""

    by_forks: bool = False
    lookahead: tuple[int, ...] = ()
    alike: float = 0.0

    def share_of_group(self, version: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Arpo(EveryGroup):
    """ARPO, arXiv:2507.19849: half of the episodes are roots; split where clip(draw - slope * rise, 0, 1) <= threshold.

    rise: of the uncertainty since the first chunk. The authors' code adds the normalised entropies of up to 20 tokens
    up, where `uncertainty` averages them: with n tokens its slope of .2 is one of .2 n here.
    """

    share: float = 0.5
    slope: float = 0.2
    threshold: float = 0.5
    measures_first: bool = False

    def first_roots(self, size: int) -> int:
        """Return the number of roots."""
        return max(1, round(self.share * size))

    def more_roots(self, size: int, levels: Sequence[float]) -> int:
        """Return 0."""
        return 0

    def splits(self, levels: Sequence[float], in_a_row: int, draw: float) -> bool:
        """Whether to split; see the class."""
        return min(1.0, max(0.0, draw - self.slope * (levels[-1] - levels[0]))) <= self.threshold


@dataclass(frozen=True)
class Aepo(EveryGroup):
    """AEPO, arXiv:2510.14545: roots by how uncertain the first chunk is compared with later ones, and fewer splits in a
    row.

    size * sigmoid(beta (first - mean of later levels)) roots, measured on the first episode of the group; split where
    (draw + slope * rise) (1 - penalty * in_a_row) >= threshold, which is likelier the more the uncertainty has risen
    since the first chunk. The roots are those of the paper's text, the splits those of public copies of the authors'
    code; but entropies are means over tokens (see `Arpo`), and in_a_row counts for each episode and begins anew after a
    chunk without a split, where theirs counts all splits of a group.
    """

    beta: float = 1.0
    slope: float = 0.2
    penalty: float = 0.05
    threshold: float = 0.5
    measures_first: bool = True

    def first_roots(self, size: int) -> int:
        """Return 1."""
        return 1

    def more_roots(self, size: int, levels: Sequence[float]) -> int:
        """Return the number of roots beyond the first."""
        later = float(np.mean(levels[1:])) if len(levels) > 1 else levels[0]
        return min(size, max(1, round(size / (1 + math.exp(-self.beta * (levels[0] - later)))))) - 1

    def splits(self, levels: Sequence[float], in_a_row: int, draw: float) -> bool:
        """Whether to split; see the class."""
        chance = (draw + self.slope * (levels[-1] - levels[0])) * max(0.0, 1 - self.penalty * in_a_row)
        return min(1.0, max(0.0, chance)) >= self.threshold


@dataclass(frozen=True)
class Latr:
    """LATR, arXiv:2510.24302: one root; split after chunks with a fork (see `forks`), look ahead, and drop branches
    that stay alike.

    Branches are compared 2, 3 and 5 chunks after the split (20, 30 and 50 tokens in the paper, by their wording). The
    tree's fraction of a group falls by a quarter every 100 updates, to a quarter, as in the authors' script for
    mathematics. Both branches go on by sampling, where theirs take the two likeliest tokens.
    """

    measures_first: bool = False
    by_forks: bool = True
    lookahead: tuple[int, ...] = (2, 3, 5)
    alike: float = 0.25

    def share_of_group(self, version: int) -> float:
        """Return the tree's fraction of a group."""
        return max(0.25, 1 - 0.25 * (version // 100))

    def first_roots(self, size: int) -> int:
        """Return 1."""
        return 1

    def more_roots(self, size: int, levels: Sequence[float]) -> int:
        """Return 0."""
        return 0

    def splits(self, levels: Sequence[float], in_a_row: int, draw: float) -> bool:
        """Whether the last chunk had a fork."""
        return levels[-1] > 1


RULES: dict[str, BranchRule] = {"arpo": Arpo(), "aepo": Aepo(), "latr": Latr()}
"""Rules by the value of finetune.branch_by."""


def uncertainty(
    policy: Policy, observation: TensorObservation, decision: Decision, generator: torch.Generator, draws: int = 4
) -> Array:
    """Return the uncertainty of a decision in every row, [B].

    Tokens: the mean entropy of the first FIRST_TOKENS over log V, at most 1. Denoising steps, whose entropy is that of
    a fixed noise: the standard deviation of `draws` chunks sampled in the same state, averaged over their elements.
    """
    if policy.spec.categorical and isinstance(policy, ScoredPolicy):
        scores = policy.log_prob(observation, decision.latents)
        entropy, mask = scores.entropy[:, :FIRST_TOKENS], decision.mask[:, :FIRST_TOKENS]
        mean = torch.where(mask, entropy, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
        return _array(mean / math.log(scores.extras["log_probabilities"].shape[-1]))
    other_chunks = [policy.act(observation, generator).actions for _ in range(draws - 1)]
    return _array(torch.stack([decision.actions, *other_chunks]).std(0).mean((-2, -1)))


def has_fork(log_probabilities: Tensor, likely: float = 0.15, near: float = 0.25) -> Tensor:
    """Whether another token than the best has a probability above `likely` and less than `near` below it, [...] bool,
    by log_probabilities [..., V].
    """
    best, second = log_probabilities.exp().topk(2, -1).values.unbind(-1)
    return (second > likely) & (best - second < near)


def forks(policy: Policy, observation: TensorObservation, decision: Decision, generator: torch.Generator) -> Array:
    """Return levels [B] above 1 where a chunk could well have been another one.

    Tokens: 2 if any sampled token had a fork, else 0. Denoising steps: `uncertainty`, whose unit is the usual spread.
    """
    if not (policy.spec.categorical and isinstance(policy, ScoredPolicy)):
        return uncertainty(policy, observation, decision, generator)
    scores = policy.log_prob(observation, decision.latents)
    return _array(2.0 * (has_fork(scores.extras["log_probabilities"]) & decision.mask).any(-1).float())


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.cpu(), dtype=np.float64)
