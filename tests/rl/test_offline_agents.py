"""Critics, actors and agents against closed forms, and the edge of reach where it must bite."""

import math

import pytest
import torch

from robopolicy.benchmarks.edge_of_reach import measure, point_problem
from robopolicy.core.errors import ConfigError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import Actor, Critics, Standardiser
from robopolicy.rl.offline.configuration import IqlConfig, SacConfig, Td3BcConfig
from robopolicy.rl.offline.decisions import edge_of_reach, value_bound
from robopolicy.rl.offline.iql import Iql, expectile_loss
from robopolicy.rl.offline.sac import Sac, gradient_agreement
from robopolicy.rl.offline.td3 import Td3Bc
from robopolicy.training.imagined_values import ImaginedValuesConfig


@pytest.fixture(autouse=True)
def same_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(count=64, terminated=False, seed=0):
    draws = generator(seed)
    state, action = torch.randn(count, 3, generator=draws), torch.rand(count, 2, generator=draws) * 2 - 1
    after, reward = torch.randn(count, 3, generator=draws), torch.randn(count, generator=draws)
    return Transitions(state, action, reward, after, torch.full((count,), terminated))


@torch.no_grad()
def test_sampled_densities_are_the_scored_ones_and_integrate_to_one():
    actor = Actor(3, 1, 16, 1)
    actor.members.weights[-1].mul_(0.1)  # wider Gaussians pile up at the edges, where no grid is fine enough
    state = torch.randn(200, 3, generator=generator())
    action, density = actor.sample(state, generator())
    inside = (action.abs() < 0.99)[:, 0]
    assert torch.allclose(actor.log_prob(state, action)[inside], density[inside], atol=1e-3)
    grid = torch.linspace(-1 + 1e-4, 1 - 1e-4, 20001)[:, None]
    mass = torch.trapezoid(actor.log_prob(state[:1].expand(len(grid), -1), grid).exp(), grid[:, 0])
    assert float(mass) == pytest.approx(1.0, abs=0.02)


@pytest.mark.checks("RAVL")
def test_agreement_is_the_number_of_critics_where_all_are_one_and_less_where_not():
    critics = Critics(4, 3, 2, 16, 2)
    data = batch()
    with torch.no_grad():
        for weights in (*critics.members.weights, *critics.members.biases):
            weights.copy_(weights[:1].expand_as(weights))
    assert float(gradient_agreement(critics, data.state, data.action).detach()) == pytest.approx(4.0, abs=1e-4)
    different = Critics(4, 3, 2, 16, 2)
    assert float(gradient_agreement(different, data.state, data.action).detach()) < 2.0


@pytest.mark.checks("RAVL")
def test_targets_by_hand():
    agent = Sac(SacConfig(critics=3, width=16, depth=1, temperature=0.5), 3, 2, 0)
    data = batch()
    action, density = agent.actor.sample(data.next_state, generator(1))
    smallest = agent.slow(data.next_state, action).amin(0)
    expected = data.reward + 0.99 * (smallest - 0.5 * density)
    assert torch.allclose(agent.target(data, generator(1)), expected, atol=1e-6)
    assert torch.equal(agent.target(batch(terminated=True), generator(1)), data.reward)


@pytest.mark.slow
def test_it_learns_a_bandit():
    agent = Sac(SacConfig(critics=2, diversity=0.0, width=32, depth=2, learning_rate=3e-3, temperature=0.01), 1, 1, 0)
    draws = generator()
    for _ in range(600):
        action = agent.act(torch.zeros(64, 1), draws)
        reward = -4 * (action[:, 0] - 0.4).square()
        data = Transitions(torch.zeros(64, 1), action, reward, torch.zeros(64, 1), torch.ones(64, dtype=torch.bool))
        agent.update(data, draws)
    assert float(agent.act(torch.zeros(1, 1))) == pytest.approx(0.4, abs=0.1)


def test_edge_transitions_are_those_that_lead_where_none_begins():
    state = torch.tensor([[0.0], [1.0], [2.0], [0.0]])
    after = torch.tensor([[1.0], [2.0], [3.0], [9.0]])
    over = torch.tensor([False, False, False, True])
    assert edge_of_reach(Transitions(state, state, state[:, 0], after, over)).tolist() == [False, False, True, False]
    # Rounding errors of a constant element make no other state.
    state, after = (torch.cat([each, torch.full_like(each, 5.0)], 1) for each in (state, after))
    after[:, 1] += 1e-6
    assert edge_of_reach(Transitions(state, state, state[:, 0], after, over)).tolist() == [False, False, True, False]


def test_values_are_bounded_by_rewards():
    assert value_bound(torch.tensor([-1.0, 2.0]), 0.9) == pytest.approx((-10.0, 20.0))
    assert value_bound(torch.tensor([-1.0, -0.5]), 0.5) == pytest.approx((-2.0, 0.0))
    assert math.isclose(value_bound(torch.tensor([3.0]), 0.5)[0], 0.0)


@pytest.mark.slow
@pytest.mark.checks("RAVL")
def test_short_rollouts_in_a_perfect_model_explode_and_both_cures_hold():
    results = {}
    for arm, epochs in (("base", 3), ("patched", 3), ("RAVL", 2)):
        config = ImaginedValuesConfig(epochs=epochs, rollouts=500, updates=200)
        results[arm] = measure(point_problem(0), arm, 0, config)
    assert results["base"]["value"] > 100 and results["base"]["return"] < -20
    assert results["base"]["edge_share"] > 0.05 and results["patched"]["edge_share"] == 0.0
    for arm in ("patched", "RAVL"):
        assert abs(results[arm]["value"]) < 10 and results[arm]["return"] > -5
    alarmed = ImaginedValuesConfig(epochs=6, rollouts=500, updates=200, alarm=100.0)
    assert len(measure(point_problem(0), "base", 0, alarmed)["records"]) < 6


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="base"):
        measure(point_problem(0), "bas", 0, ImaginedValuesConfig())
    with pytest.raises(ConfigError, match="critics"):
        SacConfig(critics=0)
    with pytest.raises(ConfigError, match="real_share"):
        ImaginedValuesConfig(real_share=2.0)
    with pytest.raises(ConfigError, match="alarm"):
        ImaginedValuesConfig(alarm=-1.0)


def two_armed(count=400, seed=0):
    """One state, ends at once: actions around -0.5 pay 0, around 0.5 they pay 1, and few of them are recorded."""
    draws = generator(seed)
    good = torch.rand(count, generator=draws) < 0.3
    action = torch.where(good, 0.5, -0.5)[:, None] + 0.05 * torch.randn(count, 1, generator=draws)
    state = torch.zeros(count, 1)
    return Transitions(state, action, good.float(), state, torch.ones(count, dtype=torch.bool))


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("td3_bc", marks=pytest.mark.slow), "iql"])
def test_offline_agents_prefer_the_better_recorded_actions(kind):
    if kind == "td3_bc":
        agent = Td3Bc(Td3BcConfig(width=32, depth=2, learning_rate=3e-3), 1, 1, 0)
    else:
        agent = Iql(IqlConfig(width=32, depth=2, learning_rate=3e-3, expectile=0.9, temperature=10.0), 1, 1, 0)
    data, draws = two_armed(), generator()
    for _ in range(500):
        agent.update(data.draw(128, draws), draws)
    assert float(agent.act(torch.zeros(1, 1))) > 0.2
    assert float(agent.value(torch.zeros(1, 1))) > 0.6
    likelihood = agent.log_prob(torch.zeros(2, 1), torch.tensor([[0.5], [-0.5]])).detach()
    assert likelihood[0] > likelihood[1]
    twin = type(agent)(agent.config, 1, 1, 9)
    twin.restore(agent.tree())
    figures = [each.update(data, generator(3))["critic_loss"] for each in (agent, twin)]
    assert torch.equal(figures[0], figures[1])


def test_expectiles_are_means_that_lean():
    draws = torch.randn(4000, generator=generator())
    for expectile, low, high in ((0.5, -0.05, 0.05), (0.9, 0.7, 1.0)):
        value = torch.zeros(1, requires_grad=True)
        optimiser = torch.optim.Adam([value], 0.05)
        for _ in range(200):
            optimiser.zero_grad()
            expectile_loss(draws - value, expectile).mean().backward()
            optimiser.step()
        assert low < float(value.detach()) < high


def test_what_the_data_never_varied_is_not_enormous_when_it_does():
    """A word that no recorded instruction contains, or a drawer that nobody has moved: 1 stays 1, not 10^6."""
    values = torch.stack([torch.linspace(-1, 1, 50), torch.full((50,), 0.3), torch.zeros(50)], 1)
    standardiser = Standardiser(3)
    standardiser.fit(values)
    told = standardiser(torch.tensor([[1.0, 0.8, 1.0]]))
    assert told[0, 0] == pytest.approx(1 / float(values[:, 0].std(correction=0)), rel=1e-5)
    assert told[0, 1:].tolist() == pytest.approx([0.5, 1.0])
    assert not standardiser(values)[:, 1:].abs().gt(1e-6).any()
