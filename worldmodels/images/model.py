"""What models of images share: making, describing and restoring them, and fitting what is read off their frames."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.returns import success_bonus
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import WorldSpec
from worldmodels.data.statistics import read_statistics
from worldmodels.described import Described
from worldmodels.images.configuration import ImageConfig
from worldmodels.images.reader import FrameReader
from worldmodels.protocol import Context, Latent

Batches = Callable[[Episodes, torch.Generator], Iterator[dict[str, Any]]]

Losses = Callable[[Mapping[str, Any], torch.Generator], dict[str, Tensor]]


class ImageModel[Configuration: ImageConfig](Described[Configuration], ABC):
    """A `LearnedModel` whose `reader` reads everything but images off the frames that it imagines.

    Subclasses are made as cls(config, spec, structure, success_bonus, seed); users call `build` or `load_world_model`.
    """

    reader: FrameReader

    @classmethod
    def build(cls, config: Configuration, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return a fresh model of the world of `spec`, its statistics read off `episodes`.

        Raises ConfigError where there is no image or cameras do not fit together, DataError where the data's fields
        are not the world's, NonFiniteError where the data is not finite.
        """
        structure, statistics = read_statistics(spec, episodes)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        model.reader.keep_statistics(statistics)
        return model

    @property
    def spec(self) -> WorldSpec:
        """The world that is imitated, with the reward terms that are predicted."""
        return self.reader.spec

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """Quantiles of the uncertainty of single steps on held-out data, [101]."""
        return self.reader.uncertainty_quantiles

    @property
    @abstractmethod
    def context(self) -> int:
        """Frames of a context that it reads; where there are fewer, the first one is repeated."""

    @abstractmethod
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of episodes with `seeds` [R] that begin in `context`."""

    @abstractmethod
    def _imagine_frames(self, data: SequenceData, steps: Tensor, generator: torch.Generator) -> Tensor:
        """Return frames [n, 3, height, width, 3] around `steps` [n], as many of the last two imagined as it can."""

    @abstractmethod
    def _judge(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the heads of reward and success read of the step with actions [B, A], and the uncertainty [B]."""

    def readout_stage(self) -> "PartStage":
        """Return what is fitted when frames can be imagined: all that is read off them."""
        return PartStage(self.reader.readout, self.readout_batches, self.reader.readout.losses)

    def readout_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield what `FrameReadout.losses` takes for ever; `generator` is all the state."""
        return self.reader.batches(episodes, generator, partial(self._imagine_frames, SequenceData(episodes)))

    def calibrate(self, episodes: Episodes) -> None:
        """Set the threshold of success and the quantiles of the uncertainty on imagined steps of held-out episodes."""
        self.reader.calibrate(episodes, self.context, self.initial, self._judge)


class PartStage(nn.Module):
    """Fits `part` of a model on the batches that `make` yields, by `losses`; a `Regression`."""

    def __init__(self, part: nn.Module, make: Batches, losses: Losses):
        super().__init__()
        self.part = part
        self._make = make
        self._losses = losses

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches for ever."""
        return self._make(episodes, generator)

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of the loss, each [N]."""
        return self._losses(batch, generator)
