"""What episodes are charged, stage by stage: by constraints on what they observed, or by the way they left undone.

Source: GRAPE's multi-stage costs, arXiv:2411.19309. Its released code charges max(0, cost - threshold), and so does
this. Frames are those that decisions begin with and the one an episode ends with; what happens inside a chunk is not
seen. Axes: B episode, N = T + 1 frame, S stage.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array, integers, is_sequence
from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import load_dotted
from robopolicy.core.rollouts import Rollouts, tensor_of
from robopolicy.core.segments import Segments
from robopolicy.core.spec import TASK
from robopolicy.core.stages import Frames, Stage


def named_stages(path: str) -> tuple[Stage, ...]:
    """Return the stages at "package.module:name", or those that a function there returns; ConfigError for others."""
    found = load_dotted(path, "Stages")
    found = found() if callable(found) else found
    if not is_sequence(found) or not found or not all(isinstance(item, Stage) for item in found):
        raise ConfigError(
            f"'{path}' is no tuple of stages, nor a function that returns one (robopolicy.core.stages.Stage)."
        )
    return tuple(found)


def frames_of(rollouts: Rollouts, instructions: Sequence[str]) -> tuple[dict[str, Array], Array]:
    """Return what whole episodes observed, key -> [B, N, *shape] float64 and `task` [B, 1], and which frames count.

    The frame after an episode's last decision is the last that counts, [B, N] bool. Camera images are left out.
    """
    alive = rollouts.alive
    length = alive.sum(1)
    last = (length - 1).clamp(min=0)
    rows = torch.arange(len(alive), device=alive.device)
    frames: dict[str, Array] = {}
    for key in rollouts.observation:
        if key == TASK:
            continue
        before = tensor_of(rollouts.observation, key)[:, :, -1]
        after = tensor_of(rollouts.next_observation, key)[:, :, -1]
        path = torch.cat([before, torch.zeros_like(before[:, :1])], 1)
        path[rows, length] = after[rows, last]
        frames[key] = _array(path.double())
    frames[TASK] = np.array([instructions[index] for index in integers(rollouts.task[:, 0])])[:, None]
    return frames, _array(torch.arange(alive.shape[1] + 1, device=alive.device) <= length[:, None])


def _array(tensor: Tensor) -> Array:
    return cast(Array, tensor.cpu().numpy())  # pyright: ignore[reportUnknownMemberType]


def stage_costs(stages: Sequence[Stage], frames: Frames, counts: Array) -> Array:
    """Return what each of B episodes is charged in each stage, sum over constraints of weight * max(0, C - threshold).

    frames, counts: as `frames_of` returns them; the result is [B, S]. A stage goes on from the frame in which the one
    before it is done to the first in which it is done itself, or to the end. One that never begins is charged in the
    last frame, so leaving a stage undone costs as much as the state it is left in. Raises ConfigError where a function
    does not return a number for each frame.
    """
    order = np.arange(counts.shape[1])
    final = counts.sum(1) - 1
    begin = np.zeros(len(counts), dtype=int)
    charged: list[Array] = []
    for stage in stages:
        done = _of_frames(stage.done(frames), counts, f"{stage.name}: done").astype(bool)
        reached = done & counts & (order >= begin[:, None])
        end = np.where(reached.any(1), reached.argmax(1), final)
        inside = (order >= begin[:, None]) & (order <= end[:, None])
        total = np.zeros(len(counts))
        for constraint in stage.constraints:
            cost = _of_frames(constraint.cost(frames), counts, f"{stage.name}: cost").astype(np.float64)
            over = {
                "sum": (cost * inside).sum(1),
                "mean": (cost * inside).sum(1) / inside.sum(1),
                "last": cost[np.arange(len(cost)), end],
            }[constraint.over]
            total += constraint.weight * np.maximum(over - constraint.threshold, 0.0)
        charged.append(total)
        begin = np.where(reached.any(1), end, final)
    return np.stack(charged, 1)


def _of_frames(values: Array, counts: Array, where: str) -> Array:
    """Return values [B, N], 0 in frames that do not count: they are made of zeros, and nobody asked about those."""
    values = np.asarray(values)
    if values.shape != counts.shape:
        raise ConfigError(f"Stage '{where}' returned shape {values.shape} for frames {counts.shape}.")
    return np.where(counts, values, 0)


def undone_costs(gained: Tensor, group: Tensor, parts: int) -> Tensor:
    """Return the way that is left to where the farthest of a group came, cut in `parts` even stages, [B, parts].

    gained [B]: the increase of the potential over an episode, in units of the reward; group [B]. The last stages are
    the first to be undone; the sum over stages is the whole way left, and 0 for the farthest. Raises ConfigError for
    less than one part.
    """
    if parts < 1:
        raise ConfigError(f"options.gcpg.parts={parts}: there is at least 1 stage.")
    groups = Segments.of(group)
    best = groups.maximum(gained)[groups.index]
    width = (best / parts).clamp(min=0)
    left = best - gained
    # From the goal backwards a part costs what of it is undone; the first one also what was lost since the start.
    undone = [torch.minimum((left - place * width).clamp(min=0), width) for place in range(parts - 1)]
    return torch.stack([*undone, (left - (parts - 1) * width).clamp(min=0)][::-1], 1)
