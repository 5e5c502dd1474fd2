"""Value ranges of the training data of a policy's input vectors, from its normalisers.

Far outside these ranges the policy extrapolates without any visible sign. Axes: N element.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from robopolicy.core.policy import Policy
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE
from robopolicy.nn.normalizer import NormalizationMode, Normalizer, ShowsNormalizers

DEVIATIONS = 4.0
"""Number of standard deviations around the mean used as range, for policies that store only mean and deviation."""

type Ranges = dict[str, tuple[np.ndarray, np.ndarray]]
"""Observation key -> (least, greatest) [N] of a vector's elements."""


@runtime_checkable
class ShowsRanges(Protocol):
    """A policy that stores its data statistics in a format other than robopolicy's normalisers."""

    def known_ranges(self) -> Ranges:
        """Return the data ranges of the policy's input vectors, for the keys that the policy stores."""
        ...


def known_ranges(policy: Policy) -> Ranges:
    """Return the training data ranges of a policy's input vectors, for the keys that the policy stores.

    For an engine or a wrapping policy, the ranges of the inner policy.
    """
    fields, inner = policy.spec.observation, policy
    while not isinstance(inner, ShowsNormalizers | ShowsRanges):
        inner = getattr(inner, "inner", None) or getattr(inner, "policy", None)
        if inner is None:
            return {}
    ranges = inner.known_ranges() if isinstance(inner, ShowsRanges) else _of_normalizers(inner)
    return {
        key: (low.reshape(-1), high.reshape(-1))
        for key, (low, high) in ranges.items()
        if key in fields
        and not key.startswith(IMAGE_PREFIX)
        and key != QUEUE
        and low.size == high.size == fields[key].size
        and np.isfinite([low, high]).all()
    }


def _of_normalizers(policy: ShowsNormalizers) -> Ranges:
    ranges: Ranges = {}
    for key, normalizer in policy.normalizers().items():
        reach = {NormalizationMode.MIN_MAX: 1.0, NormalizationMode.MEAN_STD: DEVIATIONS}.get(normalizer.mode)
        if reach is not None and not _is_unfitted(normalizer):
            offset, scale = (each.double().cpu().numpy() for each in (normalizer.offset, normalizer.scale))
            ranges[key] = offset - reach * scale, offset + reach * scale
    return ranges


def _is_unfitted(normalizer: Normalizer) -> bool:
    """Whether a normaliser is still the identity, as before fitting."""
    return not normalizer.offset.any() and bool((normalizer.scale == 1).all())
