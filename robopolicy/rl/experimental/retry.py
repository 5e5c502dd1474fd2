"""Experimental second attempts in the same iteration: after a group was played, more episodes of it are, with help.

Two kinds of help: to start inside a demonstration, or to hear another wording of the instruction, such as one that
names the stages (`Task.paraphrases`). Helped episodes are marked by extras["helped"]. They count neither in the success
that is reported nor for the sampler.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.coefficients import ppo
from robopolicy.rl.context import Coefficients, Context, Scored
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.rewards import at_last_step


class Retry(Uniform):
    """Counts of helped episodes; base class of the allocators."""

    depth, ahead = 0.0, 0.0

    def __init__(
        self,
        *,
        rate: float = 0.0,
        count: int = 0,
        per_failure: bool = False,
        mix: bool = False,
        after: float = 0.0,
        together: bool = False,
    ):
        self.rate = rate
        self.count = count
        self.per_failure = per_failure
        self.mix = mix
        self.after = after
        self.together = together
        self.group_size = 0

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the numbers of episodes without help [n]; with `mix` fewer where the predicted success is low."""
        self.group_size = group_size
        if not self.mix:
            return [group_size] * len(predicted)
        share = 0.1 + (0.8 - 0.1) * (1 - predicted)
        return (group_size - np.round(group_size * share)).astype(int).clip(1, group_size).tolist()

    def helped(self, rate: Array, sizes: Array, context: Context) -> list[int]:
        """Return the number of helped episodes [n]; see `GivesHelp`."""
        if context.share < self.after:
            return [0] * len(rate)
        if self.mix:
            return np.maximum(self.group_size - sizes, 0).tolist()
        extra = np.round((1 - rate) * sizes) if self.per_failure else np.full(len(rate), self.count or self.group_size)
        return np.where(rate <= self.rate, extra, 0).astype(int).tolist()

    def depths(self, rate: Array) -> list[float]:
        """Return the fractions of the demonstration to start after, [n]; see `GivesHelp`."""
        return [self.depth] * len(rate)


@mechanism(
    Slot.ALLOCATOR,
    "retry_state",
    source="after Agent-RLVR, arXiv:2506.11425; NuRL, arXiv:2509.25666; ADHint, arXiv:2512.13095",
    needs=(Need.GROUPS, Need.STARTS, Need.DEMONSTRATIONS),
)
class RetryState(Retry):
    """Play groups with a success rate of at most `rate` again, from `depth` of a demonstration: `count` episodes more.

    count: 0 for group_size; per_failure: one for every failed episode instead (Agent-RLVR); mix: every group plays
    share w = .1 + .7 (1 - predicted success) of its episodes with help (ADHint); after: fraction of the run before
    which there is no help (NuRL: once GRPO stands still); together: compared with the group's other episodes. ahead:
    guidance made from each failure, with per_failure: its second attempt begins this fraction of the demonstration
    beyond the last demonstrated state that it came near to, so that what went wrong is done for it. The demonstrated
    part is not scored, so there is nothing to correct for.
    """

    forget = False

    def __init__(
        self,
        *,
        depth: float = 0.5,
        rate: float = 0.0,
        count: int = 0,
        per_failure: bool = False,
        mix: bool = False,
        after: float = 0.0,
        together: bool = True,
        ahead: float = 0.0,
    ):
        super().__init__(rate=rate, count=count, per_failure=per_failure, mix=mix, after=after, together=together)
        self.depth, self.ahead = depth, ahead


@mechanism(
    Slot.ALLOCATOR,
    "retry_wording",
    source="Guide-GRPO, arXiv:2506.13923; NuRL, arXiv:2509.25666; Agent-RLVR, arXiv:2506.11425; "
    "ICPO, arXiv:2510.26519; TriMPI (PolicyRollout), arXiv:2510.09474",
    needs=(Need.GROUPS, Need.WORDINGS),
)
class RetryWording(Retry):
    """Play groups with a success rate of at most `rate` again, under other words: `count` episodes more.

    The words are another of the world's wordings of the same instruction (world.options.phrasing=all), such as one that
    names the stages; instructions without one get no help. forget: Guide-GRPO, each episode is learned from under the
    plain instruction, with the ratio pi(step | plain) / pi_old(step | helped), else under the words that it was given.
    The other options are those of retry_state. Guide-GRPO: the defaults. NuRL: forget=false together=true, with
    selection=[plain_rows]. Agent-RLVR: per_failure=true rate=1. ICPO: rate=1 count=1 together=true, with
    coefficient=icpo, rewards=[helped_bonus] and selection=[helped_successes]. CLPO: retry_by_difficulty.
    PolicyRollout: rate=1 together=true from_plain=true, half of every group under a text with the rules to keep, all
    compared together and learned from without it. from_plain: only groups whose instruction is in its plain words, the
    first of its wordings, get other ones.
    """

    def __init__(
        self,
        *,
        forget: bool = True,
        rate: float = 0.0,
        count: int = 0,
        per_failure: bool = False,
        mix: bool = False,
        after: float = 0.0,
        together: bool = False,
        from_plain: bool = False,
    ):
        super().__init__(rate=rate, count=count, per_failure=per_failure, mix=mix, after=after, together=together)
        self.forget, self.from_plain = forget, from_plain


@mechanism(
    Slot.ALLOCATOR,
    "retry_by_difficulty",
    source="CLPO, arXiv:2509.25004",
    needs=(Need.GROUPS, Need.STARTS, Need.WORDINGS, Need.DEMONSTRATIONS),
)
class RetryByDifficulty(Retry):
    """Ease hard groups and vary those in the middle: play them again as groups of their own, `count` episodes each.

    Groups with a success rate of at most `hard` begin at `depth` of a demonstration, those above it up to `rate` hear
    another wording of the instruction. In the paper the policy rewrites the problems itself, and keeps those that it
    neither always nor never solves: selection=[mixed_outcomes]; a smaller KL weight of hard ones:
    auxiliaries=[kl_by_difficulty]. count: 0 for group_size.
    """

    forget = False

    def __init__(self, *, hard: float = 0.3, rate: float = 0.7, depth: float = 0.5, count: int = 0):
        super().__init__(rate=rate, count=count)
        self.hard, self.depth = hard, depth

    def depths(self, rate: Array) -> list[float]:
        """Return `depth` for hard groups, 0 for others, [n]."""
        return np.where(rate <= self.hard, self.depth, 0.0).tolist()


def helped_rows(rollouts: Rollouts) -> Tensor:
    """Return a mask [B] of the episodes that were played with help."""
    helped = rollouts.extras.helped
    return torch.zeros_like(rollouts.group, dtype=torch.bool) if helped is None else helped[:, 0]


@mechanism(Slot.SELECTION, "plain_rows", source="NuRL, arXiv:2509.25666", needs=(Need.GROUPS,))
def plain_rows(rollouts: Rollouts, context: Context, *, keep: int = 1) -> Tensor:
    """In groups with helped episodes, keep only the first `keep` without help, and as many in all as without help.

    Returns keep [B] bool.
    """
    helped, groups = helped_rows(rollouts), Segments.of(rollouts.group)
    order = torch.arange(len(helped), device=helped.device).double()
    kinds = Segments.of(rollouts.group, helped)
    place, plain = kinds.rank(order), groups.sum((~helped).long())[groups.index]
    has_help = groups.sum(helped.long())[groups.index] > 0
    return ~has_help | torch.where(helped, place < plain - keep, place < keep)


@mechanism(Slot.SELECTION, "helped_successes", source="ICPO, arXiv:2510.26519", needs=(Need.GROUPS,))
def helped_successes(rollouts: Rollouts, context: Context) -> Tensor:
    """Drop helped episodes that fail: with help the policy stands for an expert only where it succeeds.

    The paper's expert region: a reward above a threshold, here success. Its public code learns from all. Returns keep
    [B] bool.
    """
    return ~helped_rows(rollouts) | rollouts.row_success


@mechanism(Slot.REWARD, "helped_bonus", source="ICPO, arXiv:2510.26519")
def helped_bonus(rollouts: Rollouts, context: Context, *, until: int = 400) -> Rollouts:
    """Pay successes with help max(0, 1 - iteration / until) more."""
    bonus = max(0.0, 1 - context.iteration / until)
    first = rollouts.success & (rollouts.success.cumsum(1) == 1) & rollouts.alive & helped_rows(rollouts)[:, None]
    return replace(rollouts, rewards={**rollouts.rewards, "helped": at_last_step(rollouts, bonus * first)})


@mechanism(Slot.COEFFICIENT, "icpo", source="ICPO, arXiv:2510.26519", needs=(Need.CATEGORICAL,))
def icpo(scored: Scored, *, gamma: float = 0.1) -> Coefficients:
    """PPO, and for helped episodes without a ratio: L = -A u / (u + gamma), so c = A gamma u / (u + gamma)^2.

    u: the present probability of a token, without help. Unlikely tokens are learned from most. Densities of denoising
    steps have no such scale.
    """
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    u = scored.logp.exp()
    shaped = scored.advantage * gamma * u / (u + gamma).square()
    return torch.where(helped_rows(scored.rollouts)[:, None, None], shaped, c), {}
