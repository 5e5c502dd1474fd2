"""A denoising policy that takes few steps: the shape that a policy of many steps is distilled into.

It is a `DenoisingPolicy` like any other, with a coarse grid: of one step the chain is a single call of the network,
from noise to the clean action. So it is saved, served, judged and fine-tuned as its teacher is.
"""

import copy
from dataclasses import replace

from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import Prediction, Spacing
from robopolicy.nn.schedules import FlowSchedule
from robopolicy.policies.configuration import Likelihood, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.latents import OwnSteps


def few_step_student(teacher: DenoisingPolicy, steps: int = 1) -> DenoisingPolicy:
    """Return an untrained policy of `steps` denoising steps that begins with the teacher's weights and normalisers.

    A diffusion's student predicts the clean action, whatever its teacher does: noise says nothing about it at the
    noisiest level, where the only step of a one-step chain is taken. What is frozen in a policy of LeRobot's stays so,
    and its checkpoint says `steps`. Raises ConfigError as `require_fewer_steps` does.
    """
    require_fewer_steps(teacher, steps)
    config, network = teacher.config, teacher.network
    diffusion = config.kind is PolicyKind.DIFFUSION
    if isinstance(network, OwnSteps):
        copied, tuned = network.of_steps(steps), steps
    else:
        copied, tuned = copy.deepcopy(network).requires_grad_(True), None
    changed = replace(
        config,
        sampling_steps=steps,
        # Trailing: the grid ends at the noisiest level, where the first (perhaps only) step begins.
        spacing=Spacing.TRAILING,
        prediction=Prediction.SAMPLE if diffusion else config.prediction,
        likelihood=Likelihood.CHAIN,
        finetuned_steps=tuned,
        noisy_steps=None,
    )
    student = DenoisingPolicy(
        changed,
        teacher.fields,
        teacher.action,
        fps=teacher.fps,
        instructions=teacher.instructions,
        network=copied,
    )
    student.action_normalizer.load_state_dict(teacher.action_normalizer.state_dict())
    return student.to(teacher.action_low.device)


def require_fewer_steps(teacher: DenoisingPolicy, steps: int) -> None:
    """Raise ConfigError unless 1 <= steps < the teacher's, and its network can take fewer of them."""
    most, network = teacher.schedule.steps, teacher.network
    if not 1 <= steps < max(most, 2):
        raise ConfigError(f"steps is {steps}, and the teacher takes {most}: a student takes 1 or more, and fewer.")
    if isinstance(network, OwnSteps) and (reason := network.why_always_as_many()):
        raise ConfigError(f"It cannot be distilled to fewer steps: {reason}")


def clean_actions(student: DenoisingPolicy, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
    """Return the clean latents [N, P, A] that a few-step student's prediction stands for, not clipped.

    x, prediction: [N, P, A] at times [N] in (0, 1].
    """
    if isinstance(student.schedule, FlowSchedule):
        # x = (1 - t) data + t noise and u = noise - data, so x - t u is the data.
        return x - time[:, None, None] * prediction
    return prediction
