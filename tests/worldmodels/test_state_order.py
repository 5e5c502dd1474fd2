"""A spec may list its fields in any order: what a model learns of an element is what it imagines of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_world import SPEC, recorded

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from worldmodels.ensemble import EnsembleConfig, EnsembleModel
from worldmodels.initial_states import context_at
from worldmodels.rssm.dynamics import RssmConfig
from worldmodels.rssm.model import RssmModel
from worldmodels.trajectory_diffusion import TrajectoryConfig, TrajectoryDiffusion

TURNED = replace(SPEC, observation={key: SPEC.observation[key] for key in (ENVIRONMENT_STATE, STATE)})
SMALL = EnsembleConfig(members=2, width=16, depth=1, head_width=16)


def far_goals(spec):
    """Episodes whose goals are near (100, 100): no element of the robot's own state is."""
    data = recorded(episodes=20)
    goals = data.observation[ENVIRONMENT_STATE] + torch.tensor([100.0, 100.0, 0.0, 0.0])
    observation = {ENVIRONMENT_STATE: goals, STATE: data.observation[STATE]}
    return replace(
        data, observation_fields=spec.observation, observation={key: observation[key] for key in spec.observation}
    )


@pytest.mark.parametrize("kind, config", [(EnsembleModel, SMALL), (RssmModel, RssmConfig(size="tiny"))])
def test_models_imagine_in_the_order_they_learned(kind, config):
    data = far_goals(TURNED)
    model = kind.build(config, TURNED, data, seed=0)
    context = context_at(data, torch.arange(30))
    latent = model.initial(context, np.arange(30))
    assert (latent["state"] - model.state_mean).abs().max() < 10
    _, imagined = model.imagine(latent, data.actions[:30])
    assert np.array_equal(
        imagined.observation[ENVIRONMENT_STATE][:, :2].numpy(), context.last(ENVIRONMENT_STATE)[:, :2]
    )
    assert list(imagined.observation) == list(TURNED.observation)


@pytest.mark.parametrize("kind, config", [(EnsembleModel, SMALL), (RssmModel, RssmConfig(size="tiny"))])
def test_the_order_of_fields_in_a_spec_changes_nothing(kind, config):
    models = [kind.build(config, spec, far_goals(spec), seed=0) for spec in (SPEC, TURNED)]
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_trajectories_read_their_channels_in_the_order_of_their_transitions():
    config = TrajectoryConfig(length=4, width=8, depth=1, head_width=8)
    models = [TrajectoryDiffusion.build(config, spec, far_goals(spec), seed=0) for spec in (SPEC, TURNED)]
    for model in models:
        assert torch.allclose(model.mean[:6], model.heads.state_mean, atol=1.0)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
