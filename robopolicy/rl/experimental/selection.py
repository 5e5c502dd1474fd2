"""Experimental selection of collected episodes: (rollouts, context) -> keep [B] or [B, 1] bool."""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments, distinct
from robopolicy.nn.normalizer import in_deviations, with_constants_kept
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.SELECTION, "roc", source="GRPO-RoC, arXiv:2508.20722", needs=(Need.GROUPS,))
def resample_on_correct(rollouts: Rollouts, context: Context, *, keep: float = 0.5) -> Tensor:
    """Keep a fraction of every group: the cleanest successes and random failures, in their original proportion.

    Of N episodes with s successes n = round(keep N) are kept, and of these round(n s / N) are successes, but at least
    two successes and two failures, as far as there are (as in the authors' script, where n is 16). Play more episodes
    than needed (a larger group_size, at least 8). Clean means short: the fewest control steps. Returns keep [B] bool.
    """
    success, groups = rollouts.row_success, Segments.of(rollouts.group)
    steps = rollouts.duration.sum(1).double()
    chance = torch.rand(len(steps), generator=context.generator, device=context.generator.device).double()
    # Ranks are within a kind: successes by their length, failures by chance.
    order = torch.where(success, steps, 1e9 + chance)
    kinds = Segments.of(rollouts.group, success)
    place = kinds.rank(order)
    size = groups.size().double()
    successes = groups.sum(success.double())
    least_successes, least_failures = successes.clamp(max=2), (size - successes).clamp(max=2)
    kept_size = (keep * size).round().maximum(least_successes + least_failures)
    kept_successes = (kept_size * successes / size.clamp(min=1)).round().maximum(least_successes)
    kept_successes = kept_successes.minimum(kept_size - least_failures)
    target_size = torch.where(success, kept_successes[groups.index], (kept_size - kept_successes)[groups.index])
    return place < target_size


@mechanism(Slot.SELECTION, "max_variance", source="D3S, arXiv:2509.22115; PODS, arXiv:2504.13818", needs=(Need.GROUPS,))
def max_variance(rollouts: Rollouts, context: Context, *, keep: float = 0.5, final: float | None = None) -> Tensor:
    """Keep the subset of every group with the largest variance of returns: its lowest and highest ones.

    The best subset of size k always combines the lowest and the highest returns; all splits are compared. Within a
    group, the variance of standardised advantages, which D3S maximises, orders subsets alike. keep: initial fraction;
    final: fraction at the end of the run, None for `keep` throughout. It grows linearly in between (D3S goes from a
    small fraction to all, so that low-signal episodes are not forgotten; its schedule is not in the abstract). D3S's
    second level, steps, is credit=[d3s_steps]. Its variant that selects across groups is omitted because advantages are
    computed from the kept episodes, and a group of one episode has none: two are kept at least. Returns keep [B] bool.
    """
    share = keep if final is None else keep + (final - keep) * context.share
    returns = rollouts.row_return
    kept_mask = torch.zeros_like(rollouts.group, dtype=torch.bool)
    for group in distinct(rollouts.group)[0]:
        members = (rollouts.group == group).nonzero().squeeze(1)
        order = members[returns[members].argsort(stable=True)]
        count = max(min(2, len(order)), round(share * len(order)))
        splits = [torch.cat([order[:low], order[len(order) - count + low :]]) for low in range(count + 1)]
        kept_mask[max(splits, key=lambda rows: float(returns[rows].var(unbiased=False)))] = True
    return kept_mask


def episode_distances(rollouts: Rollouts) -> Tensor:
    """Return the distances between rows, [B, B]: means over chunks of those of their states, in units of spread.

    States are vector fields of the newest observation, each entry divided by its standard deviation over the batch. The
    shorter row stays at its last state. Raises ConfigError without vector fields.
    """
    vectors = [
        value[:, :, -1].flatten(2)
        for value in rollouts.observation.values()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    ]
    if not vectors:
        raise ConfigError(
            "selection=[distinct_pairs] compares vector fields, and this policy reads none: leave it out."
        )
    states = torch.cat(vectors, -1)
    states = in_deviations(states, states[rollouts.alive])
    length = rollouts.alive.sum(1)
    time = torch.arange(states.shape[1], device=states.device)
    states = states.gather(1, torch.minimum(time, length[:, None] - 1)[..., None].expand(states.shape))
    distances = (states[:, None] - states[None]).square().sum(-1).sqrt()
    compared = time < torch.maximum(length[:, None], length[None])[..., None]
    return (distances * compared).sum(-1) / compared.sum(-1).clamp(min=1)


@mechanism(Slot.SELECTION, "distinct_pairs", source="DaGRPO, arXiv:2512.06337", needs=(Need.GROUPS,))
def distinct_pairs(rollouts: Rollouts, context: Context, *, least: float = 0.25) -> Tensor:
    """Drop successes and failures that hardly differ from each other, as long as a group keeps one of each.

    While the nearest success and failure of a group are closer than `least` (see `episode_distances`), both are
    dropped, except the last of its kind. The paper scores pairs by a language model's likelihoods in a way that was not
    found; this distance is chosen here. Its anchors, recorded successes for groups without any, are models=
    [success_pool]. Returns keep [B] bool.
    """
    success, distances = rollouts.row_success, episode_distances(rollouts)
    kept_mask = torch.ones_like(success)
    for group in distinct(rollouts.group)[0]:
        members = rollouts.group == group
        while True:
            good, bad = ((members & kept_mask & each).nonzero().squeeze(1) for each in (success, ~success))
            if not len(good) or not len(bad) or len(good) == len(bad) == 1:
                break
            pairs = distances[good[:, None], bad]
            if float(pairs.min()) >= least:
                break
            row, column = divmod(int(pairs.argmin()), len(bad))
            for rows, place in ((good, row), (bad, column)):
                if len(rows) > 1:
                    kept_mask[rows[place]] = False
    return kept_mask


@mechanism(Slot.SELECTION, "void_turns", source="SimpleTIR, arXiv:2509.02479", needs=(Need.EPISODES,))
def drop_void(rollouts: Rollouts, context: Context, *, still: float = 1e-3) -> Tensor:
    """Drop complete episodes with a void turn, a chunk after which nothing has moved; keep all if all have one.

    Their returns count in the baselines of the others, as in the authors' code, which masks their loss. The paper's
    void turn contains neither code nor an answer, and episodes with one make updates explode. For a robot it is a chunk
    in which no vector field of the observation changes by `still` of its standard deviation over the batch. (Actions
    and observations that are not finite end a run much earlier.) Returns keep [B, 1] bool. Raises ConfigError without
    vector fields.
    """
    has_moved, fields = torch.zeros_like(rollouts.alive), 0
    for key, before in rollouts.observation.items():
        following = rollouts.next_observation.get(key)
        if isinstance(before, Tensor) and isinstance(following, Tensor) and before.dtype.is_floating_point:
            newest, after = before[:, :, -1].flatten(2), following[:, :, -1].flatten(2)
            spread = with_constants_kept(newest[rollouts.alive].std(0, unbiased=False))
            has_moved, fields = has_moved | ((after - newest).abs() / spread > still).any(-1), fields + 1
    if not fields:
        raise ConfigError(
            "selection=[void_turns] sees in vector fields of the observation whether something moved, and this policy "
            "reads none: leave it out."
        )
    return (has_moved | ~rollouts.alive).all(1, keepdim=True)
