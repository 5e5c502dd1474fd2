"""Re-render episodes with another visual style by replaying their actions from their seeds."""

from dataclasses import replace

import numpy as np
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.world import World

TOLERANCE = 1e-4
"""Maximum deviation of a replay from the recording, in standard deviations; simulators are deterministic up to
rounding.
"""


def restyled(world: World, episodes: Episodes) -> Episodes:
    """Return `episodes` with images from `world`'s cameras; nothing else changes.

    world: like the episodes' own except for its visual style. Raises DataError if the episodes have no seeds, the world
    lacks one of their cameras, or the replay deviates (another world, or a non-deterministic one).
    """
    if episodes.seeds is None:
        raise DataError("Episodes without seeds cannot be rendered again: record them with 'robopolicy collect'.")
    cameras = [key for key in episodes.observation if key.startswith(IMAGE_PREFIX) and key in world.spec.observation]
    if not cameras:
        raise DataError("The world has none of the episodes' cameras: there is nothing to render.")
    vectors = [key for key in episodes.observation if not key.startswith(IMAGE_PREFIX)]
    spread = {key: episodes.observation[key].float().std(0).clamp_min(1e-6).numpy() for key in vectors}
    images = {key: torch.empty_like(episodes.observation[key]) for key in cameras}
    lengths = episodes.lengths.numpy()
    seeds = episodes.seeds.numpy()
    rows = world.batch_size
    with progress("rendering again", len(episodes)) as advance:
        for begin in range(0, len(episodes), rows):
            numbers = np.arange(begin, min(begin + rows, len(episodes)))
            frames = episodes.frame_starts[torch.from_numpy(numbers)]
            first = episodes.starts[torch.from_numpy(numbers)].numpy()
            observation = world.reset(seeds=np.resize(seeds[numbers], rows))
            for step in range(int(lengths[numbers].max()) + 1):
                live = lengths[numbers] >= step
                places = frames[torch.from_numpy(live)] + step
                _require_same(observation, episodes, vectors, spread, np.flatnonzero(live), places)
                for key in cameras:
                    images[key][places] = torch.from_numpy(observation[key][: len(numbers)][live, -1])
                if step == int(lengths[numbers].max()):
                    break
                index = np.minimum(first + step, first + lengths[numbers] - 1)
                actions = np.resize(episodes.actions[index].numpy(), (rows, episodes.actions.shape[1]))
                observation = world.step(actions[:, None].astype(np.float64)).observation
            advance(len(numbers))
    return replace(episodes, observation={**episodes.observation, **images})


def _require_same(
    observation: dict, episodes: Episodes, vectors: list[str], spread: dict, rows: np.ndarray, places: torch.Tensor
) -> None:
    for key in vectors:
        replayed_values, recorded_values = observation[key][rows, -1], episodes.observation[key][places].numpy()
        error = np.abs((replayed_values - recorded_values) / spread[key]).max(initial=0.0)
        if error > TOLERANCE:
            raise DataError(
                f"On replay '{key}' deviates by {error:.1e} standard deviations from the recording: the episodes "
                "come from another world, or the world is not deterministic."
            )
