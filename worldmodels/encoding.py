"""From the real world into the latent that a model without a decoder shows: for policies that act on it.

A policy that learns inside a `DecoderFree` model reads the model's latent. Everything else comes as observations of the
real world: `encoded` turns recorded episodes into episodes that a policy can be pre-trained on, `EncodedPolicy` puts
the model's encoder before a policy, so that it can be evaluated, recorded and served like any other.

Both encode every frame by itself. A model with a memory knows more of an imagined episode than one frame tells; how
much that costs a policy shows when it is evaluated in both.
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
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Decision, Policy, Scores, TensorObservation, Trainable, require_trainable
from robopolicy.core.spec import PolicySpec, validate_observation
from robopolicy.core.steps import DescribesSteps
from robopolicy.core.storage import read_json, write_folder_atomic, write_json
from robopolicy.core.world import Rows
from worldmodels.checkpoint import save_world_model
from worldmodels.protocol import Context, DecoderFree, LearnedModel

ENCODER = "encoder"
"""Where a policy's checkpoint keeps the world model whose latent it reads, and the key of config.json that says so."""

PART = 4096
"""Recorded frames are encoded in parts of so many."""


@torch.no_grad()
def encode(model: DecoderFree, frames: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `model` shows at the start of episodes that begin with `frames`, both key -> [N, *shape].

    The seed of these episodes is 0, so equal frames are encoded alike. Raises SpecError where a field is missing.
    """
    for key in model.reads:
        if key not in frames:
            raise SpecError(f"The model of '{model.spec.name}' reads '{key}', and what is observed lacks it.")
    # One frame of history each, so that a model with a memory encodes every frame as an episode's first.
    arrays = {key: frames[key].cpu().numpy()[:, None] for key in model.reads}
    context = Context(arrays)
    return dict(model.show(model.initial(context, np.zeros(len(context), dtype=np.int64))))


def encoded(model: DecoderFree, episodes: Episodes) -> Episodes:
    """Return `episodes` as `model` shows them: the same actions, rewards and ends, every frame encoded by itself.

    Raises SpecError where the episodes lack a field that the model reads.
    """
    fields = model.spec.observation
    found: dict[str, list[Tensor]] = {key: [] for key in fields}
    # An episode has one frame more than steps. The last one is encoded too: values bootstrap from it.
    for rows in torch.arange(episodes.step_count + len(episodes)).split(PART):
        shown = encode(
            model, {key: episodes.observation[key][rows] for key in model.reads if key in episodes.observation}
        )
        for key, parts in found.items():
            parts.append(shown[key].to(episodes.device))
    observation = {key: torch.cat(parts) for key, parts in found.items()}
    return replace(episodes, observation_fields=fields, observation=observation)


class EncodedPolicy(nn.Module):
    """A policy for the real world, of one that reads what a `DecoderFree` model shows.

    It encodes what it observes and hands it on; where the observation holds what the policy reads already, as it does
    in imagination, it is handed on as it is. It is as trainable as the policy is (`to_trainable`), by what is encoded;
    the encoder stays as it is, and lies in the checkpoint.
    """

    def __init__(self, policy: Policy, model: DecoderFree):
        super().__init__()
        self.policy, self.model = policy, model

    @property
    def spec(self) -> PolicySpec:
        """That of the policy, with the fields that the model reads in place of those that it shows."""
        spec, shown = self.policy.spec, self.model.spec.observation
        others = {key: field for key, field in spec.observation.items() if key not in shown}
        return replace(spec, observation={**self.model.reads, **others})

    @property
    def inner(self) -> Policy:
        """The policy."""
        return self.policy

    @property
    def encoder(self) -> DecoderFree:
        """The model whose latent the policy reads."""
        return self.model

    def around(self, inner: Policy) -> "EncodedPolicy":
        """Return the model's encoder before another policy, which reads the same."""
        return EncodedPolicy(inner, self.model)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy. rows: indices [R] of the episodes to forget, None for all."""
        self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Encode and decide. Raises SpecError where the observation does not fit, NonFiniteError on NaN or infinity."""
        return self.policy.act(self.seen(observation), generator, deterministic=deterministic)

    def seen(self, observation: TensorObservation) -> TensorObservation:
        """Return what the policy reads of observations [N, H, ...]; raises as `act` does."""
        if all(key in observation for key in self.policy.spec.observation):
            return observation
        return {**observation, **self._encoded(observation)}

    def to_trainable(self) -> "EncodedPolicy":
        """Return itself; raises ConfigError where the policy cannot be trained."""
        self.policy = require_trainable(self.policy)
        return self

    @property
    def _learner(self) -> Trainable:
        return cast(Trainable, self.policy)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score the policy's recorded decisions, logp and entropy [N, K]; see `core.policy.ScoredPolicy`."""
        return self._learner.log_prob(self.seen(observation), latents)

    def describe_steps(self) -> Mapping[str, Any]:
        """Return what the policy says of its steps; see `core.steps.DescribesSteps`."""
        return self.policy.describe_steps() if isinstance(self.policy, DescribesSteps) else {}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the policy's terms of the loss, each [N]; see `core.policy.Trainable`."""
        return self._learner.loss({**batch, "observation": self.seen(batch["observation"])}, generator)

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """The policy's: the encoder stays as it is."""
        return self._learner.trainable_parameters()

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare the policy; see `core.policy.Trainable`."""
        self._learner.prepare_finetuning(steps, train_encoder=train_encoder)

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return what the model shows of the newest frames, key -> [N, ...]: features for critics."""
        seen = self.seen(observation)
        return {key: value[:, -1] for key in self.model.spec.observation if isinstance(value := seen[key], Tensor)}

    def save(self, folder: Path) -> None:
        """Write the policy's checkpoint with the encoder inside, atomically."""
        remember_origin(self.policy, origin_of(self) or origin_of(self.policy))

        def fill(inside: Path) -> None:
            self._learner.save(inside)
            save_encoder(self.model, inside)

        write_folder_atomic(folder, fill)

    @torch.no_grad()
    def _encoded(self, observation: TensorObservation) -> dict[str, Tensor]:
        """Return the fields that the model shows of every frame, key -> [B, H, *shape]."""
        validate_observation(observation, self.model.reads, history=self.spec.history)
        frames = {key: value for key in self.model.reads if isinstance(value := observation[key], Tensor)}
        first = next(iter(frames.values()))
        shown = encode(self.model, {key: value.flatten(0, 1) for key, value in frames.items()})
        return {key: value.unflatten(0, first.shape[:2]).to(first.device) for key, value in shown.items()}


def save_encoder(model: DecoderFree, folder: Path) -> None:
    """Put `model` into the policy checkpoint in `folder`, which acts behind it from now on."""
    save_world_model(cast(LearnedModel, model), folder / ENCODER)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), ENCODER: ENCODER})
