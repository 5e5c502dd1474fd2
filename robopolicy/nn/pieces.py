"""Minibatches computed in pieces: what the whole comes to, with the activations of one piece.

    with in_pieces(16):
        scores = scores_of(policy, observation, latents)  # of 256 decisions, 16 at a time
        loss(scores).backward()

A piece is computed without keeping activations, and with them on the way back, when its gradient is added to that of
the others. So a loss is made of all scores at once, whatever of the whole minibatch it looks at (means, quantiles,
pairs, a stop by KL), and its gradient is the whole's, to the rounding of sums. The price is a second forward pass.

Sources: activation checkpointing, Chen et al. 2016, arXiv:1604.06174; in pieces, for losses of a whole minibatch,
GradCache, Gao et al. 2021, arXiv:2101.06983.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from robopolicy.core.arrays import is_mapping
from robopolicy.core.policy import ScoredPolicy, Scores, TensorObservation, Trainable
from robopolicy.nn.precision import computing_again, is_lowered

_at_once: ContextVar[int] = ContextVar("rows computed at once", default=0)
_minibatch: ContextVar[int] = ContextVar("rows of a minibatch", default=0)


@contextmanager
def in_pieces(rows: int) -> Iterator[None]:
    """Let `scores_of`, `loss_of` and `values_of` compute at most so many rows at once, in this thread; 0 for all."""
    with _set(_at_once, rows):
        yield


@contextmanager
def in_minibatches(rows: int) -> Iterator[None]:
    """Let what is computed of all decisions without gradient take no more rows at once than a step does with one."""
    with _set(_minibatch, rows):
        yield


@contextmanager
def _set(variable: ContextVar[int], value: int) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def rows_at_once(most: int) -> int:
    """Return how many rows are computed at once without gradient: at most `most`, a minibatch, and a piece of it."""
    return min(each for each in (most, _at_once.get(), _minibatch.get()) if each)


def pieces(rows: int, at_once: int) -> list[slice]:
    """Return the pieces of so many rows, each of at most `at_once`."""
    return [slice(first, first + at_once) for first in range(0, rows, at_once)]


def _parts(rows: Sized) -> list[slice]:
    """Return the pieces of what has N rows, none where they are computed together."""
    at_once = _at_once.get()
    return pieces(len(rows), at_once) if 0 < at_once < len(rows) else []


def take(batch: Any, part: slice) -> Any:
    """Return some rows of tensors [N, ...] and lists of N, in mappings of them."""
    return {key: take(value, part) for key, value in batch.items()} if is_mapping(batch) else batch[part]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function makes of its arguments; for a gradient it is computed again, alike, with activations."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    lowered = is_lowered()
    return checkpoint(
        function, *arguments, use_reentrant=False, context_fn=lambda: (nullcontext(), computing_again(lowered))
    )


def scores_of(policy: ScoredPolicy, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
    """Return policy.log_prob(observation, latents), in pieces: scores [N, K] of observations and latents [N, ...]."""
    parts = _parts(next(iter(observation.values()), ()))
    if not parts:
        return policy.log_prob(observation, latents)
    found: list[Scores] = [recomputed(policy.log_prob, take(observation, part), take(latents, part)) for part in parts]

    def joined(name: str) -> Tensor:
        """Join an extra, which rows may share."""
        return torch.cat([each.extras[name].expand(len(each.logp), *each.extras[name].shape[1:]) for each in found])

    extras = {name: joined(name) for name in found[0].extras}
    return Scores(torch.cat([each.logp for each in found]), torch.cat([each.entropy for each in found]), extras)


def loss_of(policy: Trainable, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Return policy.loss(batch, generator), terms [N], in pieces; what is random is drawn for each of them.

    batch: as `Trainable.loss` takes it, "actions" [N, P, A] among others.
    """
    parts = _parts(batch.get("actions", ()))
    if not parts:
        return policy.loss(batch, generator)
    device = generator.device

    def loss(some: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
        return policy.loss(some, torch.Generator(device).manual_seed(seed))  # the second time as the first

    seeds = torch.randint(2**62, (len(parts),), generator=generator, device=device).tolist()
    found = [recomputed(loss, take(batch, part), seed) for part, seed in zip(parts, seeds, strict=True)]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def values_of(critic: Callable[[Mapping[str, Any]], Tensor], observation: Mapping[str, Any]) -> Tensor:
    """Return the critic's values [N] of N observations, in pieces."""
    parts = _parts(next(iter(observation.values()), ()))
    if not parts:
        return critic(observation)
    return torch.cat([recomputed(critic, take(observation, part)) for part in parts])
