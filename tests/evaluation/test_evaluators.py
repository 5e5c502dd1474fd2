"""Judges on a line where the best policy walks home, and judges judged."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_toys import LineWorld

from robopolicy.building.evaluators import warn_of_critics_alone
from robopolicy.configuration.sections.recorded import GateSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import Field, PolicySpec
from robopolicy.evaluation.bakeoff import best_evaluator, score_evaluator
from robopolicy.evaluation.evaluators import (
    CriticEvaluator,
    FqeEvaluator,
    ModelEvaluator,
    RecordedDecisions,
    episode_starts,
    highest_credible,
)
from robopolicy.evaluation.gate import Gate, evaluator_result
from robopolicy.rl.offline.decisions import recorded_decisions, value_bound
from robopolicy.rl.offline.fqe import FqeConfig
from robopolicy.rl.offline.interface import Interface

FIELDS = {"observation.state": Field((1,))}
ACTION = Field((1,), low=-0.2, high=0.2)
QUICK = FqeConfig(steps=300, batch_size=128, width=32, depth=1, rate=5e-3, discount=0.9, renew=20, samples=1)


class Walk:
    """Steps of `speed` towards 0, two at a time; negative walks away."""

    spec = PolicySpec(FIELDS, ACTION, history=1, chunk=2, prediction=2, scored_steps=0, fps=10.0)

    def __init__(self, speed):
        self.speed = speed

    def act(self, observation, generator, *, deterministic=False):
        step = -self.speed * observation["observation.state"][:, -1:].sign()
        return Decision(step.expand(-1, 2, -1).clamp(-0.2, 0.2))

    def reset(self, rows=None):
        """Nothing to forget."""


def recorded(count=60, length=12, seed=0):
    draws = torch.Generator().manual_seed(seed)
    actions = 0.4 * torch.rand(count, length, 1, generator=draws) - 0.2
    start = 2 * torch.rand(count, 1, 1, generator=draws) - 1
    states = torch.cat([start, start + actions.cumsum(1)], 1)
    data = Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={"observation.state": states.flatten(0, 1)},
        actions=actions.flatten(0, 1),
        lengths=torch.full((count,), length),
        tasks=("",) * count,
        rewards={"near": -states[:, 1:].abs().flatten()},
        terminated=torch.zeros(count, dtype=torch.bool),
    )
    interface = Interface(FIELDS, ACTION, chunk=2)
    decisions = recorded_decisions(data, interface, QUICK.discount)
    return RecordedDecisions(decisions, interface, value_bound(data.reward, QUICK.discount), episode_starts(data, 32))


def true_value(data, speed):
    """What walking is really worth from the judge's starts, [S]."""
    state = data.episodes.observation["observation.state"][data.starts, 0]
    total, walker = torch.zeros_like(state), Walk(speed)
    for step in range(120):
        if step % 2 == 0:
            move = walker.act({"observation.state": state[:, None, None]}, None).actions[:, 0, 0]
        state = state + move
        total -= QUICK.discount**step * state.abs()
    return total.numpy()


@pytest.mark.long
def test_a_fitted_judge_knows_what_walking_home_is_worth():
    data = recorded()
    judge = FqeEvaluator(data, QUICK)
    home, away = judge.values(Walk(0.1)), judge.values(Walk(-0.1))
    assert home.shape == (32,)
    assert home.mean() == pytest.approx(true_value(data, 0.1).mean(), abs=0.6)
    assert home.mean() - away.mean() > 3
    assert np.array_equal(home, judge.values(Walk(0.1))), "the same policy is scored alike"
    assert len(judge.clipped) == 3 and max(judge.clipped) < 0.05
    assert evaluator_result("FQE", home, away, 0.0).better and not evaluator_result("FQE", away, home, 0.0).better


def test_what_is_credible_is_found_by_discounted_rewards_and_goes_on_behind_a_time_limit():
    discount = 0.5
    data = replace(
        recorded(3, 2).episodes,
        rewards={"paid": torch.tensor([1.0, 2.0, 0.0, -4.0, 8.0, -20.0])},  # earns 1 + 1, 0 - 2, 8 - 10
        terminated=torch.tensor([True, False, True]),
    )
    assert highest_credible(data, discount) == 2.0
    endless = replace(data, terminated=torch.tensor([False, False, False]))
    assert highest_credible(endless, discount) == pytest.approx(2.0 / (1 - 0.5**2)), "the same again and again"
    worse = replace(data, rewards={"paid": -torch.ones(6)}, terminated=torch.zeros(3, dtype=torch.bool))
    assert highest_credible(worse, discount) == pytest.approx(-1.5), "nothing more is paid"
    assert highest_credible(replace(worse, terminated=None), discount) == pytest.approx(-1.5)
    with pytest.raises(DataError, match="this dataset has none"):
        highest_credible(replace(data, rewards=None), discount)


def test_a_mean_above_nine_of_ten_successes_is_not_credible():
    episodes = recorded(22, 2).episodes
    earned = torch.arange(22.0)  # of which the successes are 0, 2, 4, ... 20, and nine of ten at most 18
    rewards = torch.stack([earned, torch.zeros(22)], 1).flatten()
    succeeded = (torch.arange(44) // 2 % 2 == 0) & (torch.arange(44) % 2 == 1)
    data = replace(episodes, rewards={"paid": rewards}, terminated=torch.ones(22, dtype=torch.bool))
    assert highest_credible(replace(data, step_success=succeeded), 0.9) == pytest.approx(18.0)
    nothing = torch.zeros_like(succeeded)
    assert highest_credible(data, 0.9) == highest_credible(replace(data, step_success=nothing), 0.9) == 21


def test_judges_by_recorded_data_say_up_to_where_they_are_believed():
    data = replace(recorded(), ceiling=-1.0)
    assert FqeEvaluator(data, QUICK).ceiling == CriticEvaluator(Critic(), data).ceiling == -1.0
    assert CriticEvaluator(Critic(), data, world=LineWorld(8), seeds=np.arange(4)).ceiling is None
    assert getattr(ModelEvaluator(LineWorld(8), np.arange(4)), "ceiling", None) is None


class Critic:
    """Q(s, a) is minus where the first step leads, and what a second member thinks, which is more."""

    def action_values(self, state, action):
        first = -(state[:, 0] + 0.2 * action[:, 0]).abs()
        return torch.stack([first, first + 1])


def test_a_critic_judges_by_the_smallest_member_at_the_starts():
    data = recorded()
    judge = CriticEvaluator(Critic(), data, independent=False)
    state = data.episodes.observation["observation.state"][data.starts, 0]
    assert judge.values(Walk(0.1)) == pytest.approx(-(state - 0.1 * state.sign()).abs().numpy(), abs=1e-5)
    with pytest.raises(ConfigError, match="cannot be the only evaluator"):
        Gate([judge])
    with pytest.raises(ConfigError, match="needs a world and seeds"):
        CriticEvaluator(Critic(), data, seeds=np.arange(4))


def test_a_world_judges_by_success_or_return_on_the_same_starts():
    seeds = np.arange(20)
    judge = ModelEvaluator(LineWorld(8), seeds)
    home, away = judge.values(Walk(0.1)), judge.values(Walk(-0.1))
    assert home.tolist() == [1.0] * 20 and away.mean() < 0.2 and judge.name == "success in the line"
    assert Gate([judge]).decide(Walk(0.1), Walk(-0.1)).accepted
    paid = ModelEvaluator(LineWorld(8), seeds, by="return").values(Walk(0.1))
    assert paid.min() >= 0 and 0.2 < paid.mean() < 0.6
    with pytest.raises(ConfigError, match="evaluates success or return"):
        ModelEvaluator(LineWorld(8), seeds, by="luck")


def test_a_critic_judges_along_rollouts_until_episodes_end():
    class Place(Critic):
        def action_values(self, state, action):
            return state[:, :1].abs().T

    data, seeds = recorded(), np.arange(20)
    judge = CriticEvaluator(Place(), data, world=LineWorld(8), seeds=seeds, decisions=3)
    still = judge.values(Walk(0.0))
    assert still == pytest.approx(np.abs(LineWorld(20).reset(seeds=seeds)["observation.state"][:, 0, 0]), abs=1e-6)
    assert (judge.values(Walk(0.1)) <= still + 1e-6).all()


def test_scores_of_judges_by_hand():
    truth = np.array([0.0, 0.5, 1.0, 0.8])
    right = np.repeat(truth[:, None], 50, 1)
    score = score_evaluator("right", truth, right)
    assert score.spearman == pytest.approx(1.0) and score.regret == 0.0 and score.error < 1e-12
    assert (score.pairs, score.good, score.accepted) == (12, 6, 6)
    assert score.false_accepts == 0.0 and score.false_rejects == 0.0
    wrong = score_evaluator("wrong", truth, 1 - right)
    assert wrong.spearman == pytest.approx(-1.0) and wrong.regret == 1.0
    assert wrong.false_accepts == 1.0 and wrong.false_rejects == 1.0
    assert wrong.error == pytest.approx(np.abs(1 - 2 * truth).mean())
    shy = score_evaluator("shy", truth, right, margin=0.6, comparable=False)
    assert shy.accepted == 2 and shy.false_rejects == pytest.approx(4 / 6) and math.isnan(shy.error)
    assert score_evaluator("shy", truth, right, relative=0.7).accepted == 4, "a share of each incumbent's own value"
    silent = score_evaluator("silent", truth, right, margin=2.0)
    assert not silent.accepted and best_evaluator({"silent": silent}) is None, "it knows nothing of these policies"
    strict = score_evaluator("right", truth, right, threshold=0.4)
    assert strict.good == 4 and strict.false_accepts == pytest.approx(2 / 8)
    assert best_evaluator({"right": score, "wrong": wrong, "shy": shy}) == "right"
    assert best_evaluator({"wrong": wrong}) is None
    with pytest.raises(DataError, match="at least three policies"):
        score_evaluator("few", truth[:2], right[:2])


@pytest.mark.parametrize(
    ("evaluators", "accepted", "noted"),
    [
        (("fqe",), True, True),
        (("fqe", "critic"), True, True),
        (("fqe",), False, False),
        (("model", "fqe"), True, False),
    ],
)
def test_a_gate_of_critics_alone_says_that_they_accept_worse_policies(evaluators, accepted, noted, capsys):
    warn_of_critics_alone(GateSection(evaluators=evaluators), accepted)
    assert ("also accept worse policies" in " ".join(capsys.readouterr().out.split())) is noted


def test_what_is_said_of_critics_is_what_the_tables_say(capsys):
    tables = (Path(__file__).parents[2] / "robopolicy" / "benchmarks" / "README.md").read_text()
    worse = {
        name: [tuple(map(int, each)) for each in re.findall(rf"^\| {name} \| (\d+) of (\d+): ", tables, re.MULTILINE)]
        for name in ("model", "fqe", "critic")
    }
    accepted = {name: sum(count for count, _ in counts) for name, counts in worse.items()}
    assert {name: sum(total for _, total in counts) for name, counts in worse.items()} == dict.fromkeys(worse, 147)
    warn_of_critics_alone(GateSection(evaluators=("fqe",)), accepted=True)
    said = " ".join(capsys.readouterr().out.split())
    assert f"accepted {accepted['fqe']} and critic {accepted['critic']}" in said and accepted["model"] == 0
