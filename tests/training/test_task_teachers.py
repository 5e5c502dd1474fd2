"""A teacher for each task: rows go to the specialist of their instruction, and come back in their order."""

from dataclasses import replace

import pytest
import torch
from rl.made_rollouts import make_rollouts, make_scored
from seeing_toys import INSTRUCTIONS, SeeingWorld, denoising_policy, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Scores, TensorObservation
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.coefficients import on_policy_distillation
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.task_teachers import TaskTeachers


class Fixed:
    """Decides `value` everywhere, with that probability."""

    def __init__(self, value: float, spec):
        self.value, self.spec, self.forgotten = value, spec, 0

    def act(self, observation, generator, *, deterministic=False) -> Decision:
        return Decision(torch.full((len(observation["task"]), self.spec.chunk, 1), self.value))

    def log_prob(self, observation, latents) -> Scores:
        logp = torch.log(latents["x"] * 0 + self.value)
        return Scores(logp, torch.zeros_like(logp), {"std": torch.ones(1, 2), "own": latents["x"]})

    def reset(self, rows=None) -> None:
        self.forgotten += 1


@pytest.fixture
def spec():
    return token_policy(SeeingWorld(2)).spec


@pytest.mark.checks("Keye-VL-2.0/MOPD")
def test_every_row_is_scored_by_the_teacher_of_its_task(spec):
    """Student .3; teacher A .6 and B .15 on their tasks: c = ln 2 and -ln 2."""
    wider = replace(spec, chunk=spec.chunk + 1)
    fixed = {"push*": Fixed(0.6, spec), "*": Fixed(0.15, wider)}
    teachers = TaskTeachers(fixed, ("push it", "lift it"))
    observation: TensorObservation = {"task": ["lift it", "push it", "lift it", "push it"]}
    latents = {"x": torch.arange(4.0)[:, None].expand(4, 2)}
    scores = teachers.log_prob(observation, latents)
    assert scores.logp.exp()[:, 0].tolist() == pytest.approx([0.15, 0.6, 0.15, 0.6])
    assert torch.equal(scores.extras["own"], latents["x"]) and scores.extras["std"].shape == (4, 2)
    rollouts = make_rollouts([1] * 4, [0] * 4).with_extras(teacher_logp=scores.logp[:, None])
    student = torch.full((4, 1, 2), 0.3).log()
    c, _ = on_policy_distillation(make_scored(rollouts, student, torch.zeros(4, 1, 2)))
    assert c[:, 0, 0].tolist() == pytest.approx([-0.6931, 0.6931, -0.6931, 0.6931], abs=1e-4)
    actions = teachers.act(observation, torch.Generator()).actions
    assert actions.shape == (4, spec.chunk, 1) and actions[:, 0, 0].tolist() == pytest.approx([0.15, 0.6, 0.15, 0.6])
    teachers.reset()
    assert [policy.forgotten for policy in fixed.values()] == [1, 1]


def test_an_instruction_without_a_teacher_is_named(spec):
    with pytest.raises(ConfigError, match=r"'push\*' matches the instruction 'lift it'. Add one, or '\*' as the last"):
        TaskTeachers({"push*": Fixed(0.6, spec)}, ("push it", "lift it"))


@pytest.mark.checks("Keye-VL-2.0/MOPD")
def test_every_episode_is_played_as_by_its_own_teacher_alone():
    """Noise belongs to the episode: neither the other teacher nor the rows beside it change an outcome."""
    world = SeeingWorld(6)
    teachers = [denoising_policy(world, seed=seed) for seed in range(2)]
    composed = TaskTeachers(dict(zip(INSTRUCTIONS, teachers, strict=True)), INSTRUCTIONS)
    results = [
        evaluate_policy(SeeingWorld(rows), policy, range(12), deterministic=False)
        for policy, rows in ((composed, 6), (composed, 4), *((teacher, 6) for teacher in teachers))
    ]
    both, fewer_rows, *alone = results
    assert len(set(both.instructions)) == 2
    owners = [INSTRUCTIONS.index(text) for text in both.instructions]
    expected = [alone[owner].returns[episode] for episode, owner in enumerate(owners)]
    assert both.returns.tolist() == pytest.approx(expected)
    assert fewer_rows.returns.tolist() == pytest.approx(expected)
    assert alone[0].returns.tolist() != pytest.approx(alone[1].returns.tolist())


@pytest.mark.long
@pytest.mark.checks("Keye-VL-2.0/MOPD")
def test_a_student_is_distilled_from_several_teachers(monkeypatch: pytest.MonkeyPatch):
    world = SeeingWorld(6)
    policy, *teachers = (token_policy(world, seed=seed) for seed in range(3))
    for each in (policy, *teachers):
        each.prepare_finetuning()
    first = world.spec.instructions[0]
    composed = TaskTeachers({first: teachers[0], "*": teachers[1]}, world.spec.instructions)
    config = FinetuneConfig(algorithm="distillation", iterations=1, groups=2, group_size=3, epochs=1, evaluate_every=0)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    finetune(policy, None, world, config, guidance=Guidance(composed))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    with pytest.raises(ConfigError, match="does not describe its denoising or token steps"):
        finetune(policy, None, world, config, guidance=Guidance(TaskTeachers({"*": Fixed(0.5, policy.spec)}, ("",))))
