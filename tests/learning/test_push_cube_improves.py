"""The main job in small: a clone of push-cube succeeds far more often once it is fine-tuned, in the simulator or in a
world model, or looks ahead in one.
"""

import copy

import pytest
import torch
from cube_clone import cloned_policy, success

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators, episode_seeds
from robopolicy.data.record import record
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig, FitConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.fit import fit_stages
from sims.experts import NOISE_LEVELS, NoisyController
from sims.registry import load_task, make_world
from worldmodels.configuration import EnsembleConfig, PlanConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import recorded_starts
from worldmodels.planning import PlannedPolicy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone():
    policy = cloned_policy()
    return policy, success(policy)


@pytest.fixture(scope="module")
def recorded():
    """Disturbed experts, at every level of noise."""
    world, parts = make_world("push_cube", 64), []
    for level in ("low", "medium", "high", "random"):
        actor = NoisyController(load_task("push_cube").expert(), NOISE_LEVELS[level], 0, world.spec.action)
        parts.append(record(world, actor, episode_seeds(0, f"recorded/{level}", 192)))
    return Episodes.concatenate(parts)


@pytest.fixture(scope="module")
def model(recorded):
    spec = make_world("push_cube", 1).spec
    model = EnsembleModel.build(EnsembleConfig(), spec, recorded, 0)
    fit_stages(model, recorded, FitConfig(steps=1200, learning_rate=3e-3), Generators(0))
    model.calibrate(recorded)
    return model.eval()


def tuned(policy, world):
    policy = copy.deepcopy(policy)
    policy.prepare_finetuning()
    torch.manual_seed(0)
    finetune(policy, state_critic(world.spec.observation, 1), world, FinetuneConfig(iterations=20, evaluate_every=0))
    return success(policy)


def test_fine_tuning_in_the_simulator(clone):
    policy, before = clone
    assert tuned(policy, make_world("push_cube", 256)) > before + 0.2


def test_fine_tuning_in_a_world_model(clone, model, recorded):
    policy, before = clone
    inside = ImaginedWorld(model, recorded_starts(recorded, steps=recorded.starts), 256)
    assert tuned(policy, inside) > before + 0.2


def test_looking_ahead_without_any_training(clone, model):
    policy, before = clone
    assert success(PlannedPolicy(policy, model, PlanConfig(candidates=8, horizon=20))) > before + 0.2
