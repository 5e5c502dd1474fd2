"""`bench dppo`: its environment is the native task's, its tables are ratios, and a missing checkout is one sentence."""

import sys

import numpy as np
import pytest

from robopolicy.benchmarks.dppo import BENCHMARK, Clock, chunks_of, modules_of, per_thousand, require_checkout
from robopolicy.benchmarks.push_t_env import PushT
from robopolicy.cli import main
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.record import record
from sims.registry import make_expert, make_world


def test_the_environment_by_hand_is_the_native_task():
    world, alone = make_world("push_t", 1), PushT()
    observation, expert = world.reset(seeds=[7]), make_expert("push_t", world.spec)
    assert expert is not None
    by_hand, success = alone.start(7), False
    for _ in range(world.spec.horizon):
        native = np.concatenate([observation[key][0, -1] for key in (STATE, ENVIRONMENT_STATE)])
        np.testing.assert_allclose(by_hand, native, atol=1e-5)
        action = expert.act(observation)
        step = world.step(action[:, None])
        by_hand, reward, success = alone.advance(action[0])
        assert reward == pytest.approx(float(step.reward[0, 0]), abs=1e-5)
        assert success == bool(step.success[0])
        observation = step.observation
        if success:
            break
    assert success


def test_a_missing_checkout_is_one_sentence_with_the_command(tmp_path, capsys):
    assert main(["bench", "dppo", f"run.root={tmp_path}"]) == 2
    assert "git clone https://github.com/irom-lab/dppo dppo, then set bench.dppo=dppo." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=rf"{tmp_path} is not a checkout of DPPO: git clone \S+ {tmp_path}"):
        require_checkout(tmp_path)


def test_a_missing_gym_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'robopolicy\[dppo\]'"):
        modules_of(tmp_path)


def test_a_part_ends_where_the_next_begins(monkeypatch):
    seconds = iter([1.0, 3.0, 3.2, 3.5, 8.0, 9.0])
    monkeypatch.setattr("time.process_time", lambda: next(seconds))
    clock = Clock()
    for name in ("collect", "prepare", "prepare", "update", "update"):  # the first mark of a part counts
        clock.mark(name)
    clock.stop()
    assert clock.parts == [[2.0, 0.5, 5.5]]


def test_tables_show_seconds_per_thousand_steps_after_the_warm_up_and_success():
    warm_up = [[9.0, 9.0, 9.0]] * 3
    run = {
        "parts": {"theirs": [*warm_up, [4.0, 1.0, 3.0]], "ours": [*warm_up, [2.0, 0.5, 1.5]]},
        "env_steps": {"theirs": [0, 10, 20, 30, 2030], "ours": [0, 10, 20, 30, 1030]},
        "success": {"theirs": {"0": [0.5, 0.25], "4": [0.6, 0.5]}, "ours": {"0": [0.5, 0.25], "4": [0.75, 0.5]}},
    }
    np.testing.assert_allclose(per_thousand(run, "theirs"), [[2.0, 0.5, 1.5, 4.0]])
    speed, success = BENCHMARK.tables({"seeds": {"0": run}})
    assert speed.lines[-1] == ["whole iteration", "4.0000", "4.0000", "1.00", "1.00"]
    assert success.lines[-1] == ["0", "4", "2 / 1", "60.0 % / 50.0 %", "75.0 % / 50.0 %"]


def test_chunks_follow_their_observations(tmp_path):
    world = make_world("push_t", 4)
    expert = make_expert("push_t", world.spec)
    assert expert is not None
    episodes = record(world, expert, np.arange(4))
    write_dataset(episodes, tmp_path / "data")
    observations, chunks = chunks_of(tmp_path / "data")
    assert len(observations) == sum(length - 7 for length in episodes.lengths.tolist())
    alone, row = PushT(), 0
    for seed, length in enumerate(episodes.lengths.tolist()):
        by_hand = alone.start(seed)
        for _ in range(length - 7):
            np.testing.assert_allclose(observations[row], by_hand, atol=1e-5)
            by_hand, _, _ = alone.advance(chunks[row, 0])
            row += 1
