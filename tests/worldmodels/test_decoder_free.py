"""Models without a decoder: their worlds show the latent, and what learns to act on it there acts in the real world."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_world import GAIN, SPEC, recorded
from torch import nn

from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.policy import Decision, to_tensors
from robopolicy.core.randomness import Generators, uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, PolicySpec
from robopolicy.evaluation.world_model import examine
from robopolicy.testing.world import check_world
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels.configuration import PlanConfig
from worldmodels.encoding import EncodedPolicy, encode, encode_episodes
from worldmodels.env import ImaginedWorld
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import LATENT, Context, DecoderFree, fields_read

outside = pytest.importorskip("outside_robotics.model", reason="install it with: pip install -e tests/outside")


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    train, held = recorded().split(0.1, torch.Generator().manual_seed(0))
    model = outside.LatentModel.build(outside.LatentConfig(), SPEC, train, seed=0)
    fit_stages(model, train, FitConfig(steps=600, learning_rate=3e-3), Generators(0))
    model.calibrate(held)
    return model.eval(), train, held


def starts(seeds):
    draws = (2 * uniforms(np.asarray(seeds), 4) - 1).astype(np.float32)[:, None]
    position, goal = draws[..., :2], draws[..., 2:]
    return Context({STATE: position, ENVIRONMENT_STATE: np.concatenate([goal, goal - position], -1)})


class Clone(nn.Module):
    """Behaviour cloning on the latent: a policy that knows nothing else."""

    def __init__(self, model, episodes, history=1):
        super().__init__()
        fields = {LATENT: model.spec.observation[LATENT]}
        self.spec = PolicySpec(fields, SPEC.action, history, 1, 1, 0, SPEC.fps, SPEC.instructions)
        encoded_episodes = encode_episodes(model, episodes)
        inputs = encoded_episodes.observation[LATENT][
            torch.arange(encoded_episodes.step_count) + encoded_episodes.episode_of_step
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.SiLU(), nn.Linear(64, 2), nn.Tanh())
        optimiser = torch.optim.Adam(self.parameters(), 3e-3)
        for _ in range(400):
            optimiser.zero_grad()
            (self.network(inputs) - encoded_episodes.actions).square().mean().backward()
            optimiser.step()

    def act(self, observation, generator, *, deterministic=False):
        with torch.no_grad():
            return Decision(self.network(observation[LATENT][:, -1])[:, None])

    def reset(self, rows=None):
        pass


@pytest.mark.long
def test_the_imagined_world_shows_the_latent_and_keeps_every_promise(learned):
    model = learned[0]
    assert isinstance(model, DecoderFree) and list(fields_read(model)) == [STATE, ENVIRONMENT_STATE]
    check_world(lambda rows: ImaginedWorld(model, starts, rows, history=2), renders=False, tolerance=1e-5)
    world = ImaginedWorld(model, starts, 3, history=2)
    first = world.reset(seeds=[1, 2, 3])
    assert set(first) == {LATENT, TASK} and first[LATENT].shape == (3, 2, 12)
    expected = encode(
        model, {key: torch.from_numpy(value[:, -1]) for key, value in starts([1, 2, 3]).observation.items()}
    )
    assert np.array_equal(first[LATENT][:, -1], expected[LATENT].numpy())
    assert np.array_equal(first[LATENT][:, 0], first[LATENT][:, 1])


def test_latents_imagined_are_those_that_the_real_world_leads_to(learned):
    model, _, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0), horizons=(1, 3))
    for ahead in ("1", "3"):
        error = figures["open_loop"][ahead][LATENT]
        assert error["model"] < 0.5 * error["copy"] and error["shuffled"] > 1.5 * error["model"]


def test_a_policy_on_the_latent_acts_in_imagination_and_in_the_real_world(learned):
    model, train, _ = learned
    clone = Clone(model, train)
    acting = EncodedPolicy(clone, model)
    assert list(acting.spec.observation) == [STATE, ENVIRONMENT_STATE]
    seeds, generator = np.arange(200), torch.Generator()
    begin = starts(seeds).observation
    world = ImaginedWorld(model, starts, len(seeds))
    observation = to_tensors(world.reset(seeds=seeds))
    assert torch.equal(clone.act(observation, generator).actions, acting.act(to_tensors(begin), generator).actions)
    assert torch.equal(clone.act(observation, generator).actions, acting.act(observation, generator).actions)

    def reached(policy):
        position, goal = torch.from_numpy(begin[STATE][:, 0]), torch.from_numpy(begin[ENVIRONMENT_STATE][:, 0, :2])
        near = torch.zeros(len(position), dtype=torch.bool)
        for _ in range(SPEC.horizon):
            shown = {STATE: position[:, None], ENVIRONMENT_STATE: torch.cat([goal, goal - position], 1)[:, None]}
            position = position + GAIN * policy.act(shown, generator).actions[:, 0]
            near |= (goal - position).norm(dim=1) < 0.15
        return float(near.float().mean())

    still = EncodedPolicy(Clone(model, train.select([0])), model)
    assert reached(acting) > 0.6 > 2 * reached(still)


def test_history_is_encoded_frame_by_frame(learned):
    model, train, _ = learned
    acting = EncodedPolicy(Clone(model, train.select([0, 1]), history=2), model)
    frames = {key: torch.from_numpy(value) for key, value in starts([1, 2]).observation.items()}
    both = {key: torch.cat([torch.full_like(value, 0.3), value], 1) for key, value in frames.items()}
    latents = acting._encoded(both)[LATENT]
    assert latents.shape == (2, 2, 12)
    expected = encode(model, {key: value[:, 0] for key, value in frames.items()})[LATENT]
    assert torch.allclose(latents[:, 1], expected, atol=1e-6) and not torch.allclose(latents[:, 0], expected, atol=1e-2)
    with pytest.raises(SpecError, match="history"):
        acting.act(frames, torch.Generator())


def test_what_cannot_be_encoded_is_refused(learned):
    model, train, _ = learned
    acting = EncodedPolicy(Clone(model, train.select([0])), model)
    shown = to_tensors(starts([1]).observation)
    with pytest.raises(SpecError, match="environment_state"):
        acting.act({STATE: shown[STATE]}, torch.Generator())
    with pytest.raises(NonFiniteError, match="state"):
        acting.act({**shown, STATE: shown[STATE] * torch.nan}, torch.Generator())
    bare = {STATE: train.observation[STATE]}
    with pytest.raises(SpecError, match="environment_state"):
        encode_episodes(model, replace(train, observation=bare, observation_fields={STATE: SPEC.observation[STATE]}))
    broken = outside.LatentModel.build(outside.LatentConfig(), SPEC, train, seed=0)
    broken.show = lambda latent: {LATENT: latent["z"] * torch.nan}
    with pytest.raises(NonFiniteError, match="first observation"):
        ImaginedWorld(broken, starts, 2).reset(seeds=[0, 1])


def test_a_policy_on_the_latent_plans_in_the_model_from_what_is_really_observed(learned):
    model, train, _ = learned
    acting = EncodedPolicy(Clone(model, train.select([0, 1])), model)
    planned = PlannedPolicy(acting, model, PlanConfig(candidates=2, horizon=3))
    assert list(planned.spec.observation) == [STATE, ENVIRONMENT_STATE]
    observation = to_tensors(starts(np.arange(4)).observation)
    chosen = planned.act(observation, torch.Generator().manual_seed(0))
    # The same up to how a processor rounds another number of rows.
    torch.testing.assert_close(chosen.actions, acting.act(observation, torch.Generator()).actions)
    assert planned.last_scores.shape == (4, 2)
    torch.testing.assert_close(planned.last_scores[:, 0], planned.last_scores[:, 1])
