"""Coefficients for data that another policy made: decoupled clips, masks instead of clips, adaptive bounds.

Every one is c with d(loss)/d(logp) = -w c; where a paper states a surrogate, its gradient was taken by hand and is
compared with autograd in the tests.
"""

import torch
from torch import Tensor

from robopolicy.rl.coefficients import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.mechanisms import Need, Slot, mechanism


def _share(chosen: Tensor, mask: Tensor) -> Tensor:
    return (chosen & mask).sum() / mask.sum().clamp(min=1)


@mechanism(Slot.COEFFICIENT, "decoupled_ppo", source="AReaL, arXiv:2505.24298; Hilton et al. 2022, arXiv:2110.00641")
def decoupled_ppo(scored: Scored, *, limit: float = 5.0) -> Coefficients:
    """PPO clipped around the proximal policy, times proximal / behaviour, capped at `limit` and without gradient."""
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    weight = scored.staleness.exp().clamp(max=limit)
    return weight * c, {"staleness_weight": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "cispo", source="MiniMax-M1, arXiv:2506.13585")
def cispo(scored: Scored, *, low: float = 1.0, high: float = 0.28) -> Coefficients:
    """REINFORCE weighted by the clipped ratio: c = clip(r, 1 - low, 1 + high) A; no unit ever loses its gradient."""
    return scored.ratio.clamp(1 - low, 1 + high) * scored.advantage, {}


@mechanism(Slot.COEFFICIENT, "rec", source="REC, masked REINFORCE, arXiv:2509.24203")
def rec(
    scored: Scored, *, region: str = "one_side", importance: bool = True, low: float = 0.2, high: float = 0.2
) -> Coefficients:
    """REINFORCE on any data: c = w M A with the ratio as a mask M instead of a clip.

    region: one_side drops what has already moved far enough (PPO's own mask), two_side everything outside
    [1 - low, 1 + high], ring keeps one_side and drops ratios beyond twice the widths on the other side;
    importance: w is the ratio, else 1.
    """
    ratio, good = scored.ratio, scored.advantage >= 0
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    one_side = torch.where(good, ratio <= 1 + high, ratio >= 1 - low)
    far = torch.where(good, ratio >= 1 - 2 * low, ratio <= 1 + 2 * high)
    masks = {"one_side": one_side, "two_side": inside, "ring": one_side & far}
    if region not in masks:
        raise _unknown("rec.region", region, masks)
    weight = ratio if importance else torch.ones_like(ratio)
    kept = masks[region] & ~scored.clamped
    return torch.where(kept, weight * scored.advantage, 0.0), {"kept": _share(kept, scored.mask)}


@mechanism(Slot.COEFFICIENT, "opmd", source="OPMD, as in REC, arXiv:2509.24203; Kimi k1.5, arXiv:2501.12599")
def opmd(scored: Scored, *, tau: float = 1.0) -> Coefficients:
    """Online mirror descent without importance weights: c = (A - tau (log pi - log pi_old)) / (1 + tau).

    The gradient of -A logp + tau/2 (log pi - log pi_old)^2, scaled to the size of REINFORCE's.
    """
    return (scored.advantage - tau * scored.log_ratio) / (1 + tau), {}


@mechanism(Slot.COEFFICIENT, "asym_re", source="AsymRE, arXiv:2506.20520")
def asym_re(scored: Scored, *, shift: float = -0.1) -> Coefficients:
    """Off-policy REINFORCE with a baseline lowered by |shift|: c = A - shift, so that successes weigh more."""
    return scored.advantage - shift, {}


@mechanism(Slot.COEFFICIENT, "bapo", source="BAPO, adaptive clipping")
def bapo(
    scored: Scored,
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    positive_share: float = 0.5,
) -> Coefficients:
    """PPO whose bounds widen until good decisions make up `positive_share` of the clipped |r A|.

    The lower bound rises first (fewer bad decisions count), then the upper one (more good ones do).
    """
    bottom, top = low[0], high[0]
    share = _positive_share(scored, bottom, top)
    while float(share) < positive_share and (bottom < low[1] - 1e-9 or top < high[1] - 1e-9):
        if bottom < low[1] - 1e-9:
            bottom = min(bottom + step, low[1])
        else:
            top = min(top + step, high[1])
        share = _positive_share(scored, bottom, top)
    c = ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped)
    bounds = {"bapo_low": torch.tensor(bottom), "bapo_high": torch.tensor(top)}
    return c, {**bounds, "positive_share": share.detach()}


def _positive_share(scored: Scored, bottom: float, top: float) -> Tensor:
    size = ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped).abs() * scored.mask
    return size[scored.advantage > 0].sum() / size.sum().clamp(min=1e-12)


@mechanism(Slot.COEFFICIENT, "dcpo", source="DCPO, dynamic clipping", needs=(Need.CATEGORICAL,))
def dcpo(scored: Scored, *, low: float = 0.16, high: float = 0.2) -> Coefficients:
    """PPO with bounds that depend on the old probability q: rare tokens may move further.

        (1 + sqrt(max(1 - 4 low / q, 0))) / 2  <=  r  <=  (1 + sqrt(1 + 4 high / q)) / 2

    A probability is needed, not a density: token policies only.
    """
    old = (scored.logp - scored.log_ratio).exp().clamp(min=1e-12)
    bottom = 0.5 + 0.5 * (1 - 4 * low / old).clamp(min=0).sqrt()
    top = 0.5 + 0.5 * (1 + 4 * high / old).sqrt()
    return ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped), {}


@mechanism(Slot.COEFFICIENT, "min_pro", source="MinPRO (non-cumulative prefix ratio)", needs=(Need.WHOLE_EPISODES,))
def min_pro(scored: Scored, *, cap: float = 5.0) -> Coefficients:
    """REINFORCE weighted by r_t times the smallest ratio before it, instead of the product of all of them.

    c = sg(clip(r_t min_{j < t} r_j, 0, cap)) A, over the scored units of an episode in order (the form of the cap is
    ours: the paper's is uncertain). Stays bounded where prefix products explode or vanish.
    """
    log_ratio = torch.where(scored.mask, scored.log_ratio, 0.0).flatten(1)
    before = torch.cat([torch.zeros_like(log_ratio[:, :1]), log_ratio.cummin(1).values[:, :-1]], 1)
    weight = (log_ratio + before.clamp(max=0)).exp().clamp(max=cap).reshape(scored.log_ratio.shape)
    return weight * scored.advantage, {"prefix_weight": weight[scored.mask].mean()}


def mean_shift(scored: Scored) -> tuple[Tensor, Tensor]:
    """Return |mean - mean_old|^2 / (2 std^2) averaged over the executed elements, and std, both [b, t, K].

    It is KL(old || new) of a Gaussian step a dimension. units["mean"] holds the behaviour's means [b, t, K', P, A].
    """
    mean, std = scored.extra("mean"), scored.extra("std")
    old = scored.rollouts.units["mean"]
    old = torch.gather(old, 2, scored.unit[..., None, None].expand(mean.shape))
    executed = scored.rollouts.valid[:, :, None, :, None].to(mean.dtype)
    chunk = executed.shape[3]
    distance = ((mean - old).square() / (2 * std.square().clamp(min=1e-12)))[..., :chunk, :] * executed
    count = (executed.sum((3, 4)) * mean.shape[-1]).clamp(min=1)
    return distance.sum((3, 4)) / count, std.expand(mean.shape).flatten(3)[..., 0]


@mechanism(Slot.COEFFICIENT, "gaussian_kl", source="exact trust region of a Gaussian step", needs=(Need.MEANS,))
def gaussian_kl(scored: Scored, *, nats: float = 0.005) -> Coefficients:
    """PPO whose clip is exact: a unit stops once KL(old || new) of its Gaussian exceeds `nats` a dimension.

    Units beyond the bound keep their gradient only where it brings them back.
    """
    divergence, _ = mean_shift(scored)
    away = scored.advantage * (scored.ratio - 1) > 0
    kept = (divergence <= nats) | ~away
    c = torch.where(kept & ~scored.clamped, scored.ratio * scored.advantage, 0.0)
    return c, {"gaussian_kl": divergence[scored.mask].mean(), "kept": _share(kept, scored.mask)}


@mechanism(Slot.COEFFICIENT, "pacs", source="PACS, implicit actor critic, arXiv:2509.02522", needs=(Need.WHOLE_GROUPS,))
def pacs(scored: Scored, *, beta: float = 1.0) -> Coefficients:
    """Supervised: the episode's centred log-ratio, as a logit, is to predict its success (binary cross-entropy).

    score_i = beta sum(log-ratio), leave-one-out centred in the group; c = beta (label - sigmoid(centred)), carried
    through the centring, with classes balanced inside the minibatch.
    """
    rollouts = scored.rollouts
    total = beta * torch.where(scored.mask, scored.log_ratio, 0.0).sum((1, 2))
    group = rollouts.group
    same = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    others = same.to(total.dtype) / same.sum(1, keepdim=True).clamp(min=1)
    centred = total - others @ total
    label = rollouts.row_success.to(total.dtype)
    positive = label.sum().clamp(min=1)
    negative = (1 - label).sum().clamp(min=1)
    balance = torch.where(label > 0, 0.5 * len(label) / positive, 0.5 * len(label) / negative)
    error = balance * (label - centred.sigmoid())
    carried = error - others.T @ error
    known = carried.abs() > 1e-6 * error.abs().max()  # Adam would make steps of what rounding leaves of equal outcomes
    c = beta * torch.where(known, carried, 0.0)
    return c[:, None, None].expand_as(scored.logp) * scored.mask, {"pacs_logit": centred.abs().mean()}


def _unknown(option: str, value: str, known: dict[str, Tensor]) -> Exception:
    from robopolicy.core.errors import ConfigError, did_you_mean

    return ConfigError(f"finetune.options.{option}={value} is not known.{did_you_mean(value, known)}")


def guarded_log_ratio(log_ratio: Tensor, shift: Tensor, std: Tensor) -> Tensor:
    """Return GRPO-Guard's regulated log-ratio: the left shift of a Gaussian step's ratio taken out, all [b, t, K].

        log r' = [log r + |mean - mean_old|^2 / (2 std^2)] * std

    log_ratio and shift must be reduced alike over dimensions. Under samples of the old policy E[log r'] = 0, while
    E[log r] = -shift; the factor std makes all steps alike in scale. Source: GRPO-Guard, arXiv:2510.22319 (public
    documentation).
    """
    return (log_ratio + shift) * std


@mechanism(Slot.COEFFICIENT, "grpo_guard", source="GRPO-Guard, arXiv:2510.22319", needs=(Need.MEANS,))
def grpo_guard(scored: Scored, *, summed: bool = False, balance: bool = False) -> Coefficients:
    """PPO on ratios whose mean is held at 1: the clip bites equally on both sides of a Gaussian step.

    summed: log-probabilities are sums over dimensions (policy.logp_reduction=sum). Clip widths are those of the scaled
    log-ratio, std times smaller. balance: c = r' A mean(std) / std, the paper's 1 / dt, which evens out gradients where
    a step of length dt moves its mean by dt times the prediction (flows); a chain that predicts the clean action moves
    it most at the end already, and is thrown off by it. Deviation: the shift's own gradient, second order in the step,
    is dropped.
    """
    shift, std = mean_shift(scored)
    if summed:
        shift = shift * scored.rollouts.duration[..., None] * scored.rollouts.actions.shape[-1]
    log_ratio = guarded_log_ratio(scored.log_ratio, shift, std)
    c = ppo(log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    if balance:
        c = c * std[scored.mask].mean() / std.clamp(min=1e-6)
    plain, guarded = scored.ratio[scored.mask].mean(), log_ratio.exp()[scored.mask].mean()
    return torch.where(scored.mask, c, 0.0), {"ratio_mean": plain, "guarded_ratio_mean": guarded}


@mechanism(Slot.COEFFICIENT, "hapo_clip", source="HAPO (heterogeneous clipping)", needs=(Need.CATEGORICAL,))
def hapo_clip(scored: Scored, *, strength: float = 0.5) -> Coefficients:
    """PPO whose widths depend on a unit's entropy: sure units may fall further, unsure ones may rise further.

    h in [-1, 1] is the log-entropy, centred on the batch's mean and scaled by its largest deviation. Where h < 0 the
    lower width becomes low (1 - strength h), where h > 0 the upper one high (1 + strength h).
    """
    log_entropy = scored.extra("entropy").clamp(min=1e-4).log()
    centred = log_entropy - log_entropy[scored.mask].mean()
    h = centred / centred[scored.mask].abs().max().clamp(min=1e-6)
    low = scored.clip_low * (1 - strength * h.clamp(max=0))
    high = scored.clip_high * (1 + strength * h.clamp(min=0))
    return ppo(scored.log_ratio, scored.advantage, low, high, scored.clamped), {}
