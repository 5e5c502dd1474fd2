"""Examples for the page of a success classifier: its most confident mistakes as images, and scores along episodes."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.storage import write_atomic, write_json
from robopolicy.success.classifier import SuccessClassifier
from robopolicy.success.labels import UNKNOWN, Labels
from robopolicy.success.measures import scores_by_episode
from robopolicy.success.training import episode_of_frame

MISTAKES, EXAMPLES = "mistakes.png", "examples.json"
SHOWN = 8
"""Number of mistakes, and of episodes whose scores are drawn."""
SCALE = 128
"""Minimum height in pixels of a shown image."""


def save_examples(
    folder: Path, classifier: SuccessClassifier, episodes: Episodes, labels: Labels, names: Sequence[str]
) -> None:
    """Write the examples of labelled episodes into a run folder; mistakes.png only if the classifier reads images.

    names: name of each episode on the page.
    """
    logits = classifier.logits(episodes.observation)
    chances = classifier.probabilities(logits)
    truth = labels.frames.numpy()
    wrong = np.where(truth == 1, logits <= classifier.threshold, logits > classifier.threshold) & (truth != UNKNOWN)
    confidence = np.where(wrong, np.abs(logits - classifier.threshold), -np.inf)
    episode, order = episode_of_frame(episodes).numpy(), np.argsort(-confidence, kind="stable")
    chosen: list[int] = []
    for frame in order[: int(wrong.sum())]:
        if len(chosen) < SHOWN and episode[frame] not in episode[chosen]:
            chosen.append(int(frame))
    first = episodes.frame_starts.cpu().numpy()
    mistakes = [
        {
            "episode": names[episode[frame]],
            "frame": int(frame - first[episode[frame]]),
            "probability": float(chances[frame]),
            "label": bool(truth[frame] == 1),
        }
        for frame in chosen
    ]
    write_json(folder / EXAMPLES, {"mistakes": mistakes, "scores": score_lines(classifier, episodes, labels, logits)})
    (folder / MISTAKES).unlink(missing_ok=True)
    cameras = [key for key in classifier.fields if key.startswith(IMAGE_PREFIX)]
    if chosen and cameras:
        frames = classifier.fitted(episodes.observation)
        columns = [np.concatenate([enlarged(frames[key][frame]) for key in cameras]) for frame in chosen]
        png = io.BytesIO()
        Image.fromarray(np.concatenate(columns, 1)).save(png, format="png")
        write_atomic(folder / MISTAKES, png.getvalue())


def enlarged(image: torch.Tensor) -> np.ndarray:
    """Return an image [height, width, 3] uint8, repeated to squares of at least SCALE pixels with a margin."""
    times = max(1, SCALE // image.shape[0])
    pixels = image.cpu().numpy().repeat(times, 0).repeat(times, 1)
    size = max(SCALE, *pixels.shape[:2])
    square = np.full((size, size, 3), 255, dtype=np.uint8)
    square[: pixels.shape[0], : pixels.shape[1]] = pixels
    return np.pad(square, ((0, 4), (0, 4), (0, 0)), constant_values=255)


def score_lines(
    classifier: SuccessClassifier, episodes: Episodes, labels: Labels, logits: np.ndarray
) -> list[dict[str, Any]]:
    """Return the held probabilities of the failed episodes with the highest and the successful ones with the lowest
    scores, the hardest of both.
    """
    scores = scores_by_episode(episodes, labels, logits, classifier.hold)
    failed = sorted((each for each in scores if not each.successful), key=lambda each: -each.held.max())
    successful = sorted((each for each in scores if each.successful), key=lambda each: each.held.max())
    return [
        {
            "successful": each.successful,
            "first_success": each.first_success if each.successful else None,
            "probabilities": [round(float(value), 4) for value in classifier.probabilities(each.held)],
        }
        for each in (*failed[: SHOWN // 2], *successful[: SHOWN // 2])
    ]
