"""What is off between a policy and data is named: statistics, sign, order, scale, time, colours, fields, blindness."""

from dataclasses import replace

import broken_data
import numpy as np
import pytest
import torch

from robopolicy.core.policy import Decision
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, Field, PolicySpec
from robopolicy.data.record import record
from robopolicy.doctor import Health, examine_policy
from robopolicy.doctor.policy import check_normalizers
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import Normalizer
from robopolicy.policies import (
    DenoisingPolicy,
    DenoisingPolicyConfig,
    TokenConfig,
    TokenPolicy,
    TokenPolicyConfig,
)
from sims.experts import NoisyController
from sims.registry import load_task, make_world

FRONT = IMAGE_PREFIX + "front"


class FunctionPolicy:
    """A policy whose action is a plain function of the observation, as `act(observation) -> [B, A]`."""

    def __init__(self, act, observation, action, fps=10.0):
        self._act = act
        self.spec = PolicySpec(observation, action, history=1, chunk=1, prediction=1, scored_steps=0, fps=fps)

    def act(self, observation, generator, *, deterministic=False):
        actions = torch.as_tensor(self._act(observation), dtype=torch.float32)[:, None]
        return Decision(actions)

    def reset(self, rows=None):
        pass


@pytest.fixture(scope="module")
def data():
    world = make_world("push_cube", 10)
    expert = NoisyController(load_task("push_cube").expert(), 0.05, 0, world.spec.action)
    yield record(world, expert, np.arange(10))
    world.close()


@pytest.fixture(scope="module")
def expert(data):
    controller = load_task("push_cube").expert()
    return FunctionPolicy(
        lambda observation: controller.act({key: observation[key].numpy() for key in (STATE, ENVIRONMENT_STATE)}),
        data.observation_fields,
        data.action_field,
    )


def problems(policy, data):
    findings = examine_policy(data, policy, torch.Generator().manual_seed(0))
    return {finding.check: finding.measured for finding in findings if finding.problem}


def fitted(data, **options):
    config = DenoisingPolicyConfig(width=16, depth=1, **options)
    values = {**data.observation, "action": data.actions}
    return DenoisingPolicy(config, data.observation_fields, data.action_field, fps=10.0, values=values)


def test_a_sound_policy_has_no_problem(expert, data):
    assert problems(expert, data) == {}


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (lambda data: broken_data.flipped(data, 0), "action sign", "'velocity_x' has the opposite sign"),
        (
            lambda data: broken_data.flipped(data, 0, 1),
            "action sign",
            "'velocity_y' has the opposite sign of the policy's",
        ),
        (
            lambda data: broken_data.permuted(data, 1, 0),
            "action order",
            "'velocity_x' follows 'velocity_y' of the data",
        ),
        (lambda data: broken_data.scaled(data, 57.29578), "action scale", "for the policy, 'velocity_x' is about 5"),
    ],
)
def test_actions_unlike_the_policys_are_explained(expert, data, change, check, text):
    problem_texts = problems(expert, change(data))
    assert text in problem_texts[check]
    assert set(problem_texts) <= {check, "imitation"}


def test_a_policy_that_is_merely_bad_is_not_explained_away(data):
    policy = FunctionPolicy(
        lambda observation: torch.sin(100 * observation[STATE][:, -1, :2]), data.observation_fields, data.action_field
    )
    assert set(problems(policy, data)) == {"imitation"}


def hesitant(data, expert, factor, noise):
    """A policy near the mean action: the expert's times `factor` with noise as many times as wide."""
    generator = torch.Generator().manual_seed(3)

    def act(observation):
        actions = torch.as_tensor(expert._act(observation))[:, -2:]
        return factor * (actions + noise * data.actions.std(0) * torch.randn(actions.shape, generator=generator))

    return FunctionPolicy(act, data.observation_fields, data.action_field)


@pytest.mark.parametrize("factor", [-0.05, -0.2])
def test_a_policy_that_was_trained_too_little_does_not_accuse_the_data(expert, data, factor):
    """Near the mean action its correlations are chance: telling a user to flip a sign would endanger his robot."""
    policy = hesitant(data, expert, factor, 1.0)
    assert set(problems(policy, data)) == {"imitation"}
    findings = examine_policy(data, policy, torch.Generator().manual_seed(0))
    unknown = {finding.check: finding.measured for finding in findings if finding.health is Health.UNKNOWN}
    assert "not trained enough for this check: the policy moves at least" in unknown["order, sign and scale"]


def test_a_close_correlation_tells_of_another_scale_unless_the_normaliser_fits(expert, data):
    policy = hesitant(data, expert, -0.05, 0.0)
    assert set(problems(policy, data)) == {"imitation", "action sign", "action scale"}
    policy.normalizers = lambda: {"action": Normalizer((2,), NormalizationMode.MIN_MAX).fit(data.actions)}
    assert set(problems(policy, data)) == {"imitation"}
    assert {"normaliser", "action sign", "action scale"} <= set(problems(policy, broken_data.scaled(data, 10.0)))


def test_a_policy_that_ignores_its_input_is_named(data):
    policy = FunctionPolicy(
        lambda observation: torch.zeros(len(observation[STATE]), 2), data.observation_fields, data.action_field
    )
    assert "change by 0.00" in problems(policy, data)["policy reads its input"]


def test_images_in_another_order_of_colours_are_named(data):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(data.observation[STATE]), 1, 1, 3), generator=generator, dtype=torch.uint8)
    images = images.expand(-1, 4, 4, 3).contiguous()

    def act(observation):
        colours = observation[FRONT][:, -1].float().mean((1, 2)) / 127.5 - 1
        return torch.stack([colours[:, 0], colours[:, 1] - colours[:, 2]], 1)

    field = Field((4, 4, 3), "uint8", 0, 255)
    policy = FunctionPolicy(act, {FRONT: field}, data.action_field)
    steps = torch.arange(data.step_count) + data.episode_of_step
    coloured = replace(
        data,
        observation_fields={**data.observation_fields, FRONT: field},
        observation={**data.observation, FRONT: images},
        actions=act({FRONT: images[steps][:, None]}),
    )
    assert problems(policy, coloured) == {}
    problem_texts = problems(policy, broken_data.with_frames(coloured, FRONT, lambda frames: frames.flip(-1)))
    assert "blue and red are swapped (BGR instead of RGB)" in problem_texts["image channels"]
    assert "camera 'front', but the dataset lacks it (it has: none)" in problems(policy, data)["missing camera"]


def test_fields_and_rates_of_another_policy_are_named(expert, data):
    other = FunctionPolicy(None, {**expert.spec.observation, STATE: Field((9,))}, data.action_field, fps=20.0)
    problem_texts = problems(other, data)
    assert "policy (9,)" in problem_texts[STATE]
    assert "dataset 10 steps/s, policy 20" in problem_texts["control rate"]


def test_names_and_a_rate_that_cannot_be_compared_do_not_agree(expert, data):
    """A policy of LeRobot's has no names and says no rate: elements that changed places are not vouched for."""

    def findings(policy, episodes):
        results = examine_policy(episodes, policy, torch.Generator().manual_seed(0))
        return {finding.check: (finding.health, finding.measured) for finding in results}

    vouched = "keys, shapes, names and rate match the data"
    assert findings(expert, data)["policy fields"] == (Health.GOOD, vouched)
    assert "element names" not in findings(expert, data)
    fields = {key: replace(field, names=()) for key, field in data.observation_fields.items()}
    silent = FunctionPolicy(expert._act, fields, replace(data.action_field, names=()), fps=0.0)
    healths = findings(silent, data)
    assert healths["policy fields"] == (Health.GOOD, "keys and shapes match the data")
    assert healths["element names"][0] is Health.UNKNOWN
    assert healths["element names"][1].startswith("not compared: the policy has no names for observation.state, ")
    assert healths["control rate"] == (Health.UNKNOWN, "dataset 10 steps/s, but the policy's rate is unknown")
    unnamed = replace(data, action_field=replace(data.action_field, names=()))
    healths = findings(expert, unnamed)
    assert healths["policy fields"] == (Health.GOOD, "keys, shapes and rate match the data")
    assert healths["element names"][1] == "not compared: the data has no names for action"


@pytest.mark.parametrize("mode", [NormalizationMode.MIN_MAX, NormalizationMode.MEAN_STD])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda values: values * 57.29578, "57.3 times too large (degrees instead of radians?)"),
        (lambda values: values / 57.29578, "57.3 times too small (radians instead of degrees?)"),
        (lambda values: values + 4 * values.std(0) + 1, "'x' lies"),
    ],
)
def test_statistics_of_other_data_are_named(data, mode, change, text):
    policy = fitted(data, state_normalization=mode)
    problem_texts = problems(
        policy, replace(data, observation={**data.observation, STATE: change(data.observation[STATE])})
    )
    assert problem_texts["normaliser"].startswith("observation.state: fitted on other data")
    assert text in problem_texts["normaliser"]


def test_statistics_fit_the_data_they_come_from(data):
    assert "normaliser" not in problems(fitted(data), data)
    half = data.select(range(5))
    assert "normaliser" not in problems(fitted(half), data)
    assert "normaliser" not in problems(fitted(data), half)


def test_a_token_policy_shows_its_statistics_too(data):
    token = TokenConfig(width=16, depth=1, heads=2, feed_forward=16)
    fields, values = data.observation_fields, {**data.observation, "action": data.actions}
    policy = TokenPolicy(TokenPolicyConfig(token=token), fields, data.action_field, fps=10.0, values=values)
    assert check_normalizers(policy, data)[0].health is Health.GOOD
    moved = replace(data, observation={**data.observation, STATE: data.observation[STATE] + 5.0})
    assert check_normalizers(policy, moved)[0].measured.startswith("observation.state: fitted on other data")


def test_a_normaliser_that_was_never_fitted_is_named(data):
    policy = fitted(data)
    normalizer = policy.network.encoder.normalizer(STATE)
    normalizer.offset.zero_()
    normalizer.scale.fill_(1.0)
    assert "or never fitted (offset 0, scale 1)" in problems(policy, data)["normaliser"]


def test_elements_that_changed_places_are_seen_in_the_statistics(data):
    moved = broken_data.with_frames(data, ENVIRONMENT_STATE, lambda frames: frames + torch.eye(13)[2] * 5)
    policy = fitted(moved)
    problem_texts = problems(policy, broken_data.swapped_elements(moved, ENVIRONMENT_STATE, 1, 2))
    assert "fits if 'cube_y' and 'cube_cos' are exchanged" in problem_texts["normaliser"]


def test_a_policy_of_another_kind_hides_its_statistics_without_blame(expert, data):
    findings = examine_policy(data, expert, torch.Generator().manual_seed(0))
    assert [item.health for item in findings if item.check == "normaliser"] == [Health.UNKNOWN]
