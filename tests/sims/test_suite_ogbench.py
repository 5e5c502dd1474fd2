"""OGBench through the same protocol, its own oracles included; what to do next is tested without the package."""

import sys

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.record import record
from robopolicy.testing.controller import check_controller
from robopolicy.testing.world import check_world
from sims.registry import make_expert, make_world
from sims.suites.controllers.ogbench_oracles import OPEN, Things, lights_out, next_target
from sims.suites.ogbench_environment import split_name
from sims.suites.ogbench_suite import instruction

TABLE, BOARDS = 0.02, [(3, 3), (4, 4), (4, 5), (4, 6)]


def things(*blocks, buttons=(), drawer=0.0, window=0.0):
    places = np.array(blocks, dtype=float).reshape(-1, 3)
    return Things(places, np.zeros(len(places)), np.array(buttons, dtype=int), drawer, window)


def brought(seen, target):
    """What is seen once a target is reached; whoever moves something locked, or a closed drawer's cube, fails."""
    blocks, buttons, slides = seen.blocks.copy(), seen.buttons.copy(), {"drawer": seen.drawer, "window": seen.window}
    if target.task == "cube":
        height = target.place[2]
        assert height <= 0.05 or len(buttons) == 0 or seen.drawer <= -0.12
        blocks[target.index] = target.place
    elif target.task == "button":
        assert buttons[target.index] != target.value
        buttons[target.index] = target.value
    else:
        assert buttons[0 if target.task == "drawer" else 1] == 1
        if target.task == "drawer" and blocks[0, 2] > 0.05:
            blocks[0, 1] -= target.value - seen.drawer
        slides[target.task] = target.value
    return Things(blocks, seen.yaws, buttons, slides["drawer"], slides["window"])


def order(scene, seen, goal):
    """Bring everything to its goal and return the targets."""
    targets = []
    while (target := next_target(scene, seen, goal)) is not None:
        targets.append(target)
        seen = brought(seen, target)
        assert len(targets) < 20
    return targets, seen


def test_names_hold_a_task_and_a_style():
    assert split_name("scene-play-singletask-task4-v0") == ("scene-singletask-task4-v0", "play")
    assert split_name("cube-double-noisy-v0") == ("cube-double-v0", "noisy")
    assert split_name("cube-double-v0") == ("cube-double-v0", "")
    assert instruction("scene-singletask-v0") == instruction("scene-singletask-task2-v0") != instruction("scene-v0")


def test_a_cube_goes_into_the_drawer_by_unlocking_opening_closing_and_locking():
    stored = (0.33, -0.356, 0.066)
    start = things((0.35, 0.15, TABLE), buttons=(0, 0))
    targets, things_after = order("scene", start, things(stored, buttons=(0, 0), window=0.2))
    assert [(each.task, each.index, each.value) for each in targets] == [
        ("button", 0, 1.0),
        ("drawer", 0, OPEN),
        ("cube", 0, 0.0),
        ("drawer", 0, 0.0),
        ("button", 1, 1.0),
        ("window", 0, 0.2),
        ("button", 0, 0.0),
        ("button", 1, 0.0),
    ]
    assert np.linalg.norm(things_after.blocks[0] - stored) < 0.04
    assert -0.25 < targets[2].place[1] < -0.2  # between the front and the back of the open drawer


def test_a_cube_beside_the_drawer_moves_before_it_opens_and_after_it_has_closed():
    away, start = (0.4, 0.15, TABLE), things((0.4, -0.05, TABLE), buttons=(1, 1))
    opening = order("scene", start, things(away, buttons=(1, 1), drawer=OPEN))[0]
    assert [each.task for each in opening] == ["cube", "drawer"]
    start = things((0.4, -0.05, TABLE), buttons=(1, 1), drawer=OPEN)
    assert [each.task for each in order("scene", start, things(away, buttons=(1, 1)))[0]] == ["drawer", "cube"]


def test_cubes_are_stacked_from_below_and_unstacked_from_above():
    tower = [(0.4, 0.2, height) for height in (0.02, 0.06, 0.10)]
    ground = [(0.35, -0.2, TABLE), (0.35, 0.0, TABLE), (0.5, -0.1, TABLE)]
    up = order("cube", things(*ground), things(*tower))[0]
    down = order("cube", things(*tower), things(*ground))[0]
    assert [each.index for each in up] == [0, 1, 2] and [each.index for each in down] == [2, 1, 0]


def test_two_cubes_change_places_by_way_of_a_free_spot():
    here, there = (0.425, -0.1, TABLE), (0.425, 0.1, TABLE)
    targets, things_after = order("cube", things(here, there), things(there, here))
    assert len(targets) == 3 and np.allclose(things_after.blocks, [there, here])
    assert min(np.linalg.norm(np.array(targets[0].place) - spot) for spot in (here, there)) > 0.08


@pytest.mark.parametrize("size", BOARDS)
def test_lights_out_presses_toggle_exactly_what_is_wrong(size):
    rows, columns = size
    draws = np.random.default_rng(0)
    for _ in range(20):
        presses = draws.integers(0, 2, (rows, columns)).astype(bool)
        assert np.array_equal(toggled(presses), toggled(lights_out(toggled(presses).ravel(), columns).reshape(size)))
    board, presses = toggled(np.eye(rows, columns, dtype=bool)).ravel().astype(int), 0
    while (target := next_target("puzzle", things(buttons=board), things(buttons=0 * board), columns)) is not None:
        assert target.value == 1 - board[target.index] and (presses := presses + 1) <= rows * columns
        pressed = np.arange(rows * columns).reshape(size) == target.index
        board = board ^ toggled(pressed).ravel()
    assert presses and not board.any()


def toggled(presses):
    """What presses [rows, columns] toggle, worked out cell by cell."""
    padded = np.pad(presses.astype(int), 1)
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return (presses + around) % 2 == 1


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogbench", None)
    monkeypatch.delitem(sys.modules, "ogbench.manipspace", raising=False)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'robopolicy\[ogbench\]'"):
        make_world("ogbench/cube-single-v0", 1)
    with pytest.raises(ConfigError, match=r"pip install 'robopolicy\[ogbench\]'"):
        make_expert("ogbench/cube-single-v0", make_world("push_cube", 1).spec)


@pytest.fixture
def installed():
    return pytest.importorskip("ogbench")


@pytest.mark.parametrize("name", ["cube-single-v0", "scene-play-singletask-task4-v0"])
def test_tasks_keep_every_promise(installed, name):
    make = {"history": 2, "horizon": 6, "cameras": ("front_pixels",), "image_size": 32}
    check_world(lambda batch: make_world(f"ogbench/{name}", batch, **make), batch_size=3, chunk=2)


def test_robot_objects_and_goal_have_names(installed):
    spec = make_world("ogbench/cube-single-v0", 1).spec
    state, objects = (spec.observation[key].names for key in (STATE, ENVIRONMENT_STATE))
    assert len(state) == 19 and state[12] == "effector_pos[0]" and state[-1] == "gripper_contact[0]"
    assert len(objects) == 9 + 28 and objects[0] == "block_0_pos[0]" and objects[9] == "goal_joint_pos[0]"
    assert (spec.fps, spec.horizon, spec.action.shape) == (20, 200, (5,)) and spec.reports_success
    assert spec.action.names == ("dx", "dy", "dz", "dyaw", "gripper")
    short = make_world("ogbench/scene-v0", 1, env_options={"use_oracle_rep": True}).spec
    names = short.observation[ENVIRONMENT_STATE].names
    assert short.horizon == 750 and [name for name in names if name.startswith("goal_")] == [
        *(f"goal_block_0_pos[{axis}]" for axis in range(3)),
        "goal_button_states[0]",
        "goal_button_states[1]",
        "goal_drawer_pos[0]",
        "goal_window_pos[0]",
    ]
    single = make_world("ogbench/scene-singletask-task1-v0", 1).spec
    assert not any(name.startswith("goal") for name in single.observation[ENVIRONMENT_STATE].names)
    assert single.instructions == ("open the drawer and the window",)


def goals(world, **reset):
    """The goal's cube as observed, [B, 3] in m."""
    names = world.spec.observation[ENVIRONMENT_STATE].names
    columns = [names.index(f"goal_block_0_pos[{axis}]") for axis in range(3)]
    return world.reset(**reset)[ENVIRONMENT_STATE][:, -1, columns] / 10 + [0.425, 0, 0]


def test_the_seed_draws_the_goal_unless_it_is_given(installed):
    world = make_world("ogbench/cube-single-v0", 8)
    drawn = goals(world, seeds=np.arange(8))
    assert len(np.unique(drawn[:, :2].round(2), axis=0)) > 2 and np.allclose(drawn[:, 2], TABLE, atol=1e-3)
    assert np.allclose(goals(world, seeds=np.arange(8), options={"task_id": 5})[:, :2], [0.5, -0.2], atol=5e-3)
    with pytest.raises(ConfigError, match="task_id, 1 to 5"):
        world.reset(seeds=np.arange(8), options={"task_id": 6})


def test_single_tasks_pay_minus_what_is_unmet_and_begin_anywhere_in_play(installed):
    world = make_world("ogbench/scene-singletask-task1-v0", 2, horizon=3)
    world.reset(seeds=[0, 1])
    assert (world.step(np.zeros((2, 3, 5))).rewards["reward"] == -2.0).all()  # drawer and window
    near = [make_world(f"ogbench/cube-single-{style}singletask-task1-v0", 6, horizon=3) for style in ("", "play-")]
    spread = [np.ptp(each.reset(seeds=np.arange(6))[ENVIRONMENT_STATE][:, -1, :2], axis=0) for each in near]
    assert (spread[0] < 0.25).all() and (spread[1] > 0.5).all()  # tenths of a metre
    play = near[1].spec
    assert play.observation == near[0].spec.observation and play.action == near[0].spec.action
    assert not play.terminate_on_success and make_world("ogbench/scene-play-v0", 1).spec.horizon == 1000


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("cube-singel-v0", {}, "Did you mean 'cube-single-v0'"),
        ("visual-cube-single-v0", {}, "without 'visual-'"),
        ("cube-single-v0", {"env_options": {"mode": "data_collection"}}, "'mode' of OGBench cannot be set here"),
        ("cube-single-v0", {"env_options": {"permute_block": True}}, "could not be created.*permute_block"),
        ("cube-single-v0", {"worker": 1}, "Did you mean 'workers'"),
        ("cube-single-v0", {"cameras": ["fron"]}, "Did you mean 'front'"),
    ],
)
def test_what_is_unknown_is_told(installed, name, options, text):
    with pytest.raises(ConfigError, match=text):
        make_world(f"ogbench/{name}", 1, **options)


def test_oracles_are_told_what_ogbench_would_tell_them(installed):
    """From an observation alone the twin works out the places of hand, handles and buttons."""
    world = make_world("ogbench/scene-v0", 1)
    inner = world.pool._local._rows[0].environment.unwrapped
    oracles = make_expert("ogbench/scene-v0", world.spec)
    observation = world.reset(seeds=[3])
    for _ in range(40):
        observation = world.step(oracles.act(observation)[:, None]).observation
    flat = np.concatenate([observation[STATE][0, -1], observation[ENVIRONMENT_STATE][0, -1]]).astype(float)
    oracles._twin.lay(flat)
    mine, its = oracles._twin.known(flat, inner.data.time), inner.compute_ob_info()
    read = [key for key in its if key.startswith(("proprio/", "privileged/")) and not key.endswith("_vel")]
    assert len(read) > 15 and "privileged/drawer_handle_pos" in read
    for key in read:
        assert np.allclose(mine[key], its[key], atol=1e-5), key


def played(name, rows, **options):
    """Play episodes of the expert to their end and return the last step."""
    world = make_world(f"ogbench/{name}", rows, **options)
    observation, expert = world.reset(seeds=np.arange(rows)), make_expert(f"ogbench/{name}", world.spec)
    while True:
        step = world.step(expert.act(observation)[:, None])
        observation = step.observation
        if step.ended.all():
            world.close()
            return step


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("cube-single-v0", 4, {}),
        ("cube-single-v0", 2, {"env_options": {"use_oracle_rep": True}}),
        ("cube-double-singletask-task4-v0", 1, {}),
        ("scene-v0", 2, {}),
        ("scene-singletask-task4-v0", 1, {}),
        ("puzzle-3x3-v0", 1, {}),
    ],
)
def test_the_oracles_reach_the_goal(installed, name, rows, options):
    assert played(name, rows, **options).success.all()


def test_a_controller_answers_for_every_row(installed):
    world = make_world("ogbench/scene-noisy-v0", 2)
    check_controller(lambda: make_expert("ogbench/scene-noisy-v0", world.spec), world)
    with pytest.raises(ConfigError, match=r"shows joint_pos\[0\]"):
        make_expert("ogbench/cube-single-v0", world.spec)


def test_play_is_the_same_in_any_row_and_its_success_is_that_of_the_worlds_goal(installed):
    episodes = []
    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    for rows in (3, 1):
        world = make_world("ogbench/cube-single-play-singletask-task1-v0", rows, horizon=60)
        episodes.append(record(world, make_expert(world.spec.name, world.spec), np.arange(3)))
        world.close()
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    one, other = episodes
    assert one.actions.equal(other.actions) and one.lengths.tolist() == [60, 60, 60]
    cubes = one.observation[ENVIRONMENT_STATE][:, :3].numpy().reshape(3, 61, 3) / 10 + [0.425, 0, 0]
    near = np.linalg.norm(cubes - [0.425, -0.1, 0.02], axis=-1) <= 0.04
    assert one.success.tolist() == near[:, :-1].any(axis=1).tolist()  # as OGBench, of the state before an action
    assert np.array_equal(one.rewards["reward"].reshape(3, 60).numpy(), near[:, :-1] - 1.0)
    assert np.linalg.norm(np.diff(cubes, axis=1), axis=-1).sum(axis=1).max() > 0.1  # somebody carried a cube


def test_targets_of_play_change_and_noise_is_the_episodes(installed):
    world = make_world("ogbench/scene-noisy-v0", 2)
    oracles, observation, targets = make_expert(world.spec.name, world.spec), world.reset(seeds=[0, 1]), set()
    for _ in range(150):
        observation = world.step(oracles.act(observation)[:, None]).observation
        targets |= {row.target for row in oracles._rows}
    levels = [row.level for row in oracles._rows]
    assert len(targets) >= 4 and len({target.task for target in targets}) >= 2 and 0 < min(levels) < max(levels) < 0.1
    oracles.reset([0])
    assert oracles._rows[0] is None and oracles._rows[1] is not None
    world.close()
