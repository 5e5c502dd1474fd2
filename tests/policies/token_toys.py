"""A tiny token policy that is made from scratch, and what it observes."""

from typing import Any

import torch

from robopolicy.core.spec import Field
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig

STATE = "observation.state"
FIELDS = {STATE: Field((3,))}
ACTION = Field((2,), low=-1.0, high=1.0)
TEXTS = ("push the red cube", "push the blue cube to the left", "stop")
TOKEN = TokenConfig(width=32, depth=2, heads=2, feed_forward=64, bins=5)


def make_tokens(token: TokenConfig, chunk: int = 3) -> TokenPolicy:
    config = TokenPolicyConfig(chunk=chunk, token=token)
    values = {STATE: torch.tensor([[-1.0] * 3, [1.0] * 3]), "action": torch.tensor([[-1.0] * 2, [1.0] * 2])}
    return TokenPolicy(config, FIELDS, ACTION, fps=10, instructions=TEXTS, values=values)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(rows: int = 7) -> dict[str, Any]:
    return {STATE: torch.randn(rows, 1, 3, generator=generator(3)), "task": [TEXTS[row % 3] for row in range(rows)]}


def disturb(policy: TokenPolicy) -> TokenPolicy:
    """Make the distributions uneven and dependent on everything."""
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.08 * torch.randn(weight.shape, generator=generator(5)))
    return policy
