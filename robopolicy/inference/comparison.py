"""Compare two inference methods: time per policy call and difference between actions."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, TensorObservation

EXACT = 1e-4
"""Maximum error, in standard deviations of the actions, of equivalent methods: rounding over K steps."""


@dataclass(frozen=True)
class Timing:
    """Seconds per policy call, [rounds]."""

    seconds: Array

    @property
    def median(self) -> float:
        """Median time."""
        return float(np.median(self.seconds))

    @property
    def least(self) -> float:
        """Minimum time."""
        return float(self.seconds.min())

    @property
    def spread(self) -> float:
        """Interquartile range."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(high - low)

    def to_json(self) -> dict[str, float]:
        """Return a JSON-ready dictionary, in milliseconds."""
        return {"median_ms": 1e3 * self.median, "least_ms": 1e3 * self.least, "spread_ms": 1e3 * self.spread}


def time_decisions(
    policies: Mapping[str, Policy], seen: TensorObservation, rounds: int, *, deterministic: bool = True
) -> dict[str, Timing]:
    """Measure the times of policy calls at an observation `seen` [B, H, ...], by policy; the first call of each is
    excluded.

    The first one may include compilation. Policies alternate, so that other load on the machine affects all of them.
    """
    device = device_of(seen)
    draws = torch.Generator(device).manual_seed(0)
    seconds_of: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(rounds + 1):
        for name, policy in policies.items():
            began = time.perf_counter()
            policy.act(seen, draws, deterministic=deterministic)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds_of[name].append(time.perf_counter() - began)
    return {name: Timing(np.array(values)) for name, values in seconds_of.items()}


def device_of(seen: TensorObservation) -> torch.device:
    """Return the device of an observation [B, H, ...]."""
    return next(value.device for value in seen.values() if isinstance(value, Tensor))


def noise_free_actions(policy: Policy, seen: TensorObservation) -> Tensor:
    """Return noise-free actions [N, C, A] at observations [N, H, ...], with the same initial noise for every policy."""
    draws = torch.Generator(device_of(seen)).manual_seed(0)
    return policy.act(seen, draws, deterministic=True).actions


def action_error(actions: Tensor, reference: Tensor) -> float:
    """Return the root mean square difference of actions [N, C, A] from the reference's, in standard deviations.

    Standard deviations are those of the reference's actions, per element over all observations and steps.
    """
    scale = reference.flatten(0, 1).std(0).clamp_min(1e-6)
    return float(((actions - reference) / scale).square().mean().sqrt())


keep_former_names(__name__, {"decided": "noise_free_actions", "timed": "time_decisions"})
