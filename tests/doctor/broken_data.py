"""Ways in which a recording goes wrong: each returns a copy of the episodes with one convention broken."""

from dataclasses import replace

import torch

from robopolicy.core.spec import IMAGE_PREFIX


def with_actions(episodes, change):
    """Apply `change` to the actions [L, A] of every episode."""
    parts = episodes.actions.split(episodes.lengths.tolist())
    return replace(episodes, actions=torch.cat([change(part.clone()) for part in parts]))


def with_frames(episodes, key, change):
    """Apply `change` to the observations [L + 1, ...] of every episode."""
    parts = episodes.observation[key].split((episodes.lengths + 1).tolist())
    changed = torch.cat([change(part.clone()) for part in parts])
    return replace(episodes, observation={**episodes.observation, key: changed})


def flipped(episodes, *dimensions):
    def change(actions):
        actions[:, list(dimensions)] *= -1
        return actions

    return with_actions(episodes, change)


def permuted(episodes, *order):
    return with_actions(episodes, lambda actions: actions[:, list(order)])


def scaled(episodes, factor, dimension=slice(None)):
    def change(actions):
        actions[:, dimension] *= factor
        return actions

    return with_actions(episodes, change)


def late(episodes, steps=1):
    """The action of t is stored at t + steps."""
    return with_actions(episodes, lambda actions: torch.cat([actions[:1].repeat(steps, 1), actions])[: len(actions)])


def early(episodes):
    """The action of t is stored at t - 1."""
    return with_actions(episodes, lambda actions: torch.cat([actions[1:], actions[-1:]]))


def frames_moved(episodes, steps):
    """The vector observations of t are stored at t + steps (steps is 1 or -1)."""
    for key in episodes.observation:
        if not key.startswith(IMAGE_PREFIX):

            def change(frames):
                return torch.cat([frames[:1], frames[:-1]]) if steps > 0 else torch.cat([frames[1:], frames[-1:]])

            episodes = with_frames(episodes, key, change)
    return episodes


def every_other(episodes):
    """Half of the frames are kept and the rate is not corrected."""
    steps = torch.cat([torch.arange(0, int(n), 2) + s for n, s in zip(episodes.lengths, episodes.starts, strict=True)])
    lengths = (episodes.lengths + 1) // 2
    ends = episodes.frame_starts + episodes.lengths
    owner = torch.repeat_interleave(torch.arange(len(episodes)), lengths)
    frames = steps + owner
    kept = torch.cat([torch.cat([part, ends[i : i + 1]]) for i, part in enumerate(frames.split(lengths.tolist()))])
    return replace(
        episodes,
        actions=episodes.actions[steps],
        lengths=lengths,
        observation={key: value[kept] for key, value in episodes.observation.items()},
        rewards=None,
        step_success=None,
    )


def doubled(episodes):
    """Every step is recorded twice and the rate is not corrected."""

    def twice(values):
        return torch.repeat_interleave(values, 2, dim=0)

    parts = {
        key: torch.cat([twice(part)[:-1] for part in value.split((episodes.lengths + 1).tolist())])
        for key, value in episodes.observation.items()
    }
    return replace(
        episodes,
        actions=twice(episodes.actions),
        lengths=2 * episodes.lengths,
        observation=parts,
        rewards=None,
        step_success=None,
    )


def swapped_elements(episodes, key, first, second):
    def change(frames):
        frames[:, [first, second]] = frames[:, [second, first]]
        return frames

    return with_frames(episodes, key, change)
