"""Initial states of imagination: contexts from recorded episodes."""

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import uniforms
from robopolicy.core.sequences import SequenceData
from worldmodels.protocol import Context, Starts


def context_at(episodes: Episodes, steps: Tensor, history: int = 1) -> Context:
    """Return the recorded context just before the actions `steps` [R], with `history` frames and the actions between
    them.

    Before an episode's first frame, that frame repeats with zero actions.
    """
    return _context(SequenceData(episodes), np.array(episodes.tasks), steps, history)


def recorded_starts(episodes: Episodes, history: int = 1, steps: Tensor | None = None) -> Starts:
    """Return a function from seeds to contexts anywhere in `episodes`, or just before the actions `steps` (keyframes).

    steps: indices [N] of recorded steps; contexts of seeds [R] have R rows, of `history` frames each. Raises
    ConfigError when there are no steps.
    """
    candidates = torch.arange(episodes.step_count) if steps is None else steps
    if not len(candidates):
        raise ConfigError("There are no recorded steps to start from.")

    data, tasks = SequenceData(episodes), np.array(episodes.tasks)

    def starts(seeds: np.ndarray) -> Context:
        index = (uniforms(np.asarray(seeds, dtype=np.int64), 1)[:, 0] * len(candidates)).astype(np.int64)
        return _context(data, tasks, candidates[torch.from_numpy(index)], history)

    return starts


def keyframes(episodes: Episodes, parts: int = 4) -> Tensor:
    """Return steps [K] worth starting from: each successful episode's first step, and the steps where its progress
    reaches each fraction.

    Progress is the summed reward; the steps in between add little, and the later ones are close to success. Without
    recorded success, all episodes are used. After WoVR's keyframe-initialised rollouts. Raises ConfigError when the
    episodes have no rewards.
    """
    if episodes.reward is None:
        raise ConfigError("Keyframes need recorded rewards to measure progress, and this dataset has none.")
    successes = episodes.success if episodes.success is not None and bool(episodes.success.any()) else None
    starts = []
    for episode in range(len(episodes)) if successes is None else successes.nonzero()[:, 0].tolist():
        start, length = int(episodes.starts[episode]), int(episodes.lengths[episode])
        progress = episodes.reward[start : start + length].cumsum(0)
        # Steps before which the summed reward [length] passes each part of its largest value, if it rises all the way.
        crossings = [int((progress < progress.max() * part / parts).sum()) for part in range(1, parts)]
        starts += [start + step for step in sorted({0, *crossings}) if step < length]
    return torch.tensor(starts)


def _context(data: SequenceData, tasks: np.ndarray, steps: Tensor, history: int) -> Context:
    sequences = data.cut(steps, history - 1, 0)
    tasks_of_rows = tasks[data.episodes.episode_of_step[steps].numpy()]
    return Context(
        {key: value.numpy() for key, value in sequences.frames.items()}, tasks_of_rows, sequences.actions.numpy()
    )
