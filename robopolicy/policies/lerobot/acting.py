"""LeRobot policies as `core.policy.Policy`: load a LeRobot checkpoint folder and act in robopolicy worlds.

The folder contains config.json (with LeRobot's `type`), model.safetensors, and policy_preprocessor.json and
policy_postprocessor.json with their tensors. One decision is what LeRobot executes between two predictions:
`n_action_steps` of `predict_action_chunk`, computed from the last `n_obs_steps` control steps. LeRobot's
`select_action` keeps its queues per policy object, for one robot; here the world's history replaces them, for any
number of rows. Nothing is ever downloaded. Axes: B row, H history frame, C chunk step, A action dimension.
"""

import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from robopolicy.core.checkpoints import read_description
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import (
    CheckpointError,
    ConfigError,
    RobopolicyWarning,
    SpecError,
    did_you_mean,
    in_one_line,
    require_extra,
)
from robopolicy.core.origin import RENAMED, WORLD, remember_described
from robopolicy.core.policy import Decision, TensorObservation, Trainable
from robopolicy.core.randomness import normal, use_generator
from robopolicy.core.spec import WorldSpec, require_fit
from robopolicy.core.storage import recover_folder
from robopolicy.core.world import Rows
from robopolicy.nn.pretrained import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.foreign import SETTINGS_FILE
from robopolicy.policies.lerobot.checks import PROCESSORS, check_normalisation, check_numbers, check_processor
from robopolicy.policies.lerobot.configuration import (
    LeRobotSettings,
    LeRobotStart,
    LeRobotTuning,
    folder_of,
)
from robopolicy.policies.lerobot.families import FAMILIES
from robopolicy.policies.lerobot.features import (
    CHUNK_KEYS,
    HORIZONS,
    LeRobotReader,
    executed,
    read_settings,
    rows_of,
)
from robopolicy.policies.lerobot.reading import (
    first_line,
    offline_loading,
    read_config,
    read_policy,
    read_processors,
    require_memory,
)
from robopolicy.policies.lerobot.statistics import check_acting, fill_in
from robopolicy.policies.lerobot.training import require_read, trainable_lerobot

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

NEED_TRANSFORMERS = ("multi_task_dit", "smolvla", "pi0", "pi05", "pi0_fast", "xvla")


def load_lerobot_policy(
    folder: Path | str,
    device: torch.device | str = "cpu",
    settings: LeRobotSettings | None = None,
    *,
    weights: bool = True,
) -> "LeRobotPolicy":
    """Load a policy saved by LeRobot; settings: override those in the folder's `robopolicy.json`.

    weights: whether to read them; if not, the constructor's initial weights are used, and no file is needed.

    Raises CheckpointError when a file is missing or damaged, or the type is not one of `CHUNK_KEYS`; ConfigError when a
    required package is missing or has an untested version, the weights do not fit into memory, or `settings` name a
    feature that the policy does not have.
    """
    folder = recover_folder(Path(folder))
    kind = _checked_type(folder, weights)
    _require_transformers(kind)
    if settings is None:
        settings = read_settings(folder)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with offline_loading(folder, kind), torch.random.fork_rng(devices=devices):
        for name in PROCESSORS:
            check_processor(folder, name, kind)
        check_normalisation(folder)
        config = read_config(folder, torch.device(device))
        if weights:
            require_memory(folder, torch.device(device))
        policy = read_policy(folder, config, weights)
        preprocess, postprocess = read_processors(folder, config, policy)
    loaded_policy = LeRobotPolicy(policy.eval(), preprocess, postprocess, settings, folder)
    remember_described(loaded_policy, {WORLD: settings.world, RENAMED: settings.renamed}, folder / SETTINGS_FILE)
    return loaded_policy


class LeRobotPolicy(LeRobotReader):
    """A `core.policy.Policy` around a LeRobot policy and its processors; create it with `load_lerobot_policy`."""

    memoryless = True

    def __init__(
        self,
        policy: "PreTrainedPolicy",
        preprocess: "PolicyProcessorPipeline",
        postprocess: "PolicyProcessorPipeline",
        settings: LeRobotSettings | None = None,
        folder: Path | None = None,
    ):
        super().__init__(policy, preprocess, postprocess, settings, folder)
        self._checked = False
        self._over_base: Trainable | None = None

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the [B, C, A] actions that LeRobot would execute before its next prediction.

        Random numbers come from `generator`: a diffusion policy's initial noise directly, all others from torch's
        global generator, which is seeded from it for this call and then restored. deterministic: no effect, because
        LeRobot policies have no exploration noise. Raises SpecError or NonFiniteError as `validate_observation`,
        ConfigError when statistics required by its processors are missing, CheckpointError when pi0_fast generates
        tokens that do not decode to an action.
        """
        if self.settings.base is not None:
            return Decision(self._with_base().act(observation, generator, deterministic=True).actions)
        return Decision(self._decided(observation, generator, self.spec.chunk))

    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all predicted steps [B, P, A], of which `act` executes C; random draws and errors as in `act`.

        LeRobot's own policies drop predictions of diffusion beyond n_action_steps; here they are returned.
        """
        if self.settings.base is not None:
            return self._with_base().predict(observation, generator, deterministic=True)
        inner: Any = self.policy
        steps_before = getattr(inner.config, "n_action_steps", None)
        try:
            if inner.config.type in HORIZONS:
                inner.config.n_action_steps = self.spec.prediction
            return self._decided(observation, generator, self.spec.prediction)
        finally:
            if inner.config.type in HORIZONS:
                inner.config.n_action_steps = steps_before

    def _with_base(self) -> Any:
        """Return this policy as fine-tuned, with its first steps run by a frozen base, which LeRobot does not
        support.
        """
        if self._over_base is None:
            self._over_base = self.to_trainable()
        return self._over_base

    @torch.no_grad()
    def _decided(self, observation: TensorObservation, generator: torch.Generator, steps: int) -> Tensor:
        """Return the first `steps` predicted steps, [B, steps, A]."""
        if not self._checked:
            check_acting(self)
            self._checked = True
        frames = self.frames(observation)
        batch, options = frames[-1], self._noise(rows_of(observation), generator)
        policy: Any = self.policy
        # LeRobot's policies keep queues of observations and actions: nothing of another call may be left in them.
        policy.reset()
        if hasattr(policy, "_queues"):
            # LeRobot stacks the queues of the last observations; for this one call they hold the world's history.
            frames_of_queues = {key: [frame[key] for frame in frames] for key in policy._queues if key in batch}
            policy._queues = {**policy._queues, **frames_of_queues}
        try:
            with use_generator(generator, self.device):
                actions: Tensor = policy.predict_action_chunk(batch, **options)[:, :steps]
        except AssertionError as error:
            if policy.config.type != "pi0_fast":
                raise
            raise CheckpointError(
                f"pi0_fast generated tokens that do not decode to an action ({first_line(error)}): is it trained? "
                "Set validate_action_token_prefix=false in its config.json to execute them anyway."
            ) from error
        finally:
            policy.reset()
        return executed(self.postprocess, actions).to(self.device, torch.float32)

    @property
    def module(self) -> nn.Module:
        """The LeRobot policy, with all weights; see `abilities.WrapsModule`."""
        return self.policy

    @property
    def is_pretrained(self) -> bool:
        """Whether the policy starts from pretrained weights, always True; see `abilities.IsPretrained`."""
        return True

    @property
    def own_schedule(self) -> None:
        """None: the chain is run by LeRobot, see `abilities.Denoises`."""
        return None

    def opened(self) -> DenoisingPolicy | None:
        """Return a policy over the same weights with an accessible denoising chain, None if it does not denoise."""
        config: Any = self.policy.config
        learner = self.to_trainable() if config.type in FAMILIES else None
        return learner if isinstance(learner, DenoisingPolicy) else None

    def to_trainable(self) -> Trainable:
        """Return a trainable policy over the same weights; raises ConfigError when its type is not supported."""
        return trainable_lerobot(self)

    def to_trainable_by(self, tuning: LeRobotTuning) -> Trainable:
        """Return a policy over the same weights with the exploration and training settings `tuning`.

        Raises ConfigError as `to_trainable`, and when `tuning` sets options that do not apply to its type.
        """
        require_read(self, tuning)
        return self.tuned_by(tuning).to_trainable()

    def reset(self, rows: Rows = None) -> None:
        """No memory to clear for any rows [R]: its history is part of the world's observation."""

    def _noise(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = self.policy.config
        if config.type != "diffusion":
            return {}
        shape = (rows, config.horizon, *self.spec.action.shape)
        return {"noise": normal(shape, generator, self.device)}


class FromLeRobot:
    """Builds policies of kind lerobot; see `POLICIES`."""

    @staticmethod
    def build(config: LeRobotStart, spec: WorldSpec, episodes: Episodes, seed: int) -> Trainable:
        """Load the policy in config.path for training on data of `spec`; no random initialisation.

        Nothing is fitted except statistics that its processors lack.

        Raises ConfigError without a path, and as `load_lerobot_policy` and `trainable_lerobot` do.
        """
        folder = recover_folder(folder_of(config))
        saved_settings = read_settings(folder)
        if saved_settings.base is not None:
            warnings.warn(
                f"{folder} was fine-tuned with a frozen base for its first denoising steps: the base is removed, and "
                "one network is trained for all steps.",
                RobopolicyWarning,
                stacklevel=2,
            )
            saved_settings = replace(saved_settings, base=None)
        tuning = replace(saved_settings.tuning, trainable=config.trainable)
        settings = replace(saved_settings, fps=spec.fps, instructions=spec.instructions, tuning=tuning)
        policy = load_lerobot_policy(folder, settings=settings)
        try:
            require_fit(replace(policy.spec, fps=saved_settings.fps), spec)
        except SpecError as error:
            advice = policy.mapping_for(spec)
            raise SpecError(f"The data does not match the inputs of {folder}. {error} {advice}".strip()) from error
        policy = policy.named_as_in(spec)
        fill_in(policy, episodes)
        return trainable_lerobot(policy, config.levels_per_sample)


def _checked_type(folder: Path, weights: bool) -> str:
    description = read_description(folder)
    kind = str(description.get("type"))
    if kind not in CHUNK_KEYS:
        raise CheckpointError(
            f"{folder} contains LeRobot's policy '{kind}', which is not supported "
            f"here.{did_you_mean(kind, CHUNK_KEYS)} Supported: {', '.join(sorted(CHUNK_KEYS))}."
        )
    check_numbers(folder / "config.json", description)
    steps = description.get(CHUNK_KEYS[kind], 1)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise CheckpointError(
            f"{folder / 'config.json'} has {CHUNK_KEYS[kind]}={in_one_line(steps, 40)}: it must be at least 1, the "
            "number of executed steps per policy call."
        )
    if description.get("use_peft"):
        raise CheckpointError(
            f"{folder} contains an adapter (use_peft) without the policy that it adapts. Merge the two in Python: "
            "from lerobot.policies.factory import get_policy_class; from peft import PeftModel; "
            f"PeftModel.from_pretrained(get_policy_class('{kind}').from_pretrained('BASE'), "
            f"'{folder}').merge_and_unload().save_pretrained('MERGED'); and copy the policy_*processor* files into "
            "MERGED. BASE is base_model_name_or_path in its adapter_config.json."
        )
    if description.get("temporal_ensemble_coeff") is not None:
        raise CheckpointError(
            f"{folder} averages overlapping chunks (temporal_ensemble_coeff), which is not supported for batches. In "
            "its config.json set temporal_ensemble_coeff to null and n_action_steps to the number of steps to "
            "execute."
        )
    if weights and not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder / 'model.safetensors'} does not exist: the checkpoint is incomplete.")
    return kind


def _require_transformers(kind: str) -> None:
    """Raise ConfigError if a policy in `NEED_TRANSFORMERS` is used with an untested version of transformers."""
    if kind not in NEED_TRANSFORMERS:
        return
    require_extra("transformers", "vla")
    installed = version("transformers")
    installed_version = tuple(map(int, installed.split(".")[:2]))
    first, last = (".".join(map(str, each)) for each in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    if OLDEST_TRANSFORMERS <= installed_version < NEWEST_TRANSFORMERS:
        return
    breaks = "does not work with" if installed_version >= NEWEST_TRANSFORMERS else "was not tested with"
    raise ConfigError(
        f"LeRobot's '{kind}' {breaks} transformers {installed}: install one from {first} to before {last}, pip install "
        f"'transformers>={first},<{last}'."
    )
