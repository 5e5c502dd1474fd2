"""A robopolicy checkpoint as LeRobot's `PreTrainedPolicy`: history, chunks, images and instructions for every row.

Axes: B row (one robot or environment), C chunk step, A action dimension, H history frame.
"""

import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import ActionSelectKwargs, PreTrainedPolicy
from torch import Tensor

from robopolicy.building.policies import load_acting
from robopolicy.client.protocol import Limits
from robopolicy.configuration.sections.act import InferenceSection
from robopolicy.core.errors import CheckpointError, SpecError
from robopolicy.core.player import PolicyActor
from robopolicy.core.policy import PolicySpec
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import TASK, Field, Observation
from robopolicy.plugins.configuration_robopolicy import RobopolicyConfig, not_trained_here
from robopolicy.plugins.features import ACTION, feature, require_names
from robopolicy.policies.loading import EXPORTED
from robopolicy.serving.inputs import Session

LARGEST_IMAGE = 3 * 8192 * 8192
"""Maximum bytes of an image to be resized."""


class RobopolicyPolicy(PreTrainedPolicy):
    """A robopolicy checkpoint as a policy of LeRobot's commands.

    Every row has the history that the policy reads, and the policy is called for all rows at once, every C steps,
    because LeRobot's `reset` resets all rows at once. Its noise depends on the number of the episode since loading, so
    outcomes do not depend on LeRobot's batch size. Images may be float 0..1 or uint8, of any size. Raises
    CheckpointError if the checkpoint cannot be loaded, ConfigError if none is named, and SpecError if observations of
    the environment or robot do not fit it.
    """

    config_class = RobopolicyConfig  # pyright: ignore[reportAssignmentType]
    name = "robopolicy"  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: RobopolicyConfig, **_: object):
        super().__init__(config)
        config.validate_features()
        assert config.checkpoint is not None
        device = torch.device(str(config.device))
        self.acting = load_acting(InferenceSection(), config.checkpoint, device)
        spec = self.acting.spec
        self._limits = replace(Limits.of(spec), image=LARGEST_IMAGE)
        _require_features(config, spec, self._limits)
        if not config.input_features:
            config.input_features = {key: _feature(key, field) for key, field in spec.observation.items()}
        config.output_features = {ACTION: _feature(ACTION, spec.action)}
        noise = EpisodeGenerator(config.seed, device)
        self.actor = PolicyActor(self.acting, noise, deterministic=config.deterministic)
        self._episodes = 0  # how many have begun
        self.reset()
        self.eval()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: PreTrainedConfig | None = None, **kwargs: Any
    ) -> "RobopolicyPolicy":
        """Load a folder written by `save_pretrained`; raises CheckpointError if it is not one. No downloads."""
        folder = Path(pretrained_name_or_path)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} is not a folder with a config.json. Create one with: python -m robopolicy.plugins "
                "CHECKPOINT FOLDER; download one from a hub first, with hf download."
            )
        config = PreTrainedConfig.from_pretrained(folder) if config is None else config
        if not isinstance(config, RobopolicyConfig):
            raise CheckpointError(f"{folder} contains a policy of type '{config.type}', not robopolicy.")
        return cls(replace(config, checkpoint=config.checkpoint or folder / EXPORTED))

    def _save_pretrained(self, save_directory: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        config = self.config
        assert isinstance(config, RobopolicyConfig) and config.checkpoint is not None
        shutil.copytree(config.checkpoint, save_directory / EXPORTED)
        replace(config, checkpoint=None, pretrained_path=None)._save_pretrained(save_directory)

    def reset(self) -> None:
        """Start an episode in every row, without memory."""
        self.acting.reset()
        self._sessions: list[Session] = []
        self._seen: list[Observation] = []
        self._queue: deque[Tensor] = deque()

    def select_action(self, batch: dict[str, Tensor], **kwargs: Unpack[ActionSelectKwargs]) -> Tensor:
        """Return the next control step of every row, [B, A]; call it once per control step.

        batch: LeRobot's keys -> [B, *shape]; images [B, 3, height, width] float 0..1 or uint8, in either layout.
        """
        self._see(batch)
        if not self._queue:
            self._queue.extend(self._decided().unbind(1))
        return self._queue.popleft()

    def predict_action_chunk(self, batch: dict[str, Tensor], **kwargs: Unpack[ActionSelectKwargs]) -> Tensor:
        """Return a new chunk [B, C, A]; the batch is as in `select_action`, and is added to the history."""
        self._see(batch)
        return self._decided()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        """Raise ConfigError: robopolicy's checkpoints are trained by robopolicy only."""
        raise not_trained_here()

    def get_optim_params(self) -> dict[str, Any]:
        """Raise ConfigError: robopolicy's checkpoints are trained by robopolicy only."""
        raise not_trained_here()

    def _see(self, batch: Mapping[str, Any]) -> None:
        """Add the current observation of every row to its history."""
        arrays = {key: _array(key, value) for key, value in batch.items() if _is_shown(key, value)}
        if not arrays:
            raise SpecError(f"The batch has no observations: it contains {', '.join(map(str, batch)) or 'nothing'}.")
        rows = len(next(iter(arrays.values())))
        if not self._sessions:
            self._sessions = [Session(self.acting.spec, limits=self._limits) for _ in range(rows)]
            self.actor.begin(self._episodes + np.arange(rows))
            self._episodes += rows
        if len(self._sessions) != rows:
            raise SpecError(
                f"The batch has {rows} rows, but before it had {len(self._sessions)}: call reset() in between."
            )
        texts = _texts(batch.get(TASK), rows)
        self._seen = [
            session.observe({**{key: value[row] for key, value in arrays.items()}, **texts[row]})
            for row, session in enumerate(self._sessions)
        ]

    def _decided(self) -> Tensor:
        observation = {key: np.concatenate([each[key] for each in self._seen]) for key in self._seen[0]}
        actions, _ = self.actor.choose(observation)
        return torch.as_tensor(actions, dtype=torch.float32, device=str(self.config.device))


def _is_shown(key: str, value: object) -> bool:
    return key.startswith("observation.") and isinstance(value, Tensor)


def _array(key: str, value: Tensor) -> np.ndarray:
    """Return values [B, ...] in the policy's input format: images as uint8."""
    if value.ndim == 4 and value.is_floating_point():
        low, high = float(value.min()), float(value.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3):
            raise SpecError(
                f"Images of '{key}' must be floats from 0 to 1, or uint8; these range from {low:g} to {high:g}."
            )
        value = (value.float() * 255).round().clamp(0, 255).to(torch.uint8)
    return value.detach().cpu().numpy()


def _texts(task: Any, rows: int) -> list[dict[str, str]]:
    """Return every row's instruction, if there is one: LeRobot writes "" for none."""
    texts = [task] * rows if task is None or isinstance(task, str) else list(task)
    if len(texts) != rows:
        raise SpecError(f"'{TASK}' has {len(texts)} texts, but there are {rows} rows.")
    return [{TASK: str(text)} if text else {} for text in texts]


def _feature(key: str, field: Field) -> PolicyFeature:
    """Return a field as an input feature of a LeRobot policy: images are [3, height, width]."""
    described = feature(key, field)
    shape = (field.shape[2], *field.shape[:2]) if described.type is FeatureType.VISUAL else field.shape
    return PolicyFeature(described.type, shape)


def _require_features(config: RobopolicyConfig, spec: PolicySpec, limits: Limits) -> None:
    """Raise SpecError if the features of LeRobot's environment or data differ from the policy's."""
    inputs, outputs = config.input_features or {}, config.output_features or {}
    if inputs:
        blank = {
            key: np.zeros(lerobot_feature.shape, np.uint8 if lerobot_feature.type is FeatureType.VISUAL else np.float32)
            for key, lerobot_feature in inputs.items()
        }
        Session(spec, limits=limits).observe(blank)
    if ACTION in outputs and tuple(outputs[ACTION].shape) != spec.action.shape:
        raise SpecError(
            f"The policy's actions have shape {list(spec.action.shape)} ({', '.join(spec.action.names)}), but those "
            f"of the environment {list(outputs[ACTION].shape)}. Is this the environment it was trained for?"
        )
    require_names({**spec.observation, ACTION: spec.action}, {**inputs, **outputs})
