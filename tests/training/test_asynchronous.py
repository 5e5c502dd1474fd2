"""Collecting beside the learner: staleness is fixed, load changes nothing, errors come out, nothing is left running."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.critic import state_critic
from robopolicy.training.collection.episodes import EpisodeCollector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.update import Learner

pytestmark = pytest.mark.long

CONFIG = FinetuneConfig(
    algorithm="grpo",
    coefficient="decoupled_ppo",
    iterations=30,
    groups=16,
    group_size=8,
    epochs=4,
    minibatch=128,
    learning_rate=5e-3,
    clip=0.1,
    target_kl=0.1,
    evaluate_every=0,
    staleness=2,
)


def collectors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("collector")]


@pytest.mark.checks("AReaL")
def test_a_bandit_improves_on_data_of_a_fixed_age(tmp_path: Path):
    policy = ChainPolicy()
    before = mean_reward(policy, True)["reward"]
    finetune(policy, None, BanditWorld(64), CONFIG, RunFolder(tmp_path))
    assert mean_reward(policy, True)["reward"] > before / 3
    records = RunFolder(tmp_path).metrics()[1:]
    # a checkpoint every ten iterations; after it collection restarts with the weights of then
    assert [record["staleness"] for record in records] == [0, 1, *[2] * 8] * 3
    assert not collectors()


def test_delayed_weights_are_exactly_as_old_as_asked_for_and_repeatable(tmp_path: Path):
    config = replace(CONFIG, staleness=0, policy_lag=3, iterations=8)
    scores = []
    for name in ("a", "b"):
        policy = ChainPolicy()
        finetune(policy, None, BanditWorld(32), config, RunFolder(tmp_path / name))
        scores.append(mean_reward(policy, True)["reward"])
    assert [record["staleness"] for record in RunFolder(tmp_path / "a").metrics()[1:]] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert scores[0] == scores[1]
    first = replace(config, iterations=5, checkpoint_every=5)
    finetune(ChainPolicy(), None, BanditWorld(32), first, RunFolder(tmp_path / "c"))
    policy = ChainPolicy()
    finetune(policy, None, BanditWorld(32), replace(first, iterations=8), RunFolder(tmp_path / "c"))
    assert mean_reward(policy, True)["reward"] == pytest.approx(scores[0], abs=1e-6)


def hurried(folder: Path, config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch, seed: int) -> dict[str, bytes]:
    """Return the weights of a run in which playing, learning and observing take random times."""
    delays = np.random.default_rng(seed)

    class Slow(BanditWorld):
        def step(self, actions):
            time.sleep(delays.choice([0.0, 0.0, 0.02]))
            return super().step(actions)

    def slowed(method):
        def call(*arguments, **options):
            time.sleep(delays.choice([0.0, 0.06]))
            return method(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "update", slowed(Learner.update))
        patched.setattr(EpisodeCollector, "observe", slowed(EpisodeCollector.observe))
        critic = state_critic(FIELDS, 1, width=8, depth=1) if config.algorithm == "ppo" else None
        finetune(ChainPolicy(), critic, Slow(32), config, RunFolder(folder), evaluate=mean_reward, seed=1)
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*.safetensors"))}


SAMPLED = {"num_initial_states": 12, "sampler": "mopps"}
LAGS = {
    "one": {"staleness": 1},
    "two": {"staleness": 2},
    "sampler": {"staleness": 2, **SAMPLED},
    "held": {"staleness": 2, "overprovision": 0.5, **SAMPLED},
    "streams": {"staleness": 2, "algorithm": "ppo", "rollout_length": 3},
    "shards": {"staleness": 2, "shards": 2, "algorithm": "ppo", "rollout_length": 3},
}


@pytest.mark.filterwarnings("ignore:The state of the world")
@pytest.mark.parametrize("changes", LAGS.values(), ids=LAGS.keys())
def test_runs_under_different_load_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    config = replace(CONFIG, iterations=9, groups=4, group_size=4, epochs=1, checkpoint_every=4, evaluate_every=3)
    config = replace(config, **{"staleness": 0, **changes})
    ends = []
    for seed in range(3):
        torch.set_rng_state(state)
        ends.append(hurried(tmp_path / str(seed), config, monkeypatch, seed))
    assert ends[0] == ends[1] == ends[2]
    torch.set_rng_state(state)
    hurried(tmp_path / "stopped", replace(config, iterations=8), monkeypatch, 7)
    torch.set_rng_state(state)
    assert hurried(tmp_path / "stopped", config, monkeypatch, 8) == ends[0]


@pytest.mark.checks("AReaL")
def test_behaviour_and_proximal_probabilities_are_kept_apart(monkeypatch: pytest.MonkeyPatch):
    batches: list[Rollouts] = []
    update = Learner.update

    def spy(self, rollouts, *arguments, **options):
        batches.append(rollouts)
        return update(self, rollouts, *arguments, **options)

    monkeypatch.setattr(Learner, "update", spy)
    finetune(ChainPolicy(), None, BanditWorld(32), replace(CONFIG, iterations=6, groups=4))
    stale = [rollouts for rollouts in batches if rollouts.logp_proximal is not None]
    assert stale
    for rollouts in stale:
        difference = (rollouts.proximal - rollouts.logp_behaviour)[rollouts.mask]
        assert float(difference.abs().max()) > 1e-4


def test_streams_with_a_critic_can_be_collected_in_the_background_too():
    torch.manual_seed(0)
    policy, critic = ChainPolicy(), state_critic(FIELDS, 1, width=16)
    before = mean_reward(policy, True)["reward"]
    config = replace(CONFIG, algorithm="ppo", rollout_length=8, discount=0.9, iterations=40, staleness=1)
    finetune(policy, critic, BanditWorld(64), config)
    assert mean_reward(policy, True)["reward"] > before / 3
    assert not collectors()


class Mortal(BanditWorld):
    """Dies at its tenth step."""

    def step(self, actions):
        if self.calls == 9:
            raise RuntimeError("the simulator is gone")
        return super().step(actions)


def test_an_error_in_the_thread_reaches_the_caller_and_ends_it():
    with pytest.raises(RuntimeError, match="the simulator is gone"):
        finetune(ChainPolicy(), None, Mortal(32), replace(CONFIG, groups=4))
    assert not collectors()


def test_an_interrupt_stops_the_thread(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Algorithm, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(ChainPolicy(), None, BanditWorld(32), replace(CONFIG, groups=4))
    assert not collectors()


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path):
    config = replace(CONFIG, checkpoint_every=2)
    finetune(ChainPolicy(), None, BanditWorld(32), replace(config, iterations=4), RunFolder(tmp_path))
    result = finetune(ChainPolicy(), None, BanditWorld(32), replace(config, iterations=8), RunFolder(tmp_path))
    assert result.iterations == 8
    assert [record["iteration"] for record in RunFolder(tmp_path).metrics()] == list(range(9))


def test_slow_worlds_are_hidden_behind_learning():
    class Slow(BanditWorld):
        def step(self, actions):
            time.sleep(0.01)  # releases the lock, as physics does
            return super().step(actions)

    config = replace(CONFIG, iterations=6, staleness=0, coefficient="ppo", epochs=8)
    spent = {}
    for staleness in (0, 1):
        world = Slow(32)
        finetune(ChainPolicy(), None, world, replace(config, staleness=staleness))
        spent[staleness] = world.calls
    # not a matter of time: beside the learner the world has been asked for at most one batch more
    per_batch = spent[0] / 6
    assert spent[0] <= spent[1] <= spent[0] + 2 * per_batch


class Varied(BanditWorld):
    """Episodes of different lengths: they start up to four steps in."""

    def reset(self, rows=None, seeds=None, options=None):
        super().reset(rows, seeds, options)
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.time[chosen] = np.asarray(seeds) // 8 % 5
        return self.observe()


def test_unfinished_episodes_are_gone_on_with(tmp_path: Path):
    config = replace(CONFIG, staleness=0, overprovision=0.5, iterations=8, groups=6, group_size=4)
    finetune(ChainPolicy(), None, Varied(8, horizon=6), config, RunFolder(tmp_path))
    records = RunFolder(tmp_path).metrics()[1:]
    assert any(record["staleness"] > 0 for record in records)
    assert all(record["episodes"] == 24 for record in records)


@pytest.mark.parametrize("changes", [{"staleness": -1}, {"overprovision": -0.5}])
def test_impossible_settings_are_told(changes):
    with pytest.raises(ConfigError, match="staleness"):
        replace(CONFIG, **changes)


@pytest.mark.slow
def test_vcpo_survives_steps_on_stale_data_that_break_ppo():
    """Eight updates behind, with a learning rate far too large for that."""
    config = FinetuneConfig(
        algorithm="grpo", iterations=50, groups=16, group_size=8, epochs=4, minibatch=128, clip=0.2, target_kl=None,
        evaluate_every=0, policy_lag=8, actor_warmup=1, learning_rate=4e-2,
    )  # fmt: skip

    def worst(**changes) -> float:
        rewards = []
        for seed in range(3):
            policy = ChainPolicy(seed=seed)
            finetune(policy, None, BanditWorld(64), replace(config, **changes), seed=seed)
            rewards.append(mean_reward(policy, True)["reward"])
        return min(rewards)

    assert worst() < -5
    assert worst(controllers=("vcpo",)) > -0.3
