"""Observation elements that are swapped, flipped, scaled or offset against the world's, found element by element."""

from collections.abc import Callable

import numpy as np

from robopolicy.core.finite_values import listed
from robopolicy.doctor.findings import Finding, Health, name_factor

TOLERANCE = 0.01
"""Standard deviations within which two elements are the same."""

Mend = Callable[[np.ndarray], np.ndarray]
"""Frames [..., S] as recorded -> as the world shows them."""


def explain_columns(
    recorded: np.ndarray,
    shown: np.ndarray,
    known: np.ndarray,
    scale: np.ndarray,
    names: tuple[str, ...],
    groups: np.ndarray,
) -> tuple[list[Finding], Mend] | None:
    """Explain every element of `recorded` [E, T + 1, S] that differs from what the world has `shown` at the same time.

    known: [E, T + 1] bool, frames to compare; scale: [S] standard deviations; groups: [S], the field each element
    belongs to. Returns findings and what undoes the breaks, or None unless all that differs is explained.
    """
    x, y = recorded[known], shown[known]
    first = np.zeros_like(known)
    first[:, 0] = True
    first = first[known]
    wrong = np.array([i for i in range(len(names)) if not near(x[:, i], y[:, i], scale[i], first)], dtype=int)
    if not len(wrong):
        return None
    source, factor = np.arange(len(names)), np.ones(len(names))
    offset, notes = np.zeros(len(names)), []
    for column in wrong:
        explained = _explain(column, x, y, first, scale, groups, wrong)
        if explained is None:
            return None
        source[column], factor[column], offset[column], alike = explained
        if alike:
            notes.append(f"'{names[column]}' may also hold {listed([repr(names[other]) for other in alike])}")
    target = np.empty_like(source)  # where the recorded element belongs in the world's order
    if len(set(source.tolist())) != len(source):
        return None
    target[source] = np.arange(len(names))
    findings = _findings(wrong, source, factor, offset, names, notes)
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
    """Return (source, factor, offset, other sources) with x[column] = factor * y[source] + offset; None if nothing."""
    own, other = x[:, column], [int(j) for j in wrong if j != column and groups[j] == groups[column]]
    if near(own, -y[:, column], scale[column], first):
        return column, -1.0, 0.0, []
    for sign in (1.0, -1.0):
        alike = [j for j in other if near(own, sign * y[:, j], scale[column], first)]
        if alike:
            return alike[0], sign, 0.0, alike[1:]
    slope, intercept = _line(y[:, column], own)
    size = max(scale[column], abs(slope) * float(y[:, column].std()))
    if not np.isfinite(slope) or abs(slope) < 1e-6 or not near(own, slope * y[:, column] + intercept, size, first):
        return None
    if abs(intercept) < TOLERANCE * size:
        return column, slope, 0.0, []
    return column, slope, intercept, []


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit y = slope x + intercept; slope is NaN where x does not vary enough, or there are too few points to tell."""
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
    moved = [column for column in wrong if source[column] != column]
    flipped = [f"'{names[column]}'" for column in wrong if factor[column] == -1]
    others = [column for column in wrong if source[column] == column and factor[column] != -1]
    findings = []
    if moved:
        pairs = [column for column in moved if source[source[column]] == column]
        text = [
            f"'{names[column]}' and '{names[source[column]]}' are swapped"
            for column in pairs
            if column < source[column]
        ]
        text += [f"'{names[column]}' holds '{names[source[column]]}'" for column in moved if column not in pairs]
        measured = "; ".join([listed(text), *notes[:2]])
        remedy = "Reorder these elements in the data, or in the robot's driver."
        findings.append(Finding("observation order", Health.BAD, measured, remedy))
    if flipped:
        text = f"opposite sign: {listed(flipped)}"
        findings.append(Finding("observation sign", Health.BAD, text, "Flip these elements in the data."))
    if others:
        text = [_linear(names[column], float(factor[column]), float(offset[column])) for column in others]
        remedy = "Convert units and zero points before writing the dataset."
        findings.append(Finding("observation scale", Health.BAD, listed(text), remedy))
    return findings


def _linear(name: str, factor: float, offset: float) -> str:
    parts = [f"{'of opposite sign and ' if factor < 0 else ''}{name_factor(factor)}"] if abs(factor - 1) > 1e-3 else []
    parts += [f"{abs(offset):.3g} too {'large' if offset > 0 else 'small'}"] if offset else []
    return f"'{name}' is {' and '.join(parts)}"


def near(x: np.ndarray, y: np.ndarray, scale: float, first: np.ndarray) -> bool:
    """Whether elements [n] agree in nine of ten frames, and in nine of ten `first` frames [n] bool of an episode."""
    error = np.abs(x - y) / scale
    parts = [error, error[first]] if first.any() else [error]
    return all(np.quantile(part, 0.9) < TOLERANCE for part in parts)
