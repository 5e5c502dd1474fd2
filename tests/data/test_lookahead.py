"""What a controller would do for several steps, from wherever somebody else has got to."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.building.worlds import build_lookahead
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.lookahead import LookaheadController
from robopolicy.data.record import record
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.training.pretrain import regression_batches
from sims.experts import Noise, NoisyController
from sims.registry import load_task, make_world

STEPS = 4


def worlds(rows, **options):
    return make_world("push_cube", rows, **options), make_world("push_cube", rows)


def test_undisturbed_it_says_what_the_controller_then_does():
    world, ahead = worlds(3)
    expert = load_task("push_cube").expert()
    episodes = record(world, expert, np.arange(4), teacher=LookaheadController(expert, world, ahead, STEPS))
    assert episodes.labels is not None and episodes.labels.shape[1:] == (STEPS, 2)
    done = episodes.actions_ahead(STEPS)
    begun = episodes.starts[episodes.episode_of_step]
    left = episodes.lengths[episodes.episode_of_step] - (torch.arange(episodes.step_count) - begun)
    inside = left >= STEPS
    assert int(inside.sum()) > 40
    assert torch.equal(episodes.label_steps, left.clamp(max=STEPS))  # what it would do when all is over means nothing
    np.testing.assert_allclose(episodes.labels[inside].numpy(), done[inside].numpy(), atol=1e-6)


@pytest.mark.parametrize("cameras", [(), ("top",)])
def test_where_noise_leads_it_says_what_would_come_of_the_controller_from_there(cameras):
    world, ahead = worlds(3, cameras=cameras, image_size=16)
    expert = load_task("push_cube").expert()
    noisy = NoisyController(expert, Noise(gaussian=0.4), 0, world.spec.action)
    episodes = record(world, noisy, np.arange(3), teacher=LookaheadController(expert, world, ahead, STEPS))
    assert episodes.labels is not None
    again = make_world("push_cube", 1)
    for episode, step in ((0, 0), (1, 5), (2, 9)):
        observation = again.reset(seeds=[episode])
        first = int(episodes.starts[episode])
        for action in episodes.actions[first : first + step].numpy():
            observation = again.step(action[None, None]).observation
        for label in episodes.labels[first + step].numpy():
            expected = np.clip(expert.act(observation), -1, 1)
            np.testing.assert_allclose(label, expected[0], atol=1e-5)
            observation = again.step(expected[:, None]).observation


class Counts:
    """Remembers how often it was asked; moves a hundredth for each time."""

    def __init__(self):
        self.asked = 0

    def reset(self, rows=None):
        self.asked = 0

    def act(self, observation):
        self.asked += 1
        return np.full((len(observation[STATE]), 2), self.asked / 100)


def test_what_a_controller_remembers_goes_on_and_only_what_happened_stays_remembered():
    world, ahead = worlds(1)
    counts = Counts()
    episodes = record(world, NoisyController(load_task("push_cube").expert(), 0.4, 0, world.spec.action), [0],
                      teacher=LookaheadController(counts, world, ahead, STEPS))  # fmt: skip
    assert episodes.labels is not None
    labels = np.rint(100 * episodes.labels[:, :, 0].numpy()).astype(int)
    steps = np.arange(1, len(labels) + 1)
    np.testing.assert_array_equal(labels, np.stack([steps + place for place in range(STEPS)], 1))


class Locked(Counts):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class NoSnapshots:
    """A world that cannot be saved."""

    def __init__(self, world):
        self.spec, self.batch_size = world.spec, world.batch_size
        self.reset, self.step, self.close = world.reset, world.step, world.close


def test_where_it_cannot_be_the_controller_says_a_step_or_the_reason_is_said():
    world, ahead = worlds(1)
    expert, section = load_task("push_cube").expert(), compose(["world=push_cube"]).world
    assert isinstance(build_lookahead(section, NoSnapshots(world), STEPS), type(expert))
    assert isinstance(build_lookahead(section, world, 1), type(expert))
    with pytest.raises(ConfigError, match="does not support snapshots"):
        LookaheadController(expert, NoSnapshots(world), ahead, STEPS)
    with pytest.raises(ConfigError, match="Locked cannot be deep-copied"):
        LookaheadController(Locked(), world, ahead, STEPS)
    foresight = build_lookahead(section, world, STEPS)
    assert isinstance(foresight, LookaheadController) and foresight.ahead.batch_size == 1
    foresight.close()


def test_what_lies_behind_the_end_is_not_learned_and_the_disk_remembers_it(tmp_path):
    world, ahead = worlds(2)
    expert = load_task("push_cube").expert()
    episodes = record(world, expert, np.arange(2), teacher=LookaheadController(expert, world, ahead, STEPS))
    write_dataset(episodes, tmp_path / "dataset")
    read = read_dataset(tmp_path / "dataset")
    assert torch.equal(read.label_steps, episodes.label_steps)
    config = DenoisingPolicyConfig(width=8, depth=1, chunk=2, prediction_steps=STEPS + 1, sampling_steps=2)
    policy = DenoisingPolicy(config, read.observation_fields, read.action_field, fps=read.fps)
    batch = next(regression_batches(policy, read, 200, torch.Generator().manual_seed(0)))
    valid = batch["action_valid"].sum(1)
    assert torch.equal(valid, read.label_steps[batch["steps"]]) and set(valid.tolist()) == {1, 2, 3, 4}
    # Beside episodes without labels, these say what was done until their end.
    unlabelled = replace(read, labels=None, label_steps=None)
    joined = Episodes.concatenate([read, unlabelled])
    half = read.step_count
    assert torch.equal(joined.label_steps[half:], joined.label_steps[:half])
    assert Episodes.concatenate([unlabelled, unlabelled]).label_steps is None


def test_it_plays_on_behind_success_but_not_behind_the_time_limit():
    """A policy that comes a little later still has to know what to do; nobody comes after the time limit."""
    section = compose(["world=push_cube"]).world
    world = make_world("push_cube", 4)
    says = build_lookahead(section, world, STEPS)
    assert isinstance(says, LookaheadController)
    expert = load_task("push_cube").expert()
    episodes = record(world, expert, np.arange(4), teacher=says)
    last = episodes.starts + episodes.lengths - 1
    assert episodes.success.all() and (episodes.label_steps[last] == STEPS).all()
    still = NoisyController(expert, Noise(random=0.95, hold=5), 0, world.spec.action)
    failed = record(world, still, np.arange(4), teacher=says)
    late = (failed.starts + failed.lengths - 1)[~failed.success]
    assert len(late) and (failed.label_steps[late] == 1).all()
    says.close()


@pytest.mark.long
def test_the_verbs_say_whole_chunks_and_history_does_not_matter(tmp_path, capsys):
    shared = [f"run.root={tmp_path}", "run.threads=1", "world=push_cube", "collect.episodes=3"]
    labelled = ["collect", *shared, "collect.noise=['0.4']", "collect.label_policy=expert"]
    for name, more, length in (
        ("whole", [], 8),
        ("one", ["collect.label_steps=1"], 1),
        ("past", ["collect.label_steps=3", "world.options.history=2", "world.cameras=[top]", "world.image_size=16"], 3),
    ):
        assert main([*labelled, f"run.name={name}", *more]) == 0
        episodes = read_dataset(tmp_path / "collect" / name / "0" / "dataset")
        assert episodes.labels is not None and episodes.labels.shape[1] == length
        assert ENVIRONMENT_STATE in episodes.observation
    states = ["run.name=past", "policy.width=8", "policy.depth=1", "train.fit.steps=1", "train.evaluate_episodes=0"]
    states += ["policy.observation_keys=[observation.state,observation.environment_state]"]
    assert main(["train", *shared[:3], *states]) == 0
    assert "The teacher labels 3 steps ahead" in capsys.readouterr().out
    small = ["policy.width=16", "policy.depth=1", "teach.rounds=2", "teach.episodes=3", "teach.fit.steps=2"]
    assert main(["teach", *shared[:3], *small, "teach.last_round_steps=2", "teach.evaluate_episodes=0",
                 "teach.teacher=expert"]) == 0  # fmt: skip
    labels = read_dataset(tmp_path / "teach/push_cube/0/rounds/1/dataset").labels
    assert labels is not None and labels.shape[1] == 4
