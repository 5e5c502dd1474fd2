"""Adjoint matching: what a flow becomes is the tilted distribution, known in closed form for Gaussian data."""

import copy
from typing import Any

import pytest
import torch
from offline_toys import ACTION, FIELDS, distance, imitated_policy, lesson
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK, Field
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.network import steps_of
from robopolicy.training.offline.configuration import AdjointMatchingConfig
from robopolicy.training.offline.gradients import (
    AdjointMatching,
    adjoint_gains,
    draw_chain,
    lean_adjoints,
    matching_loss,
    memoryless,
    require_flow,
)
from robopolicy.training.offline.rounds import improve_in_rounds

STEPS = 10
FLOW = DenoisingPolicyConfig(
    kind=PolicyKind.FLOW,
    chunk=1,
    prediction_steps=1,
    sampling_steps=STEPS,
    clip=None,
    action_normalization=NormalizationMode.IDENTITY,
)


class GaussianFlow(nn.Module):
    """The exact velocity of a flow to N(0, std^2), noise - data given x, and a line of its own at each time."""

    def __init__(self, std: float):
        super().__init__()
        self.std = std
        self.line = nn.Parameter(torch.zeros(STEPS + 1, 2))

    def encode(self, observation: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {"condition": observation["observation.state"][:, -1]}

    def denoise(self, x: Tensor, time: Tensor, condition: Any) -> Tensor:
        slope, offset = self.line[(time * STEPS).round().long()].unbind(-1)
        share = (time - (1 - time) * self.std**2) / (time.square() + (1 - time).square() * self.std**2)
        return (share + slope)[:, None, None] * x + offset[:, None, None]

    def encoder_parameters(self) -> list[nn.Parameter]:
        return []


def gaussian(std: float) -> DenoisingPolicy:
    return DenoisingPolicy(FLOW, FIELDS, Field((1,)), fps=10.0, network=GaussianFlow(std))


def observation(rows: int) -> dict[str, Any]:
    return {"observation.state": torch.zeros(rows, 1, 1), TASK: [""] * rows}


def tilted(std: float, slope, strength: float) -> tuple[Tensor, Tensor]:
    """Actions [4096] of a Gaussian flow, and of what adjoint matching makes of it, from the same noise."""
    base, policy = gaussian(std), gaussian(std)
    draws, optimiser = torch.Generator().manual_seed(0), torch.optim.Adam(policy.parameters(), 0.05)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        loss, _ = matching_loss(policy, base, observation(64), slope, strength, draws)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    noise = torch.randn(4096, 1, 1, generator=draws)
    with torch.no_grad():
        ends = [each.trajectory(observation(4096), noise)[:, -1].flatten() for each in (base, policy)]
    return ends[0], ends[1]


@pytest.mark.long
@pytest.mark.checks("QAM", "Adjoint matching")
@pytest.mark.parametrize("std", [0.3, 1.0])
def test_gaussian_data_under_a_linear_value_move_by_strength_times_variance_times_slope(std):
    before, after = tilted(std, lambda clean: torch.full_like(clean, 0.7), 1.5)
    assert float((after - before).mean()) == pytest.approx(1.5 * std**2 * 0.7, rel=0.03)
    assert float(after.std() / before.std()) == pytest.approx(1.0, rel=0.03)


@pytest.mark.long
@pytest.mark.checks("QAM", "Adjoint matching")
def test_gaussian_data_under_a_quadratic_value_become_the_tilted_gaussian():
    """Q = -(a - 1)^2 / 2 with strength 1 and N(0, 1): the product of two unit Gaussians, N(1/2, 1/2)."""
    before, after = tilted(1.0, lambda clean: 1 - clean, 1.0)
    assert float((after - before).mean()) == pytest.approx(0.5, abs=0.05)
    assert float(after.var() / before.var()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.checks("QAM", "Adjoint matching")
def test_lean_adjoints_are_the_gradient_of_the_end_along_the_base_with_the_same_noise():
    torch.manual_seed(0)
    config = DenoisingPolicyConfig(kind=PolicyKind.FLOW, chunk=2, prediction_steps=2, sampling_steps=4, width=16)
    base = DenoisingPolicy(config, FIELDS, ACTION, fps=10.0).requires_grad_(False)
    sampler, condition = memoryless(4, 1.0), base.encode(observation(3))
    steps = steps_of(base.network, base.schedule.times, condition)
    noise = torch.randn(5, 3, 2, 1)
    chain = draw_chain(sampler, steps, noise)
    worth = lambda clean: (clean - 0.2).square().sum() + clean.prod(1).sum()  # noqa: E731
    end = chain[:, -1].clone().requires_grad_()
    adjoints = lean_adjoints(sampler, steps, chain, torch.autograd.grad(worth(end), end)[0])
    assert adjoints.shape == (3, 4, 2, 1)
    for begin in range(1, 4):
        x = start = chain[:, begin].clone().requires_grad_()
        for index in range(begin, 4):
            x = sampler.transition(x, steps.one(x, index), index).sample(noise[index + 1])
        assert torch.allclose(x, chain[:, -1], atol=1e-6)
        assert torch.allclose(adjoints[:, begin], torch.autograd.grad(worth(x), start)[0], atol=1e-5)
    assert torch.equal(adjoints[:, 0], adjoints[:, 1])


@pytest.mark.checks("QAM", "Adjoint matching")
def test_the_memoryless_sampler_keeps_the_flows_marginals_and_forgets_its_noise():
    sampler = memoryless(5)
    assert torch.allclose(sampler.times, torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2]))
    for index, time in enumerate(sampler.times.tolist()):
        after, (clean, kept, std) = time - 0.2, sampler.table[index, 2:].tolist()
        assert clean + kept * (1 - time) == pytest.approx(1 - after, abs=1e-6)  # of data 1, x_t has mean 1 - t
        assert (kept * time) ** 2 + std**2 == pytest.approx(after**2, abs=1e-6)
    assert float(sampler.table[0, 3]) == 0.0 and float(sampler.table[-1, 4]) == 0.0
    assert adjoint_gains(sampler.times).tolist() == pytest.approx([0.64 / 0.2, 4.0, 1.5, 2 / 3, 0.25])


@pytest.fixture(scope="module")
def flow() -> DenoisingPolicy:
    return imitated_policy(PolicyKind.FLOW)


@pytest.mark.long
def test_a_candidate_does_what_the_critic_knows_to_be_better(flow, tmp_path):
    improver = AdjointMatching(
        AdjointMatchingConfig(steps=80, batch_size=64, learning_rate=3e-3, inverse_temperature=20.0)
    )
    policy = copy.deepcopy(flow)
    result = improve_in_rounds(policy, lesson(), improver, None, 1, run=RunFolder(tmp_path))
    assert result.accepted == 1 and result.records[0]["pull"] > 0
    assert distance(policy) < 0.5 * distance(flow)
    assert distance(load_policy(tmp_path / "checkpoint")) == pytest.approx(distance(policy), abs=1e-6)


def test_without_strength_the_flow_stays_as_it_is(flow):
    improver, policy = (
        AdjointMatching(AdjointMatchingConfig(steps=3, batch_size=16, inverse_temperature=0.0)),
        copy.deepcopy(flow),
    )
    improver.prepare(policy)
    figures = improver.improve(policy, lesson(), Generators(0), 1.0, "round 1")
    assert figures == {"loss": 0.0, "pull": 0.0} and distance(policy) == pytest.approx(distance(flow), abs=1e-4)


def test_what_is_no_flow_is_refused(flow):
    with pytest.raises(ConfigError, match="DenoisingPolicy with kind=diffusion is not"):
        require_flow(DenoisingPolicy(DenoisingPolicyConfig(width=8), FIELDS, ACTION, fps=10.0))
    with pytest.raises(ConfigError, match="Linear is not"):
        require_flow(nn.Linear(1, 1))  # type: ignore[arg-type]
    prepared = copy.deepcopy(flow)
    prepared.prepare_finetuning(2)
    with pytest.raises(ConfigError, match="a frozen base takes the first 1 steps"):
        require_flow(prepared)
    quick = DenoisingPolicyConfig(kind=PolicyKind.FLOW, sampling_steps=1, width=8)
    with pytest.raises(ConfigError, match="at least two denoising steps"):
        require_flow(DenoisingPolicy(quick, FIELDS, ACTION, fps=10.0))
