"""Policies: they act in worlds and score their own decisions."""

from robopolicy.policies.checkpoint import load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy, build_policy
from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy, build_token_policy

__all__ = [
    "DenoisingPolicy",
    "DenoisingPolicyConfig",
    "TokenConfig",
    "TokenPolicy",
    "TokenPolicyConfig",
    "build_policy",
    "build_token_policy",
    "load_policy",
]
