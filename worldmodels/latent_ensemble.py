"""World model of image features: a single-frame encoder, and ensemble dynamics on its features.

The encoder (`worldmodels.frame_encoder`) is trained by reconstructing each frame from its features alone, or by
predicting its features of later frames, and by reading further recorded vectors off them, if there are any and the
model has a readout; rewards do not reach it. The latent consists of the features and the world's vectors,
except simulator-only state (`observation.environment_state`). `EnsembleModel` learns its dynamics, rewards and success
as for any state: an imagined step costs the same as there, and no image is decoded. Policies read the latent and act in
the real world through the encoder (`DecoderFree`). Deviation from models whose latent is trained with the dynamics: the
encoder is trained first and stays fixed when training continues, because policies depend on it.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.regression import Regression
from robopolicy.core.returns import success_bonus
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, Field, WorldSpec
from robopolicy.core.structured import to_plain
from robopolicy.core.vectors import StateVector
from robopolicy.nn.vision import is_vision_folder
from worldmodels.checkpoint import load_world_model
from worldmodels.configuration import LatentEnsembleConfig
from worldmodels.data import (
    StateStructure,
    find_structure,
    no_structure,
    recorded_transitions,
    require_fields,
    structure_in,
)
from worldmodels.encoding import encode_episodes, with_fields
from worldmodels.ensemble import EnsembleModel
from worldmodels.frame_encoder import DrawingEncoding, FrameAutoencoder, Labels, Vision
from worldmodels.frame_encoder import downsample_by_two as downsample_by_two
from worldmodels.goals import only_varying
from worldmodels.images.drawing import FrameDrawing
from worldmodels.images.model import DividedStage, PartStage
from worldmodels.predictive import PredictiveEncoding, feature_rank
from worldmodels.protocol import LATENT, Context, Imagined, Latent
from worldmodels.readout import BEFORE, FIXED, StateReadout
from worldmodels.registry import saved_configuration
from worldmodels.rollouts import RolloutStage

FIRST = "first"
"""Entries of a latent from which frames can be drawn: its first state [B, S] and, by `first/KEY`, first frames."""

DRAWN_STEPS = 20
"""Largest number of imagined steps after which a network that draws frames is trained."""

PART = 512
"""Number of frames encoded at a time."""

COLLAPSED = 2
"""Rank of the features of an encoder that predicts, on held-out data, below which a warning says that it collapsed."""


class LatentEnsembleModel(nn.Module):
    """A `LearnedModel` and `DecoderFree`; create it with `build` or `load_world_model`.

    reads: fields of the world's observation, including images; structure: of the latent's elements, vectors first.
    """

    configuration = LatentEnsembleConfig
    context = 1

    def __init__(
        self,
        config: LatentEnsembleConfig,
        spec: WorldSpec,
        reads: Mapping[str, Field],
        structure: StateStructure,
        success_bonus: float,
        seed: int = 0,
        readout: StateReadout | None = None,
        vision: Vision | None = None,
    ):
        super().__init__()
        self.config = config
        self.reads = dict(reads)
        self.success_bonus = success_bonus
        self.vector = StateVector.learned(self.reads)
        images = {key: field for key, field in self.reads.items() if key.startswith(IMAGE_PREFIX)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.autoencoder = FrameAutoencoder(images, config, vision)
        latent = Field((self.vector.size + self.autoencoder.size,))
        latent_spec = replace(spec, observation={LATENT: latent}, history=1)
        robot = range(self.vector.size)[self.vector.slices.get(STATE, slice(0))]  # vectors lead the latent
        self.ensemble = EnsembleModel(config.ensemble, latent_spec, structure, success_bonus, seed, robot)
        self.readout = readout
        size = latent.size
        self.drawing = FrameDrawing(images, size, seed) if config.drawing_step_ratio else None
        self._seed = seed
        self._learns_encoder = False
        self._encoded: tuple[Episodes, Mapping[str, Tensor], Episodes] | None = None

    @classmethod
    def build(cls, config: LatentEnsembleConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained model of the world of `spec`; if `config` names another model, its encoder is used, and if
        it names a vision model, its features.

        Raises ConfigError when there is no image, the other model reads other fields, or there is no vision model in
        the folder; DataError when the data's fields differ from the world's.
        """
        reads = encoder_fields(spec)
        require_fields(spec, reads, episodes)
        vector = StateVector.of(reads)
        frames = torch.arange(episodes.step_count) + episodes.episode_of_step
        state = vector.pack(episodes.observation)
        state_structure = (
            find_structure(state[frames], state[frames + 1], vector.names) if vector.size else no_structure()
        )
        features = config.features * sum(key.startswith(IMAGE_PREFIX) for key in reads)
        # Nothing is known of the features' structure: behind the vectors, all of them are predicted.
        free_elements = torch.cat([state_structure.free, vector.size + torch.arange(features)])
        structure = replace(state_structure, free=free_elements)
        readout = None
        if config.readout_step_ratio:
            readout = StateReadout.of(vector, spec, episodes, vector.size + features, seed)
        vision, other = None, None
        if config.encoder is not None and is_vision_folder(config.encoder):
            vision = Vision.load(config.encoder)
        elif config.encoder is not None:
            other = load_world_model(config.encoder)
            if not isinstance(other, LatentEnsembleModel):
                raise ConfigError(f"{config.encoder} contains a {type(other).__name__}, which has no image encoder.")
            vision = other.autoencoder.vision_model
        model = cls(config, spec, reads, structure, success_bonus(episodes), seed, readout, vision)
        # Set here and not in the constructor: `restore` must not train the encoder of a finished model again.
        if other is None:
            model._learns_encoder = True
        else:
            model.keep_encoder_of(other)
        return model

    def keep_encoder_of(self, other: "LatentEnsembleModel") -> None:
        """Copy the encoder of another model; raises ConfigError when it reads other fields."""
        weights, other_weights = self.autoencoder.state_dict(), other.autoencoder.state_dict()
        same = weights.keys() == other_weights.keys() and all(
            weights[name].shape == other_weights[name].shape for name in weights
        )
        if other.reads != self.reads or not same:
            raise ConfigError(
                f"The encoder of {self.config.encoder} reads {', '.join(other.reads)} and outputs "
                f"{other.autoencoder.size} features, but this model's encoder reads {', '.join(self.reads)} and "
                f"outputs {self.autoencoder.size}: give both the same cameras, image size and encoder settings."
            )
        self.autoencoder.load_state_dict(other_weights)

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """The encoder is trained first, unless it was copied or is already trained; then, on its latents, the readout,
        if there is one, and the ensemble: on single steps, and through its own predictions; then what draws frames.
        """
        stages: dict[str, tuple[Regression, float]] = {}
        if self._learns_encoder:
            stages["encoder"] = self.encoder_stage(), self.config.encoder_step_ratio
        if self.readout is not None:
            readout = PartStage(self.readout, self.readout_batches, self.readout.loss)
            stages["readout"] = readout, self.config.readout_step_ratio
        stages["ensemble"] = DividedStage(self.ensemble, self.latent_batches, self.ensemble.loss), 1.0
        if ratio := self.config.ensemble.rollout_step_ratio:
            stages["rollouts"] = LatentRollouts(self), ratio
        if self.drawing is not None:  # last, of what the trained ensemble imagines
            drawing = PartStage(self.drawing, self.drawing_batches, self.drawing.losses)
            stages["drawing"] = drawing, self.config.drawing_step_ratio
        return stages

    def encoder_stage(self) -> Regression:
        """Return the stage that trains the encoder, as config.encoder_loss says."""
        config, coder = self.config, self.autoencoder
        labels = None
        if self.readout is not None:
            labels = Labels(self.readout.vector, self.readout.read_elements, coder.size, self._seed)
            labels.to(self.ensemble.state_mean.device)
        if config.encoder_loss == "predict":
            actions = self.spec.action.size
            return PredictiveEncoding(coder, labels, self.vector, actions, config.batch_size, self._seed)
        return DrawingEncoding(coder, labels, config.batch_size)

    def latent_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches for `EnsembleModel.loss` indefinitely; the statistics are replaced by those of the latents."""
        latent_episodes = self.latents(episodes)
        # The statistics of `build` would be those of an untrained encoder's latents.
        self.ensemble.fit_statistics(recorded_transitions(latent_episodes, self.ensemble.state_vector))
        yield from self.ensemble.batches(latent_episodes, generator)

    def readout_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield batches for `StateReadout.loss` indefinitely; the only state is `generator`."""
        assert self.readout is not None
        yield from self.readout.batches(with_fields(self.latents(episodes), episodes, self.readout.fields), generator)

    def drawing_batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield batches for `FrameDrawing.losses` indefinitely: frames [N, height, width, 3] at the beginning and after
        up to DRAWN_STEPS recorded actions, with latents imagined under these; the only state is `generator`.
        """
        latents, device = self.latents(episodes), self.ensemble.state_mean.device
        data = SequenceData(latents)
        draw = {"generator": generator, "device": generator.device}
        while True:
            rows = torch.randint(len(data), (self.config.batch_size,), **draw).cpu()
            steps = int(torch.randint(DRAWN_STEPS + 1, (), **draw))
            cut = data.cut(rows, 0, max(1, steps))
            seeds = torch.randint(2**31, (len(rows),), **draw).cpu().numpy()
            first = self.ensemble.initial(Context({LATENT: cut.frames[LATENT][:, :1].numpy()}), seeds)
            _, outcomes = self.ensemble.generate(first, cut.actions.to(device))
            path = torch.stack([first["state"], *(outcome.observation[LATENT] for outcome in outcomes)], 1)
            ahead = cut.valid.sum(1).clamp_max(steps)
            present = path[torch.arange(len(rows)), ahead.to(device)]
            begin = rows + episodes.episode_of_step[rows]
            batch = {"latents": self._drawn_from(first["state"], present)}
            for key in self.autoencoder.images:
                frames = episodes.observation[key]
                batch |= {f"first/{key}": frames[begin], f"frame/{key}": frames[begin + ahead]}
            yield {name: value.to(device) for name, value in batch.items()}

    def _drawn_from(self, first: Tensor, present: Tensor) -> Tensor:
        """Return standardised latents [B, 2 S] of the first and the present frame, [B, S] each."""
        return torch.cat([self.ensemble.standard("state", each) for each in (first, present)], -1)

    def latents(self, episodes: Episodes) -> Episodes:
        """Return `episodes` with latents as observations; those of the last episodes are kept for the next stage."""
        weights = {name: value.clone() for name, value in self.autoencoder.encoders.state_dict().items()}
        if self._encoded is not None:
            source, encoder, result = self._encoded
            if source is episodes and all(torch.equal(value, encoder[name]) for name, value in weights.items()):
                return result
        result = encode_episodes(self, episodes)
        self._encoded = episodes, weights, result
        return result

    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate the success threshold, the uncertainty quantiles and the choice of reward head on held-out
        episodes.
        """
        self._encoded = None  # training is over
        latents = encode_episodes(self, episodes)
        if self.config.encoder_loss == "predict":
            rank = feature_rank(latents.observation[LATENT][:, self.vector.size :])
            if rank < COLLAPSED:
                warnings.warn(
                    f"The encoder has collapsed: its {self.autoencoder.size} features vary in {rank} directions. Train "
                    "it longer (worldmodel.config.encoder_step_ratio), or set worldmodel.config.encoder_loss=draw.",
                    RobopolicyWarning,
                    stacklevel=2,
                )
        self.ensemble.calibrate(latents)

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with the latent as only observation."""
        return self.ensemble.spec

    @property
    def uncertainty_quantiles(self) -> Tensor:
        """Quantiles of the single-step uncertainty on held-out data, [101]."""
        return self.ensemble.uncertainty_quantiles

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that determine the latents of recorded frames, name -> [...]; see `HasEncoder`."""
        parts = self.autoencoder.state_dict()
        return {name: value for name, value in parts.items() if not name.startswith("decoders.")}

    def description(self) -> dict[str, Any]:
        """Return the inputs that `restore` needs in addition to spec and weights."""
        return {
            # The weights of the encoder are in this checkpoint; the other model may be gone when it is loaded.
            "config": to_plain(replace(self.config, encoder=None)),
            "success_bonus": self.success_bonus,
            "reads": {key: field.to_json() for key, field in self.reads.items()},
            "readable": {}
            if self.readout is None
            else {key: field.to_json() for key, field in self.readout.fields.items()},
            "vision": self.autoencoder.description(),
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Build a model for `weights`, name -> [...], with a trained encoder; see `LearnedModel.restore`."""
        config = saved_configuration(cls.configuration, description)
        reads = {key: Field.from_json(field) for key, field in description["reads"].items()}
        # A checkpoint without the entry is older than readouts.
        fields = {key: Field.from_json(field) for key, field in description.get("readable", {}).items()}
        parts = {
            part: structure_in({name: value for name, value in weights.items() if name.startswith(f"{part}.")})
            for part in ("ensemble", *(("readout",) if fields else ()))
        }
        readout = None
        if fields:
            size = spec.observation[LATENT].size
            readout = StateReadout(StateVector.of(reads), fields, parts["readout"], size)
        vision = Vision.described(description["vision"]) if description.get("vision") else None
        return cls(config, spec, reads, parts["ensemble"], description["success_bonus"], readout=readout, vision=vision)

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the ensemble's latent of the current frames, encoded, for episodes with `seeds` [R]."""
        device = self.ensemble.state_mean.device
        frames = {key: torch.from_numpy(np.ascontiguousarray(context.last(key))) for key in self.autoencoder.images}
        rows = torch.arange(len(context)).split(PART)
        parts = [
            torch.cat(
                [self.autoencoder({key: value[part].to(device) for key, value in frames.items()}) for part in rows]
            )
        ]
        if self.vector.size:
            vectors = self.vector.pack({key: context.last(key) for key in self.vector.keys})
            parts.insert(0, torch.from_numpy(vectors).to(device))
        features = torch.cat(parts, -1)[:, None].cpu().numpy()
        latent = self.ensemble.initial(Context({LATENT: features}), seeds)
        state = latent["state"]
        if self.readout is not None:
            latent |= {BEFORE: state, FIXED: self.readout.fixed_in(state)}
        if self.drawing is not None:
            latent |= {FIRST: state, **{f"{FIRST}/{key}": value.to(device) for key, value in frames.items()}}
        return latent

    def show(self, latent: Latent) -> Mapping[str, Tensor]:
        """Return the latent as the only observation field, [B, S]."""
        return {LATENT: latent["state"]}

    @torch.no_grad()
    def drawn(self, shown: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return images reconstructed from latents, camera's key -> uint8 [B, height, width, 3], decoded at half that
        size.

        See `DecodesLatents`.
        """
        coder = self.autoencoder
        parts = shown[LATENT][:, self.vector.size :].split(self.config.features, -1)
        return {key: coder.drawn(key, part) for key, part in zip(coder.images, parts, strict=True)}

    @property
    def readable(self) -> Mapping[str, Field]:
        """Fields of the imitated world that `read` returns; see `HasReadout`."""
        vectors = self.vector.fields if self.readout is None else self.readout.fields
        images = {} if self.drawing is None else self.drawing.images
        return {**vectors, **images} if self.readout is not None or images else {}

    @torch.no_grad()
    def read(self, latent: Latent, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the fields `keys` of latents, key -> [B, *shape]; see `HasReadout`."""
        state = latent["state"]
        fields: dict[str, Tensor] = dict(self.vector.unpack(state[:, : self.vector.size]))
        if self.readout is not None and not set(keys) <= set(self.reads):
            fields |= self.readout.read(state, latent[BEFORE], latent[FIXED])
        if self.drawing is not None:
            latents = self._drawn_from(latent[FIRST], state)
            for key in set(keys) & set(self.drawing.images):
                fields[key] = self.drawing.draw(key, latent[f"{FIRST}/{key}"], latents)
        return {key: fields[key] for key in keys}

    @property
    def goal_fields(self) -> Mapping[str, Field]:
        """Fields in which a goal may be given: what the encoder reads, and vectors that are read off the latent."""
        return {**self.reads, **({} if self.readout is None else self.readout.fields)}

    @torch.no_grad()
    def goal_targets(self, goal: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return standardised features of pictures and elements of vectors, key -> [G, D]; see `ComparesGoals`."""
        device, targets = self.ensemble.state_mean.device, dict[str, Tensor]()
        for key, value in goal.items():
            if key in self.autoencoder.images:
                values = self.autoencoder.features(key, value.to(device))
            else:
                values = value.flatten(1).float().to(device)
            targets[key] = only_varying(self._standardised(key, values).cpu(), self._deviations(key))
        return targets

    def goal_values(self, latent: Latent, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return standardised features and elements of latents, key -> [B, D]; see `ComparesGoals`."""
        vectors = [key for key in keys if key not in self.autoencoder.images]
        values = {key: value.flatten(1) for key, value in self.read(latent, vectors).items()} if vectors else {}
        for key in set(keys) & set(self.autoencoder.images):
            values[key] = latent["state"][:, self._features_of(key)]
        return {key: self._standardised(key, values[key]) for key in keys}

    def _features_of(self, camera: str) -> slice:
        """Return the place of a camera's features in the latent."""
        first = self.vector.size + self.config.features * self.autoencoder.images.index(camera)
        return slice(first, first + self.config.features)

    def _standardised(self, key: str, value: Tensor) -> Tensor:
        """Return features or elements [B, D] of a field less their mean, in standard deviations of the data."""
        place = self._place(key)
        return (value if place is None else value - self.ensemble.state_mean[place]) / self._deviations(key)

    def _deviations(self, key: str) -> Tensor:
        """Return the standard deviations [D] of the features or elements of a field in the data."""
        place = self._place(key)
        if place is not None:
            return self.ensemble.state_std[place]
        assert self.readout is not None
        return self.readout.deviations[self.readout.vector.slices[key]]

    def _place(self, key: str) -> slice | None:
        """Return the place of a field in the latent, None for one that is read off it."""
        if key in self.vector.fields:
            return self.vector.slices[key]
        return self._features_of(key) if key in self.autoencoder.images else None

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A]; see `EnsembleModel.imagine`."""
        latent, outcomes = self.generate(latent, actions[:, None])
        return latent, outcomes[0]

    def generate(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance every row by T steps with actions [B, T, A]; see `EnsembleModel.generate`."""
        after, outcomes = self.ensemble.generate(latent, actions)
        if self.readout is not None:
            after[BEFORE] = outcomes[-2].observation[LATENT] if len(outcomes) > 1 else latent["state"]
        # What was read or seen once stays.
        return {**after, **{name: value for name, value in latent.items() if name not in after}}, outcomes


class LatentRollouts(RolloutStage):
    """Fits the ensemble of a model of latents through its own predictions."""

    def __init__(self, model: LatentEnsembleModel):
        super().__init__(model.ensemble)
        self._latents = model.latents

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield batches of latents [M, N, T + 1, S], as `RolloutStage.batches` of states."""
        yield from super().batches(self._latents(episodes), generator)


def encoder_fields(spec: WorldSpec) -> dict[str, Field]:
    """Return the fields that the encoder reads: images, and vectors except simulator-only state.

    Raises ConfigError when there is no image.
    """
    reads = {key: field for key, field in spec.observation.items() if key != ENVIRONMENT_STATE}
    if not any(key.startswith(IMAGE_PREFIX) for key in reads):
        raise ConfigError(f"World '{spec.name}' outputs no images: set world.cameras, or use worldmodel.kind=ensemble.")
    return reads


keep_former_names(__name__, {"fields_seen": "encoder_fields", "halved": "downsample_by_two"})
