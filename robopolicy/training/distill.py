"""Consistency distillation along the teacher's own chain: from many denoising steps to few.

The teacher's deterministic chain from noise x_0 to its clean action y is an ODE solved in K steps. A consistency
function C maps every point of the chain to its end, so one call from x_0 is enough:

    minimise  || C(x, t, observation) - y ||^2   over points x of the chain, y held fixed.

Sources: consistency models, Song et al. 2023, arXiv:2303.01469; for policies, Consistency Policy, arXiv:2405.07503, and
RL-100, arXiv:2510.14830, whose loss this is. Its target is the teacher solved to the end, not the student's target
network one step further, because K is small and the whole chain is cheap. Deviation: points are sampled from both the
teacher's chain and the student's, because the student meets the latter at inference. The student's chain has n steps:
the first starts in noise, the others in the student's own outputs.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import ConvertibleToTrainable, Policy, PolicyWrapper, TensorObservation
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import TASK
from robopolicy.nn.configuration import Prediction, Spacing
from robopolicy.nn.denoisers import draw_counts, given_steps, with_prefix
from robopolicy.nn.schedules import FlowSchedule
from robopolicy.policies.configuration import Likelihood, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy, require_denoising
from robopolicy.policies.latents import CustomLatents
from robopolicy.policies.network import PrefixedSteps
from robopolicy.training.configuration import DistillConfig
from robopolicy.training.experience import require_lowering
from robopolicy.training.fit import FitResult, fit


class Distillation(nn.Module):
    """Student trained to match a teacher, in the form that `fit` trains; only the student's weights are parameters."""

    def __init__(self, teacher: DenoisingPolicy, config: DistillConfig):
        super().__init__()
        self.student = few_step_student(teacher, config.steps)
        self.config = config
        self._teacher = (teacher,)  # in a tuple, so that it is no part of this module

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"distance": [N]}, the mean squared distance between the output from a chain point and the teacher's
        clean action.

        batch: "observation", key -> [N, H, ...].
        """
        observation = batch["observation"]
        student = self.student
        (teacher,) = self._teacher
        rows = len(observation[next(iter(student.fields))])
        device = student.action_low.device

        def draw(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=generator.device).to(device)

        def draw_noise() -> Tensor:
            return torch.randn((rows, *student.noise_shape), generator=generator, device=generator.device).to(device)

        # Teacher and student begin in the same noise: a consistency function maps one point to one end.
        noise, prefix = draw_noise(), None
        with torch.no_grad():
            if (
                prefix_limit := teacher.config.prefix_steps
            ):  # it continues the beginning of a plan, here another one of its own
                count = draw_counts(rows, prefix_limit, teacher.config.prefix_decay, generator).to(device)
                prefix = teacher.trajectory(observation, draw_noise())[:, -1], count
            guide = None if prefix is None else lambda steps: PrefixedSteps(steps, *prefix)
            path = teacher.trajectory(observation, noise, guided=guide)
            # Points of the student's own chain carry its errors, which are what its later steps have to mend.
            student_path = (
                student.trajectory(observation, noise, guided=guide) if self.config.steps > 1 else noise[:, None]
            )
        point, time = _drawn(student_path[:, : self.config.steps], student.schedule.times, draw(rows))
        # Noise is already the first point of the student's chain, and at the clean action there is nothing to learn.
        inner = path.shape[1] - 2  # points of the teacher's chain between noise and action
        if inner and self.config.teacher_chain_fraction:
            teacher_point, at = _drawn(path[:, 1:-1], teacher.schedule.times[1:], draw(rows))
            use_teacher = draw(rows) < self.config.teacher_chain_fraction
            point, time = (
                torch.where(use_teacher[:, None, None], teacher_point, point),
                torch.where(use_teacher, at, time),
            )
        inputs = point if prefix is None else with_prefix(point, *prefix)
        prediction = student.network.denoise(inputs, time, student.encode(observation))
        # The student's estimate of the end from this point alone, compared with where the teacher's chain ends.
        clean = clean_actions(student, point, prediction, time)
        distance = (clean - path[:, -1])[..., : student.part.size].square()  # what pads an action is executed by nobody
        if prefix is None:
            return {"distance": distance.mean((1, 2))}
        free_steps = ~given_steps(prefix[1], distance.shape[1])  # of given steps nothing is asked
        return {"distance": (distance.mean(2) * free_steps).sum(1) / free_steps.sum(1)}


def distill(
    teacher: Policy,
    episodes: Episodes,
    config: DistillConfig,
    run: RunFolder | None = None,
    *,
    seed: int = 0,
) -> tuple[DenoisingPolicy, FitResult]:
    """Train a student of config.steps denoising steps to match `teacher` at the observations of `episodes`.

    The episodes' actions are not used. A killed run resumes from its resume point. Raises ConfigError when the teacher
    is not a denoising policy or takes no more steps than its student, and when policy or processor do not support the
    precision.
    """
    teacher = distillable(teacher, config.steps)
    require_lowering(teacher, config.precision)
    lesson = Distillation(teacher, config)
    generators = Generators(seed, teacher.action_low.device)
    batches = _observations(teacher, episodes, config.batch_size, generators["batches"])
    options = {"precision": config.precision, "micro_batch": config.micro_batch}
    result = fit(lesson, batches, config.fit, generators, run=run, label="Distilling", **options)
    return lesson.student, result


def distillable(teacher: Policy, steps: int) -> DenoisingPolicy:
    """Return `teacher`, or its built-in equivalent for a LeRobot policy, in a form that a student of `steps` steps can
    be distilled from.

    Raises ConfigError when it takes no denoising steps, takes no more than `steps`, or cannot take so few.
    """
    if isinstance(teacher, ConvertibleToTrainable):
        teacher = teacher.to_trainable()
    if isinstance(teacher, PolicyWrapper):
        raise ConfigError(
            f"{type(teacher).__name__} wraps another policy and cannot be distilled: distil the checkpoint of the "
            "wrapped policy."
        )
    denoising = require_denoising(
        teacher,
        f"{type(teacher).__name__} has no denoising steps to reduce: only diffusion and flow policies can be "
        "distilled.",
    )
    require_fewer_steps(denoising, steps)
    return denoising


def _observations(
    policy: DenoisingPolicy, episodes: Episodes, batch_size: int, generator: torch.Generator
) -> Iterator[dict[str, TensorObservation]]:
    """Yield random observations of `episodes` indefinitely; the only state is `generator`."""
    spec = policy.spec
    # A policy may know more instructions than its data has: one is said too.
    keys = (*spec.observation, TASK) if policy.reads_instructions else spec.columns
    return episodes.to(generator.device).sampler(spec.history, 1, batch_size, generator, keys=keys)


def _drawn(points: Tensor, times: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one of the points [N, k, P, A] of every row and its time [N]; uniform: [N] in [0, 1)."""
    count = points.shape[1]
    index = (uniform * count).long().clamp(max=count - 1)
    return points[torch.arange(len(points), device=points.device), index], times[index]


def few_step_student(teacher: DenoisingPolicy, steps: int = 1) -> DenoisingPolicy:
    """Return an untrained policy of `steps` denoising steps, initialised with the teacher's weights and normalisers.

    A diffusion student predicts the clean action whatever its teacher predicts: at the noisiest level, where the single
    step of a one-step chain is taken, the noise carries no information about it. Frozen parts of a LeRobot policy stay
    frozen, and its checkpoint stores `steps`. Raises ConfigError as `require_fewer_steps` does.
    """
    require_fewer_steps(teacher, steps)
    config, network = teacher.config, teacher.network
    diffusion = config.kind is PolicyKind.DIFFUSION
    if isinstance(network, CustomLatents):
        student_network, finetuned_steps = network.of_steps(steps), steps
    else:
        student_network, finetuned_steps = copy.deepcopy(network).requires_grad_(True), None
    student_config = replace(
        config,
        sampling_steps=steps,
        # Trailing: the grid ends at the noisiest level, where the first (perhaps only) step begins.
        timestep_spacing=Spacing.TRAILING,
        prediction=Prediction.SAMPLE if diffusion else config.prediction,
        likelihood=Likelihood.CHAIN,
        finetuned_steps=finetuned_steps,
        noisy_steps=None,
    )
    student = DenoisingPolicy(
        student_config,
        teacher.fields,
        teacher.action,
        fps=teacher.fps,
        instructions=teacher.instructions,
        network=student_network,
    )
    student.action_normalizer.load_state_dict(teacher.action_normalizer.state_dict())
    return student.to(teacher.action_low.device)


def require_fewer_steps(teacher: DenoisingPolicy, steps: int) -> None:
    """Raise ConfigError unless 1 <= steps < the teacher's, and its network supports fewer steps."""
    teacher_steps, network = teacher.schedule.steps, teacher.network
    if not 1 <= steps < max(teacher_steps, 2):
        raise ConfigError(f"steps={steps} must be at least 1 and below the teacher's {teacher_steps} denoising steps.")
    if isinstance(network, CustomLatents) and (reason := network.why_always_as_many()):
        raise ConfigError(f"The policy cannot be distilled to fewer steps: {reason}")


def clean_actions(student: DenoisingPolicy, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
    """Convert a few-step student's prediction to clean latents [N, P, A], not clipped.

    x, prediction: [N, P, A] at times [N] in (0, 1].
    """
    if isinstance(student.schedule, FlowSchedule):
        # x = (1 - t) data + t noise and u = noise - data, so x - t u is the data.
        return x - time[:, None, None] * prediction
    return prediction
