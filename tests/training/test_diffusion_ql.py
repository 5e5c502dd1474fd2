"""Diffusion-QL: the critic is climbed through the very chain that the policy plays, all of it or its last step."""

import copy

import pytest
import torch
from offline_toys import BEST, FIELDS, Knows, distance, imitated_policy, lesson
from torch import nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK
from robopolicy.policies import load_policy
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.offline.configuration import DiffusionQlConfig, WeightedImitationConfig
from robopolicy.training.offline.gradients import DiffusionQl, scaled_ascent
from robopolicy.training.offline.improvers import WeightedImitation
from robopolicy.training.offline.rounds import improve_in_rounds


@pytest.fixture(scope="module")
def imitated() -> DenoisingPolicy:
    return imitated_policy()


def observation(rows=8):
    states = torch.rand(rows, 1, 1, generator=torch.Generator().manual_seed(3))
    return {"observation.state": states, TASK: [""] * rows}


def unrolled(policy: DenoisingPolicy, noise: torch.Tensor, free: int) -> torch.Tensor:
    """The chain by hand, its first `free` steps without gradient; clean latents."""
    condition, x = policy.encode(observation(len(noise))), noise
    for step, time in enumerate(policy.schedule.times):
        frozen = policy.base is not None and step < policy.first_step
        network = policy.base if frozen else policy.network
        assert network is not None
        prediction = network.denoise(x, time.expand(len(x)), condition)
        x = policy.schedule.transition(x, prediction, step, deterministic=True).mean
        x = x.detach() if step < free else x
    return x


@pytest.mark.checks("Diffusion-QL")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("through", ["all", "last"])
def test_the_gradient_is_that_of_the_chain_unrolled_by_hand(imitated, through, prepared):
    policy = copy.deepcopy(imitated)
    if prepared:  # the first step is then a frozen base's
        policy.prepare_finetuning(2)
        with torch.no_grad():
            next(iter(policy.network.parameters())).add_(0.05)
    noise, weights = torch.randn(8, 2, 1, generator=torch.Generator().manual_seed(0)), policy.trainable_parameters()
    action = policy.trajectory(observation(), noise, None if through == "all" else 1)[:, -1]
    expected = unrolled(policy, noise, 0 if through == "all" else policy.schedule.steps - 1)
    assert torch.allclose(action, expected, atol=1e-6)
    one = torch.autograd.grad(Knows().action_values(None, action.flatten(1)).amin(0).sum(), weights)
    other = torch.autograd.grad(Knows().action_values(None, expected.flatten(1)).amin(0).sum(), weights)
    assert max(float(grad.abs().max()) for grad in other) > 1e-3
    for mine, by_hand in zip(one, other, strict=True):
        assert torch.allclose(mine, by_hand, atol=1e-5)
    with torch.no_grad():
        played = policy.act(observation(), torch.Generator().manual_seed(0), deterministic=True).actions
        assert torch.allclose(played, policy.to_actions(action), atol=1e-6)


@pytest.mark.checks("Diffusion-QL")
def test_values_are_climbed_on_their_own_scale():
    q = torch.tensor([1.0, -3.0], requires_grad=True)
    assert scaled_ascent(q, 2.0).item() == pytest.approx(1.0)  # -2 * (-1) / 2
    assert torch.allclose(torch.autograd.grad(scaled_ascent(q, 2.0), q)[0], torch.tensor([-0.5, -0.5]))
    assert scaled_ascent(100 * q, 2.0).item() == pytest.approx(1.0)


def test_without_the_critic_it_is_plain_imitation(imitated):
    mine, plain = copy.deepcopy(imitated), copy.deepcopy(imitated)
    DiffusionQl(DiffusionQlConfig(steps=5, eta=0.0, learning_rate=3e-4)).improve(
        mine, lesson(), Generators(0), 1.0, "round 1"
    )
    imitation = WeightedImitation(WeightedImitationConfig(steps=5, temperature=0.0, learning_rate=3e-4))
    imitation.improve(plain, lesson(), Generators(0), 1.0, "round 1")
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("through", ["all", "last"])
def test_a_candidate_does_what_the_critic_knows_to_be_better(imitated, through, tmp_path):
    improver = DiffusionQl(DiffusionQlConfig(steps=60, learning_rate=2e-3, through=through))
    policy = copy.deepcopy(imitated)
    result = improve_in_rounds(policy, lesson(), improver, None, 1, run=RunFolder(tmp_path))
    assert result.accepted == 1 and set(result.records[0]) >= {"loss", "q"}
    assert distance(policy) < 0.5 * distance(imitated)
    again = load_policy(tmp_path / "checkpoint")
    assert distance(again) == pytest.approx(distance(policy), abs=1e-6)


class Direct(nn.Module):
    """A policy without noise."""

    def act(self, observation, generator, *, deterministic=False):
        return Decision(torch.full((len(observation[next(iter(FIELDS))]), 2, 1), BEST))


def test_a_policy_without_a_chain_is_refused():
    with pytest.raises(ConfigError, match="Direct cannot act from given noise"):
        DiffusionQl(DiffusionQlConfig()).prepare(Direct())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eta at least 0"):
        DiffusionQlConfig(eta=-1.0)
