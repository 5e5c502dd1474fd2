"""Experimental credit assignment from one advantage per chunk to one per step: (rollouts, A, context) -> A [B, T,
K].
"""

import warnings

import torch
from torch import Tensor

from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments, distinct, quantile
from robopolicy.nn.normalizer import in_deviations
from robopolicy.rl.advantages.gae import standardise
from robopolicy.rl.advantages.step import final_state
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.evidence import contrasted
from robopolicy.rl.registry import Need, Slot, mechanism


def entropy_of(rollouts: Rollouts) -> Tensor:
    """Return the entropy of every step under the behaviour policy, [B, T, K], in nats; requires Need.ENTROPY."""
    return rollouts.extras["entropy"]


def chunk_entropy(rollouts: Rollouts) -> Tensor:
    """Return the mean entropy of every chunk's scored steps, [B, T], 0 where it has none."""
    return (entropy_of(rollouts) * rollouts.mask).sum(-1) / rollouts.mask.sum(-1).clamp(min=1)


def _among(values: Tensor, mask: Tensor) -> Tensor:
    """Scale to [0, 1] between the minimum and the maximum of the masked entries."""
    masked_values = values[mask]
    low, high = masked_values.min(), masked_values.max()
    return (values - low) / (high - low).clamp(min=1e-8)


@mechanism(Slot.CREDIT, "top_entropy", source="80/20 rule, arXiv:2506.01939", needs=(Need.CATEGORICAL, Need.ENTROPY))
def top_entropy(
    rollouts: Rollouts, advantage: Tensor, context: Context, *, share: float = 0.2, per_chunk: bool = False
) -> Tensor:
    """Learn only from the `share` of steps with the highest entropy in the batch (forking tokens).

    per_chunk: from the chunks whose steps have the highest mean entropy, as in DART-GUI (arXiv:2509.23866, share .8).
    Takes and returns A [B, T, K], 0 at the other steps.
    """
    entropy = entropy_of(rollouts)
    if per_chunk:
        mean, has_steps = chunk_entropy(rollouts), rollouts.mask.any(-1)
        return torch.where((mean >= quantile(mean[has_steps], 1 - share))[..., None], advantage, 0.0)
    threshold = quantile(entropy[rollouts.mask], 1 - share)
    return torch.where(entropy >= threshold, advantage, 0.0)


@mechanism(Slot.CREDIT, "entropy_gain", source="AEPO, arXiv:2510.14545", needs=(Need.CATEGORICAL, Need.ENTROPY))
def entropy_gain(rollouts: Rollouts, advantage: Tensor, context: Context, *, gain: float = 0.2) -> Tensor:
    """Uncertain steps weigh more: A (1 + gain z), z the step's entropy standardised over the batch's scored steps.

    gain: as in public copies of the authors' code, which standardise the policy's present entropies over a minibatch;
    here they are those of the policy that acted. Takes and returns A [B, T, K].
    """
    return advantage * (1 + gain * standardise(entropy_of(rollouts), rollouts.mask))


@mechanism(Slot.CREDIT, "by_difficulty", source="GUI-G1, arXiv:2505.15810", needs=(Need.GROUPS,))
def by_difficulty(rollouts: Rollouts, advantage: Tensor, context: Context, *, least: float = 1e-3) -> Tensor:
    """Initial states that fail weigh more: A w, w = (1 - success rate of the group) / its mean over the batch.

    The authors' weight is the inverse size of the target's box, read from their data; how they normalise it was not
    found, so this one, at least `least`, is chosen here. Takes and returns A [B, T, K].
    """
    groups = Segments.of(rollouts.group)
    failure = 1 - groups.mean(rollouts.row_success.float())[groups.index]
    weight = (failure / failure.mean().clamp(min=1e-6)).clamp(min=least)
    return advantage * weight[:, None, None]


@mechanism(Slot.CREDIT, "d3s_steps", source="D3S, arXiv:2509.22115", needs=(Need.CATEGORICAL, Need.ENTROPY))
def d3s_steps(rollouts: Rollouts, advantage: Tensor, context: Context, *, start: float = 0.3) -> Tensor:
    """Learn only from the steps with the largest |A| H; the fraction grows from `start` to 1 over the run.

    H: entropy of a step, nats. Takes and returns A [B, T, K], 0 at the other steps.
    """
    share = start + (1 - start) * context.share
    size = torch.where(rollouts.mask, advantage.abs() * entropy_of(rollouts), -1.0)
    threshold = quantile(size[rollouts.mask], 1 - share)
    return torch.where(size >= threshold, advantage, 0.0)


@mechanism(Slot.CREDIT, "empg", source="EMPG, arXiv:2509.09265", needs=(Need.CATEGORICAL, Need.ENTROPY))
def empg(
    rollouts: Rollouts,
    advantage: Tensor,
    context: Context,
    *,
    damping: float = 1.0,
    clarity: float = 1.0,
    bonus: float = 0.05,
) -> Tensor:
    """Confident chunks weigh more, uncertain ones less, and chunks followed by a confident one get a bonus.

        A_t g(H_t) + bonus exp(-clarity H_{t+1}),  g = exp(-damping H) / mean,  then centred over the batch

    H: mean entropy of a chunk's steps, scaled to [0, 1] over the batch. Both means are over chunks, however many steps
    they have. bonus: 0.1 in the pseudocode of the project's page. Takes and returns A [B, T, K].
    """
    alive = rollouts.alive
    count = rollouts.mask.sum(-1).clamp(min=1)
    step = _among(chunk_entropy(rollouts), alive)
    gain = torch.exp(-damping * step)
    gain = gain / gain[alive].mean()
    next_step = torch.cat([step[:, 1:], torch.ones_like(step[:, :1])], 1)
    # An episode's last decision leads to none, so it earns no bonus.
    follows = torch.cat([alive[:, 1:], torch.zeros_like(alive[:, :1])], 1)
    shaped = advantage * gain[..., None] + bonus * (torch.exp(-clarity * next_step) * follows)[..., None]
    per_chunk = (shaped * rollouts.mask).sum(-1) / count
    return torch.where(rollouts.mask, shaped - per_chunk[alive].mean(), 0.0)


@mechanism(Slot.CREDIT, "gtpo", source="GTPO, arXiv:2508.03772", needs=(Need.CATEGORICAL, Need.ENTROPY, Need.GROUPS))
def gtpo(
    rollouts: Rollouts, advantage: Tensor, context: Context, *, entropy_limit: float = 0.6931, penalty: float = 0.1
) -> Tensor:
    """Protect initial steps that good and bad episodes of a group share, and drop episodes with excessive entropy.

        A <- (A - penalty H) d,   H the episode's mean entropy

    d concerns tokens that both a positive and a negative episode of the group chose at the same place, within an
    episode's unbroken run of such tokens from its start; steps that were not chosen break no run. For them d is 2 in
    positive and 0 in negative episodes; otherwise d is 1. Episodes with H above entropy_limit are dropped (ln 2, for
    words: an untrained policy over n action bins has up to ln n). If all are dropped, a warning is issued. Runs from
    the end, which the paper also uses, are not treated because robot episodes do not end alike. The loss is not divided
    by the number of protected tokens, unlike in the authors' code. Entropies are in nats. Takes and returns A [B, T,
    K].
    """
    # same_token[i, j, s]: both rows chose the same token at s. A conflict is a token that a good and a bad episode of
    # the group chose there, whichever they are; cummin keeps an episode's run from its start, up to the first other,
    # past steps without a choice: shared beginnings that are scored once, tokens kept from the chunk before.
    tokens = rollouts.latents["tokens"].flatten(1)
    is_positive = (advantage > 0).any((1, 2))
    is_negative = (advantage < 0).any((1, 2))
    same_token = (tokens[:, None] == tokens[None]) & rollouts.mask.flatten(1)[:, None] & rollouts.mask.flatten(1)[None]
    together = (rollouts.group[:, None] == rollouts.group[None])[..., None] & same_token
    shared_with_good = (together & is_positive[None, :, None]).any(1)
    shared_with_bad = (together & is_negative[None, :, None]).any(1)
    conflict = shared_with_good & shared_with_bad
    conflict = (conflict & (conflict | ~rollouts.mask.flatten(1)).cummin(-1).values).reshape(advantage.shape)
    factor = torch.where(conflict & is_positive[:, None, None], 2.0, torch.ones_like(advantage))
    factor = torch.where(conflict & is_negative[:, None, None], 0.0, factor)
    mean = (entropy_of(rollouts) * rollouts.mask).sum((1, 2)) / rollouts.mask.sum((1, 2)).clamp(min=1)
    is_kept = mean <= entropy_limit
    if not bool(is_kept.any()):
        warnings.warn(
            f"gtpo excludes every episode: their mean entropies, from {float(mean.min()):.3g} nats, are above "
            f"entropy_limit={entropy_limit:g}, so nothing is learned. Increase entropy_limit.",
            RobopolicyWarning,
            stacklevel=2,
        )
    return torch.where(
        is_kept[:, None, None] & rollouts.mask, (advantage - penalty * mean[:, None, None]) * factor, 0.0
    )


@mechanism(Slot.CREDIT, "vppo", source="VPPO, arXiv:2510.09285", needs=(Need.BLACKOUT_DIVERGENCE,))
def vppo(
    rollouts: Rollouts,
    advantage: Tensor,
    context: Context,
    *,
    share: float = 0.4,
    low: float = 0.9,
) -> Tensor:
    """Learn from image-dependent steps, and more from image-dependent episodes.

    Dependency d: extras["blackout_divergence"] [B, T, K], KL(seeing || blind) of the step's distributions, the latter
    with patches of the images blacked out. The authors' code estimates it by k3 of the drawn token, as here for
    policies that state no distributions. Of Gaussian steps that would keep those whose noise points away from the blind
    mean; failures have more steps, so the mean would move towards the blind one. Of the n steps of an episode the
    ceil(share n) with the largest d are kept. Its advantage is scaled by its mean d, mapped linearly so that the
    minimum of the batch gives `low` and the mean of all scales is 1. The authors' entropy penalty (0.06) is the
    auxiliary `entropy`, off here. Takes and returns A [B, T, K].
    """
    dependency = torch.where(rollouts.mask, rollouts.extras["blackout_divergence"], 0.0)
    steps = rollouts.mask.sum((1, 2))
    order = torch.where(rollouts.mask, dependency, -1.0).flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    kept_mask = (rank < (share * steps).ceil()[:, None]).reshape(advantage.shape)
    mean = dependency.sum((1, 2)) / steps.clamp(min=1)
    scored_rows = steps > 0  # the others have no dependency, not the smallest
    place = _among(mean, scored_rows)
    is_spread = bool((place > 0)[scored_rows].any())
    scale = low + (1 - low) * place / place[scored_rows].mean() if is_spread else torch.ones_like(place)
    return torch.where(kept_mask & rollouts.mask, advantage, 0.0) * scale[:, None, None]


@mechanism(Slot.CREDIT, "seed_grpo", source="SEED-GRPO, arXiv:2505.12346", needs=(Need.GROUPS,))
def seed_grpo(
    rollouts: Rollouts, advantage: Tensor, context: Context, *, alpha: float = 0.5, resolution: float = 1.0
) -> Tensor:
    """Reduce updates on initial states where the policy's outcomes are diverse: A (1 - alpha SE / SE_max).

    SE is the entropy of a group over clusters of final states: vectors of the last chunk's next observation, in
    standard deviations over the batch, rounded to multiples of `resolution`. Clusters are weighted by their
    number of episodes. The paper weights its semantic clusters by their likelihood under the policy; for densities of
    complete episodes a single episode would dominate. Of the paper's forms this is the linear one. Takes and returns A
    [B, T, K]; an episode's entries share one factor, never below 0.
    """
    final = final_state(rollouts)
    cells = (in_deviations(final, final) / resolution).round().long()
    _, cluster = distinct(cells)
    groups = Segments.of(rollouts.group)
    members = Segments.of(rollouts.group, cluster)
    size = groups.size()[groups.index].float()
    # Summing -log(share) / size over a group's rows is the entropy of its clusters: a cluster of m of n rows adds m
    # equal terms, together -(m / n) log(m / n). Its maximum, all rows apart, is log n.
    share = members.size()[members.index].float() / size
    entropy = groups.sum(-share.log() / size)[groups.index]
    return advantage * (1 - alpha * entropy / size.log().clamp(min=1e-6)).clamp(min=0)[:, None, None]


@mechanism(Slot.CREDIT, "novelty", source="XRPO, arXiv:2510.06672", needs=(Need.GROUPS,))
def novelty(
    rollouts: Rollouts, advantage: Tensor, context: Context, *, weight: float = 2.5, limit: float = 0.5
) -> Tensor:
    """Raise positive advantages of unusual episodes: A + min(max(weight (1 - eta), 0), limit A).

    eta = exp(s - mean of s over the group), s the mean log-probability of an episode's steps under the behaviour
    policy: below 1 for an episode that is less likely than its group's others. Other advantages are unchanged. If
    log-probabilities are sums over many elements (policy.logp_reduction=sum), eta is near 0 or very large. Source: two
    public re-implementations, and for the defaults a published review that quotes them; the paper could not be read.
    Takes and returns A [B, T, K].
    """
    logp = torch.where(rollouts.mask, rollouts.logp_behaviour, 0.0).sum((1, 2))
    mean = logp / rollouts.mask.sum((1, 2)).clamp(min=1)
    groups = Segments.of(rollouts.group)
    eta = (mean - groups.mean(mean)[groups.index]).exp()
    bonus = (weight * (1 - eta)).clamp(min=0)[:, None, None].to(advantage.dtype)
    return torch.where(advantage > 0, advantage + torch.minimum(bonus, limit * advantage), advantage)


@mechanism(Slot.CREDIT, "steadiness", source="Q-Hawkeye, arXiv:2601.22920", needs=(Need.GROUPS,))
def steadiness(rollouts: Rollouts, advantage: Tensor, context: Context, *, alpha: float = 0.2) -> Tensor:
    """Reduce advantages of groups that begin in different ways: A exp(-alpha min(1, Var / Var_max)).

    Var: population variance of the first action chunk over the group, per element; Var_max = (range / 2)^2 with the
    range of that element over all chunks of the batch; the quotient is averaged over elements. The paper's predictions
    are quality scores of an image, of which a robot has none. Where exploration noise alone makes the variance, all
    groups get the same factor. Takes and returns A [B, T, K].
    """
    actions = rollouts.actions.flatten(2)
    valid = rollouts.valid[..., None].expand_as(rollouts.actions).flatten(2)
    high = torch.where(valid, actions, -torch.inf).amax((0, 1))
    low = torch.where(valid, actions, torch.inf).amin((0, 1))
    most = ((high - low) / 2).square().clamp(min=1e-12)
    groups = Segments.of(rollouts.group)
    first = valid[:, 0]
    elements = [groups.std(actions[:, 0, place], first[:, place]).square() for place in range(actions.shape[2])]
    counts = torch.stack([groups.size(first[:, place]) > 0 for place in range(actions.shape[2])], -1)
    share = torch.where(counts, torch.stack(elements, -1) / most, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
    return advantage * (-alpha * share.clamp(max=1)).exp()[groups.index][:, None, None]


@mechanism(
    Slot.CREDIT, "instruction_contrast", source="after CEPO's weights, arXiv:2605.19436", needs=(Need.CONTRAST_SCORES,)
)
def instruction_contrast(
    rollouts: Rollouts, advantage: Tensor, context: Context, *, share: float = 0.5, epsilon: float = 0.5
) -> Tensor:
    """Credit instruction-dependent steps: A ((1 - share) + share w), w = exp(sign(A) delta) within 1 +- epsilon.

    delta: a step's log-probability under its instruction, extras["current_logp"] [B, T, K], minus that under another
    one, extras["contrast_logp"]. Steps independent of the instruction keep a weight of 1. CEPO weights in this way with
    a right and a wrong answer in the context: credit=[evidence], for policies that read a goal. Takes and returns A [B,
    T, K].
    """
    delta = rollouts.extras["current_logp"] - rollouts.extras["contrast_logp"]
    return contrasted(advantage, delta, share, epsilon)
