"""Arm tasks: the World's promises, experts, progress rewards, what observations contain, what success means."""

import itertools

import numpy as np
import pytest

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.testing.world import check_world
from sims import arm, grasping
from sims.experts import NOISE_LEVELS, NoisyController, noise_level
from sims.registry import load_task, make_world

NAMES = ["arm_reach", "pick_place", "stack"]
CARRYING = ["pick_place", "stack"]


def play(name, episodes, noise="none", **options):
    """Let the (disturbed) expert play; return the first and last observation, success [E] and named returns [E]."""
    world = make_world(name, episodes, **options)
    controller = NoisyController(load_task(name).expert(), noise_level(noise), 0, world.spec.action)
    first = observation = world.reset(seeds=np.arange(episodes))
    controller.reset()
    returns = {term: np.zeros(episodes) for term in world.spec.rewards}
    while True:
        step = world.step(controller.act(observation)[:, None])
        observation = step.observation
        for term, values in step.rewards.items():
            returns[term] += values.sum(axis=1)
        if step.ended.all():
            world.close()
            return first, observation, step.success, returns


def frame(observation, name):
    return {key: observation[key][:, -1] for key in load_task(name).observation}


@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_promises_of_a_world(name):
    check_world(lambda batch: make_world(name, batch, threads=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_succeeds_and_progress_is_the_rise_of_the_potential(name):
    first, last, success, returns = play(name, 64)
    assert success.mean() >= 0.95
    np.testing.assert_array_equal(returns["success"], success.astype(float))
    potential = load_task(name).potential
    rise = potential(frame(last, name)).astype(float) - potential(frame(first, name)).astype(float)
    np.testing.assert_allclose(returns["progress"], rise, atol=1e-4)
    assert 1.0 < returns["progress"][success].mean() < 5.0


@pytest.mark.parametrize("name", ["pick_place", "stack", "tidy"])
def test_cubes_rest_where_they_start_whatever_the_rounding(name):
    """At a distance of 0 to the table, rounding makes or breaks the contact, and a cube falls by 1 mm at once."""
    world = make_world(name, 8, threads=1)
    world.reset(seeds=np.arange(8))
    saved = world.snapshot()
    start, control = saved.arrays["state"], saved.arrays["control"][:, None]
    cubes = slice(world.model.jnt_qposadr[[world.model.jnt(i).type[0] == 0 for i in range(world.model.njnt)]][0], None)
    for begun in (start, start.astype(np.float32).astype(np.float64)):
        first = world._simulate(begun, np.repeat(control, world.task.substeps, axis=1), 1, np.arange(8))[0]
        moved = first[..., world._layout.qpos] - begun[:, None, world._layout.qpos]
        assert np.abs(moved[..., cubes]).max() < 1e-6
    world.close()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_noise_levels_grade_the_quality(name):
    rates = [play(name, 48, level)[2].mean() for level in NOISE_LEVELS]
    assert all(better >= worse - 0.05 for better, worse in itertools.pairwise(rates))
    assert rates[0] > rates[-1] + 0.3


@pytest.mark.parametrize("name", NAMES)
def test_waiting_earns_nothing_and_starts_are_varied_and_unsolved(name):
    world = make_world(name, 64)
    start = frame(world.reset(seeds=np.arange(64)), name)
    assert not load_task(name).succeeded(start).any()
    for key in load_task(name).observation:
        assert len(np.unique(start[key], axis=0)) == 64
    wait = np.zeros((64, 10, 4))
    wait[..., 3] = 1.0
    assert np.abs(world.step(wait).reward.sum(axis=1)).max() < 0.05
    for field in world.spec.observation.values():
        assert len(field.names) == field.size
    world.close()


@pytest.mark.parametrize("name", NAMES)
def test_state_holds_joints_targets_and_tip(name):
    world = make_world(name, 8)
    world.reset(seeds=np.arange(8))
    step = world.step(np.random.default_rng(0).uniform(-1, 1, (8, 6, 4)))
    layout = world.task.observation[STATE].names
    state = dict(zip(layout, step.observation[STATE][:, -1].T, strict=True))
    joints = np.stack([state[f"{joint}_position"] for joint in arm.JOINTS], axis=-1)
    snapshot = world.snapshot().arrays
    np.testing.assert_allclose(joints, snapshot["state"][:, 1:7], rtol=1e-6)
    targets = np.stack([state[f"tip_target_{axis}"] for axis in "xyz"], axis=-1)
    np.testing.assert_allclose(targets, arm.tip_position(snapshot["control"]), rtol=1e-5)
    np.testing.assert_allclose(state["gripper_target"], snapshot["control"][:, 5], rtol=1e-5)
    tip = np.stack([state[f"tip_{axis}"] for axis in "xyz"], axis=-1)
    np.testing.assert_allclose(tip, arm.tip_position(joints), atol=1e-6)
    named = arm.parts(step.observation[STATE][:, -1])
    np.testing.assert_array_equal(named["tip_target"], targets)
    np.testing.assert_array_equal(named["gripper"], state["gripper_position"])
    world.close()


@pytest.mark.parametrize("name", CARRYING)
def test_environment_state_holds_the_cube_and_its_offsets(name):
    world = make_world(name, 8)
    observation = world.reset(seeds=np.arange(8))
    names = world.task.observation[ENVIRONMENT_STATE].names
    values = dict(zip(names, observation[ENVIRONMENT_STATE][:, -1].T, strict=True))
    qpos = world.snapshot().arrays["state"][:, 1:]
    cube = np.stack([values[f"cube_{axis}"] for axis in "xyz"], axis=-1)
    np.testing.assert_allclose(cube, qpos[:, 6:9], atol=1e-6)
    np.testing.assert_allclose(values["cube_r11"], 1 - 2 * qpos[:, 12] ** 2, atol=1e-6)
    offset = np.stack([values[f"tip_to_cube_{axis}"] for axis in "xyz"], axis=-1)
    np.testing.assert_allclose(offset, cube - arm.tip_position(qpos), atol=1e-6)
    goal = cube + np.stack([values[f"cube_to_goal_{axis}"] for axis in "xyz"], axis=-1)
    if name == "stack":
        expected = qpos[:, 13:16] + [0, 0, 0.04]
    else:
        expected = np.stack([values[f"goal_{axis}"] for axis in "xyz"], axis=-1)
        np.testing.assert_allclose(expected, world.snapshot().arrays["goal"], atol=1e-6)
    np.testing.assert_allclose(goal, expected, atol=1e-6)
    world.close()


def finished(name):
    """One frame in which the cube lies at the goal and the open hand is 6 cm above it."""
    fields = load_task(name).observation
    state, environment = np.zeros(fields[STATE].shape), np.zeros(fields[ENVIRONMENT_STATE].shape)
    state[5] = arm.GRIPPER_OPEN
    environment[2], environment[17] = 0.06, -0.06
    return {STATE: state[None], ENVIRONMENT_STATE: environment[None]}


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize(
    ("key", "index", "value"),
    [
        (STATE, 5, arm.GRIPPER_HOLDS),  # still held
        (ENVIRONMENT_STATE, 18, 0.035),  # beside the goal
        (ENVIRONMENT_STATE, 20, 0.015),  # above or below it
        (ENVIRONMENT_STATE, 9, 0.2),  # moving
    ],
)
def test_success_needs_a_cube_at_rest_at_the_goal_and_let_go(name, key, index, value):
    succeeded, good = load_task(name).succeeded, finished(name)
    assert succeeded(good).all()
    good[key][0, index] = value
    assert not succeeded(good).any()


@pytest.mark.parametrize("name", CARRYING)
def test_finishing_is_worth_most(name):
    potential, best = load_task(name).potential, finished(name)
    assert potential(best) == pytest.approx(4.5)
    retreated = finished(name)
    retreated[ENVIRONMENT_STATE][0, 15:18] = [0.1, 0.0, -0.08]
    assert potential(retreated) == pytest.approx(4.5)
    held = finished(name)
    held[STATE][0, 5], held[ENVIRONMENT_STATE][0, 15:18] = arm.GRIPPER_HOLDS, 0.0
    assert potential(held) < potential(best)


def test_the_cube_cannot_be_pushed_onto_the_shelf():
    """A closed hand that sweeps across the table at cube height pushes the cube, but never to the mark's height."""
    world = make_world("pick_place", 16, terminate_on_success=False)
    observation = world.reset(seeds=np.arange(16))
    behind = np.array([0.0, -0.05, 0.0])
    for phase in (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2):
        state = arm.parts(observation[STATE][:, -1])
        cube = observation[ENVIRONMENT_STATE][:, -1, :3]
        aim = cube + (behind if phase == 1 else [0.0, 0.05, 0.0])
        move = np.clip((aim - state["tip_target"]) / arm.TIP_STEP, -1, 1)
        move[:, 2] = np.clip((0.02 - state["tip_target"][:, 2]) / arm.TIP_STEP, -1, 1) if phase == 2 else move[:, 2]
        step = world.step(np.concatenate([move, np.full((16, 1), -1.0)], axis=1)[:, None])
        observation = step.observation
    cube = observation[ENVIRONMENT_STATE][:, -1, :3]
    assert (cube[:, 2] < grasping.CUBE_HALF + 0.015).mean() > 0.8
    assert not step.success.any()
    world.close()
