"""Deployments: what coins tell of mixtures that were not played, and a floor that holds."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import Field, PolicySpec
from robopolicy.evaluation.deployment import Deployment, MixedPolicy, _thrown
from robopolicy.evaluation.intervals import wilson, wilson_bound


@pytest.mark.checks("StepMix/EpsMix")
def test_the_success_of_any_share_follows_from_coins_thrown_with_another():
    """Two coins an episode, success in proportion to heads: every outcome once, as often as it is likely, by hand."""
    told = Deployment(0.0)
    value = {0: 0.2, 1: 0.5, 2: 0.9}
    for coins in itertools.product((0, 1), repeat=2):  # thrown with share 1/2: all four alike
        heads = sum(coins)
        for tenth in range(10):
            told.tell(0.5, [heads], [2], [tenth < 10 * value[heads]])
    for share in (0.0, 0.25, 0.5, 0.8, 1.0):
        expected = sum(stats.binom.pmf(heads, 2, share) * value[heads] for heads in value)
        assert told.estimate(np.array([share]))[0] == pytest.approx(expected)
    worth = told.estimate(np.array([0.5, 1.0]))[1]
    assert worth == pytest.approx([40, 10])  # its own share: every episode counts; heads twice: a quarter of them


@pytest.mark.checks("StepMix/EpsMix")
def test_the_base_alone_lets_in_as_much_as_it_can_afford():
    """With base episodes only, of T coins, success of a share is at least (1 - share)^T of the base's."""
    told = Deployment(floor=0.6)
    told.tell(0.0, [0] * 1000, [4] * 1000, [True] * 800 + [False] * 200)
    tried = np.array([0.0, 0.05, 0.2])
    value, worth = told.estimate(tried)
    assert value == pytest.approx((1 - tried) ** 4 * 0.8)
    assert worth == pytest.approx([1000] * 3)
    share = told.choose()
    assert 0.0 < share < 1 - (0.6 / 0.8) ** 0.25
    low, above = told.lower(np.array([share, share + 0.01]))
    assert low >= 0.6 > above
    assert (
        Deployment(floor=0.79, shares=told.shares, heads=told.heads, coins=told.coins, success=told.success).choose()
        == 0.0
    )
    assert Deployment(floor=0.5).choose() == 0.0  # nothing is known yet


def test_the_bound_is_wilsons_where_episodes_are_whole():
    bounds = wilson_bound(np.array([0.3, 0.0, 1.0, 0.5]), np.array([50.0, 10.0, 10.0, 0.0]), 0.975)
    assert bounds == pytest.approx([wilson(15, 50, 0.95)[0], 0.0, wilson(10, 10, 0.95)[0], 0.0], abs=1e-6)


def simulated(
    tuned: float, base: float, floor: float, seed: int, coins: int, waves: int = 25, rows: int = 20
) -> Deployment:
    """Episodes whose success is that of a mixture: every coin adds its share of the difference."""
    draws = np.random.default_rng(seed)
    told = Deployment(floor)
    told.tell(0.0, [0] * 200, [coins] * 200, (draws.random(200) < base).tolist())
    for _ in range(waves):
        share = told.choose()
        heads = draws.binomial(coins, share, rows)
        rate = base + (tuned - base) * heads / coins
        told.tell(share, heads.tolist(), [coins] * rows, (draws.random(rows) < rate).tolist())
    return told


@pytest.mark.long
@pytest.mark.checks("StepMix/EpsMix")
@pytest.mark.parametrize("coins", [1, 8])
def test_a_better_policy_takes_over_and_a_worse_one_never_does(coins: int):
    better = [simulated(0.95, 0.6, 0.5, seed, coins) for seed in range(20)]
    assert np.mean([each.shares[-1] for each in better]) > 0.75  # some begin with an unlucky look at the base
    worse = [simulated(0.1, 0.6, 0.5, seed, coins) for seed in range(20)]
    truth = [0.6 - 0.5 * np.array(each.shares[200:]) for each in worse]  # the expected success of what was chosen
    assert np.mean([(each < 0.5).mean() for each in truth]) < 0.05
    assert np.mean([each.shares[-1] for each in worse]) < 0.25


class Says:
    """A policy that always says one thing, and finds the world with two-step chunks."""

    def __init__(self, action: float, chunk: int = 2):
        field = Field((1,), low=-1.0, high=1.0)
        self.action = action
        self.spec = PolicySpec({"observation.state": field}, field, 1, chunk, chunk, 0, 10.0)

    def reset(self, rows=None):
        """Nothing to forget."""

    def act(self, observation, generator, *, deterministic=False):
        """Return chunks of the one thing."""
        return Decision(torch.full((len(observation["observation.state"]), self.spec.chunk, 1), self.action))


@pytest.mark.parametrize("coin", ["step", "episode"])
def test_the_coin_says_who_decides(coin):
    mixed = MixedPolicy(Says(0.0), Says(1.0), 0.5, coin)
    mixed.reset()
    observation, draws = {"observation.state": torch.zeros(64, 1, 1)}, torch.Generator()
    acted = torch.stack([mixed.act(observation, draws).actions[:, 0, 0] for _ in range(3)])
    assert torch.equal(acted.bool(), torch.stack(mixed.coins))
    assert 0.3 < float(acted.mean()) < 0.7
    assert bool((acted[0] == acted[1]).all()) is (coin == "episode")
    lengths = np.array([2, 3] * 32)  # one decision, and two: rows that have ended are still asked while others run
    heads, coins = _thrown(mixed, lengths)
    assert coins == ([1] * 64 if coin == "episode" else [1, 2] * 32)
    counted = acted[:1] if coin == "episode" else acted[:2] * (torch.arange(2)[:, None] < torch.tensor(coins))
    assert heads == counted.sum(0).int().tolist()
    mixed.reset(rows=[0, 1])  # an episode's coin is thrown anew for rows that begin again
    assert torch.equal(mixed.act(observation, draws).actions[2:, 0, 0], acted[0][2:]) is (coin == "episode")


def test_policies_that_act_otherwise_take_no_turns():
    with pytest.raises(ConfigError, match="the same chunk length and action shape"):
        MixedPolicy(Says(0.0), Says(1.0, chunk=4), 0.5, "step")
