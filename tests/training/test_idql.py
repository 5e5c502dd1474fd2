"""Choosing among a frozen policy's decisions by a critic of recorded data: what is chosen, and what the gate trusts."""

import copy

import pytest
import torch
from offline_toys import BEST, Knows, distance, imitated_policy, lesson

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import PolicyKind
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.iql import Iql
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.critics import BestOfPolicy
from robopolicy.training.offline.configuration import IdqlConfig
from robopolicy.training.offline.frozen import Idql
from robopolicy.training.offline.improvers import OfflineContext, Wraps
from robopolicy.training.offline.rounds import improve_in_rounds


@pytest.fixture(scope="module", params=[PolicyKind.DIFFUSION, PolicyKind.FLOW])
def imitated(request):
    return imitated_policy(request.param)


def learned() -> OfflineContext:
    """A lesson whose critic can be saved."""
    known = lesson()
    view = known.interface
    return OfflineContext(Iql(IqlConfig(width=8, depth=1), view.size, view.actions, 0), known.data, view)


class Says:
    """A gate with given answers, which asks each candidate how many decisions it tries."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), list[int]()

    def decide(self, candidate, incumbent):
        self.accepted = self.answers[len(self.asked)]
        self.asked.append(int(candidate.count))
        return self

    def line(self, what):
        return what

    def to_json(self):
        return {}


@pytest.mark.checks("IDQL")
def test_the_argmax_of_the_smaller_critic_over_the_policys_own_samples(imitated):
    known = lesson()
    policy = BestOfPolicy(imitated, known.critic, known.interface, 8)
    observation = {"observation.state": torch.rand(5, 1, 1, generator=torch.Generator().manual_seed(1))}
    actions = policy.act(observation, torch.Generator().manual_seed(2)).actions
    several = {"observation.state": observation["observation.state"].repeat_interleave(8, 0)}
    tried = imitated.act(several, torch.Generator().manual_seed(2)).actions.unflatten(0, (5, 8))
    nearest = (tried - BEST).square().flatten(2).mean(-1).argmin(1)
    assert torch.equal(actions, tried[torch.arange(5), nearest])


def test_of_one_decision_the_policy_is_as_it_came(imitated):
    policy = Idql(IdqlConfig()).wrap(imitated, lesson(), 0)
    assert isinstance(policy, BestOfPolicy) and isinstance(Idql(IdqlConfig()), Wraps)
    observation = {"observation.state": torch.rand(3, 1, 1)}
    for sure in (False, True):
        own, alone = (
            each.act(observation, torch.Generator().manual_seed(3), deterministic=sure).actions
            for each in (policy, imitated)
        )
        assert torch.equal(own, alone)


def test_every_round_trusts_the_critic_further_and_a_refusal_asks_for_less(imitated, tmp_path):
    improver = Idql(IdqlConfig(candidates=4))
    policy = improver.wrap(copy.deepcopy(imitated), lesson(), 0)
    gate = Says(True, True, False, False)
    result = improve_in_rounds(policy, lesson(), improver, gate, 4)
    assert gate.asked == [4, 8, 16, 12], "4, twice as many, twice as many, and half as many more"
    assert int(policy.count) == 8 and result.accepted == 2
    assert distance(policy) < 0.5 * distance(imitated)
    refused = improver.wrap(copy.deepcopy(imitated), lesson(), 0)
    improve_in_rounds(refused, lesson(), improver, Says(False), 1)
    assert int(refused.count) == 1


def test_a_checkpoint_holds_policy_critics_and_how_many_decisions(imitated, tmp_path):
    known = learned()
    improver = Idql(IdqlConfig(candidates=3))
    policy = improver.wrap(copy.deepcopy(imitated), known, 0)
    improve_in_rounds(policy, known, improver, Says(True), 1, run=RunFolder(tmp_path))
    loaded = load_policy(tmp_path / "checkpoint")
    assert isinstance(loaded, BestOfPolicy) and int(loaded.count) == 3
    assert distance(loaded) == distance(policy)
    assert check_policy(loaded, load_policy).level is Level.ACTS


def test_engines_compute_the_decisions_that_are_chosen_among(imitated):
    known = lesson()
    policy = BestOfPolicy(imitated, known.critic, known.interface, 4)
    fast = with_engine(policy, InferenceConfig("lean"))
    assert isinstance(fast, BestOfPolicy) and fast is not policy
    observation = {"observation.state": torch.rand(6, 1, 1)}
    for sure in (False, True):
        own, other = (
            each.act(observation, torch.Generator().manual_seed(4), deterministic=sure) for each in (policy, fast)
        )
        assert torch.allclose(own.actions, other.actions, atol=1e-5)


def test_more_critics_are_trusted_less():
    """The smallest of five is what counts."""
    state, action = torch.rand(7, 1), torch.rand(7, 2)
    agent = Iql(IqlConfig(width=8, depth=1, critics=5), 1, 2, 0)
    values = agent.action_values(state, action).detach()
    assert values.shape == (5, 7) and bool((values.amin(0) <= values[:2].amin(0)).all())
    assert float((values.amin(0) - values[:2].amin(0)).min()) < 0


def test_what_cannot_choose_is_refused(imitated):
    known = lesson()
    with pytest.raises(ConfigError, match="wrap"):
        Idql(IdqlConfig()).prepare(imitated)
    with pytest.raises(ConfigError, match="must be at least 2"):
        IdqlConfig(candidates=1)
    with pytest.raises(ConfigError, match="at least 1"):
        BestOfPolicy(imitated, known.critic, known.interface, 0)
    with pytest.raises(ConfigError, match="has no save"):
        BestOfPolicy(Unsaved(imitated), Knows(), known.interface, 2)
    longer = Interface(imitated.spec.observation, imitated.spec.action, chunk=1)
    with pytest.raises(ConfigError, match="evaluates 1 control steps, the policy outputs 2"):
        BestOfPolicy(imitated, known.critic, longer, 2)


class Unsaved:
    """A policy without a checkpoint."""

    def __init__(self, policy):
        self.spec, self.act, self.reset = policy.spec, policy.act, policy.reset
