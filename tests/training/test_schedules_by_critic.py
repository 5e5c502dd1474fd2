"""The critic that is trained chooses the schedules of its episodes: by the trainer and the verbs, never in copies."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from robopolicy.benchmarks.small_worlds import LineWorld
from robopolicy.cli import main
from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.scheduled import SCHEDULE, ScheduledWorld
from robopolicy.core.spec import STATE
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.schedules import load_critic, require_own_schedules, save_critic, schedule_by, values_of

FORMULA = "F[1,8](x > 1) & F[1,9](x < 0)"


@pytest.fixture
def critic():
    world = ScheduledWorld(LineWorld(1, 10), FORMULA)
    torch.manual_seed(0)
    critic = state_critic(world.spec.observation, 1, width=16)
    critic.fit({key: torch.randn(64, 1, field.size) for key, field in world.spec.observation.items()})
    with torch.no_grad():
        critic.layers[-1].weight.normal_()
    return critic.eval()


@pytest.mark.checks("TGPO-STL")
def test_the_best_of_64_schedules_has_the_critics_largest_value(critic):
    world = ScheduledWorld(LineWorld(20, 10), FORMULA)
    plain = world.reset(seeds=np.arange(20))
    schedule_by(world, critic, best=True)
    chosen = world.reset(seeds=np.arange(20))
    values = values_of(critic)
    assert (values(chosen) >= values(plain)).all() and not np.array_equal(chosen[SCHEDULE], plain[SCHEDULE])
    with torch.no_grad():
        own = critic({key: torch.from_numpy(chosen[key]) for key in (STATE, SCHEDULE)})
    np.testing.assert_allclose(values(chosen), own.numpy(), rtol=1e-6)
    schedule_by(world, None, best=True)  # without a critic nothing changes
    np.testing.assert_array_equal(world.reset(seeds=np.arange(20))[SCHEDULE], chosen[SCHEDULE])


def test_copies_of_the_world_are_refused(critic):
    world = ScheduledWorld(LineWorld(1, 10), FORMULA)
    require_own_schedules(world, critic, FinetuneConfig(), on_workers=False)
    copies = FinetuneConfig(shards=2, groups=2)
    require_own_schedules(LineWorld(1), critic, copies, on_workers=True)
    require_own_schedules(ScheduledWorld(LineWorld(1, 10), FORMULA, by_value=False), critic, copies, on_workers=True)
    require_own_schedules(world, None, copies, on_workers=True)
    with pytest.raises(ConfigError, match=r"finetune\.shards=2"):
        require_own_schedules(world, critic, copies, on_workers=False)
    with pytest.raises(ConfigError, match=r"finetune\.staleness=1"):
        require_own_schedules(world, critic, FinetuneConfig(staleness=1), on_workers=False)
    with pytest.raises(ConfigError, match=r"set workers\.count=1"):
        require_own_schedules(world, critic, FinetuneConfig(), on_workers=True)


@pytest.mark.long
def test_a_formula_is_learned_by_the_verbs(tmp_path: Path):
    formula = "F[0.5,1.5](tip_x > 0.05) & F[1,3](tip_x < 0) & G[0,3](abs(tip_y) < 0.5)"
    shared = ["world=reach_planar", f"world.options.stl='{formula}'", "run.threads=1", f"run.root={tmp_path}"]
    assert main(["collect", *shared, "collect.episodes=12"]) == 0
    small = ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2", "train.fit.steps=10"]
    assert main(["train", *shared, *small, "train.evaluate_episodes=4"]) == 0
    tuning = ["finetune.algorithm=ppo", "finetune.iterations=2", "finetune.num_envs=8", "finetune.rollout_length=4"]
    tuning += ["finetune.evaluate_episodes=8", "finetune.videos=0", "finetune.critic_width=16"]
    assert main(["finetune", *shared, *tuning]) == 0
    records = (tmp_path / "finetune/reach_planar/0/metrics.jsonl").read_text().splitlines()
    assert len([line for line in map(json.loads, records) if "iteration" in line]) >= 2
    run = tmp_path / "finetune/reach_planar/0"
    # Without a critic that learns, schedules stay uniform, also of copies.
    policy = f"finetune.policy={tmp_path}/train/reach_planar/0/checkpoint"
    groups = [*tuning[1:2], "finetune.algorithm=grpo", "finetune.groups=2", "finetune.group_size=2", *tuning[4:]]
    assert main(["finetune", *shared, *groups, "finetune.shards=2", "run.name=groups", policy]) == 0
    assert (run / "critic").is_dir() and not (tmp_path / "finetune/groups/0/critic").exists()
    by_critic = f"world.options.schedules={run}/critic"
    for name, settings in (("uniform", []), ("critic", [by_critic])):
        judged = ["evaluate", str(run / "checkpoint"), *shared, *settings, "evaluate.episodes=4", "evaluate.videos=0"]
        assert main([*judged, f"run.name={name}"]) == 0


@pytest.mark.checks("TGPO-STL")
def test_a_saved_critic_chooses_as_before(critic, tmp_path: Path):
    world = ScheduledWorld(LineWorld(20, 10), FORMULA)
    save_critic(tmp_path / "critic", critic, world)
    save_critic(tmp_path / "none", critic, LineWorld(1))
    assert not (tmp_path / "none").exists()
    loaded = load_critic(tmp_path / "critic", world.spec)
    observation = world.reset(seeds=np.arange(20))
    np.testing.assert_array_equal(values_of(loaded)(observation), values_of(critic)(observation))
    other = ScheduledWorld(LineWorld(1, 10), f"{FORMULA} & F[2,3](x > 0)")
    with pytest.raises(CheckpointError):
        load_critic(tmp_path / "critic", other.spec)
