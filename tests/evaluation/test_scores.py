"""Normalised scores: linear between uniform actions and the expert, refused where returns do not rank them."""

import numpy as np
import pytest

from robopolicy.core.errors import DataError
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.storage import write_json
from robopolicy.data.lerobot_format import QUALITY
from robopolicy.data.quality import Disturbances, DisturbedController, Idle, fixed
from robopolicy.evaluation.scores import Anchors, Performance, normalised_score, read_anchors
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from sims.names import TASKS
from sims.registry import make_expert, make_world


def performance(returns, success=0.5):
    returns = np.asarray(returns, dtype=float)
    return Performance.of(returns, np.arange(len(returns)) < success * len(returns))


def result(returns, world="toy"):
    count = len(returns)
    nothing = np.zeros(count, dtype=bool)
    seeds = np.arange(count)
    return EvaluationResult(
        world, seeds, nothing, np.asarray(returns, float), seeds, nothing, True, seconds=1.0, steps=1
    )


RANDOM, EXPERT = performance(np.full(100, -1.0)), performance(np.full(100, 3.0))
ANCHORS = Anchors("toy", RANDOM, EXPERT)


def test_the_scale_is_linear_and_carries_the_interval_of_the_mean():
    assert normalised_score(RANDOM, ANCHORS).score == 0
    assert normalised_score(EXPERT, ANCHORS).score == 100
    assert normalised_score(performance(np.full(9, 5.0)), ANCHORS).score == 150
    returns = np.random.default_rng(0).normal(1.0, 2.0, 400)
    score = normalised_score(result(returns), ANCHORS)
    assert score.score == pytest.approx(100 * (returns.mean() + 1) / 4)
    assert score.low < score.score < score.high
    assert score.high - score.low == pytest.approx(2 * 1.96 * 25 * 2 / 20, rel=0.15)
    assert f"{score.score:.1f} [{score.low:.1f}" in score.text
    with pytest.raises(DataError, match="'push_t' cannot be normalised with the reference scores of 'toy'"):
        normalised_score(result([1.0], "push_t"), ANCHORS)


def test_returns_that_rank_uniform_actions_as_high_as_the_expert_are_refused():
    """Measured on Meta-World: episodes that end at success earn less than those that dawdle."""
    with pytest.raises(DataError, match="do not rank policies"):
        Anchors("toy", EXPERT, RANDOM).require_order()
    noisy = performance(np.random.default_rng(0).normal(-0.9, 3.0, 100))
    with pytest.raises(DataError, match=r"world\.options\.reward=increase"):
        Anchors("toy", noisy, performance(np.random.default_rng(1).normal(-0.5, 3.0, 100))).require_order()
    assert ANCHORS.require_order() is ANCHORS


@pytest.mark.parametrize("name", TASKS.names())
def test_every_task_of_ours_pays_its_expert_more_than_uniform_actions(name):
    world = make_world(name, 16, threads=1)
    seeds, noise = episode_seeds(0, "start", 16), episode_seeds(0, "noise", 16)

    def measured(level, controller):
        plan = fixed(np.full(16, level), noise, world.spec.horizon)
        actor = DisturbedController(controller, Disturbances(plan, 16, world.spec.action))
        evaluation = evaluate_policy(world, actor, seeds)
        return Performance.of(evaluation.returns, evaluation.success)

    expert = make_expert(name, world.spec)
    assert expert is not None
    anchors = Anchors(name, measured(1.0, Idle(world.spec.action)), measured(0.0, expert)).require_order()
    assert anchors.expert.success_rate >= 0.9 and anchors.random.success_rate <= 0.2


def test_trials_do_not_depend_on_how_many_rows_play_side_by_side():
    def outcomes(rows):
        world = make_world("reach_planar", rows, threads=1)
        plan = fixed(np.full(11, 0.8), episode_seeds(0, "noise", 11), world.spec.horizon)
        expert = make_expert("reach_planar", world.spec)
        assert expert is not None
        actor = DisturbedController(expert, Disturbances(plan, rows, world.spec.action))
        return evaluate_policy(world, actor, episode_seeds(0, "start", 11))

    alone, waves = outcomes(1), outcomes(4)
    assert 0 < alone.successes < 11
    assert np.array_equal(alone.success, waves.success)
    assert np.array_equal(alone.lengths, waves.lengths)
    assert np.allclose(alone.returns, waves.returns)


def test_anchors_are_read_from_the_dataset(tmp_path):
    file = tmp_path / QUALITY
    file.parent.mkdir(parents=True)
    text = {"name": "gen-v1/toy-medium", "quality": "medium"}
    write_json(file, {**text, "anchors": ANCHORS.to_json()})
    assert read_anchors(tmp_path) == ANCHORS
    write_json(file, {**text, "anchors": {"world": "toy", "random": RANDOM.to_json()}})
    with pytest.raises(DataError, match="no reference scores"):
        read_anchors(tmp_path)
    with pytest.raises(DataError, match="no reference scores"):
        write_json(file, {**text, "anchors": None})
        read_anchors(tmp_path)
