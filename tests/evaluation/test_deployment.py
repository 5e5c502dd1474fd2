"""Deployments: what draws tell of mixtures that were not played, and a floor that holds."""

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import Field, PolicySpec
from robopolicy.evaluation.deployment import Deployment, Mix, MixedPolicy, switch_probabilities
from robopolicy.evaluation.intervals import wilson, wilson_bound


@pytest.mark.checks("StepMix/EpsMix")
def test_the_tuned_policy_takes_over_from_the_end_or_all_at_once():
    shares = np.array([0.0, 0.25, 0.5, 0.9, 1.0])
    # Of two decisions the base acts 2, 1.5, 1, 0.2 and 0 on average.
    by_step = [[0, 0, 1], [0, 0.5, 0.5], [0, 1, 0], [0.8, 0.2, 0], [1, 0, 0]]
    assert switch_probabilities(shares, 2, "step") == pytest.approx(np.array(by_step))
    by_episode = [[0, 0, 1], [0.25, 0, 0.75], [0.5, 0, 0.5], [0.9, 0, 0.1], [1, 0, 0]]
    assert switch_probabilities(shares, 2, "episode") == pytest.approx(np.array(by_episode))
    assert np.count_nonzero(switch_probabilities(np.linspace(0, 1, 101), 100, "step")) == 101, (
        "whole numbers stay whole"
    )


@pytest.mark.checks("StepMix/EpsMix")
def test_the_success_of_any_share_follows_from_draws_with_another():
    """Two decisions; the first succeeds with .2 (base) or .5, the second with .25 (base) or .75; all cases by hand."""
    told = Deployment(0.0, decisions=2)
    first, second = {True: 0.5, False: 0.2}, {True: 0.75, False: 0.25}
    # 80 episodes with each of the shares .75 and .25, in which switches are as frequent as they are likely.
    for switch, shares in ((0, (0.75,)), (1, (0.75, 0.25)), (2, (0.25,))):
        for share in shares:
            early = round(40 * first[switch == 0])
            late = round((40 - early) * second[switch <= 1])
            outcomes = [True] * (early + late) + [False] * (40 - early - late)
            told.tell(share, [switch] * 40, [1] * early + [2] * (40 - early), outcomes)
    value = {h: (p := first[h == 0]) + (1 - p) * second[h <= 1] for h in (0, 1, 2)}
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        expected = sum(p * value[h] for h, p in enumerate(switch_probabilities(np.array([share]), 2, "step")[0]))
        assert told.estimate(np.array([share]))[0] == pytest.approx(expected)
    # Episodes that the base ended at once could have had the switch 1 or 2.
    assert told.estimate(np.array([0.5]))[1] > 80


@pytest.mark.checks("StepMix/EpsMix")
def test_the_base_alone_lets_in_as_much_as_it_can_afford():
    """With base episodes only, of T decisions, success of a share is at least that of episodes that ended in time."""
    told = Deployment(floor=0.6, decisions=4)
    told.tell(0.0, [4] * 1000, [3] * 500 + [4] * 500, [True] * 800 + [False] * 200)
    tried = np.array([0.0, 0.05, 0.125, 0.25, 0.5])
    value, worth = told.estimate(tried)
    # Switches 4, 3.8, 3.5, 3 and 2: those at 3 are known of the 500 that ended by then, those at 2 not at all.
    assert value == pytest.approx([0.8, 0.5 + 0.3 * 0.8, 0.5 + 0.3 * 0.5, 0.5, 0.0])
    assert worth[0] == pytest.approx(1000) and worth[3] == pytest.approx(500)
    share = told.choose()
    assert 0.0 < share < 0.25
    low, above = told.lower(np.array([share, share + 0.01]))
    assert low >= 0.6 > above
    strict = Deployment(0.79, 4, "step", 0.95, told.shares, told.switches, told.lengths, told.success)
    assert strict.choose() == 0.0
    assert Deployment(floor=0.5, decisions=4).choose() == 0.0  # nothing is known yet


def test_the_bound_is_wilsons_where_episodes_are_whole():
    bounds = wilson_bound(np.array([0.3, 0.0, 1.0, 0.5]), np.array([50.0, 10.0, 10.0, 0.0]), 0.975)
    assert bounds == pytest.approx([wilson(15, 50, 0.95)[0], 0.0, wilson(10, 10, 0.95)[0], 0.0], abs=1e-6)


def episodes(
    draws: np.random.Generator, switches: np.ndarray, base: float, tuned: float
) -> tuple[list[int], list[bool]]:
    """Play episodes of up to eight decisions, each of which succeeds with the chance of the policy that acts."""
    chance = np.where(np.arange(8) < switches[:, None], base, tuned)
    hits = draws.random(chance.shape) < chance
    return np.where(hits.any(1), hits.argmax(1) + 1, 8).tolist(), hits.any(1).tolist()


def simulated(tuned: float, base: float, floor: float, seed: int, mix: Mix, waves: int = 40) -> Deployment:
    """Return a deployment of waves of 20 episodes, after 200 of the base."""
    draws = np.random.default_rng(seed)
    told = Deployment(floor, 8, mix)
    told.tell(0.0, [8] * 200, *episodes(draws, np.full(200, 8), base, tuned))
    for _ in range(waves):
        share = told.choose()
        switches = draws.choice(9, 20, p=switch_probabilities(np.array([share]), 8, mix)[0])
        told.tell(share, switches.tolist(), *episodes(draws, switches, base, tuned))
    return told


@pytest.mark.long
@pytest.mark.checks("StepMix/EpsMix")
@pytest.mark.parametrize("mix", ["step", "episode"])
def test_a_better_policy_takes_over_and_a_worse_one_never_does(mix: Mix):
    better = [simulated(0.3, 0.1, 0.5, seed, mix) for seed in range(20)]  # the base succeeds in 57 %
    assert np.mean([each.shares[-1] for each in better]) > 0.75  # some begin with an unlucky look at the base
    worse = [simulated(0.02, 0.1, 0.5, seed, mix) for seed in range(20)]
    value = np.array([1 - 0.9**h * 0.98 ** (8 - h) for h in range(9)])
    truth = [switch_probabilities(np.array(each.shares[200:]), 8, mix) @ value for each in worse]
    assert np.mean([(each < 0.5).mean() for each in truth]) < 0.05
    assert np.mean([each.shares[-1] for each in worse]) < 0.5


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


@pytest.mark.parametrize("mix", ["step", "episode"])
def test_the_base_acts_first_and_the_switch_belongs_to_the_episode(mix: Mix):
    mixed = MixedPolicy(Says(0.0), Says(1.0), 0.5, 3, mix)
    mixed.reset()
    observation, draws = {"observation.state": torch.zeros(64, 1, 1)}, torch.Generator()
    acted = torch.stack([mixed.act(observation, draws).actions[:, 0, 0] for _ in range(3)]).bool()
    assert torch.equal(acted, torch.arange(3)[:, None] >= mixed.switch)
    assert set(mixed.switch.tolist()) == ({1, 2} if mix == "step" else {0, 3})
    assert 0.3 < float(acted.float().mean()) < 0.7
    before = mixed.switch.clone()
    mixed.reset(rows=[0, 1])  # only rows that begin again draw anew, and the base acts in them first
    fourth = mixed.act(observation, draws).actions[:, 0, 0].bool()
    assert torch.equal(mixed.switch[2:], before[2:]) and bool((fourth[2:] | (mixed.switch[2:] == 3)).all())
    assert torch.equal(fourth[:2], mixed.switch[:2] == 0)


def test_policies_that_act_otherwise_take_no_turns():
    with pytest.raises(ConfigError, match="the same chunk length and action shape"):
        MixedPolicy(Says(0.0), Says(1.0, chunk=4), 0.5, 3, "step")
