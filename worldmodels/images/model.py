"""Common parts of image models: fields, statistics, readout, building, describing and restoring.

An image model imagines the next frame of all cameras. Everything else that a `LearnedModel` must provide (vectors,
reward, success, uncertainty, thresholds, observations) comes from here. The readout is fitted afterwards, on true
frames and on frames imagined by the finished model. Axes: N or B rows, V elements of all vector fields, A action
dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.progress import progress
from robopolicy.core.regression import DividesBatches
from robopolicy.core.returns import PROGRESS, SUCCESS, progress_reward, success_bonus
from robopolicy.core.sequences import SequenceData, Sequences
from robopolicy.core.spec import IMAGE_PREFIX, STATE, WorldSpec
from robopolicy.core.vectors import StateVector
from worldmodels.checkpoint import Described
from worldmodels.configuration import ImageConfig, ReadoutConfig
from worldmodels.data import BOUND, StateStructure, read_statistics, register_structure, structure_of
from worldmodels.heads.latent import THUMBNAIL, CalibratedHeads, LatentSteps
from worldmodels.images.networks import FrameReadout, to_pixels
from worldmodels.initial_states import context_at
from worldmodels.protocol import Context, Imagined, Latent, uniforms_of

CALIBRATION_STEPS = 2000
"""Maximum number of imagined steps used to calibrate thresholds."""

PART = 128
"""Number of rows for which training frames are imagined at a time."""

ImagineFrames = Callable[[Tensor, torch.Generator], Tensor]
"""Steps [n] -> frames [n, 3, height, width, 3] around each: the one before it, the one in which it is taken, and its
result. The last two are imagined if the model can.
"""

Advance = Callable[[Latent, Tensor], tuple[Tensor, Tensor]]
"""Latent and actions [B, A] -> inputs of the reward and success heads for the step, and the uncertainty [B]."""


class FrameReader(CalibratedHeads):
    """Fields, statistics and readout of an image model.

    spec: the imitated world; images: its cameras' fields by key; state_vector: its vector fields; size: height and
    width of a frame, all cameras stacked in height. Raises ConfigError when there is no image, or cameras differ in
    width.
    """

    def __init__(
        self,
        config: ReadoutConfig,
        spec: WorldSpec,
        structure: StateStructure,
        success_bonus: float,
        *,
        depth: int,
        hidden: int,
        success_head: str = "contrastive",
    ):
        super().__init__()
        self.config, self.success_bonus = config, success_bonus
        self.spec = replace(spec, rewards=(PROGRESS, SUCCESS), history=1)
        self.images = {key: item for key, item in spec.observation.items() if key.startswith(IMAGE_PREFIX)}
        self.state_vector = StateVector.learned(spec)
        self.size = stacked_size(spec)
        register_structure(self, structure)
        elements, actions = self.state_vector.size, spec.action.size
        sizes = {"elements": elements, "actions": actions, "free": len(structure.free)}
        shape = {"depth": depth, "hidden": hidden, "members": config.members}
        self.readout = FrameReadout(*self.size, **shape, **sizes, success_head=success_head)
        self.register_statistics(state=elements, action=actions, change=elements, reward=1)
        self.register_thresholds()

    def keep_statistics(self, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Store means and deviations by name, see `read_statistics`.

        Each is [V] for "state" and "change", [A] for "action", [1] for "reward", in the data's units.
        """
        super().keep_statistics(statistics)
        self.keep_scales(self.readout.heads)

    @property
    def structure(self) -> StateStructure:
        """Structure of the state's elements."""
        return structure_of(self)

    @property
    def pose_size(self) -> int:
        """Number of elements of a pose, at least one."""
        fields = self.state_vector.fields
        return fields[STATE].size if STATE in fields else 1

    def poses(self, states: Tensor) -> Tensor:
        """Return the robot state `observation.state` of states [..., V], standardised, [..., P]; a single zero when the
        world has none.
        """
        place = self.state_vector.slices.get(STATE)
        if place is None:
            return states.new_zeros(*states.shape[:-1], 1)
        return self.standard("state", states)[..., place]

    def batches(
        self, episodes: Episodes, generator: torch.Generator, imagine: ImagineFrames
    ) -> Iterator[dict[str, Any]]:
        """Yield batches for `FrameReadout.losses` indefinitely; the only state is `generator`.

        A fraction of the steps are successful, and a fraction contains frames imagined by `imagine`.
        """
        data, config = SequenceData(episodes), self.config
        assert episodes.step_success is not None
        successes = episodes.step_success.nonzero()[:, 0]
        imagined_rows, frames = self._imagine_frames(len(data), successes, imagine)
        imagined_won = episodes.step_success[imagined_rows].nonzero()[:, 0]
        count = config.batch_size
        imagined_steps = round(config.imagined_fraction * count)
        while True:
            size = count, 1 + len(self.structure.free)
            draws = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64).cpu()
            # Uniform times normal: errors of every size occur, none among them, so that the readout learns to trust a
            # good state and to mend a bad one. Column 0 of the uniforms chooses the step.
            noise = torch.randn(size, generator=generator, device=generator.device).cpu()[:, 1:]
            indices = choose_rows(draws[:imagined_steps, 0], len(imagined_rows), imagined_won, config.positive_fraction)
            recorded_indices = choose_rows(draws[imagined_steps:, 0], len(data), successes, config.positive_fraction)
            sequences = data.cut(torch.cat([imagined_rows[indices], recorded_indices]), 1, 1)
            stacked = self.stack(sequences.frames)
            stacked[:imagined_steps] = frames[indices]
            yield self._batch(sequences, stacked, draws[:, 1:].float() * noise)

    def _batch(self, cut: Sequences, seen: Tensor, noise: Tensor) -> dict[str, Any]:
        """Return a batch of the steps in `cut`, with frames `seen` [N, 3, ...] and states perturbed by `noise` [N,
        free].
        """
        device = self.state_mean.device
        state, after = self.vector(cut.frames, 1).to(device), self.vector(cut.frames, 2).to(device)
        noisy_state, free = self.perturbed(state, noise), self.structure.free
        seen = seen.to(device)
        coarse = functional.adaptive_avg_pool2d(to_pixels(seen[:, 2]), THUMBNAIL).flatten(1)
        change = ((after - state) / self.change_std)[:, free].clamp(-BOUND, BOUND)
        # Summaries are made in `FrameReadout.losses`, where the encoder receives gradients.
        empty = torch.zeros(len(state), 0, device=device)
        steps = LatentSteps(
            empty,
            empty,
            self.standard("state", state),
            self.standard("state", after),
            self.standard("action", cut.actions[:, -1].to(device)),
            torch.cat([change, coarse], -1),
            self.standard_reward(cut.reward[:, -1].to(device)),
            cut.success[:, -1].to(device),
        )
        # From the state as given, errors included, to the true one: the change head learns to remove the errors.
        mending = ((after - noisy_state) / self.change_std)[:, free].clamp(-BOUND, BOUND)
        return {"frames": seen, "steps": steps, "given": self.standard("state", noisy_state), "mending": mending}

    def perturbed(self, states: Tensor, noise: Tensor) -> Tensor:
        """Perturb `states` [..., V] like the drift of a model: free elements change by `noise` [..., free] times the
        deviation of a step's change; derived elements are recomputed.
        """
        states, free = states.clone(), self.structure.free
        states[..., free] += noise.to(states.device) * self.change_std[free]
        return self.structure.complete(states)

    @torch.no_grad()
    def _imagine_frames(self, count: int, won: Tensor, imagine: ImagineFrames) -> tuple[Tensor, Tensor]:
        """Return steps [D] and the frames [D, 3, height, width, 3] around them, imagined as far as possible."""
        # Its own generator with a fixed seed: a resumed stage imagines the same frames again.
        generator = torch.Generator().manual_seed(0)
        draws = torch.rand(self.config.imagined_steps, generator=generator, dtype=torch.float64)
        steps, parts = choose_rows(draws, count, won, self.config.positive_fraction), []
        with progress("Imagining frames for the readout", len(steps)) as advance:
            for part in steps.split(PART):
                parts.append(imagine(part, generator).cpu())
                advance(len(part))
        return steps, torch.cat(parts)

    @torch.no_grad()
    def calibrate(
        self,
        episodes: Episodes,
        history: int,
        initial: Callable[[Context, np.ndarray], Latent],
        advance: Advance,
    ) -> None:
        """Calibrate the success threshold, the uncertainty quantiles and the choice of reward head on imagined steps of
        held-out episodes.

        history: frames of a context; initial: contexts of n rows and seeds [n] -> their latent; advance: see `Advance`,
        called with actions [n, A] in the world's units. Raises DataError when rewards or final frames are missing.
        """
        order = torch.randperm(episodes.step_count, generator=torch.Generator().manual_seed(0))
        steps = order[:CALIBRATION_STEPS].sort().values
        input_parts = []
        uncertainties = []
        assert episodes.step_success is not None
        for part in steps.split(PART):
            # Seeded by the step's index, so that the calibration does not depend on how steps are cut into parts.
            latent = initial(context_at(episodes, part, history), part.numpy())
            inputs, uncertainty = advance(latent, episodes.actions[part].to(self.state_mean.device))
            input_parts.append(inputs)
            uncertainties.append(uncertainty)
        inputs, success = torch.cat(input_parts), episodes.step_success[steps]
        reward = self.standard_reward(progress_reward(episodes)[steps].to(inputs.device))
        self.set_thresholds(self.readout.heads, inputs, reward, success, torch.cat(uncertainties))

    def begin(self, context: Context, past: int) -> tuple[dict[str, Tensor], Tensor, int]:
        """Return the last `past` frames of a context, key -> [R, past, *shape], the actions between them [R, past - 1,
        A] in the world's units, and the number of frames that are known.

        Missing frames repeat the first one, with zero actions.
        """
        context = context.connected()
        arrays = {key: np.ascontiguousarray(context.observation[key][:, -past:]) for key in self.spec.observation}
        frames = {key: torch.from_numpy(value) for key, value in arrays.items()}
        rows, count = next(iter(frames.values())).shape[:2]
        actions = torch.zeros(rows, past - 1, self.spec.action.size)
        if count > 1:
            between = np.asarray(context.actions, dtype=np.float32)[:, 1 - count :]
            actions[:, past - count :] = torch.from_numpy(between)
        first = torch.arange(count - past, count).clamp_min(0)
        return {key: value[:, first] for key, value in frames.items()}, actions, count

    def noise(self, latent: Latent, shape: tuple[int, ...]) -> Tensor:
        """Return standard normal noise [B, *shape], which depends only on each row's seed and step."""
        draws = torch.from_numpy(uniforms_of(latent, int(np.prod(shape))).astype(np.float32))
        # ndtri inverts the normal cumulative distribution; it is infinite at 0 and 1.
        return torch.special.ndtri(draws.to(self.state_mean.device).clamp(1e-6, 1 - 1e-6)).reshape(-1, *shape)

    def read(self, frames: Tensor, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states [B, V], the inputs of the reward and success heads, and the uncertainty [B].

        frames: [B, 3, height, width, 3], the last one is new; state: [B, V] before the step; action: [B, A]. Both are
        in the world's units.
        """
        readout = self.readout
        standard_state = self.standard("state", state)
        standard_action = self.standard("action", action)
        past = readout.summary(frames[:, 0], frames[:, 1])
        # Uncertainty is of what the action will do, so it reads the frames before it; reward and success read the pair
        # that ends with the new frame.
        summary = readout.summary(frames[:, 1], frames[:, 2])
        after = state.clone()
        free = self.structure.free
        structure = self.structure
        after[:, free] += readout.changes(summary, standard_state, standard_action) * self.change_std[free]
        after = structure.complete(after)
        inputs = readout.heads.inputs(summary, standard_state, self.standard("state", after))
        return after, inputs, readout.heads.disagreement(past, standard_state, standard_action)

    def imagined(self, frame: Tensor, after: Tensor, inputs: Tensor, uncertainty: Tensor) -> Imagined:
        """Build one imagined step; success terminates the episode if the spec ends episodes at success.

        frame: uint8 [B, height, width, 3], all cameras stacked in height; after: [B, V], in the world's units; inputs,
        uncertainty: outputs of `read`, [B, F + 2 V] and [B]. Rewards are returned in the world's units.
        """
        return self.judged(self.readout.heads, inputs, self._observation(after, frame), uncertainty)

    def stack(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Stack the cameras' frames, key -> [N, T, *shape], in height into one."""
        return torch.cat([frames[key] for key in self.images], -3)

    def vector(self, frames: Mapping[str, Tensor], index: int | slice) -> Tensor:
        """Return the state vectors [N, ..., V] of frames `index`, given key -> [N, T, *shape]."""
        return self.state_vector.pack({key: value[:, index] for key, value in frames.items()})

    def _observation(self, state: Tensor, frame: Tensor) -> dict[str, Tensor]:
        """Return the observations of states [B, V] and stacked frames, key -> [B, *shape]."""
        views = frame.split([field.shape[0] for field in self.images.values()], -3)
        observation = {**self.state_vector.unpack(state), **dict(zip(self.images, views, strict=True))}
        return {key: observation[key] for key in self.spec.observation}


def choose_rows(draws: Tensor, count: int, won: Tensor, share: float) -> Tensor:
    """Return indices [N] below `count` from uniforms [N]; the first fraction `share` of them point to successes `won`
    [W], if there are any.
    """
    index = (draws * count).long()
    successes = round(share * len(draws)) if len(won) else 0
    index[:successes] = won[(draws[:successes] * len(won)).long()]
    return index


def stacked_size(spec: WorldSpec) -> tuple[int, int]:
    """Return height and width of all cameras' frames stacked vertically.

    Raises ConfigError when the world has no images, or its cameras differ in width.
    """
    shapes = [field.shape for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)]
    if not shapes:
        raise ConfigError(f"World '{spec.name}' outputs no images: set world.cameras, or use worldmodel.kind=ensemble.")
    if len({shape[1] for shape in shapes}) > 1:
        raise ConfigError(
            f"Cameras are stacked vertically, so they need the same width, but have {shapes}: record with one "
            "world.image_size, or train on one of them, world.cameras=[NAME]."
        )
    return sum(shape[0] for shape in shapes), shapes[0][1]


Batches = Callable[[Episodes, torch.Generator], Iterator[dict[str, Any]]]

Losses = Callable[[Mapping[str, Any], torch.Generator], dict[str, Tensor]]


class ImageModel[Configuration: ImageConfig](Described[Configuration], ABC):
    """A `LearnedModel` whose `reader` predicts everything except images from the imagined frames.

    Subclasses are constructed as cls(config, spec, structure, success_bonus, seed); users call `build` or
    `load_world_model`.
    """

    reader: FrameReader

    @classmethod
    def build(cls, config: Configuration, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained model of the world of `spec`, with statistics from `episodes`.

        Raises ConfigError when there is no image or the cameras are incompatible, DataError when the data's fields
        differ from the world's, NonFiniteError when the data is not finite.
        """
        structure, statistics = read_statistics(spec, episodes)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        model.reader.keep_statistics(statistics)
        return model

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with the predicted reward terms."""
        return self.reader.spec

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """Quantiles of the single-step uncertainty on held-out data, [101]."""
        return self.reader.uncertainty_quantiles

    @property
    @abstractmethod
    def context(self) -> int:
        """Number of context frames that the model reads; when there are fewer, the first one is repeated."""

    @abstractmethod
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of episodes with `seeds` [R] that start in `context`."""

    @abstractmethod
    def _imagine_frames(self, data: SequenceData, steps: Tensor, generator: torch.Generator) -> Tensor:
        """Return frames [n, 3, height, width, 3] around `steps` [n], with the last two imagined as far as possible."""

    @abstractmethod
    def _judge(self, latent: Latent, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reward and success heads' inputs for the step with actions [B, A], and the uncertainty [B]."""

    def readout_stage(self) -> "PartStage":
        """Return the stage that fits the readout, after frames can be imagined."""
        return PartStage(self.reader.readout, self.readout_batches, self.reader.readout.losses)

    def readout_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches for `FrameReadout.losses` indefinitely; the only state is `generator`."""
        return self.reader.batches(episodes, generator, partial(self._imagine_frames, SequenceData(episodes)))

    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate the success threshold and the uncertainty quantiles on imagined steps of held-out episodes."""
        self.reader.calibrate(episodes, self.context, self.initial, self._judge)


class PartStage(nn.Module):
    """Fits `part` of a model on the batches of `make`, with the loss `losses`; a `Regression`."""

    def __init__(self, part: nn.Module, make: Batches, losses: Losses):
        super().__init__()
        self.part = part
        self._make = make
        self._losses = losses

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield training batches indefinitely."""
        return self._make(episodes, generator)

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the loss terms, each [N]."""
        return self._losses(batch, generator)


class DividedStage(PartStage):
    """Stage of a part that divides batches among data-parallel processes itself; see `DividesBatches`."""

    def rows(self, batch: Any) -> int:
        """Return the number of rows of a batch."""
        return cast(DividesBatches, self.part).rows(batch)

    def divided(self, batch: Any, own: slice) -> Any:
        """Return the rows `own` of a batch."""
        return cast(DividesBatches, self.part).divided(batch, own)


keep_former_names(__name__, {"choose": "choose_rows"})
