"""Encoding of real observations into the latent of a model without a decoder, for policies that read the latent.

A policy trained inside a `DecoderFree` model reads the model's latent, but data and robots provide real observations.
`encode_episodes` converts recorded episodes so that such a policy can be pre-trained on them. `EncodedPolicy` puts the
model's encoder before the policy, so that it can be evaluated, recorded and served like any other.

Both encode every frame independently. A recurrent model knows more of an imagined episode than one frame shows;
evaluating the policy with both measures the loss.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import SpecError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import (
    Decision,
    Policy,
    Scores,
    TensorObservation,
    Trainable,
    is_memoryless,
    require_trainable,
)
from robopolicy.core.spec import PolicySpec, validate_observation
from robopolicy.core.steps import DescribesSteps
from robopolicy.core.storage import read_json, write_folder_atomic, write_json
from robopolicy.core.world import Rows
from worldmodels.checkpoint import save_world_model
from worldmodels.protocol import Context, DecoderFree, LearnedModel

ENCODER = "encoder"
"""Folder of the world model in a policy's checkpoint, and the config.json key that marks it."""

PART = 4096
"""Number of recorded frames encoded at a time."""


@torch.no_grad()
def encode(model: DecoderFree, frames: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the latent observations of `model` at the start of episodes whose first frames are `frames`, both key ->
    [N, *shape].

    The seed of these episodes is 0, so equal frames have equal encodings. Raises SpecError when a field is missing.
    """
    for key in model.reads:
        if key not in frames:
            raise SpecError(f"The model of '{model.spec.name}' reads '{key}', which the observation lacks.")
    # One frame of history each, so that a model with a memory encodes every frame as an episode's first.
    arrays = {key: frames[key].cpu().numpy()[:, None] for key in model.reads}
    context = Context(arrays)
    return dict(model.show(model.initial(context, np.zeros(len(context), dtype=np.int64))))


def encode_episodes(model: DecoderFree, episodes: Episodes) -> Episodes:
    """Return `episodes` with the latent observations of `model`: same actions, rewards and ends, every frame encoded
    independently.

    Raises SpecError when the episodes lack a field that the model reads.
    """
    fields = model.spec.observation
    latents: dict[str, list[Tensor]] = {key: [] for key in fields}
    # An episode has one frame more than steps. The last one is encoded too: values bootstrap from it.
    for rows in torch.arange(episodes.step_count + len(episodes)).split(PART):
        encoding = encode(
            model, {key: episodes.observation[key][rows] for key in model.reads if key in episodes.observation}
        )
        for key, parts in latents.items():
            parts.append(encoding[key].to(episodes.device))
    observation = {key: torch.cat(parts) for key, parts in latents.items()}
    return replace(episodes, observation_fields=fields, observation=observation)


def with_fields(encoded: Episodes, recorded: Episodes, keys: Iterable[str]) -> Episodes:
    """Return encoded episodes with the observation fields `keys` of the `recorded` ones added."""
    fields = {key: recorded.observation_fields[key] for key in keys}
    observation = {**encoded.observation, **{key: recorded.observation[key] for key in fields}}
    return replace(encoded, observation_fields={**encoded.observation_fields, **fields}, observation=observation)


class EncodedPolicy(nn.Module):
    """Real-world policy: a `DecoderFree` model's encoder followed by a policy that reads the latent.

    It encodes the observation and passes it on. An observation that already contains the policy's inputs, as in
    imagination, is passed on unchanged. It is trainable if the policy is (`to_trainable`), on encoded inputs; the
    encoder is frozen, and is saved in the checkpoint.
    """

    def __init__(self, policy: Policy, model: DecoderFree):
        super().__init__()
        self.policy, self.model = policy, model

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy, with the fields that the model reads instead of the latent."""
        spec, encoded_fields = self.policy.spec, self.model.spec.observation
        other_fields = {key: field for key, field in spec.observation.items() if key not in encoded_fields}
        return replace(spec, observation={**self.model.reads, **other_fields})

    @property
    def inner(self) -> Policy:
        """The wrapped policy."""
        return self.policy

    @property
    def encoder(self) -> DecoderFree:
        """The model whose latent the policy reads."""
        return self.model

    def around(self, inner: Policy) -> "EncodedPolicy":
        """Put the encoder before another policy with the same inputs."""
        return EncodedPolicy(inner, self.model)

    @property
    def memoryless(self) -> bool:
        """Whether the wrapped policy has no memory, see `is_memoryless`."""
        return is_memoryless(self.policy)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy. rows: indices [R] of the episodes to forget, None for all."""
        self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Encode, then act. Raises SpecError when the observation does not match, NonFiniteError on NaN or infinity."""
        return self.policy.act(self.seen(observation), generator, deterministic=deterministic)

    def seen(self, observation: TensorObservation) -> TensorObservation:
        """Return the policy's inputs for observations [N, H, ...]; raises the errors of `act`."""
        if all(key in observation for key in self.policy.spec.observation):
            return observation
        return {**observation, **self._encoded(observation)}

    def to_trainable(self) -> "EncodedPolicy":
        """Return this policy; raises ConfigError when the inner policy cannot be trained."""
        self.policy = require_trainable(self.policy)
        return self

    @property
    def _learner(self) -> Trainable:
        return cast(Trainable, self.policy)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of the policy's recorded chunks, logp and entropy [N, K]; see
        `core.policy.ScoredPolicy`.
        """
        return self._learner.log_prob(self.seen(observation), latents)

    def describe_steps(self) -> Mapping[str, Any]:
        """Return the policy's step description; see `core.steps.DescribesSteps`."""
        return self.policy.describe_steps() if isinstance(self.policy, DescribesSteps) else {}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the policy's terms of the loss, each [N]; see `core.policy.Trainable`."""
        return self._learner.loss({**batch, "observation": self.seen(batch["observation"])}, generator)

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the policy; the encoder is frozen."""
        return self._learner.trainable_parameters()

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare the policy; see `core.policy.Trainable`."""
        self._learner.prepare_finetuning(steps, train_encoder=train_encoder)

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return the model's latent observation of the newest frames, key -> [N, ...]: features for critics."""
        features = self.seen(observation)
        return {key: value[:, -1] for key in self.model.spec.observation if isinstance(value := features[key], Tensor)}

    def save(self, folder: Path) -> None:
        """Write the policy's checkpoint with the encoder inside, atomically."""
        remember_origin(self.policy, origin_of(self) or origin_of(self.policy))

        def fill(inside: Path) -> None:
            self._learner.save(inside)
            save_encoder(self.model, inside)

        write_folder_atomic(folder, fill)

    @torch.no_grad()
    def _encoded(self, observation: TensorObservation) -> dict[str, Tensor]:
        """Return the latent fields of every frame, key -> [B, H, *shape]."""
        validate_observation(observation, self.model.reads, history=self.spec.history)
        frames = {key: value for key in self.model.reads if isinstance(value := observation[key], Tensor)}
        first = next(iter(frames.values()))
        encoding = encode(self.model, {key: value.flatten(0, 1) for key, value in frames.items()})
        return {key: value.unflatten(0, first.shape[:2]).to(first.device) for key, value in encoding.items()}


def save_encoder(model: DecoderFree, folder: Path) -> None:
    """Save `model` as the encoder of the policy checkpoint in `folder`."""
    save_world_model(cast(LearnedModel, model), folder / ENCODER)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), ENCODER: ENCODER})


keep_former_names(__name__, {"encoded": "encode_episodes"})
