"""Conformal thresholds keep their rate of false alarms, and scores are those of hand-made episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robopolicy.core.errors import DataError
from robopolicy.failures.conformal import THRESHOLDS, band_threshold, conformal_quantile
from robopolicy.failures.detector import Rollout
from robopolicy.failures.scoring import Scored, auroc, first_alarm


def test_the_conformal_rank_by_hand():
    scores = np.arange(1.0, 20.0)  # n = 19: rank ceil(20 x .95) = 19, the maximum
    assert conformal_quantile(scores, 0.05) == 19
    assert conformal_quantile(scores[:10], 0.05) == 10  # too few for 5 %
    assert conformal_quantile(np.arange(1.0, 40.0), 0.05) == 38  # n = 39: rank 38
    with pytest.raises(DataError, match="successful rollouts"):
        conformal_quantile(np.zeros(0), 0.05)


@given(st.integers(2, 60), st.floats(0.01, 0.5), st.integers(0, 10**6))
def test_at_most_alpha_of_the_calibration_scores_lie_above_or_it_is_the_maximum(count, alpha, seed):
    scores = np.random.default_rng(seed).normal(size=count)
    value = conformal_quantile(scores, alpha)
    assert (scores > value).sum() <= alpha * (count + 1)
    assert value in scores


@pytest.mark.parametrize("kind", ["constant", "band"])
@pytest.mark.parametrize(("count", "alpha"), [(39, 0.05), (12, 0.2), (8, 0.05)])
def test_false_alarms_of_exchangeable_episodes_are_as_rare_as_promised(kind, count, alpha):
    """500 draws of calibration and test; the mean of a rate p of 40 tests each has a deviation far below .01."""
    draws, alarms, decisions = np.random.default_rng(3), 0, 8

    def episode():
        drift = np.cumsum(draws.exponential(size=draws.integers(3, decisions + 1)))
        return drift * draws.lognormal(sigma=0.5)

    for _ in range(500):
        threshold = THRESHOLDS[kind]([episode() for _ in range(count)], decisions, alpha)
        assert threshold.shape == (decisions,)
        alarms += sum(first_alarm(episode(), threshold) is not None for _ in range(40))
    calibrated = count if kind == "constant" else count // 2
    promise = max(alpha, 1 / (calibrated + 1))
    assert promise - 1 / (calibrated + 1) - 0.015 < alarms / 20_000 < promise + 0.015


def test_a_band_follows_the_index():
    episodes = [np.arange(6.0) + offset for offset in np.linspace(-0.5, 0.5, 40)]
    band = band_threshold(episodes, 8, 0.1)
    np.testing.assert_allclose(np.diff(band[:6]), 1.0, atol=1e-6)
    np.testing.assert_allclose(band[6:], band[5])  # beyond the longest episode
    assert first_alarm(np.array([0.0, 3.0]), band) == 1 and first_alarm(np.arange(6.0) - 1, band) is None


def test_auroc_is_that_of_scikit_learn():
    assert auroc(np.array([2.0, 3.0]), np.array([1.0, 2.0])) == 0.875  # one tie of four pairs
    assert auroc(np.zeros(0), np.ones(1)) is None
    metrics = pytest.importorskip("sklearn.metrics", reason="install it with: pip install scikit-learn")
    draws = np.random.default_rng(0)
    failed, good = draws.integers(0, 9, 30).astype(float) + 1, draws.integers(0, 9, 50).astype(float)
    expected = metrics.roc_auc_score(np.repeat([1, 0], [30, 50]), np.concatenate([failed, good]))
    assert auroc(failed, good) == pytest.approx(expected)


def test_the_percentile_of_float_by_hand():
    ends = [np.array([0.9, end]) for end in (0.1, 0.2, 0.3, 0.4)]
    np.testing.assert_allclose(THRESHOLDS["percentile"](ends, 3, 0.05), np.full(3, 0.385))


def made(success, length, fault="", begin=0):
    return Rollout(np.zeros((-(-length // 4), 1)), np.zeros((1, 0, 0)), success, length, fault, begin)


def test_scores_of_hand_made_episodes():
    rollouts = [made(False, 32), made(False, 32), made(True, 12), made(True, 20), made(True, 20)]
    indices = [np.arange(8.0), np.zeros(8), np.zeros(3), np.array([0, 0, 0, 0, 5.0]), np.zeros(5)]
    scored = Scored(rollouts, indices, np.full(8, 3.5), chunk=4, fps=10)
    summary = scored.summary()
    assert (summary["detected"]["count"], summary["detected"]["total"]) == (1, 2)
    assert (summary["false_alarms"]["count"], summary["false_alarms"]["total"]) == (1, 3)
    assert summary["lead_seconds"] == pytest.approx((32 - 4 * 4) / 10)  # alarm at decision 4 of 8
    # of three successes 5 % is none: the threshold is their largest index, 5, and the failure exceeds it at decision 6
    assert summary["equal_false_alarms"]["detected"]["count"] == 1
    assert summary["equal_false_alarms"]["lead_seconds"] == pytest.approx((32 - 6 * 4) / 10)
    # after 4 of 8 decisions two failed and two successful episodes still run, with 3, 0 and 0, 0
    assert summary["auroc"]["50%"] == {"auroc": 0.75, "failed": 2, "successful": 2}
    assert summary["auroc"]["75%"]["successful"] == 0 and summary["auroc"]["75%"]["auroc"] is None


def test_detection_counts_from_the_begin_of_a_fault():
    rollouts = [
        made(False, 32, "slip", 10),  # alarm at step 16: .6 s after
        made(False, 32, "slip", 20),  # alarm at step 16: before it
        made(False, 32, "slip", 10),  # none
        made(True, 12, "slip", 20),  # ended before
        made(True, 20, "slip", 10),
    ]
    indices = [np.arange(8.0), np.arange(8.0), np.zeros(8), np.zeros(3), np.zeros(5)]
    found = Scored(rollouts, indices, np.full(8, 3.5), chunk=4, fps=10).after_fault()
    assert found["success"]["count"] == 1 and found["success"]["total"] == 4
    assert found["alarms_before"]["count"] == 1
    assert (found["detected"]["count"], found["detected"]["total"]) == (1, 2)
    assert found["delay_seconds"] == pytest.approx(0.6)
