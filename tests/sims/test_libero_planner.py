"""The scripted expert of LIBERO: geometry by closed forms; whole episodes are skipped without the extra."""

import importlib.util

import numpy as np
import pytest

from robopolicy.core.world import begin_episodes
from sims.registry import make_expert, make_world
from sims.suites.controllers.libero_geometry import (
    CELL,
    OPEN,
    SPACING,
    TIP,
    HeightMap,
    about,
    box_surface,
    downward,
    downward_grasps,
    frame,
    hand_hits,
    leaning_grasps,
    lower_side,
    rotation_vector,
    turned,
    way_around,
)
from sims.suites.controllers.libero_planner import Region, in_region

installed = importlib.util.find_spec("libero") is not None
needs_libero = pytest.mark.skipif(not installed, reason="needs the extra libero, in an environment of its own")
NOTHING = np.zeros((0, 3))


def box(half, centre=(0.0, 0.0, 0.0)):
    """Return the surface points of a box."""
    return box_surface(np.array(half)) + np.array(centre)


def test_a_boxs_surface_leaves_no_gap_and_no_inside():
    half = np.array([0.03, 0.02, 0.011])
    points = box_surface(half)
    assert np.allclose(np.abs(points).max(0), half) and (np.isclose(np.abs(points), half).any(1)).all()
    for face in points[np.isclose(points[:, 2], half[2])], points[np.isclose(points[:, 0], -half[0])]:
        distances = np.linalg.norm(face[:, None] - face[None], axis=-1) + np.eye(len(face))
        assert distances.min(1).max() <= SPACING + 1e-12


def test_rotations_are_right_handed_and_small_turns_add():
    for rotation in (downward(0.3), frame(np.array([1.0, 0.0, -1.0]), np.array([0.0, 1.0, 0.0]))):
        assert np.allclose(rotation.T @ rotation, np.eye(3)) and np.isclose(np.linalg.det(rotation), 1.0)
    assert np.allclose(downward(0.3)[:, 0], [np.cos(0.3), np.sin(0.3), 0.0])
    axis = np.array([0.0, 0.6, 0.8])
    assert np.allclose(rotation_vector(about(axis, 0.7)), 0.7 * axis)
    assert np.allclose(turned(np.array([[1.0, 0.0]]), np.pi / 2), [[0.0, 1.0]])
    assert np.allclose(about(np.array([0.0, 0.0, 1.0]), 0.4)[:2, :2] @ [0.2, 0.5], turned(np.array([0.2, 0.5]), 0.4))


@pytest.mark.parametrize("yaw", [0.0, 0.7])
def test_a_height_map_of_a_box_is_its_top_without_holes(yaw):
    points = box([0.05, 0.05, 0.02], [0.3, -0.1, 0.4])
    centre = turned(np.array([0.3, -0.1]), -yaw)
    scene = HeightMap(points, centre - 0.1, centre + 0.1, yaw)
    inside = np.array([[0.3, -0.1], [0.34, -0.06], [0.26, -0.14], [0.33, -0.12]])
    assert np.allclose(scene.at(inside), 0.42) and (scene.at(np.array([[0.38, -0.1]])) < 0).all()
    # The fingers of a hand that is centred over the box would stand on it, as it is wider than they open.
    height = scene.at(np.array([[0.3, -0.1]]), scene.site_floor())[0]
    assert 0.42 + TIP < height < 0.42 + TIP + 0.004


def test_the_lower_side_keeps_one_point_per_cell():
    points = box([0.02, 0.02, 0.03])
    low = lower_side(points)
    cells = np.floor(low[:, :2] / CELL).astype(int)
    assert len(np.unique(cells, axis=0)) == len(cells)
    assert np.isclose(low[:, 2], -0.03).mean() > 0.5 and (low[:, 2] <= 0.03).all()


def test_an_open_hand_touches_what_is_under_a_finger_and_not_what_is_between():
    position, rotation = np.array([0.1, 0.2, 0.3]), downward(np.pi / 2)
    places = {"between": [0, 0, 0], "finger": [0, 0.05, 0], "beyond": [0, 0.09, 0], "palm": [0, 0.05, 0.05]}
    points = position + np.array(list(places.values()))
    assert hand_hits(points, position, rotation).tolist() == [False, True, False, True]
    assert hand_hits(points, position, rotation, opening=0.0).tolist() == [True, False, False, True]


def test_a_box_is_held_across_its_narrow_side_and_a_wide_one_not_at_all():
    narrow = box([0.05, 0.02, 0.03], [0.2, 0.1, 0.03])
    best = downward_grasps(narrow, NOTHING, 0.0)[0]
    assert np.allclose(best.position[:2], [0.2, 0.1], atol=0.008)
    assert abs(best.rotation[1, 0]) > 0.9 and np.allclose(best.rotation[:, 2], [0, 0, -1])
    assert TIP <= best.position[2] < 0.06 + TIP
    wide = downward_grasps(box([OPEN + 0.01, OPEN + 0.01, 0.03], [0.0, 0.0, 0.03]), NOTHING, 0.0)
    assert all(grasp.score < 0 for grasp in wide)  # nothing but its corners


def test_a_hand_leans_where_a_roof_leaves_no_room_from_above():
    thing = box([0.015, 0.015, 0.03], [0.0, 0.0, 0.03])
    roof = box([0.10, 0.20, 0.005], [0.10, 0.0, 0.16])
    upright = downward_grasps(thing, roof, 0.0)
    assert not upright or upright[0].score < 0
    leaning = leaning_grasps(thing, roof, 0.0)
    assert leaning and leaning[0].rotation[2, 2] > -0.95
    # It comes from the open side, so it points towards the roof's.
    assert leaning[0].rotation[0, 2] > 0.3 and not hand_hits(roof, leaning[0].position, leaning[0].rotation).any()


def test_a_disc_goes_straight_or_around_or_nowhere():
    start, ends = np.array([0.0, 0.0]), np.array([[0.3, 0.0]])
    free = way_around(start, ends, np.zeros((0, 2)), 0.05)
    assert free is not None
    assert np.allclose(free[0], start) and np.allclose(free[-1], ends[0]) and np.abs(free[:, 1]).max() < 0.02
    wall = np.stack([np.full(21, 0.15), np.linspace(-0.05, 0.05, 21)], 1)
    around = way_around(start, ends, wall, 0.05)
    assert around is not None
    distances = np.linalg.norm(around[:, None] - wall[None], axis=-1)
    assert distances.min() > 0.045 and np.abs(around[:, 1]).max() > 0.08
    angles = np.linspace(0, 2 * np.pi, 200)
    assert way_around(start, ends, 0.1 * np.stack([np.cos(angles), np.sin(angles)], 1), 0.05) is None


def test_a_region_holds_what_is_inside_or_above_it_with_a_margin():
    region, centre, level = Region(0, np.array([0.1, 0.05, 0.02]), None, ()), np.array([0.0, 0.0, 1.0]), np.eye(3)
    inside = np.array([[0.08, 0.04, 0.99], [0.095, 0.0, 0.99]])
    assert in_region(region, centre, level, inside, inside=True).tolist() == [True, False]
    quarter = about(np.array([0.0, 0.0, 1.0]), np.pi / 2)
    assert in_region(region, centre, quarter, np.array([[0.04, 0.08, 0.99]]), inside=True).all()
    above = np.array([[0.05, 0.0, 1.05], [0.05, 0.0, 1.13], [0.05, 0.0, 1.0]])
    assert in_region(region, centre, level, above, inside=False).tolist() == [True, False, False]


def played(name, episodes, steps=300):
    """Return which of the first episodes of a task the expert solves."""
    world = make_world(name, episodes)
    expert = make_expert(name, world.spec)
    seeds = np.arange(episodes)
    observation = world.reset(seeds=seeds)
    assert expert is not None
    expert.reset()
    begin_episodes(expert, seeds)
    won = np.zeros(episodes, bool)
    for _ in range(steps):
        step = world.step(expert.act(observation)[:, None])
        observation, won = step.observation, won | np.asarray(step.success).reshape(episodes)
        if won.all():
            break
    world.close()
    return won


@needs_libero
@pytest.mark.slow
@pytest.mark.parametrize("name", ["libero_object:4", "libero_spatial:0", "libero_goal:0", "libero_goal:5"])
def test_the_expert_solves_nine_of_ten(name):
    assert played(f"libero/{name}", 10).sum() >= 9


@needs_libero
@pytest.mark.long
def test_a_suites_rows_play_their_own_tasks():
    assert played("libero/libero_goal", 2, steps=110).all()
