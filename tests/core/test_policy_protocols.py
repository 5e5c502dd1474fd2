"""Three protocols of policies: what has which, and a decision that holds actions alone."""

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.player import actor_of
from robopolicy.core.policy import (
    Decision,
    Policy,
    RecordsMeans,
    ResumesDecision,
    ScoredPolicy,
    Trainable,
    is_policy,
    missing_members,
    require_trainable,
)
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig

FIELDS, ACTION = {STATE: Field((2,))}, Field((1,))


class Plain:
    """Acts and nothing else."""

    spec = PolicySpec(FIELDS, ACTION, 1, 1, 1, 0, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        return Decision(torch.zeros(len(observation[STATE]), 1, 1))

    def reset(self, rows=None): ...


class SpecController:
    """A controller that keeps its world's spec, as those of simulation suites do."""

    spec = WorldSpec("somewhere", FIELDS, ACTION, 10.0, 9)

    def act(self, observation):
        return np.ones((len(observation[STATE]), 1))

    def reset(self, rows=None): ...


def test_a_plain_policy_needs_three_members_and_decides_actions_alone():
    plain = Plain()
    assert isinstance(plain, Policy) and not isinstance(plain, ScoredPolicy) and not missing_members(plain, Policy)
    decision = plain.act({STATE: torch.zeros(5, 1, 2)}, torch.Generator())
    assert decision.logp.shape == decision.mask.shape == (5, 0) and decision.mask.dtype == torch.bool
    assert decision.latents == {}
    assert missing_members(plain, ScoredPolicy) == ("log_prob",)
    with pytest.raises(
        ConfigError, match=r"Plain can act but cannot be trained: it lacks log_prob, .*prepare_finetuning"
    ):
        require_trainable(plain)


def test_denoising_policies_have_it_all():
    policy = DenoisingPolicy(DenoisingPolicyConfig(width=8), FIELDS, ACTION, fps=10)
    assert require_trainable(policy) is policy
    assert isinstance(policy, Trainable) and isinstance(policy, ResumesDecision) and isinstance(policy, RecordsMeans)


def test_a_controller_with_a_spec_is_no_policy():
    controller = SpecController()
    assert not is_policy(controller) and is_policy(Plain())
    chunk, _ = actor_of(controller, torch.Generator()).choose({STATE: np.zeros((3, 1, 2))})
    assert chunk.shape == (3, 1, 1) and (chunk == 1).all()
