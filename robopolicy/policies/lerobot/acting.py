"""LeRobot's policies as ours: a checkpoint folder that LeRobot saved acts in our worlds as a `core.policy.Policy`.

The folder holds config.json (with LeRobot's `type`), model.safetensors, and policy_preprocessor.json and
policy_postprocessor.json with their tensors. One decision is what LeRobot would execute between two predictions:
`n_action_steps` of `predict_action_chunk`, seen from the last `n_obs_steps` control steps. LeRobot's `select_action`
keeps its queues per policy object, for one robot; here the world's history takes their place, for any number of rows.
Nothing is ever downloaded. A file `robopolicy.json` beside config.json says what LeRobot's format does not:
`LeRobotSettings`, by name. Axes: B row, H history frame, C chunk step, A action dimension.
"""

import json
import math
import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from robopolicy.core.checkpoints import read_description
from robopolicy.core.errors import (
    CheckpointError,
    ConfigError,
    SpecError,
    did_you_mean,
    in_one_line,
    require_extra,
)
from robopolicy.core.origin import (
    RENAMED,
    WORLD,
    origin_of,
    remember_described,
    remember_origin,
    remember_renaming,
    renaming_of,
)
from robopolicy.core.policy import Decision, TensorObservation, Trainable
from robopolicy.core.randomness import drawing_from, normal
from robopolicy.core.spec import (
    IMAGE_PREFIX,
    TASK,
    Field,
    PolicySpec,
    WorldSpec,
    camera_key,
    validate_observation,
)
from robopolicy.core.storage import read_json, reading, recover_folder
from robopolicy.core.structured import from_plain
from robopolicy.core.world import Rows
from robopolicy.nn.pretrained import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from robopolicy.policies.lerobot.checks import PROCESSORS, check_normalisation, check_numbers, check_processor
from robopolicy.policies.lerobot.configuration import SETTINGS_FILE, LeRobotSettings, LeRobotTuning
from robopolicy.policies.lerobot.reading import (
    first_line,
    nothing_downloaded,
    read_config,
    read_policy,
    read_processors,
    require_memory,
)

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

ACTING = ("act", "diffusion", "multi_task_dit", "smolvla", "pi0", "pi05", "pi0_fast", "xvla")
CHUNK_KEYS = {**dict.fromkeys(ACTING, "n_action_steps"), "vqbet": "action_chunk_size"}
"""LeRobot's `type` -> the setting that says how many steps are executed between two predictions."""

HORIZONS = ("diffusion", "multi_task_dit")
"""Types whose prediction begins in the past: `horizon` steps, the first of them that of the oldest frame."""

PADS = ("smolvla", "pi0", "pi05")
"""Types that know as many action and state elements as their config says, whatever the robot has."""
NEED_TRANSFORMERS = ("multi_task_dit", "smolvla", "pi0", "pi05", "pi0_fast", "xvla")
EMBODIMENT = "domain_id"
"""What a processor says beside the observation: the robot or data set of a policy that was trained on many."""
EMPTY_CAMERA = ".empty_camera_"
"""In the names of features that LeRobot adds for cameras that nobody has: it fills in what they would show."""


def load_lerobot_policy(
    folder: Path | str,
    device: torch.device | str = "cpu",
    settings: LeRobotSettings | None = None,
    *,
    weights: bool = True,
) -> "LeRobotPolicy":
    """Load a policy that LeRobot saved; settings: instead of those in the folder's `robopolicy.json`.

    weights: whether they are read; if not, they are what the policy's constructor makes, and no file is needed.

    Raises CheckpointError when a file is missing or damaged, or the type is not one of `CHUNK_KEYS`; ConfigError when a
    package that the policy needs is not installed or of a version that was not tried, the weights do not fit into
    memory, or `settings` name a feature that the policy does not have.
    """
    folder = recover_folder(Path(folder))
    kind = _checked_type(folder, weights)
    _require_transformers(kind)
    if settings is None:
        settings = read_settings(folder)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with nothing_downloaded(folder, kind), torch.random.fork_rng(devices=devices):
        for name in PROCESSORS:
            check_processor(folder, name, kind)
        check_normalisation(folder)
        config = read_config(folder, torch.device(device))
        if weights:
            require_memory(folder, torch.device(device))
        policy = read_policy(folder, config, weights)
        preprocess, postprocess = read_processors(folder, config, policy)
    made = LeRobotPolicy(policy.eval(), preprocess, postprocess, settings, folder)
    remember_described(made, {WORLD: settings.world, RENAMED: settings.renamed}, folder / SETTINGS_FILE)
    return made


def _predicted_steps(config: Any, chunk: int) -> int:
    """Return how many steps a LeRobot policy predicts from the one on that is executed first, of `chunk` executed."""
    if config.type in HORIZONS:
        return config.horizon - config.n_obs_steps + 1
    # A pi0_fast says as many as it executes, and a vqbet's are those of its codes.
    return chunk if config.type in ("pi0_fast", "vqbet") else int(config.chunk_size)


def _require_room(config: Any) -> None:
    """Raise CheckpointError where actions or states have more elements than a policy pads them to."""
    sizes = {"max_action_dim": config.action_feature.shape[0]}
    if config.type != "pi05" and config.robot_state_feature is not None:  # its state is text
        sizes["max_state_dim"] = config.robot_state_feature.shape[0]
    for name, size in sizes.items() if config.type in PADS else ():
        if size > getattr(config, name):
            raise CheckpointError(
                f"Its config.json says {name}={getattr(config, name)}, and it has {size} elements: nothing can be made "
                "of the others."
            )


def read_settings(folder: Path) -> LeRobotSettings:
    """Return what robopolicy.json in `folder` says, the defaults without one; raises ConfigError for unknown keys."""
    path = folder / SETTINGS_FILE
    return from_plain(LeRobotSettings, read_json(path) if os.path.lexists(path) else {}, SETTINGS_FILE)


class LeRobotPolicy:
    """A `core.policy.Policy` around a LeRobot policy and its processors; make one with `load_lerobot_policy`."""

    def __init__(
        self,
        policy: "PreTrainedPolicy",
        preprocess: "PolicyProcessorPipeline",
        postprocess: "PolicyProcessorPipeline",
        settings: LeRobotSettings | None = None,
        folder: Path | None = None,
    ):
        self.folder, self._checked = folder, False
        self._over_base: Any = None
        self.policy, self.preprocess, self.postprocess = policy, preprocess, postprocess
        self.settings = LeRobotSettings() if settings is None else settings
        config: Any = policy.config
        self._features = {name: each for name, each in config.input_features.items() if EMPTY_CAMERA not in name}
        self._check_settings()
        # What a processor renames stands in the data, and so in the world, under its old name.
        renamed = {new: old for step in preprocess.steps for old, new in getattr(step, "rename_map", {}).items()}
        self._sources = {name: renamed.get(name, name) for name in self._features}
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
        """What it reads, by our keys, and writes; it scores nothing."""
        return self._spec

    def key_of(self, feature: str) -> str:
        """Return the observation key of a feature of LeRobot's, its own name where the policy does not read it."""
        return self._keys.get(feature, feature)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.policy.parameters()).device

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row: the [B, C, A] actions that LeRobot would execute before it predicts again.

        Random numbers come from `generator`: a diffusion policy's initial noise directly, all others from torch's
        global generator, seeded from it for this call and put back. deterministic: changes nothing, because LeRobot's
        policies have no exploration noise to leave out. Raises SpecError or NonFiniteError as `validate_observation`,
        ConfigError where statistics are missing that its processors ask for, CheckpointError where a pi0_fast says what
        is no action.
        """
        if self.settings.base is not None:
            return Decision(self._with_base().act(observation, generator, deterministic=True).actions)
        return Decision(self._decided(observation, generator, self.spec.chunk))

    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all steps [B, P, A] that LeRobot's policy predicts, of which `act` executes C; draws and errors as it.

        LeRobot's own policies drop what diffusions predict beyond n_action_steps; here it is kept.
        """
        if self.settings.base is not None:
            return self._with_base().predict(observation, generator, deterministic=True)
        inner: Any = self.policy
        executed = getattr(inner.config, "n_action_steps", None)
        try:
            if inner.config.type in HORIZONS:
                inner.config.n_action_steps = self.spec.prediction
            return self._decided(observation, generator, self.spec.prediction)
        finally:
            if inner.config.type in HORIZONS:
                inner.config.n_action_steps = executed

    def _with_base(self) -> Any:
        """Return this policy as it was fine-tuned, its first steps a frozen base's, of which LeRobot knows nothing."""
        if self._over_base is None:
            self._over_base = self.to_trainable()
        return self._over_base

    @torch.no_grad()
    def _decided(self, observation: TensorObservation, generator: torch.Generator, steps: int) -> Tensor:
        """Return the first `steps` steps of a prediction, [B, steps, A]."""
        if not self._checked:
            from robopolicy.policies.lerobot.statistics import check_acting

            check_acting(self)
            self._checked = True
        frames = self.frames(observation)
        batch, options = frames[-1], self._noise(_rows(observation), generator)
        policy: Any = self.policy
        policy.reset()
        if hasattr(policy, "_queues"):
            # LeRobot stacks the queues of the last observations; for this one call they hold the world's history.
            shown = {key: [frame[key] for frame in frames] for key in policy._queues if key in batch}
            policy._queues = {**policy._queues, **shown}
        try:
            with drawing_from(generator, self.device):
                actions: Tensor = policy.predict_action_chunk(batch, **options)[:, :steps]
        except AssertionError as error:
            if policy.config.type != "pi0_fast":
                raise
            raise CheckpointError(
                f"LeRobot's pi0_fast said what is no action ({first_line(error)}): is it trained? With "
                "validate_action_token_prefix=false in its config.json it is executed all the same."
            ) from error
        finally:
            policy.reset()
        return executed(self.postprocess, actions).to(self.device, torch.float32)

    def frames(self, observation: TensorObservation) -> list[dict[str, Any]]:
        """Return the history as LeRobot's processors hand it to the policy: normalised, key -> [B, ...], oldest first.

        Raises SpecError or NonFiniteError as `validate_observation`.
        """
        self._require(observation)
        return [self._prepared(observation, index) for index in range(self.spec.history)]

    def to_trainable(self) -> Trainable:
        """Return a policy over the same weights that learns; raises ConfigError where there is none of its type."""
        from robopolicy.policies.lerobot.training import trainable_lerobot

        return trainable_lerobot(self)

    def to_trainable_by(self, tuning: LeRobotTuning) -> Trainable:
        """Return a policy over the same weights that explores and learns as `tuning` says.

        Raises ConfigError as `to_trainable`, and where `tuning` chooses what policies of its type do not read.
        """
        from robopolicy.policies.lerobot.training import require_read

        require_read(self, tuning)
        return self.tuned_by(tuning).to_trainable()

    def tuned_by(self, tuning: LeRobotTuning) -> "LeRobotPolicy":
        """Return this policy, with other choices of how it explores and learns; raises ConfigError as it is made."""
        return self._set(replace(self.settings, tuning=tuning))

    def _set(self, settings: LeRobotSettings) -> "LeRobotPolicy":
        made = LeRobotPolicy(self.policy, self.preprocess, self.postprocess, settings, self.folder)
        remember_origin(made, origin_of(self))
        remember_renaming(made, renaming_of(self))
        return made

    def reset(self, rows: Rows = None) -> None:
        """Do nothing: what it remembers of an episode is the history that the world shows, whatever the rows [R]."""

    def _check_settings(self) -> None:
        """Raise ConfigError, naming file and key, where settings are of a feature that the policy does not have."""
        file = SETTINGS_FILE if self.folder is None else self.folder / SETTINGS_FILE
        called = {theirs: ours for ours, theirs in self.settings.features.items()}
        for key in ("features", "image_sizes", "names", "units"):
            for name in getattr(self.settings, key):
                if name in self._features or (key, name) in (("names", "action"), ("units", "action")):
                    continue
                nearest = did_you_mean(name, self._features)
                if name in called:
                    nearest = f" The world calls so what is '{called[name]}' here: write that."
                raise ConfigError(f"{file}: {key} has '{name}', and the policy has no such feature.{nearest}")

    def _key(self, name: str, source: str) -> str:
        """Return our key of a feature: what it sees is a camera, whatever LeRobot calls it (observation.image)."""
        key = self.settings.features.get(name, source)
        return camera_key(key) if self._features[name].type.value == "VISUAL" else key

    def _field(self, name: str) -> Field:
        shape, kind = tuple(self._features[name].shape), self._features[name].type.value
        if kind in ("STATE", "ENV"):
            return self._vector(name, shape)
        if kind != "VISUAL" or len(shape) != 3 or shape[0] != 3:
            raise CheckpointError(f"Feature '{name}' is {kind} of shape {shape}: only vectors and RGB images are read.")
        size = tuple(self.settings.image_sizes.get(name, shape[1:]))
        if len(size) != 2:
            raise ConfigError(f"image_sizes of '{name}' is [height, width], not {list(size)}.")
        return Field((*size, 3), "uint8", 0.0, 255.0)

    def _vector(self, name: str, shape: tuple[int, ...]) -> Field:
        names = tuple(self.settings.names.get(name, ()))
        if twice := [each for each in names if names.count(each) > 1]:
            raise ConfigError(f"{SETTINGS_FILE} names two elements of '{name}' '{in_one_line(twice[0], 80)}'.")
        if names and len(names) != math.prod(shape):
            raise ConfigError(f"{SETTINGS_FILE} names {len(names)} elements of '{name}', which has {math.prod(shape)}.")
        return Field(shape, unit=self.settings.units.get(name, ""), names=names)

    def named_as_in(self, world: WorldSpec) -> "LeRobotPolicy":
        """Return this policy, where it says no names or units with those of `world`, whose data it learns from."""
        mine = {name: self.spec.observation[key] for name, key in self._keys.items()} | {"action": self.spec.action}
        theirs = {name: world.observation.get(key) for name, key in self._keys.items()} | {"action": world.action}
        vectors = {name: field for name, field in theirs.items() if field is not None and len(field.shape) == 1}
        known = {name: each.names for name, each in vectors.items() if each.names and each.shape == mine[name].shape}
        units = {name: each.unit for name, each in vectors.items() if each.unit and each.shape == mine[name].shape}
        names, units = {**known, **self.settings.names}, {**units, **self.settings.units}
        return self._set(replace(self.settings, names=names, units=units))

    def mapping_for(self, world: WorldSpec) -> str:
        """Return what to write where names or sizes of what it reads are others in `world`, "" where none are."""
        visual = {name for name, feature in self._features.items() if feature.type.value == "VISUAL"}
        other = {
            name: f"{IMAGE_PREFIX}<camera of the world>" if name in visual else "<key of the world>"
            for name, key in self._keys.items()
            if key not in world.observation
        }
        shown = {name: world.observation[self._keys[name]].shape for name in sorted(visual - set(other))}
        read = {name: self.spec.observation[self._keys[name]].shape for name in shown}
        sizes = {name: list(shape[:2]) for name, shape in shown.items() if read[name] != shape}
        example = {**({"features": other} if other else {}), **({"image_sizes": sizes} if sizes else {})}
        return f"Where only names or sizes differ, put {json.dumps(example)} into {SETTINGS_FILE}." if example else ""

    def _require(self, observation: TensorObservation) -> None:
        missing = [name for name, key in self._keys.items() if key not in observation]
        if missing:
            key = self._keys[missing[0]]
            kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if key.startswith(IMAGE_PREFIX) else f"field '{key}'"
            shown = ", ".join(sorted(set(observation) - {TASK}))
            example = json.dumps({"features": {missing[0]: "<key of the world>"}})
            raise SpecError(
                f"The observation has no {kind}: the LeRobot policy reads {', '.join(sorted(self._keys.values()))}, "
                f"shown are {shown}. Where only the names differ, put {example} into {SETTINGS_FILE} beside its "
                "config.json."
            )
        validate_observation(observation, self.spec.observation, _rows(observation), self.spec.history)

    def _prepared(self, observation: TensorObservation, index: int) -> dict[str, Any]:
        """Return history frame `index` as LeRobot's processors hand it to the policy."""
        known = self.spec.instructions  # data need not say the only one, which is what worlds say
        said = observation.get(TASK, [known[0] if len(known) == 1 else ""] * _rows(observation))
        raw: dict[str, Any] = {TASK: list(said)}
        # Some of LeRobot's processors write numbers into texts, and weights without numbers have no device for them.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        for name, source in self._sources.items():
            value = _tensor(observation, self._keys[name])[:, index].to(device)
            raw[source] = self._image(name, value) if value.ndim == 4 else value
        with reading(Path(self.folder or "") / PROCESSORS[0], failure=CheckpointError):
            processed = self.preprocess(raw)
        read = {key: each for key, each in processed.items() if key.startswith("observation.") or key == EMBODIMENT}
        batch = {key: value.to(self.device) for key, value in read.items()}
        policy: Any = self.policy
        if policy.config.image_features:
            images = [batch[key] for key in policy.config.image_features if key in batch]
            if len({image.shape for image in images}) == 1:
                batch["observation.images"] = torch.stack(images, dim=-4)
        return batch

    def _image(self, name: str, value: Tensor) -> Tensor:
        """Turn uint8 [B, height, width, 3] into float [B, 3, height, width] of 0..1, of the policy's size."""
        image = value.permute(0, 3, 1, 2).contiguous().float() / 255
        if name in self.settings.image_sizes:
            image = interpolate(image, tuple(self._features[name].shape[1:]), mode="bilinear", antialias=True)
        return image

    def _noise(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = self.policy.config
        if config.type != "diffusion":
            return {}
        shape = (rows, config.horizon, *self.spec.action.shape)
        return {"noise": normal(shape, generator, self.device)}


def executed(postprocess: "PolicyProcessorPipeline", actions: Tensor) -> Tensor:
    """Return what LeRobot's postprocessor makes of predicted actions [B, C, A], in the world's units."""
    from lerobot.processor import AbsoluteActionsProcessorStep

    steps: list[Any] = [step for step in postprocess.steps if isinstance(step, AbsoluteActionsProcessorStep)]
    if any(step.enabled for step in steps):
        # It adds the state [B, D] of the last frame: to each row its own, which needs the chunks to be whole.
        return postprocess(actions)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


def _tensor(observation: TensorObservation, key: str) -> Tensor:
    value = observation[key]
    if not isinstance(value, Tensor):
        raise SpecError(f"'{key}' holds texts, not an array.")
    return value


def _rows(observation: TensorObservation) -> int:
    return len(next(iter(observation.values())))


def _checked_type(folder: Path, weights: bool) -> str:
    description = read_description(folder)
    kind = str(description.get("type"))
    if kind not in CHUNK_KEYS:
        raise CheckpointError(
            f"{folder} holds LeRobot's policy '{kind}', which cannot be loaded here.{did_you_mean(kind, CHUNK_KEYS)} "
            f"Those that can: {', '.join(sorted(CHUNK_KEYS))}."
        )
    check_numbers(folder / "config.json", description)
    steps = description.get(CHUNK_KEYS[kind], 1)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise CheckpointError(
            f"{folder / 'config.json'} says {CHUNK_KEYS[kind]}={in_one_line(steps, 40)}: it is how many steps of a "
            "decision are executed, 1 or more."
        )
    if description.get("use_peft"):
        raise CheckpointError(
            f"{folder} holds an adapter (use_peft), without the policy that it adapts. Merge the two in Python: "
            "from lerobot.policies.factory import get_policy_class; from peft import PeftModel; "
            f"PeftModel.from_pretrained(get_policy_class('{kind}').from_pretrained('BASE'), '{folder}')"
            ".merge_and_unload().save_pretrained('MERGED'); and copy the policy_*processor* files into MERGED. BASE is "
            "base_model_name_or_path in its adapter_config.json."
        )
    if description.get("temporal_ensemble_coeff") is not None:
        raise CheckpointError(
            f"{folder} averages overlapping chunks (temporal_ensemble_coeff), which cannot be done for many rows. Set "
            "it to null and n_action_steps to the steps to execute in its config.json."
        )
    if weights and not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder / 'model.safetensors'} does not exist: the checkpoint is incomplete.")
    return kind


def _require_transformers(kind: str) -> None:
    """Raise ConfigError where a policy of `NEED_TRANSFORMERS` meets a version of it that was not tried."""
    if kind not in NEED_TRANSFORMERS:
        return
    require_extra("transformers", "vla")
    installed = version("transformers")
    found = tuple(map(int, installed.split(".")[:2]))
    first, last = (".".join(map(str, each)) for each in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    if OLDEST_TRANSFORMERS <= found < NEWEST_TRANSFORMERS:
        return
    breaks = "breaks with" if found >= NEWEST_TRANSFORMERS else "was not tried with"
    raise ConfigError(
        f"LeRobot's '{kind}' {breaks} transformers {installed}: install one from {first} to before {last}, pip install "
        f"'transformers>={first},<{last}'."
    )
