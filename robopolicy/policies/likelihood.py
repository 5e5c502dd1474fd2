"""Log-probabilities of denoised action chunks: exact for noisy chains, or a matching surrogate for noise-free ones.

Chain: a decision consists of K' Gaussian transitions; each has a density, and their product is the density of the chain
(not of the action, which many chains lead to), as PPO over the denoising chain requires (DPPO, arXiv:2409.00588).
Matching: flow policy optimisation (FPO, McAllister et al. 2025, arXiv:2507.21053). A flow or diffusion sampled without
noise has no density of its chain. Its loss for denoising its own action at a few random levels is an upper bound on the
negative log-likelihood; the same levels before and after an update give a ratio, exp(mean(loss_old - loss_new)), which
ratio_level=decision_mean computes from the latents created here. Axes: N row, K scored step, n matching sample, C
executed step, P >= C predicted step, A action dimension.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from robopolicy.core.policy import Scores
from robopolicy.core.randomness import normal
from robopolicy.nn.precision import run_in_training_precision
from robopolicy.nn.schedules import NoiseSchedule, Normal, Schedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, LogpReduction
from robopolicy.policies.latents import ExecutedSlice
from robopolicy.policies.network import Condition, DenoisingNetwork, LearnsNoise, learns_noise, repeat_rows, steps_of


def chain_scores(
    config: DenoisingPolicyConfig,
    schedule: NoiseSchedule,
    first: int,
    network: DenoisingNetwork,
    condition: Condition,
    latents: Mapping[str, Tensor],
    part: ExecutedSlice,
) -> Scores:
    """Compute log-probabilities of recorded chains: all steps of all rows in one batch, differentiable in the network's
    weights.

    first: schedule index of the first step; latents: "chain" [N, K+1, P, A]; optional "chosen" [N, k] int64, steps to
    evaluate, and "executed" [N, C] bool, see `reduce_logp`; part: executed part of a latent. Returns logp and entropy
    [N, K] (or [N, k]); extras: mean [N, K, P, A] and std of the Gaussians, logp_precision (see `logp_precision`),
    logp_clamped and clean_clipped [N, K], the fractions of elements whose gradient is zero because of the clamp or the
    clip.
    """
    chain, indices = latents["chain"], latents.get("chosen")
    times = schedule.times[first:]
    step: Tensor | slice = slice(first, None)
    # A recorded chain says what entered each step and what came out: its transitions need not wait for each other.
    x, after = chain[:, :-1], chain[:, 1:]
    if indices is not None:
        rows = torch.arange(len(chain), device=chain.device)[:, None]
        x, after = chain[rows, indices], chain[rows, indices + 1]
        step = indices + first
    prediction = steps_of(network, times, condition).several(x, indices)
    normal = schedule.transition(x, prediction, step, explored=part.size)
    if learns_noise(config):
        assert isinstance(network, LearnsNoise)
        normal = Normal(normal.mean, network.noise_std(times if indices is None else times[indices], condition))
    logp, clamped = reduce_logp(config, normal, after, latents.get("executed"), part)
    # A Gaussian's entropy depends on its std alone, which all steps of a chunk share: executed ones need no selection.
    entropy = normal.entropy(config.min_logprob_std).mean((-2, -1)).expand(logp.shape)
    if config.logp_reduction is LogpReduction.SUM:
        entropy = entropy * part.count * part.size
    std = normal.std.expand(len(x), *normal.std.shape[-3:])  # all rows' where the schedule's one table says it
    with torch.no_grad():
        clipped = torch.zeros_like(clamped)
        if schedule.clip is not None:
            estimate = part.of(schedule.clean_estimate(x, prediction, step))
            clipped = (estimate.abs() > schedule.clip).float().mean((-2, -1))
        precision = logp_precision(config, normal, latents.get("executed"), part)
    return Scores(
        logp,
        entropy,
        {
            "mean": normal.mean,
            "std": std,
            "logp_precision": precision,
            "logp_clamped": clamped,
            "clean_clipped": clipped,
        },
    )


def logp_precision(
    config: DenoisingPolicyConfig, normal: Normal, executed: Tensor | None, part: ExecutedSlice
) -> Tensor:
    """Return the weights w [N, K, P, L] of squared deviations in a log-probability, -1/2 sum w (x - mean)^2 + constant.

    They are 0 where `reduce_logp` leaves elements out, and are those of its reduction and of its lower bound on the
    standard deviation. executed: [N, C] bool, see there.
    """
    std = torch.where(normal.std > 0, normal.std.clamp_min(config.min_logprob_std), torch.inf)
    weight = normal.mean.new_zeros(len(normal.mean), 1, *normal.mean.shape[-2:])
    scored_part = part.of(weight)
    scored_part += 1.0 if executed is None else executed[:, None, :, None].to(weight.dtype)
    if config.logp_reduction is LogpReduction.MEAN:
        weight /= weight.sum((-2, -1), keepdim=True).clamp_min(1)
    return (weight / std.square()).expand(normal.mean.shape)


def reduce_logp(
    config: DenoisingPolicyConfig, normal: Normal, value: Tensor, executed: Tensor | None, part: ExecutedSlice
) -> tuple[Tensor, Tensor]:
    """Reduce the log-density of latents [N, K, P, L] to [N, K]; also return the fraction of clamped elements [N, K].

    Only the C executed steps count: predictions beyond them have no effect, and their gradient would be noise. executed
    [N, C] bool also excludes the rest of a chunk in which the episode ended. Averaging instead of summing keeps ratios
    near 1 for any chunk length, so one clip range fits all.
    """
    executed_normal = Normal(part.of(normal.mean), part.std_of(normal.std))
    element = executed_normal.log_prob(part.of(value), config.min_logprob_std)
    clamped = torch.zeros(element.shape[:-2], device=element.device)
    if config.logp_clamp is not None:
        # One element far in a tail would rule the whole chunk's ratio; the clamp also takes its gradient away.
        low, high = config.logp_clamp
        with torch.no_grad():
            clamped = ((element < low) | (element > high)).float().mean((-2, -1))
        element = element.clamp(low, high)
    if executed is None:
        total = element.sum((-2, -1))
        count: Tensor | int = part.count * part.size
    else:
        total = (element * executed[:, None, :, None]).sum((-2, -1))
        count = (executed.sum(-1, keepdim=True) * part.size).clamp_min(1)
    return (total / count if config.logp_reduction is LogpReduction.MEAN else total), clamped


def matching_latents(action: Tensor, schedule: Schedule, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the latents for matching an action [N, P, A] (normalised): the action, and `samples` noises and levels per
    row.

    "action": [N, P, A]; "noise": [N, n, P, A], standard normal; "level": [N, n], as `schedule.levels` draws them.
    """
    batch = len(action)
    noise = normal((batch, samples, *action.shape[1:]), generator)
    level = schedule.levels(batch * samples, generator).reshape(batch, samples)
    return {"action": action, "noise": noise.to(action.device), "level": level.to(action.device)}


def noisy_actions(schedule: Schedule, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the noisy actions [N, n, P, A] that `matching_scores` denoises, and their times [N, n] in [0, 1].

    latents: as `matching_latents` returns them.
    """
    noise, level = latents["noise"], latents["level"]
    clean = latents["action"][:, None].expand(noise.shape).flatten(0, 1)
    noisy = schedule.corrupt(clean, noise.flatten(0, 1), level.flatten())
    return noisy.reshape(noise.shape), schedule.level_times(level.flatten()).reshape(level.shape)


def executed_error(difference: Tensor, latents: Mapping[str, Tensor], part: ExecutedSlice) -> Tensor:
    """Return the mean square of differences [N, n, P, A] over the executed actions, [N, n]; latents as in
    `matching_scores`.
    """
    error = part.of(difference.square()).mean(-1)
    if "executed" not in latents:
        return error.mean(-1)
    executed_mask = latents["executed"][:, None].to(error.dtype)
    return (error * executed_mask).sum(-1) / executed_mask.sum(-1).clamp(min=1)


def matching_scores(
    config: DenoisingPolicyConfig,
    schedule: Schedule,
    network: DenoisingNetwork,
    condition: Condition,
    latents: Mapping[str, Tensor],
    part: ExecutedSlice,
) -> Scores:
    """Compute surrogate log-probabilities of recorded actions: minus the squared prediction error at every recorded
    level, [N, n].

    latents: as returned by `matching_latents`; optional "executed" [N, C] bool excludes the rest of a chunk; part:
    executed part of a latent. Entropy is zero, because there is no distribution. extras: mean [N, n, P, A], the
    predictions, with std 1.
    """
    action = latents["action"]
    noise, level = latents["noise"], latents["level"]
    count, samples = level.shape
    clean = action[:, None].expand(noise.shape).flatten(0, 1)
    flat_noise, flat_level = noise.flatten(0, 1), level.flatten()
    noisy = schedule.corrupt(clean, flat_noise, flat_level)
    # Noises and levels are those of the decision: their luck cancels in the ratio of new to old.
    times, conditions = schedule.level_times(flat_level), repeat_rows(condition, samples)
    prediction = run_in_training_precision(lambda: network.denoise(noisy, times, conditions), noisy.device)
    difference = prediction - schedule.target(clean, flat_noise, flat_level)
    loss = executed_error(difference.reshape(count, samples, *difference.shape[1:]), latents, part)
    extras = {"mean": prediction.reshape(noise.shape), "std": torch.ones((), device=loss.device).expand(1, 1, 1, 1)}
    return Scores(-loss, torch.zeros_like(loss), extras)
