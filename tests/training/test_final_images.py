"""Images that rollouts keep are those that the world showed, every one once, and none where nobody looks at them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing_toys import CAMERA, SIZE, SeeingWorld, denoising_policy

from robopolicy.core.errors import DataError
from robopolicy.core.images import PackedFrames
from robopolicy.core.rollouts import Rollouts, critic_observation
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.data.record import record
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.critic import Critic, state_critic
from robopolicy.rl.episodes import EpisodePlayer, groups_of
from robopolicy.rl.preferences import Preferences, read_pairs
from robopolicy.rl.weights import episode_sizes
from robopolicy.training import finetune as finetuning
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import ExpertMixer, expert_rollouts
from robopolicy.training.needs import needs_images
from robopolicy.training.update import Learner
from sims.registry import make_world

TOP = IMAGE_PREFIX + "top"
CONTEXT = Context(torch.Generator())


class Remembering(SeeingWorld):
    """Keeps every observation that a step returned; its images change with time."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        self.shown: list[np.ndarray] = []

    def observe(self) -> dict:
        observation = super().observe()
        return {
            **observation,
            CAMERA: observation[CAMERA] // 2 + (self.time % 50).astype(np.uint8)[:, None, None, None, None],
        }

    def step(self, actions: np.ndarray):
        step_result = super().step(actions)
        self.shown.append(step_result.observation[CAMERA].copy())
        return step_result


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
    assert torch.equal(critic_observation(rollouts, where, following=True, images=True)[CAMERA], shown[where])
    assert CAMERA not in rollouts.next_observation


def test_episodes_keep_what_they_ended_with():
    world = Remembering(4)
    rollouts = collected("grpo", world)
    shown = torch.from_numpy(np.stack(world.shown, 1))
    assert rollouts.shape == (4, 3)
    where = rollouts.ended & rollouts.alive
    assert torch.equal(critic_observation(rollouts, where, following=True, images=True)[CAMERA], shown[:, -1])


def shown_at(rollouts) -> torch.Tensor:
    """What `Remembering` shows of contexts and times, [n, 1, SIZE, SIZE, 3] of the n decisions that were taken."""
    row, time = rollouts.alive.nonzero(as_tuple=True)
    brightness = (127 + 300 * rollouts.observation[STATE][row, time, 0, 0]).clamp(0, 255).byte()
    image = brightness[:, None, None, None, None].expand(-1, 1, SIZE, SIZE, 3).clone()
    image[:, :, : SIZE // 2] //= 2
    return image // 2 + (time % 50).byte()[:, None, None, None, None]


@pytest.mark.parametrize("images", ["plain", "packed"])
def test_episodes_that_wait_keep_their_frames_and_those_handed_over_take_theirs_along(images):
    world = Remembering(2)
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning()
    player, generator = EpisodePlayer(world, policy, images=images), torch.Generator().manual_seed(0)
    requests, counts = groups_of(np.arange(5), 1), []
    for turn in range(4):
        rollouts = player.play(requests if not turn else [], generator, groups=1)
        assert torch.equal(critic_observation(rollouts, rollouts.alive, images=True)[CAMERA], shown_at(rollouts))
        assert (
            rollouts.images is not None and len(rollouts.images.frames[CAMERA]) == 3 + 1
        )  # three decisions, and the end
        counts.append(len(player.frames.frames.get(CAMERA, ())))
        player.suspend()
        again = EpisodePlayer(world, policy, images=images)
        again.restore(player.tree())
        player = again
    assert max(counts) <= 2 * 4 + 4


def finetuned(config: FinetuneConfig, train_encoder: bool, monkeypatch) -> tuple[torch.Tensor, list[bool]]:
    """Return the weights after fine-tuning, and whether minibatches hold images."""
    world = SeeingWorld(4)
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning(train_encoder=train_encoder)
    looked, plain = [], Learner._actor_step

    def spy(self, batch, *rest):
        looked.append(batch.images is not None)
        return plain(self, batch, *rest)

    torch.manual_seed(0)
    critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    monkeypatch.setattr(Learner, "_actor_step", spy)
    finetune(policy, critic, world, config)
    monkeypatch.setattr(Learner, "_actor_step", plain)
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()]), looked


CONFIG = FinetuneConfig(
    iterations=1, rollout_length=2, groups=2, group_size=2, epochs=1, critic_warmup=0,
    evaluate_every=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("train_encoder", "auxiliaries", "seen"), [(False, (), False), (True, (), True), (False, ("bc",), True)]
)
@pytest.mark.parametrize("algorithm", ["dppo", "grpo"])
def test_rollouts_hold_images_only_where_somebody_looks(train_encoder, auxiliaries, seen, algorithm, monkeypatch):
    config = replace(CONFIG, algorithm=algorithm, auxiliaries=auxiliaries)
    kept, asked = [], finetuning.needs_images
    monkeypatch.setattr(
        finetuning, "needs_images", lambda *given, **told: kept.append(asked(*given, **told)) or kept[-1]
    )
    weights, looked = finetuned(config, train_encoder, monkeypatch)
    assert kept == [seen] and set(looked) == {seen}
    monkeypatch.setattr(finetuning, "needs_images", lambda *given, **told: True)
    assert torch.equal(finetuned(config, train_encoder, monkeypatch)[0], weights)


@pytest.mark.parametrize("algorithm", ["dppo", "grpo"])
def test_packed_images_teach_what_plain_ones_do(algorithm, monkeypatch):
    config = replace(CONFIG, algorithm=algorithm, auxiliaries=("bc",), minibatch=3)
    plain, _ = finetuned(config, True, monkeypatch)
    packed, learn = [], Learner.update

    def spy(self, rollouts, *rest, **more):
        packed.append(isinstance(rollouts.images.frames[CAMERA], PackedFrames))
        return learn(self, rollouts, *rest, **more)

    monkeypatch.setattr(Learner, "update", spy)
    assert torch.equal(finetuned(replace(config, packed_images=True), True, monkeypatch)[0], plain)
    assert packed == [True]


def test_who_reads_images_is_known_before_anything_is_played():
    world = SeeingWorld(1)
    policy, blind = denoising_policy(world, cameras=True), denoising_policy(world)
    policy.prepare_finetuning(train_encoder=False)
    critic = state_critic(world.spec.observation, 1, width=8)

    def kept(policy, critic=critic, others=False, **changes):
        return needs_images(policy, critic, build_algorithm(replace(CONFIG, **changes)), others=others)

    assert not kept(policy) and not kept(blind) and not kept(policy, None, replay="remix")
    assert kept(policy, others=True)
    assert kept(policy, Critic(torch.nn.Identity(), 1)) and kept(policy, algorithm="grpo", credit=("vppo",))
    assert kept(blind, auxiliaries=("bc",)) and kept(blind, models=("q_ensemble",))
    assert kept(denoising_policy(world, cameras=True))


def seen_by(rollouts: Rollouts) -> torch.Tensor:
    return critic_observation(rollouts, rollouts.alive, images=True)[TOP]


@pytest.fixture(scope="module")
def watched():
    """A token policy that sees two frames of reach_planar, whole episodes of it in pairs, and recorded ones."""
    world = make_world("reach_planar", 4, cameras=("top",), image_size=16, history=2)
    token = TokenConfig(width=8, depth=1, heads=2, feed_forward=8, bins=5, patch=8)
    config = TokenPolicyConfig(chunk=10, history=2, token=token)
    spec = world.spec
    policy = TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    draws = torch.Generator().manual_seed(0)
    played = EpisodePlayer(world, policy).play(groups_of(np.arange(2), 2), draws)
    recorded = record(world, policy, np.arange(5, 9), generator=draws)
    world.close()
    return policy, played, recorded


def test_episodes_of_experts_bring_their_frames(watched):
    policy, played, recorded = watched
    draws = torch.Generator().manual_seed(1)
    order = torch.randperm(4, generator=draws)[:2]
    rows = expert_rollouts(policy, recorded, order, policy.instructions, draws)
    steps = recorded.starts[order][:, None] + 10 * torch.arange(rows.shape[1])
    shown = recorded.windows(steps[rows.alive], 2, 10, keys=[TOP])["observation"][TOP]
    assert torch.equal(seen_by(rows), shown)
    lengths = recorded.lengths[order]
    assert len(rows.images.frames[TOP]) <= int(lengths.sum()) < 2 * int(lengths.sum())
    prepared = played.with_extras(advantage=played.logp_behaviour, **episode_sizes(played.mask)).without(following=True)
    experts = ExpertMixer(policy, recorded, policy.instructions, 0.5, torch.Generator().manual_seed(1))
    joined = experts.beside(prepared, CONTEXT)
    assert len(joined.group) == 6
    assert torch.equal(seen_by(joined.take(torch.arange(4))), seen_by(played))
    assert torch.equal(seen_by(joined.take(torch.arange(4, 6))), shown)


def test_pairs_bring_their_frames_and_no_others(watched, tmp_path):
    _, played, _ = watched
    side = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None, None].expand(played.mask.shape)
    prepared = played.with_extras(advantage=side, **episode_sizes(played.mask)).without(following=True)
    replay = Preferences(share=1.0)
    replay.mix(prepared, CONTEXT)
    ((_, kept),) = replay.kept
    both = played.take(torch.tensor([0, 1]))
    assert torch.equal(seen_by(kept), seen_by(both))
    assert len(kept.images.frames[TOP]) == len(both.without(following=True).compact().images.frames[TOP])
    assert len(kept.images.frames[TOP]) < len(played.images.frames[TOP])
    mixed = replay.mix(prepared, CONTEXT)
    assert torch.equal(seen_by(mixed.take(torch.arange(4, 6))), seen_by(both))
    replay.store(tmp_path / "pairs", ("",))
    again = read_pairs(tmp_path / "pairs").rollouts
    assert torch.equal(seen_by(again.take(torch.arange(2))), seen_by(both))
    other = replace(kept, images=replace(kept.images, frames={TOP: kept.images.frames[TOP][:, :8]}))
    replay.kept = [(0, other)]
    with pytest.raises(DataError, match=r"their observation 'observation.images.top' is \[2, 8, 16, 3\]"):
        replay.mix(prepared, CONTEXT)
