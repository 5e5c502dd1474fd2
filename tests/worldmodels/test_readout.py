"""Vectors read off latents: what is read and what is computed, in training, imagination and the real world's units."""

from dataclasses import replace

import dot_world
import numpy as np
import pytest
import torch
from dot_world import IMAGE, SPEC, recorded

from robopolicy.building.policies import adapt_policy_to_world, model_for, require_readable
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, require_fit
from robopolicy.evaluation.world_model import open_loop
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.testing.world import check_world
from robopolicy.testing.world_model import check_world_model
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.encoding import EncodedPolicy, encode_episodes
from worldmodels.initial_states import context_at
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.protocol import LATENT
from worldmodels.readout import HasReadout, ReadableModel, StateReadout, inner_model

SMALL = LatentEnsembleConfig(
    features=8,
    channels=(8, 8, 8),
    batch_size=32,
    encoder_step_ratio=2.0,
    readout_step_ratio=1.5,
    ensemble=EnsembleConfig(members=2, width=32, depth=1, head_width=16, rollout_step_ratio=0),
)


def trained(seed=0):
    torch.set_num_threads(1)
    data = recorded(200)
    model = LatentEnsembleModel.build(SMALL, SPEC, data, seed)
    fit_stages(model, data, FitConfig(steps=200, learning_rate=3e-3), Generators(seed))
    model.calibrate(data)
    return model.eval()


@pytest.fixture(scope="module")
def learned():
    return trained()


def policy_of(*keys, fields=SPEC.observation):
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, sampling_steps=2, width=8, depth=1)
    observation = {key: fields[key] for key in keys}
    return DenoisingPolicy(config, observation, SPEC.action, fps=SPEC.fps, instructions=SPEC.instructions)


@pytest.mark.long
def test_what_only_a_simulator_knows_is_read_off_frames(learned):
    """In unseen episodes: the goal nearer than its spread, and its offset, exactly what follows from both."""
    data = recorded(30, seed=4)
    steps = torch.arange(data.step_count)
    latent = learned.initial(context_at(data, steps, 1), steps.numpy())
    assert isinstance(learned, HasReadout) and set(learned.readable) == {STATE, ENVIRONMENT_STATE}
    fields = learned.read(latent, (STATE, ENVIRONMENT_STATE))
    frames = steps + data.episode_of_step
    assert torch.equal(fields[STATE], data.observation[STATE][frames]), "given, so not read"
    true = data.observation[ENVIRONMENT_STATE][frames]
    goal, offset = fields[ENVIRONMENT_STATE][:, :2], fields[ENVIRONMENT_STATE][:, 2:]
    assert (goal - true[:, :2]).square().mean() < 0.5 * true[:, :2].var(0).mean()
    assert torch.allclose(offset, goal - fields[STATE], atol=1e-4)


@pytest.mark.long
def test_a_goal_stays_where_it_was_read_first(learned):
    data = recorded(10, seed=5)
    model = ReadableModel(learned, (ENVIRONMENT_STATE,))
    latent = model.initial(context_at(data, data.starts, 1), np.arange(10))
    first = model.show(latent)[ENVIRONMENT_STATE]
    for _ in range(3):
        latent, outcome = model.imagine(latent, torch.full((10, 2), 0.7))
        assert torch.equal(outcome.observation[ENVIRONMENT_STATE][:, :2], first[:, :2])
    assert not torch.allclose(model.show(latent)[ENVIRONMENT_STATE][:, 2:], first[:, 2:], atol=0.05)


def test_velocities_are_read_off_two_frames():
    """A latent that is a position, and a vector that is its velocity: nothing of it is in one latent."""
    torch.manual_seed(0)
    data = recorded(80)
    positions = data.observation[STATE]
    speed = torch.zeros_like(positions)
    inside = torch.arange(data.step_count) + data.episode_of_step
    speed[inside + 1] = positions[inside + 1] - positions[inside]
    fields = {ENVIRONMENT_STATE: replace(SPEC.observation[STATE], names=("v_x", "v_y"))}
    spec = replace(SPEC, observation=fields)
    episodes = replace(
        data,
        observation_fields={LATENT: Field((2,)), **fields},
        observation={LATENT: positions, ENVIRONMENT_STATE: speed},
    )
    readout = StateReadout.of(
        LatentEnsembleModel.build(SMALL, SPEC, recorded(5), 0).vector.of({}), spec, episodes, 2, 0
    )
    assert readout is not None
    optimiser = torch.optim.Adam(readout.parameters(), 3e-3)
    batches = readout.batches(episodes, torch.Generator().manual_seed(0))
    for _ in range(300):
        optimiser.zero_grad()
        readout.loss(next(batches), torch.Generator())["readout"].mean().backward()
        optimiser.step()
    with torch.no_grad():
        read = readout.read(positions[inside + 1], positions[inside], torch.zeros(len(inside), 0))[ENVIRONMENT_STATE]
    assert (read - speed[inside + 1]).square().mean() < 0.02 * speed.var()


@pytest.mark.long
def test_a_checkpoint_reads_the_same_and_older_ones_open(learned, tmp_path):
    save_world_model(learned, tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    data = recorded(6, seed=5)
    both = [each.initial(context_at(data, data.starts, 1), np.arange(6)) for each in (learned, loaded)]
    both = [each.imagine(latent, torch.zeros(6, 2))[0] for each, latent in zip((learned, loaded), both, strict=True)]
    assert isinstance(loaded, HasReadout)
    assert torch.equal(
        learned.read(both[0], (ENVIRONMENT_STATE,))[ENVIRONMENT_STATE],
        loaded.read(both[1], (ENVIRONMENT_STATE,))[ENVIRONMENT_STATE],
    )
    description = {key: value for key, value in learned.description().items() if key != "readable"}
    weights = {name: value for name, value in learned.state_dict().items() if not name.startswith("readout.")}
    older = LatentEnsembleModel.restore(description, learned.spec, weights)
    older.load_state_dict(weights)
    assert older.readable == {} and list(older.stages()) == ["ensemble"]
    assert set(older.initial(context_at(data, data.starts, 1), np.arange(6))) == {"state", "seed", "step"}


@pytest.mark.long
def test_experts_and_policies_of_states_act_in_it(learned):
    shown = model_for(None, learned)
    assert set(shown.spec.observation) == {LATENT, STATE, ENVIRONMENT_STATE} and inner_model(shown) is learned
    of_states = policy_of(STATE, ENVIRONMENT_STATE)
    model = model_for(of_states, learned)
    assert set(model.spec.observation) == {STATE, ENVIRONMENT_STATE}
    world = dot_world.imagined_world(model, 3)
    assert adapt_policy_to_world(world, of_states) is of_states
    seen = world.reset(seeds=[1, 2, 3])
    assert seen[ENVIRONMENT_STATE].shape == (3, 1, 4)
    check_world(lambda rows: dot_world.imagined_world(model, rows), renders=False, tolerance=1e-5)


@pytest.mark.long
def test_episodes_are_those_of_the_model_itself(learned):
    """With the same seeds and actions: the readout looks on."""
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 6, 2))
    steps = []
    for model in (learned, model_for(None, learned)):
        world = dot_world.imagined_world(model, 4)
        world.reset(seeds=[5, 6, 7, 8])
        steps.append(world.step(actions))
    assert np.allclose(steps[0].trace[LATENT], steps[1].trace[LATENT], atol=1e-5)
    assert np.allclose(steps[0].reward, steps[1].reward, atol=1e-5)
    assert np.array_equal(steps[0].valid, steps[1].valid)


@pytest.mark.long
def test_policies_of_the_latent_read_it_and_of_pixels_are_refused(learned):
    inside = policy_of(LATENT, fields=learned.spec.observation)
    assert model_for(inside, learned) is learned and model_for(EncodedPolicy(inside, learned), learned) is learned
    of_pixels = policy_of(STATE, IMAGE)
    assert model_for(of_pixels, learned) is learned
    stranger = EncodedPolicy(inside, trained(seed=3))
    for model in (learned, model_for(None, learned)):
        assert adapt_policy_to_world(dot_world.imagined_world(model, 2), EncodedPolicy(inside, learned)) is inside
        with pytest.raises(ConfigError, match="latent of another model"):
            adapt_policy_to_world(dot_world.imagined_world(model, 2), stranger)
    require_readable(inside, learned)
    require_readable(policy_of(STATE, ENVIRONMENT_STATE), learned)
    with pytest.raises(ConfigError, match=r"reads observation\.images\.top, but .*drawing_step_ratio=1"):
        require_readable(of_pixels, learned)
    with pytest.raises(SpecError):
        require_fit(of_pixels.spec, model_for(of_pixels, learned).spec)


@pytest.mark.long
def test_errors_of_the_readout_are_reported_by_horizon(learned):
    data = recorded(30, seed=7)
    figures = open_loop(learned, data, torch.Generator().manual_seed(0), 100, (1, 5))
    assert set(figures["1"]) == {LATENT, ENVIRONMENT_STATE}
    for horizon in ("1", "5"):
        assert figures[horizon][ENVIRONMENT_STATE]["model"] < figures[horizon][ENVIRONMENT_STATE]["shuffled"]
    assert figures["1"][ENVIRONMENT_STATE]["copy"] > 0
    assert set(encode_episodes(learned, data).observation) == {LATENT}


@pytest.mark.long
def test_every_promise_is_kept_with_a_readout():
    config = replace(SMALL, ensemble=replace(SMALL.ensemble, rollout_step_ratio=0.5))
    check_world_model(LatentEnsembleModel, config, SPEC, recorded(12))
