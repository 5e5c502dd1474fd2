"""LatentSeek (arXiv:2505.13308): noise that a critic prefers, sought while acting."""

import copy

import pytest
import torch
from offline_toys import BEST, distance, imitated_policy, lesson
from test_idql import learned

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import PolicyKind
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.offline.configuration import LatentSeekConfig
from robopolicy.training.offline.improvers import Wraps
from robopolicy.training.offline.seeking import LatentSeek, SeekingPolicy, seek


class Accepts:
    """A gate that accepts every candidate."""

    accepted = True

    def decide(self, candidate, incumbent):
        return self

    def line(self, what):
        return what

    def to_json(self):
        return {}


@pytest.fixture(scope="module", params=[PolicyKind.DIFFUSION, PolicyKind.FLOW])
def imitated(request):
    return imitated_policy(request.param)


@pytest.mark.checks("LatentSeek")
def test_noise_climbs_to_where_value_and_penalty_balance():
    """a(z) = z, Q = -(a - 1)^2, penalty p z^2: the first Adam step is the learning rate, the end 1 / (1 + p)."""

    def value(noise: torch.Tensor) -> torch.Tensor:
        return -(noise[:, 0, 0] - 1).square()

    start = torch.tensor([0.0, 2.0])[:, None, None]
    config = LatentSeekConfig(learning_rate=0.03, noise_penalty=0.25)
    assert seek(value, start, config, 0).flatten().tolist() == [0.0, 2.0]
    assert seek(value, start, config, 1).flatten().tolist() == pytest.approx([0.03, 1.97])
    assert seek(value, start, config, 600).flatten().tolist() == pytest.approx([0.8, 0.8], abs=1e-3)
    stops = LatentSeekConfig(learning_rate=0.03, noise_penalty=0.0, enough=-0.25)
    assert seek(value, start, stops, 200).flatten().tolist() == pytest.approx([0.5, 1.5], abs=0.031), (
        "each row by itself"
    )


@pytest.mark.checks("LatentSeek")
def test_a_frozen_policy_comes_nearer_to_what_the_critic_prefers(imitated):
    known = lesson()
    before = [parameter.detach().clone() for parameter in imitated.parameters()]
    config = LatentSeekConfig(steps=20, learning_rate=0.1)
    away = [distance(SeekingPolicy(imitated, known.critic, known.interface, config, steps)) for steps in (0, 20, 60)]
    assert away[0] == distance(imitated) and away[2] < away[1] < away[0] and away[2] < 0.5 * away[0]
    assert all(torch.equal(old, new) for old, new in zip(before, imitated.parameters(), strict=True))
    observation = {"observation.state": torch.rand(4, 1, 1)}
    policy = SeekingPolicy(imitated, known.critic, known.interface, config, 60)
    actions = policy.act(observation, torch.Generator().manual_seed(0), deterministic=True).actions
    assert float((actions - BEST).abs().mean()) < 0.4


def test_a_checkpoint_holds_policy_critics_and_the_number_of_steps(imitated, tmp_path):
    from robopolicy.training.offline.rounds import improve_in_rounds

    known, improver = learned(), LatentSeek(LatentSeekConfig(steps=3, enough=5.0))
    assert isinstance(improver, Wraps)
    policy = improver.wrap(copy.deepcopy(imitated), known, 0)
    improve_in_rounds(policy, known, improver, Accepts(), 2, run=RunFolder(tmp_path))
    loaded = load_policy(tmp_path / "checkpoint")
    assert isinstance(loaded, SeekingPolicy) and int(loaded.steps) == 6 and loaded.config == improver.config
    assert distance(loaded) == distance(policy)
    assert check_policy(loaded, load_policy).level is Level.ACTS
    with pytest.raises(ConfigError, match="latent_seek changes a SeekingPolicy"):
        improver.prepare(imitated)
