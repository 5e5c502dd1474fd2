"""Random observations and training batches that match a spec, for dry runs, size estimates and conformance checks."""

from typing import Any, cast

import torch

from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import TASK, PolicySpec


def example_observation(
    spec: PolicySpec, batch: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> TensorObservation:
    """Return a random observation [batch, H, ...] that fits `spec`: floats uniform in each field's range in [-1, 1]."""
    observation: TensorObservation = {TASK: [spec.instructions[row % len(spec.instructions)] for row in range(batch)]}
    for key, field in spec.observation.items():
        shape = (batch, spec.history, *field.shape)
        if field.dtype == "uint8":
            value = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            low = torch.tensor(field.low).expand(field.shape).clamp(-1, 1)
            high = torch.tensor(field.high).expand(field.shape).clamp(-1, 1)
            value = (low + (high - low) * torch.rand(shape, generator=generator)).float()
        observation[key] = value.to(device)
    return observation


def example_batch(
    spec: PolicySpec, observation: TensorObservation, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return a random batch for `loss` with N observations: actions [N, P, A] within the range, the last row padded."""
    count, draws = len(cast(list[str], observation[TASK])), torch.Generator().manual_seed(3)
    bounds = (spec.action.low, spec.action.high)
    low, high = (torch.tensor(bound).clamp(-1, 1).expand(spec.action.shape) for bound in bounds)
    actions = low + (high - low) * torch.rand((count, spec.prediction, *spec.action.shape), generator=draws)
    valid = torch.ones((count, spec.prediction), dtype=torch.bool)
    valid[-1, 1:] = False
    return {"observation": observation, "actions": actions.float().to(device), "action_valid": valid.to(device)}
