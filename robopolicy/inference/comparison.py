"""What tells two ways of deciding apart: how long a decision takes, and how far its actions are from the other's."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.policy import Policy, TensorObservation

EXACT = 1e-4
"""Error, in standard deviations of the actions, up to which two ways decide the same: rounding, K steps of it."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each decision, [rounds]."""

    seconds: Array

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.seconds))

    @property
    def least(self) -> float:
        """The shortest one."""
        return float(self.seconds.min())

    @property
    def spread(self) -> float:
        """The interquartile range."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(high - low)

    def to_json(self) -> dict[str, float]:
        """Return a JSON-ready dictionary, in milliseconds."""
        return {"median_ms": 1e3 * self.median, "least_ms": 1e3 * self.least, "spread_ms": 1e3 * self.spread}


def timed(
    policies: Mapping[str, Policy], seen: TensorObservation, rounds: int, *, deterministic: bool = True
) -> dict[str, Timing]:
    """Return the times of decisions at an observation `seen` [B, H, ...], by policy; the first of each is not counted.

    That one may compile. Policies take turns, so that a load on the machine meets all of them.
    """
    device = device_of(seen)
    draws = torch.Generator(device).manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(rounds + 1):
        for name, policy in policies.items():
            began = time.perf_counter()
            policy.act(seen, draws, deterministic=deterministic)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                found[name].append(time.perf_counter() - began)
    return {name: Timing(np.array(values)) for name, values in found.items()}


def device_of(seen: TensorObservation) -> torch.device:
    """Return where an observation [B, H, ...] lies."""
    return next(value.device for value in seen.values() if isinstance(value, Tensor))


def decided(policy: Policy, seen: TensorObservation) -> Tensor:
    """Return noise-free actions [N, C, A] at observations [N, H, ...], with the same initial noise for every policy."""
    draws = torch.Generator(device_of(seen)).manual_seed(0)
    return policy.act(seen, draws, deterministic=True).actions


def action_error(actions: Tensor, reference: Tensor) -> float:
    """Return how far actions [N, C, A] are from the reference's: the root mean square, in standard deviations.

    Those are the reference's, of each element over all observations and steps.
    """
    scale = reference.flatten(0, 1).std(0).clamp_min(1e-6)
    return float(((actions - reference) / scale).square().mean().sqrt())
