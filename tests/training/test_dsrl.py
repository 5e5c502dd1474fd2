"""Steering a frozen policy by its noise out of recorded data: what noise is worth, and what the gate's rounds keep."""

import copy

import pytest
import torch
from offline_toys import BEST, distance, imitated_policy, lesson

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import PolicyKind
from robopolicy.rl.offline.decisions import observations_at
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.critics import SteeredPolicy
from robopolicy.training.offline.configuration import DsrlConfig
from robopolicy.training.offline.frozen import Dsrl, noise_values, sample_noise
from robopolicy.training.offline.improvers import BestOf, BestOfConfig, Wraps
from robopolicy.training.offline.rounds import improve_in_rounds

SMALL = DsrlConfig(steps=120, batch_size=64, width=32, depth=1, learning_rate=3e-3, noise_bound=2.0)


@pytest.fixture(scope="module", params=[PolicyKind.DIFFUSION, PolicyKind.FLOW])
def imitated(request):
    return imitated_policy(request.param)


def wrapped(imitated, config=SMALL) -> tuple[Dsrl, SteeredPolicy]:
    improver = Dsrl(config)
    policy = improver.wrap(copy.deepcopy(imitated), lesson(), 0)
    assert isinstance(policy, SteeredPolicy) and isinstance(improver, Wraps)
    return improver, policy


@pytest.mark.checks("DSRL")
def test_noise_is_worth_what_the_critic_finds_in_the_decision_that_it_leads_to(imitated):
    _, policy = wrapped(imitated)
    known = lesson()
    frames = known.data.frame[:20]
    observation = observations_at(known.episodes, frames, 1, ["observation.state"])
    noise = torch.randn(20, 2, 1, generator=torch.Generator().manual_seed(2)).clamp(-2, 2)
    values = noise_values(
        policy, known, observation, known.data.transitions.state[:20], policy.interface.to_agent(noise)
    )
    actions = imitated.to_actions(imitated.trajectory(observation, noise)[:, -1]).detach()
    assert torch.allclose(values, -(actions[:, :, 0] - BEST).square().mean(1), atol=1e-5), "the smaller member's"


@pytest.mark.checks("DSRL")
def test_critics_of_noise_are_fitted_to_that(imitated, monkeypatch):
    """Without a step of the actor, a round is regression: the loss is the squared error over both critics."""
    improver, policy = wrapped(imitated, DsrlConfig(steps=1, batch_size=16, width=8, depth=1, actor_noise_fraction=0.0))
    known, agent, given = lesson(), policy.agent, []
    twin = copy.deepcopy(policy)
    step = agent.step
    monkeypatch.setattr(
        agent, "step", lambda name, loss: given.append((name, float(loss.detach()))) or step(name, loss)
    )
    improver.improve(policy, known, Generators(5), 1.0, "round 1")
    draws = Generators(5)
    rows = torch.randint(len(known.data), (16,), generator=draws["observations"])
    data = known.data
    twin.agent.fit_statistics(data.transitions.state)
    noise = sample_noise(twin, data.transitions.state[rows], 0.0, draws["noise"])
    observation = observations_at(known.episodes, data.frame[rows], 1, ["observation.state"])
    worth = noise_values(twin, known, observation, data.transitions.state[rows], noise)
    values = twin.agent.critics(data.transitions.state[rows], noise).detach()
    expected = sum(float((value - worth).square().mean()) for value in values)
    assert given[0] == ("critics", pytest.approx(expected, rel=1e-5))
    assert [name for name, _ in given] == ["critics", "actor", "temperature"]


def test_noise_is_normal_in_its_box_and_a_share_is_the_actors_own(imitated):
    _, policy = wrapped(imitated)
    state = torch.zeros(4000, 1)
    noise = 2.0 * sample_noise(policy, state, 0.0, torch.Generator().manual_seed(0))
    assert float(noise.abs().max()) == 2.0 and float(noise.std()) == pytest.approx(0.95, abs=0.03)
    generator = torch.Generator().manual_seed(0)
    policy.agent.act = lambda state, generator=None: torch.full((len(state), 2), 0.123)  # type: ignore[method-assign]
    mixed = sample_noise(policy, state, 0.25, generator)
    assert float((mixed == 0.123).all(1).float().mean()) == pytest.approx(0.25, abs=0.03)


@pytest.mark.checks("DSRL")
def test_a_candidate_does_what_the_critic_knows_to_be_better_and_its_base_as_ever(imitated):
    improver, policy = wrapped(imitated)
    assert distance(policy) == pytest.approx(distance(imitated), rel=1e-6), "until it steers"
    figures = improver.improve(policy, lesson(), Generators(0), 1.0, "round 1")
    assert distance(policy) < 0.5 * distance(imitated) and figures["gain"] > 0.05
    assert all(torch.equal(value, imitated.state_dict()[name]) for name, value in policy.base.state_dict().items())


class Says:
    """A gate that says what it was told to."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def decide(self, candidate, incumbent):
        self.accepted = self.answers.pop(0)
        return self

    def line(self, what):
        return what

    def to_json(self):
        return {}


def test_rounds_keep_what_is_accepted_and_forget_what_is_not(imitated, tmp_path):
    quick = DsrlConfig(steps=8, batch_size=16, width=8, depth=1)
    improver, policy = wrapped(imitated, quick)
    result = improve_in_rounds(policy, lesson(), improver, Says(False), 1, run=RunFolder(tmp_path / "no"))
    assert not result.accepted and not bool(policy.steers), "it came unsteered and is so again"
    improve_in_rounds(policy, lesson(), improver, Says(True, False), 2, run=RunFolder(tmp_path / "yes"))
    assert bool(policy.steers)
    loaded = load_policy(tmp_path / "yes" / "checkpoint")
    assert isinstance(loaded, SteeredPolicy) and distance(loaded) == distance(policy)
    assert check_policy(loaded, load_policy).level is Level.ACTS


def test_what_cannot_be_steered_is_refused(imitated):
    assert not isinstance(BestOf(BestOfConfig()), Wraps)
    with pytest.raises(ConfigError, match="wrap"):
        Dsrl(SMALL).prepare(imitated)
    with pytest.raises(ConfigError, match="actor_noise_fraction"):
        DsrlConfig(actor_noise_fraction=2.0)
