"""Quality of a world model: open-loop errors compared with copying and with shuffled actions, and the accuracy of its
heads.

One evaluation for every model, which only imagines. The model starts in held-out episodes and follows their actions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.client.element_kinds import Kind, kind_of
from robopolicy.core.episodes import Episodes
from robopolicy.core.progress import progress
from robopolicy.core.returns import SUCCESS, progress_reward
from robopolicy.core.spec import IMAGE_PREFIX, Field, element_units
from robopolicy.evaluation.image_quality import compare
from worldmodels.encoding import encode_episodes, with_fields
from worldmodels.initial_states import context_at
from worldmodels.protocol import DecoderFree, DecodesLatents, Imagined, Latent, LearnedModel, fields_read
from worldmodels.readout import HasReadout

COORDINATE = re.compile(r"^(?!.*(spin|rot|quat)).*(^|_)[xyz]$")
"""Names of coordinates of places."""

HORIZONS = (1, 2, 5, 10, 20, 30, 40, 50)


@torch.no_grad()
def examine(
    model: LearnedModel,
    episodes: Episodes,
    generator: torch.Generator,
    *,
    rows: int = 512,
    steps: int = 20_000,
    horizons: Sequence[int] = HORIZONS,
) -> dict[str, Any]:
    """Return quality metrics of `model` on held-out `episodes`.

    open_loop: by horizon and observation key, three errors when following recorded actions from `rows` steps: "model",
    "shuffled" (with other rows' actions: must be clearly worse, or the model ignores actions) and "copy" (the initial
    frame). A model without a decoder is compared with the latents of recorded frames, and its readout, if it has one,
    with the recorded vectors that it does not read. Vectors: root mean squared error in standard deviations of the
    data, lower is better. Images: PSNR in dB, higher is better, and SSIM or LPIPS under
    keys with their suffix. For one step from `steps` contexts, success: precision, recall and F1 of the head;
    reward_error: squared error over variance. None if the data does not define one: no success, none predicted, or
    constant rewards. elements: as of `element_errors`.
    """
    figures = {"steps": episodes.step_count, **one_step(model, episodes, generator, steps)}
    figures["open_loop"] = open_loop(model, episodes, generator, rows, horizons)
    return figures | {"elements": element_errors(model, episodes, rows, (0, *horizons))}


def one_step(model: LearnedModel, episodes: Episodes, generator: torch.Generator, steps: int) -> dict[str, Any]:
    """Return the accuracy of the heads after one imagined step each."""
    indices = _shuffled(episodes.step_count, generator)[:steps].sort().values
    reward, success = [], []
    for part in indices.split(4096):
        latent = model.initial(context_at(episodes, part, model.context), part.numpy())
        _, outcome = _imagine(model, latent, episodes.actions[part])
        terms = [value for name, value in outcome.rewards.items() if name != SUCCESS]
        reward.append(torch.stack(terms).sum(0).cpu())
        success.append(outcome.success.cpu())
    true_reward = progress_reward(episodes)[indices]
    assert episodes.step_success is not None
    variance = float(true_reward.var(correction=0))
    error = float((torch.cat(reward) - true_reward).square().mean())
    return {
        "reward_error": error / variance if variance > 1e-12 else None,
        "success": precision_recall(torch.cat(success), episodes.step_success[indices]),
    }


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    """Return the integers below `count` in random order, on the CPU, where recorded episodes are stored."""
    return torch.randperm(count, generator=generator, device=generator.device).cpu()


def _imagine(model: LearnedModel, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
    """Advance `model` by recorded actions [R, A], moving them from the CPU to the latent's device."""
    return model.imagine(latent, actions.to(next(iter(latent.values())).device))


def precision_recall(predicted: Tensor, label: Tensor) -> dict[str, float | int | None]:
    """Return precision, recall, F1 and the number of positives of a detector, from booleans [N].

    None when undefined: precision without predictions, recall and F1 without positives.
    """
    hits = int((predicted & label).sum())
    positives = int(predicted.sum())
    true_count = int(label.sum())
    return {
        "precision": hits / positives if positives else None,
        "recall": hits / true_count if true_count else None,
        "f1": 2 * hits / (positives + true_count) if true_count else None,
        "positives": true_count,
    }


def open_loop(
    model: LearnedModel,
    episodes: Episodes,
    generator: torch.Generator,
    rows: int,
    horizons: Sequence[int],
    begin: Tensor | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return horizon -> key -> errors; horizons that fewer than ten rows reach are omitted.

    begin: the steps from which rows are followed, [R]; None samples `rows` of them.
    """
    if begin is None:
        begin = _shuffled(episodes.step_count, generator)[:rows].sort().values
    remaining = (episodes.starts + episodes.lengths)[episodes.episode_of_step[begin]] - begin
    longest = min(max(horizons), int(remaining.max()))
    order = _shuffled(len(begin), generator)
    frames = begin + episodes.episode_of_step[begin]
    context = context_at(episodes, begin, model.context)
    truth = encode_episodes(model, episodes) if isinstance(model, DecoderFree) else episodes
    readable = readable_fields(model, episodes)
    truth = with_fields(truth, episodes, readable)
    first = {key: truth.observation[key][frames] for key in (*model.spec.observation, *readable)}
    latent, confused = (model.initial(context, begin.numpy()) for _ in range(2))
    errors: dict[str, dict[str, dict[str, float]]] = {}
    with progress("Following recorded actions", longest) as advance:
        for horizon in range(1, longest + 1):
            steps = torch.minimum(begin + horizon - 1, begin + remaining - 1)
            latent, outcome = _imagine(model, latent, episodes.actions[steps])
            confused, astray = _imagine(model, confused, episodes.actions[steps[order]])
            alive = remaining >= horizon
            if horizon in horizons and int(alive.sum()) >= 10:
                index = torch.minimum(frames + horizon, frames + remaining)
                scores = {
                    name: _scores(predicted, truth, index, alive)
                    for name, predicted in (
                        ("model", {**outcome.observation, **_read(model, latent, readable)}),
                        ("shuffled", {**astray.observation, **_read(model, confused, readable)}),
                        ("copy", first),
                    )
                }
                errors[str(horizon)] = {
                    key: {name: score[key] for name, score in scores.items()} for key in scores["model"]
                }
            advance()
    return errors


@torch.no_grad()
def element_errors(
    model: LearnedModel, episodes: Episodes, rows: int, horizons: Sequence[int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return element -> horizon -> root mean squared errors of the vectors that a model predicts or reads off its
    latent, under the recorded actions from the first frames of `rows` episodes; {} if it has none.

    Two errors each: "model", and "copy", of the initial frame. Elements are named "key name, unit", with lengths in mm.
    Horizon 0 is what is read off recorded frames. Elements that never vary and horizons that fewer than ten episodes
    reach are omitted.
    """
    read_keys = [key for key in readable_fields(model, episodes) if not key.startswith(IMAGE_PREFIX)]
    keys = [key for key in episodes.observation_fields if key in (*read_keys, *model.spec.observation)]
    keys = [key for key in keys if not key.startswith(IMAGE_PREFIX)]
    episode_indices = torch.arange(len(episodes))[:rows]
    lengths = episodes.lengths[episode_indices]
    last = max((each for each in horizons if int((lengths >= each).sum()) >= 10), default=-1)
    if not keys or last < 0:
        return {}
    begin = episodes.starts[episode_indices]
    latent = model.initial(context_at(episodes, begin, model.context), begin.numpy())
    errors: dict[str, dict[str, dict[str, float]]] = {}
    outputs: Mapping[str, Tensor] = {}
    for horizon in range(last + 1):
        if horizon:
            steps = begin + (lengths - 1).clamp_max(horizon - 1)
            latent, outcome = _imagine(model, latent, episodes.actions[steps])
            outputs = outcome.observation
        alive = lengths >= horizon
        if horizon not in horizons or int(alive.sum()) < 10:
            continue
        predicted = {**outputs, **_read(model, latent, read_keys)}
        for key in (key for key in keys if key in predicted):
            recorded_values = episodes.observation[key].flatten(1).float()
            first = episodes.frame_starts[episode_indices][alive]
            truth = recorded_values[first + horizon]
            pair = {"model": predicted[key].cpu().flatten(1)[alive], "copy": recorded_values[first]}
            error = {name: (value - truth).square().mean(0).sqrt() for name, value in pair.items()}
            for index, (name, scale) in enumerate(element_labels(key, episodes.observation_fields[key])):
                if float(recorded_values[:, index].std(correction=0)) > 1e-6:
                    each = {side: scale * float(value[index]) for side, value in error.items()}
                    errors.setdefault(name, {})[str(horizon)] = each
    return errors


def element_labels(key: str, field: Field) -> list[tuple[str, float]]:
    """Return the label "key name, unit" of every element, and the factor that turns its values into that unit: metres
    into mm.

    Where the field only lists its units, as those of our tasks do, coordinates (x, y, z) that are no rates are in m.
    """
    names = field.names or tuple(map(str, range(field.size)))
    units = element_units(field)
    if len(units) != field.size:
        lengths = ("m" in units and COORDINATE.search(name) and kind_of(name) is not Kind.RATE for name in names)
        units = tuple("m" if length else "" for length in lengths)
    # One unit for all is that of the rates where the others are cosines and sines, which have none.
    units = tuple("" if name.endswith(("cos", "sin")) else unit for name, unit in zip(names, units, strict=True))
    units_and_scales = [("mm", 1000.0) if unit == "m" else (unit, 1.0) for unit in units]
    return [
        (f"{key} {name}" + (f", {unit}" if unit else ""), scale)
        for name, (unit, scale) in zip(names, units_and_scales, strict=True)
    ]


def readable_fields(model: LearnedModel, episodes: Episodes) -> tuple[str, ...]:
    """Return the keys of the recorded fields that a model reads off its latent or draws; vectors that it is given are
    none.
    """
    if not isinstance(model, HasReadout):
        return ()
    return tuple(
        key
        for key in model.readable
        if (key not in model.reads or key.startswith(IMAGE_PREFIX)) and key in episodes.observation
    )


def _read(model: LearnedModel, latent: Latent, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the fields `keys` of latents, key -> [B, *shape]."""
    if not keys or not isinstance(model, HasReadout):
        return {}
    return dict(model.read(latent, keys))


def _scores(predicted: Mapping[str, Tensor], episodes: Episodes, frames: Tensor, alive: Tensor) -> dict[str, float]:
    """Compare predicted observations, key -> [R, ...], with recorded frames, over rows whose episode has not ended."""
    errors: dict[str, float] = {}
    for key, value in predicted.items():
        frames_of_key = episodes.observation[key]
        predicted_values, true_values = value.cpu()[alive], frames_of_key[frames][alive]
        if key.startswith(IMAGE_PREFIX):
            errors |= {key + ending: figure for ending, figure in compare(predicted_values, true_values).items()}
        else:
            scale = frames_of_key.float().std(0, correction=0)
            moving = scale > 1e-6
            if bool(moving.any()):  # of what never changes there is nothing to foretell
                error = (predicted_values.float() - true_values.float())[:, moving] / scale[moving]
                errors[key] = float(error.square().mean().sqrt())
    return errors


@dataclass(frozen=True)
class Followed:
    """Recorded images and those imagined from the same initial states under the same actions.

    real, imagined: camera key -> [R, T + 1, height, width, 3] uint8, starting with the initial frame; lengths: [R],
    number of recorded steps; after them the last real frame repeats.
    """

    real: Mapping[str, np.ndarray]
    imagined: Mapping[str, np.ndarray]
    lengths: np.ndarray


def images_imagined(model: LearnedModel) -> tuple[str, ...]:
    """Return the keys of the images that a model predicts or can decode from its latent; none for models of vectors."""
    fields = fields_read(model) if isinstance(model, DecodesLatents) else model.spec.observation
    return tuple(key for key in fields if key.startswith(IMAGE_PREFIX))


@torch.no_grad()
def follow(model: LearnedModel, episodes: Episodes, begin: Tensor, steps: int) -> Followed:
    """Imagine `steps` frames from just before the actions `begin` [R], under the recorded actions."""
    keys = images_imagined(model)
    draw = model.drawn if isinstance(model, DecodesLatents) else lambda shown: shown
    episode = episodes.episode_of_step[begin]
    remaining = (episodes.starts + episodes.lengths)[episode] - begin
    context = context_at(episodes, begin, model.context)
    latent = model.initial(context, begin.numpy())
    imagined_frames = {key: [torch.from_numpy(context.last(key))] for key in keys}
    for step in range(steps):
        actions = episodes.actions[begin + torch.clamp(remaining - 1, max=step)]
        latent, outcome = _imagine(model, latent, actions)
        images = draw(outcome.observation)
        for key in keys:
            imagined_frames[key].append(images[key].cpu())
    index = (begin + episode)[:, None] + torch.arange(steps + 1).minimum(remaining[:, None])
    real = {key: episodes.observation[key][index].numpy() for key in keys}
    return Followed(
        real, {key: torch.stack(value, 1).numpy() for key, value in imagined_frames.items()}, remaining.numpy()
    )
