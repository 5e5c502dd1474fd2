"""Coefficients that keep the new policy near the old one: adaptive clips, exact KL limits, mirror descent."""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.segments import quantile
from robopolicy.rl.coefficients.ppo import ppo
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.COEFFICIENT, "bapo", source="BAPO, arXiv:2510.18927")
def bapo(
    scored: Scored,
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    positive_share: float = 0.5,
) -> Coefficients:
    """PPO whose bounds widen until good decisions make up `positive_share` of the surrogate's size.

    That is P / (P + N) with P = sum of min(r, top) A where A > 0, N = sum of max(r, bottom) |A| where A < 0: the values
    of the clipped surrogate, clipped steps included. The lower bound rises first, then the upper one.
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
    good = (scored.ratio.clamp(max=top) * scored.advantage.clamp(min=0))[scored.mask].sum()
    bad = (scored.ratio.clamp(min=bottom) * scored.advantage.clamp(max=0))[scored.mask].sum().abs()
    return good / (good + bad).clamp(min=1e-12)


@mechanism(Slot.COEFFICIENT, "dcpo", source="DCPO, arXiv:2509.02333", needs=(Need.CATEGORICAL,))
def dcpo(scored: Scored, *, low: float = 0.16, high: float = 0.2, most: float = 10.0) -> Coefficients:
    """PPO with bounds that depend on the old probability q: rare tokens may move further.

        (1 + sqrt(max(1 - 4 low / q, 0))) / 2  <=  r  <=  min((1 + sqrt(1 + 4 high / q)) / 2, most)

    most: as in the authors' code, which also lets go of bad steps whose ratio is beyond it (a dual clip). Their loss is
    averaged within every episode first: weight=episode_mean. A probability is needed, not a density: token policies.
    """
    # The roots of |r - 1| pi = width with pi = r q: the change is weighed by the new probability, so the rarer a token
    # was, the further its ratio may go, as sqrt(width / q) for q -> 0.
    old = (scored.logp - scored.step_log_ratio).exp().clamp(min=1e-12)
    bottom = 0.5 + 0.5 * (1 - 4 * low / old).clamp(min=0).sqrt()
    top = (0.5 + 0.5 * (1 + 4 * high / old).sqrt()).clamp(max=most)
    return ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped, dual_clip=most), {}


def mean_shift(scored: Scored) -> tuple[Tensor, Tensor]:
    """Return |mean - mean_old|^2 / (2 std^2) averaged over the executed elements, and std, both [b, t, K].

    It is KL(old || new) of a Gaussian step, per dimension. latents["mean"] holds the behaviour's means
    [b, t, K', P, A]; raises ConfigError where the policy's likelihood keeps none.
    """
    if "mean" not in scored.rollouts.latents:
        raise ConfigError(
            "This needs the means of the behaviour's steps, which this policy's likelihood does not keep."
        )
    mean, std = scored.extra("mean"), scored.extra("std")
    old = scored.rollouts.latents["mean"]
    old = torch.gather(old, 2, scored.chosen[..., None, None].expand(mean.shape))
    executed = scored.rollouts.valid[:, :, None, :, None].to(mean.dtype)
    chunk = executed.shape[3]
    distance = ((mean - old).square() / (2 * std.square().clamp(min=1e-12)))[..., :chunk, :] * executed
    count = (executed.sum((3, 4)) * mean.shape[-1]).clamp(min=1)
    return distance.sum((3, 4)) / count, std.expand(mean.shape).flatten(3)[..., 0]


def guarded_log_ratio(log_ratio: Tensor, shift: Tensor, std: Tensor) -> Tensor:
    """Return GRPO-Guard's regulated log-ratio: the left shift of a Gaussian step's ratio taken out, all [b, t, K].

        log r' = [log r + |mean - mean_old|^2 / (2 std^2)] * std

    log_ratio and shift must be reduced alike over dimensions. Under samples of the old policy E[log r'] = 0, while
    E[log r] = -shift; the factor std makes all steps alike in scale. Source: GRPO-Guard, arXiv:2510.22319 (public
    documentation).
    """
    # With x ~ N(mean_old, std) the log-ratio has mean -shift and standard deviation |mean - mean_old| / std: adding the
    # shift centres it, multiplying by std makes it depend on the distance alone, whatever the step's noise.
    return (log_ratio + shift) * std


@mechanism(Slot.COEFFICIENT, "grpo_guard", source="GRPO-Guard, arXiv:2510.22319", needs=(Need.MEANS, Need.STEP_RATIOS))
def grpo_guard(scored: Scored, *, summed: bool = False, balance: bool = False) -> Coefficients:
    """PPO on ratios whose mean is held at 1: the clip bites equally on both sides of a Gaussian step.

    c = std r' A, the gradient of the clipped surrogate of r' (see `guarded_log_ratio`; deviation: the shift's own
    gradient, second order in the step, is dropped). summed: log-probabilities are sums over dimensions
    (policy.logp_reduction=sum). Clip widths are those of the scaled log-ratio, std times smaller. balance: times
    mean(std^2) / std^2, the paper's 1 / dt: a step of length dt has a variance in proportion to dt. Our flows take even
    steps, where it changes nothing; a chain of denoising steps that predicts the clean action moves its mean most at
    the end already, and is thrown off by it, so it is off.
    """
    shift, std = mean_shift(scored)
    if summed:
        shift = shift * scored.rollouts.duration[..., None] * scored.rollouts.actions.shape[-1]
    log_ratio = guarded_log_ratio(scored.log_ratio, shift, std)
    c = std * ppo(log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    if balance:
        c = c * std[scored.mask].square().mean() / std.square().clamp(min=1e-12)
    plain, guarded = scored.ratio[scored.mask].mean(), log_ratio.exp()[scored.mask].mean()
    return torch.where(scored.mask, c, 0.0), {"ratio_mean": plain, "guarded_ratio_mean": guarded}


@mechanism(Slot.COEFFICIENT, "hapo", source="HAPO, arXiv:2509.16591", needs=(Need.CATEGORICAL,))
def hapo(scored: Scored, *, pivot: float = 0.8, clip_strength: float = 1.0, gain: float = 1.0) -> Coefficients:
    """PPO whose widths and advantages depend on a step's entropy: forks may move further, and count more.

    h in [-1, 1] is the log-entropy minus its quantile `pivot` over the minibatch, each side scaled to 1. Where h <= 0
    the lower width becomes low (1 - clip_strength h), elsewhere the upper one high (1 + clip_strength h). The advantage
    becomes A (1 + gain h) outside the neutral zone of ratios, half of these widths around 1, where h > 0 (a fork that
    moves counts more), and inside it where h <= 0 (a sure step that stays counts less). The paper's temperature by
    entropy belongs to how the policy samples, its average over tokens to the advantage; neither is here. In the
    authors' code h comes out positive on both sides, so that sure steps move further too: this is the paper's h.
    """
    h = entropy_level(scored.extra("entropy"), scored.mask, pivot)
    low = scored.clip_low * (1 - clip_strength * h.clamp(max=0))
    high = scored.clip_high * (1 + clip_strength * h.clamp(min=0))
    neutral = (scored.ratio > 1 - low / 2) & (scored.ratio < 1 + high / 2)
    advantage = torch.where(neutral == (h > 0), scored.advantage, scored.advantage * (1 + gain * h))
    return ppo(scored.log_ratio, advantage, low, high, scored.clamped), {}


def entropy_level(entropy: Tensor, mask: Tensor, pivot: float) -> Tensor:
    """Return HAPO's h in [-1, 1], shaped as entropy (nats): its logarithm above or below the masked entries' quantile
    `pivot`, divided by the largest distance on that side; 0 outside the mask.
    """
    level = entropy.clamp(min=1e-6).log()
    centred = torch.where(mask, level - quantile(level[mask], pivot, nearest=True), 0.0)
    above, below = centred.clamp(min=0), centred.clamp(max=0)
    return above / above.max().clamp(min=1e-6) + below / below.min().abs().clamp(min=1e-6)


@mechanism(Slot.COEFFICIENT, "mdpo", source="MDPO, arXiv:2005.09814")
def mdpo(scored: Scored, *, start: float = 1.0, end: float = 0.1) -> Coefficients:
    """Mirror descent: maximise E[ratio A] - KL(pi || pi_old) / t_k, with the step size t_k falling from start to end.

    c = r (A - log r / t_k): several steps on one batch approach pi_old exp(t_k A), one step is the policy gradient. The
    KL is estimated on the old policy's samples (its gradient is E_old[r log r grad log pi]); t_k falls linearly over
    the run, not to 0, where 1 / t_k would explode.
    """
    step = start + (end - start) * scored.share
    c = scored.ratio * (scored.advantage - scored.log_ratio / step)
    return torch.where(scored.clamped, 0.0, c), {"mirror_step": torch.tensor(step)}
