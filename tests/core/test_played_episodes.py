"""What RL played, as a dataset: the same episodes as recording gives, and good for models and for writing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.played_episodes import played_episodes
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import PolicySpec
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.rl.collect import play, start_streams
from robopolicy.rl.episodes import EpisodePlayer
from robopolicy.rl.requests import groups_of
from sims.registry import load_task, make_world

SEEDS = episode_seeds(0, "played", 7)


class HeldExpert:
    """Holds each action of the scripted expert, 1.5 times as large, for a chunk of C control steps."""

    def __init__(self, world, chunk: int):
        spec = world.spec
        self.spec = PolicySpec(spec.observation, spec.action, spec.history, chunk, chunk, 1, spec.fps)
        self.expert = load_task(spec.name).expert()

    def act(self, observation, generator, *, deterministic=False):
        arrays = {key: np.asarray(value) for key, value in observation.items()}
        actions = 1.5 * torch.as_tensor(self.expert.act(arrays), dtype=torch.float32)[:, None]
        one = torch.ones(len(actions), 1)
        return Decision(actions.repeat(1, self.spec.chunk, 1), {}, -one, one.bool())

    def log_prob(self, observation, latents):
        raise NotImplementedError

    def reset(self, rows=None):
        pass


def both(task: str, chunk: int, *, trace: bool = False, **options) -> tuple[Episodes, Episodes]:
    """Return the same episodes, recorded and played by RL in fewer rows than there are episodes."""
    world = make_world(task, 3, **options)
    policy = HeldExpert(world, chunk)
    recorded = record(world, policy, SEEDS, generator=torch.Generator())
    rollouts = EpisodePlayer(world, policy, trace=trace).play(groups_of(SEEDS, 1), torch.Generator())
    return recorded, played_episodes(rollouts, world.spec)


@pytest.mark.parametrize(
    ("task", "chunk", "options"),
    [
        ("reach_planar", 1, {}),
        ("reach_planar", 3, {"history": 4}),
        ("push_choice", 2, {"history": 2}),
        ("reach_planar", 2, {"history": 2, "cameras": ("top",), "image_size": 16}),
        ("reach_planar", 3, {"trace": True}),
        ("push_choice", 4, {"history": 2, "trace": True}),
        ("reach_planar", 2, {"history": 2, "cameras": ("top",), "image_size": 16, "trace": True}),
    ],
)
def test_played_episodes_equal_recorded_ones(task, chunk, options):
    recorded, played = both(task, chunk, **options)
    assert played.lengths.tolist() == recorded.lengths.tolist()
    assert len(set(played.lengths.tolist())) > 1
    assert played.tasks == recorded.tasks
    for key, value in recorded.observation.items():
        assert played.observation[key].dtype == value.dtype
        assert torch.equal(played.observation[key], value), key
    assert torch.equal(played.actions, recorded.actions)
    assert recorded.rewards is not None and played.rewards is not None
    assert set(played.rewards) == set(recorded.rewards)
    for name, value in recorded.rewards.items():
        assert torch.equal(played.rewards[name], value), name
    for name in ("step_success", "terminated", "final_known"):
        assert torch.equal(getattr(played, name), getattr(recorded, name)), name
    assert bool(played.success.any()) if played.success is not None else False
    assert played.observation_fields == recorded.observation_fields


def test_played_episodes_train_world_models_and_become_datasets(tmp_path: Path):
    recorded, played = both("push_choice", 1)
    ours, theirs = played.transitions(), recorded.transitions()
    assert torch.equal(ours.state, theirs.state) and torch.equal(ours.next_state, theirs.next_state)
    write_dataset(played, tmp_path / "dataset")
    read = read_dataset(tmp_path / "dataset")
    assert torch.equal(read.actions, recorded.actions)
    assert read.tasks == recorded.tasks


def test_what_lacks_frames_is_refused():
    world = make_world("reach_planar", 3)
    policy = HeldExpert(world, 3)
    generator = torch.Generator()
    rollouts = EpisodePlayer(world, policy).play(groups_of(SEEDS, 1), generator)
    with pytest.raises(DataError, match=r"trace=True.*history=3"):
        played_episodes(rollouts, world.spec)
    seeing = make_world("reach_planar", 3, cameras=("top",), image_size=16)
    traced = EpisodePlayer(seeing, HeldExpert(seeing, 3), trace=True).play(groups_of(SEEDS, 1), generator)
    with pytest.raises(DataError, match="history=3"):  # frames are not rendered inside chunks
        played_episodes(traced, seeing.spec)
    with pytest.raises(DataError, match="without next observations"):
        played_episodes(rollouts.without(following=True), world.spec)
    streams = play(world, policy, 2, generator, start_streams(world, policy, 0))
    with pytest.raises(DataError, match="streams"):
        played_episodes(streams, world.spec)
