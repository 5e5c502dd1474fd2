"""What a teacher would have done: recorded in every step, stored, and learned in the place of what was done."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, PolicySpec
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.training.pretrain import regression_batches
from sims.experts import Noise, NoisyController
from sims.registry import load_task, make_world


def seen_before(episodes: Episodes) -> dict[str, np.ndarray]:
    """Return what was seen before every action, [N, 1, ...]."""
    frames = torch.arange(episodes.step_count) + episodes.episode_of_step
    return {key: value[frames][:, None].numpy() for key, value in episodes.observation.items()}


def noisy_episodes(batch_size: int = 4, count: int = 6) -> Episodes:
    world = make_world("push_cube", batch_size)
    noisy = NoisyController(load_task("push_cube").expert(), Noise(gaussian=0.4), 0, world.spec.action)
    return record(world, noisy, np.arange(count), teacher=load_task("push_cube").expert())


class Teacher:
    """Moves against its velocity, in chunks of three: the first counts. With noise unless it is told not to."""

    def __init__(self):
        fields = {STATE: load_task("push_cube").observation[STATE]}
        self.spec = PolicySpec(fields, Field((2,), low=-1.0, high=1.0), 1, 3, 3, 0, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        assert deterministic
        first = -5 * observation[STATE][:, -1, 2:4]
        return Decision(torch.stack([first, first + 9, first + 9], 1))

    def reset(self, rows=None): ...


def test_labels_are_what_the_expert_would_do_without_its_noise():
    episodes = noisy_episodes()
    assert episodes.labels is not None
    clean = load_task("push_cube").expert().act(seen_before(episodes))
    np.testing.assert_allclose(episodes.labels[:, 0].numpy(), clean, atol=1e-5)
    assert (episodes.labels[:, 0] - episodes.actions).abs().mean() > 0.1
    other = noisy_episodes(batch_size=6)  # other noise and so other lengths, but labels of what was seen there
    clean = load_task("push_cube").expert().act(seen_before(other))
    np.testing.assert_allclose(other.labels[:, 0].numpy(), clean, atol=1e-5)


def test_a_teacher_labels_every_step_of_a_students_chunks(tmp_path):
    world = make_world("push_cube", 3)
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2, denoising_steps=10, chunk=4, prediction_steps=4)
    student = DenoisingPolicy(config, world.spec.observation, world.spec.action, fps=10)
    episodes = record(world, student, np.arange(4), generator=torch.Generator().manual_seed(0), teacher=Teacher())
    expected = np.clip(-5 * seen_before(episodes)[STATE][:, 0, 2:4], -1, 1)
    assert episodes.labels.shape[1:] == (3, 2)  # its whole chunk
    np.testing.assert_allclose(episodes.labels[:, 0].numpy(), expected, atol=1e-6)
    assert (episodes.labels[:, 1:] == 1).all()
    write_dataset(episodes, tmp_path / "data")
    assert torch.equal(read_dataset(tmp_path / "data").labels, episodes.labels)
    # The student predicts four steps: what it learns is the teacher's three from there, whatever it did itself.
    batch = next(regression_batches(student, episodes, 64, torch.Generator().manual_seed(0)))
    own = np.clip(-5 * batch["observation"][STATE][:, -1, 2:4].numpy(), -1, 1)
    np.testing.assert_allclose(batch["actions"][:, 0].numpy(), own, atol=1e-6)
    assert batch["action_valid"].tolist() == [[True, True, True, False]] * 64
    plain = replace(episodes, labels=None)
    joined = Episodes.concatenate([plain, episodes])
    assert torch.equal(joined.labels[: len(plain.actions) - 2, 1][0], plain.actions[1])
    assert torch.equal(joined.labels[plain.step_count - 1], plain.actions[-1].expand(3, -1))
    with pytest.raises(DataError, match="different chunk lengths"):
        Episodes.concatenate([episodes, replace(episodes, labels=episodes.labels[:, :2])])


def test_labels_survive_the_disk_and_what_has_none_is_labelled_by_what_was_done(tmp_path):
    episodes = noisy_episodes()
    write_dataset(episodes, tmp_path / "data")
    back = read_dataset(tmp_path / "data")
    assert torch.equal(back.labels, episodes.labels) and torch.equal(back.actions, episodes.actions)
    feature = json.loads((tmp_path / "data" / "meta" / "info.json").read_text())["features"]["label.action"]
    assert feature["shape"] == [2] and feature["names"] == ["velocity_x", "velocity_y"]
    plain = replace(episodes, labels=None)
    write_dataset(plain, tmp_path / "plain")
    assert read_dataset(tmp_path / "plain").labels is None
    joined = Episodes.concatenate([plain, episodes])
    assert torch.equal(joined.labels, torch.cat([episodes.actions[:, None], episodes.labels]))
    assert Episodes.concatenate([plain, plain]).labels is None
    chosen = joined.select([1, 8])
    steps = joined.episode_of_step
    assert torch.equal(chosen.labels, joined.labels[(steps == 1) | (steps == 8)])


def test_what_is_learned_is_the_label():
    episodes = noisy_episodes()
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2, denoising_steps=10, chunk=2, prediction_steps=2)
    policy = DenoisingPolicy(config, episodes.observation_fields, episodes.action_field, fps=10)
    batch = next(regression_batches(policy, episodes, 64, torch.Generator().manual_seed(0)))
    observation = {key: value[:, -1:].numpy() for key, value in batch["observation"].items() if key != "task"}
    clean = load_task("push_cube").expert().act({key: observation[key] for key in (STATE, ENVIRONMENT_STATE)})
    np.testing.assert_allclose(batch["actions"][:, 0].numpy(), clean, atol=1e-5)


@pytest.mark.long
def test_the_verbs_record_and_learn_labels(tmp_path, capsys):
    shared = [f"run.root={tmp_path}", "run.threads=1", "world=push_cube"]
    noisy = ["collect", *shared, "collect.episodes=6", "collect.noise=['0.4']", "collect.label_policy=expert"]
    assert main([*noisy, "world.cameras=[top]", "world.image_size=16"]) == 0
    data = tmp_path / "collect/push_cube/0/dataset"
    assert read_dataset(data).labels is not None
    small = ["policy.width=16", "policy.depth=1", "train.fit.steps=3", "train.evaluate_episodes=0"]
    states = "policy.observation_keys=[observation.state,observation.environment_state]"
    assert main(["train", *shared, *small, states]) == 0
    assert "the teacher's actions (label.action)" in capsys.readouterr().out
    teacher = tmp_path / "train/push_cube/0/checkpoint"
    again = ["collect", *shared, "collect.episodes=2", f"collect.policy={teacher}", "collect.deterministic=true"]
    filmed = ["world.cameras=[top]", "world.image_size=16", "run.name=again"]
    assert main([*again, *filmed, f"collect.label_policy={teacher}"]) == 0
    episodes = read_dataset(tmp_path / "collect/again/0/dataset")
    assert episodes.cameras == ("top",) and episodes.labels is not None
    for wrong, message in {
        "collect.quality=medium": "unset collect.quality",
        "collect.deterministic=true": "applies to a policy",
    }.items():
        assert main([*noisy, "run.name=wrong", wrong]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_label_that_is_no_number_is_refused(bad, tmp_path):
    episodes = noisy_episodes()
    labels = episodes.labels.clone()
    labels[3, 0, 1] = bad
    with pytest.raises(DataError, match=r"'label\.action' \(velocity_y\) contains NaN or infinity"):
        write_dataset(replace(episodes, labels=labels), tmp_path / "data")
