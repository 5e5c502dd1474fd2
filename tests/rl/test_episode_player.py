"""Whole episodes: rows are refilled, partial ones go on, branches share exactly what was played before them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import STATE, PolicySpec
from robopolicy.rl.episodes import Branching, EpisodePlayer, _Running, groups_of
from sims.registry import load_task, make_world


class StatePolicy:
    """Acts by a fixed function of the state (plus noise of the generator); every decision is one unit."""

    def __init__(self, spec, noise: float = 0.0):
        self.spec = PolicySpec({STATE: spec.observation[STATE]}, spec.action, 1, 4, 4, 1, spec.fps)
        self.noise = noise

    def act(self, observation, generator, *, deterministic=False):
        state = observation[STATE][:, -1]
        drawn = torch.randn(len(state), 4, self.spec.action.size, generator=generator)
        actions = torch.tanh(3 * state[:, None, : self.spec.action.size]) + self.noise * drawn
        one = torch.ones(len(state), 1)
        return Decision(actions, {"drawn": drawn}, -one, one.bool())

    def log_prob(self, observation, latents):
        raise NotImplementedError

    def save(self, folder):
        raise NotImplementedError

    def reset(self, rows=None):
        pass


class ExpertPolicy(StatePolicy):
    """Holds each action of the scripted expert for a chunk: episodes end at different times."""

    def act(self, observation, generator, *, deterministic=False):
        decision = super().act(observation, generator)
        arrays = {key: value if isinstance(value, list) else value.numpy() for key, value in observation.items()}
        actions = torch.as_tensor(load_task("reach_planar").expert().act(arrays), dtype=torch.float32)
        return replace(decision, actions=actions[:, None].repeat(1, 4, 1))


def play(rows: int, requests, noise: float = 0.0, branching: Branching | None = None, **options):
    world = make_world("reach_planar", rows)
    player = EpisodePlayer(world, StatePolicy(world.spec, noise), branching)
    rollouts = player.play(requests, torch.Generator().manual_seed(0), **options)
    return rollouts, player


def test_refilled_rows_play_the_same_episodes_as_one_wave():
    seeds = episode_seeds(0, "x", 9)
    requests = groups_of(seeds, 1)
    wave, _ = play(9, requests)
    refilled, player = play(4, requests)
    assert wave.whole
    assert player.unfinished == 0
    torch.testing.assert_close(refilled.actions, wave.actions, rtol=0, atol=0)
    torch.testing.assert_close(refilled.observation[STATE], wave.observation[STATE], rtol=0, atol=0)
    for name in ("valid", "terminated", "truncated", "success", "group", "episode", "mask"):
        assert torch.equal(getattr(refilled, name), getattr(wave, name)), name
    assert refilled.group.tolist() == list(range(9))
    assert bool((wave.ended & wave.alive).sum(1).eq(1).all())


def test_groups_are_ragged_and_start_alike():
    requests = groups_of([5, 6, 7], [3, 1, 2])
    rollouts, _ = play(4, requests, noise=0.3)
    assert rollouts.group.tolist() == [0, 0, 0, 1, 2, 2]
    first = rollouts.observation[STATE][:, 0]
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[3])
    assert not torch.equal(rollouts.actions[0], rollouts.actions[1])


def test_unfinished_episodes_go_on_under_the_next_version():
    world = make_world("reach_planar", 12)
    player = EpisodePlayer(world, ExpertPolicy(world.spec))
    generator = torch.Generator().manual_seed(0)
    requests = groups_of(episode_seeds(0, "x", 12), 1)
    early = player.play(requests, generator, groups=2, version=3)
    assert len(early.group) == 2
    assert player.held == set(range(12)) - set(early.group.tolist())
    late = player.play([], generator, version=4)
    assert player.unfinished == 0
    assert sorted(early.group.tolist() + late.group.tolist()) == list(range(12))
    assert set(early.policy_version[early.alive].tolist()) == {3}
    assert set(late.policy_version[:, 0].tolist()) == {3}
    assert int(late.policy_version.max()) == 4
    fresh = make_world("reach_planar", 12)
    whole = EpisodePlayer(fresh, ExpertPolicy(fresh.spec)).play(requests, generator)
    for part in (early, late):
        for row, group in enumerate(part.group.tolist()):
            assert float(part.row_return[row]) == float(whole.row_return[group])


def test_branches_share_what_came_before_and_nothing_after():
    rollouts, _ = play(16, groups_of([5, 6], 1), noise=0.5, branching=Branching((1, 3), 2))
    assert sorted(rollouts.group.tolist()) == [0] * 4 + [1] * 4
    roots = rollouts.parent < 0
    assert roots.sum() == 2
    for row in (~roots).nonzero().squeeze(1).tolist():
        parent, step = int(rollouts.parent[row]), int(rollouts.branch_decision[row])
        assert step in (1, 3)
        for tensor in (rollouts.actions, rollouts.observation[STATE], rollouts.rewards["progress"]):
            assert torch.equal(tensor[row, :step], tensor[parent, :step])
        assert torch.equal(rollouts.observation[STATE][row, step], rollouts.observation[STATE][parent, step])
        assert not torch.equal(rollouts.actions[row, step], rollouts.actions[parent, step])
        assert not rollouts.mask[row, :step].any()
        assert rollouts.mask[row, step].all()
    own = rollouts.alive.sum() - sum(int(step) for step in rollouts.branch_decision if step > 0)
    assert int(rollouts.mask.any(-1).sum()) == int(own)


def test_a_branch_without_noise_repeats_its_parent_bitwise():
    few, _ = play(3, groups_of([5, 6, 7], 1), branching=Branching((2,), 3))
    for row in range(len(few.group)):
        parent = int(few.parent[row])
        if parent >= 0:
            assert torch.equal(few.actions[row], few.actions[parent])
            assert torch.equal(few.next_observation[STATE][row], few.next_observation[STATE][parent])
            assert float(few.row_return[row]) == float(few.row_return[parent])
            assert torch.equal(few.extras["episode_return"][row], few.extras["episode_return"][parent])
    assert len(few.group) == 9


def test_branching_plays_fewer_decisions_than_as_many_separate_episodes():
    tree, _ = play(8, groups_of([5, 6], 1), noise=0.1, branching=Branching((2, 4), 2))
    separate, _ = play(8, groups_of([5, 6], 4), noise=0.1)
    played = int(tree.mask.any(-1).sum())
    assert len(tree.group) == len(separate.group) == 8
    assert played < int(separate.alive.sum())


def test_wrong_branchings_are_told():
    with pytest.raises(ConfigError, match="branch_width=1"):
        Branching((1,), 1)
    world = make_world("reach_planar", 1)

    class Forgetful:
        spec, batch_size = world.spec, 1

    with pytest.raises(ConfigError, match="does not support snapshots"):
        EpisodePlayer(Forgetful(), StatePolicy(world.spec), Branching((1,)))  # type: ignore[arg-type]


def test_a_policy_of_another_world_is_refused():
    world = make_world("push_cube", 2)
    policy = StatePolicy(world.spec)
    policy.spec = replace(policy.spec, observation={STATE: replace(policy.spec.observation[STATE], shape=(3,))})
    with pytest.raises(Exception, match="Is this the world"):
        EpisodePlayer(world, policy)
    assert np.isfinite(world.spec.horizon)


@pytest.mark.checks("DART-GUI")
def test_an_episode_is_truncated_at_its_limit():
    requests = [
        replace(request, limit=limit) for request, limit in zip(groups_of([5, 6, 7], 1), (3, 0, 1), strict=True)
    ]
    rollouts, player = play(2, requests)
    whole, _ = play(2, groups_of([5, 6, 7], 1))
    lengths = whole.alive.sum(1).tolist()
    assert rollouts.alive.sum(1).tolist() == [3, lengths[1], 1]
    assert rollouts.truncated[0].tolist()[:3] == [False, False, True] and not rollouts.terminated[0].any()
    torch.testing.assert_close(rollouts.actions[0, :3], whole.actions[0, :3], rtol=0, atol=0)
    # An episode that waits for another call, in a checkpoint, keeps its limit.
    player.waiting.append(_Running(requests[0]))
    tree = player.tree()
    player.restore(tree)
    assert player.waiting[0].request == requests[0]
