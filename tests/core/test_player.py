"""The one loop: rows that end are left, refilled or reset as its body says, and a decision is executed to its end."""

from itertools import islice

import numpy as np
import pytest
import torch

from robopolicy.core.episode_rows import EpisodeRows
from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.player import ControllerActor, Player, PolicyActor, PolicyOutput, actor_of
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Snapshot

FIELDS, ACTION = {STATE: Field((2,))}, Field((1,))


class Countdown:
    """Shows (seed, steps so far); an episode lasts as many steps as the last digit of its seed says."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.spec = WorldSpec("countdown", FIELDS, ACTION, 1.0, 9, rewards=("paid",), instructions=("count",))
        self.episodes = EpisodeRows(self.spec, batch_size, np.arange)
        self.resets: list[tuple[list[int], list[int]]] = []

    def reset(self, rows=None, seeds=None, options=None):
        index, chosen = self.episodes.reset_rows(rows, seeds)
        self.resets.append((index.tolist(), chosen.tolist()))
        frames = np.stack([chosen, 0 * chosen], -1)[:, None]
        self.episodes.start(index, {STATE: frames}, own={"seed": chosen})
        return self.episodes.observation()

    def step(self, actions):
        episodes, index, chunk = self.episodes, self.episodes.running_index, actions.shape[1]
        seed = episodes.arrays["seed"][index]
        if not len(seed):
            return episodes.idle(chunk)
        time = episodes.arrays["steps"][index, None] + np.arange(1, chunk + 1)
        frames = {STATE: np.stack([np.broadcast_to(seed[:, None], time.shape), time], -1).astype(np.float32)}
        moved = episodes.advance(index, time >= seed[:, None] % 10)
        trace = episodes.trace(index, frames, moved.length)
        episodes.update_history(index, episodes.extended_history(index, frames), moved.length)
        valid = episodes.scatter(index, moved.live)
        return episodes.step(trace, {"paid": valid.astype(float)}, valid)

    def snapshot(self, rows=None):
        return Snapshot(self.episodes.snapshot(rows))

    def restore(self, snapshot, rows=None):
        self.episodes.restore(snapshot, rows)
        return self.episodes.observation()

    def close(self):
        pass


class Constant:
    """A policy of chunks of 2 equal actions, which remembers what it was told to forget."""

    def __init__(self, value: float = 0.0, logp: float = 0.0):
        self.spec = PolicySpec(FIELDS, ACTION, 1, 2, 2, 1, 1.0)
        self.value, self.logp = value, logp
        self.forgotten: list = []
        self.decisions = 0

    def act(self, observation, generator, *, deterministic=False):
        self.decisions += 1
        count = len(observation[STATE])
        logp = torch.full((count, 1), self.logp)
        return Decision(torch.full((count, 2, 1), self.value), {}, logp, torch.ones(count, 1, dtype=torch.bool))

    def reset(self, rows=None):
        self.forgotten.append(None if rows is None else [int(row) for row in rows])


class Still:
    """A controller."""

    def act(self, observation):
        return np.zeros((len(observation[STATE]), 1))

    def reset(self, rows=None):
        pass


def policy_player(world: Countdown, policy: Constant, **options) -> Player[PolicyOutput]:
    return Player(world, PolicyActor(policy, torch.Generator()), **options)


def test_rows_that_end_are_left_alone_and_spare_rows_are_not_played():
    world, policy = Countdown(5), Constant()
    player = policy_player(world, policy)
    player.start_batch(np.array([3, 5, 11]))
    assert world.resets == [([0, 1, 2, 3, 4], [3, 5, 11, 3, 5])]
    assert player.running.tolist() == [True] * 3 + [False] * 2
    steps_played = list(player)
    assert [np.flatnonzero(played.ended).tolist() for played in steps_played] == [[2], [0], [1]]
    assert [played.step.valid[:3].sum(1).tolist() for played in steps_played] == [[2, 2, 1], [1, 2, 0], [0, 1, 0]]
    assert policy.forgotten == [None]
    assert policy.decisions == 3


def test_rows_that_end_are_given_what_is_waiting_and_the_actor_forgets_them():
    world, policy, waiting, states = Countdown(2), Constant(), [4, 1, 2], []
    player = policy_player(world, policy)
    player.start([1, 5])
    for played in player:
        states += player.observation[STATE][played.ended, -1].tolist()
        rows = np.flatnonzero(played.ended)[: len(waiting)]
        if len(rows):
            player.start([waiting.pop(0) for _ in rows], rows)
    assert sorted(states) == [[1, 1], [1, 1], [2, 2], [4, 4], [5, 5]]
    assert policy.forgotten[0] is None
    assert sorted(row for rows in policy.forgotten[1:] for row in rows) in ([0, 0, 1], [0, 0, 0], [0, 1, 1])


def test_streams_go_on_for_ever_and_stop_where_the_body_stops():
    world, policy = Countdown(2), Constant()
    player = policy_player(world, policy)
    player.start([3, 5])
    steps = 0
    for played in islice(player, 7):
        steps += int(played.step.valid.sum())
        rows = np.flatnonzero(played.ended)
        if len(rows):
            player.start([3] * len(rows), rows)
    assert policy.decisions == 7
    assert player.running.all()
    later = policy_player(world, policy, observation=player.observation)
    assert later.running.all()
    assert steps > 14


def test_a_chunk_can_be_run_step_by_step_and_ends_where_no_row_runs():
    world, policy = Countdown(2), Constant()
    player = policy_player(world, policy, stepwise=True)
    player.start([3, 1])
    steps_played = list(player)
    assert [played.actions.shape[1] for played in steps_played] == [1, 1, 1]
    assert [played.chunk_done for played in steps_played] == [False, True, True]
    assert [np.flatnonzero(played.ended).tolist() for played in steps_played] == [[1], [], [0]]
    assert policy.decisions == 2


def test_rows_are_played_on_from_a_saved_state():
    world = Countdown(2)
    player = Player(world, ControllerActor(Still()))
    player.start([8, 2])
    for _ in islice(player, 3):
        pass
    saved = world.snapshot([0])
    list(player)
    player.restore(world, saved, np.array([1]))
    assert player.running.tolist() == [False, True]
    assert player.observation[STATE][1, -1].tolist() == [8, 3]
    assert len(list(player)) == 5


def test_policies_and_controllers_become_actors():
    world = Countdown(3)
    observation = world.reset()
    chunk, info = actor_of(Still(), torch.Generator()).choose(observation)
    assert chunk.shape == (3, 1, 1) and info is None
    chunk, info = actor_of(Constant(0.5), torch.Generator()).choose(observation)
    assert chunk.shape == (3, 2, 1) and chunk.dtype == np.float64
    assert isinstance(info, PolicyOutput)
    assert info.seen[TASK] == ["count"] * 3


def test_wrong_use_is_explained():
    world = Countdown(1)
    player = policy_player(world, Constant())
    assert list(player) == []
    with pytest.raises(SpecError, match="start"):
        _ = player.observation
    other = Constant()
    other.spec = PolicySpec({STATE: Field((3,))}, ACTION, 1, 2, 2, 1, 1.0)
    with pytest.raises(SpecError, match="Is this the world"):
        policy_player(world, other)
    observation = world.reset()
    with pytest.raises(NonFiniteError, match="actions"):
        PolicyActor(Constant(np.nan), torch.Generator()).choose(observation)
    PolicyActor(Constant(logp=np.nan), torch.Generator()).choose(observation)
    with pytest.raises(NonFiniteError, match="log-probabilities"):
        PolicyActor(Constant(logp=np.nan), torch.Generator(), scored=True).choose(observation)


def test_a_world_that_neither_runs_nor_ends_is_no_endless_loop():
    class Stuck(Countdown):
        def step(self, actions):
            return self.episodes.idle(actions.shape[1])

    player = policy_player(Stuck(2), Constant())
    player.start([3, 4])
    with pytest.raises(SpecError, match="executed no control step"):
        list(player)
