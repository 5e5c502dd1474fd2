"""Loads policies from checkpoints, for inference or training, adapts them to a world, and selects the device."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robopolicy.configuration import Config
from robopolicy.configuration.sections.act import AUTO, InferenceSection
from robopolicy.configuration.sections.run import RunSection
from robopolicy.core import replicas
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, ConfigError, DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.machine import limit_threads
from robopolicy.core.origin import remember_folder
from robopolicy.core.policy import Policy, Trainable, require_trainable
from robopolicy.core.randomness import derive_seed
from robopolicy.core.registry import is_dotted
from robopolicy.core.spec import IMAGE_PREFIX, WorldSpec, image_sizes_of
from robopolicy.core.structured import narrowed, to_plain
from robopolicy.core.world import World
from robopolicy.data.formats.format import what_it_is
from robopolicy.data.lerobot_reading import is_dataset
from robopolicy.inference.configuration import SYNCHRONOUS, InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.inference.plan import load_plan
from robopolicy.policies.abilities import Tunable
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.policies.loading import build_policy, checkpoint_in, weights_hash
from robopolicy.training.encoders import load_with_encoder
from worldmodels.encoding import EncodedPolicy
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import DecoderFree, EncodesForPolicy, WorldModel, encoder_weights
from worldmodels.readout import HasReadout, ReadableModel, inner_model


def choose_device(run: RunSection) -> torch.device:
    """Return the device of `run.device` (auto: CUDA when there is one) and set the number of CPU threads.

    Each process of a data-parallel run has its own GPU; raises ConfigError when there are too few.
    """
    limit_threads(run.threads)
    if run.device == "auto":
        return _own_gpu() if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(run.device)
    except RuntimeError as error:
        raise ConfigError(f"run.device={run.device} is not a device: use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but no CUDA device is visible: use run.device=cpu.")
    return _own_gpu() if device.type == "cuda" and replicas.count() > 1 else device


def _own_gpu() -> torch.device:
    """Return the GPU of this process."""
    if replicas.count() == 1:
        return torch.device("cuda")
    if replicas.local_rank() >= torch.cuda.device_count():
        raise ConfigError(
            f"{replicas.local_count()} processes were started on a machine with {torch.cuda.device_count()} GPUs: "
            "start one per GPU, or set run.device=cpu."
        )
    device = torch.device("cuda", replicas.local_rank())
    torch.cuda.set_device(device)
    return device


def load_policy(folder: Path | str, device: torch.device | str = "cpu") -> Policy:
    """Load any policy checkpoint; a policy trained on a world model's latent runs behind the encoder in its checkpoint.

    Raises CheckpointError as `robopolicy.policies.load_policy` does, and when the encoder is missing; ConfigError when
    `folder` is an import path.
    """
    if is_dotted(str(folder)) and not Path(folder).exists():
        raise ConfigError(
            f"'{folder}' is an import path, but a checkpoint folder is needed: train a custom policy with "
            f"policy.kind={folder}, or record a controller with collect.controller={folder}."
        )
    try:
        policy = load_with_encoder(folder, device)
    except CheckpointError as error:
        if message := data_hint(Path(folder)):
            raise CheckpointError(message) from error
        raise
    remember_folder(policy, folder)
    return policy


def data_hint(path: Path) -> str:
    """Return an error sentence if `path` contains recorded data instead of a checkpoint, else ""."""
    if not path.exists() or (path / "config.json").is_file():
        return ""
    prefix = f"{path} contains recorded data, but a policy checkpoint is needed here."
    try:
        other = what_it_is(path)
    except DataError as error:
        return str(error)
    if other:
        return f"{prefix} {other}"
    if is_dataset(path):
        return f"{prefix} Train a policy on it: robopolicy train {shlex.quote(str(path))}"
    return ""


def fitted_for(section: InferenceSection, folder: Path, policy: Policy) -> dict[str, Any]:
    """Return the description of what failure detectors are calibrated for: checkpoint, engine, cameras, JSON-ready."""
    cameras = {camera: list(size) for camera, size in image_sizes_of(policy.spec.observation).items()}
    return {"checkpoint": weights_hash(folder), "engine": to_plain(section), "cameras": cameras}


def load_trainable(folder: Path | str, tuning: LeRobotTuning, device: torch.device | str = "cpu") -> Trainable:
    """Load a policy for training; raises as `load_policy` and `trainable` do."""
    return trainable(load_policy(folder, device), tuning)


def trainable(policy: Policy, tuning: LeRobotTuning) -> Trainable:
    """Return the trainable form of a policy; tuning: exploration and training settings of LeRobot policies.

    Raises ConfigError when the policy cannot be trained or does not support these settings.
    """
    if isinstance(policy, Tunable):
        return policy.to_trainable_by(tuning)
    if tuning != LeRobotTuning():
        raise ConfigError(
            f"The section lerobot applies to LeRobot policies only, and this is a {type(policy).__name__}."
        )
    return require_trainable(policy)


def load_acting(
    section: InferenceSection, folder: Path, device: torch.device | str = "cpu", chunking: str = SYNCHRONOUS
) -> Policy:
    """Load a policy for inference only, with the section's inference engine.

    engine=auto uses the plan that `robopolicy optimize` stored beside the checkpoint, if any. A plan for other weights,
    or one that does not fit the policy or this machine, is ignored with a warning; one measured on another machine is
    used with a warning. Engines return the executed actions, but not always the predicted ones beyond the chunk.
    Chunkings other than synchronous need these, so auto then uses the policy as trained, with a warning. Raises as
    `load_policy` does, and ConfigError when the engine does not support such policies.
    """
    folder = checkpoint_in(folder)
    policy = load_policy(folder, device)
    plan = load_plan(folder) if section.engine == AUTO else None
    if section.engine != AUTO:
        policy = with_engine(policy, narrowed(InferenceConfig, section))
    elif plan is not None:
        with_plan = partial(with_engine, policy, plan.config, plan.cache)
        policy = plan.applied(policy, with_plan, folder, torch.device(device), chunking)
    remember_folder(policy, folder)
    return policy


def with_model_encoder(model: WorldModel, policy: Policy) -> Policy:
    """Return the form of `policy` that reads real observations: with the encoder of `model` in front if the policy
    reads its latent, whether or not states are read off that latent as well.
    """
    inner = inner_model(model)
    if isinstance(inner, DecoderFree) and reads_latent(policy, inner):
        return EncodedPolicy(policy, inner)
    return policy


def reads_latent(policy: Policy, model: DecoderFree) -> bool:
    """Return whether `policy` reads the latent of `model` itself, without an encoder of its own in front."""
    return not isinstance(policy, EncodesForPolicy) and not model.spec.observation.keys().isdisjoint(
        policy.spec.observation
    )


def adapt_policy_to_world(world: World, policy: Policy) -> Policy:
    """Return the form of `policy` that acts in `world`: without its encoder inside the world model whose latent it
    reads.

    Raises ConfigError when `world` is the imagination of another model that does not output what the encoder reads.
    """
    if not (isinstance(policy, EncodesForPolicy) and isinstance(world, ImaginedWorld)):
        return policy
    model = inner_model(world.model)
    if not isinstance(model, DecoderFree):
        return policy
    fields = world.spec.observation
    if set(model.spec.observation) <= set(fields) and reads_latent_of(policy, model):
        return policy.inner
    if set(policy.spec.observation) <= set(fields):
        return policy
    raise ConfigError(
        f"The policy reads the latent of another model than that of '{world.spec.name}': a model that was trained "
        "again or further has other latents. The policy's own model is in its checkpoint, in the folder 'encoder'."
    )


def reads_latent_of(policy: EncodesForPolicy, model: DecoderFree) -> bool:
    """Return whether the encoder of `policy` is that of `model`."""
    weights, other = encoder_weights(policy.encoder), encoder_weights(model)
    return weights.keys() == other.keys() and all(
        torch.equal(weights[name], other[name].to(weights[name].device)) for name in weights
    )


def model_for(policy: Policy | None, model: WorldModel, also: Sequence[str] = ()) -> WorldModel:
    """Return `model` with the observations that `policy` reads (None: a controller), if it can read them off its
    latent; else `model` itself. also: vectors that are read in addition.

    A model with a decoder has the observations of its world; a policy trained on the model's own latent reads that.
    """
    if not isinstance(model, HasReadout) or not model.readable:
        return model
    if policy is None:
        vectors = [key for key in model.readable if not key.startswith(IMAGE_PREFIX)]
        return ReadableModel(model, (*model.spec.observation, *vectors))
    latent_keys = tuple(model.spec.observation)
    behind = isinstance(policy, EncodesForPolicy) and reads_latent_of(policy, model)
    keys = latent_keys if behind else tuple(policy.spec.observation)
    if not all(key in model.readable or key in latent_keys for key in keys):
        keys = latent_keys  # the policy is refused where it is compared with the world
    keys = tuple(dict.fromkeys((*keys, *also)))
    return model if set(keys) <= set(latent_keys) else ReadableModel(model, keys)


def require_readable(policy: Policy | None, model: WorldModel) -> None:
    """Raise ConfigError when `policy` reads what a model of latents neither outputs nor can read off its latent, with
    the setting with which it could.
    """
    if policy is None or isinstance(policy, EncodesForPolicy) or not isinstance(model, HasReadout):
        return
    missing_keys = [key for key in policy.spec.observation if key not in (*model.readable, *model.spec.observation)]
    if missing_keys:
        ratio = "drawing" if any(key.startswith(IMAGE_PREFIX) for key in missing_keys) else "readout"
        raise ConfigError(
            f"The policy reads {', '.join(missing_keys)}, but the world model of '{model.spec.name}' outputs only its "
            f"latent, off which that cannot be read: train the model with worldmodel.config.{ratio}_step_ratio=1 on "
            "data that contains it, or use a policy trained on the latent (train.encoder)."
        )


def new_policy(config: Config, episodes: Episodes, device: torch.device | str = "cpu") -> Trainable:
    """Build the configured policy with fields and normalisers from `episodes`; run.seed determines its weights."""
    spec = WorldSpec(
        config.world.name,
        episodes.observation_fields,
        episodes.action_field,
        episodes.fps,
        int(episodes.lengths.max()),
        rewards=tuple(episodes.rewards or ()),
        instructions=tuple(sorted(set(episodes.tasks))),
    )
    seed = derive_seed(config.run.seed, "initial weights")
    return build_policy(config.policy.kind, config.policy.config, spec, episodes, seed, device)


keep_former_names(
    __name__, {"behind": "with_model_encoder", "as_seen_in": "adapt_policy_to_world", "data_instead": "data_hint"}
)
