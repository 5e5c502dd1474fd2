"""Advantages of episodes that branch off one another: comparing subtrees and forks. (rollouts, context) -> A."""

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.group import broadcast, group_normalised, outcomes
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


def in_sampling_steps(rollouts: Rollouts) -> bool:
    """Whether episodes branch inside decisions, so that nodes of their tree are steps, not decisions."""
    return rollouts.branch_sampling_step is not None and bool((rollouts.branch_sampling_step > 0).any())


def owners(rollouts: Rollouts) -> Tensor:
    """Return, for a tree of episodes, the position of the row that owns each decision (or step), [B, T] ([B, T * K]).

    A row that branched off at decision s shares the decisions before s with its parent, which owns them (or its own
    parent does). Rows with the same owner at t have everything up to t in common: the leaves of one subtree.
    """
    count, length = rollouts.shape
    branch = rollouts.branch_decision
    if in_sampling_steps(rollouts):
        assert rollouts.branch_sampling_step is not None
        steps = rollouts.mask.shape[-1]
        branch, length = branch * steps + rollouts.branch_sampling_step, length * steps
    position = torch.full((int(rollouts.episode.max()) + 1,), -1, dtype=torch.int64, device=rollouts.episode.device)
    position[rollouts.episode] = torch.arange(count, device=position.device)
    parent = torch.where(rollouts.parent >= 0, position[rollouts.parent.clamp(min=0)], -1)
    time = torch.arange(length, device=position.device)[None]
    # Start with every row owning its decisions, and pass what lies before its branch on to the parent until nothing
    # moves: each round climbs one generation, so a tree of depth d is done after d rounds.
    owner = torch.arange(count, device=position.device)[:, None].expand(count, length)
    for _ in range(count):
        shared = (time < branch[owner]) & (parent[owner] >= 0)
        if not bool(shared.any()):
            break
        owner = torch.where(shared, parent[owner], owner)
    return owner


def subtree_values(rollouts: Rollouts) -> tuple[Tensor, Segments]:
    """Return the mean return of the leaves under every node, and the nodes as segments, flat.

    Nodes are decisions, [B, T] and [B * T], or, where episodes branch inside them, steps, [B, T * K] and [B * T * K].
    """
    owner = owners(rollouts)
    time = torch.arange(owner.shape[1], device=owner.device).expand(owner.shape)
    nodes = Segments.of(owner.flatten(), time.flatten())
    returns = rollouts.row_return[:, None].expand(owner.shape).flatten()
    return nodes.mean(returns)[nodes.index].reshape(owner.shape), nodes


def shared_credit(rollouts: Rollouts, advantage: Tensor) -> Tensor:
    """Give what several leaves of a tree share, and play only once, the mean of their advantages.

    That is what it would get if every leaf trained it (TreePO, ARPO). advantage: [B, T] or [B, T, K]; without a tree it
    is returned as it is.
    """
    if not bool((rollouts.parent >= 0).any()):
        return advantage
    owner, shape, steps = owners(rollouts), rollouts.mask.shape, rollouts.mask.shape[-1]
    if in_sampling_steps(rollouts) or advantage.dim() == 3:
        advantage = advantage if advantage.dim() == 3 else advantage[..., None].expand(shape)
        owner = owner if owner.shape[1] == shape[1] * steps else owner.repeat_interleave(steps, 1)
    flat = advantage.flatten(1)
    place = torch.arange(flat.shape[1], device=flat.device).expand(flat.shape)
    nodes = Segments.of(owner.flatten(), place.flatten())
    return nodes.mean(flat.flatten())[nodes.index].reshape(advantage.shape)


def _nodes_alive(rollouts: Rollouts, values: Tensor) -> Tensor:
    """Return which nodes were played or copied, in the shape of `subtree_values`."""
    return rollouts.alive.repeat_interleave(values.shape[1] // rollouts.shape[1], 1)


def _as_steps(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Bring [B, T] or [B, T * K] to what an advantage returns: [B, T] or [B, T, K]."""
    return values if values.shape == rollouts.shape else values.reshape(rollouts.mask.shape)


@mechanism(Slot.ADVANTAGE, "tree_po", source="TreePO, arXiv:2508.17445", needs=(Need.GROUPS,))
def tree_po(rollouts: Rollouts, context: Context, *, by_size: bool = False) -> Tensor:
    """A leaf's advantage: the mean over the depths of its path of R minus the mean of its subtree there.

    The first depth is the whole group; depths at which the leaf is alone in its subtree do not count. by_size: weigh
    depths by the number of leaves in the subtree. Standardised over the batch. Returns A [B, T], constant over an
    episode.
    """
    returns, counts, groups = outcomes(rollouts)
    values, nodes = subtree_values(rollouts)
    leaves = nodes.size()[nodes.index].reshape(values.shape)
    # Near the root a leaf is compared with the whole group, near the end with its own siblings. Where it is alone it
    # is not compared at all; counting that as 0 would shrink the advantage of whoever branched off early.
    compared = torch.where(_nodes_alive(rollouts, values) & (leaves > 1), leaves if by_size else 1, 0)
    whole = groups.size(counts)[groups.index] if by_size else torch.ones_like(groups.index)
    root = returns - groups.mean(returns, counts)[groups.index]
    total = whole * root + (compared * (returns[:, None] - values)).sum(1)
    advantage = total / (whole + compared.sum(1)).clamp(min=1)
    chosen = advantage[counts]
    scaled = (advantage - chosen.mean()) / (chosen.std(unbiased=False) + 1e-8)
    return broadcast(torch.where(counts, scaled, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "branch_grpo", source="BranchGRPO, arXiv:2509.06040", needs=(Need.GROUPS,))
def branch_grpo(rollouts: Rollouts, context: Context) -> Tensor:
    """A node's value is the mean of its leaves, standardised among the nodes of its depth in the same tree.

    0 for depths with a single node or without spread. Without a tree it is GRPO at every step. Returns A [B, T], or
    [B, T, K] where episodes branch inside decisions.
    """
    values, nodes = subtree_values(rollouts)
    first = torch.zeros(nodes.count, dtype=torch.bool, device=values.device)
    flat, alive = values.flatten(), _nodes_alive(rollouts, values).flatten()
    # A node stands in every row of its subtree; only its first place counts in the depth's mean and spread, so that a
    # node weighs the same however many leaves it has.
    order = torch.arange(len(flat), device=flat.device)
    leader = nodes.minimum(order.double(), alive, empty=-1.0)
    counted = alive & (leader[nodes.index] == order)
    first[nodes.index[counted]] = True
    time = torch.arange(values.shape[1], device=values.device).expand(values.shape).flatten()
    depths = Segments.of(rollouts.group[:, None].expand(values.shape).flatten(), time)
    mean, std = depths.mean(flat, counted)[depths.index], depths.std(flat, counted)[depths.index]
    size = depths.size(counted)[depths.index]
    scaled = (flat - mean) / (std + 1e-8)
    found = torch.where(alive & (size > 1) & (std > 1e-6), scaled, 0.0)
    return _as_steps(found.reshape(values.shape), rollouts)


@mechanism(Slot.ADVANTAGE, "fork", source="PORTool, arXiv:2510.26020", needs=(Need.GROUPS,))
def fork(rollouts: Rollouts, context: Context, *, trajectory: float = 1.0, forks: float = 1.0) -> Tensor:
    """Weighted sum of the episode's advantage and of how much a decision raised its subtree's mean return.

    At a fork that rise is the advantage against the siblings; elsewhere it is 0. Returns A [B, T], or [B, T, K] where
    episodes branch inside decisions.
    """
    values, _ = subtree_values(rollouts)
    returns, counts, groups = outcomes(rollouts)
    root = groups.mean(returns, counts)[groups.index]
    before = torch.cat([root[:, None], values[:, :-1]], 1)
    episode = broadcast(group_normalised(returns, counts, groups), rollouts)
    share = values.shape[1] // rollouts.shape[1]
    advantage = trajectory * episode.repeat_interleave(share, 1) + forks * (values - before)
    return _as_steps(torch.where(_nodes_alive(rollouts, values), advantage, 0.0), rollouts)


def per_decision(per_row: Tensor, rollouts: Rollouts) -> Tensor:
    """Repeat a row's entry for each of its decisions: [B] -> [B * T]."""
    return per_row[:, None].expand(rollouts.shape).flatten()
