import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from robopolicy.core.errors import DataError
from robopolicy.evaluation.intervals import compare_paired, percentile_interval, wilson


def wilson_by_hand(successes, episodes, confidence):
    """Wilson 1927, equation 3."""
    z = stats.norm.ppf(0.5 + confidence / 2)
    rate, scale = successes / episodes, 1 + z**2 / episodes
    centre = (rate + z**2 / (2 * episodes)) / scale
    half = z * np.sqrt(rate * (1 - rate) / episodes + z**2 / (4 * episodes**2)) / scale
    return centre - half, centre + half


@given(st.integers(1, 500), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_equals_its_formula(episodes, data, confidence):
    successes = data.draw(st.integers(0, episodes))
    assert wilson(successes, episodes, confidence) == pytest.approx(
        wilson_by_hand(successes, episodes, confidence), abs=1e-12
    )


def test_wilson_known_value():
    assert wilson(90, 100) == pytest.approx((0.8256343, 0.9447708), abs=1e-6)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0


@pytest.mark.parametrize(("successes", "episodes"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(successes, episodes):
    with pytest.raises(DataError, match="evaluate at least one episode"):
        wilson(successes, episodes)
    with pytest.raises(DataError, match="between 0 and 1"):
        wilson(1, 2, confidence=95)


def vectors(both, improved, worsened, neither):
    base = [True] * both + [False] * improved + [True] * worsened + [False] * neither
    tuned = [True] * both + [True] * improved + [False] * worsened + [False] * neither
    return np.array(base), np.array(tuned)


def test_newcombe_published_example():
    # Newcombe 1998, table II, method 10: cells 36, 12, 2, 0 give 0.0569 to 0.3404.
    comparison = compare_paired(*vectors(36, 12, 2, 0))
    assert comparison.difference == pytest.approx(0.2)
    assert (comparison.low, comparison.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)


def test_mcnemar_exact_by_hand():
    comparison = compare_paired(*vectors(10, 5, 1, 4))
    assert comparison.p_value == pytest.approx(2 * (1 + 6) / 2**6)
    assert (comparison.improved, comparison.worsened, comparison.episodes) == (5, 1, 20)
    assert compare_paired(*vectors(3, 0, 0, 3)).p_value == 1.0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_paired_interval_contains_the_difference_and_mirrors(pairs):
    base, tuned = np.array(pairs).T
    forward, backward = compare_paired(base, tuned), compare_paired(tuned, base)
    assert -1 <= forward.low <= forward.difference <= forward.high <= 1
    assert (forward.low, forward.high) == pytest.approx((-backward.high, -backward.low), abs=1e-12)
    assert forward.p_value == backward.p_value


def test_unpaired_vectors_are_refused():
    with pytest.raises(DataError, match="same seeds"):
        compare_paired(np.array([True]), np.array([True, False]))


def test_undefined_replicates_are_left_out_but_not_hidden():
    assert percentile_interval(np.array([1.0, 2.0, 3.0, np.nan]), 0.5) == pytest.approx((1.5, 2.5))
    with pytest.raises(DataError, match="undefined on 3 of 4"):
        percentile_interval(np.array([1.0, np.nan, np.nan, np.nan]))
