import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from robopolicy.core.errors import DataError
from robopolicy.evaluation.ranking import (
    STATISTICS,
    bias,
    kendall,
    mean_absolute_error,
    mmrv,
    pearson,
    permutation_floor,
    permutation_p_value,
    rank,
    spearman,
)
from robopolicy.evaluation.success import EvaluationResult

REAL = np.array([0.1, 0.3, 0.6, 0.9])
rates = st.integers(0, 20).map(lambda count: count / 20)
five_pairs = st.lists(st.tuples(rates, rates), min_size=5, max_size=5).map(lambda pairs: np.array(pairs).T)
pairs_of_scores = st.lists(st.tuples(rates, rates), min_size=2, max_size=9).map(lambda pairs: np.array(pairs).T)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ([0.2, 0.4, 0.5, 0.8], 0.0),
        # policies 1 and 2 swapped: both lose 0.3, the other two nothing
        ([0.1, 0.6, 0.3, 0.9], (0.3 + 0.3) / 4),
        # reversed: each policy's worst violation is its distance to the farthest extreme
        ([0.9, 0.6, 0.3, 0.1], (0.8 + 0.6 + 0.5 + 0.8) / 4),
        # a constant model never says "greater": every pair is violated from the better policy's side only
        ([0.5, 0.5, 0.5, 0.5], (0.0 + 0.2 + 0.5 + 0.8) / 4),
    ],
)
def test_mmrv_hand_table(model, expected):
    assert mmrv(real=REAL, model=np.array(model)) == pytest.approx(expected)


def test_mmrv_is_asymmetric_and_keyword_only():
    model = np.array([0.1, 0.6, 0.35, 0.9])
    assert mmrv(real=REAL, model=model) == pytest.approx(0.15)
    assert mmrv(real=model, model=REAL) == pytest.approx(0.125)
    with pytest.raises(TypeError):
        mmrv(REAL, model)


@given(pairs_of_scores)
def test_correlations_equal_scipy(scores):
    real, model = scores
    if np.ptp(real) == 0 or np.ptp(model) == 0:
        assert np.isnan([pearson(real, model), spearman(real, model), kendall(real, model)]).all()
        return
    assert pearson(real, model) == pytest.approx(stats.pearsonr(real, model).statistic, abs=1e-12)
    assert spearman(real, model) == pytest.approx(stats.spearmanr(real, model).statistic, abs=1e-12)
    assert kendall(real, model) == pytest.approx(stats.kendalltau(real, model).statistic, abs=1e-12)


@pytest.mark.long
@given(st.lists(five_pairs, min_size=1, max_size=6))
def test_many_rankings_at_once_equal_each_by_itself(rankings):
    real, model = np.array(rankings).swapaxes(0, 1)
    for name, function in STATISTICS.items():
        each = [float(function(*scores)) for scores in rankings]
        np.testing.assert_allclose(function(real, model), each, rtol=0, atol=1e-12, err_msg=name)


@given(pairs_of_scores, st.randoms())
def test_the_order_of_policies_changes_nothing(scores, random):
    order = list(range(scores.shape[1]))
    random.shuffle(order)
    for name, function in STATISTICS.items():
        assert function(*scores) == pytest.approx(function(*scores[:, order]), nan_ok=True, abs=1e-12), name


@given(pairs_of_scores)
def test_a_perfect_model_is_perfect(scores):
    real = scores[0]
    assert mmrv(real=real, model=real) == mean_absolute_error(real, real) == bias(real, real) == 0
    assert mmrv(real=real, model=real * 0.5 + 0.1) == 0, "only the order counts"


def test_error_and_bias_by_hand():
    model = np.array([0.2, 0.2, 0.9, 0.9])
    assert mean_absolute_error(REAL, model) == pytest.approx((0.1 + 0.1 + 0.3 + 0) / 4)
    assert bias(REAL, model) == pytest.approx((0.1 - 0.1 + 0.3 + 0) / 4)


def test_permutation_floor_and_p_value():
    assert permutation_floor(4) == pytest.approx(0.0417, abs=1e-4)
    generator = np.random.default_rng(0)
    assert permutation_p_value(REAL, REAL**2, generator) == permutation_floor(4)
    assert permutation_p_value(REAL, -REAL, generator) == 1.0
    many = np.linspace(0, 1, 10)
    assert permutation_p_value(many, many, generator) < 1e-3
    assert 0.2 < permutation_p_value(many, np.sin(many * 40), generator) < 0.95


def evaluation(rate, episodes=100, start=0):
    success = np.arange(episodes) < round(rate * episodes)
    numbers = np.zeros(episodes)
    seeds = np.arange(start, start + episodes)
    return EvaluationResult("toy", seeds, success, numbers, numbers.astype(int), numbers > 0, True, 1.0, 1)


def results(values, **options):
    return {f"policy {index}": evaluation(value, **options) for index, value in enumerate(values)}


def test_rank_reports_estimates_with_intervals():
    real, model = [0.05, 0.2, 0.4, 0.55, 0.7, 0.9], [0.15, 0.25, 0.5, 0.6, 0.8, 0.9]
    ranking = rank(real=results(real), model=results(model), generator=np.random.default_rng(0), resamples=300)
    assert ranking.statistics["pearson"].value == pytest.approx(stats.pearsonr(real, model).statistic)
    assert ranking.statistics["bias"].value == pytest.approx(np.mean(np.subtract(model, real)))
    for name, estimate in ranking.statistics.items():
        for interval in (estimate.policies, estimate.episodes):
            assert interval is not None and interval[0] <= interval[1], name
    low, high = ranking.statistics["bias"].policies
    assert low < ranking.statistics["bias"].value < high
    assert ranking.warnings == ()
    assert ranking.permutation_p_value == ranking.permutation_floor == pytest.approx(1 / 720)
    data = json.loads(json.dumps(ranking.to_json(), allow_nan=False))
    assert [policy["real"] for policy in data["policies"]] == sorted(real)


def test_bootstrap_over_episodes_pairs_shared_seeds():
    scores = [0.4, 0.5, 0.6]

    def spread(shift):
        shifted = {f"policy {i}": evaluation(value, start=shift * i) for i, value in enumerate(scores)}
        ranking = rank(real=shifted, model=shifted, generator=np.random.default_rng(0), resamples=500)
        low, high = ranking.statistics["bias"].episodes
        return high - low

    assert spread(shift=0) > 1.3 * spread(shift=1000), "nested successes on shared seeds vary together"


def test_rank_warns_about_few_and_similar_policies():
    ranking = rank(
        real=results([0.5, 0.55, 0.6]), model=results([0.5] * 3), generator=np.random.default_rng(0), resamples=50
    )
    text = " ".join(ranking.warnings)
    assert "1/3! = 0.167" in text
    assert "spans only 10%" in text
    assert "pearson is undefined" in text
    assert ranking.statistics["pearson"].value is None
    assert ranking.statistics["pearson"].policies is None
    json.dumps(ranking.to_json(), allow_nan=False)


def test_agreement_with_a_handful_of_trials_is_called_so():
    values, generator = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], np.random.default_rng(0)
    few = rank(real=results(values, episodes=5), model=results(values), generator=generator, resamples=50)
    (warning,) = few.warnings
    assert "known from 5 episodes each" in warning
    enough = rank(real=results(values, episodes=20), model=results(values), generator=generator, resamples=50)
    assert enough.warnings == ()


def test_rank_refuses_what_cannot_be_ranked():
    generator = np.random.default_rng(0)
    with pytest.raises(DataError, match="at least three"):
        rank(real=results([0.1, 0.2]), model=results([0.1, 0.2]), generator=generator)
    with pytest.raises(DataError, match="evaluated different policies"):
        rank(real=results([0.1] * 3), model=results([0.1] * 4), generator=generator)
    with pytest.raises(DataError, match="cannot be paired"):
        pearson(REAL, REAL[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(spearman(np.ones(3), np.arange(3)))
