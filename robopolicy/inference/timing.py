"""How long a decision takes, of several policies in turns, so that a load on the machine meets all of them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from robopolicy.core.arrays import Array
from robopolicy.core.policy import Policy, TensorObservation


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

    That one may compile.
    """
    device = next(value.device for value in seen.values() if isinstance(value, torch.Tensor))
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
