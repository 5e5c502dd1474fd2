"""What a policy knows of the vectors that it reads: between which values its data lay, as its normalisers remember.

Where a robot is far beyond them the policy guesses, and no answer of its shows that. Axes: N element.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from robopolicy.core.policy import Policy
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE
from robopolicy.nn.normalizer import NormalizationMode, Normalizer, ShowsNormalizers

DEVIATIONS = 4.0
"""Standard deviations from the mean within which nearly all data lie, of policies that remember no more than these."""

type Ranges = dict[str, tuple[np.ndarray, np.ndarray]]
"""Observation key -> (least, greatest) [N] of a vector's elements."""


@runtime_checkable
class ShowsRanges(Protocol):
    """A policy that keeps the statistics of its data in another way than our normalisers."""

    def known_ranges(self) -> Ranges:
        """Return between which values its vectors lay, of whatever keys it knows."""
        ...


def known_ranges(policy: Policy) -> Ranges:
    """Return between which values the vectors lay that a policy was trained on, of those that it remembers.

    Of an engine or another policy around one, that of the policy inside.
    """
    fields, inner = policy.spec.observation, policy
    while not isinstance(inner, ShowsNormalizers | ShowsRanges):
        inner = getattr(inner, "inner", None) or getattr(inner, "policy", None)
        if inner is None:
            return {}
    found = inner.known_ranges() if isinstance(inner, ShowsRanges) else _of_normalizers(inner)
    return {
        key: (low.reshape(-1), high.reshape(-1))
        for key, (low, high) in found.items()
        if key in fields
        and not key.startswith(IMAGE_PREFIX)
        and key != QUEUE
        and low.size == high.size == fields[key].size
        and np.isfinite([low, high]).all()
    }


def _of_normalizers(policy: ShowsNormalizers) -> Ranges:
    found: Ranges = {}
    for key, normalizer in policy.normalizers().items():
        reach = {NormalizationMode.MIN_MAX: 1.0, NormalizationMode.MEAN_STD: DEVIATIONS}.get(normalizer.mode)
        if reach is not None and not _is_unfitted(normalizer):
            offset, scale = (each.double().cpu().numpy() for each in (normalizer.offset, normalizer.scale))
            found[key] = offset - reach * scale, offset + reach * scale
    return found


def _is_unfitted(normalizer: Normalizer) -> bool:
    """Whether a normaliser is the identity, as it is before it has seen data."""
    return not normalizer.offset.any() and bool((normalizer.scale == 1).all())
