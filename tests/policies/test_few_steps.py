"""Policies of few steps: the noise-free chain as a function, and what a student of it inherits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import DecidesFromNoise
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import Prediction
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from robopolicy.training.distill import clean_actions, few_step_student

STATE = "observation.state"
CONFIG = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, denoising_steps=20, chunk=2)
KINDS = [
    CONFIG,
    replace(CONFIG, prediction=Prediction.EPSILON),
    replace(CONFIG, kind=PolicyKind.FLOW),
]


def _policy(config: DenoisingPolicyConfig) -> DenoisingPolicy:
    draws = torch.Generator().manual_seed(0)
    values = {"action": 3 * torch.rand(50, 2, generator=draws) - 1, STATE: 5 * torch.randn(50, 3, generator=draws)}
    return DenoisingPolicy(config, {STATE: Field((3,))}, Field((2,), low=-1.0, high=1.0), fps=10, values=values)


def _observation() -> dict[str, Any]:
    return {STATE: torch.randn(6, 1, 3, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("config", KINDS)
@pytest.mark.parametrize("tuned", [False, True])
def test_a_trajectory_is_the_chain_that_the_policy_plays(config: DenoisingPolicyConfig, tuned: bool):
    policy = _policy(config)
    assert isinstance(policy, DecidesFromNoise)
    start = policy.act(_observation(), torch.Generator().manual_seed(0), deterministic=True).latents["chain"][:, 0]
    if tuned:  # the first steps are the frozen base's, and no longer the network's
        policy.prepare_finetuning(2)
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                weight.mul_(1.1)
    played = policy.act(_observation(), torch.Generator().manual_seed(0), deterministic=True)
    path = policy.trajectory(_observation(), start)
    assert path.shape == (6, 6, 4, 2)
    assert torch.equal(path[:, 0], start)
    assert torch.equal(path[:, policy.first_step :], played.latents["chain"])
    assert torch.equal(policy.to_actions(path[:, -1]), played.actions)
    path[:, -1].sum().backward()
    assert all(weight.grad is not None for weight in policy.network.denoiser.parameters())


@pytest.mark.parametrize("config", KINDS)
def test_a_student_of_one_step_is_one_call_of_the_network(config: DenoisingPolicyConfig):
    teacher = _policy(config)
    student = few_step_student(teacher)
    assert len(student.schedule.times) == 1
    assert float(student.schedule.times[0]) == 1.0
    noise = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(2))
    prediction = student.network.denoise(noise, torch.ones(6), student.encode(_observation()))
    clean = clean_actions(student, noise, prediction, torch.ones(6)).clamp(-1, 1)
    assert torch.allclose(student.trajectory(_observation(), noise)[:, -1], clean, atol=1e-6)
    inside = torch.tensor([[0.2, -0.3]]).expand(1, 4, 2)
    assert torch.equal(student.to_actions(inside), teacher.to_actions(inside))  # one normaliser, fitted on data
    assert all(weight.requires_grad for weight in student.network.parameters())


def test_a_student_is_saved_and_fine_tuned_like_any_policy(tmp_path):
    student = few_step_student(_policy(CONFIG), 2)
    student.save(tmp_path / "student")
    from robopolicy.policies import load_policy

    again = load_policy(tmp_path / "student")
    chosen = [each.act(_observation(), torch.Generator().manual_seed(0)).actions for each in (student, again)]
    assert torch.equal(*chosen)
    student.prepare_finetuning(1)
    assert student.spec.scored_steps == 1


@pytest.mark.parametrize("steps", [0, 5, 6])
def test_students_take_fewer_steps(steps: int):
    with pytest.raises(ConfigError, match="below the teacher"):
        few_step_student(_policy(CONFIG), steps)
