"""Success labels of recorded frames: from a column, from the success of episodes, or from a small file.

Axes: E episode, N step, F = N + E frame (see `core.episodes`).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.storage import read_text

UNKNOWN = -1
"""Label of a frame that is neither used in training nor in the evaluation."""
FRAMES, EPISODES = "frames", "episodes"
COLUMNS = ("episode", "success", "first_frame", "last_frame")
"""Columns of a labels file; the last two are optional."""
TRUE, FALSE = ("1", "true", "yes", "success"), ("0", "false", "no", "failure")
LARGEST_FILE = 2**24
"""Maximum size of a labels file in bytes."""


@dataclass(frozen=True)
class Labels:
    """frames: [F] int8, 1 success, 0 no success, -1 unknown; episodes: [E] bool, the episode contains a success."""

    frames: Tensor
    episodes: Tensor

    def select(self, recorded: Episodes, index: Sequence[int] | Tensor) -> "Labels":
        """Return the labels of the episodes `index` [n] of `recorded`, in that order."""
        parts = [frames_of(recorded, int(episode)) for episode in index]
        frames = torch.cat([self.frames[part] for part in parts])
        return Labels(frames, self.episodes[torch.as_tensor(index).long()])


def frames_of(recorded: Episodes, episode: int) -> slice:
    """Return the slice of an episode's L + 1 frames."""
    first = int(recorded.frame_starts[episode])
    return slice(first, first + int(recorded.lengths[episode]) + 1)


def from_steps(recorded: Episodes, values: Tensor) -> Labels:
    """Return labels from one value per step [N]: 1, 0, or NaN for unknown.

    A value describes the frame after its step, and the first frame counts as no success. Where the data lack the last
    frame, as LeRobot's do, it describes the frame in the same row instead, as in LeRobot's reward classifiers.
    Raises DataError for any other value.
    """
    values = values.double()
    other = values[(values != 0) & (values != 1) & ~values.isnan()]
    if len(other):
        raise DataError(f"A label is {other[0].item():g}: success labels are 1 (success), 0 (none) or NaN (unknown).")
    by_step = torch.where(values.isnan(), UNKNOWN, values).to(torch.int8)
    frames = torch.full((recorded.step_count + len(recorded),), UNKNOWN, dtype=torch.int8)
    ahead = torch.ones(len(recorded), dtype=torch.bool) if recorded.final_known is None else recorded.final_known.cpu()
    episode = recorded.episode_of_step.cpu()
    frames[torch.arange(recorded.step_count) + episode + ahead[episode].long()] = by_step
    frames[recorded.frame_starts.cpu()[ahead]] = 0
    return Labels(frames, _any_success(recorded, frames))


def from_episodes(recorded: Episodes, success: Tensor, last_frames: int) -> Labels:
    """Return labels from the success of whole episodes [E] bool.

    The last `last_frames` frames of a successful episode are successes. Its first half counts as no success, and the
    frames in between are unknown, because the moment of success is. All frames of a failed episode are no success.
    """
    frames = torch.zeros(recorded.step_count + len(recorded), dtype=torch.int8)
    known = torch.ones(len(recorded), dtype=torch.bool) if recorded.final_known is None else recorded.final_known.cpu()
    for episode in range(len(recorded)):
        part = frames_of(recorded, episode)
        last = part.stop if known[episode] else part.stop - 1
        if success[episode]:
            frames[part.start + (last - part.start) // 2 : last] = UNKNOWN
            frames[max(part.start, last - last_frames) : last] = 1
        frames[last : part.stop] = UNKNOWN
    return Labels(frames, _any_success(recorded, frames))


def constant(recorded: Episodes, label: int) -> Labels:
    """Return labels of data in which every frame shows success (1) or none does (0)."""
    frames = torch.full((recorded.step_count + len(recorded),), label, dtype=torch.int8)
    if recorded.final_known is not None:
        frames[(recorded.frame_starts + recorded.lengths).cpu()[~recorded.final_known.cpu()]] = UNKNOWN
    return Labels(frames, torch.full((len(recorded),), bool(label)))


def from_file(recorded: Episodes, path: Path, last_frames: int) -> Labels:
    """Return labels from a CSV file with the columns episode, success and, optionally, first_frame and last_frame.

    Without frames a row labels the whole episode (`from_episodes`); with frames it labels these frames, both included,
    and the other frames of the episode are unknown. Episodes that no row names are unknown. Raises DataError, naming
    the row, for a missing column or an invalid value.
    """
    rows = list(csv.DictReader(read_text(path, DataError, limit=LARGEST_FILE).splitlines()))
    if not rows or not {"episode", "success"} <= rows[0].keys():
        raise DataError(f"{path} has no rows with the columns episode and success. First line: {','.join(COLUMNS)}.")
    frames = torch.full((recorded.step_count + len(recorded),), UNKNOWN, dtype=torch.int8)
    whole = torch.zeros(len(recorded), dtype=torch.bool)
    named: dict[int, bool] = {}
    for number, row in enumerate(rows, 2):
        where = f"{path}, line {number}"
        episode, success = _number(row["episode"], len(recorded) - 1, f"{where}: episode"), _flag(row["success"], where)
        part = frames_of(recorded, episode)
        if not (row.get("first_frame") or row.get("last_frame")):
            named[episode] = success
            continue
        last = part.stop - part.start - 1
        first_frame = _number(row.get("first_frame") or "0", last, f"{where}: first_frame")
        last_frame = _number(row.get("last_frame") or str(last), last, f"{where}: last_frame")
        frames[part.start + first_frame : part.start + last_frame + 1] = int(success)
    for episode, success in named.items():
        whole[episode] = success
    by_episode = from_episodes(recorded, whole, last_frames).frames
    for episode in named:
        part = frames_of(recorded, episode)
        frames[part] = torch.where(frames[part] == UNKNOWN, by_episode[part], frames[part])
    return Labels(frames, _any_success(recorded, frames))


def labels_of(recorded: Episodes, source: str, last_frames: int, column: Tensor | None, where: object) -> Labels:
    """Return the labels that the setting `source` selects; column: [N], the column that it names.

    Raises DataError, with a way out, when the data do not record success.
    """
    if source.endswith(".csv"):
        return from_file(recorded, Path(source), last_frames)
    if column is not None:
        return from_steps(recorded, column)
    if recorded.step_success is None or recorded.success is None:
        raise DataError(
            f"{where} does not record success (no column next.success). Name another column of 0 and 1, "
            "success.labels=next.reward, or list episodes in a file with the header 'episode,success', "
            "success.labels=labels.csv."
        )
    if source == FRAMES:
        return first_successes(recorded, from_steps(recorded, recorded.step_success.cpu()), last_frames)
    return from_episodes(recorded, recorded.success.cpu(), last_frames)


def first_successes(recorded: Episodes, labels: Labels, count: int) -> Labels:
    """Return the labels with only the first `count` frames of success of an episode; later ones are unknown.

    next.success often means that the episode has succeeded so far, as in recordings of `collect`, although the object
    may have left the goal since. Labels that return to no success describe the present frame and are not changed.
    """
    frames = labels.frames.clone()
    for episode in range(len(recorded)):
        part = frames[frames_of(recorded, episode)]
        positive = (part == 1).nonzero()[:, 0]
        if not len(positive):
            continue
        if (part[positive[0] :] == 0).any():
            return labels
        part[positive[0] + count :] = UNKNOWN
    return Labels(frames, labels.episodes)


def require_held(recorded: Episodes, labels: Labels, hold: int) -> None:
    """Raise DataError when most successful episodes show success in fewer than `hold` frames."""
    counts = [int((labels.frames[frames_of(recorded, each)] == 1).sum()) for each in range(len(recorded))]
    successful = sorted(count for count in counts if count)
    if successful and successful[len(successful) // 2] < hold:
        raise DataError(
            f"Most successful episodes have {successful[len(successful) // 2]} frames that show success, but "
            f"success.hold={hold} consecutive ones are needed: record on after success (with `robopolicy collect` "
            "world.options.terminate_on_success=false), or set success.hold=1, which accepts more failures."
        )


def require_both(labels: Labels, where: object) -> None:
    """Raise DataError unless there are episodes with and episodes without success."""
    successful, failed = int(labels.episodes.sum()), int((~labels.episodes & _labelled(labels)).sum())
    if not successful:
        raise DataError(
            f"{where} has {failed} episodes and no success among its labels, so a classifier has nothing to recognise: "
            "add demonstrations, success.extra_datasets=[DATASET], or choose other labels, success.labels=episodes."
        )
    if not failed:
        raise DataError(
            f"{where} has {successful} successful episodes and no failed one, so false accepts cannot be measured: add "
            "failures, success.extra_datasets=[DATASET] or success.negatives=[DATASET], such as `robopolicy collect "
            "collect.noise=[high,random]` records, or episodes of a policy that often fails."
        )


def _labelled(labels: Labels) -> Tensor:
    return torch.ones_like(labels.episodes) if (labels.frames != UNKNOWN).any() else torch.zeros_like(labels.episodes)


def _any_success(recorded: Episodes, frames: Tensor) -> Tensor:
    return torch.tensor([bool((frames[frames_of(recorded, each)] == 1).any()) for each in range(len(recorded))])


def _number(text: str | None, largest: int, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if not 0 <= value <= largest:
        raise DataError(f"{where} is {str(text)[:40]!r}, but must be an integer from 0 to {largest}.")
    return value


def _flag(text: str | None, where: str) -> bool:
    value = (text or "").strip().lower()
    if value not in (*TRUE, *FALSE):
        raise DataError(f"{where}: success is {str(text)[:40]!r}, but must be 1 or 0.")
    return value in TRUE


def split_by_episode(labels: Labels, fractions: Sequence[float], draws: np.random.Generator) -> list[Tensor]:
    """Divide episodes into parts [n] of these fractions, successful and other episodes separately.

    Every part has at least one of both if there are enough. Raises DataError if a part would lack one.
    """
    parts: list[list[int]] = [[] for _ in fractions]
    for kind in (True, False):
        numbers = np.flatnonzero(labels.episodes.numpy() == kind)
        if len(numbers) < len(fractions):
            what = "successful" if kind else "failed"
            raise DataError(
                f"{len(numbers)} {what} episodes cannot be divided into {len(fractions)} parts (training, calibration, "
                f"test): record at least {len(fractions)}, better 60, {what} ones, and add them with "
                "success.extra_datasets=[DATASET]."
            )
        draws.shuffle(numbers)
        ends = np.round(np.cumsum(fractions) / np.sum(fractions) * len(numbers)).astype(int)
        ends = np.maximum(ends, np.arange(1, len(fractions) + 1))
        ends = np.minimum(ends, len(numbers) - np.arange(len(fractions))[::-1])
        for part, first, last in zip(parts, [0, *ends[:-1]], ends, strict=True):
            part.extend(numbers[first:last].tolist())
    return [torch.tensor(sorted(part)) for part in parts]
