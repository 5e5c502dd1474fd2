"""Inference engines: compute the actions of a trained policy.

An engine takes a policy and returns an equivalent faster one, or an approximation if requested. The result only acts:
log-probabilities, gradients and checkpoints remain with the original policy.
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
"""Type of an inference engine: a function that returns a policy acting like the given one, computed as `config`
specifies.

The last argument is the block cache used between steps, None for none. Raises ConfigError if the engine does not
support the policy.
"""


@runtime_checkable
class CompilesForRows(Policy, Protocol):
    """A policy whose first call with a number of rows is slow because of compilation."""

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return the numbers of rows that are compiled for when a policy call has at most `most` rows."""
        ...


def reference(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return the policy unchanged; raises ConfigError with caching."""
    if caching is not None:
        raise ConfigError("The reference engine does not support block caching: use engine=lean.")
    return policy


def with_engine(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return `policy` computed by the engine set in config; raises ConfigError if it is not supported.

    For a policy that wraps another one, the engine computes the inner policy.
    """
    engine: Engine = ENGINES.load(config.engine)
    if isinstance(policy, PolicyWrapper):
        inner = with_engine(policy.inner, config, caching)
        result = policy if inner is policy.inner else policy.around(inner)
    else:
        result = engine(policy, config, caching)
    if result is not policy:
        remember_origin(result, origin_of(policy))
    return result
