"""Holds what a policy is shown against the range of its training data, element by element. Axes: N element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

FAR = 0.25
"""Distance beyond an element's training range that counts as far, as a fraction of that range."""


class TrainingRanges:
    """Ranges of a policy's vectors in its training data, with the margin beyond which a value is far outside.

    known: field -> lowest and highest value [N]; names: field -> names of its elements, () if unknown.
    """

    def __init__(self, known: Mapping[str, tuple[np.ndarray, np.ndarray]], names: Mapping[str, Sequence[str]]):
        self.known = dict(known)
        self._names = {
            key: tuple(names.get(key, ())) or tuple(f"{key}[{place}]" for place in range(low.size))
            for key, (low, _) in known.items()
        }
        self._margin = {
            key: FAR * np.where(high > low, high - low, np.maximum(np.abs(low), 1e-3))
            for key, (low, high) in known.items()
        }

    def far(self, frames: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Return the elements of frames, field -> [*shape], that are far outside, farthest first: name -> description
        with value and range.
        """
        distances: list[tuple[float, str, str]] = []
        for key, (low, high) in self.known.items():
            if key not in frames:
                continue
            values = np.asarray(frames[key], dtype=np.float64).reshape(-1)
            times = np.maximum(low - values, values - high) / self._margin[key]
            for place in np.flatnonzero(times > 1):
                name = self._names[key][place]
                text = f"{name} is {values[place]:.4g} (training data: {low[place]:.4g} to {high[place]:.4g})"
                distances.append((float(times[place]), name, text))
        return {name: text for _, name, text in sorted(distances, reverse=True)}
