"""Behaviour cloning: fit a policy to the action chunks of episodes, of those that say who acted to what is worth it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.interventions import worth_imitating
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.regression import Regressor
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import PolicySpec
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.auxiliary import FieldHead, TellsFields, new_head, with_fields
from robopolicy.training.conditions import read_once, with_conditions
from robopolicy.training.configuration import PretrainConfig
from robopolicy.training.experience import require_lowering
from robopolicy.training.fit import FitResult, fit


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
    data = (episodes if labels is not None else episodes.to_imitate()).to(device)
    worth = worth_imitating(data) if labels is None else None
    columns = () if read else spec.columns
    if labels is not None:
        batches = _labelled_batches(data, labels.to(device), spec, batch_size, generator, columns)
    elif worth is not None:
        batches = _worthy_batches(data, worth, spec, batch_size, generator, columns)
    else:
        batches = data.sampler(spec.history, spec.prediction, batch_size, generator, keys=columns)
    if isinstance(policy, DenoisingPolicy) and policy.part.first:
        batches = _with_past(batches, data, policy.part.first)
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
        good = worth[(steps[:, None] + ahead).clamp(max=len(worth) - 1)].long().cumprod(1).bool()
        batch["action_valid"] = batch["action_valid"] & good
        yield batch
