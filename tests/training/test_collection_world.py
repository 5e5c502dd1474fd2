"""finetune.world_options: collection in another version of the simulator than the one that evaluates."""

import dataclasses

import numpy as np
import pytest
from tiny_runs import TINY

from robopolicy.building.worlds import build_world, collection_world
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.run import RunFolder
from robopolicy.core.world import Snapshots

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
