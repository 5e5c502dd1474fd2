"""Play: an expert that is shown other goals, for how long, at what speed, in which worlds."""

from dataclasses import replace

import numpy as np
import pytest

from robopolicy.building.worlds import build_noisy_expert
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.verbs.worldmodel import play_fraction
from sims.experts import NoisyController
from sims.play import (
    FAR,
    LONG,
    NEAR,
    SHORT,
    SLOW,
    Fault,
    FaultyController,
    PlayingController,
    behaviour_name,
    can_play,
    fault_of,
    goal_elements,
    slowed_elements,
)
from sims.registry import load_task, make_expert, make_world
from sims.tasks.push_cube import CUBE_FIELD, TO_GOAL, PushCubeExpert


class Watched:
    """Acts as fast as it can, and remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def reset(self, rows=None):
        """Nothing."""

    def act(self, observation):
        """Return full speed."""
        self.shown.append(observation[ENVIRONMENT_STATE][:, -1].copy())
        return np.ones((len(self.shown[-1]), 2))


@pytest.fixture(scope="module")
def world():
    made = make_world("push_cube", 4, seed=0)
    yield made
    made.close()


def played(world, steps=200, rows=(0, 1, 2, 3), seeds=(5, 6, 7, 8)):
    """Offsets [T, R, 2] of the goal shown, and speeds [T, R], in one observation."""
    observation = world.reset(seeds=range(4))
    observation = {key: observation[key][list(rows)] for key in (STATE, ENVIRONMENT_STATE)}
    inner = Watched()
    controller = PlayingController(inner, 0, world.spec)
    controller.begin(np.array(seeds)[list(rows)])
    actions = np.stack([controller.act(observation) for _ in range(steps)])
    true = observation[ENVIRONMENT_STATE][:, -1]
    shown = np.stack(inner.shown)
    moved = {name: shown[..., place] - true[..., place] for place, name in enumerate(CUBE_FIELD.names)}
    assert all(not value.any() for name, value in moved.items() if "goal" not in name)
    assert np.allclose(moved["goal_x"], moved["cube_to_goal_x"], atol=1e-6)
    assert np.array_equal(actions[..., 0], actions[..., 1])
    return np.stack([moved["goal_x"], moved["goal_y"]], -1), actions[..., 0]


def test_goals_near_and_far_stay_for_a_while(world):
    offset, speed = played(world)
    distance = np.linalg.norm(offset, axis=-1)
    assert NEAR - 1e-6 < distance.min() < 2 * NEAR and 0.8 * FAR < distance.max() < FAR + 1e-6
    assert SLOW <= speed.min() < 0.4 and 0.8 < speed.max() <= 1
    for row in range(4):
        changes = np.flatnonzero((offset[1:, row] != offset[:-1, row]).any(-1)) + 1
        lengths = np.diff([0, *changes])
        assert len(changes) > 3 and lengths.min() >= SHORT and lengths.max() <= LONG
        assert np.array_equal(changes, np.flatnonzero(speed[1:, row] != speed[:-1, row]) + 1)


def test_it_belongs_to_an_episode_and_not_to_its_row(world):
    offset, speed = played(world, 60)
    again, speed_again = played(world, 60, rows=(2, 0))
    assert np.allclose(offset[:, [2, 0]], again, atol=1e-6) and np.array_equal(speed[:, [2, 0]], speed_again)
    assert not np.allclose(offset[:, 0], offset[:, 1])


def test_an_expert_goes_where_it_is_shown_at_a_part_of_its_speed(world):
    observation = world.reset(seeds=range(4))
    controller = PlayingController(PushCubeExpert(), 3, world.spec)
    actions = controller.act(observation)
    shown = observation[ENVIRONMENT_STATE].copy()
    offset = controller._offset[:, None]
    shown[..., TO_GOAL] += offset
    expected = PushCubeExpert().act({**observation, ENVIRONMENT_STATE: shown})
    assert np.allclose(actions, controller._speed[:, None] * expected, atol=1e-6)
    assert not np.allclose(actions, PushCubeExpert().act(observation), atol=0.05)


def test_where_tasks_name_their_goals():
    named = {name for name in ("push_cube", "push_t", "pick_place", "reach_planar", "arm_reach", "stack", "tidy")
             if can_play(_spec(name))}  # fmt: skip
    assert {"push_cube", "push_t", "pick_place", "reach_planar", "arm_reach"} <= named and "tidy" not in named
    spec = _spec("pick_place")
    assert make_expert("pick_place", spec) is not None
    assert not slowed_elements(spec)[-1], "a gripper is not slowed down"
    names = spec.observation[ENVIRONMENT_STATE].names
    assert {names[index] for index in goal_elements(spec.observation[ENVIRONMENT_STATE])[0]} >= {"goal_x"}


def _spec(name):
    world = make_world(name, 1)
    world.close()
    return world.spec


def test_where_no_goal_is_named_play_is_refused(world):
    field = replace(world.spec.observation[ENVIRONMENT_STATE], names=())
    spec = replace(world.spec, observation={**world.spec.observation, ENVIRONMENT_STATE: field})
    assert not can_play(spec) and not can_play(replace(spec, observation={STATE: spec.observation[STATE]}))
    with pytest.raises(ConfigError, match=r"worldmodel\.play=0"):
        PlayingController(Watched(), 0, spec)


def test_it_is_a_noise_level_and_the_default_of_models_of_latents(world):
    config = compose(["recipe=push_cube"])
    assert isinstance(build_noisy_expert(config.world, world, "play", 0), PlayingController)
    assert isinstance(build_noisy_expert(config.world, world, "low", 0), NoisyController)
    latent = compose(["recipe=push_cube", "worldmodel.kind=latent_ensemble"])
    assert play_fraction(config, world.spec) == 0 and play_fraction(latent, world.spec) == 0.4
    assert play_fraction(compose(["recipe=push_cube", "worldmodel.play=0.2"]), world.spec) == 0.2
    unknown = replace(world.spec, observation={STATE: world.spec.observation[STATE]})
    assert play_fraction(latent, unknown) == 0
    assert load_task("push_cube").name == "push_cube"


def test_a_faulty_expert_aims_beside_the_goal_by_as_much_in_every_episode(world):
    observation = world.reset(seeds=range(4))
    inner = Watched()
    controller = FaultyController(inner, Fault(aim=0.04), 0, world.spec)
    for seeds in (np.arange(4), np.arange(4)[::-1]):
        controller.begin(seeds)
        for _ in range(2):
            controller.act(observation)
    true = observation[ENVIRONMENT_STATE][:, -1]
    places = [CUBE_FIELD.names.index(name) for name in ("goal_x", "goal_y")]
    offsets = np.stack(inner.shown)[..., places] - true[:, places]
    assert np.allclose(np.linalg.norm(offsets, axis=-1), 0.04, atol=1e-6)
    assert np.allclose(offsets[0], offsets[1], atol=1e-6) and np.allclose(offsets[0], offsets[2][::-1], atol=1e-6)
    assert np.linalg.norm(offsets[0, 0] - offsets[0, 1]) > 1e-3, "episodes differ in direction"


def test_a_slow_expert_acts_at_a_part_of_its_speed(world):
    observation = world.reset(seeds=range(4))
    slow = FaultyController(PushCubeExpert(), Fault(speed=0.3), 0, world.spec)
    assert np.allclose(slow.act(observation), 0.3 * PushCubeExpert().act(observation), atol=1e-6)
    spec = replace(world.spec, action=replace(world.spec.action, low=0.0, high=1.0))
    with pytest.raises(ConfigError, match="symmetric bounds"):
        FaultyController(Watched(), Fault(speed=0.3), 0, spec)
    FaultyController(Watched(), Fault(aim=0.04), 0, spec)


def test_faults_are_noise_levels(world):
    config = compose(["recipe=push_cube"])
    assert isinstance(build_noisy_expert(config.world, world, "speed=0.5", 0), FaultyController)
    assert [behaviour_name(level) for level in ("0.3", "aim=0.04", "play")] == [
        "expert, noise 0.3",
        "expert, aim=0.04",
        "expert, play",
    ]
    for text, said in (("speed=2", "0 < speed <= 1"), ("aim=far", "needs a number"), ("aim=-1", "aim >= 0")):
        with pytest.raises(ConfigError, match=said):
            fault_of(text)
    assert fault_of("low") is None and fault_of("0.3") is None
    with pytest.raises(ConfigError, match="no noise level 'aims=1'"):
        build_noisy_expert(config.world, world, "aims=1", 0)
    spec = _spec("tidy")
    with pytest.raises(ConfigError, match="cannot aim beside its goal"):
        FaultyController(Watched(), Fault(aim=0.04), 0, spec)
