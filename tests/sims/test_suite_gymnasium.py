"""Outside environments as worlds: layouts, endings, rewards, images, and errors that tell the way out."""

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyWarning, SpecError
from robopolicy.testing.world import check_world
from sims.registry import make_world
from sims.suites.environment import open_gymnasium, resized
from sims.suites.gymnasium_suite import make_gymnasium_world, words

pytestmark = pytest.mark.long

POINT = "suite_toys:Point-v0"


FLAT = pytest.mark.filterwarnings("ignore:Observation of 'gymnasium.suite_toys.Plain-v0'")


def point(batch=3, **options):
    return make_gymnasium_world(POINT, batch, **options)


def towards_goal(batch, chunk, speed=1.0):
    return np.tile([speed, 0.0], (batch, chunk, 1))


@pytest.mark.parametrize("terminate", [True, False])
def test_a_world_without_mujoco_keeps_every_promise(terminate):
    check_world(
        lambda batch: point(batch, history=3, cameras=("pixels",), image_size=8, terminate_on_success=terminate),
        snapshots=False,
    )


def test_a_world_whose_environment_truncates_before_the_time_limit_keeps_every_promise():
    check_world(lambda batch: point(batch, env_options={"cut": 5}), snapshots=False)


@FLAT
def test_a_flat_observation_keeps_every_promise():
    check_world(lambda batch: make_gymnasium_world("suite_toys:Plain-v0", batch, fps=5), snapshots=False, renders=False)


@FLAT
def test_entries_are_laid_out_under_lerobot_keys():
    spec = point(cameras=("pixels",), image_size=8).spec
    assert spec.name == f"gymnasium:{POINT}" and spec.fps == 10 and spec.horizon == 12
    assert spec.observation["observation.state"].names == ("agent_pos[0]", "agent_pos[1]", "agent_pos[2]")
    assert spec.observation["observation.environment_state"].names[1:3] == ("achieved_goal[1]", "desired_goal[0]")
    assert spec.observation["observation.images.pixels"].shape == (8, 8, 3)
    assert spec.instructions == ("point",) and spec.rewards == ("progress", "success")
    own = point(state_keys=("achieved_goal",), instruction="go there").spec
    assert own.observation["observation.state"].names == ("achieved_goal[0]", "achieved_goal[1]")
    assert own.instructions == ("go there",)
    plain = make_gymnasium_world("suite_toys:Plain-v0", 1, fps=7).spec
    assert plain.observation["observation.state"].shape == (4,) and plain.rewards == ("reward",) and plain.fps == 7
    assert plain.action.low == (-2.0,) and plain.action.high == (3.0,)


def test_success_ends_the_episode_or_only_latches():
    world = point()
    world.reset(seeds=[1, 2, 3])
    step = world.step(towards_goal(3, 12))
    assert step.success.all() and step.terminated.all() and not step.truncated.any()
    assert (step.valid.sum(axis=1) < 12).all()
    assert np.allclose(step.rewards["success"].sum(axis=1), 1.0)
    world = point(terminate_on_success=False)
    world.reset(seeds=[1, 2, 3])
    step = world.step(towards_goal(3, 12))
    assert step.success.all() and step.truncated.all() and not step.terminated.any() and step.valid.all()
    assert np.allclose(step.rewards["success"].sum(axis=1), 1.0)


def test_a_failure_terminates_and_a_cut_truncates():
    world = point(env_options={"fall": -0.5})
    world.reset(seeds=[1, 2, 3])
    step = world.step(np.tile([0.0, -1.0], (3, 12, 1)))
    assert step.terminated.all() and not step.success.any() and not step.truncated.any()
    world = point(env_options={"cut": 4})
    world.reset(seeds=[1, 2, 3])
    step = world.step(towards_goal(3, 12, 0.1))
    assert step.truncated.all() and not step.terminated.any() and (step.valid.sum(axis=1) == 4).all()


def test_progress_is_the_decrease_of_the_distance_to_the_goal():
    world = point(reward_scale=5.0)
    start = world.reset(seeds=[1, 2, 3])["observation.environment_state"][:, -1].astype(np.float64)
    step = world.step(towards_goal(3, 12))
    end = step.observation["observation.environment_state"][:, -1].astype(np.float64)
    gone = [np.linalg.norm(at[:, :2] - at[:, 2:], axis=1) for at in (start, end)]
    assert np.allclose(step.rewards["progress"].sum(axis=1), 5.0 * (gone[0] - gone[1]), atol=1e-5)


def test_the_reward_can_be_the_environments_own_or_a_dotted_path():
    world = point(reward="environment")
    world.reset(seeds=[1, 2, 3])
    step = world.step(towards_goal(3, 3, 0.1))
    assert tuple(step.rewards) == ("reward",) and (step.rewards["reward"] == -0.5).all()
    world = point(reward="suite_toys:point_potential", reward_scale=2.0)
    before = world.reset(seeds=[1, 2, 3])["observation.state"][:, -1, 0]
    step = world.step(towards_goal(3, 3))
    moved = step.observation["observation.state"][:, -1, 0] - before
    assert np.allclose(step.rewards["progress"].sum(axis=1), 2.0 * moved, atol=1e-5)


def test_reset_options_reach_the_environment():
    world = point()
    observation = world.reset(seeds=[1, 2, 3], options={"goal": [0.0, 5.0]})
    assert (observation["observation.environment_state"][:, -1, 2:] == [0.0, 5.0]).all()


def test_images_follow_the_episode():
    world = point(cameras=("pixels",), image_size=4, history=2)
    first = world.reset(seeds=[1, 2, 3])["observation.images.pixels"]
    step = world.step(towards_goal(3, 5))
    images = step.observation["observation.images.pixels"]
    assert (first[:, 0] == first[:, 1]).all() and (images[:, 0] < images[:, 1]).all() and (images > first).all()
    # A camera of the observation and env.render show the same thing here, at any size.
    assert (world.render(height=6, width=4)[:, 0, 0, 0] == images[:, 1, 0, 0, 0]).all()


@pytest.mark.filterwarnings("ignore:Observation of")
@pytest.mark.parametrize("shape", [(10, 20, 1), (1, 10, 20), (10, 20, 4), (3, 10, 20)])
def test_images_of_other_channels_are_shown_with_three(shape):
    worlds = [
        point(cameras=("pixels",), image_size=4, history=2, env_options={"image": i}) for i in (shape, (10, 20, 3))
    ]
    for world in worlds:
        world.reset(seeds=[1, 2, 3])
    images = [world.step(towards_goal(3, 5)).observation["observation.images.pixels"] for world in worlds]
    assert np.array_equal(*images) and images[0].shape == (3, 2, 4, 4, 3)
    assert np.array_equal(*(world.render(height=6, width=4) for world in worlds))


def test_an_image_of_two_channels_is_no_camera():
    with pytest.warns(RobopolicyWarning, match=r"'pixels' \[10, 20, 2\] uint8 is ignored: an image has 1, 3 or 4"):
        world = point(env_options={"image": (10, 20, 2)})
    assert world.spec.observation.keys() == point().spec.observation.keys()
    with pytest.raises(ConfigError, match="no camera 'pixels'"):
        point(cameras=("pixels",), env_options={"image": (10, 20, 2)})
    world.reset(seeds=[1, 2, 3])
    with pytest.raises(
        ConfigError, match=r"renders \[10, 20, 2\] uint8: an image must be uint8 with 1, 3 or 4 channels"
    ):
        world.render()


def test_the_fourth_channel_says_how_opaque_a_pixel_is():
    drawn = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    assert np.array_equal(resized(drawn, 6, 4), drawn[..., :3])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: make_gymnasium_world("Pendulun-v1", 1), ConfigError, "Did you mean 'Pendulum-v1'"),
        (lambda: make_gymnasium_world("no_such_package:Id-v0", 1), ConfigError, "no module 'no_such_package'"),
        (lambda: make_gymnasium_world("suite_toys:Press-v0", 1), ConfigError, "continuous numbers"),
        (lambda: make_gymnasium_world("suite_toys:Plain-v0", 1), ConfigError, "set world.options.fps="),
        (lambda: make_gymnasium_world("suite_toys:Endless-v0", 1), ConfigError, "set world.options.horizon="),
        (lambda: make_gymnasium_world("FrozenLake-v1", 1), ConfigError, "TransformAction"),
        (lambda: point(hisotry=2), ConfigError, "Did you mean 'history'"),
        (lambda: point(cameras=("pixel",)), ConfigError, "Did you mean 'pixels'"),
        (lambda: point(state_keys=("agent",)), ConfigError, "Did you mean 'agent_pos'"),
        (lambda: point(env_options={"fail": 3}), ConfigError, "fail"),
        (lambda: point(reward="suite_toys:potential"), ConfigError, "Did you mean 'point_potential'"),
        (lambda: point(reward="suite_toys:NOT_CALLABLE"), ConfigError, "cannot be called"),
        (lambda: point(reward="sparse"), ConfigError, "package.module:name"),
        (lambda: make_gymnasium_world("Pendulum-v1", 1, reward="progress"), ConfigError, "reward=environment"),
        (lambda: point(batch=0), ConfigError, "batch_size"),
    ],
)
def test_wrong_configurations_say_what_is_wrong(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_trouble_while_running_is_told():
    world = point(env_options={"nan_at": 2})
    world.reset(seeds=[1, 2, 3])
    with pytest.raises(NonFiniteError, match=r"row\(s\) \[0, 1, 2\]"):
        world.step(towards_goal(3, 3))
    world = point(reward="suite_toys:one_number")
    world.reset(seeds=[1, 2, 3])
    with pytest.raises(SpecError, match="one number per observation"):
        world.step(towards_goal(3, 3))
    world = point()
    with pytest.raises(SpecError, match="call reset"):
        world.step(towards_goal(3, 3))
    with pytest.raises(SpecError, match="every row"):
        world.reset(rows=[1], seeds=[1])
    world.reset()
    with pytest.raises(ConfigError, match="does not simulate with MuJoCo"):
        world.snapshot()


@pytest.mark.parametrize(("workers", "reward"), [(0, "environment"), (1, "environment"), (0, "increase")])
@pytest.mark.parametrize(("cut", "says_from"), [(None, 12), (10, 99)])
def test_success_may_be_said_in_an_episodes_last_step_alone(workers, reward, cut, says_from):
    """At the time limit, or where the environment ends the episode itself."""
    told = {"cut": cut, "says_from": says_from}
    world = point(success_key="is_success", workers=workers, env_options=told, reward=reward)
    assert world.spec.reports_success and not point(env_options=told).spec.reports_success
    for speed in (1.0, 0.0):
        world.reset(seeds=[1, 2, 3])
        assert not world.step(towards_goal(3, 8, speed)).success.any()
        rest = towards_goal(3, 8, speed)
        rest[:, 2:] = 0.0  # stays at the goal
        last = world.step(rest)
        assert (last.success == (speed > 0)).all() and last.ended.all()
    world.close()


@pytest.mark.parametrize(
    ("key", "said"), [("is_success", "set a later time limit"), ("is_sucess", "Did you mean 'is_success'")]
)
def test_success_that_is_said_too_late_or_under_another_name_is_a_failure_with_a_note(key, said):
    world = point(success_key=key, env_options={"says_from": 13 if key == "is_success" else 0})
    world.reset(seeds=[1, 2, 3])
    with pytest.warns(RobopolicyWarning, match=said):
        assert not world.step(towards_goal(3, 12)).success.any()


def test_success_is_found_under_either_name():
    world = point(env_options={"success_name": "success"})
    world.reset(seeds=[1, 2, 3])
    assert world.step(towards_goal(3, 12)).success.all()


def test_chunks_are_the_environments_own_steps_to_the_last_bit_and_the_callers_actions_stay_as_they_were():
    world = make_gymnasium_world("Pendulum-v1", 2, fps=20, horizon=19, history=3)
    environments = [open_gymnasium("Pendulum-v1", {}) for _ in range(2)]
    windows = [[environment.reset(seed=seed)[0]] for seed, environment in zip((4, 5), environments, strict=True)]
    world.reset(seeds=[4, 5])
    draws = np.random.default_rng(0)
    for chunk in (1, 6, 2, 1, 8, 4):  # the last but one is longer than the history, the last than the episode's rest
        actions = draws.uniform(-2, 2, (2, chunk, 1))
        given, paid = actions.copy(), np.zeros((2, chunk))
        step = world.step(actions)
        assert np.array_equal(actions, given)
        for row, environment in enumerate(environments):
            for index in range(min(chunk, 20 - len(windows[row]))):
                observation, paid[row, index], *_ = environment.step(actions[row, index].astype(np.float32))
                windows[row].append(observation)
                assert np.array_equal(step.trace["observation.state"][row, index], observation)
            assert np.array_equal(
                step.observation["observation.state"][row], np.stack(([windows[row][0]] * 2 + windows[row])[-3:])
            )
        assert np.array_equal(step.rewards["reward"], paid)
    assert step.truncated.all() and step.valid.sum(axis=1).tolist() == [1, 1]


def test_words():
    assert [words(name) for name in ("FetchPush-v4", "pkg:HandReachDense-v1", "gym_pusht/PushT-v0")] == [
        "fetch push",
        "hand reach dense",
        "push t",
    ]


# -- FetchPush: a real third-party MuJoCo environment ------------------------------------------------------------


@pytest.fixture
def robotics():
    pytest.importorskip("gymnasium_robotics")


def test_fetch_push_keeps_every_promise(robotics):
    check_world(lambda batch: make_world("gymnasium:FetchPush-v4", batch, history=2, horizon=9), batch_size=3, chunk=4)


@pytest.mark.slow
def test_fetch_push_with_a_camera_keeps_every_promise(robotics):
    check_world(
        lambda batch: make_world(
            "gymnasium:FetchPush-v4", batch, cameras=("external_camera_0",), image_size=16, horizon=4
        ),
        batch_size=3,
        chunk=2,
        renders=False,
    )


def test_the_world_steps_as_gymnasium_does(robotics):
    import gymnasium

    world = make_world("gymnasium:FetchPush-v4", 2)
    plain = gymnasium.make("FetchPush-v4")
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 50, 4)).astype(np.float32)
    world.reset(seeds=[5, 6])
    step = world.step(np.repeat(actions, 2, axis=0))
    expected, _ = plain.reset(seed=5)
    for index in range(50):
        expected, _, _, truncated, info = plain.step(actions[0, index])
        assert np.array_equal(step.trace["observation.state"][0, index], expected["observation"].astype(np.float32))
    goals = np.concatenate([expected["achieved_goal"], expected["desired_goal"]]).astype(np.float32)
    assert np.array_equal(step.observation["observation.environment_state"][0, -1], goals)
    assert truncated and step.truncated[0] and bool(info["is_success"]) == step.success[0]
    plain.close()
    world.close()


def test_looking_does_not_change_the_future(robotics):
    worlds = [make_world("gymnasium:FetchPush-v4", 1) for _ in range(2)]
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 1, 6, 4))
    for world in worlds:
        world.reset(seeds=[5])
    for each in actions:
        image = worlds[0].render(height=48, width=64)
        steps = [world.step(each) for world in worlds]
        assert np.array_equal(steps[0].trace["observation.state"], steps[1].trace["observation.state"])
    assert image.std() > 10
    with pytest.raises(ConfigError, match="external_camera_0"):
        worlds[0].render(camera="external_camera")
    for world in worlds:
        world.close()


def test_a_missing_package_names_its_extra(monkeypatch):
    import importlib

    import gymnasium

    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delitem(gymnasium.registry, "FetchReach-v4", raising=False)
    with pytest.raises(ConfigError, match=r"robopolicy\[robotics\]"):
        make_gymnasium_world("FetchReach-v4", 1)
