"""Success from few trials and a model: by hand, by simulation of its coverage, and against trials alone."""

import numpy as np
import pytest

from robopolicy.benchmarks.ranking import mean_savings
from robopolicy.core.errors import DataError
from robopolicy.evaluation.few_trials import calibrated_rate, savings
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.success import EvaluationResult


@pytest.mark.checks("MFRL-quadrotor")
def test_the_control_variate_by_hand():
    trials, paired = np.array([1, 0, 1, 1]), np.array([1, 0, 1, 0])
    model = np.array([1, 0, 1, 0, 1, 1, 1, 1, 0, 0])  # mean .6; beta = 1 - .5
    rate = calibrated_rate(trials, paired, model)
    assert rate.value == pytest.approx(0.75 + 0.5 * (0.6 - 0.5))
    assert rate.correlation == pytest.approx(np.corrcoef(trials, paired)[0, 1])
    low, high = wilson(3, 4)
    assert rate.worth == pytest.approx(4 * ((high - low) / (rate.high - rate.low)) ** 2)
    same = calibrated_rate(paired, paired, model)  # a perfect model replaces the trials
    assert same.value == pytest.approx(0.6) and same.correlation == pytest.approx(1)
    alone = calibrated_rate(trials, np.ones(4), np.ones(4))  # a model that says nothing adds nothing
    assert (alone.value, alone.low, alone.high) == pytest.approx((0.75, *wilson(3, 4)))
    assert alone.worth == pytest.approx(4) and alone.to_json()["correlation"] is None
    with pytest.raises(DataError, match="same start"):
        calibrated_rate(trials, paired[:3], model)


@pytest.mark.checks("MFRL-quadrotor")
@pytest.mark.parametrize(
    ("real", "model", "correlation", "trials"),
    [(0.28, 0.4, 0.6, 20), (0.64, 0.65, 0.59, 20), (0.9, 0.85, 0.6, 20), (0.97, 0.95, 0.5, 20), (0.3, 0.8, 0.3, 50)],
)
def test_the_interval_holds_its_coverage_and_a_biased_model_does_no_harm(real, model, correlation, trials):
    draws, episodes, repetitions = np.random.default_rng(0), 1000, 2000
    both = real * model + correlation * np.sqrt(real * (1 - real) * model * (1 - model))
    shares = np.array([both, real - both, model - both, 1 - real - model + both])
    kinds = draws.choice(4, p=shares, size=(repetitions, episodes))
    truth, imagined = kinds <= 1, (kinds == 0) | (kinds == 2)
    rates = [calibrated_rate(y[:trials], x[:trials], x) for y, x in zip(truth, imagined, strict=True)]
    covered = np.mean([each.low <= real <= each.high for each in rates])
    assert 0.93 <= covered <= 0.98
    values, alone = np.array([each.value for each in rates]), truth[:, :trials].mean(1)
    assert abs(values.mean() - real) < 4 * values.std() / np.sqrt(repetitions) + 0.005  # few failures in the model
    assert np.mean((values - real) ** 2) < np.mean((alone - real) ** 2)  # better than the trials alone


def test_many_trials_are_worth_what_the_correlation_says():
    draws, trials, episodes = np.random.default_rng(1), 2000, 100_000
    imagined = draws.random(episodes) < 0.5
    truth = imagined ^ (draws.random(episodes) < 0.1)  # correlation .8
    rate = calibrated_rate(truth[:trials], imagined[:trials], imagined)
    assert rate.correlation == pytest.approx(0.8, abs=0.05)
    assert rate.worth == pytest.approx(trials / (1 - rate.correlation**2 * (1 - trials / episodes)), rel=0.02)


def evaluated(success: np.ndarray, seeds: np.ndarray) -> EvaluationResult:
    zeros = np.zeros(len(seeds))
    return EvaluationResult(
        "world", seeds, success, zeros, zeros.astype(int), zeros.astype(bool), deterministic=True, seconds=0.0, steps=0
    )


def test_few_trials_with_a_model_that_agrees_order_policies_as_well_as_more_trials_alone():
    draws, seeds = np.random.default_rng(0), np.arange(200)
    hard = draws.random(200)  # the same starts are hard for all
    truth = {name: evaluated(hard < rate, seeds) for name, rate in {"a": 0.3, "b": 0.5, "c": 0.8}.items()}
    perfect = savings(truth, truth, np.random.default_rng(1), draws=20)
    assert [each.trials for each in perfect] == [5, 10, 20, 50, 100]
    assert all(each.order >= each.order_alone for each in perfect)
    assert all(each.order > 0.999 for each in perfect if each.trials >= 20)  # fewer may all end alike
    assert all(each.error < each.error_alone for each in perfect)
    shuffled = seeds[::-1].copy()  # episodes may be kept in any order
    turned = {name: evaluated(each.success[shuffled], shuffled) for name, each in truth.items()}
    assert savings(truth, turned, np.random.default_rng(1), draws=20) == perfect
    silent = {name: evaluated(np.ones(200, dtype=bool), seeds) for name in truth}
    for each in savings(truth, silent, np.random.default_rng(1), draws=20):  # a model that says nothing adds nothing
        assert (each.error, each.worth) == pytest.approx((each.error_alone, each.trials))
        assert each.covered > 0.85  # of 60 draws
    other = {name: evaluated(each.success, seeds + 1) for name, each in truth.items()}
    assert savings(truth, other, np.random.default_rng(1)) == []  # other starts: nothing is paired


def test_an_order_that_some_seeds_do_not_define_is_the_mean_of_the_others():
    rows = [{"trials": 5, "order": None}, {"trials": 10, "order": 0.4}], [{"trials": 5, "order": None}] * 2
    rows[1][1] = {"trials": 10, "order": None}
    seeds = {str(seed): {"savings": part} for seed, part in enumerate(rows)}
    assert mean_savings(seeds) == [{"trials": 5, "order": None}, {"trials": 10, "order": 0.4}]
    assert mean_savings({"0": {}}) == []
