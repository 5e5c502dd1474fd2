"""Calibration of block caches: record block outputs in chains from recorded observations, as input of cache plans.

Axes: B block, N observation or initial state, K step, P predicted step, A action dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import CONDITION, TensorObservation
from robopolicy.inference.caching import CachedSteps
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.lean import lean
from robopolicy.inference.samplers import Sampler, own_sampler, sample
from robopolicy.nn.branches import Blocks
from robopolicy.policies.abilities import Denoises
from robopolicy.policies.denoising import DenoisingPolicy, require_denoising
from robopolicy.policies.network import ChunkNetwork, DenoisingNetwork, learns_noise
from robopolicy.policies.sampler import draw_noise
from worldmodels.initial_states import context_at
from worldmodels.protocol import Cacheable, ChunkModel


@dataclass(frozen=True)
class Calibration:
    """Statistics of `rows` chains.

    blocks: names; similarity: cosine between a block's outputs in every pair of steps [B, K, K], averaged over rows;
    surge: mean absolute change of a block's output over every pair of steps, all rows and elements [B].
    """

    blocks: tuple[str, ...]
    similarity: Tensor
    surge: Tensor
    rows: int

    @property
    def steps(self) -> int:
        """Number of steps K of a chain."""
        return self.similarity.shape[-1]


class Recorder:
    """Computes every block and records its outputs: features, per block one [N, ...] for each step; blocks: names."""

    def __init__(self) -> None:
        self.blocks: tuple[str, ...] = ()
        self.features: list[list[Tensor]] = []

    def check(self, blocks: tuple[str, ...], steps: int) -> None:
        """Accepts every network."""
        if not self.features:
            self.blocks, self.features = blocks, [[] for _ in blocks]

    def begin(self) -> "Recorder":
        """Return this object: base and network share one record."""
        return self

    def at(self, step: int) -> Blocks:
        """Return the provider of block outputs in `step`."""

        def answer(index: int, branch: Callable[[], Tensor]) -> Tensor:
            self.features[index].append(branch())
            return self.features[index][-1]

        return answer


@torch.no_grad()
def calibrate(
    policy: Denoises,
    observation: TensorObservation,
    generator: torch.Generator,
    *,
    deterministic: bool = True,
    sampler: Sampler | None = None,
    rows: int = 8,
) -> Calibration:
    """Run the policy on observations [N, H, ...] and return the statistics of its blocks.

    A LeRobot policy runs its own chain. For built-in policies deterministic selects the noise-free chain instead of the
    noisy one; sampler: another noise-free chain. rows: observations per batch. Nothing is pooled or rounded: B x rows x
    K outputs of one step [P, width] are in memory together, and only their cosines and changes are stored. Raises
    ConfigError for a network without known blocks or without observations, otherwise the errors of `act`.
    """
    count = len(next(iter(observation.values()))) if observation else 0
    if count < 1 or rows < 1:
        raise ConfigError(
            f"A calibration needs at least 1 observation and batch size 1, but got {count} observations, {rows} "
            "at a time."
        )
    denoising_policy = (
        None if policy.own_schedule is None else require_denoising(policy, f"{type(policy).__name__} has no blocks.")
    )
    if denoising_policy is not None and not _network(denoising_policy.network).denoiser.block_names:
        raise ConfigError("The network has no blocks to cache: an MLP of depth 1 has no hidden blocks.")
    blocks: tuple[str, ...] = ()
    sums: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, count, rows):
        part = {key: value[begin : begin + rows] for key, value in observation.items()}
        recorder = Recorder()
        if denoising_policy is None:
            lean(policy, InferenceConfig("lean"), recorder).act(part, generator)
        else:
            _run(denoising_policy, part, generator, deterministic, sampler, recorder)
        blocks = recorder.blocks
        sums.append(_measured(recorder, len(next(iter(part.values())))))
    return _calibration(blocks, sums, count)


@torch.no_grad()
def calibrate_model(model: Cacheable, episodes: Episodes, begin: Tensor, steps: int, rows: int = 8) -> Calibration:
    """Let a world model imagine `steps` recorded actions jointly, starting just before those of `begin` [N], and return
    statistics of its network's branches in that chain.

    rows: initial states per batch; if an episode ends sooner its last action is repeated. Raises ConfigError when there
    is no initial state, when `steps` is not one chain, or for a model that does not predict several steps jointly.
    """
    if not isinstance(model, ChunkModel):
        raise ConfigError(f"{type(model).__name__} does not predict chunks of several steps (`ChunkModel`).")
    if not len(begin) or min(steps, rows) < 1:
        raise ConfigError(
            f"A calibration needs at least 1 recorded state and 1 step, but got {len(begin)} states and {steps} steps."
        )
    sums: list[tuple[Tensor, Tensor]] = []
    for part in begin.split(rows):
        recorder = Recorder()
        recording_model = cast(ChunkModel, model.with_caching(recorder))
        latent = recording_model.initial(context_at(episodes, part, _context_of(model)), part.numpy())
        last = (episodes.starts + episodes.lengths)[episodes.episode_of_step[part]] - 1
        step_indices = torch.minimum(part[:, None] + torch.arange(steps), last[:, None])
        recording_model.generate(latent, episodes.actions[step_indices].to(next(iter(latent.values())).device))
        if any(len(each) != model.calls for each in recorder.features):
            raise ConfigError(f"{steps} steps exceed one chain of this model: calibrate on fewer.")
        sums.append(_measured(recorder, len(part)))
    return _calibration(model.block_names, sums, len(begin))


def _context_of(model: Cacheable) -> int:
    """Return the number of frames that a model is conditioned on; 1 if it does not declare it."""
    return int(getattr(model, "context", 1))


def _measured(recorder: Recorder, rows: int) -> tuple[Tensor, Tensor]:
    """Return the sums over `rows` of cosines [B, K, K] and changes [B]; a branch may have several outputs per row."""
    measures = [_measure(torch.stack(each, 1).flatten(2)) for each in recorder.features]
    shares = [rows / len(each[0]) for each in recorder.features]
    similarity, surge = (
        torch.stack([value.double() * share for value, share in zip(each, shares, strict=True)])
        for each in zip(*measures, strict=True)
    )
    return similarity, surge


def _calibration(blocks: tuple[str, ...], sums: list[tuple[Tensor, Tensor]], count: int) -> Calibration:
    similarity, surge = (torch.stack(each).sum(0) / count for each in zip(*sums, strict=True))
    return Calibration(blocks, similarity.cpu(), surge.cpu(), count)


def _run(
    policy: DenoisingPolicy,
    observation: TensorObservation,
    generator: torch.Generator,
    deterministic: bool,
    sampler: Sampler | None,
    recorder: Recorder,
) -> None:
    """Run the policy on observations [N, H, ...], including the steps of a fine-tuned policy's frozen base."""
    schedule, noise_free = policy.schedule, deterministic or sampler is not None
    sampler = own_sampler(schedule, deterministic=noise_free) if sampler is None else sampler
    condition = policy.encode(observation)
    features = condition[CONDITION]
    times = sampler.times.to(features.device)
    late_steps = early_steps = _steps(policy.network, times, features, recorder)
    first = 0
    if policy.base is not None:
        base_condition = features if policy.encoder_is_fixed else policy.base.encode(observation)[CONDITION]
        early_steps = _steps(policy.base, times, base_condition, recorder)
        first = int((times > schedule.times[policy.first_step] + 1e-6).sum())
    shape = (len(features), *policy.noise_shape)
    config = policy.config
    draws = draw_noise(
        schedule,
        shape,
        generator,
        features.device,
        noisy=not noise_free,
        noise_clip=config.noise_clip,
        scored=slice(policy.first_step, None),
        noisy_steps=None,
    )
    noise = None
    if draws.steps is not None:
        noise = draws.steps * sampler.stds.to(features.device)[:, None, None, None]
        network = _network(policy.network)
        if learns_noise(config):
            noise[first:] = draws.steps[first:] * network.noise_std(times[first:], condition).transpose(0, 1)
    sample(sampler, lambda x, step: (early_steps if step < first else late_steps).one(x, step), draws.start, noise)


def _steps(network: DenoisingNetwork, times: Tensor, condition: Tensor, recorder: Recorder) -> CachedSteps:
    """Return the network bound to conditions [N, D] at times [K], with recording."""
    denoiser = _network(network).denoiser
    return CachedSteps(denoiser, denoiser.encode_time(times), denoiser.encode_condition(condition), recorder)


def _network(network: DenoisingNetwork) -> ChunkNetwork:
    """Return the built-in network; raises ConfigError for any other."""
    if not isinstance(network, ChunkNetwork):
        raise ConfigError(f"Cache plans support only built-in networks, and this is a {type(network).__name__}.")
    return network


def _measure(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over rows of cosines [K, K] and of mean absolute differences, for outputs [N, K, D].

    With values sorted over steps, the sum of all pairwise differences is a weighted sum: the i-th of K values is the
    larger one in i pairs and the smaller one in K - 1 - i.
    """
    unit, steps = normalize(features, dim=-1), features.shape[1]
    ranks = torch.arange(steps, device=features.device, dtype=features.dtype)
    differences = torch.einsum("k,nkd->nd", 2 * ranks - (steps - 1), features.sort(1).values)
    pairs = max(steps * (steps - 1) / 2, 1)
    return torch.einsum("nad,ntd->at", unit, unit), differences.mean(-1).sum() / pairs
