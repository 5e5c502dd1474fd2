"""Rollouts as episodes: what reinforcement learning has played becomes data for world models and datasets.

Axes: B row, T decision, H history frame.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.images import Images, cameras_in
from robopolicy.core.rollouts import Rollouts, tensor_of
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.core.vectors import StateVector


def played_episodes(rollouts: Rollouts, spec: WorldSpec) -> Episodes:
    """Convert rollouts to episodes, so that a world model can learn from them or a dataset can be written.

    rollouts: whole episodes with their next observations; spec: of the world they were played in. Actions are
    clipped to its range, as the world does. The frames within an action chunk are taken from the rollouts' trace,
    if it was kept, else from the H frames of history observed after the chunk, as images always are; success is
    dated to its last step. Seeds are not known. Raises DataError on streams (cut anywhere), and where fields that
    are not traced lack next observations or were in chunks of more than H steps.
    """
    traced = {} if rollouts.extras.trace is None else StateVector.of(spec).unpack(rollouts.extras.trace)
    _require_whole(rollouts, [key for key in spec.observation if key not in traced])
    valid, duration = rollouts.valid, rollouts.duration
    row, decision, step = valid.nonzero(as_tuple=True)  # every control step, in order of time
    lengths = duration.sum(1)
    first = torch.zeros(len(row) + len(lengths), dtype=torch.bool, device=row.device)
    first[lengths.cumsum(0) - lengths + torch.arange(len(lengths), device=row.device)] = True

    def path(seen: Tensor, after: Tensor) -> Tensor:
        """Return the frames of histories [B, T, H, ...] before and after decisions one behind the other, [N, ...]."""
        found = seen.new_zeros((len(first), *seen.shape[3:]))
        found[first] = seen[:, 0, -1]
        found[~first] = after[row, decision, seen.shape[2] - duration[row, decision] + step]
        return found

    def frames(key: str) -> Tensor:
        seen = tensor_of(rollouts.observation, key)
        if key not in traced:
            return path(seen, tensor_of(rollouts.next_observation, key))
        found = seen.new_zeros((len(first), *seen.shape[3:]))
        found[first], found[~first] = seen[:, 0, -1], traced[key][row, decision, step]
        return found

    shown: dict[str, Tensor] = {}
    if cameras := cameras_in(spec.observation):
        images, after = _numbers(rollouts, next(iter(cameras)))
        shown = images.read(path(images.seen, after))
    last = step == duration[row, decision] - 1
    before = torch.where(decision > 0, rollouts.success[row, (decision - 1).clamp(min=0)], False)
    executes = spec.action if spec.clips_actions else Field(spec.action.shape)
    low, high = (torch.as_tensor(bound, device=row.device).double() for bound in (executes.low, executes.high))
    ended = rollouts.alive.sum(1) - 1
    return Episodes(
        observation_fields=dict(spec.observation),
        action_field=spec.action,
        fps=spec.fps,
        observation={key: shown[key] if key in shown else frames(key) for key in spec.observation},
        actions=torch.minimum(torch.maximum(rollouts.actions[row, decision, step].double(), low), high).float(),
        lengths=lengths,
        tasks=tuple(spec.instructions[task] for task in integers(rollouts.task[:, 0])),
        rewards={name: values[row, decision, step] for name, values in rollouts.rewards.items()},
        step_success=torch.where(last, rollouts.success[row, decision], before),
        terminated=rollouts.terminated.gather(1, ended[:, None])[:, 0],
        final_known=torch.ones_like(ended, dtype=torch.bool),
    )


def _require_whole(rollouts: Rollouts, keys: Sequence[str]) -> None:
    """Raise DataError unless `rollouts` are whole episodes whose observations show `keys` after every control step."""
    if not rollouts.whole:
        raise DataError("These rollouts are streams, cut anywhere: only whole episodes become a dataset.")
    if not keys:
        return
    if not rollouts.next_observation:
        raise DataError("These rollouts were kept without next observations, so frames are missing.")
    history = next(value.shape[2] for value in rollouts.next_observation.values() if isinstance(value, Tensor))
    longest = int(rollouts.duration.max())
    if longest > history:
        raise DataError(
            f"Decisions ran {longest} control steps, of which observations show '{keys[0]}' after the last {history}: "
            f"play them with EpisodePlayer(trace=True), which keeps vector fields, or for images in a world of "
            f"history={longest} or with a policy that decides every control step; `record` needs none of these."
        )


def _numbers(rollouts: Rollouts, key: str) -> tuple[Images, Tensor]:
    """Return the images, and the numbers [B, T, H] of the frames after every decision; DataError where none are kept.

    What follows a decision stands where the next one begins.
    """
    images = rollouts.images
    if images is None or images.after is None:
        raise DataError(f"These rollouts were kept without the '{key}' that episodes end with.")
    then = torch.cat([images.seen[:, 1:], images.seen[:, -1:]], 1)
    return images, torch.where(images.after > 0, images.after - 1, then)
