"""finetune.world_options: collection in another version of the simulator than the one that evaluates."""

import dataclasses

import numpy as np
import pytest
from seeing_toys import SeeingWorld, denoising_policy
from tiny_runs import TINY

from robopolicy.building.worlds import build_world, collection_world
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.world import Snapshots
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

COARSE = "finetune.world_options.substeps=5"


def final_states(section):
    world = build_world(section, batch_size=4)
    assert isinstance(world, Snapshots)
    world.reset(seeds=np.arange(4))
    for action in np.random.default_rng(0).uniform(-1, 1, (3, 4, 6, 2)):
        world.step(action)
    return world.snapshot().arrays["state"]


def test_only_collection_has_the_options():
    config, plain = compose(["world=push_t", COARSE]), compose(["world=push_t"])
    assert config.world == plain.world
    assert final_states(config.world).tobytes() == final_states(plain.world).tobytes()
    coarse = final_states(collection_world(config.world, config.finetune))
    assert coarse.tobytes() == final_states(compose(["world=push_t", "world.options.substeps=5"]).world).tobytes()
    assert not np.array_equal(coarse, final_states(plain.world))


def test_options_of_the_world_are_kept_and_imagination_has_no_physics():
    config = compose(["world=push_t", "world.options.style=3", COARSE])
    assert collection_world(config.world, config.finetune).options == {"style": 3, "substeps": 5}
    imagined = dataclasses.replace(config.world, name="worldmodel")
    assert collection_world(imagined, config.finetune) is imagined


@pytest.mark.long
def test_a_run_collects_with_the_options_and_evaluates_without(root):
    small = [*TINY, f"run.root={root}", "finetune.iterations=1", "finetune.num_envs=8", "finetune.rollout_length=4"]
    small += ["finetune.evaluate_episodes=8", "finetune.evaluate_every=1", "finetune.videos=0"]
    records = {}
    for name, options in {"plain": [], "coarse": [COARSE]}.items():
        assert main(["finetune", *small, "run.inputs=reach_planar", f"run.name={name}", *options]) == 0
        records[name] = RunFolder(root / "finetune" / name / "0").metrics()
    base, first = ([records[name][index] for name in records] for index in (0, 1))
    evaluated = [{key: value for key, value in each.items() if not key.startswith("seconds")} for each in base]
    assert evaluated[0] == evaluated[1]
    assert first[0]["reward_per_decision"] != first[1]["reward_per_decision"]


class SeedsWorld(SeeingWorld):
    """Remembers the seeds that it was reset with."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        self.seeds: set[int] = set()

    def reset(self, rows=None, seeds=None, options=None):
        self.seeds |= set(np.asarray(seeds).tolist())
        return super().reset(rows, seeds, options)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_episodes_do_not_begin_where_demonstrations_of_the_same_seed_began(algorithm):
    """`collect` records from episode_seeds(seed, "collect/0"); a policy that imitated them is better there."""
    world = SeedsWorld(6)
    policy = denoising_policy(world)
    policy.prepare_finetuning()
    critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    sizes = {"iterations": 2, "rollout_length": 4, "groups": 2, "group_size": 3, "epochs": 1, "evaluate_every": 0}
    finetune(policy, critic, world, FinetuneConfig(algorithm=algorithm, **sizes), seed=4)
    recorded = {seed for number in range(3) for seed in episode_seeds(4, f"collect/{number}", 1000).tolist()}
    assert world.seeds and not world.seeds & recorded
