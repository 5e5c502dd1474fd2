"""Auxiliary loss: predict privileged state (fields that the policy does not read) from image features.

The action loss alone trains an image encoder slowly to localise objects; predicting the state supervises it directly.
Sources: James, Davison and Johns 2017, arXiv:1707.02267, whose network also predicts cube and gripper positions, each
with a mean squared error added to the action loss; Levine et al. 2016, arXiv:1504.00702, pre-train with this loss
alone. The head is not part of the policy: a trained policy runs without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import derive_seed
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.encoders import ObservationEncoder, module_name
from robopolicy.nn.normalizer import Normalizer, fit_normalizers
from robopolicy.training.configuration import PretrainConfig

FIELDS = "fields"
"""Batch key of the fields to predict, key -> [N, *shape]."""
LOSS = "auxiliary"
"""Name of the auxiliary loss among the losses."""
HIDDEN = 256
"""Units of the head's only hidden layer."""


class FieldHead(nn.Module):
    """Head that predicts fields from encoder features; every element is scaled to [-1, 1] by its range in the data.

    This scaling gives elements that rarely change, such as speeds, less weight than positions. seen: number of encoder
    features; fields: fields to predict, by key; weight: weight of this loss relative to the policy's own; seed: seed of
    the initial weights.
    """

    def __init__(self, seen: int, fields: Mapping[str, Field], weight: float, seed: int):
        super().__init__()
        self.weight, self.keys = weight, tuple(fields)
        self.units = nn.ModuleDict({module_name(key): Normalizer(field.shape) for key, field in fields.items()})
        with torch.random.fork_rng(devices=[]):
            # The head's weights must not move the draws of the policy, which learns the same with and without it.
            torch.manual_seed(seed)
            size = sum(field.size for field in fields.values())
            self.layers = nn.Sequential(nn.Linear(seen, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, size))

    def fit_units(self, data: Episodes) -> None:
        """Fit the elements' ranges to `data`, which must have all fields; raises NonFiniteError on NaN or infinity."""
        fit_normalizers({key: self._unit(key) for key in self.keys}, data.observation)

    def errors(self, seen: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean squared error [N] between predictions from features `seen` [N, S] and fields [N,
        *shape] by key.
        """
        targets = [self._unit(key)(fields[key].float()).flatten(1) for key in self.keys]
        return self.weight * (self.layers(seen) - torch.cat(targets, -1)).square().mean(-1)

    def _unit(self, key: str) -> Normalizer:
        unit = self.units[module_name(key)]
        assert isinstance(unit, Normalizer)
        return unit


class WithStatePrediction(nn.Module):
    """Policy with the auxiliary loss added, which `fit` trains in its place (a `core.regression.Regressor`)."""

    def __init__(self, policy: Trainable, head: FieldHead):
        super().__init__()
        self.policy, self.head = policy, head
        self._encoder = (trainable_image_encoder(policy),)  # a tuple: it is a submodule of the policy already

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the policy's losses [N] of a batch, plus the error of "fields" predicted from its features."""
        # The encoder's output is caught on its way through the policy's own loss, so the images are encoded once.
        with _outputs(*self._encoder) as outputs:
            losses = self.policy.loss(batch, generator)
        return {**losses, LOSS: self.head.errors(outputs[0], batch[FIELDS])}


@contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Capture a module's outputs with a forward hook, so that they are computed only once."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        outputs.append(output)

    handle = module.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def trainable_image_encoder(policy: Trainable) -> ObservationEncoder:
    """Return the policy's trainable image encoder; raises ConfigError when it has no built-in one."""
    for module in cast(nn.Module, policy).modules():
        if isinstance(module, ObservationEncoder) and any(each.requires_grad for each in module.cameras.parameters()):
            return module
    raise ConfigError(
        f"auxiliary_keys supervises a trainable image encoder, and {type(policy).__name__} has no built-in one: use "
        "a diffusion or flow policy that reads cameras (policy.observation_keys), or set auxiliary_keys=[]."
    )


def build_state_head(policy: Trainable, episodes: Episodes, config: PretrainConfig, seed: int) -> FieldHead:
    """Build a head that predicts config.auxiliary_keys from the image features of `policy`, on the policy's device.

    seed: seed of its initial weights. Raises ConfigError when the policy reads no images or reads a field itself,
    DataError when the episodes lack such a vector or it contains NaN or infinity.
    """
    encoder, fields = trainable_image_encoder(policy), {}
    vectors = [key for key in episodes.observation if not key.startswith(IMAGE_PREFIX)]
    for key in config.auxiliary_keys:
        if key in policy.spec.observation:
            raise ConfigError(f"The policy already reads '{key}': remove it from auxiliary_keys.")
        if key not in vectors:
            raise DataError(
                f"auxiliary_keys contains '{key}', which is not a vector in the data.{did_you_mean(key, vectors)} "
                "Record it (the world must output it), or remove it from auxiliary_keys."
            )
        fields[key] = episodes.observation_fields[key]
    require_finite_columns(episodes, config.auxiliary_keys)
    head = FieldHead(encoder.dimension, fields, config.auxiliary_weight, derive_seed(seed, "auxiliary head"))
    return head.to(next(policy.parameters()).device)


def with_fields(batches: Iterator[dict[str, Any]], data: Episodes, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield `batches` with the fields `keys` at the first step of each action chunk added under "fields"."""
    for batch in batches:
        observation = data.windows(batch["steps"], 1, 1, keys)["observation"]
        yield {**batch, FIELDS: {key: observation[key][:, 0] for key in keys}}


keep_former_names(
    __name__,
    {"TellsFields": "WithStatePrediction", "seeing_encoder": "trainable_image_encoder", "new_head": "build_state_head"},
)
