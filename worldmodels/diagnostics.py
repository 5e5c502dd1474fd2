"""Is a world model any good? One-step and open-loop errors, the shuffled-action test, and the heads' precision."""

from typing import Any

import torch
from torch import Tensor

from worldmodels.ensemble import EnsembleModel, TransitionData

HORIZONS = (1, 5, 10, 20)


@torch.no_grad()
def examine(model: EnsembleModel, data: TransitionData, generator: torch.Generator) -> dict[str, Any]:
    """Return validation figures of `model` on held-out steps `data` (whole episodes, in order of time).

    one_step_error: squared error of the mean change over its variance; shuffled_action_error: the same with other rows'
    actions (must be clearly worse, or the model ignores actions); success: precision, recall and F1 of the head;
    reward_error: squared error over variance; open_loop: by horizon, root mean squared error in standard deviations of
    the state, beside copying the first state.
    """
    order = torch.randperm(len(data), generator=generator)[:20_000]
    sample = data.take(order)
    shuffled = sample.action[torch.randperm(len(order), generator=generator)]
    true = sample.reward
    predicted = _reward(model, sample)
    return {
        "steps": len(data),
        "one_step_error": float(_one_step(model, sample, sample.action)),
        "shuffled_action_error": float(_one_step(model, sample, shuffled)),
        "reward_error": float((predicted - true).square().mean() / true.var().clamp_min(1e-12)),
        "success": _precision_recall(model.success_logit(sample.next_state) > model.success_threshold, sample.success),
        "open_loop": {str(horizon): _open_loop(model, data, horizon) for horizon in HORIZONS},
    }


def _one_step(model: EnsembleModel, data: TransitionData, action: Tensor) -> Tensor:
    members = model.config.members
    mean, _ = model.predict(data.state.expand(members, -1, -1), action.expand(members, -1, -1))
    free = model.structure.free
    target = ((data.next_state - data.state)[:, free] - model.delta_mean) / model.delta_std
    return (mean.mean(0) - target).square().mean()


def _reward(model: EnsembleModel, data: TransitionData) -> Tensor:
    raw = model.reward_head(model.reward_input(data.state, data.action, data.next_state)[None])[0, :, 0]
    return model.reward_mean + model.reward_std * raw


def _precision_recall(predicted: Tensor, label: Tensor) -> dict[str, float | int]:
    hits, found, true = int((predicted & label).sum()), int(predicted.sum()), int(label.sum())
    precision, recall = hits / max(1, found), hits / max(1, true)
    score = 2 * precision * recall / max(1e-9, precision + recall)
    return {"precision": precision, "recall": recall, "f1": score, "positives": true}


def _open_loop(model: EnsembleModel, data: TransitionData, horizon: int, rows: int = 512) -> dict[str, float] | None:
    """Follow recorded actions for `horizon` steps from states of episodes long enough; None when there are none."""
    last = len(data) - horizon
    if last < 0:
        return None
    begin = torch.arange(last + 1)
    begin = begin[data.episode[begin] == data.episode[begin + horizon - 1]]
    if not len(begin):
        return None
    begin = begin[torch.linspace(0, len(begin) - 1, min(rows, len(begin))).long()]
    latent = {"state": data.state[begin], "seed": begin.clone(), "step": torch.zeros_like(begin)}
    for step in range(horizon):
        latent, _ = model.imagine(latent, data.action[begin + step])
    true, scale = data.next_state[begin + horizon - 1], model.state_std
    error = ((latent["state"] - true) / scale).square().mean().sqrt()
    copied = ((data.state[begin] - true) / scale).square().mean().sqrt()
    return {"error": float(error), "copy_first_state": float(copied)}
