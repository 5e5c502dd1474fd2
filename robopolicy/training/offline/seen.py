"""What a critic of recorded data sees: the vectors of the data, and of images what the policy's encoder makes."""

import copy
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK
from robopolicy.rl.offline.decisions import observed_at
from robopolicy.rl.offline.interface import Features, Interface, recorded_range


@runtime_checkable
class Encodes(Protocol):
    """A policy that can say what its network makes of an observation."""

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return conditions [N, ...] of observations [N, H, ...], by name."""
        ...


def critic_interface(policy: Policy, episodes: Episodes) -> Interface:
    """Return how critics see decisions of `policy` in `episodes`: chunks as long as its own.

    Where the policy has cameras, the frozen features of its encoder, as it is now, are part of the state. Vectors are
    those of the data, also those that the policy does not read: a critic may know more than its policy. Raises
    ConfigError where there are only images and the policy cannot encode them.
    """
    spec = policy.spec
    vectors = {key: field for key, field in episodes.observation_fields.items() if not key.startswith(IMAGE_PREFIX)}
    tasks = tuple(sorted(set(episodes.tasks) | set(spec.instructions)))
    bounds = recorded_range(episodes)
    features, size = _features(policy, episodes) if spec.cameras else (None, 0)
    images = {key: field for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)} if size else {}
    return Interface(
        {**vectors, **images},
        episodes.action_field,
        chunk=spec.chunk,
        instructions=tasks,
        features=features,
        feature_size=size,
        history=spec.history,
        bounds=bounds,
    )


def _features(policy: Policy, episodes: Episodes) -> tuple[Features | None, int]:
    if not isinstance(policy, Encodes):
        if any(not key.startswith(IMAGE_PREFIX) for key in episodes.observation_fields):
            return None, 0
        raise ConfigError(f"{type(policy).__name__} sees images alone and has no encode(): no critic can see them.")
    encoder = copy.deepcopy(policy)

    @torch.no_grad()
    def features(observation: TensorObservation) -> Tensor:
        found = encoder.encode(
            {key: observation[key] for key in (*encoder.spec.observation, TASK) if key in observation}
        )
        return torch.cat([value.flatten(1) for value in found.values()], -1).float()

    probe = observed_at(episodes, episodes.frame_starts[:1], policy.spec.history, list(policy.spec.observation))
    return features, features(probe).shape[1]
