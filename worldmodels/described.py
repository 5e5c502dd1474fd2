"""How models describe themselves that are made of a configuration, a world, a structure and a success bonus."""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from robopolicy.core.spec import WorldSpec
from robopolicy.core.structured import to_plain
from worldmodels.data.structure import StateStructure, structure_in
from worldmodels.registry import saved_configuration


class Described[Configuration](nn.Module):
    """A part of a `LearnedModel`: what it is made of is described, and the model made of it again.

    success_bonus: the reward for reaching success. The structure is kept in buffers (`register_structure`), by the
    model itself or one of its parts.
    """

    configuration: type[Configuration]
    config: Configuration

    def __init__(
        self, config: Configuration, spec: WorldSpec, structure: StateStructure, success_bonus: float, seed: int = 0
    ):
        super().__init__()
        self.config, self.success_bonus = config, success_bonus

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs besides spec and weights."""
        return {"config": to_plain(self.config), "success_bonus": self.success_bonus}

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded.

        weights: name -> [...], as `state_dict` gives them; read for the structure alone. Raises as
        `LearnedModel.restore` does.
        """
        config = saved_configuration(cls.configuration, description)
        return cls(config, spec, structure_in(weights), description["success_bonus"])
