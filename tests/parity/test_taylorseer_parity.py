"""Extrapolated blocks against diffusers' TaylorSeer."""

from typing import Any

import pytest
import torch
from diffusers.hooks.taylorseer_cache import TaylorSeerState

from robopolicy.inference.caching import CachePlan

pytestmark = pytest.mark.long


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_blocks_are_extrapolated_as_diffusers_does(order: int):
    draws = torch.Generator().manual_seed(order)
    updates = (True, *(torch.rand(11, generator=draws) < 0.4).tolist())
    outputs = torch.randn(12, 2, 3, generator=draws)
    memory = CachePlan(("a",), (updates,), order=order).begin()
    state: Any = TaylorSeerState(torch.float32, order)
    for step, now in enumerate(updates):
        state.current_step = step
        prediction = memory.at(step)(0, lambda step=step: outputs[step])
        if now:
            state.update((outputs[step],))
        torch.testing.assert_close(prediction, outputs[step] if now else state.predict()[0])
