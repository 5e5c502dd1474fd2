"""Behaviour cloning: fit a policy to the action chunks of episodes."""

from collections.abc import Iterator
from typing import Any

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK
from robopolicy.training.configuration import PretrainConfig
from robopolicy.training.fit import FitResult, fit


def pretrain(
    policy: Trainable, episodes: Episodes, config: PretrainConfig, run: RunFolder | None = None, *, seed: int = 0
) -> FitResult:
    """Fit `policy` to `episodes` and save it to the run's checkpoint folder.

    A run that was killed goes on from its resume point and ends bit for bit in the same place. The policy ends in
    evaluation mode, with averaged weights. seed: root of the batches drawn and of the noise.
    Raises DataError where what the policy learns from holds NaN or infinity.
    """
    require_finite_columns(episodes, policy.spec.observation)
    generators = Generators(seed, next(policy.parameters()).device)
    batches = regression_batches(policy, episodes, config.batch_size, generators["batches"])
    result = fit(policy, batches, config.fit, generators, run=run, label="Behaviour cloning")
    if run is not None:
        policy.save(run.checkpoint)
    return result


def regression_batches(
    policy: Trainable, episodes: Episodes, batch_size: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield random decisions of `episodes` for ever, as `policy.loss` takes them; `generator` is all the state."""
    spec = policy.spec
    keys = [*spec.observation, TASK] if len(spec.instructions) > 1 else list(spec.observation)
    data = episodes.to(next(policy.parameters()).device)
    return data.sampler(spec.history, spec.prediction, batch_size, generator, keys=keys)
