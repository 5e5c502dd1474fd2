"""Figures that the data does not define are undefined: not perfect, not zero; they are shown as "-"."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE, Field
from robopolicy.doctor.findings import Health
from robopolicy.doctor.policy import check_policy_on_data
from robopolicy.evaluation import world_model
from robopolicy.evaluation.bakeoff import best_evaluator, score_evaluator
from robopolicy.evaluation.deployment import Deployed
from robopolicy.evaluation.intervals import plus_minus
from robopolicy.evaluation.ranking import rank
from robopolicy.evaluation.report import Report, _add_validation
from robopolicy.evaluation.success import EvaluationResult
from robopolicy.rl.objective import explained_variance
from robopolicy.verbs import worldmodel

NO, YES = torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)


def test_a_detector_without_positives_or_predictions():
    assert world_model.precision_recall(NO, NO) == {"precision": None, "recall": None, "f1": None, "positives": 0}
    assert world_model.precision_recall(YES, NO) == {"precision": 0.0, "recall": None, "f1": None, "positives": 0}
    assert world_model.precision_recall(NO, YES) == {"precision": None, "recall": 0.0, "f1": 0.0, "positives": 6}
    assert world_model.precision_recall(YES, YES)["f1"] == 1.0


def test_a_world_model_is_shown_with_what_is_unknown(capsys):
    validation = {"success": world_model.precision_recall(NO, NO), "reward_error": None, "steps": 6, "open_loop": {}}
    worldmodel.show(validation)
    output = " ".join(capsys.readouterr().out.split())
    assert "Reward error - of the variance; success head precision -, recall -" in output
    assert "the success head cannot be evaluated" in output
    report = Report(title="", subtitle="")
    _add_validation(report, validation)
    assert [row[1] for row in report.sections[0].rows] == ["-", "-", "-"]


def test_what_never_changes_is_not_foretold():
    recorded = SimpleNamespace(observation={"still": torch.ones(9, 2), "moves": torch.arange(18.0).reshape(9, 2)})
    observation = {"still": torch.ones(4, 2), "moves": torch.arange(8.0).reshape(4, 2)}
    score = world_model._scores(observation, recorded, torch.arange(4), torch.ones(4, dtype=torch.bool))  # type: ignore[arg-type]
    assert score == {"moves": 0.0}


def test_a_critic_of_returns_that_are_all_the_same_explains_nothing():
    same = torch.full((5,), 2.0)
    assert explained_variance(same, same).isnan()
    assert float(explained_variance(torch.arange(5.0), torch.arange(5.0))) == 1.0


def test_policies_that_are_equally_good_are_in_no_order():
    def judged(rates: tuple[float, ...]) -> dict[str, EvaluationResult]:
        return {str(at): evaluated(np.arange(20) < 20 * rate) for at, rate in enumerate(rates)}

    alike, apart = judged((0.5, 0.5, 0.5)), judged((0.2, 0.5, 0.8))
    draws = np.random.default_rng(0)
    ranking = rank(real=alike, model=apart, generator=draws, resamples=50)
    assert [name for name, each in ranking.statistics.items() if each.value is not None] == [
        "mean_absolute_error",
        "bias",
    ]
    assert any("mmrv is undefined" in text for text in ranking.warnings)
    assert rank(real=apart, model=alike, generator=draws, resamples=50).statistics["mmrv"].value > 0
    with pytest.raises(DataError, match="at least three policies"):
        rank(real=judged((0.2, 0.8)), model=judged((0.2, 0.8)), generator=draws)


def evaluated(success: np.ndarray) -> EvaluationResult:
    count = len(success)
    none, lengths = np.zeros(count, dtype=bool), np.full(count, 5)
    return EvaluationResult("w", np.arange(count), success, np.zeros(count), lengths, none, True, 1.0, 5 * count)


def test_judges_of_policies_that_are_all_alike_are_not_without_regret():
    values = np.random.default_rng(0).normal(size=(4, 20))
    alike = score_evaluator("alike", np.full(4, 0.5), values)
    assert all(math.isnan(value) for value in (alike.regret, alike.spearman, alike.spearman_low, alike.false_rejects))
    assert best_evaluator({"alike": alike}) is None
    constant = score_evaluator("constant", np.array([0.0, 0.3, 0.6, 0.9]), np.full((4, 20), 0.5))
    assert math.isnan(constant.spearman) and not math.isnan(constant.regret)


def test_a_short_deployment_has_no_worst_margin():
    short = Deployed(np.ones(19), np.zeros(19), 0.5)
    assert (
        math.isnan(short.margin) and short.to_json()["worst_margin"] is None and plus_minus(short.margin, "+.1f") == "-"
    )
    assert Deployed(np.ones(20), np.zeros(20), 0.5).margin < 0


def test_a_policy_is_not_said_to_imitate_where_all_actions_are_the_same():
    count = 12
    episodes = Episodes(
        observation_fields={STATE: Field((2,))},
        action_field=Field((1,), low=-1.0, high=1.0),
        fps=10.0,
        observation={STATE: torch.randn(count + 2, 2)},
        actions=torch.full((count, 1), 0.5),
        lengths=torch.tensor([6, 6]),
        tasks=("a", "a"),
    )
    policy = SimpleNamespace(spec=SimpleNamespace(observation={STATE: Field((2,))}, history=1, prediction=1))
    (finding,) = check_policy_on_data(policy, episodes, torch.Generator(), 12, None)  # type: ignore[arg-type]
    assert finding.health is Health.UNKNOWN and "all recorded actions are equal" in finding.measured
