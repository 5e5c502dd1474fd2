"""The `Policy` protocol: a decision is an action chunk, inside it are steps with log-probabilities.

A policy speaks torch. Axes: N or B row, K step (denoising step, flow step or token), C chunk step, P >= C predicted
steps, A action dimension, H history frame.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.spec import TASK, Observation, PolicySpec
from robopolicy.core.world import Rows

TensorObservation = dict[str, Tensor | list[str]]
"""Key -> tensor [B, H, *field.shape] (images uint8, height x width x 3); `task` -> list of B strings."""


@dataclass(frozen=True)
class Decision:
    """One action chunk per row and how it came about.

    actions: [B, C, A] in the world's units; steps: what `evaluate` needs to score it again, each [B, ...] (a denoising
    policy keeps its chain [B, K+1, P, A]); logp: [B, K] fp32 under the policy that acted; mask: [B, K] bool, True where
    a step was a choice (has a density).
    """

    actions: Tensor
    latents: dict[str, Tensor]
    logp: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Scores:
    """Differentiable scores of recorded decisions: logp, entropy [N, K]; extras by name, e.g. mean [N, K, P, A]."""

    logp: Tensor
    entropy: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """Acts in worlds and scores its own decisions."""

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes."""
        ...

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row without gradient. deterministic: no exploration noise (the initial noise remains)."""
        ...

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded steps: the only differentiable path. At unchanged parameters logp equals `act`'s to 1e-5."""
        ...

    def reset(self, rows: Rows = None) -> None:
        """Forget what was remembered about `rows` (most policies remember nothing)."""
        ...

    def save(self, folder: Path) -> None:
        """Write a self-describing checkpoint, atomically."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """A policy that can go on from the middle of a decision: its tree branches inside denoising chains or sentences."""

    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Decide like `act`, but keep the first count[b] steps [B] of `steps` where count is not negative.

        Kept steps are no choices of this decision: mask is False there. count 0 keeps what came before the first step
        (the initial noise of a chain; nothing of a sentence), -1 nothing at all.
        """
        ...


def to_tensors(observation: Observation, device: torch.device | str = "cpu") -> TensorObservation:
    """Copy a numpy observation to `device`; floats become fp32, images stay uint8, `task` becomes a list of strings."""
    tensors: TensorObservation = {}
    for key, value in observation.items():
        if key == TASK:
            tensors[key] = [str(text) for text in value]
            continue
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        tensors[key] = torch.tensor(array, device=device)
    return tensors
