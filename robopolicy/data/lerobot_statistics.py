"""Statistics of a LeRobotDataset v3, all episodes at once, identical to those of LeRobot's own writer.

LeRobot stores min, max, mean, std, count and five quantiles of every feature of every episode, and pools them for the
dataset. Its quantiles come from a histogram of 5,000 bins over the episode's own range, interpolated inside a bin. Here
the bin of a quantile is found from the sorted values, without filling a histogram. Sums use LeRobot's precision and
order, because its std is a difference of two of them and contains their rounding. Axes: N frame, E episode, L frames of
one episode, D element of a vector, G episodes of one length.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from robopolicy.core.errors import DataError

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
"""Name in the dataset -> quantile."""

_TARGETS = np.array(list(QUANTILES.values()))
_BINS = 5000

Statistics = dict[str, np.ndarray]
"""min, max, mean, std, count and the quantiles, each [E, ...]; count [E, 1] int64."""


def vector_statistics(
    values: np.ndarray, lengths: np.ndarray, *, column: str = "values", elements: Sequence[str] | None = None
) -> Statistics:
    """Return the statistics of each episode of a numeric column.

    values: [N, ..., D], episodes concatenated; lengths: [E] int64, their frames; column, elements: names for errors.
    Results are [E, D], computed over the frames and all axes between; integers and booleans are averaged as floats.
    Raises DataError on NaN and infinity.
    """
    _require_finite(values, lengths, column, elements)
    values = values.astype(np.result_type(values.dtype, np.float32), copy=False)
    values = values.reshape(len(values), -1, values.shape[-1])
    starts = np.cumsum(lengths) - lengths
    result: Statistics = {}
    for length in np.unique(lengths):
        indices = np.flatnonzero(lengths == length)
        block = values[starts[indices][:, None] + np.arange(length)].reshape(len(indices), -1, values.shape[-1])
        for name, entry in _block_statistics(block).items():
            result.setdefault(name, np.empty((len(lengths), values.shape[-1]), entry.dtype))[indices] = entry
    return {**result, "count": lengths.astype(np.int64)[:, None]}


def image_statistics(frames: np.ndarray) -> Statistics:
    """Return the statistics of one camera in one episode, scaled to 0..1, each [1, 3, 1, 1].

    frames: uint8 [L, height, width, 3]. As in LeRobot, only a sample of the frames is used, and large images are
    subsampled.
    """
    samples = frames[_sampled(len(frames))]
    height, width = samples.shape[1:3]
    if max(height, width) >= 300:
        factor = int((width if width > height else height) / 150)
        samples = samples[:, ::factor, ::factor]
    flat = np.ascontiguousarray(samples).reshape(-1, 3)
    values = flat.astype(np.float32)
    mean = np.mean(values, axis=0)
    std = np.sqrt(np.maximum(0, np.mean(values**2, axis=0) - mean**2))
    low, high = flat.min(0).astype(np.float32), flat.max(0).astype(np.float32)
    cumulative_counts = np.stack([np.cumsum(np.bincount(channel, minlength=256)) for channel in flat.T])

    def below(edges: np.ndarray) -> np.ndarray:
        levels = np.clip(np.ceil(edges), 0, 256).astype(np.int64)
        return np.where(levels > 0, cumulative_counts[np.arange(3), levels - 1], 0)

    targets = _TARGETS * len(flat)
    levels = np.stack([np.searchsorted(counts, targets) for counts in cumulative_counts], 1).astype(np.float32)
    quantiles = _quantiles(levels, low, high, targets[:, None], len(flat), below)
    result = {"min": low, "max": high, "mean": mean, "std": std, **dict(zip(QUANTILES, quantiles, strict=True))}
    scaled = {name: (entry / 255.0).reshape(1, 3, 1, 1) for name, entry in result.items()}
    return {**scaled, "count": np.array([[len(samples)]], np.int64)}


def pooled(parts: Sequence[Mapping[str, np.ndarray]]) -> Statistics:
    """Pool the statistics of all episodes of `parts` (each [E_i, ...]), without the episode axis.

    Means and variances are exact; quantiles follow LeRobot, the frame-weighted average of the episodes' quantiles.
    """
    counts = np.concatenate([part["count"] for part in parts]).astype(np.float64)
    total = counts.sum(0)

    def weighted(values: np.ndarray) -> np.ndarray:
        return (values * counts.reshape(-1, *[1] * (values.ndim - 1))).sum(0) / total

    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "count"}
    mean = weighted(arrays["mean"])
    variance = weighted((arrays["std"] ** 2).astype(np.float64) + (arrays["mean"] - mean) ** 2)
    result = {"min": arrays["min"].min(0), "max": arrays["max"].max(0), "mean": mean, "std": np.sqrt(variance)}
    result["count"] = total.astype(np.int64)
    return {**result, **{name: weighted(arrays[name]) for name in QUANTILES if name in arrays}}


def _require_finite(values: np.ndarray, lengths: np.ndarray, column: str, elements: Sequence[str] | None) -> None:
    rows, *_, places = np.nonzero(~np.isfinite(values.reshape(len(values), -1, values.shape[-1])))
    if not len(rows):
        return
    all_names = [f"element {i}" for i in range(values.shape[-1])]
    if elements and len(elements) == len(all_names):
        all_names = list(elements)
    names = [all_names[i] for i in np.unique(places).tolist()]
    rows = np.unique(rows)
    owner = np.repeat(np.arange(len(lengths)), lengths)[rows]
    episodes = np.unique(owner)
    rest_text = f" and {len(episodes) - 4} more" if len(episodes) > 4 else ""
    raise DataError(
        f"'{column}' ({', '.join(names[:4])}{' and more' * (len(names) > 4)}) contains NaN or infinity in "
        f"{len(rows)} frames of episode {', '.join(map(str, episodes[:4]))}{rest_text} (the first is frame "
        f"{rows[0] - (np.cumsum(lengths) - lengths)[owner[0]]}): exclude or repair these episodes."
    )


def _sampled(length: int) -> np.ndarray:
    """Return the frames that LeRobot samples: all up to 100, then length^0.75 of them, evenly spaced."""
    count = max(min(100, length), min(int(length**0.75), 10_000))
    return np.round(np.linspace(0, length - 1, count)).astype(int)


def _block_statistics(block: np.ndarray) -> Statistics:
    """Return the statistics of `block` [G, L, D] over its L frames, each [G, D]."""
    length = block.shape[1]
    low = block.min(1)
    high = block.max(1)
    mean = block.mean(axis=1)
    variance = (block**2).mean(axis=1) - mean**2
    result: Statistics = {"min": low, "max": high, "mean": mean, "std": np.sqrt(np.maximum(0, variance))}
    if length == 1:
        return result | {name: mean.copy() for name in QUANTILES}
    ordered, targets = np.sort(block, axis=1), _TARGETS * length
    values = ordered[:, np.ceil(targets).astype(np.int64) - 1].swapaxes(0, 1)

    def below(edges: np.ndarray) -> np.ndarray:
        return (ordered < edges[:, :, None]).sum(2)

    quantiles = _quantiles(values, low, high, targets[:, None, None], length, below)
    return result | dict(zip(QUANTILES, quantiles, strict=True))


def _quantiles(
    values: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    targets: np.ndarray,
    total: int,
    below: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return LeRobot's quantiles [Q, ...] float64: `values` [Q, ...] are the order statistics that reach `targets`.

    low, high [...]: range of the histogram; targets: rank of each quantile; total: number of values; below: edges [Q,
    ...] -> number of values below each.
    """
    # The constants stay Python floats: in float32 they vanish beside |low| > 0.001, as they do for LeRobot.
    start, stop = low - 1e-10, high + 1e-10
    bins = _bin_of(values, start, stop)
    left_edge, right = _edge(bins, start, stop), _edge(bins + 1, start, stop)
    before = below(left_edge)
    # Bins are half open but the last, which holds the largest value too.
    bin_counts = np.where(bins == _BINS - 1, total, below(right)) - before
    interpolated = left_edge + (targets - before) / bin_counts * (right - left_edge)
    return np.where(bins == 0, left_edge, interpolated).astype(np.float64)


def _edge(index: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the left edge of bin `index` of _BINS equal ones, rounded as numpy.linspace rounds it."""
    step = (stop - start) / _BINS
    return np.where(index == _BINS, stop, index.astype(step.dtype) * step + start)


def _bin_of(value: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the bin of `value`: the last one whose left edge does not exceed it, by bisection.

    Bisection rather than division, because edges of a narrow range coincide after rounding.
    """
    lowest, highest = np.zeros(value.shape, np.int64), np.full(value.shape, _BINS - 1)
    while bool((lowest < highest).any()):
        middle = (lowest + highest + 1) // 2
        fits = _edge(middle, start, stop) <= value
        lowest, highest = np.where(fits, middle, lowest), np.where(fits, highest, middle - 1)
    return lowest
