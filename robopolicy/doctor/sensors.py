"""Faulty sensors: observation elements that are dead, stuck, late, noisy, or wrong in single frames.

The world plays the recorded actions; where all else goes as recorded, an element that differs was measured wrongly.
Or it was not: whole columns that are swapped, flipped, scaled or offset against the world's are found first.
Axes: E episode, T step, S observation element.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robopolicy.core.finite_values import join_names
from robopolicy.core.former_names import keep_former_names
from robopolicy.doctor.findings import Finding, Health, name_factor

SPIKE, BRIEF = 0.2, 3
"""Minimum size of a spike in standard deviations, and its maximum number of frames."""
RARE = 0.1
"""Maximum fraction of frames that count as spikes; more have another cause."""
LATEST = 8
"""Maximum lag of a sensor, in frames."""
REMEDY = "This element was not measured at the time of its frame: check the sensor, its driver and its queue."


@dataclass(frozen=True)
class SensorRecording:
    """Recorded frames and the world's frames for the same actions.

    frames, shown: [E, T + 1, S]; known: [E, T + 1] bool, frames to compare; scale: [S] standard deviations; names: of
    the S elements.
    """

    frames: np.ndarray
    shown: np.ndarray
    known: np.ndarray
    scale: np.ndarray
    names: tuple[str, ...]

    @property
    def error(self) -> np.ndarray:
        """|shown - recorded| in standard deviations, [E, T + 1, S]; 0 where not known."""
        return np.where(self.known[..., None], np.abs(self.shown - self.frames) / self.scale, 0.0)


def despike(recorded: SensorRecording) -> tuple[list[Finding], np.ndarray]:
    """Find elements that leave the world's motion for a few frames and return to it; also return despiked frames.

    A motion that continues undisturbed is not caused by an action. Late elements look alike if they seldom move; those
    are left to `faulty_sensors`.
    """
    error = recorded.error
    brief = _brief(error.max(-1) >= TOLERANCE, recorded.known)
    if brief.sum() > RARE * recorded.known.sum():
        return [], recorded.frames
    spiked = brief[..., None] & (error >= SPIKE)
    texts, frames = [], recorded.frames.copy()
    for column in np.flatnonzero(spiked.any((0, 1))):
        spikes_here = spiked[..., column]
        if _late(recorded, int(column)):
            continue
        episodes = [str(index) for index in np.flatnonzero(spikes_here.any(1))]
        size = float(error[..., column][spikes_here].max())
        texts.append(
            f"'{recorded.names[column]}' in {spikes_here.sum()} frames of {len(episodes)} episodes, by up to {size:.3g}"
        )
        frames[..., column] = np.where(brief, recorded.shown[..., column], frames[..., column])
    if not texts:
        return [], recorded.frames
    text = f"jumps away for single frames and returns: {join_names(texts)} standard deviations"
    remedy = "A sensor or driver wrote invalid numbers there: exclude or repair these episodes."
    return [Finding("spikes", Health.BAD, text, remedy)], frames


def faulty_sensors(recorded: SensorRecording) -> tuple[list[Finding], list[int]]:
    """Find dead, late and stuck elements; return findings and the indices of the elements, which cannot be corrected.

    An element is dead if the data contains one value where the world has different initial values. All other faults
    need a witness: another moving element that agrees.
    """
    agrees, moves = _agreement(recorded), _moving(recorded)
    witness = bool((agrees & moves).any())
    faults: dict[str, list[str]] = {"dead": [], "late": [], "stuck": []}
    columns: list[int] = []
    delays = {column: _late(recorded, int(column)) for column in np.flatnonzero(moves)}
    if _all_late(recorded, delays):
        delays = {}
    for column in np.flatnonzero(moves & (recorded.error >= TOLERANCE).any((0, 1))):
        name, values = f"'{recorded.names[column]}'", recorded.frames[..., column][recorded.known]
        starts = recorded.shown[:, 0, column]
        delay = delays.get(column, 0)
        if np.ptp(values) == 0 and (witness or np.ptp(starts) > 0):
            faults["dead"].append(f"{name} (always {values[0] + 0.0:.4g})")
        elif witness and delay:
            faults["late"].append(f"{name} by {delay} {'step' if delay == 1 else 'steps'}")
        elif witness and not agrees[column] and _stuck(recorded, int(column)):
            faults["stuck"].append(name)
        else:
            continue
        columns.append(int(column))
    texts = {
        "dead": ("dead sensor", "constant in the data, but not in the world: "),
        "late": ("late sensor", "lags behind: "),
        "stuck": ("stuck sensor", "repeats its last value while the world's value changes: "),
    }
    findings = [
        Finding(texts[kind][0], Health.BAD, texts[kind][1] + join_names(items), REMEDY)
        for kind, items in faults.items()
        if items
    ]
    return findings, columns


def inconsistent_sensors(recorded: SensorRecording) -> tuple[list[Finding], list[int]]:
    """Report elements with unexplained differences, when at least as many other moving elements agree."""
    agrees, moves = _agreement(recorded), _moving(recorded)
    differing = np.flatnonzero(~agrees)
    if not len(differing) or (agrees & moves).sum() < len(differing):
        return [], []
    texts = []
    for column in differing:
        error = recorded.error[..., column][recorded.known]
        texts.append(f"'{recorded.names[column]}' by {np.median(error):.2g} standard deviations")
    text = f"differs from the world in no known way, while all other elements agree: {join_names(texts)}"
    remedy = "Noise, another zero point in each episode, or another quantity: compare it with the world visually."
    return [Finding("inconsistent sensor", Health.BAD, text, remedy)], differing.tolist()


def _agreement(recorded: SensorRecording) -> np.ndarray:
    """Return [S] bool: elements that agree with the world in nearly every frame."""
    valid = recorded.known
    first = np.zeros_like(valid)
    first[:, 0] = valid[:, 0]
    x = recorded.frames[valid]
    y = recorded.shown[valid]
    start = first[valid]
    return np.array([near(x[:, i], y[:, i], recorded.scale[i], start) for i in range(x.shape[1])], dtype=bool)


def _moving(recorded: SensorRecording) -> np.ndarray:
    """Return [S] bool: elements that move within episodes of the world, by more than rounding."""
    world_frames = np.where(recorded.known[..., None], recorded.shown, recorded.shown[:, :1])
    spread = np.maximum(world_frames.reshape(-1, world_frames.shape[-1]).std(0), 1e-6)
    return (np.ptp(world_frames, axis=1) > 10 * TOLERANCE * spread).any(0)


def _late(recorded: SensorRecording, column: int) -> int:
    """Return the number of steps by which an element [E, T + 1] lags the world's, 0 if it does not or never differs."""
    if not (recorded.error[..., column] >= TOLERANCE).any():
        return 0
    delays = range(1, min(LATEST, recorded.frames.shape[1] - 2) + 1)
    return next((steps for steps in delays if _follows(recorded, column, steps)), 0)


def _follows(recorded: SensorRecording, column: int, steps: int) -> bool:
    """Whether an element shows, in nearly every frame, the world's value `steps` frames earlier."""
    x, y = recorded.frames[..., column], recorded.shown[..., column]
    earlier = np.concatenate([np.repeat(y[:, :1], steps, axis=1), y[:, :-steps]], axis=1)
    is_near = np.abs(x - earlier) < TOLERANCE * recorded.scale[column]
    return float(is_near[recorded.known].mean()) > 0.98


def _all_late(recorded: SensorRecording, delays: dict[int, int]) -> bool:
    """Whether everything that moves has the same lag: then frames and actions are shifted, and no sensor is faulty."""
    distinct_delays = set(delays.values()) - {0}
    return len(distinct_delays) == 1 and all(_follows(recorded, column, min(distinct_delays)) for column in delays)


def _stuck(recorded: SensorRecording, column: int) -> bool:
    """Whether an element repeats its last value in nearly every frame in which it differs from the world's."""
    x = recorded.frames[..., column]
    y = recorded.shown[..., column]
    valid = recorded.known
    differs = (np.abs(x - y) >= TOLERANCE * recorded.scale[column]) & valid
    repeats = np.zeros_like(valid)
    repeats[:, 1:] = x[:, 1:] == x[:, :-1]
    return not differs[:, 0].any() and float(repeats[differs].mean()) > 0.98


def _brief(wrong: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the frames [E, T + 1] of runs of at most BRIEF wrong frames between correct ones."""
    brief = np.zeros_like(wrong)
    for row in range(len(wrong)):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wrong[row] & known[row], [False]]).astype(int)))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            recovers = end < wrong.shape[1] and known[row, end] and not wrong[row, end]
            if begin > 0 and end - begin <= BRIEF and recovers:
                brief[row, begin:end] = True
    return brief


TOLERANCE = 0.01
"""Tolerance in standard deviations for two elements to count as equal."""

Mend = Callable[[np.ndarray], np.ndarray]
"""Correction of frames: frames [..., S] as recorded -> as in the world."""


def explain_columns(
    recorded: np.ndarray,
    shown: np.ndarray,
    known: np.ndarray,
    scale: np.ndarray,
    names: tuple[str, ...],
    groups: np.ndarray,
) -> tuple[list[Finding], Mend] | None:
    """Explain every element of `recorded` [E, T + 1, S] that differs from the world's value `shown` in the same frame.

    known: [E, T + 1] bool, frames to compare; scale: [S] standard deviations; groups: [S], the field of each element.
    Returns findings and a function that undoes the errors, or None unless all differences are explained.
    """
    x, y = recorded[known], shown[known]
    first = np.zeros_like(known)
    first[:, 0] = True
    first = first[known]
    differing = np.array([i for i in range(len(names)) if not near(x[:, i], y[:, i], scale[i], first)], dtype=int)
    if not len(differing):
        return None
    source, factor = np.arange(len(names)), np.ones(len(names))
    offset, notes = np.zeros(len(names)), []
    for column in differing:
        explanation = _explain(column, x, y, first, scale, groups, differing)
        if explanation is None:
            return None
        source[column], factor[column], offset[column], other_sources = explanation
        if other_sources:
            notes.append(
                f"'{names[column]}' may also contain {join_names([repr(names[other]) for other in other_sources])}"
            )
    target = np.empty_like(source)  # where the recorded element belongs in the world's order
    if len(set(source.tolist())) != len(source):
        return None
    target[source] = np.arange(len(names))
    findings = _findings(differing, source, factor, offset, names, notes)
    return findings, lambda frames: ((frames - offset) / factor)[..., target]


def _explain(
    column: int,
    x: np.ndarray,
    y: np.ndarray,
    first: np.ndarray,
    scale: np.ndarray,
    groups: np.ndarray,
    wrong: np.ndarray,
) -> tuple[int, float, float, list[int]] | None:
    """Return (source, factor, offset, other sources) with x[column] = factor * y[source] + offset; None if there is
    none.
    """
    column_values, other = x[:, column], [int(j) for j in wrong if j != column and groups[j] == groups[column]]
    if near(column_values, -y[:, column], scale[column], first):
        return column, -1.0, 0.0, []
    for sign in (1.0, -1.0):
        candidates = [j for j in other if near(column_values, sign * y[:, j], scale[column], first)]
        if candidates:
            return candidates[0], sign, 0.0, candidates[1:]
    slope, intercept = _line(y[:, column], column_values)
    size = max(scale[column], abs(slope) * float(y[:, column].std()))
    if (
        not np.isfinite(slope)
        or abs(slope) < 1e-6
        or not near(column_values, slope * y[:, column] + intercept, size, first)
    ):
        return None
    if abs(intercept) < TOLERANCE * size:
        return column, slope, 0.0, []
    return column, slope, intercept, []


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit y = slope x + intercept; slope is NaN if x varies too little or there are too few points."""
    centred = x - x.mean()
    power = float((centred**2).sum())
    if len(x) < 4 or power < 1e-12:
        return np.nan, np.nan
    slope = float((centred * y).sum()) / power
    return slope, float(y.mean() - slope * x.mean())


def _findings(
    wrong: np.ndarray,
    source: np.ndarray,
    factor: np.ndarray,
    offset: np.ndarray,
    names: tuple[str, ...],
    notes: list[str],
) -> list[Finding]:
    reordered = [column for column in wrong if source[column] != column]
    flipped = [f"'{names[column]}'" for column in wrong if factor[column] == -1]
    rescaled = [column for column in wrong if source[column] == column and factor[column] != -1]
    findings = []
    if reordered:
        pairs = [column for column in reordered if source[source[column]] == column]
        text = [
            f"'{names[column]}' and '{names[source[column]]}' are swapped"
            for column in pairs
            if column < source[column]
        ]
        text += [f"'{names[column]}' contains '{names[source[column]]}'" for column in reordered if column not in pairs]
        description = "; ".join([join_names(text), *notes[:2]])
        remedy = "Reorder these elements in the data, or in the robot's driver."
        findings.append(Finding("observation order", Health.BAD, description, remedy))
    if flipped:
        text = f"opposite sign: {join_names(flipped)}"
        findings.append(Finding("observation sign", Health.BAD, text, "Flip these elements in the data."))
    if rescaled:
        text = [_linear(names[column], float(factor[column]), float(offset[column])) for column in rescaled]
        remedy = "Convert units and zero points before writing the dataset."
        findings.append(Finding("observation scale", Health.BAD, join_names(text), remedy))
    return findings


def _linear(name: str, factor: float, offset: float) -> str:
    parts = [f"{'of opposite sign and ' if factor < 0 else ''}{name_factor(factor)}"] if abs(factor - 1) > 1e-3 else []
    parts += [f"{abs(offset):.3g} too {'large' if offset > 0 else 'small'}"] if offset else []
    return f"'{name}' is {' and '.join(parts)}"


def near(x: np.ndarray, y: np.ndarray, scale: float, first: np.ndarray) -> bool:
    """Whether elements [n] agree in 90 % of all frames, and in 90 % of the episodes' first frames (mask `first`)."""
    error = np.abs(x - y) / scale
    parts = [error, error[first]] if first.any() else [error]
    return all(np.quantile(part, 0.9) < TOLERANCE for part in parts)


keep_former_names(
    __name__, {"mend_spikes": "despike", "unlike_the_rest": "inconsistent_sensors", "Recorded": "SensorRecording"}
)
