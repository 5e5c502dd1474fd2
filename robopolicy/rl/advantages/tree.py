"""Advantages of branching episodes, comparing subtrees and branch points: (rollouts, context) -> A."""

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.group import broadcast, outcomes
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def in_sampling_steps(rollouts: Rollouts) -> bool:
    """Whether episodes branch inside a policy call, so that tree nodes are denoising steps instead of chunks."""
    return rollouts.branch_sampling_step is not None and bool((rollouts.branch_sampling_step > 0).any())


def lineage(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the parent position of every row [B], -1 for none, and the chunk (or step) [B] at which it branched
    off.
    """
    branch = rollouts.branch_decision
    # Where branches share steps of a decision, time counts steps: decision * K + step.
    if in_sampling_steps(rollouts):
        assert rollouts.branch_sampling_step is not None
        branch = branch * rollouts.mask.shape[-1] + rollouts.branch_sampling_step
    position = torch.full((int(rollouts.episode.max()) + 1,), -1, dtype=torch.int64, device=rollouts.episode.device)
    position[rollouts.episode] = torch.arange(len(branch), device=position.device)
    return torch.where(rollouts.parent >= 0, position[rollouts.parent.clamp(min=0)], -1), branch


def owners(rollouts: Rollouts) -> Tensor:
    """Return, for a tree of episodes, the position of the row that owns each chunk (or step), [B, T] ([B, T * K]).

    A row that branched off at chunk s shares the chunks before s with its parent, which owns them (or its own parent
    does). Rows with the same owner at t share everything up to t: they are the leaves of one subtree.
    """
    count, length = rollouts.shape
    length *= rollouts.mask.shape[-1] if in_sampling_steps(rollouts) else 1
    parent, branch = lineage(rollouts)
    time = torch.arange(length, device=parent.device)[None]
    # Start with every row owning its decisions, and pass what lies before its branch on to the parent until nothing
    # moves: each round climbs one generation, so a tree of depth d is done after d rounds.
    owner = torch.arange(count, device=parent.device)[:, None].expand(count, length)
    for _ in range(count):
        from_parent = (time < branch[owner]) & (parent[owner] >= 0)
        if not bool(from_parent.any()):
            break
        owner = torch.where(from_parent, parent[owner], owner)
    return owner


def sampled_steps(rollouts: Rollouts) -> Tensor:
    """Return the steps that were sampled, [B, T, K] bool: of a copied prefix, which `mask` leaves out, those of the row
    that owns it.
    """
    owner, mask = owners(rollouts), rollouts.mask
    flat = mask.flatten(1) if owner.shape != rollouts.shape else mask
    return flat[owner, torch.arange(owner.shape[1], device=mask.device)].reshape(mask.shape)


def subtree_values(rollouts: Rollouts) -> tuple[Tensor, Segments]:
    """Compute the mean return of the leaves under every node, and the nodes as segments, flat.

    Nodes are chunks, [B, T] and [B * T], or, if episodes branch inside policy calls, steps, [B, T * K] and [B * T * K].
    """
    return subtree_means(rollouts, rollouts.row_return)


def subtree_means(rollouts: Rollouts, per_row: Tensor) -> tuple[Tensor, Segments]:
    """Compute the mean of any value of the leaves [B] under every node; see `subtree_values`."""
    owner = owners(rollouts)
    nodes = _nodes(owner)
    return nodes.mean(per_row[:, None].expand(owner.shape).flatten())[nodes.index].reshape(owner.shape), nodes


def fused_values(rollouts: Rollouts, beta: float) -> Tensor:
    """Compute leaf returns fused up the tree, weighted by branch probabilities; shapes as in `subtree_values`.

        value(node) = sum over its branches of softmax(beta log p(branch)) value(branch)

    p: probability of the step (or the scored steps of the chunk) at which a branch diverges from the others. Returns
    [B, T], or [B, T * K] if episodes branch inside policy calls. Source: BranchGRPO.
    """
    owner, (parent, branch) = owners(rollouts), lineage(rollouts)
    edge = torch.where(rollouts.mask, rollouts.logp_behaviour, 0.0)
    edge = beta * (edge.flatten(1) if in_sampling_steps(rollouts) else edge.sum(-1))
    row = torch.arange(len(parent), device=parent.device)
    value = rollouts.row_return
    end = owner.shape[1]
    values = value[:, None].repeat(1, end)
    for split in sorted(set(integers(branch[parent >= 0])), reverse=True):
        values[:, split:end], end = value[:, None], split
        # Who branched off later is part of its parent's value by now.
        in_tree = (parent < 0) | (branch <= split)
        forks = Segments.of(torch.where((parent >= 0) & (branch == split), parent, row)[in_tree])
        logit, leaf = edge[in_tree, split].to(value.dtype), value[in_tree]
        # Softmax among the branches that part here, shifted by their largest logit.
        weight = (logit - forks.maximum(logit)[forks.index]).exp()
        value = value.masked_scatter(in_tree, (forks.sum(weight * leaf) / forks.sum(weight))[forks.index])
    values[:, :end] = value[:, None]
    return values.gather(0, owner)


def shared_credit(rollouts: Rollouts, advantage: Tensor) -> Tensor:
    """Average the advantages of leaves over the chunks that they share and that are played only once.

    This is the advantage a shared chunk would get if every leaf trained it (TreePO, ARPO). advantage: [B, T] or [B, T,
    K]; returned unchanged without a tree.
    """
    if not bool((rollouts.parent >= 0).any()):
        return advantage
    owner = owners(rollouts)
    shape = rollouts.mask.shape
    steps = rollouts.mask.shape[-1]
    if in_sampling_steps(rollouts) or advantage.dim() == 3:
        advantage = advantage if advantage.dim() == 3 else advantage[..., None].expand(shape)
        owner = owner if owner.shape[1] == shape[1] * steps else owner.repeat_interleave(steps, 1)
    nodes = _nodes(owner)
    return nodes.mean(advantage.flatten())[nodes.index].reshape(advantage.shape)


def _nodes(owner: Tensor) -> Segments:
    """Group entries with the same owner [B, L] (a row position) at the same place, flat; faster than sorting."""
    count, length = owner.shape
    place = torch.arange(length, device=owner.device)
    return Segments((owner * length + place).flatten(), count * length)


def nodes_alive(rollouts: Rollouts, values: Tensor) -> Tensor:
    """Return a mask of nodes that were played or copied, shaped as in `subtree_values`, [B, T] or [B, T * K]."""
    return rollouts.alive.repeat_interleave(values.shape[1] // rollouts.shape[1], 1)


def node_leaders(nodes: Segments, alive: Tensor) -> Tensor:
    """Return, for every entry [N], the place of the first `alive` [N] entry of its node, which stands in several rows;
    -1 without one.
    """
    place = torch.arange(len(alive), device=alive.device).double()
    return nodes.minimum(place, alive, empty=-1.0)[nodes.index].long()


def as_steps(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Reshape [B, T] or [B, T * K] to the shape of an advantage: [B, T] or [B, T, K]."""
    return values if values.shape == rollouts.shape else values.reshape(rollouts.mask.shape)


@mechanism(Slot.ADVANTAGE, "tree_po", source="TreePO, arXiv:2508.17445", needs=(Need.GROUPS,))
def tree_po(rollouts: Rollouts, context: Context, *, by_size: bool = False) -> Tensor:
    """Leaf advantage: mean over the depths of its path of R minus the mean return of its subtree there.

    The first depth is the complete group; depths at which the leaf is alone in its subtree do not count. by_size:
    weight depths by the number of leaves in the subtree. Standardised over the batch's episodes (in the authors' code
    over its tokens). Returns A [B, T], constant over an episode.
    """
    returns, counts, groups = outcomes(rollouts)
    values, nodes = subtree_values(rollouts)
    leaves = nodes.size()[nodes.index].reshape(values.shape)
    # Near the root a leaf is compared with the whole group, near the end with its own siblings. Where it is alone it
    # is not compared at all; counting that as 0 would shrink the advantage of whoever branched off early.
    compared = torch.where(nodes_alive(rollouts, values) & (leaves > 1), leaves if by_size else 1, 0)
    root_weight = groups.size(counts)[groups.index] if by_size else torch.ones_like(groups.index)
    root = returns - groups.mean(returns, counts)[groups.index]
    total = root_weight * root + (compared * (returns[:, None] - values)).sum(1)
    advantage = total / (root_weight + compared.sum(1)).clamp(min=1)
    counted_values = advantage[counts]
    scaled = (advantage - counted_values.mean()) / (counted_values.std(unbiased=False) + 1e-8)
    return broadcast(torch.where(counts, scaled, 0.0), rollouts)


@mechanism(Slot.ADVANTAGE, "branch_grpo", source="BranchGRPO, arXiv:2509.06040", needs=(Need.GROUPS,))
def branch_grpo(
    rollouts: Rollouts,
    context: Context,
    *,
    beta: float = 0.0,
    width: str = "all",
    share: float = 0.5,
    depth: int = 0,
    slide: int = 30,
) -> Tensor | tuple[Tensor, Tensor]:
    """Node advantage: the mean return of its leaves, standardised over the nodes of its depth in the same tree.

    beta: 0 for the mean of the leaves, else the exponent of the probabilities that weight them (`fused_values`; the
    paper uses 1). Depths with a single node or equal values give 0. The standard deviation is the population's; the
    authors' code uses the sample's, which differs by one factor per depth. Without a tree it equals GRPO at every step.
    width, share, depth, slide: pruning of leaves and steps from the gradient (`unpruned_leaf_steps`,
    `unpruned_chain_steps`); pruned ones are still played and count in the values. Returns A [B, T], or [B, T, K] if
    episodes branch inside policy calls; with pruning also the kept steps, [B, T, K] bool. Raises ConfigError for an
    unknown width or a depth that is too large.
    """
    values, nodes = subtree_values(rollouts)
    if beta:
        values = fused_values(rollouts, beta)
    flat, alive = values.flatten(), nodes_alive(rollouts, values).flatten()
    # A node stands in every row of its subtree; only its first place counts in the depth's mean and spread, so that a
    # node weighs the same however many leaves it has.
    is_leader = alive & (node_leaders(nodes, alive) == torch.arange(len(flat), device=flat.device))
    depths = _nodes(Segments.of(rollouts.group).index[:, None].expand(values.shape))
    mean, std = depths.mean(flat, is_leader)[depths.index], depths.std(flat, is_leader)[depths.index]
    size = depths.size(is_leader)[depths.index]
    scaled = (flat - mean) / (std + 1e-8)
    normalised = torch.where(alive & (size > 1) & (std > 1e-6), scaled, 0.0)
    advantage = as_steps(normalised.reshape(values.shape), rollouts)
    if width == "all" and not depth:
        return advantage
    return advantage, unpruned_leaf_steps(rollouts, width, share) & unpruned_chain_steps(
        rollouts, depth, context.iteration // slide
    )


def unpruned_leaf_steps(rollouts: Rollouts, width: str, share: float = 0.5) -> Tensor:
    """Return the steps that keep a gradient when leaves are pruned after their last split, [B, T, K] bool.

    width: all keeps all leaves; branch keeps the best of those that diverge last; extremes keeps the best and the worst
    of a group's leaves, half of `share` each and at least one. The split and everything before it are kept. Source:
    width pruning, BranchGRPO; the authors' code ranks single steps after the last split instead of leaves. Raises
    ConfigError for an unknown width.
    """
    if width not in ("all", "branch", "extremes"):
        raise unknown_option("branch_grpo.width", width, ("all", "branch", "extremes"))
    (parent, _), returns = lineage(rollouts), rollouts.row_return
    if width == "all" or not bool((parent >= 0).any()):
        return torch.ones_like(rollouts.mask)
    owner = owners(rollouts)
    length, row = owner.shape[1], torch.arange(len(parent), device=parent.device)
    time = torch.arange(length, device=parent.device)
    nodes = _nodes(owner)
    is_leaf = (nodes.size()[nodes.index] == 1).reshape(owner.shape)
    leaf_start = torch.where(is_leaf, time, length).amin(1).clamp(max=length - 1)  # where it is a leaf from on
    root = row
    while bool((parent[root] >= 0).any()):
        root = torch.where(parent[root] >= 0, parent[root], root)
    trees = torch.bincount(root, minlength=len(row))[root] > 1
    if width == "branch":
        before = owner.gather(1, (leaf_start - 1).clamp(min=0)[:, None])[:, 0]
        forks = Segments.of(torch.where(leaf_start > 0, before, root), leaf_start)
        best = forks.rank(-returns, trees) == 0
    else:
        forks = Segments.of(rollouts.group)
        rank, size = forks.rank(returns, trees), forks.size(trees)[forks.index]
        number = (share * size).long().clamp(min=2)
        best = (rank >= size - number // 2) | (rank < number - number // 2)
    kept_mask = (best | ~trees)[:, None] | (time <= leaf_start[:, None])
    return (
        as_steps(kept_mask, rollouts)
        if kept_mask.shape != rollouts.shape
        else kept_mask[..., None].expand(rollouts.mask.shape)
    )


def unpruned_chain_steps(rollouts: Rollouts, depth: int, shift: int) -> Tensor:
    """Return the steps that keep a gradient when `depth` steps of every denoising chain are pruned, [B, T, K] bool.

    The window of pruned steps lies at the end of the chain and is moved `shift` steps towards its start, at most until
    it is right behind the step at which branches diverge last; in the authors' code two steps further. Source: depth
    pruning, BranchGRPO. Raises ConfigError if it does not fit behind that step.
    """
    steps = rollouts.mask.shape[-1]
    first = int(rollouts.branch_sampling_step.max()) + 1 if rollouts.branch_sampling_step is not None else 1
    if depth > steps - first:
        raise ConfigError(
            f"branch_grpo.depth={depth} is too large: of {steps} steps at most the last {steps - first} can be pruned."
        )
    start = max(first, steps - depth - shift)
    step = torch.arange(steps, device=rollouts.mask.device)
    return ((step < start) | (step >= start + depth)).expand(rollouts.mask.shape)


def per_decision(per_row: Tensor, rollouts: Rollouts) -> Tensor:
    """Repeat a row's entry for each of its chunks: [B] -> [B * T]."""
    return per_row[:, None].expand(rollouts.shape).flatten()


keep_former_names(__name__, {"kept_leaves": "unpruned_leaf_steps", "kept_steps": "unpruned_chain_steps"})
