"""Images after decisions that nothing follows are those that the world showed before any reset."""

import numpy as np
import pytest
import torch
from seeing_toys import CAMERA, SeeingWorld, denoising_policy

from robopolicy.core.rollouts import visible
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.critic import state_critic
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.update import Learner


class Remembering(SeeingWorld):
    """Keeps every observation that a step returned; its images change with time."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        self.shown: list[np.ndarray] = []

    def observe(self) -> dict:
        found = super().observe()
        return {**found, CAMERA: found[CAMERA] // 2 + (self.time % 50).astype(np.uint8)[:, None, None, None, None]}

    def step(self, actions: np.ndarray):
        found = super().step(actions)
        self.shown.append(found.observation[CAMERA].copy())
        return found


def collected(algorithm: str, world: Remembering):
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning()
    config = FinetuneConfig(algorithm=algorithm, rollout_length=5, groups=2, group_size=2, evaluate_every=0)
    generator = torch.Generator().manual_seed(0)
    return make_collector(world, policy, build_algorithm(config), config, 0, generator).collect(0)


def test_streams_keep_what_was_shown_where_an_episode_ends_and_at_the_end():
    world = Remembering(3)
    rollouts = collected("dppo", world)
    where = rollouts.ended.clone()
    where[:, -1] = True
    assert bool(rollouts.ended[:, :-1].any())
    shown = torch.from_numpy(np.stack(world.shown, 1))
    assert torch.equal(visible(rollouts, where, following=True, images=True)[CAMERA], shown[where])
    assert CAMERA not in rollouts.next_observation


def test_episodes_keep_what_they_ended_with():
    world = Remembering(4)
    rollouts = collected("grpo", world)
    shown = torch.from_numpy(np.stack(world.shown, 1))
    assert rollouts.shape == (4, 3)
    where = rollouts.ended & rollouts.alive
    assert torch.equal(visible(rollouts, where, following=True, images=True)[CAMERA], shown[:, -1])


@pytest.mark.parametrize(
    ("train_encoder", "auxiliaries", "seen"), [(False, (), False), (True, (), True), (False, ("bc",), True)]
)
def test_minibatches_hold_images_only_where_somebody_looks(train_encoder, auxiliaries, seen, monkeypatch):
    world = SeeingWorld(4)
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning(train_encoder=train_encoder)
    looked = []
    plain = Learner._actor_step

    def spy(self, batch, *rest):
        looked.append(CAMERA in batch.observation)
        return plain(self, batch, *rest)

    monkeypatch.setattr(Learner, "_actor_step", spy)
    critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    config = FinetuneConfig(
        algorithm="dppo", auxiliaries=auxiliaries, iterations=1, rollout_length=2, epochs=1, critic_warmup=0,
        ratio_tolerance=1e-4, evaluate_every=0,
    )  # fmt: skip
    finetune(policy, critic, world, config)
    assert looked and set(looked) == {seen}
