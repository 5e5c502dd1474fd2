"""Models beside the policy: their losses and what they add, against autograd of what the papers state."""

from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts
from test_models import LinearPolicy, outcomes, tools
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.rollouts import tensor_of
from robopolicy.core.spec import STATE
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.judges import LearningTeacher
from robopolicy.rl.experimental.side_models import Oprl, Progress
from robopolicy.rl.side_models import Prime


def context() -> Context:
    return Context(torch.Generator().manual_seed(0))


def log_ratio(rollouts, weight: Tensor) -> Tensor:
    """log phi of every step [B, T, K], 0 on padding, which is linear in the weight: of a ratio, in the difference."""
    state = rollouts.observation[STATE][:, :, 0, None].expand(*rollouts.mask.shape, -1)
    inputs = torch.cat([state, rollouts.latents["x"][..., None]], -1)
    return torch.where(rollouts.alive[..., None], inputs @ weight, 0.0)


def first_step(loss: Tensor, weight: Tensor, rate: float) -> Tensor:
    """What one step of Adam makes of the weight, the gradient's norm bounded by 1."""
    other = nn.Parameter(weight.detach().clone())
    optimiser = torch.optim.Adam([other], lr=rate)
    (other.grad,) = torch.autograd.grad(loss, weight)
    nn.utils.clip_grad_norm_([other], 1.0)
    optimiser.step()
    return other.detach()


@pytest.mark.checks("models/prime")
def test_prime_learns_outcomes_from_summed_log_ratios_and_pays_each_of_them():
    rollouts = make_rollouts([2, 3, 1, 2, 2, 1], [0, 0, 0, 1, 1, 1], [1.0, -1.0, 1.0, -1.0, -2.0, -3.0])
    policy = LinearPolicy()
    start = torch.tensor([0.3, -0.2, 0.5, 0.7])
    policy.weight.data.copy_(start)
    model = Prime(tools(policy), beta=0.4, rate=0.1, epochs=1, minibatch=64)
    process_rewards = model.annotate(rollouts, context()).extras["process"]
    weight = start.clone().requires_grad_()
    # Of the second start all episodes failed, with different dense rewards: PRIME filters it out.
    logits = 0.4 * log_ratio(rollouts, weight).sum((1, 2))[:3]
    loss = functional.binary_cross_entropy_with_logits(logits, torch.tensor([1.0, 0.0, 1.0]))
    learned = first_step(loss, weight, 0.1)
    assert not torch.equal(learned, start)
    torch.testing.assert_close(process_rewards, 0.4 * log_ratio(rollouts, learned), atol=1e-5, rtol=1e-4)


@pytest.mark.checks("models/prime", "models/oprl", "models/learning_teacher")
@pytest.mark.parametrize("kind", [Prime, Oprl, LearningTeacher])
def test_steps_without_noise_are_no_part_of_an_implicit_reward_and_a_copied_prefix_is(kind):
    """The second step of row 0's first chunk was no choice; row 1 shares that chunk, which row 0 played."""
    rollouts = make_rollouts([2, 2], [0, 0], [1.0, -1.0], parent=[-1, 0], branch_decision=[-1, 1])
    rollouts.mask[0, 0, 1] = False
    rollouts.mask[1, 0] = False
    for value in (*rollouts.latents.values(), *rollouts.observation.values()):
        value[1, 0] = value[0, 0]
    policy = LinearPolicy()
    policy.weight.data.copy_(torch.tensor([0.3, -0.2, 0.5, 0.7]))
    model = kind(tools(policy), beta=0.4, rate=0.1, epochs=1, minibatch=64)
    process = model.annotate(rollouts, context()).extras["process"]
    sampled = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [1, 1]]]).bool()
    assert torch.equal(process != 0, sampled) and torch.equal(process[0, 0], process[1, 0])
    moved = process[0, 1].clone()
    rollouts.latents["x"][0, 0, 1] += 50.0  # what it was is of no consequence for what is learned
    again = kind(tools(policy), beta=0.4, rate=0.1, epochs=1, minibatch=64)
    torch.testing.assert_close(again.annotate(rollouts, context()).extras["process"][0, 1], moved)


@pytest.mark.checks("models/oprl")
def test_oprl_learns_pairs_of_a_start_by_the_loss_of_dpo():
    returns = [2.0, 0.0, 2.0, 1.0, 0.0, 5.0]
    rollouts = make_rollouts([2, 3, 1, 2, 2, 1], [0, 1, 0, 1, 0, 2], returns)
    policy = LinearPolicy()
    start = torch.tensor([0.3, -0.2, 0.5, 0.7])
    policy.weight.data.copy_(start)
    model = Oprl(tools(policy), beta=0.4, rate=0.1, epochs=1, minibatch=64)
    moved = torch.tensor([0.1, 0.4, -0.3, 0.2])  # what the policy has learned since: the ratio is to this
    policy.weight.data.copy_(moved)
    process_rewards = model.annotate(rollouts, context()).extras["process"]
    weight = start.clone().requires_grad_()
    total = 0.4 * log_ratio(rollouts, weight - moved).sum((1, 2))
    pairs = [(0, 4), (2, 4), (3, 1)]  # ties make no pair, nor do strangers
    loss = torch.stack([-functional.logsigmoid(total[better] - total[worse]) for better, worse in pairs]).mean()
    learned = first_step(loss, weight, 0.1)
    torch.testing.assert_close(process_rewards, 0.4 * log_ratio(rollouts, learned - moved), atol=1e-5, rtol=1e-4)


@pytest.mark.checks("models/oprl", "models/prime")
def test_losses_of_implicit_rewards_by_hand():
    rollouts = make_rollouts([1, 1, 1], [0, 0, 1], [1.0, -1.0, -1.0])
    logits = torch.tensor([0.5, -0.3, 0.2])
    softplus = functional.softplus
    prime = Prime(tools(LinearPolicy())).loss(logits, rollouts)
    assert float(prime) == pytest.approx(float(softplus(torch.tensor([-0.5, -0.3, 0.2])).mean()))
    oprl = Oprl(tools(LinearPolicy())).loss(logits, rollouts)
    assert float(oprl) == pytest.approx(float(softplus(torch.tensor(-0.8))))


@pytest.mark.checks("models/progress")
def test_progress_steps_down_the_square_of_what_contributions_lack():
    rollouts = outcomes(8)
    valid = rollouts.valid.clone()
    valid[0, 2] = False  # an episode of two decisions
    valid[1, 1, 1] = False  # a decision of one control step
    rollouts = replace(rollouts, valid=valid, mask=rollouts.mask & valid.any(-1)[..., None])
    torch.manual_seed(0)
    model = Progress(tools(LinearPolicy()), alpha=0.5, rate=1e-2, epochs=1, minibatch=8)
    model.network.fit(rollouts)
    before = [weight.detach().clone() for weight in model.weights]
    observation, after = tensor_of(rollouts.observation, STATE), tensor_of(rollouts.next_observation, STATE)

    def contributions() -> Tensor:
        following = model.network.features({STATE: after.flatten(0, 1)})
        contribution_values = model.network({STATE: observation.flatten(0, 1)}, following).reshape(rollouts.shape)
        return torch.where(rollouts.alive, contribution_values, 0.0)

    loss = (contributions().sum(1) - rollouts.row_success.float()).square().mean()
    gradients = torch.autograd.grad(loss, model.weights)
    paid = model.annotate(rollouts, context()).rewards
    # Adam's first step goes by the rate against the sign of every gradient that is not tiny.
    for weight, old, gradient in zip(model.weights, before, gradients, strict=True):
        telling = gradient.abs() > 1e-4
        assert bool(telling.any())
        torch.testing.assert_close((weight - old)[telling], -1e-2 * gradient.sign()[telling], atol=2e-5, rtol=1e-2)
    with torch.no_grad():
        expected = 0.5 * contributions()
    assert set(paid) == {"progress"}
    torch.testing.assert_close(paid["progress"].sum(-1), expected, atol=1e-6, rtol=1e-5)
    last = (valid.sum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(paid["progress"].gather(-1, last[..., None]).squeeze(-1), expected)
