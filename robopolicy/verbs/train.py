"""Pre-trains a policy by behaviour cloning on a LeRobotDataset, then measures its success.

policy.kind=joint learns actions, future observations and values, and plans with its own predictions. It needs data with
failures and rewards (collect.noise=[low,high]), and is evaluated with and without planning. A diffusion or flow policy
treats data with several instructions as one task, unless policy.text_encoder=words conditions it on them;
policy.kind=token always reads them. train.encoder=CHECKPOINT (a decoder-free world model) makes the policy read its
latent, so that `imagine` can fine-tune it there. train.policy=CHECKPOINT run.name=NAME continues training a robopolicy
policy, with more steps or other data, such as corrections (train.shares). If interrupted, run the same command again:
it resumes and gives the same result.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from robopolicy.building.origins import origin_of_section
from robopolicy.building.policies import load_policy, new_policy, with_model_encoder
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core import replicas
from robopolicy.core.delayed import episodes_for_world, with_latency_options
from robopolicy.core.episodes import Episodes, select_episodes
from robopolicy.core.errors import ConfigError, DataError, RobopolicyWarning
from robopolicy.core.finite_values import nonfinite_columns, require_finite_columns
from robopolicy.core.interventions import imitated_in_words, interventions_in_words
from robopolicy.core.origin import remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import PlansInternally, Policy, Trainable, require_trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import PolicySpec
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset, recorded_origin
from robopolicy.data.lerobot_reading import read_information, require_known
from robopolicy.doctor.policy import check_normalizers
from robopolicy.evaluation.report import UNPLANNED
from robopolicy.policies.abilities import SeparatesBase
from robopolicy.policies.configuration import TextEncoder
from robopolicy.policies.loading import foreign_format
from robopolicy.runs import default_path, output
from robopolicy.training.configuration import PretrainConfig
from robopolicy.training.encoders import load_encoder
from robopolicy.training.fit import FitResult, Staged, fit_stages
from robopolicy.training.pretrain import pretrain
from robopolicy.training.reading import DataRead, describe_reading, require_fit_of
from robopolicy.verbs.job import Job, Saved, print_evaluations, print_model, say_replicas, starting_checkpoint
from robopolicy.verbs.verb import Verb
from worldmodels.encoding import encode_episodes, save_encoder
from worldmodels.protocol import EncodesForPolicy

VERB = Verb(
    summary="Pre-train a diffusion, flow or token policy on a dataset",
    sections=("run", "world", "workers", "policy", "train"),
    example="robopolicy train recipe=push_cube policy.kind=flow",
    targets=("train.data",),
    world_from={"train.policy": "", "train.data": "collect/dataset"},
    resumes=True,
    replicas=True,
)


def run(config: Config) -> int:
    """Train the policy, save it and evaluate it."""
    job = Job.open(config, "train", VERB.sections, "is already trained; run.overwrite=true trains again.")
    if job is None:
        return 0
    folder, device = job.folder, job.device
    data = default_path(config, "collect", "dataset", config.train.data, "train.data")
    base = None if config.train.policy is None else continued(config, config.train.policy, device)
    renaming = config.train.rename or renaming_of(base)
    episodes = recorded_episodes = demonstrations(config, data, renaming)
    encoder = None
    if config.train.encoder is not None:
        place = default_path(config, "worldmodel", "checkpoint", config.train.encoder, "train.encoder")
        encoder = load_encoder(place, device)
        episodes = encode_episodes(encoder, episodes)
    policy = new_policy(config, episodes, device) if base is None else base
    remember_renaming(policy, renaming)
    if base is not None:
        require_learnable(data, base, episodes)
    print_model(policy, config.train)
    acting_policy = with_model_encoder(encoder, policy) if encoder is not None else policy
    reads_text = getattr(policy, "reads_instructions", None)
    reading = print_reading(
        config, (data, *config.train.extra_datasets), renaming, recorded_episodes, acting_policy.spec, reads_text
    )
    print_targets(episodes, policy, config.train.shares)
    count = config.train.evaluate_episodes
    data_origin = with_latency_options(recorded_origin(data), config.world.options)
    world: World | None = None
    if count:  # before training, so that a policy that does not fit is refused before it costs anything
        world = build_world(config.world, acting_policy, episodes=count, seed=config.run.seed, device=device)
    judged_in = None if world is None else origin_of_section(config.world, world)
    remember_origin(policy, judged_in or data_origin)
    clock = folder.clock()
    say_replicas(config.train.batch_size, "batch", "samples")
    fit_result = learn(config, policy, episodes, folder)
    if job.is_over:
        return 0
    seconds = clock.seconds
    if encoder is not None:
        save_encoder(encoder, folder.checkpoint)
    first = print_losses(folder, fit_result)
    result: dict[str, Any] = {
        "data": str(data),
        **({} if config.train.policy is None else starting_checkpoint(config.train.policy)),
        "episodes": len(episodes),
        "steps": episodes.step_count,
        "read": reading.to_json(),
        "training_steps": fit_result.steps,
        "first_losses": first,
        "losses": dict(fit_result.losses),
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
    }
    if world is not None:
        policies: dict[str, Policy] = {"policy": policy}
        if isinstance(policy, PlansInternally) and (reactive := policy.without_planning()) is not None:
            policies = {UNPLANNED: reactive, **policies}
        if encoder is not None:
            policies = {name: with_model_encoder(encoder, each) for name, each in policies.items()}
        saved = Saved({"policy": folder.checkpoint}, like=folder.checkpoint, seed=config.run.seed)
        verdicts = job.judge(world, policies, count, saved)
        world.close()
        print_evaluations(verdicts)
        result |= {name: verdict.to_json() for name, verdict in verdicts.items()}
    job.finish(result)
    return 0


def print_reading(
    config: Config,
    places: Sequence[Path],
    renamed: Mapping[str, str],
    episodes: Episodes,
    spec: PolicySpec,
    reads_text: bool | None,
) -> DataRead:
    """Print and return which columns of the datasets in `places` a policy with this spec reads.

    renamed: new names for their columns; reads_text: whether the policy reads instructions, None if it does not declare
    it.
    """
    features = {
        name: feature for path in places for name, feature in read_information(path, renamed)["features"].items()
    }
    reading = describe_reading(" and ".join(map(str, places)), features, episodes, spec.observation, reads_text)
    output.print(escape("\n".join(reading.lines())), soft_wrap=True)
    if reads_text is False and len(reading.instructions) > 1 and hasattr(config.policy.config, "text_encoder"):
        output.print(
            f"policy.text_encoder={TextEncoder.WORDS.value} makes the policy read them and distinguish the tasks."
        )
    return reading


def print_targets(episodes: Episodes, policy: Trainable, shares: Mapping[str, float]) -> None:
    """Print which actions are learned, when they are a teacher's or a person's instead of the executed ones."""
    if episodes.labels is not None and not isinstance(policy, Staged):  # which also learns what actions lead to
        output.print("Training targets: the teacher's actions (label.action), not the executed ones.")
        label_length, steps = episodes.labels.shape[1], policy.spec.prediction
        if 1 < label_length < steps:
            output.print(
                f"The teacher labels {label_length} steps ahead: predicted steps beyond them, up to {steps}, are "
                "not trained."
            )
    elif label_length := interventions_in_words(episodes):
        output.print(
            f"{label_length}.\n{imitated_in_words(episodes, isinstance(policy, Staged), shares)}.", soft_wrap=True
        )


def continued(config: Config, path: Path, device: torch.device | str = "cpu") -> Trainable:
    """Return the policy in the checkpoint `path` for further training; prints which parts stay unchanged.

    Raises ConfigError when it is another library's checkpoint, or reads a world model's latent.
    """
    if config.train.encoder is not None:
        raise ConfigError("train.encoder creates a new policy: unset it, or unset train.policy.")
    foreign = foreign_format(path)
    if foreign is not None:
        raise ConfigError(f"{path} is {foreign.library}'s: {foreign.how_to_train(path)}")
    policy = load_policy(path, device)
    if isinstance(policy, EncodesForPolicy):
        raise ConfigError(
            f"{path} reads a world model's latent. Fine-tune it in that model: robopolicy imagine {path}."
        )
    if isinstance(policy, SeparatesBase) and policy.finetuning is not None:
        output.print(
            f"{path} was fine-tuned: its frozen base is removed, and one network is trained for all denoising steps."
        )
        policy = policy.without_base()
    policy = require_trainable(policy)
    policy_config = config.policy.config
    if config.policy != Config().policy and policy_config != getattr(policy, "config", policy_config):
        output.print(f"policy.* is ignored: {path} keeps its architecture.", soft_wrap=True)
    output.print(f"Continuing from {path}; its normalisers are unchanged.", markup=False, soft_wrap=True)
    return policy


def require_learnable(data: Path, policy: Trainable, episodes: Episodes) -> None:
    """Raise DataError when an already trained policy cannot read `episodes`; warn when values lie outside its
    normalisers' range.
    """
    require_fit_of(data, episodes, policy.spec)
    for finding in check_normalizers(policy, episodes):
        if finding.problem:
            warnings.warn(
                f"The normalisers of train.policy are unchanged, but {data} lies outside the range that they were "
                f"fitted on: {finding.measured}. A new policy (without train.policy) fits its normalisers to this "
                "data.",
                RobopolicyWarning,
                stacklevel=2,
            )


def demonstrations(config: Config, data: Path, renamed: Mapping[str, str] | None = None) -> Episodes:
    """Return the episodes of the dataset `data` and of train.extra_datasets; raises DataError when a dataset cannot be
    read or does not match.

    renamed: new names for their columns and elements, None for train.rename.
    """
    section, keys = config.train, getattr(config.policy.config, "observation_keys", ()) or None
    require_known(section.rename, (data, *section.extra_datasets))
    renamed = section.rename if renamed is None else renamed
    all_episodes = episodes_for_world(config.world.options, read_dataset(data, rename=renamed))
    episodes = select_episodes(all_episodes, data, "train", section.episodes, section.exclude_episodes)
    if nonfinite_columns(episodes, keys, rewards=False):
        require_finite_columns(all_episodes, keys)  # which counts as the settings do
    places = [path.resolve() for path in (data, *section.extra_datasets)]
    if duplicates := [path for path in section.extra_datasets if places.count(path.resolve()) > 1]:
        warnings.warn(f"{duplicates[0]} is listed twice: its episodes count double.", RobopolicyWarning, stacklevel=2)
    for path in section.extra_datasets:
        other = episodes_for_world(config.world.options, read_dataset(path, rename=renamed))
        try:
            require_finite_columns(other, keys)
            episodes = Episodes.concatenate([episodes, other])
        except DataError as error:
            raise DataError(f"{path}, to be merged with {data}: {error}") from error
    return episodes


def print_losses(folder: RunFolder, fitted: FitResult) -> dict[str, float]:
    """Print the first and last logged mean of each loss (only the last if logged once); return the first ones."""
    records = folder.metrics()
    losses_of = {name: [float(each[name]) for each in records if name in each] for name in fitted.losses}
    first = {name: values[0] for name, values in losses_of.items() if values}
    for name, last in fitted.losses.items():
        first_text = f"{first[name]:.4g} at first, " if len(losses_of[name]) > 1 else ""
        output.print(escape(f"Loss '{name}': {first_text}{last:.4g} at the end"))
    output.print(f"Training steps: {fitted.steps}")
    return first


def learn(config: Config, policy: Trainable, episodes: Episodes, folder: RunFolder) -> FitResult:
    """Train the policy, save it, and return the training result."""
    if not isinstance(policy, Staged):
        learning, shares = narrowed(PretrainConfig, config.train), config.train.shares
        return pretrain(policy, episodes, learning, folder, seed=config.run.seed, shares=shares)
    settings = [
        name
        for name in ("micro_batch", "cache_encoder_outputs", "auxiliary_keys", "shares")
        if getattr(config.train, name)
    ]
    if settings:
        listing = ", ".join(f"train.{name}={getattr(config.train, name)}" for name in settings)
        raise ConfigError(
            f"{listing}: {type(policy).__name__} is trained in stages on complete batches of observations. Unset it."
        )
    require_finite_columns(episodes, rewards=True)
    generators = Generators(config.run.seed, next(policy.parameters()).device)
    *_, fit_result = fit_stages(policy, episodes, config.train.fit, generators, folder)
    if replicas.leads():
        policy.save(folder.checkpoint)
    return fit_result
