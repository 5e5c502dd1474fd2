"""Experimental coefficients: off-policy data, trust regions, preferences between episodes, and regression.

Each is a c with d(loss)/d(logp) = -w c. If a paper states a surrogate, its gradient was derived by hand and is compared
with autograd in the tests. Preference losses have requirements on minibatches: see `robopolicy.rl.coefficients`.
"""

import math

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.returns import discounted_sums
from robopolicy.core.segments import Segments, entropy_level
from robopolicy.rl.coefficients import entropy_covariance, pair_mean, ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def to_steps(per_episode: Tensor, scored: Scored) -> Tensor:
    """Broadcast each episode's coefficient to all its scored steps, [b] -> [b, t, K]; the caller averages over
    pairs.
    """
    return torch.where(scored.mask, per_episode[:, None, None], 0.0)


def preferred(scored: Scored) -> Tensor:
    """Return a mask of the pairs (winner, loser), [b, b] bool: same group, larger return."""
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    return (group[:, None] == group[None]) & (returns[:, None] > returns[None] + 1e-6)


def episode_log_ratio(scored: Scored) -> Tensor:
    """Return log pi / pi_old of complete episodes, [b]: the sum over their steps, at every ratio level."""
    return scored.step_log_ratio.sum((1, 2))


def masked_fraction(chosen: Tensor, mask: Tensor) -> Tensor:
    """Return the fraction of the masked entries that is chosen, a scalar; both [b, t, K] bool."""
    return (chosen & mask).sum() / mask.sum().clamp(min=1)


@mechanism(Slot.COEFFICIENT, "cispo", source="MiniMax-M1, arXiv:2506.13585")
def cispo(scored: Scored, *, low: float = 1.0, high: float = 0.28) -> Coefficients:
    """REINFORCE weighted by the clipped ratio: c = clip(r, 1 - low, 1 + high) A; every step keeps its gradient.

    r is to the proximal policy: with old data, proximal_policy=behaviour makes it the policy that acted.
    """
    return scored.ratio.clamp(1 - low, 1 + high) * scored.advantage, {}


@mechanism(Slot.COEFFICIENT, "rec", source="REC, masked REINFORCE, arXiv:2509.24203")
def rec(
    scored: Scored,
    *,
    region: str = "one_side",
    importance: bool = True,
    low: float = 0.2,
    high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
    tau: float | None = None,
    proximity: float = 0.0,
) -> Coefficients:
    """REINFORCE on off-policy data: c = w M A - proximity log r with a mask M of the ratio r instead of clipping.

    r is to the proximal policy: with old data, proximal_policy=behaviour makes it the policy that acted.

    region: one_side drops steps that have already moved far enough (PPO's own mask); two_side drops everything outside
    [1 - low, 1 + high]; ring drops only the ring between, since it also keeps steps that moved far in the wrong
    direction, r <= 1 - far_low with A >= 0 and r >= 1 + far_high with A <= 0; none drops nothing. importance: w is the
    ratio, else 1; where it is, steps whose log-ratio was clamped are dropped too. tau: data are also weighted by exp(A
    / tau), None for none; the authors' RED-Weight is region=none importance=false tau=1. proximity: weight of log(r)^2
    / 2, as in opmd, at all steps; the authors' coefficient of log(r)^2 is half of it. Their A is that of
    advantage=dr_grpo, without a deviation. Raises ConfigError for an unknown region.
    """
    ratio = scored.ratio
    is_positive = scored.advantage >= 0
    is_negative = scored.advantage <= 0
    within_clip = (ratio >= 1 - low) & (ratio <= 1 + high)
    one_side = torch.where(is_positive, ratio <= 1 + high, ratio >= 1 - low)
    astray = (is_positive & (ratio <= 1 - far_low)) | (is_negative & (ratio >= 1 + far_high))
    everything = torch.ones_like(within_clip)
    masks = {"one_side": one_side, "two_side": within_clip, "ring": within_clip | astray, "none": everything}
    if region not in masks:
        raise unknown_option("rec.region", region, masks)
    weight = ratio if importance else torch.ones_like(ratio)
    if tau is not None:
        weight = weight * (scored.advantage / tau).exp()
    # Only a weight that grows with the ratio has a clamp to respect: without it, c = A however far a step has moved.
    trusted_mask = masks[region] & ~scored.clamped if importance else masks[region]
    reinforced = torch.where(trusted_mask, weight * scored.advantage, 0.0)
    return reinforced - proximity * scored.log_ratio, {"kept": masked_fraction(trusted_mask, scored.mask)}


@mechanism(Slot.COEFFICIENT, "opmd", source="OPMD, as in REC, arXiv:2509.24203; Kimi k1.5, arXiv:2501.12599")
def opmd(scored: Scored, *, tau: float = 1.0) -> Coefficients:
    """Online mirror descent without importance weights: c = (A - tau (log pi - log pi_old)) / (1 + tau).

    The gradient of -A logp + tau/2 (log pi - log pi_old)^2, scaled to the size of REINFORCE's. pi_old is the proximal
    policy: with old data, proximal_policy=behaviour makes it the policy that acted. The authors' A is that of
    advantage=dr_grpo, without a deviation.
    """
    return (scored.advantage - tau * scored.log_ratio) / (1 + tau), {}


@mechanism(Slot.COEFFICIENT, "asym_re", source="AsymRE, arXiv:2506.20520")
def asym_re(scored: Scored, *, shift: float = -0.1) -> Coefficients:
    """Off-policy REINFORCE with a baseline lowered by |shift|: c = A - shift, so that successes weigh more.

    The paper's A is R - mean, that of advantage=dr_grpo. With advantage=grpo, which divides it by the deviation s of
    the group, the baseline is lowered by |shift| s.
    """
    return scored.advantage - shift, {}


@mechanism(
    Slot.COEFFICIENT,
    "min_pro",
    source="MinPRO, arXiv:2601.22718",
    needs=(Need.WHOLE_EPISODES, Need.STEP_RATIOS),
)
def min_pro(scored: Scored, *, cap: float = 5.0) -> Coefficients:
    """REINFORCE weighted by r_t times the minimum of the previous ratios, instead of the product of all of them.

    c = sg(clip(r_t min_{j < t} r_j, 0, cap)) A, over the scored steps of an episode in order; the first has no prefix
    (the form of the cap is chosen here: the paper's is uncertain). r = pi / pi_behaviour, to the policy that acted,
    whatever the proximal policy. It stays bounded where prefix products explode or vanish.
    """
    # An unbiased weight is the product of all ratios so far, whose variance grows without bound along the episode. The
    # smallest ratio before stands for that product: what follows an unlikely step counts little.
    log_ratio = scored.log_ratio + scored.staleness
    flat = torch.where(scored.mask, log_ratio, torch.inf).flatten(1)
    before = torch.cat([torch.full_like(flat[:, :1], torch.inf), flat.cummin(1).values[:, :-1]], 1)
    prefix = torch.where(before.isinf(), 0.0, before).reshape(log_ratio.shape)
    weight = torch.where(scored.mask, (log_ratio + prefix).exp().clamp(max=cap), 0.0)
    return weight * scored.advantage, {"prefix_weight": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "dcpo", source="DCPO, arXiv:2509.02333", needs=(Need.CATEGORICAL,))
def dcpo(scored: Scored, *, low: float = 0.16, high: float = 0.2, most: float = 10.0) -> Coefficients:
    """PPO with bounds that depend on the old probability q: rare tokens may move further.

        (1 + sqrt(max(1 - 4 low / q, 0))) / 2  <=  r  <=  min((1 + sqrt(1 + 4 high / q)) / 2, most)

    most: maximum ratio, as in the authors' code, which also drops negative-advantage steps beyond it (dual clipping).
    Widths are the paper's; a script of the authors' has 0.2 and 0.28.
    Their loss is first averaged within every episode: use weight=episode_mean. It needs a probability, not a density:
    for token policies.
    """
    # The roots of |r - 1| pi = width with pi = r q: the change is weighed by the new probability, so the rarer a token
    # was, the further its ratio may go, as sqrt(width / q) for q -> 0.
    old = (scored.logp - scored.step_log_ratio).exp().clamp(min=1e-12)
    bottom = 0.5 + 0.5 * (1 - 4 * low / old).clamp(min=0).sqrt()
    top = (0.5 + 0.5 * (1 + 4 * high / old).sqrt()).clamp(max=most)
    return ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped, dual_clip=most), {}


@mechanism(Slot.COEFFICIENT, "hapo", source="HAPO, arXiv:2509.16591", needs=(Need.CATEGORICAL,))
def hapo(scored: Scored, *, pivot: float = 0.8, clip_strength: float = 1.0, gain: float = 1.0) -> Coefficients:
    """PPO whose clip widths and advantages depend on a step's entropy: high-entropy steps may move further and count
    more.

    h in [-1, 1] is the log-entropy minus its quantile `pivot` over the minibatch, each side scaled to 1. Where h <= 0
    the lower width becomes low (1 - clip_strength h), elsewhere the upper one high (1 + clip_strength h). The advantage
    becomes A (1 + gain h) where h > 0 outside the neutral zone of ratios, half of these widths around 1 (a moving
    high-entropy step counts more). Inside the zone this applies where h <= 0 (a stationary low-entropy step counts
    less). The paper's temperature is policy.token.entropy_temperature=.05, its average over tokens
    options.grpo.by_steps=true with weight=step_mean, under which a group's advantages sum to 0. In the authors' code h
    is positive on both sides, so that low-entropy steps also move further; this is the paper's h. Their clip of A < 0
    at a ratio of 10 is left out.
    """
    h = entropy_level(scored.extra("entropy"), scored.mask, pivot)
    low = scored.clip_low * (1 - clip_strength * h.clamp(max=0))
    high = scored.clip_high * (1 + clip_strength * h.clamp(min=0))
    neutral = (scored.ratio > 1 - low / 2) & (scored.ratio < 1 + high / 2)
    advantage = torch.where(neutral == (h > 0), scored.advantage, scored.advantage * (1 + gain * h))
    return ppo(scored.log_ratio, advantage, low, high, scored.clamped), {}


@mechanism(Slot.COEFFICIENT, "future_ratio", source="APPO, arXiv:2606.12384", needs=(Need.WHOLE_EPISODES,))
def future_ratio(
    scored: Scored,
    *,
    half_life: float = 64.0,
    gain: float = 1.0,
    most: float = 0.2,
    low: float = 0.2,
    high: float = 0.28,
    dual_clip: float = 3.0,
) -> Coefficients:
    """PPO that credits steps whose later steps have become more likely: A (1 + gain f), f = clip(exp F, 1, 1 + most).

        F_t = sum_{k >= t} 2^((t - k) / half_life) d_k,   d = log pi - log pi_old, 0 where d > log dual_clip

    over the scored steps of an episode in order, without gradient; half_life: in steps. Before the first update of an
    iteration d = 0 and every A is multiplied by 1 + gain, so it needs several epochs, or stale data. An episode with
    A < 0 at more than one step whose ratio is beyond dual_clip has no gradient at all. Omitted: the authors' bound on f
    where A < 0 and the ratio is beyond dual_clip, where no gradient is left.
    """
    change = torch.where(scored.step_log_ratio <= math.log(dual_clip), scored.step_log_ratio, 0.0)
    order = (
        (~scored.mask).flatten(1).long().argsort(dim=1, stable=True)
    )  # scored steps first, so that gaps do not decay
    ordered = change.flatten(1).gather(1, order)
    decay = torch.full_like(ordered, 0.5 ** (1 / half_life))
    later = discounted_sums(ordered, decay, torch.ones_like(ordered, dtype=torch.bool))
    factor = torch.zeros_like(ordered).scatter(1, order, later).reshape(change.shape).exp().clamp(1, 1 + most)
    c = ppo(scored.log_ratio, scored.advantage * (1 + gain * factor), low, high, scored.clamped, dual_clip)
    beyond = scored.mask & (scored.advantage < 0) & (scored.ratio > dual_clip)
    left_out = beyond.sum((1, 2)) > 1
    stats = {"future_factor": factor[scored.mask].mean(), "left_out": left_out.double().mean()}
    return torch.where(left_out[:, None, None], 0.0, c), stats


@mechanism(Slot.COEFFICIENT, "drpo", source="DRPO, arXiv:2510.04474", needs=(Need.WHOLE_GROUPS,))
def drpo(
    scored: Scored, *, tau: float = 10.0, decay: float = 0.1, delta: float = 1e-4, beta: float = 1e3
) -> Coefficients:
    """Normalise successes of a group among themselves, shorter ones weighing more, against its likely failures.

        L = - mean over groups of [sum_success w_i s_i / sum_success w_i - tau log mean_failure exp(s_i / tau)]
            + sg(max(beta (KL - delta), 0)) KL,   w_i = exp((1 - length_i / longest) / decay)

    s_i: mean log-probability of an episode's scored steps. A group without both outcomes adds nothing to the first
    term, so a failure is never paid for being short. KL = mean(exp(x) - x - 1), x = log pi - log pi_old. length:
    control steps; longest: those of the minibatch's padded rows. The advantage is not used; weight=constant with
    length=1 gives this loss exactly. The authors' code has this KL, too; their script measures it as -mean(x), noisier.
    For a denoising policy, whose log-probabilities are means over elements, tau = 10 makes all failures nearly alike.
    """
    rollouts = scored.rollouts
    success, groups = rollouts.row_success, Segments.of(rollouts.group)
    steps = scored.mask.sum((1, 2)).clamp(min=1)
    score = torch.where(scored.mask, scored.logp, 0.0).sum((1, 2)) / steps
    length = rollouts.duration.sum(1).to(score.dtype) / rollouts.valid[0].numel()
    positive = torch.where(success, (1 - length) / decay, score / tau)
    kinds = Segments.of(rollouts.group, success)  # a softmax over a group's successes, and one over its failures
    weight = (positive - kinds.maximum(positive)[kinds.index]).exp()
    share = weight / kinds.sum(weight)[kinds.index]
    rate = groups.mean(success.to(score.dtype))[groups.index]
    share = torch.where((rate > 0) & (rate < 1), share, 0.0)
    change = scored.step_log_ratio
    excess = torch.where(scored.mask, torch.expm1(change), 0.0)
    divergence = (excess - change)[scored.mask].mean()
    penalty = (beta * (divergence - delta)).clamp(min=0)
    c = len(share) / groups.count * torch.where(success, share, -share) / steps
    c = torch.where(scored.mask, c[:, None, None], 0.0) - penalty * excess * len(share) / scored.mask.sum().clamp(min=1)
    return c, {"drpo_kl": divergence, "drpo_penalty": penalty}


@mechanism(Slot.COEFFICIENT, "mdpo", source="MDPO, arXiv:2005.09814")
def mdpo(scored: Scored, *, start: float = 1.0, end: float = 0.1) -> Coefficients:
    """Mirror descent: maximise E[ratio A] - KL(pi || pi_old) / t_k, with the step size t_k decreasing over the run.

    c = r (A - log r / t_k): several steps on one batch approach pi_old exp(t_k A); one step is the policy gradient. The
    KL is estimated on the old policy's samples (its gradient is E_old[r log r grad log pi]); t_k decreases linearly
    over the run, but not to 0, where 1 / t_k would explode. A step whose log-ratio was clamped is still pulled back, by
    the clamped ratio: the KL is all that bounds it.
    """
    step = start + (end - start) * scored.share
    # d(r log r) = (log r + 1) r d log pi, and the 1 has mean 0 under the old policy: E_old[r grad log pi] = 0.
    c = scored.ratio * (scored.advantage - scored.log_ratio / step)
    return c, {"mirror_step": torch.tensor(step)}


@mechanism(Slot.COEFFICIENT, "dpo", source="DPO on one's own rollouts, arXiv:2305.18290", needs=(Need.WHOLE_GROUPS,))
def dpo(scored: Scored, *, beta: float = 0.1) -> Coefficients:
    """-log sigmoid(beta (log-ratio of the better - log-ratio of the worse)) over the pairs of every group.

    c of the better is beta sigmoid(-margin), of the worse minus that. The reference is the policy before the iteration.
    Log-ratios of steps are cut as everywhere (LOG_RATIO_CLAMP), and where a step's log-probability is the mean over its
    elements (logp_reduction=mean, the default of denoising policies) beta counts an element's: sum is DPO proper. As
    with pacs, weight=constant with length=1 is the mean over episodes; the preset divides it by the padded number of
    steps, too.
    """
    log_ratio, pairs = episode_log_ratio(scored), preferred(scored)
    margin = beta * (log_ratio[:, None] - log_ratio[None])
    # pull[i, j] moves the winner i up and the loser j down by as much: rows sum what an episode wins, columns what it
    # loses. sigmoid(-margin) fades a pair once it is ranked rightly by far.
    pull = torch.where(pairs, beta * torch.sigmoid(-margin), 0.0) * pair_mean(pairs)
    stats = {"pairs": pairs.sum().float()}
    if bool(pairs.any()):
        stats["preferred_right"] = ((margin > 0) & pairs).sum() / pairs.sum()
    return to_steps(pull.sum(1) - pull.sum(0), scored), stats


@mechanism(Slot.COEFFICIENT, "sppo", source="SPPO, arXiv:2405.00675", needs=(Need.WHOLE_GROUPS,))
def sppo(scored: Scored, *, eta: float = 1.0) -> Coefficients:
    """(log-ratio - eta (P(episode beats the policy) - 1/2))^2, with the win rate over the group's other episodes.

    c = 2 (eta (P - 1/2) - log-ratio); ties count half. The authors' win rate is over all K episodes of a group, the
    episode itself counting half, so that P - 1/2 is (K - 1) / K of ours, and their code learns from the best and the
    worst of them alone, here all do. Where a step's log-probability is the mean over its elements
    (logp_reduction=mean), eta counts an element's, as beta does in dpo. As with pacs, weight=constant with length=1 is
    the mean over episodes; the preset divides it by the padded number of steps, too.
    """
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    same_group = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    # A win rate of 1/2 is the policy against itself: the target log-ratio is how much an episode beats that, times eta.
    wins = (returns[:, None] > returns[None] + 1e-6).float() + (returns[:, None] - returns[None]).abs().le(1e-6) * 0.5
    rate = (wins * same_group).sum(1) / same_group.sum(1).clamp(min=1)
    rate = torch.where(same_group.any(1), rate, 0.5)
    log_ratio = episode_log_ratio(scored)
    return to_steps(2 * (eta * (rate - 0.5) - log_ratio), scored), {"win_rate_spread": rate.std(unbiased=False)}


@mechanism(Slot.COEFFICIENT, "p3o", source="P3O, arXiv:2310.00212", needs=(Need.WHOLE_GROUPS,))
def p3o(scored: Scored, *, clip: float = 0.2) -> Coefficients:
    """Pairwise policy gradient: (R1 - R2) / 2 grad log(pi(y1) / pi(y2)), each with its own clipped ratio.

    Invariant to a constant added to all rewards of a group. c of an episode: its ratio times the mean of (R - R_other)
    / 2 over the others of its group, 0 where the ratio is already outside the clip range in that direction. As with
    pacs, weight=constant with length=1 is the mean over episodes.
    """
    returns, group = scored.rollouts.row_return, scored.rollouts.group
    same_group = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    # Differences of returns cancel whatever a start adds to all of them, so no baseline is needed.
    gain = ((returns[:, None] - returns[None]) / 2 * same_group).sum(1) / same_group.sum(1).clamp(min=1)
    log_ratio = episode_log_ratio(scored)
    ratio = log_ratio.clamp(-3, 3).exp()
    trusted_mask = torch.where(gain >= 0, ratio <= 1 + clip, ratio >= 1 - clip)
    return to_steps(torch.where(trusted_mask, ratio * gain, 0.0), scored), {"kept": trusted_mask.float().mean()}


@mechanism(Slot.COEFFICIENT, "pacs", source="PACS, implicit actor critic, arXiv:2509.02522", needs=(Need.WHOLE_GROUPS,))
def pacs(scored: Scored, *, beta: float = 1.0) -> Coefficients:
    """Supervised: predict success from the episode's centred log-ratio as a logit (binary cross-entropy).

    score_i = beta sum(log-ratio), leave-one-out centred in the group; c = beta w (label - sigmoid(centred)), propagated
    through the centring. w gives the successes and the failures of a group the same total weight, half its size each;
    it is 1 if all outcomes are equal. weight=constant with length=1 gives the authors' mean over episodes exactly; the
    preset divides it by the padded number of steps, too.
    """
    rollouts = scored.rollouts
    total = beta * episode_log_ratio(scored)
    group = rollouts.group
    same_group = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    weights = same_group.to(total.dtype) / same_group.sum(1, keepdim=True).clamp(min=1)
    centred = total - weights @ total
    # centred = (I - weights) total, so the cross-entropy's error goes back through the transpose: an episode also moves
    # for being in the others' baselines.
    label = rollouts.row_success.to(total.dtype)
    groups = Segments.of(group)
    size, success_count = groups.size()[groups.index], groups.sum(label)[groups.index]
    peers = torch.where(label > 0, success_count, size - success_count)  # episodes of the group with the same outcome
    balance = torch.where(peers < size, 0.5 * size / peers, 1.0)
    error = balance * (label - centred.sigmoid())
    gradient = error - weights.T @ error
    is_significant = (
        gradient.abs() > 1e-6 * error.abs().max()
    )  # Adam would make steps of what rounding leaves of equal outcomes
    c = beta * torch.where(is_significant, gradient, 0.0)
    return c[:, None, None].expand_as(scored.logp) * scored.mask, {"pacs_logit": centred.abs().mean()}


@mechanism(Slot.COEFFICIENT, "perception", source="Q-Hawkeye, arXiv:2601.22920", needs=(Need.BLACKOUT_SCORES,))
def perception(
    scored: Scored, *, gamma: float = 1e-4, eta: float = 1e-3, until: float = 0.3333, cap: float = 10.0
) -> Coefficients:
    """PPO that also moves what is done away from what would be done with half of the image blacked out.

        L = PPO - gamma min(k3(x), cap) - eta log pi,   k3(x) = exp(x) - 1 - x,  x = log pi(degraded) - log pi

    so that c gains gamma (1 - exp(x)), where k3 is below the cap, and eta. gamma falls along a cosine to 0 at the
    fraction `until` of the run. log pi(degraded) is that of the policy before the update, without gradient; the paper
    also lowers the entropy of its own degraded outputs, which has no gradient here. log pi is averaged over steps like
    everything else; the authors' code sums it over an answer, so that its eta pulls as many times more as there are
    steps.
    """
    degraded = scored.rollouts.extras["blackout_logp"].gather(-1, scored.chosen)
    x = torch.where(scored.mask, degraded - scored.logp, 0.0).clamp(-20, 20)
    distance = torch.expm1(x) - x
    done = min(1.0, scored.share / until) if until > 0 else 1.0
    strength = gamma * 0.5 * (1 + math.cos(math.pi * done))
    image_pull = torch.where(distance < cap, -strength * torch.expm1(x), 0.0)
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    return torch.where(scored.mask, c + image_pull + eta, 0.0), {"image_kl": distance[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "awr", source="AWR, arXiv:1910.00177")
def advantage_weighted(scored: Scored, *, temperature: float = 1.0, limit: float = 10.0) -> Coefficients:
    """Weighted regression on the policy's own chunks: c = min(exp(A / temperature), limit); no ratio is needed.

    With policy.likelihood=matching the regression is denoising or flow matching.
    """
    weight = (scored.advantage / temperature).exp().clamp(max=limit)
    return weight, {"weight_mean": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "clipped_advantage", source="AC-Flow, arXiv:2510.18072", needs=(Need.MATCHING,))
def clipped_advantage(
    scored: Scored, *, limit: float = 2.0, temperature: float = 1.0, form: str = "exponential"
) -> Coefficients:
    """Regression on the policy's own chunks, weighted by the clipped advantage: c = w(clip(A, -limit, limit) /
    temperature).

    form: exponential, w = exp(x), which with A = R is the reward-weighted flow matching that AC-Flow extends; or
    positive, w = max(x, 0), which drops chunks worse than expected. Neither moves away from any chunk. Raises
    ConfigError for an unknown form.
    """
    forms = {"exponential": torch.exp, "positive": torch.relu}
    if form not in forms:
        raise unknown_option("clipped_advantage.form", form, forms)
    weight = forms[form](scored.advantage.clamp(-limit, limit) / temperature)
    return weight, {"weight_mean": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "kl_cov", source="KL-Cov, arXiv:2505.22617")
def kl_cov(scored: Scored, *, share: float = 0.002, beta: float = 1.0) -> Coefficients:
    """Policy gradient whose steps with the largest covariance of probability and advantage are held by a KL penalty.

        c = r A,   and r A - beta sign(log r) at the `share` of steps, at least one, with the largest cov

    cov as in coefficient=clip_cov; beta |log r| is the authors' penalty, which needs several epochs, as r = 1 in the
    first. As in their code nothing is clipped.
    """
    mask, covariance = scored.mask, entropy_covariance(scored)
    count = max(1, int(share * int(mask.sum())))
    top_mask = torch.zeros_like(mask).flatten().scatter(0, covariance.flatten().topk(count).indices, True)
    c = scored.ratio * scored.advantage
    c = torch.where(top_mask.reshape(mask.shape) & mask, c - beta * scored.log_ratio.sign(), c)
    return c, {"covariance": covariance[mask].mean()}


@mechanism(
    Slot.COEFFICIENT,
    "negative_aware",
    source="AFD, arXiv:2605.26105; DiffusionNFT, arXiv:2509.16117",
    needs=(Need.MATCHING,),
)
def negative_aware(scored: Scored, *, limit: float = 5.0) -> Coefficients:
    """Regression towards chunks with positive advantage and away from those with negative: c = clip(A, -limit, limit).

        L = limit / (2 beta) (w |v+ - u|^2 + (1 - w) |v- - u|^2),   w = (1 + clip(A) / limit) / 2
        v+ = (1 - beta) v' + beta v,   v- = (1 + beta) v' - beta v,   v' = v without gradient

    is AFD's loss for a prediction v and its target u, up to a factor, and has the gradient of clip(A) |v - u|^2 / 2 for
    every beta. So a chunk with A < 0 is unlearned as strongly as one with A > 0 is learned. DiffusionNFT, the source of
    the loss, has the prediction of the policy that acted as v': add auxiliaries=[acting_velocity]. Else the policy is
    constrained by target_kl and auxiliaries=[velocity], AFD's distance to the reference (which AFD also weights by w).
    """
    return scored.advantage.clamp(-limit, limit), {}


keep_former_names(__name__, {"masked_share": "masked_fraction"})
