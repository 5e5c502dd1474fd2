"""How trees of episodes grow: branches go where the policy was unsure, and where nothing moves an episode stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Step
from robopolicy.rl.episodes import (
    Branching,
    EpisodePlayer,
    allocate_branches,
    allocate_branches_by_group,
    groups_of,
    surprise,
)
from robopolicy.rl.movement import StateSpread, changed_rows
from robopolicy.training.configuration import FinetuneConfig
from sims.registry import make_world


class Unsure:
    """Acts at random and says of each decision how likely it was: two steps, one of them drawn to be surprising."""

    def __init__(self, spec):
        self.spec = PolicySpec({STATE: spec.observation[STATE]}, spec.action, 1, 4, 4, 2, spec.fps)

    def act(self, observation, generator, *, deterministic=False):
        rows = len(observation[STATE])
        drawn = torch.rand(rows, 4, self.spec.action.size, generator=generator) - 0.5
        logp = -4 * torch.rand(rows, 2, generator=generator)
        return Decision(drawn, {"drawn": drawn}, logp, torch.ones(rows, 2, dtype=torch.bool))

    def reset(self, rows=None):
        pass


@pytest.mark.checks("TreePO")
def test_branches_are_shared_out_in_proportion_to_the_probability_of_being_surprised():
    # weights 1 : 2 : 5 of eight branches, and of four: 0.5, 1 and 2.5, the half going to the first of the two
    surprises = [0.0, float(np.log(2)), float(np.log(5))]
    assert allocate_branches(surprises, 8) == [1, 2, 5]
    assert allocate_branches(surprises, 4) == [1, 1, 2]
    assert allocate_branches([3.0] * 3, 6) == [2, 2, 2]
    assert allocate_branches([0.0], 3) == [3]
    draws = np.random.default_rng(0)
    for _ in range(50):
        some, branches = draws.normal(scale=3, size=draws.integers(1, 7)), int(draws.integers(0, 12))
        counts = allocate_branches(list(some), branches)
        exact = branches * np.exp(some) / np.exp(some).sum()
        assert sum(counts) == branches
        assert np.abs(np.array(counts) - exact).max() < 1
    assert allocate_branches_by_group([7, 8, 7], [0.0, 1.0, float(np.log(3))], 2) == [1, 2, 3]
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert surprise(torch.tensor([[-1.0, -3.0], [-5.0, -9.0], [-7.0, -7.0]]), mask).tolist() == [2.0, 5.0, 0.0]


@pytest.mark.checks("TreePO")
def test_episodes_that_stand_at_a_decision_together_branch_by_how_unsure_they_were():
    world = make_world("reach_planar", 24)
    player = EpisodePlayer(world, Unsure(world.spec), Branching((1,), 3, uncertain=True))
    rollouts = player.play(groups_of([5, 6], 4), torch.Generator().manual_seed(0))
    roots = (rollouts.parent < 0).nonzero().squeeze(1)
    assert len(roots) == 8
    unsure = -rollouts.logp_behaviour[roots, 0].mean(-1)
    for group in (0, 1):
        mine = rollouts.group[roots] == group
        children = [int((rollouts.parent == root).sum()) for root in roots[mine].tolist()]
        assert children == allocate_branches(unsure[mine].tolist(), 8)
        assert max(children) > 2
    alike = EpisodePlayer(world, Unsure(world.spec), Branching((1,), 3))
    rollouts = alike.play(groups_of([5, 6], 4), torch.Generator().manual_seed(0))
    roots = (rollouts.parent < 0).nonzero().squeeze(1)
    assert {int((rollouts.parent == root).sum()) for root in roots.tolist()} == {2}


class Road:
    """Whoever drives moves on; an episode lasts eight control steps."""

    def __init__(self, rows: int):
        self.batch_size = rows
        self.spec = WorldSpec("road", {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0), 10.0, 8)
        self.place, self.time = np.zeros(rows), np.zeros(rows, dtype=int)

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.place[rows], self.time[rows] = np.asarray(seeds), 0
        return self.observe()

    def observe(self):
        return {STATE: self.place[:, None, None].astype(np.float32)}

    def step(self, actions):
        self.place, self.time = self.place + actions.sum((1, 2)), self.time + actions.shape[1]
        over, nothing = self.time >= 8, np.zeros(self.batch_size, dtype=bool)
        valid = np.ones(actions.shape[:2], dtype=bool)
        return Step(self.observe(), {}, {"reward": np.ones(valid.shape)}, valid, nothing, over, nothing)

    def close(self):
        pass


class Trembling(Road):
    """Whoever has stopped trembles a little."""

    def observe(self):
        return {STATE: (self.place + 5e-5 * (self.time % 2))[:, None, None].astype(np.float32)}


@pytest.mark.checks("TreePO")
def test_an_episode_alone_is_still_in_units_of_all_states_so_far():
    """A single row has no spread, and any tremble would be a movement."""
    world = Trembling(1)
    player = EpisodePlayer(world, Drivers(world.spec), max_idle_chunks=3)
    rollouts = player.play(groups_of([10, 21], 1), torch.Generator().manual_seed(0))
    assert rollouts.alive.sum(1).tolist() == [8, 5]


def test_the_spread_of_states_is_that_of_all_of_them_together():
    states = 1e3 + torch.randn(7, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    spread = StateSpread()
    rows = [[0, 1, 2], [1], [0, 2], [2], [0, 1], [0, 1, 2], [1]]
    for each, some in zip(states, rows, strict=True):
        spread.add({STATE: each, "task": ["a"] * 3}, some)
    seen = torch.cat([each[some, -1] for each, some in zip(states, rows, strict=True)])
    torch.testing.assert_close(spread.values()[STATE], seen.double().std(0, unbiased=False).float())


def test_rounding_errors_of_what_never_changed_are_no_movement():
    spread, still = StateSpread(), {STATE: torch.full((2, 1, 3), 5.0)}
    spread.add(still, [0, 1])
    assert not changed_rows(still, {STATE: still[STATE] + 1e-6}, spread.values()).any()
    assert changed_rows(still, {STATE: still[STATE] + 1e-2}, spread.values()).all()


class Drivers:
    """Those that start at an odd place drive for two decisions and stop for good; the others drive on."""

    def __init__(self, spec):
        self.spec = PolicySpec(spec.observation, spec.action, 1, 1, 1, 1, spec.fps)

    def act(self, observation, generator, *, deterministic=False):
        place = observation[STATE][:, -1, 0]
        parked = (place.floor() % 2 == 1) & (place - place.floor() > 0.4)
        rows = len(place)
        actions = torch.where(parked, 0.0, 0.25)[:, None, None]
        return Decision(actions, {}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def reset(self, rows=None):
        pass


@pytest.mark.checks("TreePO")
def test_an_episode_in_which_nothing_moves_any_more_is_stopped_early():
    def played(max_idle_chunks: int, rows: int = 2):
        world = Road(rows)
        player = EpisodePlayer(world, Drivers(world.spec), max_idle_chunks=max_idle_chunks)
        return player.play(groups_of([10, 21, 32, 43], 1), torch.Generator().manual_seed(0))

    whole, stopped = played(0), played(3)
    assert whole.alive.sum(1).tolist() == [8, 8, 8, 8]
    # two decisions that drive, three that do not
    assert stopped.alive.sum(1).tolist() == [8, 5, 8, 5]
    assert stopped.row_return.tolist() == [8.0, 5.0, 8.0, 5.0]
    last = stopped.alive.sum(1) - 1
    assert bool(stopped.truncated.gather(1, last[:, None]).all())
    assert bool((stopped.ended & stopped.alive).sum(1).eq(1).all())
    assert torch.equal(stopped.observation[STATE][0], whole.observation[STATE][0])
    assert torch.equal(played(3, rows=4).row_return, stopped.row_return)
    before = {STATE: torch.tensor([[[0.0]], [[2.0]]]), "task": ["a", "a"]}
    after = {STATE: torch.tensor([[[0.0005]], [[2.01]]])}
    assert changed_rows(before, after, {STATE: torch.ones(1)}).tolist() == [False, True]
    with pytest.raises(ConfigError, match="max_idle_chunks"):
        replace(FinetuneConfig(), max_idle_chunks=-1)
