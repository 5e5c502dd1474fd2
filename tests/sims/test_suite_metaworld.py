"""Meta-World through the same protocol, its scripted experts included."""

import importlib

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.testing.world import check_world
from sims.registry import make_world
from sims.suites.metaworld_suite import instruction, metaworld_expert

pytestmark = pytest.mark.long


@pytest.fixture
def metaworld():
    return pytest.importorskip("metaworld")


@pytest.mark.parametrize("task", ["push-v3", pytest.param("drawer-open-v3", marks=pytest.mark.slow)])
def test_tasks_keep_every_promise(metaworld, task):
    check_world(lambda batch: make_world(f"metaworld/{task}", batch, history=2, horizon=8), batch_size=3, chunk=3)


@pytest.mark.parametrize("task", ["push-v3", "door-open-v3"])
def test_the_expert_succeeds_and_progress_never_punishes_finishing(metaworld, task):
    world = make_world(f"metaworld/{task}", 8)
    expert = metaworld_expert(task, world.spec)
    observation = world.reset(seeds=np.arange(8))
    goals = observation["observation.environment_state"][:, -1, -3:]
    assert len(np.unique(goals, axis=0)) == 8
    expert.reset()
    terms = {name: np.zeros(8) for name in world.spec.rewards}
    for _ in range(150):
        step = world.step(expert.act(observation)[:, None])
        observation = step.observation
        for name, reward in step.rewards.items():
            terms[name] += reward[:, 0]
        if step.ended.all():
            break
    assert step.success.mean() >= 0.8 and tuple(terms) == ("progress", "success")
    assert (terms["success"] == step.success).all()
    assert (terms["progress"][step.success] > 1.0).all() and (terms["progress"] <= 2.0 + 1e-6).all()
    world.close()


def test_without_acting_nothing_is_gained(metaworld):
    world = make_world("metaworld/push-v3", 2, horizon=30, success_key="success")
    world.reset(seeds=[1, 2])
    step = world.step(np.zeros((2, 30, 4)))
    assert (
        step.truncated.all() and not step.success.any() and (np.abs(step.rewards["progress"].sum(axis=1)) < 0.1).all()
    )
    world.close()


def test_the_expert_reads_the_numbers_meta_world_wrote(metaworld):
    from sims.suites.metaworld_environment import OBJECTS, ROBOT, joined

    flat = np.arange(39.0)[None] + np.array([[0.0], [100.0]])
    robot, objects = (np.concatenate([flat[:, part] for part in parts], axis=1) for parts in (ROBOT, OBJECTS))
    assert np.array_equal(joined(robot, objects), flat)


def test_instructions_are_sentences():
    assert instruction("push-v3") == "push the puck to the goal"
    assert instruction("drawer-open-v3") == "open the drawer"
    assert instruction("handle-pull-side-v3") == "pull the handle (side)"


def test_unknown_tasks_and_a_missing_extra_are_told(metaworld, monkeypatch):
    with pytest.raises(ConfigError, match="Did you mean 'push-v3'"):
        make_world("metaworld/push-v2", 1)
    with pytest.raises(ConfigError, match="Did you mean 'workers'"):
        make_world("metaworld/push-v3", 1, worker=1)
    with pytest.raises(ConfigError, match="Unknown option 'env_options'"):
        make_world("metaworld/push-v3", 1, env_options={"render_mode": "human"})
    real = importlib.import_module

    def missing(name, package=None):
        if name.startswith("metaworld"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"robopolicy\[metaworld\]"):
        make_world("metaworld/push-v3", 1)
