"""Computations of an update: log-probability ratios, the common form of policy loss, the critic's loss, and
diagnostics.

All results are tensors until they are logged; diagnostics distinguish healthy updates from unhealthy ones.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.rl.context import score_extra
from robopolicy.rl.presets import RatioLevel


class LogRatios(NamedTuple):
    """log_ratio [..., T, K], clamped to +-limit; clamped [..., T, K] bool, mask of clamped entries (without
    gradient).
    """

    log_ratio: Tensor
    clamped: Tensor


def log_ratios(
    logp: Tensor,
    logp_old: Tensor,
    mask: Tensor,
    limit: float,
    level: RatioLevel = RatioLevel.STEP,
    steps_per_action: int = 0,
) -> LogRatios:
    """Compute log(pi / pi_old) without gradient, [..., T, K] (or [N, K]); 0 where mask is False.

    Above the step level, the steps of an action, chunk or episode (the last two axes) share the sum or the mean over
    their scored steps. A clamped entry keeps its sign with magnitude `limit`, so exp never overflows.
    """
    # Differences in log space, and the clamp before exp: a ratio of probabilities of hundreds of steps overflows fp32.
    difference = torch.where(mask, logp.detach() - logp_old, 0.0)
    if level is not RatioLevel.STEP:
        difference = torch.where(mask, _shared(difference, mask, level, steps_per_action), 0.0)
    return LogRatios(difference.clamp(-limit, limit), difference.abs() > limit)


def _shared(values: Tensor, mask: Tensor, level: RatioLevel, steps_per_action: int) -> Tensor:
    shape = values.shape
    axes: tuple[int, ...] = (-1,)
    if level in (RatioLevel.ACTION_SUM, RatioLevel.ACTION_MEAN):
        if steps_per_action < 1 or shape[-1] % steps_per_action:
            raise ConfigError(
                f"{level.value} needs steps that belong to single actions, but {shape[-1]} steps with "
                f"{steps_per_action} per action do not. Denoising steps belong to the whole chunk: use step or "
                "decision_mean."
            )
        values, mask = (torch.unflatten(item, -1, (-1, steps_per_action)) for item in (values, mask))
    elif level.whole_episodes:
        axes = (-2, -1)
    total = values.sum(axes, keepdim=True)
    # The mean of log-ratios is the logarithm of the ratios' geometric mean, GSPO's ratio of a sequence.
    if level.value.endswith("mean"):
        total = total / mask.sum(axes, keepdim=True).clamp(min=1)
    return total.expand_as(values).reshape(shape)


def policy_loss(
    logp: Tensor, coefficient: Tensor, weight: Tensor, auxiliaries: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Compute -sum(w * sg(c) * logp) + sum(auxiliaries), a scalar.

    logp, coefficient, weight: [N, K]. Entries with weight 0 contribute neither value nor gradient, even if not finite.
    The value itself is not meaningful (its gradient is the surrogate's); auxiliaries are scalars, already scaled.
    """
    # Masked entries go through where on both factors: 0 * inf would be NaN, and its gradient too.
    in_use = weight > 0
    terms = torch.where(in_use, weight * coefficient, 0.0).detach() * torch.where(in_use, logp, 0.0)
    loss = -terms.sum()
    for auxiliary in (auxiliaries or {}).values():
        loss = loss + auxiliary
    return loss


def value_loss(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute half the mean squared error between values and returns [N], over the masked entries."""
    error = 0.5 * (values - returns).square()
    if mask is None:
        return error.mean()
    return torch.where(mask, error, 0.0).sum() / mask.sum().clamp(min=1)


def approximate_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(old || new) of a complete chunk: the sum over steps of the mean of (r - 1) - log r, a scalar.

    log_ratio, mask: [N, K]. The estimator is Schulman's k3 (joschu.net/blog/kl-approx): unbiased for log-probabilities
    that are sums over dimensions, never negative. With log-probabilities that are means over D dimensions it is a
    per-dimension value, not comparable with a summed one.
    """
    terms = torch.where(mask, torch.expm1(log_ratio) - log_ratio, 0.0)
    # By the chain rule the KL of a decision is the sum over its steps, each a mean over the decisions that have it.
    return (terms.sum(0) / mask.sum(0).clamp(min=1)).sum()


def clip_fraction(log_ratio: Tensor, mask: Tensor, clip_low: Tensor | float, clip_high: Tensor | float) -> Tensor:
    """Return the fraction of scored steps [N, K] whose ratio is outside [1 - low, 1 + high], a scalar."""
    ratio = log_ratio.exp()
    outside_mask = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)) & mask
    return outside_mask.sum() / mask.sum().clamp(min=1)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) in (0, 1], a scalar; w [N]: the ratio of the complete chunk, exp(sum [N, K])."""
    joint = torch.where(mask, log_ratio, 0.0).sum(-1)
    # Shifted by the largest before exp: the common factor cancels in the quotient.
    weights = (joint - joint.max()).exp()
    return weights.sum().square() / (weights.square().sum() * weights.numel())


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), both [N]: 1 for a perfect critic, 0 for a constant one.

    NaN if all returns are equal, since there is no variance to explain.
    """
    variance = returns.var(unbiased=False)
    fraction = 1 - (returns - values).var(unbiased=False) / variance.clamp(min=1e-12)
    return torch.where(variance > 1e-12, fraction, torch.nan)


def score_norm(scores: Scores, latents: Mapping[str, Tensor], executed: Tensor) -> Tensor:
    """Return the squared norm of the gradient of every log-probability by its step's logits or means, [n, K].

    Tokens with probabilities p, the chosen one p_a: 1 - 2 p_a + sum p^2. Gaussian steps x: (x - mean)^2 / std^4, its
    mean over the elements of the executed steps [n, C] bool. By matching: the squared error, to which it is
    proportional. scores: of all steps of chunks with `latents` [n, ...]. It stands for the gradient by the weights.
    Raises ConfigError if scores of denoising steps lack their means.
    """
    if "log_probabilities" in scores.extras:
        return 1 - 2 * scores.logp.exp() + (2 * scores.extras["log_probabilities"]).exp().sum(-1)
    if "chain" not in latents:
        return -scores.logp
    mean, std = score_extra(scores, "mean"), score_extra(scores, "std")
    terms = ((latents["chain"][:, 1:] - mean) / std.square().clamp(min=1e-6)).square()
    return mean_of_elements(terms, scores.extras, executed)


def distribution_overlap(student: Scores, teacher: Scores, executed: Tensor) -> Tensor:
    """Return the agreement of two policies' distributions of the same steps, [n, K] in 0..1.

    Tokens: the share of the k most likely ones that they have in common, k a quarter of the vocabulary and at most 16.
    Others: exp(-d / 2), d the squared distance of their means (predictions) in standard deviations, averaged over the
    elements of the executed steps [n, C] bool. Raises KeyError unless both have the same extras.
    """
    if "log_probabilities" in student.extras:
        both = student.extras["log_probabilities"], teacher.extras["log_probabilities"]
        count = max(1, min(16, both[0].shape[-1] // 4))
        likely = [torch.zeros_like(each).scatter(-1, each.topk(count, -1).indices, 1.0) for each in both]
        return (likely[0] * likely[1]).sum(-1) / count
    difference = student.extras["mean"] - teacher.extras["mean"]
    terms = (difference / student.extras["std"].clamp(min=1e-6)).square()
    return (-0.5 * mean_of_elements(terms, student.extras, executed)).exp()


def divergence_between(policy: Scores, other: Scores, executed: Tensor) -> Tensor:
    """Return KL(policy || other) of the distributions of the same steps, [n, K], in nats.

    Tokens: summed over the vocabulary. Gaussian steps: exact, its mean over the elements of the log-probability, which
    are those of the executed steps [n, C] bool; by matching, half the squared distance of the predictions. Scores
    without distributions: k3 of the recorded step, e^x - 1 - x with x = log other - log policy, at most 10. Its mean is
    the KL divergence, but it depends on the step that was drawn. Raises KeyError if only `policy` has a distribution.
    """
    if "log_probabilities" in policy.extras:
        return kl_divergence(
            *(Categorical(logits=each.extras["log_probabilities"], validate_args=False) for each in (policy, other))
        )
    if "mean" in policy.extras:
        normals = (
            Normal(each.extras["mean"], each.extras["std"].clamp(min=1e-3), validate_args=False)
            for each in (policy, other)
        )
        return mean_of_elements(kl_divergence(*normals), policy.extras, executed)
    shift = (other.logp - policy.logp).clamp(-20, 20)
    return (torch.expm1(shift) - shift).clamp(max=10.0)


def mean_of_elements(terms: Tensor, extras: Mapping[str, Tensor], executed: Tensor | None = None) -> Tensor:
    """Return the mean of terms [..., P, A] over the elements that a log-probability consists of, [...].

    extras: of the scores, whose "logp_precision" [..., P, A] says which these are. Without it they are those of the
    `executed` steps [n, C] bool, which begin at the first predicted one, or all (None).
    """
    if "logp_precision" in extras:
        counts = extras["logp_precision"] > 0
    elif executed is not None:
        terms = terms[..., : executed.shape[1], :]
        counts = executed[:, None, :, None]
    else:
        return terms.mean((-2, -1))
    weight = counts.to(terms.dtype).expand_as(terms)
    return (terms * weight).sum((-2, -1)) / weight.sum((-2, -1)).clamp(min=1)
