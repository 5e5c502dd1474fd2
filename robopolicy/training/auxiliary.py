"""A lesson beside imitation: what a policy sees must also tell fields that it does not read, a simulator's state, say.

Actions alone teach an encoder of images slowly what lies where, of which nothing but the way the arm takes speaks. With
the state beside them it is told. Source: James, Davison and Johns 2017, arXiv:1707.02267, whose network also puts out
the positions of cube and gripper, each a mean squared error beside that of the action; Levine et al. 2016,
arXiv:1504.00702, begin with that lesson alone. The head is no part of the policy: once trained, it sees and acts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import derive
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.encoders import ObservationEncoder, module_name
from robopolicy.nn.normalizer import Normalizer, fit_normalizers
from robopolicy.training.configuration import PretrainConfig

FIELDS = "fields"
"""Of a batch: what is to be told, key -> [N, *shape]."""
LOSS = "auxiliary"
"""The lesson's name among the losses."""
HIDDEN = 256
"""Units of the head's only hidden layer."""


class FieldHead(nn.Module):
    """Tells fields from what an encoder makes of an observation, each element's range in the data as [-1, 1].

    So what mostly rests and seldom leaps, a speed, counts less than a position. seen: elements of what the encoder
    makes; fields: what is told, by key; weight: of the error beside the policy's own loss; seed: of the weights.
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
        """Take the elements' ranges from `data`, of which all is told; raises NonFiniteError on NaN or infinity."""
        fit_normalizers({key: self._unit(key) for key in self.keys}, data.observation)

    def errors(self, seen: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean squared error [N] of what is told of `seen` [N, S], to fields [N, *shape] by key."""
        wanted = [self._unit(key)(fields[key].float()).flatten(1) for key in self.keys]
        return self.weight * (self.layers(seen) - torch.cat(wanted, -1)).square().mean(-1)

    def _unit(self, key: str) -> Normalizer:
        unit = self.units[module_name(key)]
        assert isinstance(unit, Normalizer)
        return unit


class TellsFields(nn.Module):
    """A policy that learns the lesson beside its own: what `fit` fits in its place (a `core.regression.Regressor`)."""

    def __init__(self, policy: Trainable, head: FieldHead):
        super().__init__()
        self.policy, self.head = policy, head
        self._encoder = (seeing_encoder(policy),)  # a tuple: it is a submodule of the policy already

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the policy's losses [N] of a batch, and what its encoder saw to tell its "fields" wrong."""
        # The encoder's output is caught on its way through the policy's own loss, so the images are encoded once.
        with _outputs(*self._encoder) as seen:
            losses = self.policy.loss(batch, generator)
        return {**losses, LOSS: self.head.errors(seen[0], batch[FIELDS])}


@contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a module makes meanwhile, which so is made only once."""
    made: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        made.append(output)

    handle = module.register_forward_hook(keep)
    try:
        yield made
    finally:
        handle.remove()


def seeing_encoder(policy: Trainable) -> ObservationEncoder:
    """Return the encoder of images that a policy learns; raises ConfigError where it has none of ours."""
    for module in cast(nn.Module, policy).modules():
        if isinstance(module, ObservationEncoder) and any(each.requires_grad for each in module.cameras.parameters()):
            return module
    raise ConfigError(
        f"auxiliary_keys teaches an encoder of images what lies where, and {type(policy).__name__} learns none of "
        "ours: let a diffusion or flow policy read cameras (policy.observation_keys), or leave it []."
    )


def new_head(policy: Trainable, episodes: Episodes, config: PretrainConfig, seed: int) -> FieldHead:
    """Return a head that tells config.auxiliary_keys of episodes like these from what `policy` sees, on its device.

    seed: its weights follow from it. Raises ConfigError where the policy sees nothing or reads a field itself,
    DataError where the episodes have no such vectors or they hold NaN or infinity.
    """
    encoder, fields = seeing_encoder(policy), {}
    vectors = [key for key in episodes.observation if not key.startswith(IMAGE_PREFIX)]
    for key in config.auxiliary_keys:
        if key in policy.spec.observation:
            raise ConfigError(f"The policy reads '{key}' itself: leave it out of auxiliary_keys.")
        if key not in vectors:
            raise DataError(
                f"auxiliary_keys names '{key}', and the data have no such vector.{did_you_mean(key, vectors)} Record "
                "it (the world has to show it), or leave it out."
            )
        fields[key] = episodes.observation_fields[key]
    require_finite_columns(episodes, config.auxiliary_keys)
    head = FieldHead(encoder.dimension, fields, config.auxiliary_weight, derive(seed, "auxiliary head"))
    return head.to(next(policy.parameters()).device)


def with_fields(batches: Iterator[dict[str, Any]], data: Episodes, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield `batches` with the fields `keys` of the steps that their decisions begin at, under "fields"."""
    for batch in batches:
        seen = data.windows(batch["steps"], 1, 1, keys)["observation"]
        yield {**batch, FIELDS: {key: seen[key][:, 0] for key in keys}}
