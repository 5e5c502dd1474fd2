"""Imagined and real success of a policy that learns in imagination, and detection of their divergence."""

from collections.abc import Callable

import numpy as np
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy
from robopolicy.core.world import World
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy


class SimVsImagined:
    """Measures success in the world model and in the real world, from the same initial states.

    seeds: episodes in imagination; watched: the subset also played in the real world, possibly empty; gap: divergence
    is reported when imagined success exceeds real success by more than this and their Wilson intervals do not overlap;
    None: never; by_real: whether real success, when measured, selects the best policy and counts towards the target;
    in_reality: a policy -> its form in the real world, for example behind an encoder; confirming: (iteration, episodes)
    -> seeds for confirming a reached target. Imagined gain is not real gain: without regularisation DiWA imagines 85 %
    success where 25 % is real.
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
        by_real: bool = True,
        confirming: Callable[[int, int], np.ndarray] | None = None,
    ):
        self.imagined = imagined
        self.real = real
        self.seeds = seeds
        self.watched = watched
        self.gap = gap
        self.device = device
        self.in_reality = in_reality
        self.by_real = by_real
        self.confirming = confirming

    def evaluate(self, policy: Policy, deterministic: bool) -> dict[str, float]:
        """Return success, low and high in imagination (and return, if the world reports no success). If the policy is
        also evaluated in the real world: real_success, real_low, real_high, real_steps, gap and parted (0 or 1). With
        `by_real` also score, the lower bound of real success, and achieved, real success.

        If success is not reported, low and high bound the mean return, and parted is always 0.
        """
        imagined_result = evaluate_policy(
            self.imagined, policy, self.seeds, deterministic=deterministic, device=self.device, label="imagined"
        )
        if not len(self.watched):
            return imagined_result.figures()
        real = evaluate_policy(
            self.real,
            self.in_reality(policy),
            self.watched,
            deterministic=deterministic,
            device=self.device,
            label="real",
        )
        real_figures = real.figures()
        real_metrics = {f"real_{name}": value for name, value in real_figures.items()} | {
            "real_steps": float(real.steps)
        }
        selection = {"score": real_figures["low"], "achieved": real_figures["success"]} if self.by_real else {}
        return {**imagined_result.figures(), **real_metrics, **self._gap(imagined_result, real), **selection}

    def confirm(self, policy: Policy, iteration: int) -> dict[str, float]:
        """Return success, low and high on other episodes than those of `evaluate`, in the world that counts towards the
        target, and real_steps if that is the real one. Raises ConfigError without `confirming`.
        """
        if self.confirming is None:
            raise ConfigError("The target needs seeds for its confirmation: pass `confirming`.")
        real = self.by_real and len(self.watched) > 0
        world, acting = (self.real, self.in_reality(policy)) if real else (self.imagined, policy)
        seeds = self.confirming(iteration, len(self.watched if real else self.seeds))
        result = evaluate_policy(world, acting, seeds, device=self.device, label="confirm")
        return result.figures() | ({"real_steps": float(result.steps)} if real else {})

    def _gap(self, imagined: EvaluationResult, real: EvaluationResult) -> dict[str, float]:
        gap = imagined.score - real.score
        beyond = real.reports_success and self.gap is not None and gap > self.gap
        return {"gap": gap, "parted": float(beyond and imagined.interval[0] > real.interval[1])}


keep_former_names(__name__, {"TwoWorlds": "SimVsImagined"})
