"""Features and processors of a LeRobot policy under robopolicy's names, and its settings file.

A file `robopolicy.json` next to config.json stores information that LeRobot's format lacks: `LeRobotSettings`, by name.
Trainable policies (`training`) and acting ones (`acting`) both read observations through this module. Axes: B row, H
history frame, C chunk step, A action dimension.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from robopolicy.core.errors import CheckpointError, ConfigError, SpecError, did_you_mean, in_one_line
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import (
    IMAGE_PREFIX,
    TASK,
    Field,
    PolicySpec,
    WorldSpec,
    camera_key,
    validate_observation,
)
from robopolicy.core.storage import read_errors, read_json
from robopolicy.core.structured import from_plain
from robopolicy.policies.foreign import SETTINGS_FILE
from robopolicy.policies.lerobot.checks import PROCESSORS
from robopolicy.policies.lerobot.configuration import LeRobotSettings, LeRobotTuning
from robopolicy.policies.training_ranges import DEVIATIONS, Ranges

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

ACTING = ("act", "diffusion", "multi_task_dit", "smolvla", "pi0", "pi05", "pi0_fast", "xvla")
CHUNK_KEYS = {**dict.fromkeys(ACTING, "n_action_steps"), "vqbet": "action_chunk_size"}
"""LeRobot `type` -> setting of the number of steps executed between two predictions."""

HORIZONS = ("diffusion", "multi_task_dit")
"""Types whose predictions start in the past: `horizon` steps, starting at the oldest frame."""

PADS = ("smolvla", "pi0", "pi05")
"""Types with padded action and state sizes from their config, independent of the robot."""
EMBODIMENT = "domain_id"
"""Processor entry in addition to the observation: robot or dataset id of a multi-embodiment policy."""
EMPTY_CAMERA = ".empty_camera_"
"""Part of the names of placeholder features that LeRobot adds for missing cameras and fills itself."""


def read_settings(folder: Path) -> LeRobotSettings:
    """Read robopolicy.json in `folder`, defaults if it is missing; raises ConfigError for unknown keys."""
    path = folder / SETTINGS_FILE
    return from_plain(LeRobotSettings, read_json(path) if os.path.lexists(path) else {}, SETTINGS_FILE)


class LeRobotReader:
    """A LeRobot policy with its processors: inputs and outputs under robopolicy's names and types."""

    def __init__(
        self,
        policy: "PreTrainedPolicy",
        preprocess: "PolicyProcessorPipeline",
        postprocess: "PolicyProcessorPipeline",
        settings: LeRobotSettings | None = None,
        folder: Path | None = None,
    ):
        self.folder = folder
        self.policy = policy
        self.preprocess = preprocess
        self.postprocess = postprocess
        self.settings = LeRobotSettings() if settings is None else settings
        config: Any = policy.config
        self._features = {name: each for name, each in config.input_features.items() if EMPTY_CAMERA not in name}
        self._check_settings()
        # What a processor renames stands in the data, and so in the world, under its old name.
        old_names = {new: old for step in preprocess.steps for old, new in getattr(step, "rename_map", {}).items()}
        self._sources = {name: old_names.get(name, name) for name in self._features}
        self._keys = {name: self._key(name, source) for name, source in self._sources.items()}
        _require_room(config)
        chunk = int(getattr(config, CHUNK_KEYS[config.type]))
        self._spec = PolicySpec(
            observation={self._keys[name]: self._field(name) for name in self._features},
            action=self._vector("action", tuple(config.action_feature.shape)),
            history=config.n_obs_steps,
            chunk=chunk,
            prediction=_predicted_steps(config, chunk),
            scored_steps=0,
            fps=self.settings.fps,
            instructions=self.settings.instructions,
        )

    @property
    def spec(self) -> PolicySpec:
        """Inputs, by robopolicy key, and outputs; it has no log-probabilities."""
        return self._spec

    def key_of(self, feature: str) -> str:
        """Return the observation key of a LeRobot feature; its own name if the policy does not read it."""
        return self._keys.get(feature, feature)

    def known_ranges(self) -> Ranges:
        """Return the ranges in the processors' statistics: minimum and maximum [N], else quantiles, else mean and
        deviation.

        See `known.ShowsRanges`.
        """
        ranges: Ranges = {}
        for step in self.preprocess.steps:
            stats: dict[str, dict[str, Any]] = getattr(step, "stats", None) or {}
            for name, of in stats.items():
                statistics = {each: torch.as_tensor(value).double().cpu().numpy() for each, value in of.items()}
                if "mean" in statistics and "std" in statistics:
                    reach = DEVIATIONS * statistics["std"]
                    statistics |= {"below": statistics["mean"] - reach, "above": statistics["mean"] + reach}
                for lowest, greatest in (("min", "max"), ("q01", "q99"), ("below", "above")):
                    if lowest in statistics and greatest in statistics:
                        ranges[self.key_of(name)] = statistics[lowest], statistics[greatest]
                        break
        return ranges

    @property
    def device(self) -> torch.device:
        """Device of the policy's weights."""
        return next(self.policy.parameters()).device

    def frames(self, observation: TensorObservation) -> list[dict[str, Any]]:
        """Return the history after LeRobot's preprocessor: normalised, key -> [B, ...], oldest first.

        Raises SpecError or NonFiniteError as `validate_observation`.
        """
        self._require(observation)
        return [self._prepared(observation, index) for index in range(self.spec.history)]

    def tuned_by(self, tuning: LeRobotTuning) -> Self:
        """Return this policy with other exploration and training settings; raises ConfigError as on construction."""
        return self._set(replace(self.settings, tuning=tuning))

    def _set(self, settings: LeRobotSettings) -> Self:
        reader = type(self)(self.policy, self.preprocess, self.postprocess, settings, self.folder)
        remember_origin(reader, origin_of(self))
        remember_renaming(reader, renaming_of(self))
        return reader

    def _check_settings(self) -> None:
        """Raise ConfigError, naming file and key, if settings refer to a feature that the policy does not have."""
        file = SETTINGS_FILE if self.folder is None else self.folder / SETTINGS_FILE
        feature_of_key = {feature: world_key for world_key, feature in self.settings.features.items()}
        for key in ("features", "image_sizes", "names", "units"):
            for name in getattr(self.settings, key):
                if name in self._features or (key, name) in (("names", "action"), ("units", "action")):
                    continue
                nearest = did_you_mean(name, self._features)
                if name in feature_of_key:
                    nearest = f" '{feature_of_key[name]}' is the world's name for it; write the policy's name here."
                raise ConfigError(f"{file}: {key} has '{name}', but the policy has no such feature.{nearest}")

    def _key(self, name: str, source: str) -> str:
        """Return robopolicy's key of a feature: an image is a camera, whatever LeRobot calls it (observation.image)."""
        key = self.settings.features.get(name, source)
        return camera_key(key) if self._features[name].type.value == "VISUAL" else key

    def _field(self, name: str) -> Field:
        shape, kind = tuple(self._features[name].shape), self._features[name].type.value
        if kind in ("STATE", "ENV"):
            return self._vector(name, shape)
        if kind != "VISUAL" or len(shape) != 3 or shape[0] != 3:
            raise CheckpointError(
                f"Feature '{name}' is {kind} of shape {shape}: only vectors and RGB images are supported."
            )
        size = tuple(self.settings.image_sizes.get(name, shape[1:]))
        if len(size) != 2:
            raise ConfigError(f"image_sizes of '{name}' must be [height, width], not {list(size)}.")
        return Field((*size, 3), "uint8", 0.0, 255.0)

    def _vector(self, name: str, shape: tuple[int, ...]) -> Field:
        names = tuple(self.settings.names.get(name, ()))
        if duplicates := [each for each in names if names.count(each) > 1]:
            raise ConfigError(
                f"{SETTINGS_FILE} gives two elements of '{name}' the name '{in_one_line(duplicates[0], 80)}'."
            )
        if names and len(names) != math.prod(shape):
            raise ConfigError(
                f"{SETTINGS_FILE} has {len(names)} names for the elements of '{name}', which has {math.prod(shape)}."
            )
        return Field(shape, unit=self.settings.units.get(name, ""), names=names)

    def named_as_in(self, world: WorldSpec) -> Self:
        """Return this policy with undeclared names and units taken from `world`, whose data it is trained on."""
        policy_fields = {name: self.spec.observation[key] for name, key in self._keys.items()} | {
            "action": self.spec.action
        }
        world_fields = {name: world.observation.get(key) for name, key in self._keys.items()} | {"action": world.action}
        vectors = {name: field for name, field in world_fields.items() if field is not None and len(field.shape) == 1}
        names_of_vectors = {
            name: each.names for name, each in vectors.items() if each.names and each.shape == policy_fields[name].shape
        }
        units = {
            name: each.unit for name, each in vectors.items() if each.unit and each.shape == policy_fields[name].shape
        }
        names, units = {**names_of_vectors, **self.settings.names}, {**units, **self.settings.units}
        return self._set(replace(self.settings, names=names, units=units))

    def mapping_for(self, world: WorldSpec) -> str:
        """Return the mapping to write if names or sizes of its inputs differ in `world`, "" if none do."""
        visual = {name for name, feature in self._features.items() if feature.type.value == "VISUAL"}
        other = {
            name: f"{IMAGE_PREFIX}<camera of the world>" if name in visual else "<key of the world>"
            for name, key in self._keys.items()
            if key not in world.observation
        }
        world_shapes = {name: world.observation[self._keys[name]].shape for name in sorted(visual - set(other))}
        policy_shapes = {name: self.spec.observation[self._keys[name]].shape for name in world_shapes}
        sizes = {name: list(shape[:2]) for name, shape in world_shapes.items() if policy_shapes[name] != shape}
        example = {**({"features": other} if other else {}), **({"image_sizes": sizes} if sizes else {})}
        return f"If only names or sizes differ, write {json.dumps(example)} into {SETTINGS_FILE}." if example else ""

    def _require(self, observation: TensorObservation) -> None:
        missing_names = [name for name, key in self._keys.items() if key not in observation]
        if missing_names:
            key = self._keys[missing_names[0]]
            kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if key.startswith(IMAGE_PREFIX) else f"field '{key}'"
            available = ", ".join(sorted(set(observation) - {TASK}))
            example = json.dumps({"features": {missing_names[0]: "<key of the world>"}})
            raise SpecError(
                f"The observation has no {kind}: the LeRobot policy reads {', '.join(sorted(self._keys.values()))}, "
                f"but the world outputs {available}. If only the names differ, write {example} into {SETTINGS_FILE} "
                "next to its config.json."
            )
        validate_observation(observation, self.spec.observation, rows_of(observation), self.spec.history)

    def _prepared(self, observation: TensorObservation, index: int) -> dict[str, Any]:
        """Return history frame `index` after LeRobot's preprocessor."""
        instructions = self.spec.instructions  # data need not say the only one, which is what worlds say
        texts = observation.get(TASK, [instructions[0] if len(instructions) == 1 else ""] * rows_of(observation))
        raw: dict[str, Any] = {TASK: list(texts)}
        # Some of LeRobot's processors write numbers into texts, and weights without numbers have no device for them.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        for name, source in self._sources.items():
            value = _tensor(observation, self._keys[name])[:, index].to(device)
            raw[source] = self._image(name, value) if value.ndim == 4 else value
        with read_errors(Path(self.folder or "") / PROCESSORS[0], failure=CheckpointError):
            processed = self.preprocess(raw)
        inputs = {key: each for key, each in processed.items() if key.startswith("observation.") or key == EMBODIMENT}
        batch = {key: value.to(self.device) for key, value in inputs.items()}
        policy: Any = self.policy
        if policy.config.image_features:
            images = [batch[key] for key in policy.config.image_features if key in batch]
            if len({image.shape for image in images}) == 1:
                batch["observation.images"] = torch.stack(images, dim=-4)
        return batch

    def _image(self, name: str, value: Tensor) -> Tensor:
        """Convert uint8 [B, height, width, 3] to float [B, 3, height, width] in 0..1, resized for the policy."""
        image = value.permute(0, 3, 1, 2).contiguous().float() / 255
        if name in self.settings.image_sizes:
            image = interpolate(image, tuple(self._features[name].shape[1:]), mode="bilinear", antialias=True)
        return image


def _predicted_steps(config: Any, chunk: int) -> int:
    """Return the number of predicted steps from the first executed one on, given `chunk` executed steps."""
    if config.type in HORIZONS:
        return config.horizon - config.n_obs_steps + 1
    # A pi0_fast says as many as it executes, and a vqbet's are those of its codes.
    return chunk if config.type in ("pi0_fast", "vqbet") else int(config.chunk_size)


def _require_room(config: Any) -> None:
    """Raise CheckpointError if actions or states have more elements than the policy's padded size."""
    sizes = {"max_action_dim": config.action_feature.shape[0]}
    if config.type != "pi05" and config.robot_state_feature is not None:  # its state is text
        sizes["max_state_dim"] = config.robot_state_feature.shape[0]
    for name, size in sizes.items() if config.type in PADS else ():
        if size > getattr(config, name):
            raise CheckpointError(
                f"Its config.json has {name}={getattr(config, name)}, but it has {size} elements: the others cannot "
                "be used."
            )


def executed(postprocess: "PolicyProcessorPipeline", actions: Tensor) -> Tensor:
    """Apply LeRobot's postprocessor to predicted actions [B, C, A]; returns world units."""
    from lerobot.processor import AbsoluteActionsProcessorStep

    steps: list[Any] = [step for step in postprocess.steps if isinstance(step, AbsoluteActionsProcessorStep)]
    if any(step.enabled for step in steps):
        # It adds the state [B, D] of the last frame: to each row its own, which needs the chunks to be whole.
        return postprocess(actions)
    # LeRobot's steps take single actions [B, A]: the steps of chunks are handed over as rows.
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


def _tensor(observation: TensorObservation, key: str) -> Tensor:
    value = observation[key]
    if not isinstance(value, Tensor):
        raise SpecError(f"'{key}' contains texts, not an array.")
    return value


def rows_of(observation: TensorObservation) -> int:
    """Return the number of rows B of an observation, key -> [B, H, ...]."""
    return len(next(iter(observation.values())))
