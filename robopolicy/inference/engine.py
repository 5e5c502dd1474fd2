"""Engines: who computes the decisions of a trained policy.

An engine takes a policy and returns one that decides the same faster, or approximately so where it is told to. What it
returns acts and nothing else: scores, gradients and checkpoints stay with the policy that it was made of.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Policy, PolicyWrapper
from robopolicy.core.registry import Registry
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.nn.branches import Caching

ENGINES = Registry(
    "engine",
    "robopolicy.engines",
    {
        "reference": "robopolicy.inference.engine:reference",
        "lean": "robopolicy.inference.lean:lean",
        "compiled": "robopolicy.inference.compiled:compiled",
    },
)


type Engine = Callable[[Policy, InferenceConfig, Caching | None], Policy]
"""What an engine's name stands for: returns a policy that decides as the given one does, in the way that config names.

The last argument is who remembers its blocks from step to step, None for nobody. Raises ConfigError where it cannot.
"""


@runtime_checkable
class CompilesForRows(Policy, Protocol):
    """A policy whose first decision for a number of rows takes long, because code is made for it."""

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return for which numbers of rows code is made where at most so many decide together."""
        ...


def reference(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return the policy as it is; raises ConfigError with caching."""
    if caching is not None:
        raise ConfigError("The reference engine remembers nothing: block caching needs engine=lean.")
    return policy


def with_engine(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return `policy`, computed by the engine that config names; raises ConfigError where it cannot be.

    Of a policy that decides by means of another one, the other is computed so.
    """
    engine: Engine = ENGINES.load(config.engine)
    if isinstance(policy, PolicyWrapper):
        inner = with_engine(policy.inner, config, caching)
        made = policy if inner is policy.inner else policy.around(inner)
    else:
        made = engine(policy, config, caching)
    if made is not policy:
        remember_origin(made, origin_of(policy))
    return made
