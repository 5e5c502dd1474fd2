"""A denoiser that may be given the first actions of a chunk, so that it continues them (training-time RTC).

Axes: P predicted step, A action dimension.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from robopolicy.nn.branches import Blocks, fresh
from robopolicy.nn.denoisers import Denoiser


class PrefixDenoiser(nn.Module):
    """A `Denoiser` of latents [..., P, A], or [..., P, A + 1] where the last channel says which steps are given (1).

    Given steps hold clean actions, whatever the time is; what is predicted there means nothing. inner: a denoiser of A
    + 1 channels. Deviation from Black et al. 2025 (arXiv:2512.05964), who tell each step its own time, which is that of
    clean actions where they are given: one bit says as much, and any denoiser can read it.
    """

    def __init__(self, inner: Denoiser, action_size: int):
        super().__init__()
        self.inner, self.action_size = inner, action_size

    @property
    def block_names(self) -> tuple[str, ...]:
        """Those of the denoiser inside."""
        return self.inner.block_names

    def encode_time(self, time: Tensor) -> Tensor:
        """Features [..., E] of times [...]; see `Denoiser`."""
        return self.inner.encode_time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Features [..., F] of conditions [..., D]; see `Denoiser`."""
        return self.inner.encode_condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents [..., P, A] or [..., P, A + 1]; see `Denoiser`."""
        told = pad(x, (0, 1)) if x.shape[-1] == self.action_size else x
        return self.inner.denoise(told, time_features, condition_features, blocks)[..., : self.action_size]

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A or A + 1], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


def draw_counts(samples: int, most: int, decay: float, generator: torch.Generator) -> Tensor:
    """Draw how many steps each of so many samples is given, [N] int64 in 0 .. most, n with probability ~ exp(-decay n).

    decay 0: all alike. A sample that is given much has little left to learn, so a few of them teach it, and the many
    that are given nothing keep what the policy does without a delay. FluxVLA's training-time RTC recommends such a law
    too, with temperature 1 / decay.
    """
    if decay == 0:
        return torch.randint(most + 1, (samples,), generator=generator, device=generator.device)
    weights = torch.exp(-decay * torch.arange(most + 1, dtype=torch.float64, device=generator.device))
    return torch.multinomial(weights, samples, replacement=True, generator=generator)


def with_prefix(x: Tensor, clean: Tensor, count: Tensor) -> Tensor:
    """Return latents [N, P, A + 1] whose first count[n] steps are those of `clean` and flagged as given.

    x, clean: [N, P, A]; count: [N] int64.
    """
    given = given_steps(count, x.shape[1])[..., None]
    return torch.cat([torch.where(given, clean, x), given.to(x.dtype)], -1)


def given_steps(count: Tensor, steps: int) -> Tensor:
    """Return which of P = `steps` steps are given, [N, P] bool: the first count[n]."""
    return torch.arange(steps, device=count.device) < count[:, None]
