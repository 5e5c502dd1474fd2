"""Graded quality: noise that is found by bisection, draws that belong to episodes alone, columns that come back."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_episodes import moving_episodes

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.data.lerobot_format import QUALITY, read_dataset, write_dataset
from robopolicy.data.lerobot_reading import read_columns
from robopolicy.data.quality import (
    COLUMNS,
    GAUSSIAN,
    NEEDED,
    RANDOM,
    SEGMENT,
    TRUNCATED,
    Disturbance,
    Disturbances,
    DisturbedController,
    DisturbedPolicy,
    Idle,
    Trial,
    columns,
    dataset_name,
    expert_level,
    fingerprint,
    fixed,
    medium_level,
    read_behaviour,
    read_quality,
    schedule,
)
from robopolicy.data.record import record
from sims.registry import make_expert, make_world

ACTION = Field((2,), low=(-1.0, 0.0), high=(1.0, 4.0))
SEEDS = episode_seeds(0, "noise", 40)


class Still:
    """Always the same action; as a policy, in chunks of three."""

    spec = PolicySpec({STATE: Field((6,))}, Field((2,)), 1, 3, 3, 0, 10.0)

    def __init__(self, action=(0.3, 1.0)):
        self.action = np.array(action)

    def reset(self, rows=None):
        pass


class StillController(Still):
    spec = None

    def act(self, observation):
        return np.tile(self.action, (len(observation[STATE]), 1))


class StillPolicy(Still):
    def act(self, observation, generator, *, deterministic=False):
        return Decision(torch.as_tensor(self.action).expand(len(observation[STATE]), 3, 2))


def acted(plan, action=ACTION, controller=None, rows=40):
    """What a disturbed controller does in `rows` episodes, [rows, T, A]."""
    disturbed = DisturbedController(controller or StillController(), Disturbances(plan, rows, action))
    disturbed.reset()
    return np.stack([disturbed.act({STATE: np.zeros((rows, 1, 4))}) for _ in range(plan.horizon)], 1)


# -- finding the noise -------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    centre=st.floats(0.01, 0.99),
    width=st.floats(0.005, 0.5),
    best=st.floats(0.6, 1.0),
    worst=st.floats(0.0, 0.25),
    episodes=st.sampled_from([64, 128]),
)
def test_bisection_finds_a_level_in_the_band_on_any_falling_curve(centre, width, best, worst, episodes):
    def falling(level):
        return 1 / (1 + np.exp(np.clip((level - centre) / width, -500, 500)))

    def success(level):
        share = (falling(level) - falling(1.0)) / (falling(0.0) - falling(1.0))
        return round((worst + (best - worst) * share) * episodes) / episodes  # as measured on so many episodes

    tried = []

    def trial(level):
        tried.append(level)
        return Trial(level, success(level), episodes)

    level = medium_level(trial, success(0.0), success(1.0))
    assert 0.3 <= success(level) <= 0.5
    assert len(tried) <= 12
    assert len(set(tried)) == len(tried)


def test_bisection_on_measured_binomials_gives_the_success_it_was_asked_for():
    rates = []
    for seed in range(60):
        draws = np.random.default_rng(seed).random(128)  # episodes share their draws over the levels

        def trial(level, draws=draws):
            return Trial(level, float((draws < np.clip(1.2 - 1.6 * level, 0, 1)).mean()), 128)

        rates.append(np.clip(1.2 - 1.6 * medium_level(trial, 1.0, 0.0), 0, 1))
    assert np.mean([0.3 <= each <= 0.5 for each in rates]) > 0.9  # 128 episodes leave 0.043 of chance
    assert abs(np.mean(rates) - 0.4) < 0.02


def test_no_medium_is_an_error_that_says_what_was_measured():
    def jump(level):
        return Trial(level, 1.0 if level < 0.37 else 0.0, 64)

    with pytest.raises(DataError, match=r"between level 0\.3699 and 0\.3701"):
        medium_level(jump, 1.0, 0.0)
    with pytest.raises(DataError, match=r"it is 20% without noise and 0% with uniform"):
        medium_level(jump, 0.2, 0.0)
    with pytest.raises(DataError, match="60% with uniform random actions"):
        medium_level(jump, 1.0, 0.6)
    assert medium_level(jump, 0.38, 0.0) == 0.0, "an actor that is medium by itself is left alone"


def test_experts_have_as_much_noise_as_costs_nothing():
    def gentle(success):
        return lambda level: Trial(level, success[level], 128)

    assert expert_level(gentle({0.1: 0.99}), 1.0) == 0.1
    assert expert_level(gentle({0.1: 0.96, 0.05: 0.98}), 1.0) == 0.05
    assert expert_level(gentle({0.1: 0.9, 0.05: 0.94}), 1.0) == 0.0
    assert expert_level(gentle({0.1: 0.96}), 0.96) == 0.1
    assert expert_level(gentle({}), 0.9) == 0.0, "nothing is to be lost by an actor that is below already"


# -- disturbing --------------------------------------------------------------------------------------------------


def test_the_path_leads_from_the_actor_alone_to_uniform_actions_alone():
    assert Disturbance.at(0) == Disturbance(0.0, 0.0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Disturbance.at(1.5)
    expert = acted(fixed(np.zeros(40), SEEDS, 30))
    assert np.array_equal(expert, np.broadcast_to([0.3, 1.0], expert.shape))
    uniform = acted(fixed(np.ones(40), SEEDS, 30))
    assert np.array_equal(uniform, acted(fixed(np.ones(40), SEEDS, 30), controller=Idle(ACTION)))
    assert np.allclose(uniform.mean((0, 1)), [0.0, 2.0], atol=0.1)
    assert np.allclose(uniform.std((0, 1)), np.array([2.0, 4.0]) / np.sqrt(12), rtol=0.05)
    assert (uniform.min((0, 1)) >= [-1, 0]).all() and (uniform.max((0, 1)) <= [1, 4]).all()


def test_noise_is_as_large_and_uniform_actions_as_frequent_as_stated():
    plan = fixed(np.full(40, 0.2), SEEDS, 200)
    actions, segments = acted(plan), plan.segments()
    own = segments == 0
    assert abs((~own).mean() - 0.04) < 0.01
    spread = actions[own] - [0.3, 1.0]
    # Half the range is 1 and 2; 1.0 is two and a half standard deviations (0.4) above the lower bound, 0.
    assert np.allclose(spread.std(0), [0.2, 0.4], rtol=0.05)
    assert np.abs(spread.mean(0)).max() < 0.02
    assert set(np.unique(segments)) == {0, 1}
    more = fixed(np.full(40, 0.5), SEEDS, 200).segments() > 0
    assert more[~own].all(), "a higher level disturbs what a lower one did, and more"
    assert abs(more.mean() - 0.25) < 0.02


def test_draws_belong_to_the_episode_and_not_to_rows_or_levels():
    plan = fixed(np.linspace(0, 1, 40), SEEDS, 20)
    every = acted(plan)
    assert np.array_equal(every[7], acted(fixed(np.array([np.linspace(0, 1, 40)[7]]), SEEDS[7:8], 20), rows=1)[0])
    assert len({each.tobytes() for each in every}) == 40
    with pytest.raises(ConfigError, match="finite bounds"):
        Disturbances(plan, 4, Field((2,)))
    spent = Disturbances(plan, 40, ACTION)
    spent.start()
    with pytest.raises(DataError, match="All 40 episodes"):
        spent.start([0])


@pytest.mark.parametrize("batch_size", [3, 16])
def test_recordings_do_not_depend_on_the_batch_nor_on_chunks(batch_size):
    seeds, noise = episode_seeds(0, "start", 10), episode_seeds(0, "noise", 10)

    def recorded(rows, policy=False, quality="replay"):
        world = make_world("reach_planar", rows, threads=1)
        horizon, action = world.spec.horizon, world.spec.action
        disturbances = Disturbances(schedule(quality, noise, horizon, expert=0.1, medium=0.6), rows, action)
        expert = make_expert("reach_planar", world.spec)
        if policy:
            return record(world, DisturbedPolicy(StillPolicy(), disturbances), seeds, generator=torch.Generator())
        controller = StillController() if quality == "medium" else expert
        return record(world, DisturbedController(controller, disturbances), seeds)

    alone, together = recorded(1), recorded(batch_size)
    assert torch.equal(alone.actions, together.actions)
    assert torch.equal(alone.lengths, together.lengths)
    assert 3 < alone.lengths.float().mean() < 40
    chunked, single = recorded(batch_size, policy=True, quality="medium"), recorded(batch_size, quality="medium")
    assert torch.allclose(chunked.actions, single.actions, atol=1e-6)
    assert torch.equal(chunked.lengths, single.lengths)


# -- schedules ---------------------------------------------------------------------------------------------------


def test_every_quality_disturbs_as_it_says():
    plans = {name: schedule(name, SEEDS, 30, expert=0.1, medium=0.5) for name in NEEDED}
    assert (plans["random"].random == 1).all()
    assert np.allclose(plans["expert"].gaussian, 0.1) and np.allclose(plans["expert"].random, 0.01)
    assert np.allclose(plans["medium"].gaussian, 0.5) and np.allclose(plans["medium"].random, 0.25)
    replay = plans["replay"].random[:, 0]
    assert replay[0] == 1 and replay[-1] == 0.25 and (np.diff(replay) < 0).all()
    mixed = plans["mixed"].gaussian[:, 0]
    assert np.allclose(mixed[::2], 0.1) and np.allclose(mixed[1::2], 0.5)
    with pytest.raises(DataError, match="noise level 'medium'"):
        schedule("replay", SEEDS, 30, expert=0.1)


def test_play_is_cut_into_segments_of_experts_uniform_and_held_actions():
    plan = schedule("play", episode_seeds(0, "play", 200), 120, expert=0.1)
    actions, segments = acted(plan, rows=200), plan.segments()
    shares = [(plan.random < 1).mean(), ((segments == 1) & (plan.random == 1)).mean(), (segments == 2).mean()]
    assert np.allclose(shares, 1 / 3, atol=0.04)
    held = segments == 2
    begin = (plan.source == np.arange(120)) & held
    kept = held[:, 1:] & ~begin[:, 1:]
    assert (actions[:, 1:][kept] == actions[:, :-1][kept]).all(), "one action is kept for a whole segment"
    kind = np.where(plan.random < 1, 0, np.where(segments == 2, 2, 1))
    changes = np.diff(kind, axis=1) != 0
    assert 120 / 25 / 4 < changes.sum(1).mean() < 120 / 5


def test_play_covers_more_of_the_workspace_than_experts():
    """Cells of a grid over three joints of the arm, weighted by their entropy, at equal numbers of steps."""

    def cells(quality):
        world = make_world("pick_place", 24, threads=1)
        noise, horizon = episode_seeds(0, "noise", 24), world.spec.horizon
        disturbances = Disturbances(schedule(quality, noise, horizon, expert=0.1), 24, world.spec.action)
        actor = DisturbedController(make_expert("pick_place", world.spec), disturbances)
        states = record(world, actor, episode_seeds(0, "start", 24)).observation[STATE][:, :3]
        chosen = states[torch.randperm(len(states), generator=torch.Generator().manual_seed(0))[:400]]
        share = torch.unique((chosen * 8).round(), dim=0, return_counts=True)[1] / 400
        return float(torch.exp(-(share * share.log()).sum()))

    assert cells("play") > 1.2 * cells("expert")


# -- what is stored ----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    episodes = moving_episodes(image=False)
    plan = schedule("play", SEEDS[:3], 9, expert=0.4)
    described = {"name": "gen-v1/toy-play", "quality": "play", "anchors": {}}
    write_dataset(episodes, tmp_path / "data", columns=columns(episodes, plan), quality=described)
    return tmp_path / "data", episodes, plan


def test_columns_come_back_through_our_reader_and_lerobots(stored):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    folder, episodes, plan = stored
    behaviour = read_behaviour(folder)
    assert set(behaviour) == set(COLUMNS)
    begin = 0
    for episode, length in enumerate(episodes.lengths.tolist()):
        steps = slice(begin, begin + length)
        assert np.array_equal(behaviour[GAUSSIAN][steps], plan.gaussian[episode, :length])
        assert np.array_equal(behaviour[RANDOM][steps], plan.random[episode, :length])
        assert np.array_equal(behaviour[SEGMENT][steps], plan.segments()[episode, :length])
        ended = bool(behaviour[TRUNCATED][steps][-1])
        assert ended != bool(episodes.terminated[episode])
        assert not behaviour[TRUNCATED][steps][:-1].any()
        begin += length
    assert torch.equal(read_dataset(folder).actions, episodes.actions)
    dataset = LeRobotDataset("local/graded", root=folder)
    assert set(COLUMNS) <= set(dataset.features)
    for step in range(episodes.step_count):
        item = dataset[step]
        assert all(item[name].item() == behaviour[name][step].item() for name in COLUMNS)
        assert bool(item["next.terminated"]) + bool(item[TRUNCATED]) == bool(item["next.done"])
    assert read_quality(folder)["quality"] == "play"


def test_what_is_appended_must_say_the_same_and_nobody_vouches_for_the_whole(stored):
    folder, episodes, plan = stored
    with pytest.raises(DataError, match=r"other columns.*behaviour.gaussian"):
        write_dataset(episodes, folder, existing="append")
    write_dataset(episodes, folder, existing="append", columns=columns(episodes, plan), quality={"name": "other"})
    assert torch.equal(read_behaviour(folder)[SEGMENT], columns(episodes, plan)[SEGMENT].repeat(2))
    with pytest.raises(DataError, match="records no dataset quality"):
        read_quality(folder)


def test_ordinary_datasets_have_none_of_it(tmp_path):
    write_dataset(moving_episodes(image=False), tmp_path / "plain")
    assert not (tmp_path / "plain" / QUALITY).exists()
    features = json.loads((tmp_path / "plain" / "meta" / "info.json").read_text())["features"]
    assert not set(COLUMNS) & set(features)
    with pytest.raises(DataError, match=r"no numeric column 'behaviour.gaussian'"):
        read_behaviour(tmp_path / "plain")
    with pytest.raises(DataError, match=r"collect\.quality=medium"):
        read_quality(tmp_path / "plain")
    (tmp_path / "plain" / QUALITY).write_text("[1]")
    with pytest.raises(DataError, match="contains a list"):
        read_quality(tmp_path / "plain")
    assert torch.equal(read_columns(tmp_path / "plain", ["action"])["action"], moving_episodes(image=False).actions)


def test_columns_want_the_schedule_that_they_were_recorded_under():
    with pytest.raises(DataError, match="do not match a schedule"):
        columns(moving_episodes(image=False), schedule("random", SEEDS, 9))


def test_names_and_fingerprints():
    assert dataset_name("push_t", "medium") == "gen-v1/push_t-medium"
    assert dataset_name("metaworld/reach-v3", "expert") == "gen-v1/metaworld-reach-v3-expert"
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
