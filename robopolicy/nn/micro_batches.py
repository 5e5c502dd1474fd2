"""Micro-batching: full-minibatch losses and gradients with the activation memory of one micro-batch.

    with in_micro_batches(16):
        scores = scores_of(policy, observation, latents)  # of 256 decisions, 16 at a time
        loss(scores).backward()

A micro-batch is first computed without storing activations, then recomputed with them in the backward pass, where its
gradient is accumulated. The loss is therefore a function of all log-probabilities of the minibatch at once (means,
quantiles, pairs, early stopping by KL), and its gradient is exact up to summation rounding. The cost is a second
forward pass.

Sources: activation checkpointing, Chen et al. 2016, arXiv:1604.06174; for losses over a full minibatch, GradCache, Gao
et al. 2021, arXiv:2101.06983.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from robopolicy.core.arrays import is_mapping
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import ScoredPolicy, Scores, TensorObservation, Trainable
from robopolicy.nn.precision import lowered_precision, recomputing

_at_once: ContextVar[int] = ContextVar("rows computed at once", default=0)
_minibatch: ContextVar[int] = ContextVar("rows of a minibatch", default=0)


@contextmanager
def in_micro_batches(rows: int) -> Iterator[None]:
    """Limit `scores_of`, `loss_of` and `values_of` to micro-batches of at most `rows` rows in this thread; 0 disables
    it.
    """
    with _set(_at_once, rows):
        yield


@contextmanager
def in_minibatches(rows: int) -> Iterator[None]:
    """Limit gradient-free computations over all action chunks to the minibatch size of training, `rows` rows."""
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
    """Return the batch size of gradient-free computations: the minimum of `most`, the minibatch and the micro-batch
    size.
    """
    return min(each for each in (most, _at_once.get(), _minibatch.get()) if each)


def micro_batches(rows: int, at_once: int) -> list[slice]:
    """Return slices that split `rows` rows into micro-batches of at most `at_once`."""
    return [slice(first, first + at_once) for first in range(0, rows, at_once)]


def _parts(rows: Sized) -> list[slice]:
    """Return the micro-batch slices of N rows; empty if they are computed together."""
    at_once = _at_once.get()
    return micro_batches(len(rows), at_once) if 0 < at_once < len(rows) else []


def take(batch: Any, part: slice) -> Any:
    """Slice tensors [N, ...] and lists of length N in nested mappings."""
    return {key: take(value, part) for key, value in batch.items()} if is_mapping(batch) else batch[part]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with activation checkpointing: for gradients it is recomputed identically in the backward
    pass.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    lowered = lowered_precision()
    return checkpoint(
        function, *arguments, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputing(lowered))
    )


def scores_of(policy: ScoredPolicy, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
    """Return policy.log_prob(observation, latents) computed in micro-batches: [N, K] for observations and latents [N,
    ...].
    """
    parts = _parts(next(iter(observation.values()), ()))
    if not parts:
        return policy.log_prob(observation, latents)
    scores: list[Scores] = [recomputed(policy.log_prob, take(observation, part), take(latents, part)) for part in parts]

    def joined(name: str) -> Tensor:
        """Concatenate an extra column of several micro-batches, which all rows may share."""
        return torch.cat([each.extras[name].expand(len(each.logp), *each.extras[name].shape[1:]) for each in scores])

    extras = {name: joined(name) for name in scores[0].extras}
    return Scores(torch.cat([each.logp for each in scores]), torch.cat([each.entropy for each in scores]), extras)


def loss_of(policy: Trainable, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Return policy.loss(batch, generator), terms [N], in micro-batches; random numbers are drawn per micro-batch.

    batch: as for `Trainable.loss`, including "actions" [N, P, A].
    """
    parts = _parts(batch.get("actions", ()))
    if not parts:
        return policy.loss(batch, generator)
    device = generator.device

    def loss(some: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
        return policy.loss(some, torch.Generator(device).manual_seed(seed))  # the second time as the first

    seeds = torch.randint(2**62, (len(parts),), generator=generator, device=device).tolist()
    losses = [recomputed(loss, take(batch, part), seed) for part, seed in zip(parts, seeds, strict=True)]
    return {name: torch.cat([each[name] for each in losses]) for name in losses[0]}


def values_of(critic: Callable[[Mapping[str, Any]], Tensor], observation: Mapping[str, Any]) -> Tensor:
    """Return the critic's values [N] of N observations, computed in micro-batches."""
    parts = _parts(next(iter(observation.values()), ()))
    if not parts:
        return critic(observation)
    return torch.cat([recomputed(critic, take(observation, part)) for part in parts])


keep_former_names(__name__, {"in_pieces": "in_micro_batches", "pieces": "micro_batches"})
