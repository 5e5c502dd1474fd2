"""Error rates of a success classifier on labelled episodes, with intervals.

Success counts once the score exceeds the threshold in `hold` consecutive frames. Axes: E episode, F frame.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.success.calibration import clopper_pearson
from robopolicy.success.labels import UNKNOWN, Labels, frames_of

BINS = 10
"""Number of bins of the reliability diagram."""
EARLY = 3
"""A success that is accepted at most this many frames before the labelled one is on time."""


@dataclass(frozen=True)
class EpisodeScores:
    """Held scores [L] of one episode, after each step: the minimum of the last `hold` logits, -inf before there are so
    many. labels: [L] of these frames; successful: whether the episode contains a success.
    """

    held: Array
    labels: Array
    successful: bool

    @property
    def first_success(self) -> int:
        """Step of the first frame labelled as success; the length if there is none."""
        places = np.flatnonzero(self.labels == 1)
        return int(places[0]) if len(places) else len(self.labels)

    @property
    def last_failure(self) -> int:
        """Number of leading steps that certainly show no success."""
        if not self.successful:
            return len(self.labels)
        negative = np.flatnonzero(self.labels[: self.first_success] == 0)
        return max(0, min(self.first_success - EARLY, int(negative[-1]) + 1)) if len(negative) else 0

    @property
    def highest_failure(self) -> float:
        """Highest held score before success; -inf if there is no such frame."""
        part = self.held[: self.last_failure]
        return float(part.max()) if len(part) else -np.inf


def held_scores(logits: Array, hold: int) -> Array:
    """Return the minimum of the last `hold` logits [L] at every step, -inf for the first hold - 1 steps."""
    held = np.full(len(logits), -np.inf)
    if len(logits) >= hold:
        held[hold - 1 :] = np.lib.stride_tricks.sliding_window_view(logits, hold).min(-1)
    return held


def scores_by_episode(recorded: Episodes, labels: Labels, logits: Array, hold: int) -> list[EpisodeScores]:
    """Return the scores of every episode; logits: [F]. The initial frame is not read, as in a world."""
    frames = labels.frames.numpy()
    parts = [frames_of(recorded, episode) for episode in range(len(recorded))]
    return [
        EpisodeScores(
            held_scores(logits[part.start + 1 : part.stop], hold),
            frames[part.start + 1 : part.stop],
            bool(labels.episodes[episode]),
        )
        for episode, part in enumerate(parts)
    ]


def rate(count: int, total: int) -> dict[str, Any]:
    """Return a rate with its exact 95 % interval (Clopper and Pearson), JSON-ready."""
    low, high = clopper_pearson(count, total)
    return {"count": count, "total": total, "rate": count / total if total else 0.0, "low": low, "high": high}


def measure(scores: list[EpisodeScores], threshold: float) -> dict[str, Any]:
    """Return the error rates of episodes: false accepts (failed episodes counted as success), false rejects
    (successful ones not counted), early accepts (before success), precision of accepted episodes, and the mean delay.
    """
    accepted = [bool((each.held > threshold).any()) for each in scores]
    first = [int((each.held > threshold).argmax()) if yes else -1 for each, yes in zip(scores, accepted, strict=True)]
    failed = [yes for each, yes in zip(scores, accepted, strict=True) if not each.successful]
    successful = [
        (yes, each, place) for each, yes, place in zip(scores, accepted, first, strict=True) if each.successful
    ]
    early = sum(yes and place < each.last_failure for yes, each, place in successful)
    delays = [place - each.first_success for yes, each, place in successful if yes and place >= each.last_failure]
    hits = sum(yes for yes, _, _ in successful)
    return {
        "false_accepts": rate(sum(failed), len(failed)),
        "false_rejects": rate(len(successful) - hits, len(successful)),
        "early_accepts": rate(early, len(successful)),
        "precision": rate(hits, hits + sum(failed)),
        "delay": float(np.mean(delays)) if delays else None,
    }


def measure_frames(labels: Labels, logits: Array, chances: Array, threshold: float) -> dict[str, Any]:
    """Return error rates of single frames [F] and the reliability of their probabilities `chances` [F].

    reliability: one entry per non-empty bin, mean probability, fraction of successes, frames; calibration_error: their
    mean absolute difference weighted by frames (ECE, Guo et al. 2017); brier: mean squared error.
    """
    known = labels.frames.numpy() != UNKNOWN
    truth, above = labels.frames.numpy()[known] == 1, logits[known] > threshold
    chance = chances[known]
    bins = np.minimum((chance * BINS).astype(int), BINS - 1)
    reliability = [
        {
            "probability": float(chance[bins == place].mean()),
            "success": float(truth[bins == place].mean()),
            "frames": int((bins == place).sum()),
        }
        for place in range(BINS)
        if (bins == place).any()
    ]
    gaps = [each["frames"] * abs(each["probability"] - each["success"]) for each in reliability]
    return {
        "precision": rate(int((truth & above).sum()), int(above.sum())),
        "false_accepts": rate(int((~truth & above).sum()), int((~truth).sum())),
        "false_rejects": rate(int((truth & ~above).sum()), int(truth.sum())),
        "brier": float(np.square(chance - truth).mean()),
        "calibration_error": float(sum(gaps) / max(1, len(chance))),
        "reliability": reliability,
    }
