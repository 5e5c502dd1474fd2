"""Distilling: the target is the teacher's own end of the chain, and a student of one step learns to jump there."""

from dataclasses import replace

import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import Field
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.configuration import DistillConfig, FitConfig, PretrainConfig
from robopolicy.training.distill import Distillation, distill, few_step_student
from robopolicy.training.pretrain import pretrain

STATE = "observation.state"
FIELDS, ACTION = {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0)
POLICY = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, denoising_steps=20, chunk=1, prediction_steps=1)


def recorded(count: int = 60, length: int = 5) -> Episodes:
    """Episodes whose action is half of what is seen."""
    draws = torch.Generator().manual_seed(0)
    states = 2 * torch.rand(count, length + 1, 1, generator=draws) - 1
    return Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={STATE: states.flatten(0, 1)},
        actions=0.5 * states[:, :-1].flatten(0, 1),
        lengths=torch.full((count,), length),
        tasks=("",) * count,
    )


def teacher_of(kind: PolicyKind, steps: int = 300, clip: float | None = 1.0) -> DenoisingPolicy:
    episodes = recorded()
    values = {STATE: episodes.observation[STATE], "action": episodes.actions}
    policy = DenoisingPolicy(replace(POLICY, kind=kind, clip=clip), FIELDS, ACTION, fps=10, values=values)
    pretrain(policy, episodes, PretrainConfig(128, FitConfig(steps=steps, warmup=10)))
    return policy


@pytest.mark.checks("RL-100")
@pytest.mark.parametrize("kind", list(PolicyKind))
def test_the_loss_is_the_distance_to_where_the_teacher_ends(kind: PolicyKind):
    """With points of the student's own chain alone, of one step: || C(x_0) - solver(x_0 -> 0) ||^2, by hand."""
    teacher = teacher_of(kind, 5)
    lesson = Distillation(teacher, DistillConfig(teacher_chain_fraction=0.0))
    observation = {STATE: torch.rand(8, 1, 1)}
    distance = lesson.loss({"observation": observation}, torch.Generator().manual_seed(3))["distance"]
    noise = torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        end = teacher.trajectory(observation, noise)[:, -1]
        prediction = lesson.student.network.denoise(noise, torch.ones(8), lesson.student.encode(observation))
    clean = noise - prediction if kind is PolicyKind.FLOW else prediction
    assert torch.allclose(distance, (clean - end).square().mean((1, 2)), atol=1e-6)
    assert not any(weight is other for weight in lesson.parameters() for other in teacher.parameters())


@pytest.mark.checks("RL-100")
def test_points_of_the_teachers_chain_lead_to_the_same_end():
    """A student that knows the end has no loss at any point; one step of the teacher's chain is not the end."""
    teacher = teacher_of(PolicyKind.FLOW, 5, clip=None)
    lesson = Distillation(teacher, DistillConfig(teacher_chain_fraction=0.9))
    observation = {STATE: torch.rand(64, 1, 1)}
    with torch.no_grad():
        for weight in [*teacher.network.parameters(), *lesson.student.network.parameters()]:
            weight.zero_()  # a velocity of zero ends where it began, from every point of the chain
    assert (
        float(lesson.loss({"observation": observation}, torch.Generator().manual_seed(0))["distance"].detach().max())
        < 1e-12
    )
    with torch.no_grad():
        [*teacher.network.denoiser.parameters()][-1].fill_(0.1)  # now every step moves, and all by as much
    far = lesson.loss({"observation": observation}, torch.Generator().manual_seed(0))["distance"].detach()
    steps = (far.sqrt() / 0.02).round()
    assert set(steps.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}  # how many steps of 1/5 at velocity 0.1 are left
    assert len(set(steps.tolist())) == 5


@pytest.mark.long
@pytest.mark.parametrize("kind", list(PolicyKind))
@pytest.mark.parametrize("steps", [1, 2])
def test_a_student_does_what_its_teacher_does(kind: PolicyKind, steps: int):
    teacher = teacher_of(kind)
    config = DistillConfig(steps=steps, batch_size=128, fit=FitConfig(steps=300, warmup=10))
    student, _ = distill(teacher, recorded(), config)
    observation = {STATE: torch.linspace(-0.9, 0.9, 64)[:, None, None]}
    draws = torch.Generator().manual_seed(1)
    noise = torch.randn(64, 1, 1, generator=draws)
    with torch.no_grad():
        wanted, got = (each.to_actions(each.trajectory(observation, noise)[:, -1]) for each in (teacher, student))
        before = few_step_student(teacher, steps)
        untaught = before.to_actions(before.trajectory(observation, noise)[:, -1])
    error, first = ((each - wanted).square().mean().sqrt() for each in (got, untaught))
    assert float(error) < 0.03
    assert float(error) < float(first)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    teacher = teacher_of(PolicyKind.DIFFUSION, 5)
    config = DistillConfig(batch_size=16, fit=FitConfig(steps=6, checkpoint_every=3, log_every=3))
    whole, _ = distill(teacher, recorded(), config, RunFolder(tmp_path / "whole"))

    class Killed(Exception):
        """A kill."""

    folder = RunFolder(tmp_path / "parts")
    kill = iter([None, None, None, Killed])
    original = Distillation.loss

    def dying(self, batch, generator):
        if next(kill) is Killed:
            raise Killed
        return original(self, batch, generator)

    Distillation.loss = dying
    try:
        with pytest.raises(Killed):
            distill(teacher, recorded(), config, folder)
    finally:
        Distillation.loss = original
    parts, report = distill(teacher, recorded(), config, folder)
    assert report.steps == 6
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), parts.parameters(), strict=True))


def test_what_takes_no_denoising_steps_is_no_teacher():
    with pytest.raises(ConfigError, match="no denoising steps"):
        distill(object(), recorded(), DistillConfig())  # type: ignore[arg-type]
