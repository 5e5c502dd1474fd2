"""Planted faults: what each does, when it begins, and that an episode is the same in any batch, chunk and snapshot."""

from typing import Any

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.faults import FAULTS
from robopolicy.core.faulty import WINDOW, fault_plan, with_faults_of
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.evaluation.tables import fault_table
from robopolicy.testing.world import check_world
from sims import registry
from sims.registry import make_expert
from worldmodels.env import ImaginedWorld
from worldmodels.oracle import OracleModel
from worldmodels.protocol import Context

ALL = list(FAULTS.ours)
OUTSIDE = "outside_robotics"
SEEDS = np.arange(4)


def make_world(*args, **options) -> Any:
    return registry.make_world(*args, **options)


def begins(world, rows=SEEDS):
    plan = fault_plan(world, rows)
    assert plan is not None
    return plan.begins


def pair(name, fault, rows=4, **options):
    """Return a world in which every episode has this fault, and the same one without."""
    faulty = make_world(name, rows, faults=[fault] if isinstance(fault, str) else fault, fault_rate=1.0, **options)
    plain = make_world(name, rows, **options)
    return faulty, plain, faulty.reset(seeds=SEEDS), plain.reset(seeds=SEEDS)


@pytest.mark.parametrize("name", ["push_cube", "pick_place"])
def test_worlds_with_faults_keep_every_promise(name):
    check_world(lambda rows: make_world(name, rows, history=2, faults=ALL, fault_rate=1.0), renders=False, chunk=6)


def test_the_undisturbed_fields_are_those_of_the_world_without_faults():
    options = {"faults": ["blackout"], "fault_rate": 1.0, "undisturbed": True}
    world, plain = make_world("push_cube", 4, **options), make_world("push_cube", 4)
    check_world(lambda rows: make_world("push_cube", rows, history=2, **options), renders=False, chunk=6)
    first, expected = world.reset(seeds=SEEDS), plain.reset(seeds=SEEDS)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 40, 2))
    after, expected_after = world.step(actions).observation, plain.step(actions).observation
    assert set(world.spec.observation) == {key + end for key in plain.spec.observation for end in ("", "_undisturbed")}
    for key in plain.spec.observation:
        np.testing.assert_array_equal(first[key + "_undisturbed"], expected[key])
        np.testing.assert_array_equal(after[key + "_undisturbed"], expected_after[key])
    assert not np.array_equal(after[ENVIRONMENT_STATE], expected_after[ENVIRONMENT_STATE])
    with pytest.raises(ConfigError, match=r"undisturbed=1 must be true or false"):
        make_world("push_cube", 4, **{**options, "undisturbed": 1})
    with pytest.raises(ConfigError, match=r"undisturbed needs faults"):
        make_world("push_cube", 4, undisturbed=True)


def test_faults_follow_from_the_seed_and_a_share_of_the_episodes_has_none():
    world, seeds = make_world("pick_place", 2, faults=ALL), np.arange(3000)
    plan, again = (fault_plan(world, seeds[order]) for order in (slice(None), slice(None, None, -1)))
    assert plan is not None and again is not None and plan.names == again.names[::-1]
    names, counts = np.unique(plan.names, return_counts=True)
    assert set(names) == {"", *ALL}
    # .2 without, an equal part of .8 with each: four standard errors of a binomial share
    expected = np.array([0.2 if not name else 0.8 / len(ALL) for name in names])
    assert (np.abs(counts / 3000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 3000)).all()
    low, high = (round(share * world.spec.horizon) for share in WINDOW)
    assert (plan.begins.min(), plan.begins.max()) == (low, high)
    assert fault_plan(make_world("pick_place", 2), seeds) is None


@pytest.mark.parametrize(
    ("fault", "setting"),
    [
        ("frozen_joint", "frozen_joint"),
        ("protective_stop", {"protective_stop": {"steps": 6}}),
        ("latency", {"latency": {"steps": 3}}),
    ],
)
def test_actions_are_changed_from_the_begin_on(fault, setting):
    faulty, plain, *_ = pair("push_cube", setting)
    start, draws = begins(faulty), np.random.default_rng(0)
    actions = draws.uniform(-1, 1, (4, 40, 2))
    changed = actions.copy()
    for row, begin in enumerate(start):
        for step in range(begin, 40):
            if fault == "latency":  # the last action in time goes on, then everything is three steps late
                changed[row, step] = actions[row, max(step - 3, begin - 1)]
            elif fault == "protective_stop":  # velocities are 0 for six steps
                changed[row, step] = 0.0 if step < begin + 6 else actions[row, step]
            else:
                frozen = faulty.faults["frozen_joint"]
                element = int(np.floor(2 * draw_of(faulty, row)))
                assert frozen.arrays["kept"].shape == (4, 2)
                changed[row, step, element] = 0.0  # a velocity
    step, expected = faulty.step(actions), plain.step(changed)
    np.testing.assert_array_equal(step.trace[STATE], expected.trace[STATE])
    assert not np.array_equal(plain_trace("push_cube", actions), step.trace[STATE])


def draw_of(world, row):
    return uniforms(world.snapshot().arrays["faults/keys"], 1)[row, 0]


def plain_trace(name, actions):
    world = make_world(name, 4)
    world.reset(seeds=SEEDS)
    return world.step(actions).trace[STATE]


def test_a_frozen_gripper_keeps_its_last_value():
    faulty, plain, *_ = pair("pick_place", "frozen_joint", rows=4)
    row = next((row for row in range(4) if int(4 * draw_of(faulty, row)) == 3), None)
    seeds = SEEDS
    while row is None:  # another batch, until one has the gripper
        seeds = seeds + 4
        for each in (faulty, plain):
            each.reset(seeds=seeds)
        row = next((row for row in range(4) if int(4 * draw_of(faulty, row)) == 3), None)
    begin = int(begins(faulty, seeds)[row])
    actions = np.random.default_rng(1).uniform(-1, 1, (4, begin + 8, 4))
    changed = actions.copy()
    changed[row, begin:, 3] = actions[row, begin - 1, 3]
    step, expected = faulty.step(actions), plain.step(changed)
    np.testing.assert_array_equal(step.trace[STATE][row], expected.trace[STATE][row])


def test_sensors_are_off_but_the_world_is_not():
    faulty, plain, *_ = pair("push_cube", {"sensor_offset": {"offset": 0.25}}, history=2)
    actions = np.random.default_rng(2).uniform(-1, 1, (4, 40, 2))
    step, expected = faulty.step(actions), plain.step(actions)
    error = step.trace[STATE] - expected.trace[STATE]  # [4, 40, 6]; frame t + 1 follows step t
    for row, begin in enumerate(begins(faulty)):
        assert not error[row, : begin - 1].any()
        wrong = error[row, begin - 1 :]
        np.testing.assert_allclose(np.sort(np.abs(wrong), -1)[:, -1], 0.25, atol=1e-6)
        assert (np.abs(wrong) > 0).sum() == len(wrong)  # one element in every frame
    np.testing.assert_array_equal(step.trace[ENVIRONMENT_STATE], expected.trace[ENVIRONMENT_STATE])
    np.testing.assert_array_equal(step.reward, expected.reward)
    np.testing.assert_array_equal(step.observation[STATE][:, -1], step.trace[STATE][:, -1])


def test_a_blackout_freezes_the_scene_or_blackens_cameras():
    faulty, plain, first, _ = pair("push_cube", "blackout")
    actions = np.random.default_rng(3).uniform(-1, 1, (4, 40, 2))
    frames = np.concatenate([first[ENVIRONMENT_STATE], faulty.step(actions).trace[ENVIRONMENT_STATE]], 1)
    true = plain.step(actions).trace[ENVIRONMENT_STATE]
    for row, begin in enumerate(begins(faulty)):
        assert (frames[row, begin:] == frames[row, begin - 1]).all()
        np.testing.assert_array_equal(frames[row, 1:begin], true[row, : begin - 1])
    cameras = {"cameras": ["top"], "image_size": 16}
    faulty, plain, first, same = pair("push_cube", "blackout", **cameras)
    np.testing.assert_array_equal(first["observation.images.top"], same["observation.images.top"])
    assert not faulty.step(actions).observation["observation.images.top"].any()
    assert plain.step(actions).observation["observation.images.top"].any()


def test_a_grasp_is_lost_and_a_block_is_pushed():
    faulty, plain, *_ = pair("pick_place", {"slip": {"steps": 4}})
    begin = begins(faulty)
    closed = np.zeros((4, 40, 4))
    closed[..., 3] = -1.0
    opened = closed.copy()
    for row in range(4):
        opened[row, begin[row] : begin[row] + 4, 3] = 1.0
    np.testing.assert_array_equal(faulty.step(closed).trace[STATE], plain.step(opened).trace[STATE])
    faulty, plain, *_ = pair("push_cube", "slip")
    still = np.zeros((4, 40, 2))
    moved, rested = faulty.step(still).trace[ENVIRONMENT_STATE], plain.step(still).trace[ENVIRONMENT_STATE]
    for row, begin in enumerate(begins(faulty)):
        np.testing.assert_array_equal(moved[row, :begin], rested[row, :begin])
        assert np.linalg.norm(moved[row, -1, :2] - rested[row, -1, :2]) > 0.02  # m


@pytest.mark.parametrize(("name", "part"), [("push_cube", slice(7, 9)), ("stack", slice(21, 24))])
def test_the_goal_jumps_once(name, part):
    faulty, plain, *_ = pair(name, "moved_goal")
    still = np.zeros((4, 40, faulty.spec.action.size))
    moved, rested = faulty.step(still).trace[ENVIRONMENT_STATE], plain.step(still).trace[ENVIRONMENT_STATE]
    for row, begin in enumerate(begins(faulty)):
        np.testing.assert_array_equal(moved[row, :begin], rested[row, :begin])
        assert (np.abs(moved[row, begin:, part] - rested[row, begin:, part]).max(-1) > 1e-3).all()
        assert np.abs(np.diff(moved[row, begin + 1 :, part], axis=0)).max() < 2e-3


@pytest.mark.long
def test_outcomes_are_those_of_any_batch_size_and_counted_by_fault():
    seeds = np.arange(60)
    results = []
    for rows in (60, 7):
        world = make_world("pick_place", rows, faults=ALL)
        expert = make_expert("pick_place", world.spec)
        assert expert is not None
        results.append(evaluate_policy(world, expert, seeds))
    first, second = results
    np.testing.assert_array_equal(first.success, second.success)
    np.testing.assert_array_equal(first.lengths, second.lengths)
    assert first.faults == second.faults and first.fault_begins is not None
    by_fault = first.by_fault()
    assert sum(each["episodes"] for each in by_fault.values()) == 60
    assert by_fault["no fault"]["success_rate"] == 1.0 and by_fault["no fault"]["began"] == 0
    assert by_fault["blackout"]["success_rate"] < 0.5  # it cannot see the cube move
    restored = EvaluationResult.from_json(first.to_json())
    assert restored.faults == first.faults and restored.by_fault() == by_fault
    table = fault_table([("policy", first.to_json())])
    assert table is not None and table[0] == ["fault", "began", "policy"] and len(table[1]) == len(ALL) + 1


def test_what_a_world_cannot_do_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'arm_reach' cannot have the fault slip: .* Leave slip out"):
        make_world("arm_reach", 1, faults=["slip"])
    with pytest.raises(ConfigError, match="'push_t' cannot have the fault moved_goal"):
        make_world("push_t", 1, faults=["moved_goal"])
    for options, message in (
        ({"faults": ["slipp"]}, "no fault 'slipp'. Did you mean 'slip'"),
        ({"faults": {"latency": {"step": 2}}}, "no option 'step'"),
        ({"faults": {"latency": {"steps": 0}}}, "latency.steps=0 must be at least 1"),
        ({"faults": {"latency": {"steps": "x"}}}, "latency.steps is 'x', which is not an integer"),
        ({"faults": "slip"}, "must be a list of faults"),
        ({"faults": ["slip"], "fault_rate": 1.5}, "from 0 to 1"),
        ({"fault_rate": 0.5}, "needs faults"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_world("push_cube", 1, **options)


def test_snapshots_belong_to_worlds_with_the_same_faults():
    world, other = make_world("push_cube", 2, faults=["latency"]), make_world("push_cube", 2)
    for each in (world, other):
        each.reset(seeds=[0, 1])
    with pytest.raises(SpecError, match="not from a world with faults="):
        world.restore(other.snapshot())


@pytest.mark.long
def test_gymnasium_environments_and_latency_go_along():
    name = "gymnasium:InvertedPendulum-v5"
    options = {"success": "return >= 10", "horizon": 30, "faults": ["latency", "sensor_offset", "frozen_joint"]}
    check_world(lambda rows: make_world(name, rows, latency_steps=2, **options), renders=False, snapshots=True)
    with pytest.raises(ConfigError, match="cannot have the fault moved_goal"):
        make_world(name, 1, **{**options, "faults": ["moved_goal"]})


def test_imagined_worlds_have_faults_too():
    def imagined(rows):
        model = OracleModel(make_world("push_cube", rows))
        world = ImaginedWorld(model, lambda seeds: model_starts(seeds, rows), rows)
        return with_faults_of({"faults": ["latency", "blackout"], "fault_rate": 1.0}, world)

    def model_starts(seeds, rows):
        world = make_world("push_cube", rows)
        observation = world.reset(seeds=np.resize(seeds, rows))
        return Context({key: observation[key][: len(seeds)] for key in (STATE, ENVIRONMENT_STATE)})

    check_world(imagined, renders=False)
    with pytest.raises(ConfigError, match="'imagined push_cube' cannot have the fault slip"):
        with_faults_of(
            {"faults": ["slip"]}, ImaginedWorld(OracleModel(make_world("push_cube", 1)), lambda seeds: Context({}), 1)
        )


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stall", f"{OUTSIDE}.faults:Stall"])
def test_a_fault_of_another_package(fault):
    pytest.importorskip(OUTSIDE, reason="install it with: pip install -e tests/outside")
    check_world(lambda rows: make_world("push_cube", rows, faults=[fault], fault_rate=1.0), renders=False)
    world, plain = make_world("push_cube", 3, faults={fault: {"rest": 0.5}}, fault_rate=1.0), make_world("push_cube", 3)
    plan, actions = fault_plan(world, np.arange(3)), np.random.default_rng(0).uniform(-1, 1, (3, 40, 2))
    assert plan is not None and set(plan.names) == {fault}
    halved = np.where((np.arange(40) >= plan.begins[:, None])[..., None], 0.5 * actions, actions)
    for each in (world, plain):
        each.reset(seeds=np.arange(3))
    np.testing.assert_array_equal(world.step(actions).trace[STATE], plain.step(halved).trace[STATE])
