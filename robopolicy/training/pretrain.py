"""Behaviour cloning: fit a policy to the action chunks of episodes; where they record who acted, only to actions worth
imitating.

The output of a frozen encoder can be computed once per recorded observation and cached, because a frozen
vision-language model gives the same output at every training step. Encoding dominates the cost: two thirds of a step
for LeRobot's tiny policies, more for full-sized ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.core import replicas
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.interventions import imitation_mask, imitation_weights
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.policy import LearnsFromCondition, Trainable
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.regression import Regressor
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import PolicySpec
from robopolicy.nn.configuration import LearningPrecision
from robopolicy.nn.precision import training_precision
from robopolicy.policies.abilities import PredictsFromPast
from robopolicy.training.auxiliary import FieldHead, WithStatePrediction, build_state_head, with_fields
from robopolicy.training.configuration import PretrainConfig
from robopolicy.training.experience import require_lowering
from robopolicy.training.fit import FitResult, fit

AT_ONCE = 64
"""Number of observations encoded at a time."""


def pretrain(
    policy: Trainable,
    episodes: Episodes,
    config: PretrainConfig,
    run: RunFolder | None = None,
    *,
    seed: int = 0,
    shares: Mapping[str, float] | None = None,
) -> FitResult:
    """Fit `policy` to `episodes` and save it to the run's checkpoint folder.

    A killed run resumes from its resume point with a bit-identical result. The policy ends in evaluation mode, with
    averaged weights. seed: root of the batch sampling and of the noise; shares: of the samples, by kind of step
    (`core.interventions.KINDS`). Raises DataError when the training data contains NaN or infinity, ConfigError for a
    precision that policy or processor do not support.
    """
    require_finite_columns(episodes.to_imitate(), policy.spec.observation)
    head = build_state_head(policy, episodes, config, seed) if config.auxiliary_keys else None
    generators = Generators(seed, next(policy.parameters()).device)
    result = imitate(policy, [episodes], config, generators, run, "Behaviour cloning", head=head, shares=shares)
    if run is not None and replicas.leads():
        policy.save(run.checkpoint)
    return result


def imitate(
    policy: Trainable,
    parts: Sequence[Episodes],
    config: PretrainConfig,
    generators: Generators,
    run: RunFolder | None,
    label: str,
    read: list[dict[str, Tensor]] | None = None,
    head: FieldHead | None = None,
    shares: Mapping[str, float] | None = None,
) -> FitResult:
    """Fit `policy` to all episodes of `parts` with the settings of config; `label` names the progress bar.

    read: cached conditions of the first parts (config.cache_encoder_outputs), [N, ...] by name; those of the other
    parts are appended. head: predicts config.auxiliary_keys from the policy's features, and is trained with it; shares:
    as in `pretrain`, as are the errors.
    """
    require_lowering(policy, config.precision)
    device, read = next(policy.parameters()).device, [] if read is None else read
    if config.cache_encoder_outputs:  # part by part, as when nobody killed the run
        read += [read_once(policy, part.to(device), config.precision) for part in parts[len(read) :]]
    episodes = (parts[0] if len(parts) == 1 else Episodes.concatenate(parts)).to(device)
    batches = regression_batches(policy, episodes, config.batch_size, generators["batches"], read, shares)
    model: Regressor = policy
    if head is not None:
        head.fit_units(episodes)
        model, batches = WithStatePrediction(policy, head), with_fields(batches, episodes, config.auxiliary_keys)
    options = {"precision": config.precision, "micro_batch": config.micro_batch}
    return fit(model, batches, config.fit, generators, run=run, label=label, **options)


def regression_batches(
    policy: Trainable,
    episodes: Episodes,
    batch_size: int,
    generator: torch.Generator,
    read: Sequence[Mapping[str, Tensor]] = (),
    shares: Mapping[str, float] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield random batches of `episodes` for `policy.loss` indefinitely; the only state is `generator`.

    If the episodes contain teacher labels, every step is trained on them, whoever acted. If they record who acted,
    steps not worth imitating are neither sampled nor predicted. read: cached encoder outputs of all steps, one per part
    (`read_once`); without it, observations are encoded in every batch; shares: of the samples, by kind of step, see
    `core.interventions.sampling_shares`. Raises DataError when no step is worth imitating, and for shares of data that
    does not record who acted.
    """
    spec = policy.spec
    device = next(policy.parameters()).device
    labels = episodes.labels if episodes.labels is not None and episodes.labels.shape[1] > 1 else None
    # A teacher's labels are right wherever the student went, so no step is left out.
    data = (episodes if labels is not None else episodes.to_imitate()).to(device)
    worth = imitation_mask(data) if labels is None else None
    columns = () if read else spec.columns
    if shares and worth is None:
        raise DataError(
            "train.shares distinguishes who acted, which this data does not record: add corrections "
            "(collect.correct) with train.extra_datasets, or unset train.shares."
        )
    if labels is not None:
        batches = _labelled_batches(data, labels.to(device), spec, batch_size, generator, columns)
    elif worth is not None:
        batches = _worthy_batches(data, worth, spec, batch_size, generator, columns, shares or {})
    else:
        batches = data.sampler(spec.history, spec.prediction, batch_size, generator, keys=columns)
    if isinstance(policy, PredictsFromPast) and policy.past_steps:
        batches = _with_past(batches, data, policy.past_steps)
    return with_conditions(batches, read) if read else batches


def _with_past(batches: Iterator[dict[str, Any]], data: Episodes, count: int) -> Iterator[dict[str, Any]]:
    """Yield `batches` with the actions of the `count` previous steps, for chunks that start in the past."""
    for batch in batches:
        past, past_valid = data.before(batch["steps"], count)
        yield {**batch, "past": past, "past_valid": past_valid}


def _labelled_batches(
    data: Episodes,
    labels: Tensor,
    spec: PolicySpec,
    size: int,
    generator: torch.Generator,
    columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield batches as `Episodes.sampler` does, with the teacher's action chunks [N, L, A] as targets.

    Steps beyond the teacher's chunk, or beyond the end of the episode, are not valid.
    """
    offsets, length = torch.arange(spec.prediction, device=data.device), labels.shape[1]
    # The teacher may predict fewer steps than the policy: its last one fills the rest, which `offsets < label_steps`
    # hides.
    last = offsets.clamp(max=length - 1)
    label_steps = (
        torch.full((data.step_count,), length, device=data.device) if data.label_steps is None else data.label_steps
    )
    while True:
        steps = torch.randint(data.step_count, (size,), generator=generator, device=generator.device).to(data.device)
        batch = data.windows(steps, spec.history, spec.prediction, columns)
        batch["actions"], batch["action_valid"] = labels[steps][:, last], offsets < label_steps[steps, None]
        yield batch


def _worthy_batches(
    data: Episodes,
    worth: Tensor,
    spec: PolicySpec,
    size: int,
    generator: torch.Generator,
    columns: Sequence[str],
    shares: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Yield batches as `Episodes.sampler` does that start at steps in `worth` [N] bool, valid up to the first step that
    is not; shares: of the samples by kind of step, {} for equal probabilities. Kinds without a share are not imitated.
    """
    weights = imitation_weights(data, worth, shares).to(generator.device) if shares else None
    worth = worth if weights is None else weights.to(data.device) > 0
    among = worth.nonzero()[:, 0]
    if not len(among):
        raise DataError(
            "No step in this data is suitable for imitation: all are policy actions that led to an intervention or "
            "a failure, or have no recorded success."
        )
    offsets = torch.arange(spec.prediction, device=data.device)
    while True:
        if weights is None:
            indices = torch.randint(len(among), (size,), generator=generator, device=generator.device)
            steps = among[indices.to(data.device)]
        else:
            steps = torch.multinomial(weights, size, replacement=True, generator=generator).to(data.device)
        batch = data.windows(steps, spec.history, spec.prediction, columns)
        # cumprod: from the first unworthy step on nothing of the chunk is imitated, even what is worthy again later.
        worthy_mask = worth[(steps[:, None] + offsets).clamp(max=len(worth) - 1)].long().cumprod(1).bool()
        batch["action_valid"] = batch["action_valid"] & worthy_mask
        yield batch


@torch.no_grad()
def read_once(policy: Trainable, data: Episodes, precision: LearningPrecision = "fp32") -> dict[str, Tensor]:
    """Encode the observation of every step of `data`; return name -> [N, ...], on the device of `data`.

    Raises ConfigError when the encoder is trained, reads no images, or its outputs do not fit into memory.
    """
    spec, conditions = policy.spec, {}
    # Evaluation mode: with dropout on, what is kept would be one random draw for the whole run.
    encoder = _resting(policy.eval())
    with progress("Reading", data.step_count) as advance, training_precision(precision):
        for steps in torch.arange(data.step_count, device=data.device).split(AT_ONCE):
            part_condition = encoder.encode(data.windows(steps, spec.history, 1, spec.columns)["observation"])
            if not conditions:
                conditions = _room(part_condition, data)
            for name, value in part_condition.items():
                conditions[name][steps] = value
            advance(len(steps))
    return conditions


def _resting(policy: Trainable) -> LearnsFromCondition:
    """Return the policy, typed as one with a frozen encoder; raises ConfigError if its encoder is trained or it reads
    no images.
    """
    if isinstance(policy, LearnsFromCondition) and policy.learns_from_condition and policy.caches_condition:
        return policy
    raise ConfigError(
        "cache_encoder_outputs=true caches the outputs of a frozen image encoder, and this policy has none: freeze the "
        "encoder (for LeRobot policies policy.trainable=expert), or set cache_encoder_outputs=false."
    )


def _room(made: Mapping[str, Tensor], data: Episodes) -> dict[str, Tensor]:
    """Allocate tensors for the conditions of all steps of `data`, shaped like the first ones; raises ConfigError when
    they do not fit.
    """
    _require_room(made, data.step_count, data.device)
    return {
        name: torch.empty((data.step_count, *value.shape[1:]), dtype=value.dtype, device=data.device)
        for name, value in made.items()
    }


def _require_room(made: Mapping[str, Tensor], steps: int, device: torch.device) -> int:
    """Return the bytes that this number of conditions needs; raises ConfigError when fewer are free."""
    each, available = sum(value[0].nbytes for value in made.values()), free_memory(device)
    if available is not None and each * steps > available:
        raise ConfigError(
            f"cache_encoder_outputs=true would keep {in_bytes(each)} of each of {steps} steps, "
            f"{in_bytes(each * steps)}, and "
            f"{in_bytes(available)} are free: leave it false, or take fewer episodes."
        )
    return each * steps


@torch.no_grad()
def plan_conditions(policy: Trainable, data: Episodes, steps: int, precision: LearningPrecision = "fp32") -> str:
    """Return a one-line estimate of the memory for caching the conditions of this number of steps like those of `data`.

    Raises ConfigError as `read_once`.
    """
    encoder = _resting(policy)
    spec = policy.spec
    device = next(policy.parameters()).device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    observation = data.to(device).windows(first, spec.history, 1, spec.columns)["observation"]
    with training_precision(precision):
        byte_count = _require_room(encoder.encode(observation), steps, device)
    return f"Encoder outputs of about {steps} steps are cached: {in_bytes(byte_count)}."


def with_conditions(
    batches: Iterator[dict[str, Any]], read: Sequence[Mapping[str, Tensor]]
) -> Iterator[dict[str, Any]]:
    """Yield `batches`, which contain no observations, with the cached conditions of their steps.

    read: conditions of all steps, in consecutive parts [N, ...] by name.
    """
    for batch in batches:
        yield {**batch, **{name: _taken([part[name] for part in read], batch["steps"]) for name in read[0]}}


def _taken(parts: Sequence[Tensor], steps: Tensor) -> Tensor:
    """Return the elements [S, ...] of parts [N, ...] without concatenating the parts, which would double the memory."""
    if len(parts) == 1:
        return parts[0][steps]
    rows, first = parts[0].new_empty((len(steps), *parts[0].shape[1:])), 0
    for part in parts:
        # Parts follow one another, so a step belongs to the part whose range it is in.
        part_rows = ((steps >= first) & (steps < first + len(part))).nonzero()[:, 0]
        rows[part_rows] = part[steps[part_rows] - first]
        first += len(part)
    return rows
