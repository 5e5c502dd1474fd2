"""Flow policy optimisation (FPO, McAllister et al. 2025, arXiv:2507.21053): decisions scored by their denoising loss.

A flow or diffusion policy that samples without noise has no density of its chain. The loss of denoising its own action
at a few random levels is a bound on minus its log-likelihood; the same levels before and after an update make a ratio,
exp(mean(loss_old - loss_new)), which is what ratio_level=decision_mean computes from the latents made here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def matching_latents(action: Tensor, schedule: Any, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what scores an action [B, P, A] (normalised): itself, and `samples` noises and levels of each row."""
    batch = len(action)
    noise = torch.randn((batch, samples, *action.shape[1:]), generator=generator, device=generator.device)
    level = schedule.levels(batch * samples, generator).reshape(batch, samples)
    return {"action": action, "noise": noise.to(action.device), "level": level.to(action.device)}


def matching_loss(
    denoiser: Any, schedule: Any, condition: Tensor, latents: Mapping[str, Tensor], chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the mean squared prediction error over the executed chunk at every recorded level, [N, n], and the
    predictions themselves, [N, n, P, A].
    """
    action, noise, level = latents["action"], latents["noise"], latents["level"]
    count, samples = level.shape
    clean = action[:, None].expand(noise.shape).flatten(0, 1)
    flat_noise, flat_level = noise.flatten(0, 1), level.flatten()
    noisy = schedule.corrupt(clean, flat_noise, flat_level)
    repeated = condition.repeat_interleave(samples, 0)
    prediction = denoiser(noisy, schedule.level_times(flat_level), repeated)
    error = (prediction - schedule.target(clean, flat_noise, flat_level)).square()[:, :chunk].mean(-1)
    error = error.reshape(count, samples, -1)
    if "executed" not in latents:
        return error.mean(-1), prediction.reshape(noise.shape)
    executed = latents["executed"][:, None].to(error.dtype)
    return (error * executed).sum(-1) / executed.sum(-1).clamp(min=1), prediction.reshape(noise.shape)
