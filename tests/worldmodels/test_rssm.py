"""The recurrent model's parts keep their formulas; it remembers what one frame does not show; it imagines in images."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from point_world import SPEC as POINTS
from point_world import assembled

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, NonFiniteError
from robopolicy.core.randomness import Generators, uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, WorldSpec
from robopolicy.evaluation.world_model import examine, open_loop
from robopolicy.testing.world import check_world
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import RssmConfig
from worldmodels.env import ImaginedWorld
from worldmodels.heads.outputs import reward_bins, symexp, two_hot, two_hot_mean
from worldmodels.initial_states import context_at, recorded_starts
from worldmodels.protocol import Context
from worldmodels.rssm.dynamics import balanced_divergence, draw, mix_with_uniform, straight_through
from worldmodels.rssm.model import RssmModel

IMAGE = "observation.images.top"
SPEC = replace(POINTS, name="sledges")
TINY = RssmConfig(size="tiny", length=5, batch_size=64, burn_in=3, members=3)


def recorded(episodes=400, steps=12, seed=0):
    """A point on ice: actions change a velocity that no frame shows; reward is progress to the goal; success in 0.2."""
    generator = torch.Generator().manual_seed(seed)
    frames, goals, actions, lengths, progress, won = [], [], [], [], [], []
    for _ in range(episodes):
        position, velocity, goal = (2 * torch.rand(3, 2, generator=generator) - 1) * torch.tensor([[1.0], [0.5], [1.0]])
        frames.append(position)
        for step in range(steps):
            noisy = 2 * (goal - position) - 3 * velocity + torch.randn(2, generator=generator)
            actions.append(noisy.clamp(-1, 1))
            velocity = 0.8 * velocity + 0.2 * actions[-1]
            after = position + velocity
            distance = [(goal - p).norm() for p in (position, after)]
            progress.append(distance[0] - distance[1])
            won.append(distance[1] < 0.2)
            position = after
            frames.append(position)
            if won[-1] or step == steps - 1:
                lengths.append(step + 1)
                goals.append(goal.expand(step + 2, 2))
                break
    return assembled(SPEC, frames, goals, actions, lengths, progress, won)


def trained(config, spec, data, steps):
    torch.set_num_threads(1)
    train, held = data.split(0.1, torch.Generator().manual_seed(0))
    model = RssmModel.build(config, spec, train, seed=0)
    generators = Generators(0)
    for name, (part, share) in model.stages().items():
        fitting = FitConfig(steps=round(share * steps), learning_rate=3e-3, warmup=20)
        fit(part, part.batches(train, generators[name]), fitting, generators)
    model.calibrate(held)
    return model, held


@pytest.fixture(scope="module")
def learned():
    return trained(TINY, SPEC, recorded(), 300)


@pytest.fixture(scope="module")
def begun():
    """A model that has hardly learned: for what holds of any weights."""
    return trained(TINY, SPEC, recorded(), 20)


def world(model, rows, **options):
    def starts(seeds):
        draws = (2 * uniforms(np.asarray(seeds), 4) - 1).astype(np.float32)[:, None]
        position, goal = draws[..., :2], draws[..., 2:]
        return Context({STATE: position, ENVIRONMENT_STATE: np.concatenate([goal, goal - position], -1)})

    return ImaginedWorld(model, starts, rows, **options)


def test_divergences_follow_the_formula_and_move_one_side_each():
    posterior = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log().requires_grad_()
    prior = torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]).log().requires_grad_()
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2) + 0.5 * math.log(2.5) + 0.5 * math.log(0.625)
    dynamics, representation = balanced_divergence(posterior, prior, 0.1)
    assert torch.allclose(dynamics, torch.tensor([expected])) and torch.allclose(representation, dynamics)
    assert torch.autograd.grad(dynamics.sum(), (posterior, prior), allow_unused=True)[0] is None
    assert torch.autograd.grad(representation.sum(), (posterior, prior), allow_unused=True)[1] is None
    dynamics, representation = balanced_divergence(posterior, prior, 2.0)
    assert dynamics.item() == representation.item() == 2.0
    assert (torch.autograd.grad(dynamics.sum(), prior)[0] == 0).all()


def test_unimix_keeps_every_class_possible():
    logits = torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(mix_with_uniform(logits, 0.01).exp(), torch.tensor([[0.9925, 0.0025, 0.0025, 0.0025]]))


def test_samples_follow_their_distribution_and_pass_gradients():
    probability = torch.tensor([0.1, 0.0, 0.6, 0.3])
    classes = draw(probability.log().expand(1000, 4), (torch.arange(1000) + 0.5) / 1000)
    assert torch.bincount(classes, minlength=4).tolist() == [100, 0, 600, 300]
    logits = torch.zeros(1, 4, requires_grad=True)
    sample = straight_through(mix_with_uniform(logits, 0.01)[None], torch.tensor([[0.6]]))
    assert torch.allclose(sample, torch.tensor([[[0.0, 0.0, 1.0, 0.0]]]))
    sample[0, 0, 2].backward()
    assert logits.grad is not None and logits.grad[0, 2] > 0 > logits.grad[0, 0]


@settings(deadline=None, max_examples=60)
@given(st.floats(-400, 400, width=32))
def test_two_hot_weights_are_a_mean(value):
    bins, given_value = reward_bins(), torch.tensor([value])
    weights = two_hot(given_value, bins)
    assert int((weights > 0).sum()) <= 2 and abs(float(weights.sum()) - 1) < 1e-6
    assert float((weights * bins).sum()) == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert float(two_hot_mean((weights + 1e-30).log(), bins)) == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert float(symexp(given_value.sign() * given_value.abs().log1p())) == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_training_stretches_begin_anywhere_and_at_the_start_of_their_episodes():
    data = recorded(episodes=30)
    model = RssmModel.build(TINY, SPEC, data, 0)
    first, again = (next(model.batches(data, torch.Generator().manual_seed(0))) for _ in range(2))
    assert torch.equal(first["subsequence"].actions, again["subsequence"].actions) and torch.equal(
        first["seen"], again["seen"]
    )
    subsequence, seen_mask = first["subsequence"], first["seen"]
    assert subsequence.actions.shape == (64, 7, 2) and seen_mask.shape == (64, 8) and bool(seen_mask[:, 0].all())
    starts = data.observation[STATE][data.frame_starts]
    begun = (subsequence.frames[STATE][:, 0, None] == starts).all(-1).any(-1)
    assert 8 <= int(begun.sum()) < 64
    losses = model.loss(first, torch.Generator().manual_seed(0))
    moved = replace(subsequence, frames={key: value.clone() for key, value in subsequence.frames.items()})
    outside = ~torch.cat([subsequence.valid[:, :1], subsequence.valid], 1) & ~seen_mask
    moved.frames[STATE][outside] += 0.5
    for name, value in model.loss({"subsequence": moved, "seen": seen_mask}, torch.Generator().manual_seed(0)).items():
        assert value.shape == (64,) and torch.allclose(value, losses[name])


@pytest.mark.slow
def test_it_learns_and_remembers_what_no_frame_shows(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0), horizons=(1, 4, 8))
    assert figures["reward_error"] < 0.6
    assert figures["success"]["f1"] > 0.6
    late = figures["open_loop"]["4"][STATE]
    assert late["model"] < 0.6 * late["copy"] and late["shuffled"] > 1.5 * late["model"]
    place = torch.arange(held.step_count) - held.starts[held.episode_of_step]
    steps = (place >= model.context - 1).nonzero()[:, 0]
    wanted = held.observation[STATE][steps + held.episode_of_step[steps] + 1]
    errors = []
    for history in (1, model.context):
        _, prediction = model.imagine(
            model.initial(context_at(held, steps, history), steps.numpy()), held.actions[steps]
        )
        errors.append((prediction.observation[STATE] - wanted).norm(dim=-1).mean())
    assert errors[1] < 0.65 * errors[0]


@pytest.mark.long
def test_goals_are_copied_and_offsets_recomputed(begun):
    model, held = begun
    latent = model.initial(context_at(held, torch.arange(50)), np.arange(50))
    for step in range(5):
        latent, prediction = model.imagine(latent, held.actions[step : step + 50])
    environment = prediction.observation[ENVIRONMENT_STATE]
    start = context_at(held, torch.arange(50)).last(ENVIRONMENT_STATE)
    assert np.array_equal(environment[:, :2].numpy(), start[:, :2])
    assert torch.allclose(environment[:, 2:], environment[:, :2] - prediction.observation[STATE], atol=1e-4)


@pytest.mark.slow
def test_disagreement_grows_off_the_data(learned):
    model, held = learned

    def uncertainty(shift):
        moved = replace(held, observation={key: value + shift for key, value in held.observation.items()})
        latent = model.initial(context_at(moved, torch.arange(200)), np.arange(200))
        return model.imagine(latent, held.actions[:200])[1].uncertainty.mean()

    assert uncertainty(5.0) > 3 * uncertainty(0.0)
    quantiles = model.uncertainty_quantiles
    assert quantiles[0] < uncertainty(0.0) < quantiles[-1] and (quantiles.diff() >= 0).all()


def test_imagined_worlds_conform(begun):
    check_world(lambda rows: world(begun[0], rows), renders=False, tolerance=1e-5)


def test_an_episode_depends_on_its_seed_and_actions_alone(begun):
    model, held = begun
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 6, 2))
    for make in (lambda rows: world(model, rows), lambda rows: ImaginedWorld(model, recorded_starts(held, 3), rows)):
        first, second = make(4), make(2)
        first.reset(seeds=[5, 6, 7, 8])
        second.reset(seeds=[8, 6])
        a, b = first.step(actions), second.step(actions[[3, 1]])
        assert np.allclose(a.trace[STATE][[3, 1]], b.trace[STATE], atol=1e-5)
    other = world(model, 4)
    other.reset(seeds=[5, 6, 7, 8])
    snapshot = other.snapshot()
    other.reset(seeds=[1, 2, 3, 4])
    other.restore(snapshot)
    first = world(model, 4)
    first.reset(seeds=[5, 6, 7, 8])
    assert np.array_equal(first.step(actions).trace[STATE], other.step(actions).trace[STATE])


def test_checkpoints_round_trip(begun, tmp_path):
    model = begun[0]
    save_world_model(model, tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    worlds = [world(each, 3) for each in (model, loaded)]
    for each in worlds:
        each.reset(seeds=[1, 2, 3])
    a, b = (each.step(np.full((3, 4, 2), 0.5)) for each in worlds)
    assert np.array_equal(a.trace[STATE], b.trace[STATE]) and np.array_equal(a.uncertainty, b.uncertainty)
    assert loaded.spec == model.spec and loaded.config == model.config


def dots(episodes=120, steps=8):
    """Images of 16 px in which actions move a bright dot; nothing else is shown."""
    generator = torch.Generator().manual_seed(0)
    frames, actions, progress = [], [], []
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"), -1)
    for _ in range(episodes):
        position = 3 + 10 * torch.rand(2, generator=generator)
        for step in range(steps + 1):
            bright = (255 * (-(grid - position).square().sum(-1) / 6).exp()).to(torch.uint8)
            frames.append(bright[..., None].expand(16, 16, 3))
            if step < steps:
                actions.append(2 * torch.rand(2, generator=generator) - 1)
                progress.append(position[0] / 16)
                position = (position + 2 * actions[-1]).clamp(1, 14)
    field, action = Field((16, 16, 3), "uint8"), Field((2,), low=-1.0, high=1.0)
    spec = WorldSpec("dots", {IMAGE: field}, action, 10, steps, rewards=("progress", "success"))
    success = torch.zeros(episodes * steps, dtype=torch.bool)
    return spec, Episodes(
        spec.observation,
        action,
        10,
        {IMAGE: torch.stack(frames)},
        torch.stack(actions),
        torch.full((episodes,), steps),
        ("",) * episodes,
        rewards={"progress": torch.stack(progress), "success": success.float()},
        step_success=success,
        terminated=torch.zeros(episodes, dtype=torch.bool),
    )


@pytest.mark.slow
def test_it_imagines_images(tmp_path):
    spec, data = dots()
    config = RssmConfig(size="tiny", length=3, batch_size=32, burn_in=2, members=3)
    model, held = trained(config, spec, data, 250)
    figures = open_loop(model, held, torch.Generator().manual_seed(0), 80, (2, 4))
    assert figures["2"][IMAGE]["model"] > figures["2"][IMAGE]["copy"]
    assert figures["4"][IMAGE]["model"] > figures["4"][IMAGE]["copy"] + 1.5
    assert figures["4"][IMAGE]["model"] > figures["4"][IMAGE]["shuffled"] + 2
    _, prediction = model.imagine(model.initial(context_at(held, torch.arange(3)), np.arange(3)), held.actions[:3])
    assert prediction.observation[IMAGE].shape == (3, 16, 16, 3) and prediction.observation[IMAGE].dtype == torch.uint8
    save_world_model(model, tmp_path / "model")
    assert load_world_model(tmp_path / "model").spec == model.spec


def test_bad_settings_and_data_are_refused():
    data = recorded(episodes=4)
    with pytest.raises(DataError, match="another world"):
        RssmModel.build(TINY, SPEC, replace(data, actions=data.actions[:, :1]), 0)
    broken = {**data.observation, STATE: data.observation[STATE] * torch.nan}
    with pytest.raises(NonFiniteError, match="state"):
        RssmModel.build(TINY, SPEC, replace(data, observation=broken), 0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        RssmConfig(observed_fraction=1.5)
    with pytest.raises(ConfigError, match="equal blocks"):
        RssmModel.build(replace(TINY, deter=65), SPEC, data, 0)
    odd, images = dots(episodes=2)
    field = Field((15, 15, 3), "uint8")
    shrunk = replace(
        images, observation_fields={IMAGE: field}, observation={IMAGE: images.observation[IMAGE][:, 1:, 1:]}
    )
    with pytest.raises(ConfigError, match="power of two"):
        RssmModel.build(TINY, replace(odd, observation={IMAGE: field}), shrunk, 0)
    assert RssmConfig(deter=128, classes=4).networks.deter == 128
