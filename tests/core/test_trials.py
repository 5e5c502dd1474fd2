"""Worlds in trials: the promises of a world, the scene that returns, and what the observation tells."""

import numpy as np
import pytest
import torch

from robopolicy.benchmarks.small_worlds import ACTION, DOORS, DoorsWorld
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import STATE
from robopolicy.core.trials import TRIAL, with_trials_of
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.memory import MemoryPolicy
from robopolicy.testing.world import check_world
from sims.registry import make_world


def doors(rows=2, episodes=2, history=8):
    return with_trials_of({"trial_episodes": episodes}, DoorsWorld(rows, history))


def opened(*numbers):
    """Actions [B, 1, 1] that open these doors."""
    return 2 * np.array(numbers, float)[:, None, None] / (DOORS - 1) - 1


@pytest.mark.checks("ReLIC")
def test_a_trial_by_hand():
    """Row 0 finds the door at once, and in the second episode too; row 1 never does: 3 + 1 + 3 steps."""
    world = doors()
    first = world.reset(seeds=[3, 3])
    assert (first[TRIAL] == [0, 0, 1]).all() and first[STATE].shape == (2, 8, 1)
    right = int(world.world.right[0])
    wrong = (right + 1) % DOORS
    step = world.step(opened(right, wrong))
    assert step.reward[:, 0].tolist() == [1, 0] and not step.ended.any() and not step.success.any()
    step = world.step(opened(wrong, wrong))  # row 0: the scene begins again, whatever is done
    assert step.valid.all() and step.reward[0, 0] == 0
    assert step.observation[TRIAL][0, -1].tolist() == [0, 0, 1]
    assert int(world.world.right[0]) == right
    step = world.step(opened(right, wrong))
    assert step.success.tolist() == [True, False] and step.terminated.tolist() == [True, False]
    window = step.observation[TRIAL][0]
    assert window[-3:, 1].tolist() == [1, 0, 1] and window[:, 2].tolist() == [1] * 5 + [0, 1, 0]
    for _ in range(3):
        step = world.step(opened(right, wrong))
        assert not step.ended[1] and not step.valid[0, 0]
    step = world.step(opened(right, wrong))
    assert step.terminated.tolist() == [True, True] and step.success.tolist() == [True, False]
    assert world.spec.horizon == 7


def test_success_is_that_of_the_last_episode():
    world = doors(1)
    world.reset(seeds=[3])
    right = int(world.world.right[0])
    world.step(opened(right))
    world.step(opened(right))
    for _ in range(3):
        step = world.step(opened((right + 1) % DOORS))
    assert step.terminated[0] and not step.success[0]


@pytest.mark.checks("ReLIC")
def test_cached_keys_and_values_last_for_a_trial_and_survive_its_snapshots():
    """Every decision's log-probabilities are those of the whole window; only new frames are computed for it."""
    world, raw = doors(rows=3), NormalizationMode.IDENTITY
    config = MemoryPolicyConfig(history=8, bins=DOORS, width=16, state_normalization=raw, action_normalization=raw)
    policy, computed = MemoryPolicy(config, world.spec.observation, ACTION, fps=10.0), list[int]()
    torch.nn.init.normal_(policy.head.weight)
    generator = torch.Generator().manual_seed(0)
    policy.memory.embed.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].shape[1]))

    def check(seen, expected):
        computed.clear()
        decision = policy.act(to_tensors(seen), generator)
        assert computed == [expected]
        logp = policy.log_prob(to_tensors(seen), decision.latents).logp
        torch.testing.assert_close(decision.logp, logp, atol=1e-5, rtol=0)
        assert policy.cache.count is not None
        return policy.cache.count.tolist()

    seen = world.reset(seeds=[3, 3, 3])
    right = int(world.world.right[0])
    wrong = (right + 1) % DOORS
    assert check(seen, 1) == [1, 1, 1]
    for number in range(2, 5):  # row 0 is right and goes on in its second episode, the others end their first
        seen = world.step(opened(right if number == 2 else wrong, wrong, wrong)).observation
        assert check(seen, 1) == [number] * 3
    saved = world.snapshot()
    seen = world.step(opened(wrong, wrong, wrong)).observation  # rows 1 and 2 begin their second episode
    assert seen[TRIAL][:, -1, 2].tolist() == [0, 1, 1]
    assert check(seen, 1) == [5, 5, 5]
    seen = world.reset([1], seeds=[4])  # another trial in row 1
    assert check(seen, 1) == [5, 1, 5]
    check(world.restore(saved), 3)  # row 1 is read again but for its first frame, which is that of any trial
    assert check(world.step(opened(right, right, wrong)).observation, 1) == [5, 5, 5]


def test_worlds_in_trials_keep_every_promise():
    check_world(lambda rows: make_world("reach_planar", rows, history=3, trial_episodes=2, horizon=2))
    check_world(lambda rows: make_world("reach_planar", rows, history=3, trial_episodes=2, latency_steps=1))


def test_wrong_numbers_and_cameras_are_refused():
    for number in (0, -1, 1.5, True, "two"):
        with pytest.raises(ConfigError, match="trial_episodes is"):
            doors(episodes=number)
    with pytest.raises(ConfigError, match="vectors"):
        make_world("reach_planar", 1, trial_episodes=2, cameras=("top",))
