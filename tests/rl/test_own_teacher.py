"""A policy that is its own teacher: what the teacher sees, how it follows, and what is learned from it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts
from test_formulas_auxiliaries import MASK, Toy, inputs_of

from robopolicy.core.errors import ConfigError
from robopolicy.core.images import Images
from robopolicy.core.policy import Scores
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import judges, own_teacher

TRUE = STATE + "_undisturbed"
STUDENT, TEACHER = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.4, 0.1, 0.5]).log()


class Line(torch.nn.Module):
    """log pi = theta times the state."""

    def __init__(self, theta: float = 0.0):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.tensor(theta))


def teacher_of(toy, rate: float = 0.05):
    model = object.__new__(own_teacher.OwnTeacher)
    model.rate, model.teacher = rate, toy
    return {"own_teacher": model}


@pytest.mark.checks("auxiliaries/distill_own", "Vision-OPD")
@pytest.mark.parametrize(
    ("divergence", "top", "expected"),
    [("reverse", 0, 0.3694), ("forward", 0, 0.5116), ("jsd", 0, 0.1020), ("reverse", 1, 0.1838), ("jsd", 1, 0.0462)],
)
def test_the_teacher_sees_the_undisturbed_field(divergence: str, top: int, expected: float):
    """It answers (.4 .1 .5) to the true state alone; the student's ratio of 3 counts as 2."""

    def answer(observation, latents):
        right = bool((observation[STATE] == 7).all())
        return Scores(
            MASK.float(), MASK.float(), {"log_probabilities": (TEACHER if right else STUDENT).expand(2, 3, 3)}
        )

    logits = STUDENT.expand(2, 3, 3).clone().requires_grad_()
    scores = Scores(torch.full((2, 3), 3.0).log(), torch.zeros(2, 3), {"log_probabilities": logits})
    inputs = inputs_of(
        observation={STATE: torch.zeros(2, 1, 1), TRUE: torch.full((2, 1, 1), 7.0)},
        scores=scores, models=teacher_of(Toy(answer)), proximal=torch.zeros(2, 3),
    )  # fmt: skip
    loss = own_teacher.distill_own(inputs, weight=0.5, divergence=divergence, top=top, ratio_cap=2.0)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-4)
    loss.backward()
    assert logits.grad is not None and bool(logits.grad[MASK].any()) and not bool(logits.grad[~MASK].any())
    with pytest.raises(ConfigError, match=r"world\.options\.undisturbed=true"):
        own_teacher.distill_own(replace(inputs, observation={STATE: torch.zeros(2, 1, 1)}))


@pytest.mark.checks("auxiliaries/distill_own")
def test_gaussian_steps_are_drawn_to_the_means_of_the_teacher():
    """Means 1 apart with a deviation of .5: a KL of 2."""
    own, other = (
        Scores(torch.zeros(2, 3), torch.zeros(2, 3), {"mean": torch.full((2, 3, 1, 1), mean), "std": torch.tensor(0.5)})
        for mean in (0.0, 1.0)
    )
    inputs = inputs_of(
        observation={STATE: torch.zeros(2, 1, 1), TRUE: torch.ones(2, 1, 1)},
        scores=own, models=teacher_of(Toy(other)), proximal=torch.zeros(2, 3),
    )  # fmt: skip
    assert float(own_teacher.distill_own(inputs)) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="divergence=jsd"):
        own_teacher.distill_own(inputs, divergence="jsd")


@pytest.mark.checks("models/own_teacher", "Vision-OPD")
def test_the_teacher_is_the_moving_average_of_the_policy():
    """From 0 by .25 to 1, twice: .25, .4375."""
    policy = Line()
    model = own_teacher.OwnTeacher(SimpleNamespace(policy=policy), rate=0.25)  # type: ignore[arg-type]
    rollouts, context = make_rollouts([1], [0]), Context(torch.Generator())
    with torch.no_grad():
        policy.theta.fill_(1.0)
    assert model.annotate(rollouts, context) is rollouts
    assert float(model.teacher.theta) == pytest.approx(0.25)
    model.annotate(rollouts, context)
    other = own_teacher.OwnTeacher(SimpleNamespace(policy=policy))  # type: ignore[arg-type]
    other.restore(model.tree())
    assert float(other.teacher.theta) == pytest.approx(0.4375) and not other.teacher.theta.requires_grad


def test_pictures_are_exchanged_too():
    shape, camera = (2, 3, 1), IMAGE_PREFIX + "front"
    frames = {camera: torch.zeros(6, 4, 4, 3), camera + "_undisturbed": torch.ones(6, 4, 4, 3)}
    rollouts = make_rollouts([3, 2], [0, 0])
    rollouts = replace(rollouts, images=Images(frames, torch.zeros(shape, dtype=torch.int64)))
    view = own_teacher.as_undisturbed(rollouts)
    assert view.images is not None and bool((view.images.frames[camera] == 1).all())
    assert view.observation is not rollouts.observation


@pytest.mark.checks("models/learning_teacher", "VPD")
def test_a_learning_teacher_reads_what_the_policy_does_not():
    """The outcome follows from the true state alone, the policy sees zeros: without the view nothing is learned."""
    values = torch.tensor([1.0, -1.0, 2.0, -2.0])
    rollouts = make_rollouts([1] * 4, [0] * 4, [1.0, 0.0, 1.0, 0.0], steps=1)
    fields = {STATE: torch.zeros(4, 1, 1, 1), TRUE: values[:, None, None, None]}
    rollouts = replace(rollouts, observation=fields)

    def score(model, rows, where) -> Scores:
        logp = (model.theta * rows.observation[STATE][..., 0, 0])[where][:, None]
        return Scores(logp, logp)

    tools = SimpleNamespace(policy=Line(), base=None, score=score)
    context = Context(torch.Generator().manual_seed(0))
    for privileged in (False, True):
        teacher = judges.LearningTeacher(tools, every=1, rate=0.1, momentum=0.0, privileged=privileged)  # type: ignore[arg-type]
        process = teacher.annotate(rollouts, context).extras["process"].flatten()
        theta = float(teacher.network.theta.detach())
        assert (theta > 0) is privileged
        assert process.tolist() == pytest.approx((0.1 * theta * values).tolist())
