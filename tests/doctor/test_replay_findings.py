"""Each broken convention between data and world is named; healthy data has no problem, whatever the task and noise."""

import re
from dataclasses import replace

import broken_data
import numpy as np
import pytest
import torch

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.record import record
from robopolicy.doctor import Health, examine
from sims.experts import NoisyController, noise_level
from sims.registry import TASKS, load_task, make_world

pytestmark = pytest.mark.long

ROWS = 10


def recorded(world, noise="low", seed=0):
    expert = NoisyController(load_task(world.spec.name).expert(), noise_level(noise), seed, world.spec.action)
    return record(world, expert, np.arange(100 * seed, 100 * seed + world.batch_size))


@pytest.fixture(scope="module")
def cube():
    world = make_world("push_cube", ROWS)
    yield world, recorded(world)
    world.close()


@pytest.fixture(scope="module")
def arm():
    world = make_world("arm_reach", ROWS)
    yield world, recorded(world, "medium")
    world.close()


def problems(episodes, world):
    return [finding for finding in examine(episodes, world) if finding.problem]


def named(findings, check):
    return " | ".join(finding.measured for finding in findings if finding.check == check)


@pytest.mark.parametrize("noise", ["none", "low", "medium", "random"])
@pytest.mark.parametrize("name", sorted(TASKS.ours))
def test_healthy_data_has_no_problem(name, noise):
    world = make_world(name, 8)
    for seed in (0, 1):
        checks = [finding.check for finding in problems(recorded(world, noise, seed), world)]
        assert checks in ([], ["success"] if noise == "random" else [])
    world.close()


CUBE_BREAKS = {
    "sign": (lambda data: broken_data.flipped(data, 1), "action sign", "'velocity_y' has the opposite sign"),
    "both signs": (
        lambda data: broken_data.flipped(data, 0, 1),
        "action sign",
        "'velocity_x' has the opposite sign and 'velocity_y'|'velocity_y' has the opposite sign and 'velocity_x'",
    ),
    "order": (lambda data: broken_data.permuted(data, 1, 0), "action order", "'velocity_x' and 'velocity_y'"),
    "degrees": (
        lambda data: broken_data.scaled(data, 57.29578),
        "action scale",
        r"every action is 57.3 times too large \(degrees instead of radians",
    ),
    "radians": (lambda data: broken_data.scaled(data, 1 / 57.29578), "action scale", "radians instead of degrees"),
    "double": (lambda data: broken_data.scaled(data, 2.0), "action scale", "every action is 2 times too large"),
    "half": (lambda data: broken_data.scaled(data, 0.5), "action scale", "every action is 2 times too small"),
    "odd factor": (lambda data: broken_data.scaled(data, 0.73), "action scale", "1.37 times too small"),
    "one dimension": (lambda data: broken_data.scaled(data, 0.5, 0), "action scale", "'velocity_x' is 2 times too sm"),
    "late": (broken_data.late, "time shift", "actions are stored one step too late"),
    "two late": (lambda data: broken_data.late(data, 2), "time shift", "actions are stored 2 steps too late"),
    "early": (broken_data.early, "time shift", "actions are stored one step too early"),
    "frames early": (
        lambda data: broken_data.frames_moved(data, -1),
        "time shift",
        "observations are stored one step too early",
    ),
    "label of rate": (lambda data: replace(data, fps=30.0), "control rate", "dataset 30 steps/s, world 10"),
    "every step twice": (broken_data.doubled, "control rate", "as if recorded at 20 steps/s"),
    "state order": (
        lambda data: broken_data.swapped_elements(data, STATE, 0, 1),
        "observation order",
        "'x' and 'y' are swapped",
    ),
    "velocity order": (
        lambda data: broken_data.swapped_elements(data, ENVIRONMENT_STATE, 4, 5),
        "observation order",
        "'cube_velocity_x' and 'cube_velocity_y' are swapped",
    ),
    "state in degrees": (
        lambda data: broken_data.with_frames(data, STATE, lambda frames: 57.29578 * frames),
        "observation scale",
        "'x' is 57.3 times too large",
    ),
    "zero point": (
        lambda data: broken_data.with_frames(data, STATE, lambda frames: frames + torch.eye(6)[2] * 0.3),
        "observation scale",
        "'velocity_x' is 0.3 too large",
    ),
    "state sign": (
        lambda data: broken_data.with_frames(data, STATE, lambda frames: frames * (1 - 2 * torch.eye(6)[0])),
        "observation sign",
        "opposite sign: 'x'",
    ),
    "state and action": (
        lambda data: broken_data.flipped(broken_data.swapped_elements(data, ENVIRONMENT_STATE, 0, 1), 0),
        "action sign",
        "'velocity_x' has the opposite sign",
    ),
}


@pytest.mark.parametrize("case", CUBE_BREAKS)
def test_a_break_in_push_cube_is_named(cube, case):
    world, data = cube
    change, check, text = CUBE_BREAKS[case]
    findings = problems(change(data), world)
    assert re.search(text, named(findings, check)), findings
    assert all(finding.remedy for finding in findings)
    allowed = {check, "replayed motion", "replayed success", "action range", "action scale", "observation order"}
    assert {finding.check for finding in findings} <= allowed


ARM_BREAKS = {
    "gripper": (lambda data: broken_data.flipped(data, 3), "action sign", "'gripper' has the opposite sign"),
    "round": (
        lambda data: broken_data.permuted(data, 1, 2, 0, 3),
        "action order",
        "'x' contains 'y'.*'z' contains 'x'",
    ),
    "order": (lambda data: broken_data.permuted(data, 0, 2, 1, 3), "action order", "'y' and 'z' are swapped"),
    "centimetres": (lambda data: broken_data.scaled(data, 100, 2), "action scale", "'z' is 100 times too large"),
    "joints": (
        lambda data: broken_data.swapped_elements(data, STATE, 1, 2),
        "observation order",
        "'shoulder_lift_position' and 'elbow_flex_position' are swapped",
    ),
    "late": (broken_data.late, "time shift", "actions are stored one step too late"),
    "early": (broken_data.early, "time shift", "actions are stored one step too early"),
    "every other step": (broken_data.every_other, "control rate", "most likely: .* as if recorded at 5 steps/s"),
}


@pytest.mark.parametrize(
    "case",
    [case if case in ("late", "centimetres") else pytest.param(case, marks=pytest.mark.slow) for case in ARM_BREAKS],
)
def test_a_break_in_arm_reach_is_named(arm, case):
    world, data = arm
    change, check, text = ARM_BREAKS[case]
    findings = problems(change(data), world)
    assert re.search(text, named(findings, check)), findings


def test_what_cannot_be_told_apart_is_said_to_be_ambiguous(cube):
    world, data = cube
    findings = problems(broken_data.frames_moved(data, 1), world)
    text = named(findings, "time shift")
    assert "observations are stored one step too late" in text
    assert "actions are stored one step too early" in text
    assert text.count("one of 2 explanations that fit this data equally") == 2


def test_an_unknown_cause_is_not_guessed(cube):
    world, data = cube
    shuffled = data.actions[torch.randperm(data.step_count, generator=torch.Generator().manual_seed(0))]
    findings = problems(replace(data, actions=shuffled), world)
    assert {finding.check for finding in findings} <= {"replayed motion", "replayed success"}
    assert "no single error" in named(findings, "replayed motion")


def test_other_seeds_are_named_and_end_the_replay(cube):
    world, data = cube
    findings = problems(replace(data, seeds=data.seeds + 1), world)
    assert [finding.check for finding in findings] == ["start of episodes"]
    assert "Seeds" in findings[0].remedy


def test_a_few_broken_episodes_are_listed(cube):
    world, data = cube
    rest = [index for index in range(len(data)) if index != 3]
    one = broken_data.flipped(data.select([3]), 0)
    mixed = type(data).concatenate([data.select(rest[:3]), one, data.select(rest[3:])])
    findings = problems(mixed, world)
    assert "1 of 10 episodes diverge early: 3" in named(findings, "replayed motion")
    assert findings[0].health is Health.WARNING
    third = broken_data.flipped(data.select(range(3)), 0)
    findings = problems(type(data).concatenate([third, data.select(range(3, 10))]), world)
    assert "3 of 10 episodes diverge early: 0, 1, 2" in named(findings, "replayed motion")
    assert findings[0].health is Health.BAD


def test_data_without_seeds_is_not_replayed_and_not_blamed(cube):
    world, data = cube
    findings = examine(replace(data, seeds=None), world)
    assert not [finding for finding in findings if finding.problem]
    assert [finding.health for finding in findings if finding.check == "replay"] == [Health.UNKNOWN]


@pytest.mark.parametrize("key", ["action", STATE])
def test_values_that_are_not_finite_are_located(cube, key):
    world, data = cube
    if key == "action":
        actions = data.actions.clone()
        actions[int(data.starts[4]) + 1, 1] = torch.nan
        broken, name = replace(data, actions=actions), "velocity_y"
    else:
        frames = data.observation[STATE].clone()
        frames[int(data.frame_starts[4]), 1] = torch.inf
        broken, name = replace(data, observation={**data.observation, STATE: frames}), "y"
    findings = problems(broken, world)
    assert [finding.check for finding in findings] == ["finite values"]
    assert re.search(rf"{re.escape(key)}: 1 of .*\({name}; episodes 4\)", findings[0].measured)


def test_names_in_another_order_and_other_units_are_named(cube):
    world, data = cube
    field = replace(data.action_field, names=("velocity_y", "velocity_x"))
    findings = problems(replace(data, action_field=field), world)
    assert "action: 'velocity_y' where the world has 'velocity_x'" in named(findings, "action order")
    field = replace(data.action_field, unit="degrees/s")
    assert "degrees/s" in named(problems(replace(data, action_field=field), world), "action")


def test_actions_that_were_never_recorded_are_named(cube):
    world, data = cube
    findings = problems(replace(data, actions=torch.zeros_like(data.actions)), world)
    assert "no action ever changes" in named(findings, "constant actions")
