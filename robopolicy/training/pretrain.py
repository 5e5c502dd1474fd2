"""Behaviour cloning: fit a policy to the action chunks of episodes, of those that say who acted to what is worth it.

What a frozen encoder makes of every recorded observation may be computed once and kept: a vision-language model that
does not learn reads a picture the same way in every training step. Reading it is most of the work: of LeRobot's tiny
policies two thirds of a step, of full-sized ones more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.interventions import worth_imitating
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.policy import LearnsFromCondition, Trainable
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.regression import Regressor
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import PolicySpec
from robopolicy.nn.configuration import LearningPrecision
from robopolicy.nn.precision import learning_in
from robopolicy.policies.abilities import LearnsPast
from robopolicy.training.auxiliary import FieldHead, TellsFields, new_head, with_fields
from robopolicy.training.configuration import PretrainConfig
from robopolicy.training.experience import require_lowering
from robopolicy.training.fit import FitResult, fit

AT_ONCE = 64
"""Observations that are encoded at a time."""


def pretrain(
    policy: Trainable, episodes: Episodes, config: PretrainConfig, run: RunFolder | None = None, *, seed: int = 0
) -> FitResult:
    """Fit `policy` to `episodes` and save it to the run's checkpoint folder.

    A run that was killed goes on from its resume point and ends bit for bit in the same place. The policy ends in
    evaluation mode, with averaged weights. seed: root of the batches drawn and of the noise.
    Raises DataError where what the policy learns from holds NaN or infinity, ConfigError for a precision that policy or
    processor do not have.
    """
    require_finite_columns(episodes.to_imitate(), policy.spec.observation)
    head = new_head(policy, episodes, config, seed) if config.auxiliary_keys else None
    generators = Generators(seed, next(policy.parameters()).device)
    result = imitate(policy, [episodes], config, generators, run, "Behaviour cloning", head=head)
    if run is not None:
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
) -> FitResult:
    """Fit `policy` to all episodes of `parts`, as config says, and show `label` meanwhile.

    read: what config.keep_conditions keeps of the first parts, [N, ...] by name; the others' are added to it. head:
    tells config.auxiliary_keys from what the policy sees, and learns with it.
    Raises as `pretrain`.
    """
    require_lowering(policy, config.precision)
    device, read = next(policy.parameters()).device, [] if read is None else read
    if config.keep_conditions:  # part by part, as when nobody killed the run
        read += [read_once(policy, part.to(device), config.precision) for part in parts[len(read) :]]
    episodes = (parts[0] if len(parts) == 1 else Episodes.concatenate(parts)).to(device)
    batches = regression_batches(policy, episodes, config.batch_size, generators["batches"], read)
    model: Regressor = policy
    if head is not None:
        head.fit_units(episodes)
        model, batches = TellsFields(policy, head), with_fields(batches, episodes, config.auxiliary_keys)
    chosen = {"precision": config.precision, "micro_batch": config.micro_batch}
    return fit(model, batches, config.fit, generators, run=run, label=label, **chosen)


def regression_batches(
    policy: Trainable,
    episodes: Episodes,
    batch_size: int,
    generator: torch.Generator,
    read: Sequence[Mapping[str, Tensor]] = (),
) -> Iterator[dict[str, Any]]:
    """Yield random decisions of `episodes` for ever, as `policy.loss` takes them; `generator` is all the state.

    Where they say what a teacher would have done, that is learned in every step, whoever acted. Where they say who
    acted, what is not worth imitating is neither begun nor part of what is predicted. read: what a frozen encoder made
    of all steps, part by part (`read_once`); without it, observations are read as they come. Raises DataError where
    nothing is worth imitating.
    """
    spec = policy.spec
    device = next(policy.parameters()).device
    labels = episodes.labels if episodes.labels is not None and episodes.labels.shape[1] > 1 else None
    # A teacher's labels are right wherever the student went, so no step is left out.
    data = (episodes if labels is not None else episodes.to_imitate()).to(device)
    worth = worth_imitating(data) if labels is None else None
    columns = () if read else spec.columns
    if labels is not None:
        batches = _labelled_batches(data, labels.to(device), spec, batch_size, generator, columns)
    elif worth is not None:
        batches = _worthy_batches(data, worth, spec, batch_size, generator, columns)
    else:
        batches = data.sampler(spec.history, spec.prediction, batch_size, generator, keys=columns)
    if isinstance(policy, LearnsPast) and policy.past_steps:
        batches = _with_past(batches, data, policy.past_steps)
    return with_conditions(batches, read) if read else batches


def _with_past(batches: Iterator[dict[str, Any]], data: Episodes, count: int) -> Iterator[dict[str, Any]]:
    """Yield `batches` with what was done in the `count` steps before, for chunks that begin in the past."""
    for batch in batches:
        past, known = data.before(batch["steps"], count)
        yield {**batch, "past": past, "past_valid": known}


def _labelled_batches(
    data: Episodes,
    labels: Tensor,
    spec: PolicySpec,
    size: int,
    generator: torch.Generator,
    columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield decisions as `Episodes.sampler` does, whose actions are what a teacher decided on there, chunks [N, L, A].

    Of a policy that predicts further than the teacher, or than its episode goes on, the rest is not valid.
    """
    chosen, length = torch.arange(spec.prediction, device=data.device), labels.shape[1]
    # The teacher may predict fewer steps than the policy: its last one fills the rest, which `chosen < said` hides.
    last = chosen.clamp(max=length - 1)
    said = torch.full((data.step_count,), length, device=data.device) if data.label_steps is None else data.label_steps
    while True:
        steps = torch.randint(data.step_count, (size,), generator=generator, device=generator.device).to(data.device)
        batch = data.windows(steps, spec.history, spec.prediction, columns)
        batch["actions"], batch["action_valid"] = labels[steps][:, last], chosen < said[steps, None]
        yield batch


def _worthy_batches(
    data: Episodes,
    worth: Tensor,
    spec: PolicySpec,
    size: int,
    generator: torch.Generator,
    columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield decisions as `Episodes.sampler` does that begin among the steps `worth` [N] bool, valid up to the first
    that is not.
    """
    among = worth.nonzero()[:, 0]
    if not len(among):
        raise DataError(
            "None of these steps is worth imitating: all are a policy's own that led to an intervention or failed, or "
            "of which no success is recorded."
        )
    ahead = torch.arange(spec.prediction, device=data.device)
    while True:
        drawn = torch.randint(len(among), (size,), generator=generator, device=generator.device)
        steps = among[drawn.to(data.device)]
        batch = data.windows(steps, spec.history, spec.prediction, columns)
        # cumprod: from the first unworthy step on nothing of the chunk is imitated, even what is worthy again later.
        good = worth[(steps[:, None] + ahead).clamp(max=len(worth) - 1)].long().cumprod(1).bool()
        batch["action_valid"] = batch["action_valid"] & good
        yield batch


@torch.no_grad()
def read_once(policy: Trainable, data: Episodes, precision: LearningPrecision = "fp32") -> dict[str, Tensor]:
    """Return the encoded observation of every step of `data`, name -> [N, ...], on the device of `data`.

    Raises ConfigError where the encoder learns, sees no images, or what it makes of them does not fit into memory.
    """
    spec, found = policy.spec, {}
    # Evaluation mode: with dropout on, what is kept would be one random draw for the whole run.
    encoder = _resting(policy.eval())
    with progress("Reading", data.step_count) as advance, learning_in(precision):
        for steps in torch.arange(data.step_count, device=data.device).split(AT_ONCE):
            made = encoder.encode(data.windows(steps, spec.history, 1, spec.columns)["observation"])
            if not found:
                found = _room(made, data)
            for name, value in made.items():
                found[name][steps] = value
            advance(len(steps))
    return found


def _resting(policy: Trainable) -> LearnsFromCondition:
    """Return a policy whose encoder rests; raises ConfigError where it learns or sees no images."""
    if isinstance(policy, LearnsFromCondition) and policy.learns_from_condition and policy.caches_condition:
        return policy
    raise ConfigError(
        "keep_conditions=true keeps what a frozen encoder makes of images, and this policy has none: let its "
        "encoder rest (of LeRobot's policies policy.tuned=expert), or leave keep_conditions=false."
    )


def _room(made: Mapping[str, Tensor], data: Episodes) -> dict[str, Tensor]:
    """Return empty tensors for as many conditions as `data` has steps, made like the first ones; ConfigError."""
    _require_room(made, data.step_count, data.device)
    return {
        name: torch.empty((data.step_count, *value.shape[1:]), dtype=value.dtype, device=data.device)
        for name, value in made.items()
    }


def _require_room(made: Mapping[str, Tensor], steps: int, device: torch.device) -> int:
    """Return the bytes of so many conditions made like these; raises ConfigError where fewer are free."""
    each, available = sum(value[0].nbytes for value in made.values()), free_memory(device)
    if available is not None and each * steps > available:
        raise ConfigError(
            f"keep_conditions=true would keep {in_bytes(each)} of each of {steps} steps, {in_bytes(each * steps)}, and "
            f"{in_bytes(available)} are free: leave it false, or take fewer episodes."
        )
    return each * steps


@torch.no_grad()
def plan_conditions(policy: Trainable, data: Episodes, steps: int, precision: LearningPrecision = "fp32") -> str:
    """Return in one line what keeping the conditions of about so many steps like those of `data` will take.

    Raises ConfigError as `read_once`.
    """
    encoder = _resting(policy)
    spec = policy.spec
    device = next(policy.parameters()).device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    seen = data.to(device).windows(first, spec.history, 1, spec.columns)["observation"]
    with learning_in(precision):
        kept = _require_room(encoder.encode(seen), steps, device)
    return f"What its encoder makes of about {steps} steps is kept: {in_bytes(kept)}."


def with_conditions(
    batches: Iterator[dict[str, Any]], read: Sequence[Mapping[str, Tensor]]
) -> Iterator[dict[str, Any]]:
    """Yield `batches`, which need no observations, with what was made of those of their steps.

    read: of all steps, in parts [N, ...] by name that follow one another.
    """
    for batch in batches:
        yield {**batch, **{name: _taken([part[name] for part in read], batch["steps"]) for name in read[0]}}


def _taken(parts: Sequence[Tensor], steps: Tensor) -> Tensor:
    """Return the elements [S, ...] of parts [N, ...], which are not joined, for that would hold them twice."""
    if len(parts) == 1:
        return parts[0][steps]
    found, first = parts[0].new_empty((len(steps), *parts[0].shape[1:])), 0
    for part in parts:
        # Parts follow one another, so a step belongs to the part whose range it is in.
        here = ((steps >= first) & (steps < first + len(part))).nonzero()[:, 0]
        found[here] = part[steps[here] - first]
        first += len(part)
    return found
