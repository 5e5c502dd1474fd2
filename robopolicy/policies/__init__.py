"""Policies: act in worlds and compute log-probabilities of their actions. Submodules are imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robopolicy.policies.configuration import DenoisingPolicyConfig
    from robopolicy.policies.denoising import DenoisingPolicy
    from robopolicy.policies.loading import load_policy
    from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig
    from robopolicy.policies.token.policy import TokenPolicy

__all__ = [
    "DenoisingPolicy",
    "DenoisingPolicyConfig",
    "TokenConfig",
    "TokenPolicy",
    "TokenPolicyConfig",
    "load_policy",
]

_MODULES = {
    "DenoisingPolicy": "denoising",
    "DenoisingPolicyConfig": "configuration",
    "TokenConfig": "token.configuration",
    "TokenPolicy": "token.policy",
    "TokenPolicyConfig": "token.configuration",
    "load_policy": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
