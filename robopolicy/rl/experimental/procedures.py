"""Experimental branching of APPO (arXiv:2606.12384): where to branch, and how roots and branches share their credit.

Roots are played first. Branches begin after chunks that were uncertain and whose continuations the policy's last update
made likelier; they are not trained, their advantages count for the chunks that they share with a root.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import Array, integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.returns import discounted_sums
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.nn.sharing import copy_trainable, load_trainable_state, trainable_state
from robopolicy.rl.advantages.group import broadcast, group_normalised, outcomes
from robopolicy.rl.advantages.tree import lineage
from robopolicy.rl.branch_rules import uncertainty
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.side_models import device_of


def branching_scores(uncertainties: Tensor, gains: Tensor, counts: Tensor) -> Tensor:
    """Return z(H) z(V) where both are positive, else 0, [B, T]; z: standardised over the `counts` chunks of an episode.

    uncertainties, gains: H and V of chunks, [B, T]; counts: [B, T] bool.
    """
    number = counts.sum(1, keepdim=True).clamp(min=1)

    def standardised(values: Tensor) -> Tensor:
        centred = torch.where(counts, values - torch.where(counts, values, 0.0).sum(1, keepdim=True) / number, 0.0)
        return centred / (centred.square().sum(1, keepdim=True) / number).sqrt().clamp(min=1e-6)

    first, second = standardised(uncertainties), standardised(gains)
    return torch.where((first > 0) & (second > 0), first * second, 0.0)


def later_gains(change: Tensor, mask: Tensor, half_life: float, most: float) -> Tensor:
    """Return V [B, T], exp of the sum of the log-ratios `change` [B, T, K] from a chunk's first step on, in 1 +- most.

    The sum is over the masked steps [B, T, K] bool of an episode, discounted by 2^(-1 / half_life) per step.
    """
    ordered = torch.where(mask, change, 0.0).flatten(1)
    decay = torch.where(mask.flatten(1), 0.5 ** (1 / half_life), 1.0)
    sums = discounted_sums(ordered, decay.to(ordered), torch.ones_like(ordered, dtype=torch.bool))
    return sums.reshape(change.shape)[..., 0].exp().clamp(1 - most, 1 + most)


@mechanism(Slot.MODEL, "past_policy", source="APPO, arXiv:2606.12384", gives=(Need.BRANCHING_SCORES,))
class PastPolicy:
    """The policy before its last update: scores chunks by their uncertainty and by what the update made likelier.

        score = z(H) z(V) where both are positive,   V_t = exp(sum_{k >= t} 2^((t - k) / half_life) d_k) in 1 +- most

    d: log-probability of a step under the policy minus that under the past one; H: entropy of a chunk's first tokens,
    or spread of a denoising policy's chunks (`branch_rules.uncertainty`); z: standardised over an episode. Adds
    extras["branching_score"] [B, T], 0 for episodes that continue others. In the authors' code d is between two engines
    with the same weights, and scores are of tokens; here they are of chunks, between which episodes branch.
    """

    def __init__(self, tools: Tools, *, half_life: float = 64.0, most: float = 0.2):
        self.half_life, self.most = half_life, most
        self.tools = tools
        self.past = copy_trainable(tools.policy).requires_grad_(False).eval()
        self.updates = 0

    @torch.no_grad()
    def chunk_scores(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [B, T]; see `ScoresChunks`."""
        roots_alive = rollouts.alive & (rollouts.parent < 0)[:, None]
        policy, mask = self.tools.policy, rollouts.mask & roots_alive[..., None]
        now, then = (self.tools.score(each, rollouts, roots_alive).logp for each in (policy, self.past))
        change = now.new_zeros(mask.shape).index_put((roots_alive,), now - then)
        latents = {name: value[roots_alive] for name, value in rollouts.latents.items()}
        decision = Decision(
            rollouts.actions[roots_alive], latents, rollouts.logp_behaviour[roots_alive], mask[roots_alive]
        )
        # Of the number of updates: a resumed run draws the same.
        draws = torch.Generator(device_of(self.tools)).manual_seed(self.updates)
        levels = torch.tensor(uncertainty(policy, self.tools.observe(rollouts, roots_alive), decision, draws))
        level = change.new_zeros(roots_alive.shape).index_put((roots_alive,), levels.to(change))
        return branching_scores(level, later_gains(change, mask, self.half_life, self.most), roots_alive)

    @torch.no_grad()
    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Add the scores, and become the policy that acted."""
        rollouts = rollouts.with_extras(branching_score=self.chunk_scores(rollouts))
        load_trainable_state(self.past, trainable_state(self.tools.policy))
        self.updates += 1
        return rollouts

    def tree(self) -> dict[str, Any]:
        """Return weights and number of updates."""
        return {"past": self.past.state_dict(), "updates": self.updates}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.past.load_state_dict(tree["past"])
        self.updates = tree["updates"]


@mechanism(
    Slot.ALLOCATOR,
    "procedures",
    source="APPO, arXiv:2606.12384",
    needs=(Need.GROUPS, Need.BRANCHING_SCORES),
)
class Procedures(Uniform):
    """Play a share of each group, then branch off it after the chunks with the best scores of models=[past_policy].

    Only chunks with a positive score are branched at, each once; the rest of the group begins at its initial state: in
    the first iteration, which has no past policy, all of it. Deviation: in place of these, the authors' code branches
    without a positive score, and several times at one place. Added episodes do not count in the reported success. Their
    credit: advantage=procedures, rewards=[procedure_scale].
    """

    by_teacher = False

    def __init__(self, *, share: float = 0.5):
        if not 0 < share <= 1:
            raise ConfigError(f"options.procedures.share={share:g} must be above 0 and at most 1.")
        self.share = share
        self.size = 0

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the number of roots of each group, [n]."""
        self.size = group_size
        return [max(1, round(self.share * group_size))] * len(predicted)

    def continuations(
        self, rollouts: Rollouts, values: Tensor | None, turn: int, context: Context
    ) -> list[tuple[int, int]]:
        """Return (row, chunk after the best-scored ones) of every group, and (row, 0) for what is left.

        values: scores of chunks, [B, T]; see `ContinuesEpisodes`.
        """
        if turn:
            return []
        alive = rollouts.alive
        score = torch.zeros(alive.shape) if values is None else values.cpu()
        # An episode has to go on after the chunk.
        goes_on = torch.cat([alive[:, 1:], torch.zeros_like(alive[:, :1])], 1).cpu()
        score = torch.where(goes_on, score, 0.0)
        places: list[tuple[int, int]] = []
        members: dict[int, list[int]] = {}
        for row, group in enumerate(integers(rollouts.group)):
            members.setdefault(group, []).append(row)
        for rows in members.values():
            count, flat = self.size - len(rows), score[rows].flatten()
            best = [place for place in integers(flat.argsort(descending=True, stable=True))[:count] if flat[place] > 0]
            branch_points = [divmod(place, score.shape[1]) for place in best]
            places += [(rows[row], chunk + 1) for row, chunk in branch_points]
            places += [(rows[0], 0)] * (count - len(branch_points))
        return places


def branches(rollouts: Rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of rows that branched off after an episode's beginning, [B] bool, the position of each row's root
    [B], and the chunks that a branch shares with it, [B, T] bool.
    """
    root, start = lineage(rollouts)
    is_branch = (root >= 0) & (start > 0)
    time = torch.arange(rollouts.shape[1], device=start.device)
    return is_branch, root, is_branch[:, None] & (time < start[:, None])


@mechanism(
    Slot.REWARD,
    "procedure_scale",
    source="APPO, arXiv:2606.12384",
    needs=(Need.GROUPS, Need.BRANCHING_SCORES),
)
def procedure_scale(rollouts: Rollouts, context: Context, *, discount: float = 0.9) -> Rollouts:
    """Multiply a root's rewards up to a branch's split by 1 + (score / best score of the batch) discount^distance.

    distance: chunks before the split; the mean over a root's branches. Branches and rewards after the splits stay, so
    an outcome that is paid at the end stays as well, as in the authors' code.
    """
    is_branch, root, shared = branches(rollouts)
    last = (shared.sum(1) - 1).clamp(min=0)
    score = rollouts.extras["branching_score"][root.clamp(min=0), last] * is_branch
    if not bool((score > 0).any()):
        return rollouts
    time = torch.arange(rollouts.shape[1], device=last.device)
    scale = 1 + shared * (score / score.max())[:, None] * discount ** (last[:, None] - time).clamp(min=0)
    total = torch.zeros_like(scale).index_add_(0, root[is_branch], scale[is_branch])
    count = torch.zeros_like(score).index_add_(0, root[is_branch], torch.ones_like(score)[is_branch])[:, None]
    factor = torch.where(count > 0, total / count.clamp(min=1), 1.0)[..., None]
    return replace(rollouts, rewards={name: reward * factor.to(reward) for name, reward in rollouts.rewards.items()})


@mechanism(Slot.ADVANTAGE, "procedures", source="APPO, arXiv:2606.12384", needs=(Need.GROUPS,))
def procedures(rollouts: Rollouts, context: Context, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """GRPO among the roots of an initial state, and among its branches; only roots are learned from.

    On the chunks that they share with a root, the mean advantage of its branches is added to the root's. Returns A [B,
    T] and the roots, [B] bool.
    """
    returns, counts, _ = outcomes(rollouts)
    is_branch, root, shared = branches(rollouts)
    base = group_normalised(returns, counts, Segments.of(rollouts.group, is_branch), epsilon)
    added = torch.where(shared, base[:, None], 0.0)
    total = torch.zeros_like(added).index_add_(0, root[is_branch], added[is_branch])
    count = torch.zeros_like(added).index_add_(0, root[is_branch], shared[is_branch].to(added))
    advantage = broadcast(base, rollouts) + total / count.clamp(min=1)
    # Shared chunks get the mean over their rows later (`tree.shared_credit`): here all have the root's.
    advantage = torch.where(shared, advantage[root.clamp(min=0)], advantage)
    return torch.where(rollouts.alive, advantage, 0.0), ~is_branch
