"""Policies that another library saved, opened as they lie: a matrix from observation to action, in a .npz file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.checkpoints import Checkpoint
from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import Field, PolicySpec, validate_observation
from robopolicy.core.world import Rows
from robopolicy.policies.foreign import ForeignFormat

NAME, WEIGHTS = "linear-control", "gains.npz"


class LinearPolicy:
    """A `core.policy.Policy`: tanh(K x) of the observation's vectors x, and nothing that is scored."""

    def __init__(self, gains: Tensor, sizes: dict[str, int], fps: float):
        self.gains = gains
        self.sizes = sizes
        self.fps = fps

    @property
    def spec(self) -> PolicySpec:
        """One frame in, one action out."""
        return PolicySpec(
            observation={key: Field((size,)) for key, size in self.sizes.items()},
            action=Field((len(self.gains),), low=-1.0, high=1.0),
            history=1,
            chunk=1,
            prediction=1,
            scored_steps=0,
            fps=self.fps,
            instructions=("",),
        )

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide, always alike."""
        validate_observation(observation, self.spec.observation, history=1)
        x = torch.cat([torch.as_tensor(observation[key]).flatten(1) for key in self.sizes], 1)
        return Decision(torch.tanh(x @ self.gains.T)[:, None])

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered."""


class LinearFormat(ForeignFormat):
    """A folder with config.json, {"library": "linear-control", "reads": {key: size}, "rate": Hz}, and gains.npz."""

    library = NAME

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether config.json names the library."""
        return checkpoint.description.get("library") == NAME

    def load(self, folder: Path, device: torch.device | str = "cpu", *, weights: bool = True) -> Policy:
        """Return the policy; CheckpointError without its gains."""
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder / WEIGHTS} does not exist.")
        description = Checkpoint.open(folder).description
        gains = np.load(folder / WEIGHTS, allow_pickle=False)["gains"]
        return LinearPolicy(
            torch.tensor(gains, dtype=torch.float32, device=device), description["reads"], description["rate"]
        )
