"""Imagined beside real success of a policy that learns in imagination, and whether they have parted."""

from collections.abc import Callable

import numpy as np
import torch

from robopolicy.core.policy import Policy
from robopolicy.core.world import World
from robopolicy.evaluation.success import evaluate_policy


class TwoWorlds:
    """Measures success in the world model and, to watch, in the real world, on the same starts.

    seeds: episodes in imagination; watched: those of them that are also played for real, possibly none; gap: the two
    have parted when imagined success exceeds the real one by so much and their Wilson intervals do not touch; None:
    never said; in_reality: a policy -> what acts in its place in the real world, itself behind an encoder say. Imagined
    gain is not real gain: without regularisation DiWA imagines 85 % where 25 % are real.
    """

    def __init__(
        self,
        imagined: World,
        real: World,
        seeds: np.ndarray,
        watched: np.ndarray,
        gap: float | None,
        device: torch.device | str = "cpu",
        in_reality: Callable[[Policy], Policy] = lambda policy: policy,
    ):
        self.imagined, self.real, self.seeds, self.watched = imagined, real, seeds, watched
        self.gap, self.device, self.in_reality = gap, device, in_reality

    def evaluate(self, policy: Policy, deterministic: bool) -> dict[str, float]:
        """Return success, low and high in imagination, real_success, real_low and real_high, gap and stop (0 or 1)."""
        imagined = evaluate_policy(
            self.imagined, policy, self.seeds, deterministic=deterministic, device=self.device, label="imagined"
        )
        figures = {"success": imagined.success_rate, "low": imagined.interval[0], "high": imagined.interval[1]}
        if not len(self.watched):
            return {**figures, "stop": 0.0}
        acting = self.in_reality(policy)
        real = evaluate_policy(
            self.real, acting, self.watched, deterministic=deterministic, device=self.device, label="real"
        )
        gap = imagined.success_rate - real.success_rate
        parted = self.gap is not None and gap > self.gap and imagined.interval[0] > real.interval[1]
        seen = {"real_success": real.success_rate, "real_low": real.interval[0], "real_high": real.interval[1]}
        return {**figures, **seen, "gap": gap, "stop": float(parted)}
