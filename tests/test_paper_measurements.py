"""Parts of what bench papers measures by functions: outcomes of synthetic policies, and acting in 8 bits."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from robopolicy.benchmarks.paper_measurements import in_eight_bits, outcomes
from robopolicy.nn.precision import lowered_precision, training_precision


def test_policies_reach_what_lies_around_their_place():
    """A policy's successes depend on the first two elements alone; in the middle of its reach the rate is a half."""
    starts = np.random.default_rng(0).uniform(-1, 1, (4000, 3))
    draws = np.random.default_rng(1)
    place = np.random.default_rng(1).uniform(-1, 1, 2)
    successes = outcomes(starts, draws)
    distance = np.linalg.norm(starts[:, :2] - place, axis=1)
    near, far = (successes[np.argsort(distance)[part]].mean() for part in (slice(200), slice(-200, None)))
    assert near > 0.85 and far < 0.15 and abs(np.corrcoef(starts[:, 2], successes)[0, 1]) < 0.05


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_policy_acts_in_eight_bits_whatever_it_learns_in(precision: Any):
    policy = SimpleNamespace(act=lambda: lowered_precision(), log_prob=lambda: lowered_precision())
    in_eight_bits(cast(Any, policy))
    with training_precision(precision):
        assert policy.act() == "fp8" and policy.log_prob() == precision
