"""Distils a teacher into a student, labelling the states that the student itself visits (DAgger); the student may use
cameras.

The teacher is a policy (such as one tuned on the state) or teach.teacher=expert (or collect.controller). It labels
every step with its own action; the student (policy.*) trains on these labels and plays, in alternating rounds.
Demonstrations alone never show how to recover from the student's mistakes. The world provides the fields of both:
world.cameras for the student, the state for the teacher. teach.auxiliary_keys=[observation.environment_state] adds an
auxiliary loss that predicts the state from the images. If interrupted, run the same command again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.origins import origin_of_section
from robopolicy.building.policies import load_acting, load_policy, new_policy
from robopolicy.building.worlds import EXPERT, build_lookahead, build_noisy_expert, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.act import InferenceSection
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import remember_origin
from robopolicy.core.policy import Policy, is_policy, require_trainable
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.structured import narrowed
from robopolicy.core.world import Controller, World
from robopolicy.data.lookahead import LookaheadController
from robopolicy.data.record import record
from robopolicy.evaluation.success import compared
from robopolicy.policies.abilities import is_pretrained
from robopolicy.policies.configuration import Reach, reach_of
from robopolicy.runs import default_path, output
from robopolicy.training.auxiliary import build_state_head
from robopolicy.training.configuration import TeachConfig
from robopolicy.training.pretrain import plan_conditions
from robopolicy.training.teaching import Teacher, teach
from robopolicy.verbs.job import (
    Job,
    Saved,
    evaluation_seeds,
    print_evaluations,
    print_model,
    record_video,
    say_replicas,
)
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="DAgger: distil a policy or the expert into a student, such as one with cameras",
    sections=("run", "world", "workers", "collect", "policy", "teach"),
    example="robopolicy teach runs/finetune/push_cube/0/checkpoint recipe=push_cube_pixels",
    targets=("teach.teacher",),
    world_from={"teach.teacher": "finetune/checkpoint"},
    resumes=True,
    replicas=True,
)


def run(config: Config) -> int:
    """Train the student, save it and evaluate it."""
    job = Job.open(config, "teach", VERB.sections, "is already trained; run.overwrite=true trains again.")
    if job is None:
        return 0
    section = config.teach
    folder, device = job.folder, job.device
    seed = config.run.seed
    policy = None if section.teacher == EXPERT else load_acting(InferenceSection(), teacher_path(config), device)
    reach = reach_of(config.policy.config)
    world_section = world_for_both(config.world, policy, reach)
    world = build_world(world_section, policy, episodes=section.episodes, seed=seed, device=device, filmed=True)
    teacher = the_expert(config, world, reach) if policy is None else Teacher(policy, lambda _: policy)
    plan(config, teacher, world, device)
    clock = folder.clock()
    say_replicas(section.batch_size, "batch", "samples")
    teaching = teach(
        teacher,
        world,
        lambda episodes: new_policy(config, episodes, device),
        lambda path: require_trainable(load_policy(path, device)),
        narrowed(TeachConfig, section),
        folder,
        seed=seed,
        device=device,
    )
    seconds = clock.seconds
    world.close()
    if isinstance(teacher.says, LookaheadController):
        teacher.says.close()
    if job.is_over:
        return 0
    student = teaching.student
    remember_origin(student, origin_of_section(config.world, world))
    student.save(folder.checkpoint)
    result: dict[str, Any] = {
        "teacher": section.teacher or str(teacher_path(config)),
        "env_steps": teaching.env_steps,
        "seconds": seconds,
        "rounds": teaching.rounds,
    }
    if section.evaluate_episodes:
        result |= judged(job, teacher.says, student)
    job.finish(result)
    return 0


def plan(config: Config, teacher: Teacher, world: World, device: torch.device) -> None:
    """Print how a student built on another library's checkpoint reads images, and the memory that its training takes.

    It is built from one teacher episode before the first round. Raises ConfigError when less memory is free or its
    encoder outputs cannot be cached, and the errors of `build_state_head`.
    """
    if not (is_pretrained(config.policy.config) or config.teach.cache_encoder_outputs or config.teach.auxiliary_keys):
        return
    section = config.teach
    seeds, draws = episode_seeds(config.run.seed, "teach/plan", 1), torch.Generator(device)
    episodes = record(world, teacher.plays(0), seeds, generator=draws)
    student = new_policy(config, episodes, device)
    print_model(student, section)
    if section.auxiliary_keys:
        build_state_head(student, episodes, section, config.run.seed)
    if section.cache_encoder_outputs:
        steps = section.rounds * section.episodes * episodes.step_count
        output.print(plan_conditions(student, episodes, steps, section.precision))


def teacher_path(config: Config) -> Path:
    """Return the teacher's checkpoint; raises CheckpointError where there is none."""
    explicit_path = Path(config.teach.teacher) if config.teach.teacher else None
    return default_path(config, "finetune", "checkpoint", explicit_path, "teach.teacher")


def world_for_both(section: WorldSection, teacher: Policy | None, student: Reach | None) -> WorldSection:
    """Return the settings of a world with the longer observation history of the two policies.

    Raises ConfigError when the student would execute more steps than the teacher labels; student: None if unknown.
    """
    if student is None:
        return section
    if teacher is not None and 1 < teacher.spec.chunk < student.chunk:
        raise ConfigError(
            f"The teacher labels {teacher.spec.chunk} steps per call, but the student would execute {student.chunk}: "
            f"set policy.chunk={teacher.spec.chunk} or less."
        )
    past = max(student.history, 1 if teacher is None else teacher.spec.history, int(section.options.get("history", 1)))
    return section if past == 1 else replace(section, options={**section.options, "history": past})


def the_expert(config: Config, world: World, student: Reach | None) -> Teacher:
    """Return the expert or collect.controller as a teacher of action chunks; raises ConfigError when there is none."""
    controller = config.collect.controller

    def plays(number: int) -> Controller:
        seed = derive_seed(config.run.seed, f"teach/noise/{number}")
        return build_noisy_expert(config.world, world, config.teach.noise, seed, controller)

    return Teacher(build_lookahead(config.world, world, student.prediction if student else 1, controller), plays)


def judged(job: Job, teacher: Policy | Controller | LookaheadController, student: Policy) -> dict[str, Any]:
    """Evaluate the teacher, if it is a policy, and the student from the same initial states; print and return the
    results.

    Also writes a video of the student from the first of them.
    """
    config, section = job.config, job.config.teach
    seeds = evaluation_seeds(config, section.evaluate_episodes)
    policies: dict[str, Policy] = {"student": student}
    if not isinstance(teacher, LookaheadController) and is_policy(teacher):
        policies = {"teacher": teacher, **policies}
    verdicts = {}
    for name, each in policies.items():
        world = build_world(config.world, each, episodes=len(seeds), seed=config.run.seed, device=job.device)
        path = job.folder.checkpoint if each is student else teacher_path(config)
        verdicts |= job.judge(world, {name: each}, len(seeds), Saved({name: path}, like=path, seed=config.run.seed))
        if each is student:
            record_video(world, student, seeds[: section.videos], job.folder, name, job.device)
        world.close()
    print_evaluations(verdicts)
    return compared(verdicts) if "teacher" in verdicts else {"student": verdicts["student"].to_json()}
