"""The original Push-T against gym-pusht itself: dynamics, starts, coverage, images, score; its expert."""

import json

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from robopolicy.core.errors import CameraError, ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.testing.world import check_world
from sims.registry import make_expert, make_world
from sims.suites.controllers.pusht import (
    CENTRE,
    RADIUS,
    PushTOriginalExpert,
    best_length,
    compose,
    contacts,
    rotated,
    twists_of,
)
from sims.suites.pusht_board import GOAL, Board, coverage, load_pusht, official_start
from sims.suites.pusht_world import OBSERVATIONS, PushTWorld


def environment(**options):
    return load_pusht().PushTEnv(**options)


def pushes(generator, block):
    """A target near the block, so that many steps touch it."""
    return np.clip(np.asarray(block) + generator.normal(size=2) * 40, 0, 512)


def test_poses_are_gym_pushts_bit_for_bit_and_coverage_is_shapelys():
    generator, theirs, board = np.random.default_rng(0), environment(), Board()
    touched = 0
    for seed in range(3):
        observation, _ = theirs.reset(seed=seed)
        pose = board.start(official_start(seed, "gym_pusht"))
        assert np.array_equal(pose[:4], observation[:4])
        for _ in range(60):
            action = pushes(generator, theirs.block.position)
            observation, _, _, _, info = theirs.step(action)
            pose = board.advance(action[None])[0]
            touched += theirs.n_contact_points > 0
            assert np.array_equal([*pose[:4], pose[4] % (2 * np.pi)], observation)
            assert coverage(pose[2:]) == pytest.approx(info["coverage"], abs=1e-9)
    assert touched > 60


def test_coverage_equals_that_of_polygons_near_the_goal_and_where_edges_coincide():
    generator, theirs = np.random.default_rng(1), environment()
    theirs.reset(seed=0)
    sizes = generator.choice([30, 1, 1e-3, 1e-6, 1e-9, 0], size=(400, 1))
    poses = np.array(GOAL) + generator.normal(size=(400, 3)) * np.array([1, 1, 0.02]) * sizes
    poses[:40] = np.array(GOAL) + np.concatenate(
        [15 * generator.integers(-2, 3, (40, 2)), np.pi / 2 * generator.integers(0, 4, (40, 1))], axis=1
    )
    shares = []
    for pose in poses:
        theirs.block.angle, theirs.block.position = pose[2], tuple(pose[:2])
        shares.append(theirs._get_coverage())
    assert coverage(poses) == pytest.approx(np.array(shares), abs=1e-9)
    assert coverage(np.array(GOAL)) == pytest.approx(1.0)
    along = np.array([*(np.array(GOAL[:2]) + 20 * np.array([np.cos(GOAL[2]), np.sin(GOAL[2])])), GOAL[2]])
    assert coverage(along) == pytest.approx((100 * 30 + 10 * 90) / 6300)  # both rectangles moved by 20 px along the bar


def test_starts_of_diffusion_policy_are_its_seeds():
    assert official_start(100000, "diffusion_policy") == pytest.approx([235, 124, 335, 128, -0.9049274284249247])
    with pytest.raises(ConfigError, match=r"world.options.starts=elsewhere must be one of gym_pusht"):
        make_world("pusht", 1, starts="elsewhere")


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_world_keeps_every_promise(observation):
    check_world(lambda batch, **options: PushTWorld(batch, observation=observation, horizon=30, **options))


def test_the_world_with_images_keeps_every_promise():
    check_world(lambda batch, **options: PushTWorld(batch, cameras=("top",), horizon=6, **options))
    with pytest.raises(CameraError, match="no camera 'tip'"):
        make_world("pusht", 1, cameras=("tip",))


def test_observations_and_images_are_gym_pushts():
    keypoints = environment(obs_type="environment_state_agent_pos")
    world = make_world("pusht", 1, observation="corners", cameras=("top",), image_size=96)
    generator = np.random.default_rng(2)
    for seed in range(4):
        theirs, ours = keypoints.reset(seed=seed)[0], world.reset(seeds=[seed])
        for _ in range(5):
            action = pushes(generator, keypoints.block.position)
            theirs, ours = keypoints.step(action)[0], world.step(action[None, None]).observation
        assert ours[STATE][0, -1] == pytest.approx(theirs["agent_pos"], rel=1e-6)
        assert ours[ENVIRONMENT_STATE][0, -1] == pytest.approx(theirs["environment_state"], rel=1e-6, abs=1e-4)
        keypoints._last_action = None
        differs = ours[IMAGE_PREFIX + "top"][0, -1] != keypoints._render()
        assert differs.mean() < 1e-3  # edges of a pixel, where the last digit of a position decides


def test_an_episode_restored_in_the_middle_of_a_push_continues_bit_for_bit():
    world, generator = PushTWorld(2, observation="state"), np.random.default_rng(3)
    observation = world.reset(seeds=[0, 1])
    for _ in range(6):
        observation = world.step(observation[ENVIRONMENT_STATE][:, -1:, :2].astype(float)).observation
    snapshot, actions = world.snapshot(), generator.uniform(100, 400, (2, 40, 2))
    first = world.step(actions)
    world.reset(seeds=[7, 8])
    world.restore(snapshot.take([1, 0]))
    again = world.step(actions[::-1])
    for key, value in first.trace.items():
        assert np.array_equal(again.trace[key][::-1], value)
    assert np.array_equal(again.reward[::-1], first.reward)


def test_offsets_are_targets_relative_to_the_pusher():
    targets, offsets = PushTWorld(1), PushTWorld(1, actions="offset")
    place = targets.reset(seeds=[3])[STATE][:, -1:].astype(float)
    offsets.reset(seeds=[3])
    for target in np.random.default_rng(4).uniform(0, 512, (30, 2)):
        action = np.clip(target - place, -64, 64)
        after = targets.step(place + action).observation
        offsets.step(action)
        both = [world.snapshot().arrays["pose"] for world in (offsets, targets)]
        assert both[0] == pytest.approx(both[1], abs=1e-3)  # observed positions are rounded to 32 bits
        place = after[STATE][:, -1:].astype(float)
    expert = make_expert("pusht", offsets.spec)
    assert expert is not None and evaluate_policy(offsets, expert, [5, 6]).successes == 2


class Still:
    """A controller that keeps the pusher at one place."""

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return np.full((len(observation[STATE]), 2), 30.0)


def test_the_score_is_the_largest_coverage_over_95_percent():
    world = PushTWorld(1, horizon=40, terminate_on_success=False)
    observation = world.reset(options={"state": [[330.0, 230.0, 226.0, 200.0, 0.7]]})
    levels = []
    while not (step := world.step(np.array([[[150.0, 230.0]]]))).ended[0]:
        assert step.benchmark_score is not None
        levels.append(coverage(world.snapshot().arrays["pose"][0, 2:]))
        assert step.benchmark_score[0] == pytest.approx(min(max(levels) / 0.95, 1))
    assert levels[-1] < max(levels) - 0.05  # pushed onto the outline and beyond
    assert STATE in observation
    result = evaluate_policy(world, Still(), [1, 2, 3])
    again = EvaluationResult.from_json(json.loads(json.dumps(result.to_json())))
    assert result.benchmark_score is not None and again.benchmark_score is not None
    assert np.array_equal(again.benchmark_score, result.benchmark_score)
    assert again.summary()["benchmark_score"]["mean"] == pytest.approx(result.benchmark_score.mean())


def centre_pose(pose):
    """The pose [3] of the centre of mass, from a board's [5]."""
    return np.array([*(pose[2:4] + rotated(CENTRE, pose[4])), pose[4]])


@pytest.mark.parametrize("contact", [3, 11, 16, 26, 40])
def test_pushes_are_the_arcs_that_the_expert_plans_with(contact):
    board, (points, normals) = Board(), contacts()
    twist, place = twists_of(points, normals)[contact], points[contact] + RADIUS * normals[contact] - CENTRE
    start = centre_pose(board.start(np.array([30.0, 30.0, 256.0, 200.0, 0.3])))
    board.start(np.array([*(start[:2] + rotated(place + normals[contact], start[2])), 256.0, 200.0, 0.3]))
    arc = [compose(start, twist, np.array(length)) for length in [*np.linspace(1, 25, 60), *np.full(10, 25.0)]]
    reached = board.advance(np.array([pose[:2] + rotated(place, pose[2]) for pose in arc]))[-1]
    assert centre_pose(reached) == pytest.approx(arc[-1], abs=0.5)
    assert best_length(start, twist, arc[-1]) == pytest.approx(25.0, abs=0.1)


def test_an_unknown_option_is_answered_with_the_closest_one():
    with pytest.raises(ConfigError, match=r"World 'pusht' has no option 'start'\. Did you mean 'starts'"):
        make_world("pusht", 1, start="diffusion_policy")


def test_the_expert_needs_to_see_the_block():
    world = make_world("pusht", 1, observation="agent")
    with pytest.raises(ConfigError, match=r"world.options.observation=keypoints, corners or state"):
        make_expert("pusht", world.spec)


@pytest.mark.long
@pytest.mark.parametrize("observation", ["keypoints", "corners", "state"])
def test_the_expert_succeeds_from_official_starts(observation):
    world = make_world("pusht", 12, observation=observation, starts="diffusion_policy")
    expert = make_expert("pusht", world.spec)
    assert expert is not None
    result = evaluate_policy(world, expert, np.arange(100000, 100012))
    assert result.successes >= 11
    assert result.lengths.mean() < 110


def test_a_world_given_by_import_path_brings_its_expert():
    path = "sims.suites.pusht_world:PushTWorld"
    world = make_world(path, 1, observation="corners")
    assert isinstance(make_expert(path, world.spec), PushTOriginalExpert)
