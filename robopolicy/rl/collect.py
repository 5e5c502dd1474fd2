"""Collection of continuous streams of action chunks across episode ends, and their conversion to columns of
`Rollouts`.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import SpecError
from robopolicy.core.images import FrameStore, Images, Keeping, cameras_in, store_for
from robopolicy.core.origin import prefix_errors
from robopolicy.core.player import PlayedStep, Player, PolicyActor, PolicyOutput
from robopolicy.core.policy import Policy, TensorObservation, to_tensors
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation, check_finite, require_fit
from robopolicy.core.world import World

TAUGHT = "taught"
"""Name of a latent, [B] bool, that marks chunks chosen by a teacher; rollouts store it in their extras."""


@dataclass
class Streams:
    """State of B streams between two calls of `play`.

    observation: the world's current one, [B, H, ...]; seed, name: root of the episode seeds; episodes: number of
    episodes started, so that the next new seed is number `episodes` of that root; returns: [B] float64, sum of the
    rewards of the running episodes.
    """

    observation: Observation
    seed: int
    name: str
    episodes: int
    returns: Array


def start_streams(world: World, policy: Policy, seed: int, name: str = "collect") -> Streams:
    """Reset every row with new seeds that depend only on (seed, name). Raises SpecError if policy and world do not
    match.
    """
    with prefix_errors(policy):
        require_fit(policy.spec, world.spec)
    rows = world.batch_size
    policy.reset()
    return Streams(world.reset(seeds=episode_seeds(seed, name, rows)), seed, name, rows, np.zeros(rows))


@torch.no_grad()
def play(
    world: World,
    policy: Policy,
    decisions: int,
    generator: torch.Generator,
    streams: Streams,
    *,
    deterministic: bool = False,
    version: int = 0,
    images: Keeping = "plain",
) -> Rollouts:
    """Collect `decisions` action chunks of `policy` in every row and return them as [B, T]; `streams` is advanced in
    place.

    Ended rows are reset with new seeds; `next_observation` is taken before that reset. Every row is its own group.
    images: storage mode of camera images (not, plain or packed). extras: `episode_return` [B, T], sum of rewards since
    the episode's start; `uncertainty` [B, T, C] if the world provides it. Raises NonFiniteError, before anything
    reaches the world, when an observation, action or log-probability is not finite.
    """
    actor = PolicyActor(policy, generator, deterministic=deterministic, scored=True)
    player = Player(world, actor, streams.observation)
    columns: list[dict[str, Any]] = []
    frames = store_for(images)
    for step in islice(player, decisions):
        new_column = column(step, world.spec.instructions, generator.device, version)
        # Before ended rows are reset, so that an episode's last decision holds its whole return.
        streams.returns = streams.returns + step.step.reward.sum(-1)
        new_column["extras"]["episode_return"] = torch.tensor(streams.returns, dtype=torch.float32).to(generator.device)
        # nothing follows the last column either
        store_images(new_column, frames, step.ended | (len(columns) + 1 == decisions))
        columns.append(new_column)
        _restart(player, streams, np.flatnonzero(step.ended))
        streams.observation = player.observation
    rows = torch.arange(world.batch_size, device=generator.device)
    no_parent = torch.full_like(rows, -1)
    stacked = _stack(columns)
    stored_frames = stored_images(stacked, frames)
    return Rollouts(
        **stacked, episode=rows, group=rows, parent=no_parent, branch_decision=no_parent, images=stored_frames
    )


def _restart(player: Player[PolicyOutput], streams: Streams, rows: Array) -> None:
    """Start new episodes in `rows`."""
    if not len(rows):
        return
    # Seeds are a list of which a prefix never changes: the n-th episode has the n-th seed, whoever needs it.
    seeds = episode_seeds(streams.seed, streams.name, streams.episodes + len(rows))[streams.episodes :]
    player.start(seeds, rows)
    streams.episodes += len(rows)
    streams.returns[rows] = 0.0


def column(
    played: PlayedStep[PolicyOutput], instructions: tuple[str, ...], device: torch.device, version: int
) -> dict[str, Any]:
    """Convert a policy call to one column of `Rollouts`: its fields by name, each [B, ...], without those of rows.

    "images" contains the camera images before and "images_after" those after the chunk, for `store_images`. version:
    number of updates of the policy. Raises NonFiniteError on a non-finite reward, SpecError on an instruction that is
    not in `instructions`.
    """
    before = played.info.seen
    decision = played.info.decision
    step = played.step
    for name, reward in step.rewards.items():
        check_finite(f"reward '{name}'", reward)
    after = to_tensors(step.observation, device)

    def vectors(observation: TensorObservation) -> TensorObservation:
        return {key: value for key, value in observation.items() if key != TASK and not key.startswith(IMAGE_PREFIX)}

    def tensor(array: Array, dtype: torch.dtype | None = None) -> Tensor:
        # A copy: a world may write its next step into the same arrays.
        return torch.as_tensor(np.asarray(array), dtype=dtype).to(device).clone()

    horizon_end = np.zeros_like(step.terminated) if step.horizon_end is None else step.horizon_end
    latents = dict(decision.latents)
    extras: dict[str, Tensor] = {TAUGHT: latents.pop(TAUGHT)} if TAUGHT in latents else {}
    task = torch.zeros(len(step.terminated), dtype=torch.int64, device=device)
    if TASK in before:
        task = torch.tensor([_instruction(text, instructions) for text in map(str, before[TASK])], device=device)
    if step.uncertainty is not None:
        extras["uncertainty"] = tensor(step.uncertainty, torch.float32)
    return {
        "observation": vectors(before),
        "next_observation": vectors(after),
        "images": cameras_in(before),
        "images_after": cameras_in(after),
        "latents": latents,
        "actions": decision.actions,
        "logp_behaviour": decision.logp,
        "mask": decision.mask,
        "rewards": {name: tensor(reward, torch.float32) for name, reward in step.rewards.items()},
        "valid": tensor(step.valid, torch.bool),
        "terminated": tensor(step.terminated, torch.bool),
        "truncated": tensor(step.truncated, torch.bool),
        "horizon_end": tensor(horizon_end, torch.bool),
        "success": tensor(step.success, torch.bool),
        "task": task,
        "policy_version": torch.full_like(task, version),
        "extras": extras,
    }


def store_images(column: dict[str, Any], frames: FrameStore | None, ended: Array) -> None:
    """Replace a column's images by their indices in `frames`: "seen" (before the chunk) and "after" it, [B, H].

    The image after the chunk is stored where a row `ended` [B] bool, see `Images.after`. None stores no images.
    """
    before, after = column.pop("images"), column.pop("images_after")
    if frames is None or not before:
        return
    column["seen"] = frames.add(before)
    column["after"] = torch.zeros_like(column["seen"])
    rows = np.flatnonzero(ended)
    column["after"][rows] = 1 + frames.add({key: value[rows] for key, value in after.items()})


def stored_images(columns: dict[str, Any], frames: FrameStore | None) -> Images | None:
    """Remove the indices "seen" and "after", [B, T, H], from columns; return the images they refer to, None if
    absent.
    """
    if frames is None or "seen" not in columns:
        return None
    return Images(frames.frames, columns.pop("seen"), columns.pop("after")).compact()


def _instruction(text: str, instructions: tuple[str, ...]) -> int:
    if text not in instructions:
        raise SpecError(f"The world set the task '{text}', which is not among its spec's instructions {instructions}.")
    return instructions.index(text)


def _stack(columns: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack trees of tensors with equal structure along a new time axis (axis 1)."""
    stacked: dict[str, Any] = {}
    for key, value in columns[0].items():
        parts = [column[key] for column in columns]
        stacked[key] = _stack(parts) if isinstance(value, dict) else torch.stack(parts, dim=1)
    return stacked
