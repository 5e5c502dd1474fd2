"""Partial updates in training: values of earlier parts under the current weights, one part as ordinary PPO, resume."""

from dataclasses import replace

import pytest
import torch

from robopolicy.benchmarks.small_worlds import ACTION, DOORS, DoorsWorld
from robopolicy.core.policy import RECENT
from robopolicy.core.run import RunFolder
from robopolicy.core.trials import with_trials_of
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.memory import MemoryPolicy
from robopolicy.rl.critic import state_critic
from robopolicy.rl.experimental.replay import PartialUpdates
from robopolicy.training import experience
from robopolicy.training import finetune as training
from robopolicy.training.configuration import FinetuneConfig

CONFIG = FinetuneConfig(
    algorithm="ppo",
    iterations=2,
    rollout_length=4,
    epochs=2,
    minibatch=16,
    learning_rate=5e-3,
    critic_learning_rate=1e-2,
    critic_warmup=1,
    actor_warmup=1,
    discount=0.9,
    gae_lambda=0.8,
    target_kl=None,
    evaluate_every=0,
)


def trained(config, run=None):
    """Weights of policy and critic after PPO in trials of two episodes, longer than a part."""
    raw = NormalizationMode.IDENTITY
    memory = MemoryPolicyConfig(history=8, bins=DOORS, width=16, state_normalization=raw, action_normalization=raw)
    world = with_trials_of({"trial_episodes": 2}, DoorsWorld(8, 8))
    policy = MemoryPolicy(memory, world.spec.observation, ACTION, fps=10.0)
    torch.manual_seed(0)
    critic = state_critic(world.spec.observation, 8, width=16)
    training.finetune(policy, critic, world, config, run, seed=0)
    return [*policy.parameters(), *critic.parameters()]


def in_parts(count, **changes):
    return replace(CONFIG, replay="partial_updates", options={"partial_updates": {"parts": count}}, **changes)


@pytest.mark.checks("replay/partial_updates", "ReLIC")
@pytest.mark.long
def test_one_part_is_ordinary_ppo_bitwise():
    ordinary, single = trained(CONFIG), trained(in_parts(1))
    assert all(torch.equal(first, second) for first, second in zip(ordinary, single, strict=True))
    assert not all(torch.equal(first, second) for first, second in zip(ordinary, trained(in_parts(2)), strict=True))


@pytest.mark.checks("replay/partial_updates", "ReLIC")
def test_advantages_of_earlier_parts_are_those_of_the_weights_after_their_update(monkeypatch):
    """By hand: delta = r / scale + .9 V' - V and A = delta + .72 A', with the critic as it is by then."""
    calls, mixed, plain, mix = [], [], experience.with_values, PartialUpdates.mix

    def with_values(rollouts, critic, scale, *arguments, **options):
        result = plain(rollouts, critic, scale, *arguments, **options)
        inputs = [{**each, "task": rollouts.task} for each in (rollouts.observation, rollouts.next_observation)]
        with torch.no_grad():
            value, following = (
                torch.stack([critic({key: part[:, column] for key, part in each.items()}) for column in range(4)], 1)
                for each in inputs
            )
        calls.append((options["again"], rollouts, value, following, float(scale.scale)))
        return result

    def mix_too(self, rollouts, context):
        mixed.append((rollouts, mix(self, rollouts, context)))
        return mixed[-1][1]

    monkeypatch.setattr(training, "with_values", with_values)
    monkeypatch.setattr(PartialUpdates, "mix", mix_too)
    trained(in_parts(2))
    (first, part), (_, both) = mixed
    assert [again for again, *_ in calls] == [False, False, True] and both.shape == (16, 4)
    assert (part.latents[RECENT] == torch.arange(1, 5)).all() and (both.latents[RECENT] == 8).all()
    _, rollouts, value, following, scale = calls[-1]
    reward = sum(rollouts.rewards.values())[..., 0] / scale
    expected, running = torch.zeros(16, 4), torch.zeros(16)
    for column in (3, 2, 1, 0):
        going_on = (~rollouts.ended[:, column]).float()
        after = following[:, column] * (~rollouts.terminated[:, column]).float()
        running = reward[:, column] + 0.9 * after - value[:, column] + 0.72 * going_on * running
        expected[:, column] = running
    torch.testing.assert_close(both.extras["advantage_gae"], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.extras["value_target"], expected + value, atol=1e-5, rtol=1e-5)
    assert (both.policy_version[8:] == 0).all() and torch.equal(both.actions[8:], first.actions)
    assert (both.extras["advantage_gae"][8:] - first.extras["advantage_gae"]).abs().min() > 1e-4
    scored = expected[rollouts.alive]
    standardised = (expected - scored.mean()) / (scored.std(unbiased=False) + 1e-8)
    torch.testing.assert_close(both.extras["advantage"][..., 0], standardised, atol=1e-4, rtol=1e-4)


@pytest.mark.checks("replay/partial_updates", "ReLIC")
@pytest.mark.long
def test_a_run_that_is_broken_off_between_two_parts_ends_in_the_same_place(tmp_path, monkeypatch):
    config, mix = in_parts(2, iterations=4, checkpoint_every=3), PartialUpdates.mix
    unbroken, kept = trained(config, RunFolder(tmp_path / "unbroken")), []

    def broken(self, rollouts, context):
        kept.append(len(self.kept))
        if context.iteration == 3:
            raise KeyboardInterrupt
        return mix(self, rollouts, context)

    monkeypatch.setattr(PartialUpdates, "mix", broken)
    with pytest.raises(KeyboardInterrupt):
        trained(config, RunFolder(tmp_path / "broken"))
    assert kept == [0, 1, 0, 1]  # the checkpoint has a part that waits for the next
    monkeypatch.setattr(PartialUpdates, "mix", mix)
    resumed = trained(config, RunFolder(tmp_path / "broken"))
    assert all(torch.equal(first, second) for first, second in zip(unbroken, resumed, strict=True))
