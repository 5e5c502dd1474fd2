"""The gate: bounds against closed forms, how often it errs by chance, and what it refuses."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.evaluation.gate import Gate, evaluator_result


@dataclass
class Table:
    """A judge that looks values up; a policy is a name here."""

    found: dict[str, np.ndarray]
    name: str = "a table"
    independent: bool = True
    asked: int = 0
    ceiling: float | None = None

    def values(self, policy):
        self.asked += 1
        return self.found[policy]


def normal(mean, count=256, seed=0, spread=1.0):
    return np.random.default_rng(seed).normal(mean, spread, count)


def test_bounds_are_those_of_the_paired_difference():
    base, noise = normal(0.0, spread=5.0), normal(0.1, seed=1, spread=0.2)
    judgement = evaluator_result("x", base + noise, base, margin=0.0)
    interval = stats.ttest_1samp(noise, 0.0).confidence_interval(0.95)
    assert judgement.student == pytest.approx((interval.low, interval.high))
    assert judgement.bootstrap == pytest.approx(judgement.student, abs=0.005)
    assert judgement.better and judgement.difference == pytest.approx(noise.mean())
    assert evaluator_result("x", base, base + noise, margin=0.0).difference == pytest.approx(-noise.mean())


def test_equal_policies_are_rarely_accepted_and_better_ones_often():
    draws = np.random.default_rng(2)
    accepted = {0.0: 0, 0.3: 0}
    for better in accepted:
        for _ in range(400):
            base = draws.normal(size=64)
            accepted[better] += evaluator_result("x", base + draws.normal(better, 1.0, 64), base, 0.0).better
    assert accepted[0.0] <= 400 * 0.05  # 2.5 % are meant; 20 of 400 is two standard deviations above
    assert accepted[0.3] >= 400 * 0.5


def test_equal_values_are_no_improvement():
    same = np.ones(8)
    judgement = evaluator_result("x", same, same, margin=0.0)
    assert not judgement.better and judgement.low == 0.0


def test_a_value_beyond_what_the_data_makes_credible_is_not_believed():
    base, high = np.linspace(0.0, 1.0, 64), np.linspace(4.0, 5.0, 64)
    for ceiling, believed in ((None, True), (4.5, True), (4.4, False)):
        judgement = evaluator_result("x", high, base, margin=0.0, ceiling=ceiling)
        assert judgement.low > 3.9 and judgement.better == judgement.credible == believed
    judge = Table({"new": high, "old": base})
    assert Gate([judge]).decide("new", "old").accepted
    judge.ceiling = 4.4
    judgement = Gate([judge]).decide("new", "old")
    assert (
        not judgement.accepted
        and "not credible: the mean is 4.5, but the recorded data supports at most 4.4" in str(judgement)
    )
    assert judgement.to_json()["judgements"][0]["ceiling"] == 4.4
    assert "not significantly better" in Gate([judge]).decide("old", "old").reasons[0], "nothing to believe or not"


def test_every_judge_must_be_sure_and_the_incumbent_is_scored_anew():
    base = np.zeros(100)
    yes, no = Table({"new": base + 1, "old": base}, "model"), Table({"new": base - 1, "old": base}, "critic", False)
    assert Gate([yes]).decide("new", "old").accepted
    result = Gate([yes, no]).decide("new", "old")
    assert not result.accepted and "evaluated by critic: worse" in result.reasons[1]
    assert result.line("round 3").startswith(
        "rejected round 3: +1.000 [+1.000, +1.000] on 100 initial states, evaluated by model"
    )
    Gate([yes]).decide("new", "old")
    assert yes.asked == 6
    assert result.to_json()["judgements"][0]["low"] == 1.0


def test_margins():
    base = np.full(50, 2.0)
    judge = Table({"new": base + 0.05, "old": base})
    assert Gate([judge], margin=0.04).decide("new", "old").accepted
    kept = Gate([judge], relative=0.05).decide("new", "old")  # 5 % of 2 are 0.1
    assert not kept.accepted and "by less than the margin of 0.1" in kept.reasons[0]


def test_what_is_refused():
    judge = Table({"new": np.zeros(4), "old": np.zeros(4)}, independent=False)
    with pytest.raises(ConfigError, match="a table was used in training, so it cannot be the only evaluator"):
        Gate([judge])
    with pytest.raises(ConfigError, match="needs an evaluator"):
        Gate([])
    with pytest.raises(ConfigError, match="at least 0"):
        Gate([Table({})], margin=-1.0)
    with pytest.raises(DataError, match="cannot be paired"):
        evaluator_result("x", np.zeros(3), np.zeros(4), 0.0)
    with pytest.raises(DataError, match="model returned values that are not finite"):
        evaluator_result("model", np.array([0.0, np.nan]), np.zeros(2), 0.0)


def test_trials_in_the_world_are_counted_verdict_by_verdict():
    class Trials:
        name, independent, env_steps = "trials", True, 0

        def values(self, policy):
            self.env_steps += 50
            return np.full(10, float(policy)) + np.arange(10) * 0.01 * policy

    gate = Gate([Trials()])
    for _ in range(2):
        decision = gate.decide(2, 1)
        assert decision.env_steps == 100
        assert decision.to_json()["env_steps"] == 100
        assert decision.accepted


def test_shares_of_clipped_targets_are_kept_verdict_by_verdict():
    """Each judge's own of this verdict, in the judges' order: what a resumed run has of the rounds before a kill."""

    class Fits:
        independent = True

        def __init__(self, name, first):
            self.name, self.next, self.clipped = name, first, []

        def values(self, policy):
            self.clipped.append(self.next)
            self.next += 1
            return np.full(10, float(policy)) + np.arange(10) * 0.01 * policy

    gate = Gate([Fits("one", 0), Fits("two", 10)])
    assert gate.decide(2, 1).clipped == (0, 1, 10, 11)
    again = gate.decide(2, 1)
    assert again.clipped == (2, 3, 12, 13)
    assert again.to_json()["clipped"] == [2, 3, 12, 13]
