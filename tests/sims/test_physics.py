"""Physics engines behind `MujocoWorld`: how they are found, what is refused, and mujoco-warp beside MuJoCo."""

import json
import sys

import numpy as np
import pytest

from robopolicy.cli import main
from robopolicy.core.errors import CheckpointError, ConfigError, NonFiniteError, RobopolicyWarning, SpecError
from robopolicy.core.origin import WorldOrigin
from robopolicy.testing.world import check_world
from sims.physics.native import NativePhysics
from sims.physics.protocol import PHYSICS
from sims.registry import load_task, make_world, trusted_options

HERE = __name__ + ":"
CPU = {"device": "cpu"}
PLANAR = ["reach_planar", "push_t", "push_cube"]


class Counting(NativePhysics):
    """MuJoCo's own, and counts."""

    calls = 0

    def __init__(self, model, batch_size, *, threads, scale: int = 1):
        super().__init__(model, batch_size, threads=threads)
        self.scale = scale

    def advance(self, state, control, every):
        Counting.calls += self.scale
        return super().advance(state, control, every)


class Flat(NativePhysics):
    """Forgets an axis."""

    def advance(self, state, control, every):
        states, sensors = super().advance(state, control, every)
        return states[:, -1], sensors


class Failing:
    def __init__(self, model, batch_size, *, threads):
        raise OSError("no such card")


def played(world, chunks=4, length=3):
    """Return the states after random chunks."""
    world.reset(seeds=np.arange(world.batch_size))
    draws = np.random.default_rng(0)
    for _ in range(chunks):
        world.step(draws.uniform(-1, 1, (world.batch_size, length, *world.spec.action.shape)))
    return world.snapshot().arrays["state"]


def test_a_custom_engine_takes_the_place_of_the_native_one():
    Counting.calls = 0
    own = make_world("push_t", 3, physics=HERE + "Counting", physics_options={"scale": 5})
    assert np.array_equal(played(own), played(make_world("push_t", 3)))
    assert Counting.calls == 20  # one call a chunk; push_t has no sensors to read at a reset


def test_wrong_names_options_and_shapes_are_explained():
    with pytest.raises(ConfigError, match=r"no physics engine 'natve'.*Did you mean 'native'"):
        make_world("push_t", 1, physics="natve")
    with pytest.raises(ConfigError, match=r"physics=native has no option 'device'. It has none."):
        make_world("push_t", 1, physics_options={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"no option 'scal'.*Did you mean 'scale'"):
        make_world("push_t", 1, physics=HERE + "Counting", physics_options={"scal": 2})
    with pytest.raises(ConfigError, match=r"world.options.physics_options.scale is 'two', which is not an integer"):
        make_world("push_t", 1, physics=HERE + "Counting", physics_options={"scale": "two"})
    with pytest.raises(ConfigError, match=r"OSError: no such card. It is called as Failing\(model, 1, threads=1\)"):
        make_world("push_t", 1, physics=HERE + "Failing", threads=1)
    world = make_world("push_t", 2, physics=HERE + "Flat")
    world.reset(seeds=[0, 1])
    with pytest.raises(SpecError, match=r"Flat returned states \[2, 13\] .* expected \[2, 3, 13\]"):
        world.step(np.zeros((2, 3, 2)))


def test_a_checkpoint_does_not_choose_an_engine_that_the_user_has_not_named():
    origin = WorldOrigin("push_t", {"physics": "strange.module:Physics"})
    with pytest.raises(CheckpointError, match=r"physics=strange.module:Physics.*not part of robopolicy"):
        trusted_options(origin, "checkpoint", {})
    assert trusted_options(origin, "checkpoint", {"physics": "native"}) == {}
    assert PHYSICS.ours == ("native", "warp")


def test_another_engine_than_the_recorded_one_takes_none_of_its_options():
    options = {"physics": "warp", "physics_options": {"contacts": 9}, "style": 3}
    origin = WorldOrigin("push_t", options)
    assert trusted_options(origin, "checkpoint", {"physics": "native"}) == {"style": 3}
    assert trusted_options(origin, "checkpoint", {"physics": "warp"})["physics_options"] == {"contacts": 9}
    assert trusted_options(origin, "checkpoint", {}) == options


def test_a_missing_extra_is_one_sentence(monkeypatch):
    for module in ("warp", "mujoco_warp"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=r"^'warp' is not installed. Install it with: pip install 'robopolicy\[gpu-phys"
    ):
        make_world("push_t", 1, physics="warp")


def warp_world(name, rows, **options):
    pytest.importorskip("mujoco_warp")
    return make_world(name, rows, physics="warp", physics_options=CPU, **options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PLANAR)
def test_warp_keeps_the_promises_of_a_world_for_planar_tasks(name):
    check_world(lambda rows: warp_world(name, rows), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["push_t", "push_cube", "reach_planar", "pick_place", "tidy"])
def test_warp_states_are_as_close_to_mujocos_as_single_precision_allows(name):
    """Forty control steps of random actions in sixteen environments, in the units of the state (m, rad, m/s, rad/s)."""
    native, warp = make_world(name, 16), warp_world(name, 16)
    differences = np.abs(played(native, 10, 4) - played(warp, 10, 4))
    assert np.median(differences.max(axis=1)) < 1e-4
    assert differences[:, 0].max() < 1e-12, "the clock"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_push_ts_expert_plays_the_same_episodes_on_warp():
    results = []
    for make in (make_world, warp_world):
        world, expert = make("push_t", 32), load_task("push_t").expert()
        observation, steps, returns = world.reset(seeds=np.arange(32)), np.zeros(32, int), np.zeros(32)
        ended, success = np.zeros(32, bool), np.zeros(32, bool)
        while not ended.all():
            step = world.step(expert.act(observation)[:, None])
            observation, ended, success = step.observation, step.ended, step.success
            steps += step.valid.sum(axis=1)
            returns += step.reward.sum(axis=1)
        results.append((steps, success, returns))
    (steps, success, returns), (its_steps, its_success, its_returns) = results
    assert np.array_equal(steps, its_steps) and np.array_equal(success, its_success)
    assert success.mean() > 0.9
    assert np.abs(returns - its_returns).max() < 2e-5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_warp_says_what_does_not_fit():
    pytest.importorskip("mujoco_warp")
    with pytest.raises(ConfigError, match=r"device is 'cuda:7', which is not available.* Available: .*cpu"):
        make_world("push_t", 1, physics="warp", physics_options={"device": "cuda:7"})
    with pytest.raises(ConfigError, match=r"contacts is 0"):
        make_world("push_t", 1, physics="warp", physics_options={"contacts": 0})
    for setting, values in {"contacts": (1, 48), "constraints": (192, 2)}.items():
        contacts, constraints = values
        options = {**CPU, "contacts": contacts, "constraints": constraints}
        world = make_world("pick_place", 2, physics="warp", physics_options=options)
        with pytest.raises(ConfigError, match=rf"room .*: set world.options.physics_options.{setting} to more than"):
            played(world)
    world = warp_world("push_t", 4)
    world.reset(seeds=np.arange(4))
    poisoned = world.snapshot()
    poisoned.arrays["state"][2, 6] = 1e30
    world.restore(poisoned)
    with pytest.raises(NonFiniteError, match=r"row\(s\) \[2\]"):
        world.step(np.zeros((4, 2, 2)))
    world.reset(rows=[2], seeds=[2])
    assert world.step(np.zeros((4, 2, 2))).valid.all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_warp_without_a_gpu_warns():
    warp = pytest.importorskip("warp")
    if warp.is_cuda_available():
        pytest.skip("there is a GPU")
    with pytest.warns(RobopolicyWarning, match=r"no CUDA device"):
        make_world("push_t", 1, physics="warp")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_recipe_for_a_gpu_runs_at_tiny_size_and_its_checkpoint_plays_in_native_physics_too(tmp_path):
    pytest.importorskip("mujoco_warp")
    shared = ["recipe=push_t_gpu", f"run.root={tmp_path}", "run.device=cpu", "run.threads=1", "world.batch_size=4"]
    warp, native = "world.options.physics_options.device=cpu", "world.options.physics=native"
    assert main(["collect", *shared, native, "collect.episodes=8"]) == 0
    assert main(["train", *shared, native, "train.fit.steps=20", "train.evaluate_episodes=0"]) == 0
    small = ["num_envs=4", "rollout_length=2", "minibatch=8", "iterations=1", "critic_warmup=0", "evaluate_episodes=1"]
    small = [f"finetune.{each}" for each in [*small, "videos=0"]]
    assert main(["finetune", *shared, warp, *small]) == 0
    checkpoint = tmp_path / "finetune" / "push_t_gpu" / "0" / "checkpoint"
    assert json.loads((checkpoint / "config.json").read_text())["world"]["options"]["physics"] == "warp"
    assert main(["evaluate", str(checkpoint), *shared[1:], native, "evaluate.episodes=1", "evaluate.videos=0"]) == 0
