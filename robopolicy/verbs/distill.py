"""Distils a denoising policy into one with a single denoising step (distill.steps=2: two), for fast inference.

The teacher runs on recorded observations (distill.data) or in episodes that it plays. The student learns to jump to the
end of the teacher's noise-free denoising chain (consistency distillation). The student is a normal policy: evaluate,
serve and finetune accept it. Both are evaluated from the same initial states and their inference times are compared. If
interrupted, run the same command again: it resumes and gives the same result.
"""

from typing import Any

import torch

from robopolicy.building.policies import load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core.delayed import episodes_for_policy
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.spec import cameras_of
from robopolicy.core.structured import narrowed
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.data.record import record
from robopolicy.evaluation.success import compared
from robopolicy.inference.comparison import time_decisions
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.decisions import observations_at
from robopolicy.runs import default_path, output
from robopolicy.training.configuration import DistillConfig
from robopolicy.training.distill import Distillation, distill, distillable
from robopolicy.verbs.job import Job, evaluate_in_own_world, print_model, say_replicas
from robopolicy.verbs.verb import Verb
from worldmodels.encoding import encode_episodes
from worldmodels.protocol import EncodesForPolicy

VERB = Verb(
    summary="Distil a denoising policy into one with few denoising steps",
    sections=("run", "world", "workers", "distill"),
    example="robopolicy distill runs/finetune/push_t/0/checkpoint",
    targets=("distill.policy",),
    world_from={"distill.policy": "finetune/checkpoint"},
    resumes=True,
    replicas=True,
)

TIMED = 50
"""Number of timed calls on one observation, alternating between teacher and student."""


def run(config: Config) -> int:
    """Collect observations, distil, then evaluate and time both policies."""
    job = Job.open(config, "distill", VERB.sections)
    if job is None:
        return 0
    section = config.distill
    folder, device = job.folder, job.device
    path = default_path(config, "finetune", "checkpoint", section.policy, "distill.policy")
    teacher = load_policy(path, device)
    settings = narrowed(DistillConfig, section)
    if isinstance(teacher, EncodesForPolicy):
        distillable(teacher.inner, section.steps)
    else:  # before it plays a single episode
        teacher = distillable(teacher, section.steps)
        plan(teacher, settings)
    episodes = distillation_observations(config, teacher, device)
    seed = derive_seed(config.run.seed, "distill")
    clock = folder.clock()
    say_replicas(section.batch_size, "batch", "observations")
    if isinstance(teacher, EncodesForPolicy):  # the encoder stays as it is
        few, fit_result = distill(
            teacher.inner, encode_episodes(teacher.encoder, episodes), settings, folder, seed=seed
        )
        student = teacher.around(few)
    else:
        student, fit_result = distill(teacher, episodes, settings, folder, seed=seed)
    if job.is_over:
        return 0
    fit_seconds = clock.seconds
    remember_origin(student, origin_of(teacher))
    remember_renaming(student, renaming_of(teacher))
    student.save(folder.checkpoint)
    policies_of_roles: dict[str, Policy] = {"teacher": teacher, "student": student}
    seconds = seconds_of(policies_of_roles, episodes, device)
    faster = seconds["teacher"] / seconds["student"]
    result: dict[str, Any] = {
        "teacher_checkpoint": str(path),
        "observations": episodes.step_count,
        "env_steps": 0 if section.data else episodes.step_count,
        "training_steps": fit_result.steps,
        "losses": dict(fit_result.losses),
        "seconds": fit_seconds,
        "times_faster": faster,
        **{f"seconds_{name}": value for name, value in seconds.items()},
    }
    if section.evaluate_episodes:
        paths = {"teacher": path, "student": folder.checkpoint}
        result |= compared(evaluate_in_own_world(config, policies_of_roles, section.evaluate_episodes, device, paths))
    output.print(
        f"Policy call (batch size 1): teacher {1000 * seconds['teacher']:.2f} ms, student "
        f"{1000 * seconds['student']:.2f} ms, {faster:.1f}x faster."
    )
    job.finish(result)
    return 0


def plan(teacher: DenoisingPolicy, settings: DistillConfig) -> None:
    """Print the memory needed to distil a LeRobot policy, using a temporary student; raises as `print_model`."""
    if teacher.is_pretrained:
        lesson = Distillation(teacher, settings)
        print_model(lesson.student, settings, lesson)


def distillation_observations(config: Config, teacher: Policy, device: torch.device) -> Episodes:
    """Return the episodes that provide the teacher's observations: recorded, or played by the teacher in its world."""
    section = config.distill
    if section.data:
        cameras = cameras_of(teacher.spec.observation)
        parts = [
            episodes_for_policy(teacher, read_dataset(path, cameras=cameras, rename=renaming_of(teacher)))
            for path in section.data
        ]
        episodes = Episodes.concatenate(parts)
        require_recorded("the recorded data", episodes, teacher.spec.observation, teacher.spec.action)
        return episodes
    world = build_world(config.world, teacher, episodes=section.episodes, device=device)
    seeds = episode_seeds(config.run.seed, "distill", section.episodes)
    teacher_episodes = record(world, teacher, seeds, generator=Generators(config.run.seed, device)["distill/play"])
    world.close()
    return teacher_episodes


def seconds_of(policies: dict[str, Policy], episodes: Episodes, device: torch.device) -> dict[str, float]:
    """Return the median seconds per policy call of each policy, timed in turns on the first observation."""
    first = next(iter(policies.values())).spec
    observation = observations_at(
        episodes.to(device), torch.zeros(1, dtype=torch.int64), first.history, list(first.observation)
    )
    return {name: each.median for name, each in time_decisions(policies, observation, TIMED).items()}
