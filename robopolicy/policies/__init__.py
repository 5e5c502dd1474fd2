"""Policies: they act in worlds and score their own decisions."""

from robopolicy.policies.checkpoint import load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy, build_policy

__all__ = ["DenoisingPolicy", "DenoisingPolicyConfig", "build_policy", "load_policy"]
