"""The benchmark's hand-written gymnasium environment is the same task, and its report has every figure."""

import math

import gymnasium
import numpy as np
import pytest

from robopolicy.benchmarks.push_cube_env import PushCubeEnv
from robopolicy.benchmarks.sims import ADAPTED, BARE, Timing, benchmark_sims, report, tables
from robopolicy.core.errors import ConfigError
from sims.registry import load_task, make_world


def test_the_lean_environment_equals_the_native_engine():
    world, env, expert = make_world("push_cube", 1), PushCubeEnv(), load_task("push_cube").expert()
    observation = world.reset(seeds=[5])
    lean, _ = env.reset(seed=5)
    for key, value in lean.items():
        assert np.allclose(observation[key][0, 0], value, atol=1e-6)
    for _ in range(80):
        action = expert.act(observation)
        step = world.step(action[:, None])
        lean, reward, terminated, truncated, info = env.step(action[0])
        observation = step.observation
        for key, value in lean.items():
            assert np.allclose(observation[key][0, 0], value, atol=1e-6)
        assert reward == pytest.approx(step.reward[0, 0], abs=1e-5)
        assert (terminated, truncated, info["is_success"]) == (step.terminated[0], step.truncated[0], step.success[0])
        if step.ended[0]:
            break
    assert step.success[0]


def test_the_lean_environment_follows_gymnasiums_rules():
    env = PushCubeEnv()
    observation, _ = env.reset(seed=0)
    assert isinstance(env, gymnasium.Env)
    assert env.observation_space.contains(observation)
    for _ in range(80):
        observation, _, *ending, _ = env.step(np.zeros(2, dtype=np.float32))
    assert env.observation_space.contains(observation)
    assert ending == [False, True]


def test_ratios_are_taken_within_a_round_and_judged():
    native = "push_cube: native engine"
    samples = {
        native: [90.0, 45.0, 180.0],
        "push_cube: pure physics": [100.0, 50.0, 200.0],
        "push_cube: gymnasium SyncVectorEnv x4": [10.0, 5.0, 20.0],
        "push_cube: gymnasium AsyncVectorEnv x4": [100.0, 50.0, 200.0],
        "metaworld push-v3: its own environment": [10.0, 5.0, 20.0],
        "metaworld push-v3: physics alone": [50.0, 25.0, 100.0],
        "push_cube: pure physics, one thread": [50.0, 25.0, 100.0],
        "push_cube: frames/s at 64 px": [900.0, 1100.0, 1200.0],
        "push_cube: native engine, one thread": [40.0, 20.0, 80.0],
        ADAPTED: [5.0, 2.5, 10.0],
        BARE: [5.0, 2.5, 10.0],
    }
    # Every arm used one core, but the adapter a tenth more, and workers' processor time is unknown.
    used = {ADAPTED: 1.1, "push_cube: gymnasium AsyncVectorEnv x4": math.nan}
    timings = {name: [Timing(each, used.get(name, 1) / each) for each in values] for name, values in samples.items()}
    result = report(timings, ("push_cube",), "push_cube")
    assert result["ratios"]["push_cube: native engine / pure physics"] == pytest.approx(0.9)
    assert result["ratios"]["native engine / SyncVectorEnv"] == pytest.approx(9.0)
    assert result["ratios"]["physics cost, ours / Meta-World"] == pytest.approx(1.0)
    assert [bool(met) for met in result["bars"].values()] == [True, True, False, False, False, True]
    assert result["ratios"]["native engine, one thread / Meta-World"] == pytest.approx(4.0)
    assert result["ratios"]["our adapter of Meta-World / Meta-World"] == pytest.approx(0.5)
    assert result["ratios"]["CPU time of a step, adapter / bare environment"] == pytest.approx(1.1)
    assert result["figures"][native]["cpu"] == pytest.approx(1 / 90)
    table = tables(result)[0]
    cells = {line[0]: line[-1] for line in table.lines}
    assert cells[native] == "11,111.1" and cells["push_cube: gymnasium AsyncVectorEnv x4"] == "in workers"
    for row in result["figures"].values():
        row.pop("cpu", None)
    assert len(tables(result)[0].header) == len(table.header) - 1, "figures of before have no such column"
    assert result["figures"][native]["min"] == 45.0
    assert {"mujoco", "numpy", "gymnasium", "metaworld", "python"} <= set(result["settings"])


def test_a_benchmark_needs_a_round():
    with pytest.raises(ConfigError, match="round"):
        benchmark_sims(rounds=0)


@pytest.mark.slow
def test_the_benchmark_runs_end_to_end():
    pytest.importorskip("metaworld")
    result = benchmark_sims(
        rounds=2, batch_size=16, chunk=4, tasks=("push_cube",), like_metaworld="push_t", gymnasium_envs=(2,)
    )
    assert all(row["min"] > 0 for row in result["figures"].values())
