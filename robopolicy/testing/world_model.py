"""Conformance test for world models: `check_world_model` verifies every testable requirement of `LearnedModel`.

A failure is an AssertionError whose text names the class and the violated requirement. Model quality is not tested: see
`robopolicy.evaluation.world_model`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.regression import Regression
from robopolicy.core.spec import WorldSpec
from robopolicy.testing.world import check_world
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import context_at, recorded_starts
from worldmodels.protocol import ChunkModel, DecoderFree, Imagined, Latent, LearnedModel, WorldModel

SEEDS = 7_000
"""First episode seed; seeds count up from here."""


def check_world_model(
    kind: type[LearnedModel],
    config: object,
    spec: WorldSpec,
    episodes: Episodes,
    *,
    steps: int = 2,
    rows: int = 4,
    tolerance: float = 1e-4,
) -> None:
    """Raise AssertionError naming the first requirement of `LearnedModel` that a world model class violates.

    config: argument of its `build`; spec, episodes: a world and recordings of it, a dozen short ones are enough; steps:
    training steps per stage; rows: B, at least 3; tolerance: allowed difference between equal episodes in other rows
    and batches, in world units, since rounding in large products accumulates (0 is bitwise).

    Checked: equal seeds build equal models and global randomness is not used; batches and losses repeat with equal
    generators, losses are [N], finite and have gradients; a few steps change weights; 101 quantiles ascend; latents and
    imagined steps have the right names, shapes and types and are finite; input latents are not modified; an episode
    depends only on its seed and actions, not on row or batch, and copies branch exactly; a described and restored model
    imagines identically; steps generated together equal those imagined one by one; and the `ImaginedWorld` around the
    model fulfils the `World` contract.
    """
    if rows < 3:
        raise ValueError("check_world_model needs rows >= 3 to distinguish rows.")
    state = torch.get_rng_state()
    model = _check_build(kind, config, spec, episodes)
    _check_spec(model, spec)
    for name, (part, share) in model.stages().items():
        _promise(model, share > 0, f"stages: the share of '{name}' must be positive, not {share}")
        _check_stage(model, name, part, episodes, steps)
    model.calibrate(episodes)
    module(model).eval()
    _promise(
        model, torch.equal(state, torch.get_rng_state()), "no random numbers are drawn from torch's global generator"
    )
    _check_quantiles(model)
    latent = _check_initial(model, episodes, rows)
    _check_imagine(model, latent)
    _check_rows(model, latent, tolerance)
    _check_restored(kind, model, latent)
    if isinstance(model, ChunkModel):
        _check_generate(model, latent, tolerance)
    starts = recorded_starts(episodes, model.context)
    check_world(lambda batch: ImaginedWorld(model, starts, batch, history=2), renders=False, tolerance=tolerance)
    _promise(
        model,
        torch.equal(state, torch.get_rng_state()),
        "imagining draws no random numbers from torch's global generator",
    )


def module(model: LearnedModel | Regression) -> nn.Module:
    """Return a model, or the trained part of one of its stages, as nn.Module; raises AssertionError if it is none."""
    _promise(model, isinstance(model, nn.Module), "the model is a torch.nn.Module")
    assert isinstance(model, nn.Module)
    return model


def _check_build(kind: type[LearnedModel], config: object, spec: WorldSpec, episodes: Episodes) -> LearnedModel:
    """Build twice with the same seed but different global randomness."""
    model = kind.build(config, spec, episodes, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        twin = kind.build(config, spec, episodes, 0)
    missing_names = [name for name in _members(LearnedModel) if not hasattr(model, name)]
    _promise(
        model, not missing_names, f"the model has all members of `LearnedModel`; it lacks {', '.join(missing_names)}"
    )
    first, second = module(model).state_dict(), module(twin).state_dict()
    is_same = set(first) == set(second) and all(torch.equal(value, second[name]) for name, value in first.items())
    _promise(model, is_same, "build: equal seeds give equal weights, whatever the global generator")
    return model


def _check_spec(model: LearnedModel, spec: WorldSpec) -> None:
    model_spec = model.spec
    _promise(model, bool(model_spec.rewards), "spec: there are reward terms")
    _promise(
        model, model_spec.action == spec.action and model_spec.fps == spec.fps, "spec: actions and fps are the world's"
    )
    _promise(model, model_spec.instructions == spec.instructions, "spec: instructions are the world's")
    _promise(model, isinstance(model.context, int) and model.context >= 1, "context is a number of frames, 1 or more")
    fields_in_use = model.reads if isinstance(model, DecoderFree) else model_spec.observation
    unknown_keys = [key for key, field in fields_in_use.items() if spec.observation.get(key) != field]
    _promise(
        model,
        not unknown_keys,
        f"the model reads and decodes only fields of the world; not {', '.join(unknown_keys)} (see `DecoderFree`)",
    )


def _check_stage(model: LearnedModel, name: str, part: Regression, episodes: Episodes, steps: int) -> None:
    """Compare two batches from equal generators, and two losses, and train for some steps."""
    fitted_module, label = module(part), f"stage '{name}'"
    twins = [list(islice(_batches(part, episodes, seed), 2)) for seed in (3, 3, 4)]
    _promise(model, _same(twins[0], twins[1]), f"{label}: equal generators give equal batches")
    _promise(model, not _same(twins[0], twins[2]), f"{label}: batches are drawn with the given generator")
    fitted_module.train()
    batch = twins[0][0]
    losses, second_losses = (part.loss(batch, torch.Generator().manual_seed(5)) for _ in range(2))
    _promise(model, bool(losses), f"{label}: loss has named parts")
    for key, value in losses.items():
        text = f"{label}: loss '{key}' is [N] and finite"
        _promise(model, value.ndim == 1 and bool(value.isfinite().all()), f"{text}, not {list(value.shape)}")
    _promise(model, _same(losses, second_losses), f"{label}: equal generators give equal losses")
    weights = [weight for weight in fitted_module.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    optimiser = torch.optim.Adam(weights, 1e-3)
    for training_batch in islice(_batches(part, episodes, 6), steps):
        optimiser.zero_grad()
        torch.stack(
            [value.mean() for value in part.loss(training_batch, torch.Generator().manual_seed(7)).values()]
        ).sum().backward()
        optimiser.step()
    has_changed = any(not torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    finite = all(bool(weight.isfinite().all()) for weight in weights)
    _promise(model, has_changed and finite, f"{label}: {steps} training steps change the weights, which stay finite")


def _check_quantiles(model: LearnedModel) -> None:
    quantiles = model.uncertainty_quantiles
    _promise(model, tuple(quantiles.shape) == (101,), f"uncertainty_quantiles is [101], not {list(quantiles.shape)}")
    ascending = bool(quantiles.isfinite().all()) and bool((quantiles.diff() >= 0).all())
    _promise(model, ascending, "uncertainty_quantiles is finite and sorted after calibrate")


def _check_initial(model: LearnedModel, episodes: Episodes, rows: int) -> Latent:
    """Initialise with as many frames as the model reads, with one, and with frames without known actions."""
    steps = torch.linspace(0, episodes.step_count - 1, rows).long()
    seeds = SEEDS + np.arange(rows)
    context = context_at(episodes, steps, model.context)
    latent = model.initial(context, seeds)
    for name, value in latent.items():
        _promise(
            model,
            len(value) == rows,
            f"initial: latent '{name}' has one row per episode, not shape {list(value.shape)}",
        )
        _promise(model, not value.requires_grad, f"initial: latent '{name}' requires no gradient")
    _promise(
        model, _same(latent, model.initial(context, seeds)), "initial: equal contexts and seeds give equal latents"
    )
    longer_context = context_at(episodes, steps, model.context + 2)
    for start in (
        context_at(episodes, steps, 1),
        longer_context,
        type(context)(longer_context.observation, longer_context.task),
    ):
        other = model.initial(start, seeds)
        is_same = {name: value.shape for name, value in other.items()} == {
            n: value.shape for n, value in latent.items()
        }
        _promise(
            model, is_same, "initial: a context of any length, with actions or without, gives latents of one shape"
        )
    if isinstance(model, DecoderFree):
        _check_observation(model, model.show(latent), rows, "show")
    return latent


def _check_imagine(model: LearnedModel, latent: Latent) -> None:
    """Check one step and its result: names, shapes, types, and dependence on latent, seed and actions only."""
    rows, before = len(next(iter(latent.values()))), _copied(latent)
    actions = _actions(model, rows, 1)[:, 0]
    actions_copy = actions.clone()
    next_latent, outcome = model.imagine(latent, actions)
    _promise(model, _same(before, latent), "imagine: the given latent is not modified")
    _promise(model, torch.equal(actions_copy, actions), "imagine: the given actions are not modified")
    layout = {name: (value.shape, value.dtype) for name, value in latent.items()}
    after = {name: (value.shape, value.dtype) for name, value in next_latent.items()}
    _promise(model, after == layout, "imagine: the next latent has the same names, shapes and types")
    _check_observation(model, outcome.observation, rows, "imagine")
    _promise(model, set(outcome.rewards) == set(model.spec.rewards), f"imagine: the rewards are {model.spec.rewards}")
    for name, value in {**outcome.rewards, "uncertainty": outcome.uncertainty}.items():
        is_right = tuple(value.shape) == (rows,) and value.is_floating_point() and bool(value.isfinite().all())
        _promise(
            model, is_right and not value.requires_grad, f"imagine: {name} is [B], finite, floating, without gradient"
        )
    _promise(model, bool((outcome.uncertainty >= 0).all()), "imagine: uncertainty is not negative")
    for name, flag in (("success", outcome.success), ("terminated", outcome.terminated)):
        is_right = tuple(flag.shape) == (rows,) and flag.dtype == torch.bool
        _promise(model, is_right, f"imagine: {name} is [B] bool, not {list(flag.shape)} {flag.dtype}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        second_result = model.imagine(before, actions)
    _promise(
        model,
        _same((next_latent, outcome), second_result),
        "imagine: equal latents and actions give bitwise equal results",
    )
    if isinstance(model, DecoderFree):
        observation = model.show(next_latent)
        is_same = all(torch.equal(observation[key], outcome.observation[key]) for key in model.spec.observation)
        _promise(model, is_same, "show: the observation returned by a step equals the decoded new latent")


def _check_rows(model: LearnedModel, latent: Latent, tolerance: float) -> None:
    """Permute rows, run one alone, and branch copies."""
    rows = len(next(iter(latent.values())))
    actions = _actions(model, rows, 3)
    all_outcomes = _followed(model, latent, actions)
    order = torch.arange(rows - 1, -1, -1)
    for index, text in (
        (order, "an episode is the same in any row"),
        (order[:1], "an episode is the same in a batch of one"),
        (order[[0, 0, 1]], "copies of a latent continue identically"),
    ):
        part = _followed(model, {name: value[index] for name, value in latent.items()}, actions[index])
        for first, second in zip(all_outcomes, part, strict=True):
            _promise(model, _near(_rows(first, index), second, tolerance), f"imagine: {text} (within {tolerance})")
    next_latent, _ = model.imagine(latent, actions[:, 0])
    branch = _copied(next_latent)
    model.imagine(next_latent, -actions[:, 1])
    is_same = _same(model.imagine(branch, actions[:, 1])[1], all_outcomes[1])
    _promise(
        model, is_same, "imagine: a copied latent continues bitwise identically, whatever is imagined in other rows"
    )


def _check_restored(kind: type[LearnedModel], model: LearnedModel, latent: Latent) -> None:
    """Describe, restore and load as a checkpoint does, including JSON."""
    weights = {name: value.clone() for name, value in module(model).state_dict().items()}
    description = json.loads(json.dumps(model.description()))
    restored = kind.restore(description, WorldSpec.from_json(json.loads(json.dumps(model.spec.to_json()))), weights)
    module(restored).load_state_dict(weights, strict=True)
    module(restored).eval()
    _promise(model, restored.spec == model.spec, "restore: the spec is the one that was described")
    _promise(model, restored.context == model.context, "restore: the context is the one that was described")
    rows = len(next(iter(latent.values())))
    actions = _actions(model, rows, 2)
    is_same = _same(_followed(model, latent, actions), _followed(restored, latent, actions))
    _promise(model, is_same, "restore: the restored model imagines bitwise the same")


def _check_generate(model: ChunkModel, latent: Latent, tolerance: float) -> None:
    """Imagine seven steps jointly, in two parts, and one by one."""
    rows = len(next(iter(latent.values())))
    actions = _actions(model, rows, 7)
    single = _followed(model, latent, actions)
    _, together = model.generate(latent, actions)
    next_latent, parts = model.generate(latent, actions[:, :3])
    parts = [*parts, *model.generate(next_latent, actions[:, 3:])[1]]
    for outcomes in (together, parts):
        _promise(model, len(outcomes) == len(single), "generate: there is one imagined step per action")
        is_same = all(_near(first, second, tolerance) for first, second in zip(single, outcomes, strict=True))
        _promise(model, is_same, f"generate: steps equal those of single imagine calls (within {tolerance})")


def _check_observation(model: WorldModel, shown: Mapping[str, Tensor], rows: int, where: str) -> None:
    fields = model.spec.observation
    _promise(
        model, set(shown) == set(fields), f"{where}: the observation has {', '.join(fields)}, not {', '.join(shown)}"
    )
    for key, field in fields.items():
        value = shown[key]
        right_shape = tuple(value.shape) == (rows, *field.shape)
        _promise(
            model, right_shape, f"{where}: '{key}' is [B, {', '.join(map(str, field.shape))}], not {list(value.shape)}"
        )
        image = field.dtype == "uint8"
        right = value.dtype == torch.uint8 if image else value.is_floating_point() and bool(value.isfinite().all())
        _promise(model, right, f"{where}: '{key}' is {'uint8' if image else 'floating and finite'}, not {value.dtype}")


def _followed(model: WorldModel, latent: Latent, actions: Tensor) -> list[Imagined]:
    """Imagine actions [B, T, A] one step at a time."""
    outcomes = []
    for action in actions.unbind(1):
        latent, outcome = model.imagine(latent, action)
        outcomes.append(outcome)
    return outcomes


def _actions(model: WorldModel, rows: int, steps: int) -> Tensor:
    """Return random actions [B, T, A] within the bounds of the spec and within [-1, 1]."""
    field, generator = model.spec.action, torch.Generator().manual_seed(13)
    low, high = (torch.as_tensor(bound).expand(field.shape).clamp(-1, 1) for bound in (field.low, field.high))
    return low + (high - low) * torch.rand(rows, steps, *field.shape, generator=generator, dtype=torch.float64)


def _batches(part: Regression, episodes: Episodes, seed: int) -> Iterator[dict[str, Any]]:
    return part.batches(episodes, torch.Generator().manual_seed(seed))


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested dictionaries, sequences and dataclasses, in name order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for key in sorted(value) for tensor in _tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if is_dataclass(value):
        return [tensor for item in fields(value) for tensor in _tensors(getattr(value, item.name))]
    return []


def _same(first: object, second: object) -> bool:
    """Whether all tensors in two structures are bitwise equal."""
    pairs = _tensors(first), _tensors(second)
    return len(pairs[0]) == len(pairs[1]) and all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def _near(first: Imagined, second: Imagined, tolerance: float) -> bool:
    """Whether two imagined steps are equal up to `tolerance`."""
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    return all(
        first_tensor.shape == other.shape
        and not bool(((first_tensor.double() - other.double()).abs() > tolerance).any())
        for first_tensor, other in pairs
    )


def _rows(imagined: Imagined, index: Tensor) -> Imagined:
    """Select rows of an imagined step."""
    return Imagined(
        {key: value[index] for key, value in imagined.observation.items()},
        {name: value[index] for name, value in imagined.rewards.items()},
        imagined.success[index],
        imagined.terminated[index],
        imagined.uncertainty[index],
    )


def _copied(latent: Latent) -> Latent:
    return {name: value.clone() for name, value in latent.items()}


def _members(protocol: type) -> list[str]:
    """Return the member names of a protocol, including inherited ones."""
    kinds = [kind for kind in protocol.__mro__ if getattr(kind, "_is_protocol", False)]
    return sorted({name for kind in kinds for name in vars(kind) if not name.startswith("_")})


def _promise(model: object, kept: bool, text: str) -> None:
    assert kept, f"{type(model).__name__} violates the WorldModel interface, which requires: {text}."
