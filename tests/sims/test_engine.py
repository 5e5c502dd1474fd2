"""The native engine against MuJoCo stepped by hand, and its errors."""

import dataclasses

import mujoco
import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.core.storage import resource
from sims.engine import MujocoWorld, load_model
from sims.registry import load_task, make_world


def noise_actions(batch, chunk, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (batch, chunk, 2))


def step_by_hand(task, seed, actions):
    """A slow reference: one mj_step at a time, one row. Yields (qpos, qvel, activation) after each control step."""
    model = load_model(task)
    data = mujoco.MjData(model)
    start = task.start(uniforms(np.asarray([seed]), task.uniforms))
    data.qpos[:] = start.qpos[0]
    data.act[:] = start.activation[0]
    for action in actions:
        data.ctrl[:] = task.control(action[None, None], np.zeros((1, model.nu)))[0, 0]
        for _ in range(task.substeps):
            mujoco.mj_step(model, data)
        yield data.qpos.copy(), data.qvel.copy(), data.act.copy(), data.sensordata.copy()


@pytest.mark.parametrize("name", ["push_cube", "push_t", "reach_planar"])
def test_state_equals_mj_step_by_hand(name):
    task, batch, length = load_task(name), 5, 24
    world = MujocoWorld(task, batch, terminate_on_success=False)
    world.reset(seeds=np.arange(batch))
    actions = noise_actions(batch, length)
    for index in range(0, length, 6):
        step = world.step(actions[:, index : index + 6])
    state = world.snapshot().arrays["state"]
    for row in range(batch):
        *_, (qpos, qvel, activation, _) = step_by_hand(task, row, actions[row])
        by_hand = np.concatenate([qpos, qvel, activation])
        assert np.abs(state[row, 1:] - by_hand).max() < 1e-12
    assert step.valid.all()


def test_rewards_success_and_trace_equal_a_slow_reference():
    task, seed = load_task("reach_planar"), 3
    world = MujocoWorld(task, 2)
    observation = world.reset(seeds=[seed, seed + 1])
    expert, actions = task.expert(), []
    previous = task.potential({key: observation[key][0, -1] for key in task.observation})
    steps = []
    while not steps or not steps[-1].ended[0]:
        actions.append(expert.act(observation)[0])
        steps.append(world.step(np.stack([actions[-1], np.zeros(2)])[:, None]))
        observation = steps[-1].observation
    goal = task.start(uniforms(np.asarray([seed]), task.uniforms)).goal[0]
    reference = list(step_by_hand(task, seed, actions))
    for step, (qpos, _, _, sensors) in zip(steps, reference, strict=True):
        environment = step.trace[ENVIRONMENT_STATE][0, 0]
        assert np.allclose(environment[:2], sensors[:2], atol=1e-6)
        assert np.allclose(environment[2:4], goal, atol=1e-6)
        assert np.allclose(step.trace[STATE][0, 0, :2], np.cos(qpos), atol=1e-6)
        now = task.potential({key: step.trace[key][0, 0] for key in task.observation})
        assert np.isclose(step.rewards["progress"][0, 0], float(now) - float(previous), atol=1e-6)
        previous = now
    bonus = [step.rewards["success"][0, 0] for step in steps]
    assert bonus == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1].success[0]
    assert steps[-1].terminated[0]


def test_a_row_that_ends_inside_a_chunk_stops_at_that_step():
    task = load_task("reach_planar")
    whole, single = MujocoWorld(task, 16, history=3), MujocoWorld(task, 16, history=3)
    whole.reset(seeds=np.arange(16))
    observation = single.reset(seeds=np.arange(16))
    expert, actions = task.expert(), []
    for _ in range(12):
        actions.append(expert.act(observation))
        observation = single.step(actions[-1][:, None]).observation
    step = whole.step(np.stack(actions, axis=1))
    assert 0 < step.valid.sum(axis=1).min() < 12
    for key in task.observation:
        assert np.array_equal(step.observation[key], observation[key])
    assert np.array_equal(whole.snapshot().arrays["state"], single.snapshot().arrays["state"])
    assert step.rewards["success"].sum() == step.success.sum()


def test_the_history_holds_the_last_frames_oldest_first():
    world = make_world("push_cube", 3, history=4)
    start = world.reset(seeds=[1, 2, 3])[STATE]
    assert np.array_equal(start, np.repeat(start[:, :1], 4, axis=1))
    step = world.step(noise_actions(3, 2))
    expected = np.concatenate([start[:, 2:], step.trace[STATE]], axis=1)
    assert np.array_equal(step.observation[STATE], expected)


def test_images_show_the_same_frames_as_render_and_are_kept_in_the_history():
    world = make_world("push_cube", 3, history=2, cameras=("top",), image_size=32)
    key = "observation.images.top"
    start = world.reset(seeds=[1, 2, 3])[key]
    assert start.shape == (3, 2, 32, 32, 3)
    one = world.step(noise_actions(3, 1)).observation[key]
    assert np.array_equal(one[:, 0], start[:, 1])
    assert np.array_equal(one[:, 1], world.render(camera="top", height=32, width=32))
    assert not np.array_equal(one[:, 1], one[:, 0])
    many = world.step(noise_actions(3, 5, seed=1)).observation[key]
    assert np.array_equal(many[:, 1], world.render(camera="top", height=32, width=32))
    assert not np.array_equal(many[:, 0], one[:, 1])


def test_success_does_not_end_an_episode_that_shall_run_on():
    world = make_world("reach_planar", 8, terminate_on_success=False)
    observation, expert = world.reset(seeds=np.arange(8)), load_task("reach_planar").expert()
    bonus = np.zeros(8)
    for _ in range(40):
        step = world.step(expert.act(observation)[:, None])
        observation = step.observation
        bonus += step.rewards["success"][:, 0]
    assert step.truncated.all()
    assert step.success.all()
    assert np.array_equal(bonus, np.ones(8))


def test_a_diverged_row_is_named_and_the_world_is_left_as_it_was():
    world = make_world("push_cube", 4)
    world.reset(seeds=np.arange(4))
    poisoned = world.snapshot()
    poisoned.arrays["state"][2, 6] = 1e14
    world.restore(poisoned)
    with pytest.raises(NonFiniteError, match=r"row\(s\) \[2\]"):
        world.step(noise_actions(4, 2))
    assert world.snapshot().arrays["steps"].tolist() == [0, 0, 0, 0]
    world.reset(rows=[2], seeds=[2])
    assert world.step(noise_actions(4, 2)).valid.all()


def test_reset_options_give_the_start_directly():
    world = make_world("push_cube", 2)
    by_seed = world.reset(seeds=[7, 8])
    numbers = uniforms(np.asarray([7, 8]), world.task.uniforms)
    assert np.array_equal(by_seed[STATE], world.reset(options={"uniforms": numbers})[STATE])
    with pytest.raises(ConfigError, match="uniforms"):
        world.reset(options={"uniform": numbers})
    with pytest.raises(SpecError, match="expected"):
        world.reset(options={"uniforms": numbers[:1]})


def test_wrong_use_is_explained():
    task = load_task("push_cube")
    with pytest.raises(ConfigError, match="Did you mean 'top'"):
        MujocoWorld(task, 1, cameras=("topp",))
    with pytest.raises(ConfigError, match="batch_size"):
        MujocoWorld(task, 0)
    with pytest.raises(ConfigError, match="must be one second"):
        MujocoWorld(dataclasses.replace(task, substeps=7), 1)
    with pytest.raises(ConfigError, match="does not exist"):
        MujocoWorld(dataclasses.replace(task, model="planar/none.xml"), 1)
    world = MujocoWorld(task, 2)
    with pytest.raises(SpecError, match="reset"):
        world.step(np.zeros((2, 1, 2)))
    with pytest.raises(SpecError, match="every row"):
        world.reset(rows=[0])
    world.reset()
    with pytest.raises(SpecError, match="distinct"):
        world.reset(rows=[0, 0])
    with pytest.raises(SpecError, match="one seed per row"):
        world.reset(seeds=[1])
    with pytest.raises(SpecError, match="row"):
        world.restore(world.snapshot([0]), rows=[0, 1])
    with pytest.raises(SpecError, match="does not fit"):
        world.restore(make_and_reset("push_cube", history=2))
    with pytest.raises(ConfigError, match="no camera"):
        world.render(camera="side")
    world.close()
    world.close()
    with pytest.raises(ConfigError, match="closed"):
        world.step(np.zeros((2, 1, 2)))


def make_and_reset(name, **options):
    world = make_world(name, 2, **options)
    world.reset()
    return world.snapshot()


def test_a_scene_that_does_not_say_so_is_run_without_warm_start_and_automatic_reset(tmp_path):
    text = resource("assets", "planar/push_cube.xml").read_text()
    assert text.count('<flag warmstart="disable" autoreset="disable"/>') == 1
    plain = tmp_path / "model.xml"
    plain.write_text(text.replace('<flag warmstart="disable" autoreset="disable"/>', ""))
    flags = [
        load_model(dataclasses.replace(load_task("push_cube"), model=each)).opt.disableflags
        for each in ("planar/push_cube.xml", str(plain))
    ]
    assert flags[0] == flags[1]


def test_unknown_names_are_explained():
    with pytest.raises(
        ConfigError, match=r"World 'push_t' has no option 'histori'.*history.* Known options: seed, history,"
    ):
        make_world("push_t", 2, histori=1)
    with pytest.raises(ConfigError, match="Did you mean 'push_cube'"):
        make_world("push_cubes", 1)
    with pytest.raises(ConfigError, match="Did you mean 'push_t'"):
        load_task("push-t")
