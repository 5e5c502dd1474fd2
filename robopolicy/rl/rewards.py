"""Reward functions that change rewards before advantages are computed: (rollouts, context) -> rollouts.

Episodes may get penalties per stage: for violated constraints on observations, or for missing progress. Source: GRAPE's
multi-stage costs, arXiv:2411.19309. Its released code charges max(0, cost - threshold), as does this. Frames are the
observations at the start of every chunk and at the end of the episode; those within a chunk are not used. Axes: B
episode, N = T + 1 frame, S stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array, integers, is_sequence
from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import is_dotted, load_dotted
from robopolicy.core.rollouts import Rollouts, tensor_of
from robopolicy.core.segments import Segments
from robopolicy.core.spec import TASK
from robopolicy.core.stages import Frames, Stage
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def at_last_step(rollouts: Rollouts, per_chunk: Tensor) -> Tensor:
    """Return a reward [B, T, C] that pays `per_chunk` [B, T] at the last executed control step of every chunk."""
    last = (rollouts.duration - 1).clamp(min=0)[..., None]
    return torch.zeros(rollouts.valid.shape, device=last.device).scatter(-1, last, per_chunk[..., None].float())


def last_chunk(rollouts: Rollouts) -> Tensor:
    """Return a mask [B, T] of each row's last chunk."""
    return rollouts.alive & (rollouts.alive.cumsum(1) == rollouts.alive.sum(1, keepdim=True))


def paid_at_end(rollouts: Rollouts, amount: Tensor) -> Tensor:
    """Return a reward [B, T, C] that pays `amount` [B] at the last executed step of every row."""
    return at_last_step(rollouts, torch.where(last_chunk(rollouts), amount[:, None], 0.0))


@mechanism(Slot.REWARD, "success_only", source="sparse outcome reward")
def success_only(rollouts: Rollouts, context: Context, *, keep: tuple[str, ...] = ("uncertainty",)) -> Rollouts:
    """Reward 1 at the chunk in which an episode succeeds; of the world's rewards only `keep` stays (the uncertainty
    penalty in imagination).
    """
    # `success` may stay true until the episode ends: paid is only where it turns true.
    before = torch.cat(
        [torch.zeros_like(rollouts.success[:, :1]), rollouts.success[:, :-1] & ~rollouts.ended[:, :-1]], 1
    )
    first = rollouts.success & ~before & rollouts.alive
    reward = at_last_step(rollouts, first)  # where the world itself would pay it
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={"success": reward, **other_rewards})


@mechanism(Slot.REWARD, "effort", source="control cost of robot learning")
def effort(rollouts: Rollouts, context: Context, *, cost: float = 0.1) -> Rollouts:
    """Penalise the mean squared action of every control step by `cost`."""
    charged = torch.where(rollouts.valid, -cost * rollouts.actions.square().mean(-1), 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "effort": charged})


@mechanism(
    Slot.REWARD, "gcpg", source="GRAPE (guided-cost preference generation), arXiv:2411.19309", needs=(Need.EPISODES,)
)
def guided_cost(
    rollouts: Rollouts,
    context: Context,
    *,
    own: float = 0.01,
    external: float = 1.0,
    success: float = 5.0,
    stages: str = "progress",
    parts: int = 1,
    weight: float = 1.0,
    threshold: float = 0.0,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Episode reward own * R_self + external * R_ext + success * I_success, by which GRAPE ranks episodes.

    R_self is the log-probability of all its chunks under the behaviour policy, R_ext the product over stages of
    exp(-cost), I_success whether it succeeded; the weights are those of the authors' code. Of the world's rewards only
    `keep` stays. stages: progress, task, or an import path. progress is the remaining distance to the farthest episode
    of the group, measured by the world's dense rewards (in robopolicy's tasks, the increase of the task's potential).
    It is split into `parts`, each charged weight * max(0, undone - threshold). task uses the stages of the world's task
    (`Task.stages`). An import path names a tuple of `robopolicy.core.stages.Stage`, or a function that returns one. The
    paper's language model, which proposes keypoints and writes the costs, is not included. Densities of Gaussian steps
    depend on the action's units and may exceed 1, so that R_self prefers longer episodes if noise is small: keep `own`
    small relative to the others, or 0. Stored pairs, which are already ranked, are not changed.
    """
    if "preferred" in rollouts.extras:
        return rollouts
    alive = rollouts.alive
    last = (rollouts.duration - 1).clamp(min=0)[..., None]

    def paid(per_decision: Tensor) -> Tensor:
        zeros = torch.zeros(rollouts.valid.shape, device=alive.device)
        return zeros.scatter(-1, last, per_decision[..., None].float())

    final = torch.zeros_like(alive).scatter(1, (alive.sum(1, keepdim=True) - 1).clamp(min=0), True) & alive
    sampled_mask = rollouts.mask & alive[..., None]  # a step without noise was no choice, whatever its density is
    likelihood = torch.where(sampled_mask, rollouts.logp_behaviour, 0.0).sum(-1)
    score = torch.zeros(len(alive), 1, device=alive.device)
    if external:
        costs = _stage_costs(rollouts, context, stages, (parts, weight, threshold), ("success", *keep))
        score = (-costs.sum(1)).exp()[:, None]
    success_column = rollouts.row_success.float()[:, None]
    terms = {"own": own * likelihood, "external": external * score * final, "success": success * success_column * final}
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={**{name: paid(value) for name, value in terms.items()}, **other_rewards})


def _stage_costs(
    rollouts: Rollouts, context: Context, stages: str, way: tuple[int, float, float], others: Sequence[str]
) -> Tensor:
    """Compute the cost of every episode in every stage, [B, S]; others: rewards that do not measure progress."""
    if stages == "progress":
        dense = [value for name, value in rollouts.rewards.items() if name not in others]
        if not dense:
            raise ConfigError(
                "options.gcpg.stages=progress needs a reward other than success, which this world does not have. "
                "Pass an import path to stages, or set options.gcpg.external=0."
            )
        progress = torch.where(rollouts.valid, torch.stack(dense).sum(0), 0.0).sum((1, 2))
        parts, weight, threshold = way
        return weight * (undone_costs(progress, rollouts.group, parts) - threshold).clamp(min=0)
    if stages == "task":
        task_stages = context.stages
        if not task_stages:
            raise ConfigError("options.gcpg.stages=task: this world's task defines no stages (Task.stages).")
    elif is_dotted(stages):
        task_stages = named_stages(stages)
    else:
        raise unknown_option("gcpg.stages", stages, ("progress", "task", "package.module:name"))
    return torch.as_tensor(
        stage_costs(task_stages, *frames_of(rollouts, context.instructions)), device=rollouts.group.device
    )


def named_stages(path: str) -> tuple[Stage, ...]:
    """Load the stages at "package.module:name", or those returned by a function there; raises ConfigError for anything
    else.
    """
    target = load_dotted(path, "Stages")
    target = target() if callable(target) else target
    if not is_sequence(target) or not target or not all(isinstance(item, Stage) for item in target):
        raise ConfigError(
            f"'{path}' is neither a tuple of stages nor a function that returns one (robopolicy.core.stages.Stage)."
        )
    return tuple(target)


def frames_of(rollouts: Rollouts, instructions: Sequence[str]) -> tuple[dict[str, Array], Array]:
    """Return the observations of complete episodes, key -> [B, N, *shape] float64 and `task` [B, 1], and a mask of
    valid frames.

    The frame after an episode's last chunk is the last valid one, [B, N] bool. Camera images are left out.
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
        # No decision begins in an episode's last frame, so it is taken from what followed the last decision.
        path[rows, length] = after[rows, last]
        frames[key] = _array(path.double())
    frames[TASK] = np.array([instructions[index] for index in integers(rollouts.task[:, 0])])[:, None]
    return frames, _array(torch.arange(alive.shape[1] + 1, device=alive.device) <= length[:, None])


def _array(tensor: Tensor) -> Array:
    return cast(Array, tensor.cpu().numpy())  # pyright: ignore[reportUnknownMemberType]


def stage_costs(stages: Sequence[Stage], frames: Frames, counts: Array) -> Array:
    """Compute the cost of each of B episodes in each stage, sum over constraints of weight * max(0, C - threshold).

    frames, counts: as returned by `frames_of`; the result is [B, S]. A stage lasts from the frame in which the previous
    one is done to the first in which it is done itself, or to the end. A stage that never starts is charged in the last
    frame, so an undone stage costs as much as the state it is left in. Raises ConfigError if a function does not return
    one number per frame.
    """
    order = np.arange(counts.shape[1])
    final = counts.sum(1) - 1
    begin = np.zeros(len(counts), dtype=int)
    charged: list[Array] = []
    for stage in stages:
        done = _of_frames(stage.done(frames), counts, f"{stage.name}: done").astype(bool)
        is_reached = done & counts & (order >= begin[:, None])
        end = np.where(is_reached.any(1), is_reached.argmax(1), final)
        in_stage = (order >= begin[:, None]) & (order <= end[:, None])
        total = np.zeros(len(counts))
        for constraint in stage.constraints:
            cost = _of_frames(constraint.cost(frames), counts, f"{stage.name}: cost").astype(np.float64)
            cost_of_stage = {
                "sum": (cost * in_stage).sum(1),
                "mean": (cost * in_stage).sum(1) / in_stage.sum(1),
                "last": cost[np.arange(len(cost)), end],
            }[constraint.over]
            total += constraint.weight * np.maximum(cost_of_stage - constraint.threshold, 0.0)
        charged.append(total)
        begin = np.where(is_reached.any(1), end, final)
    return np.stack(charged, 1)


def _of_frames(values: Array, counts: Array, where: str) -> Array:
    """Return values [B, N], with 0 in invalid frames, whose observations are only zero padding."""
    values = np.asarray(values)
    if values.shape != counts.shape:
        raise ConfigError(f"Stage '{where}' returned shape {values.shape} for frames {counts.shape}.")
    return np.where(counts, values, 0)


def undone_costs(gained: Tensor, group: Tensor, parts: int) -> Tensor:
    """Compute the remaining distance to the farthest episode of a group, split into `parts` equal stages, [B, parts].

    gained [B]: the increase of the potential over an episode, in units of the reward; group [B]. The last stages are
    the first to be undone; the sum over stages is the total remaining distance, and 0 for the farthest episode. Raises
    ConfigError if parts is less than 1.
    """
    if parts < 1:
        raise ConfigError(f"options.gcpg.parts={parts} must be at least 1.")
    groups = Segments.of(group)
    best = groups.maximum(gained)[groups.index]
    width = (best / parts).clamp(min=0)
    distance = best - gained
    # From the goal backwards a part costs what of it is undone; the first one also what was lost since the start.
    parts_undone = [torch.minimum((distance - place * width).clamp(min=0), width) for place in range(parts - 1)]
    return torch.stack([*parts_undone, (distance - (parts - 1) * width).clamp(min=0)][::-1], 1)
