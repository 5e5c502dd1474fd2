"""Actions reach an environment as they were decided, or are clipped and counted: bounds may be a formality."""

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from suite_toys import LooseEnvironment, ToGoal

from robopolicy.core.action_bounds import OutsideBounds, union_of_bounds, widen_bounds
from robopolicy.core.delayed import with_latency
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import of_one_world, record
from robopolicy.doctor.data import check_action_range
from robopolicy.doctor.findings import Health
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.policies.denoising import DenoisingPolicy
from sims.experts import Noise, NoisyController
from sims.suites.families import FAMILIES, FamilyMember
from sims.suites.gymnasium_suite import GymnasiumWorld

SEEDS = np.arange(40)


def make(rows=8, **options):
    return GymnasiumWorld("loose", LooseEnvironment, rows, horizon=3, instruction="go", **options)


def test_an_exact_controller_is_as_exact_through_a_world_and_what_it_did_is_recorded(tmp_path):
    world = make()
    with pytest.warns(
        RobopolicyWarning, match=r"% of actions were outside.*element 0 .* -1 to 1.*executed unclipped"
    ) as notes:
        episodes = record(world, NoisyController(ToGoal(), Noise(), 0, world.spec.action), SEEDS)
    assert len(notes) == 1 and episodes.success.all()
    assert torch.equal(episodes.actions, episodes.observation["observation.state"][::2])
    assert episodes.actions[:, 0].abs().max() > 1.8
    low, high = episodes.action_field.low, episodes.action_field.high
    assert low[0] < -1.7 and high[0] > 1.7 and (low[1], high[1]) == (-1.0, 1.0)
    write_dataset(episodes, tmp_path / "data", existing="replace")
    assert read_dataset(tmp_path / "data").action_field == episodes.action_field
    narrower = replace(episodes, action_field=world.spec.action)
    assert of_one_world([narrower, episodes]).action_field == episodes.action_field


def test_evaluate_says_how_many_were_outside_and_in_which_element():
    result = evaluate_policy(make(), ToGoal(), SEEDS)
    clipped = evaluate_policy(make(clip_actions=True), ToGoal(), SEEDS)
    assert result.success_rate == 1.0 and clipped.success_rate < 0.7
    assert "45 % of actions were outside the declared bounds (element 0 45 % outside -1 to 1)" in result.outside
    assert "executed unclipped (set world.options.clip_actions=true to clip them)" in result.outside
    assert "they were clipped to these bounds" in clipped.outside and "element 1" not in result.outside
    assert EvaluationResult.from_json(result.to_json()).outside == result.outside


def test_recordings_of_a_world_that_clips_hold_what_it_executed():
    with pytest.warns(RobopolicyWarning, match="were clipped to these bounds"):
        episodes = record(make(clip_actions=True), ToGoal(), SEEDS)
    assert episodes.actions.abs().max() == 1.0 and episodes.action_field == make().spec.action


def test_nothing_is_said_where_nothing_is_outside():
    class Within(ToGoal):
        def act(self, observation):
            return np.clip(super().act(observation), -1, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        episodes = record(make(), Within(), SEEDS[:8])
    assert episodes.action_field == make().spec.action
    assert evaluate_policy(make(), Within(), SEEDS[:8]).outside == ""


def test_doctor_counts_them_and_calls_another_unit_a_problem():
    loose, strict = make().spec, make(clip_actions=True).spec
    actions = torch.linspace(-1.9, 1.9, 40)[:, None].repeat(1, 2) * torch.tensor([1.0, 0.4])
    (finding,) = check_action_range(actions, loose)
    assert not finding.problem and "50 % of actions" in finding.measured and "unclipped" in finding.remedy
    (finding,) = check_action_range(actions, strict)
    assert finding.health is Health.BAD and "clips" in finding.remedy
    assert check_action_range(57.3 * actions, loose)[0].health is Health.WARNING


def test_a_policy_that_learned_from_such_data_may_do_the_same():
    field = widen_bounds(make().spec.action, np.array([[1.9, 0.0]]))
    assert (field.low, field.high) == ((-1.0, -1.0), (1.9, 1.0))
    policy = object.__new__(DenoisingPolicy)
    torch.nn.Module.__init__(policy)
    from robopolicy.policies.interface import in_range, register_range

    register_range(policy, field)
    assert in_range(torch.tensor([[[1.9, 1.9]]]), policy.action_low, policy.action_high).tolist() == [
        [[pytest.approx(1.9), 1.0]]
    ]


def test_noise_stays_within_the_bounds_where_the_controller_does():
    field = make().spec.action
    observations = {"observation.state": np.array([[[1.9, 0.9]]] * 500, np.float32)}
    noisy = NoisyController(ToGoal(), Noise(gaussian=0.5), 0, field).act(observations)
    assert noisy[:, 0].max() == pytest.approx(1.9) and noisy[:, 1].max() == 1.0 and noisy.min() >= -1.0


def test_a_delay_hands_on_what_was_decided_too():
    world = with_latency(make(), 1)
    goal = world.reset(seeds=SEEDS[:8])["observation.state"][:, -1].astype(np.float64)
    world.step(goal[:, None])
    assert world.step(goal[:, None]).success.all()


def test_rounding_is_not_outside_and_bounds_may_be_infinite():
    spec = WorldSpec("w", {}, Field((2,), low=(0.0, -np.inf), high=(512.0, 1.0), names=("x", "y")), 10, 5)
    counted = OutsideBounds(spec)
    counted.add(np.array([[[512.001, -1e9], [513.0, 1.1], [0.0, 0.0]]]), np.array([[True, True, True]]))
    assert counted.counts.tolist() == [1, 1, 1] and counted.text.startswith("33 % of actions")
    assert "'x' 33 % outside 0 to 512" in counted.text and "'y' 33 % outside -inf to 1" in counted.text
    assert widen_bounds(spec.action, np.array([[512.001, -1e9]])) is spec.action
    assert union_of_bounds(spec.action, spec.action) is spec.action


def test_aloha_has_the_bounds_of_its_arms():
    (family,) = (each for each in FAMILIES if each.module == "gym_aloha")

    class Aloha(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (14,))
        action_space = gymnasium.spaces.Box(-1, 1, (14,))

    space = FamilyMember(Aloha(), family).action_space
    rest = np.array([0, -0.96, 1.16, 0, -0.3, 0, 1.0] * 2, np.float32)
    assert space.contains(rest) and not space.contains(rest * 2) and space.low[6] == 0 and space.high[13] == 1
