"""A model of image features: what its encoder learns, who may share it, and policies that learn behind it."""

import copy
from dataclasses import replace
from functools import partial

import dot_world
import numpy as np
import pytest
import torch
from dot_world import IMAGE, SPEC, recorded

from robopolicy.building.policies import adapt_policy_to_world, load_policy
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import require_trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.evaluation.world_model import follow, images_imagined
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.critic import state_critic
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.iql import Iql
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FinetuneConfig, FitConfig
from robopolicy.training.critics import BestOfPolicy, critic_interface
from robopolicy.training.fit import fit_stages
from robopolicy.training.offline.configuration import ImaginedPpoConfig
from robopolicy.training.offline.imagined import ImaginedPpo
from robopolicy.training.offline.improvers import Imagination, OfflineContext
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.encoding import EncodedPolicy, encode
from worldmodels.ensemble import EnsembleModel
from worldmodels.latent_ensemble import LatentEnsembleModel, downsample_by_two
from worldmodels.protocol import LATENT

pytestmark = pytest.mark.long

SMALL = LatentEnsembleConfig(
    features=8,
    channels=(8, 8, 8),
    batch_size=32,
    encoder_step_ratio=4.0,
    ensemble=EnsembleConfig(members=2, width=32, depth=1, head_width=16, rollout_step_ratio=0),
)
FIT = FitConfig(steps=250, learning_rate=3e-3)


def trained(config=SMALL, seed=0, episodes=None):
    data = recorded(60) if episodes is None else episodes
    model = LatentEnsembleModel.build(config, SPEC, data, seed)
    fit_stages(model, data, FIT, Generators(seed))
    model.calibrate(data)
    return model.eval()


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    return trained()


@pytest.fixture(scope="module")
def place(learned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent") / "model"
    save_world_model(learned, folder)
    return folder


def frames(count=20, seed=9):
    data = recorded(count, seed=seed)
    return {key: data.observation[key][:count] for key in (STATE, IMAGE)}


def test_it_reads_what_a_robot_sees_and_not_what_only_a_simulator_knows(learned):
    assert set(learned.reads) == {STATE, IMAGE} and ENVIRONMENT_STATE not in learned.reads
    assert list(learned.spec.observation) == [LATENT]
    blind = replace(SPEC, observation={STATE: SPEC.observation[STATE]})
    with pytest.raises(ConfigError, match=r"outputs no images: set world\.cameras"):
        LatentEnsembleModel.build(SMALL, blind, recorded(5), 0)


def test_features_tell_frames_apart(learned):
    """Unseen frames are drawn from their own features, not from others': there is no other way to know the goal."""
    images = recorded(30, seed=4).observation[IMAGE]
    coder, name = learned.autoencoder, IMAGE.replace(".", "/")
    with torch.no_grad():
        features, truth = coder({IMAGE: images}), downsample_by_two(images)
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
        own, others = ((coder.decoders[name](each) - truth).square().mean() for each in (features, features[order]))
    mean = (truth - truth.mean(0)).square().mean()
    assert float(own) < 0.6 * float(mean) < float(others)


def test_people_can_look_at_what_it_imagines(learned):
    data = recorded(10, seed=6)
    assert images_imagined(learned) == (IMAGE,)
    comparison = follow(learned, data, data.starts[:4], 3)
    assert comparison.imagined[IMAGE].shape == comparison.real[IMAGE].shape == (4, 4, 16, 16, 3)
    assert comparison.imagined[IMAGE].dtype == np.uint8 and np.array_equal(
        comparison.imagined[IMAGE][:, 0], comparison.real[IMAGE][:, 0]
    )
    first = data.frame_starts[:8]
    again = learned.drawn(encode(learned, {key: data.observation[key][first] for key in learned.reads}))[IMAGE].numpy()
    assert np.array_equal(again[:, ::2, ::2], again[:, 1::2, 1::2]), "drawn at half the size"
    true = data.observation[IMAGE][first].numpy().astype(float)
    assert np.square(again - true).mean() < 0.6 * np.square(again[::-1] - true).mean()


def test_what_is_drawn_is_measured_against_how_much_pixels_vary(learned):
    data = recorded(30, seed=3)
    stage = learned.encoder_stage()
    batch = next(stage.batches(data, torch.Generator().manual_seed(0)))
    error = stage.loss(batch, torch.Generator())["drawn"]
    assert error.shape == (32,) and float(error.mean().detach()) < 0.6, "1 is the mean frame, drawn everywhere"
    pixels = torch.from_numpy(np.asarray(data.observation[IMAGE]))[:1000].float() / 255
    small = pixels.reshape(len(pixels), 8, 2, 8, 2, 3).mean((2, 4))
    some = torch.linspace(0, len(data.observation[IMAGE]) - 1, min(1000, len(data.observation[IMAGE]))).long()
    assert float(batch["variance"][IMAGE]) == pytest.approx(float(small[some].var(0, correction=0).mean()), rel=1e-4)


@pytest.mark.parametrize("loss", ["draw", "predict"])
def test_the_encoder_learns_to_tell_recorded_vectors(loss: str):
    data = recorded(30)
    model = LatentEnsembleModel.build(replace(SMALL, encoder_loss=loss), SPEC, data, 0)
    stage = model.encoder_stage()
    batch = next(stage.batches(data, torch.Generator().manual_seed(0)))
    assert ENVIRONMENT_STATE in stage.labels.vector.fields
    hidden = stage.labels.vector.pack(data.observation)[:, stage.labels.elements]
    shown = batch["labels"] * hidden.std(0, correction=0) + hidden.mean(0)
    assert all((row - hidden).abs().amax(1).min() < 1e-5 for row in shown), "labels are standardised recorded states"
    first = {key: value if loss == "draw" else value[:, 0] for key, value in batch["frames"].items()}
    read = stage.labels.network(model.autoencoder(first)[None])[0]
    error = stage.loss(batch, torch.Generator().manual_seed(0))["labels"]
    assert torch.allclose(error, (read - batch["labels"]).square().mean(1), atol=1e-6)
    error.sum().backward()
    assert all(bool(weight.grad.abs().sum()) for weight in model.autoencoder.encoders.parameters())
    assert all(weight.grad is None for weight in model.autoencoder.decoders.parameters())


def test_without_a_readout_the_encoder_learns_from_pictures_alone():
    data = recorded(20)
    model = LatentEnsembleModel.build(replace(SMALL, readout_step_ratio=0), SPEC, data, 0)
    stage = model.encoder_stage()
    batch = next(stage.batches(data, torch.Generator().manual_seed(0)))
    assert "labels" not in batch and set(stage.loss(batch, torch.Generator())) == {"drawn"}


def test_a_second_model_keeps_the_encoder_of_the_first(learned, place):
    other = trained(replace(SMALL, encoder=place), seed=5)
    assert list(other.stages()) == ["readout", "ensemble"]
    assert list(learned.stages()) == ["encoder", "readout", "ensemble"]
    assert torch.equal(encode(other, frames())[LATENT], encode(learned, frames())[LATENT])
    first, second = (each.ensemble.dynamics.state_dict() for each in (learned, other))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_model_that_is_trained_on_keeps_its_encoder(learned, place):
    loaded = load_world_model(place)
    assert isinstance(loaded, LatentEnsembleModel) and list(loaded.stages()) == ["readout", "ensemble"]
    before = copy.deepcopy(loaded.encoder_weights())
    fit_stages(loaded, recorded(20, seed=2), replace(FIT, steps=20), Generators(1))
    assert all(torch.equal(before[name], value) for name, value in loaded.encoder_weights().items())


def test_an_encoder_of_something_else_is_refused(place, tmp_path):
    with pytest.raises(
        ConfigError, match=r"outputs 8 features, but this model's encoder reads .* outputs 4: give both"
    ):
        LatentEnsembleModel.build(replace(SMALL, features=4, encoder=place), SPEC, recorded(5), 0)
    states = EnsembleModel.build(EnsembleConfig(members=2, width=8), SPEC, recorded(5), 0)
    save_world_model(states, tmp_path / "states")
    with pytest.raises(ConfigError, match="EnsembleModel, which has no image encoder"):
        LatentEnsembleModel.build(replace(SMALL, encoder=tmp_path / "states"), SPEC, recorded(5), 0)
    with pytest.raises(ConfigError, match="encoder_step_ratio above 0"):
        LatentEnsembleConfig(encoder_step_ratio=0)


@pytest.fixture
def acting(learned):
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, sampling_steps=3, width=16, depth=1)
    latent = {LATENT: learned.spec.observation[LATENT]}
    policy = DenoisingPolicy(config, latent, SPEC.action, fps=SPEC.fps, instructions=SPEC.instructions)
    return EncodedPolicy(policy, learned)


def observed(count=6):
    return {key: value[:, None] for key, value in frames(count).items()}


def test_a_policy_behind_an_encoder_learns_what_the_policy_learns(acting, learned):
    policy = require_trainable(acting)
    policy.prepare_finetuning(None)
    inside = {LATENT: encode(learned, frames(6))[LATENT][:, None]}
    actions = torch.rand(6, 2, 2, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(6, 2, dtype=torch.bool)
    losses = [
        each.loss(
            {"observation": observation, "actions": actions, "action_valid": valid}, torch.Generator().manual_seed(1)
        )
        for each, observation in ((policy, observed()), (acting.policy, inside))
    ]
    assert torch.equal(losses[0]["denoising"], losses[1]["denoising"])
    decision = policy.act(observed(), torch.Generator().manual_seed(2))
    assert torch.allclose(policy.log_prob(observed(), decision.latents).logp, decision.logp, atol=1e-5)
    own = {id(weight) for weight in policy.trainable_parameters()}
    assert own and not own & {id(weight) for weight in learned.parameters()}


def test_its_checkpoint_holds_the_encoder(acting, tmp_path):
    require_trainable(acting).save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert isinstance(loaded, EncodedPolicy)
    ours, theirs = (each.act(observed(), torch.Generator().manual_seed(3)).actions for each in (acting, loaded))
    assert torch.equal(ours, theirs)
    assert check_policy(acting, load_policy).level is Level.TRAINS


def test_a_critic_chooses_for_a_policy_behind_an_encoder_by_its_features(acting, tmp_path):
    data = recorded(20)
    view = critic_interface(require_trainable(acting), data, deployed=True)
    assert set(view.keys) == {STATE, IMAGE} and view.feature_size == acting.model.spec.observation[LATENT].size
    policy = BestOfPolicy(acting, Iql(IqlConfig(width=8, depth=1), view.size, view.actions, 0), view, 3)
    policy.save(tmp_path / "best")
    loaded = load_policy(tmp_path / "best")
    ours, theirs = (each.act(observed(), torch.Generator().manual_seed(3)).actions for each in (policy, loaded))
    assert torch.equal(ours, theirs) and not torch.equal(ours, acting.act(observed(), torch.Generator()).actions)


def test_a_policy_that_only_acts_is_not_trained_behind_an_encoder(learned):
    class Still:
        spec = None

        def act(self, observation, generator, *, deterministic=False):
            """Nothing."""

        def reset(self, rows=None):
            """Nothing."""

    with pytest.raises(ConfigError, match="Still can act but cannot be trained"):
        EncodedPolicy(Still(), learned).to_trainable()  # type: ignore[arg-type]


def test_a_policy_acts_in_imagination_of_its_encoder_and_no_other(acting, learned, place):
    twin = trained(replace(SMALL, encoder=place), seed=6)
    for model in (learned, twin):
        assert adapt_policy_to_world(dot_world.imagined_world(model, 2), acting) is acting.policy
    stranger = dot_world.imagined_world(trained(seed=7), 2)
    with pytest.raises(ConfigError, match="latent of another model"):
        adapt_policy_to_world(stranger, acting)


def test_offline_rounds_tune_what_is_behind_the_encoder(acting, learned):
    policy = require_trainable(acting)
    improver = ImaginedPpo(ImaginedPpoConfig(iterations=2))
    improver.prepare(policy)
    world = dot_world.imagined_world(learned, 8)
    tuning = FinetuneConfig(rollout_length=4, minibatch=16, epochs=1)

    def critic(seed):
        return state_critic(world.spec.observation, 1, 16)

    before, encoder = copy.deepcopy(policy.state_dict()), copy.deepcopy(learned.state_dict())
    imagination = Imagination(world, tuning, critic, partial(adapt_policy_to_world, world))
    lesson = OfflineContext(None, None, None, imagination)  # type: ignore[arg-type]
    figures = improver.improve(policy, lesson, Generators(0), 1.0, "round 1")
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert figures["imagined_steps"] > 0 and changed and all(name.startswith("policy.") for name in changed)
    assert all(torch.equal(value, encoder[name]) for name, value in learned.state_dict().items())
