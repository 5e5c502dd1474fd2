"""Fine-tunes a pre-trained policy with RL (in its denoising chain or on its tokens), then evaluates it against its
base.

Progress is measured on validation seeds; the final evaluation uses other seeds. If interrupted, run the same command
again: it resumes from the last checkpoint and gives the same result. world=worldmodel fine-tunes in imagination.
finetune.shards=4 workers.count=4 collects in 4 processes; results depend on finetune.shards, not on the workers.
Data-parallel: torchrun --nproc-per-node 2 -m robopolicy finetune ... divides every minibatch among 2 processes.
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from robopolicy.building.guidance import load_guidance
from robopolicy.building.origins import origin_of_section
from robopolicy.building.policies import choose_device, load_policy, load_trainable, trainable
from robopolicy.building.shards import TuningWorkers, prepared
from robopolicy.building.workers import Workers, open_workers
from robopolicy.building.worlds import build_collection_world, build_critic, build_world
from robopolicy.configuration import Config
from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.evaluation.paper_effects import reversed_effects
from robopolicy.evaluation.success import compared, evaluate_policy
from robopolicy.nn.precision import training_precision
from robopolicy.nn.shapes import shapes_only
from robopolicy.nn.sharing import share_frozen
from robopolicy.policies.abilities import Tunable, WrapsModule, is_pretrained
from robopolicy.policies.loading import checkpoint_in, foreign_format, weights_bytes
from robopolicy.rl.algorithm import Algorithm, build_algorithm
from robopolicy.rl.preferences import StoresPairs
from robopolicy.rl.registry import Need
from robopolicy.runs import default_path, output, print_table, run_path
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.memory import MemoryBudget, packed_image_fraction, plan_memory, policy_copies
from robopolicy.training.needs import needs_images
from robopolicy.training.scaling import HEADER, Recorded, scaling_rows
from robopolicy.training.schedules import save_critic, schedule_by
from robopolicy.training.update import by_episode, minibatch_rows, random_steps
from robopolicy.verbs.advice import Evidence, print_advice
from robopolicy.verbs.job import (
    Job,
    Saved,
    confirming_seeds,
    print_evaluations,
    require_target,
    say_replicas,
    starting_checkpoint,
)
from robopolicy.verbs.verb import Verb
from worldmodels.protocol import EncodesForPolicy

VERB = Verb(
    summary="Fine-tune a policy with RL in its denoising chain or on its tokens",
    sections=("run", "world", "workers", "plan", "finetune", "lerobot"),
    example="robopolicy finetune recipe=push_cube run.seed=1",
    targets=("finetune.policy",),
    world_from={"finetune.policy": "train/checkpoint"},
    resumes=True,
    replicas=True,
)


def run(config: Config) -> int:
    """Fine-tune, or only print the memory it would take (dry_run)."""
    if config.finetune.dry_run:
        return dry_run(config)
    with open_workers(config) as workers:
        return tune(config, workers)


def tune(config: Config, workers: Workers) -> int:
    """Fine-tune, evaluate base and tuned policy on the same seeds, and record videos of both."""
    job = Job.open(config, "finetune", VERB.sections, "is already fine-tuned; run.overwrite=true starts over.")
    if job is None:
        return 0
    section, device = config.finetune, job.device
    for clause in reversed_effects(section.algorithm):
        output.print(f"finetune.algorithm={section.algorithm}: {clause}.", markup=False, soft_wrap=True)
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    foreign = foreign_format(path)
    if foreign is not None:
        foreign.require_memory(checkpoint_in(path), device, copies=2)
    base = load_policy(path, device)
    if isinstance(base, EncodesForPolicy):
        raise ConfigError(
            f"{path} reads a world model's latent. Fine-tune it in that model: robopolicy imagine {path}."
        )
    policy = prepared(config, load_trainable(path, config.lerobot, device))
    base_module = base.module if isinstance(base, WrapsModule) else base
    if isinstance(base_module, nn.Module) and not section.fsdp:
        share_frozen(policy, base_module)
    world = build_collection_world(config, base, device)
    print_memory(config, policy, base, world)
    algorithm = build_algorithm(learning := narrowed(FinetuneConfig, section))
    say_minibatch(algorithm, learning)
    judging = build_world(config.world, base, episodes=section.evaluate_episodes, device=device)
    remember_origin(policy, origin_of_section(config.world, world) or origin_of(base))
    require_target(section.target_success, judging)

    on_workers = TuningWorkers.of(workers, path)

    def confirm(candidate: Policy, iteration: int) -> dict[str, float]:
        fresh_seeds = confirming_seeds(config, iteration, section.evaluate_episodes)
        options = {"device": device, "label": "confirm", "players": on_workers.players(candidate)}
        return evaluate_policy(judging, candidate, fresh_seeds, **options).figures()

    clock = job.folder.clock()
    critic = build_critic(world, section, config.run.seed).to(device)
    trained_critic = critic if Need.CRITIC in algorithm.needs else None
    schedule_by(judging, trained_critic, best=True)
    with on_cpu(base_module, section.fsdp):
        finetuning = finetune(
            policy,
            critic,
            world,
            learning,
            job.folder,
            evaluate=job.evaluator(judging, section.evaluate_episodes, on_workers.players),
            confirm=confirm,
            seed=config.run.seed,
            guidance=load_guidance(config, world, config.world.model, policy),
            workers=on_workers.collecting,
        )
    if job.is_over:
        return 0
    save_critic(job.folder.path / "critic", trained_critic, world)
    seconds = clock.seconds
    saved = Saved({"base": path, "tuned": job.folder.checkpoint}, like=path, workers=workers)
    verdicts = job.judge(judging, {"base": base, "tuned": policy}, section.evaluate_episodes, saved)
    job.film(judging, {"base": base, "fine-tuned": policy}, section.evaluate_episodes, section.videos)
    for each in (world, judging):
        each.close()
    output.print(f"Stopped after {finetuning.iterations} iterations: {finetuning.ended.value}.")
    print_evaluations(verdicts)
    evidence = Evidence.of(job.folder.metrics(), finetuning.best)
    print_advice(verdicts, section, world.spec.horizon, finetuning.iterations, evidence, config.world.name)
    result = {**starting_checkpoint(path), **finetuning.course, "env_steps": finetuning.env_steps, "seconds": seconds}
    restarted = sum(int(record.get("shards_restarted", 0)) for record in job.folder.metrics())
    job.finish(compared(verdicts) | result | ({"shards_restarted": restarted} if restarted else {}))
    return 0


def say_minibatch(algorithm: Algorithm, learning: FinetuneConfig) -> None:
    """Print how processes divide a minibatch."""
    if by_episode(algorithm, learning):
        say_replicas(learning.minibatch_episodes, "minibatch", "episodes")
    else:
        say_replicas(learning.minibatch, "minibatch", "action chunks")


@contextmanager
def on_cpu(policy: object, wanted: bool) -> Generator[None]:
    """Keep the weights of `policy` on the CPU for the time of the context, if `wanted`."""
    device = next(policy.parameters()).device if wanted and isinstance(policy, nn.Module) else None
    if isinstance(policy, nn.Module) and device is not None:
        policy.to("cpu")
    yield
    if isinstance(policy, nn.Module) and device is not None:
        policy.to(device)


def dry_run(config: Config) -> int:
    """Print the memory that fine-tuning would take, without running it, and, if this run has begun, the time of its
    iterations on more processes; raises ConfigError when less memory is available.
    """
    budget, device = planned(config), choose_device(config.run)
    output.print(budget.text(), soft_wrap=True, highlight=False)
    output.print(budget.whole(), soft_wrap=True, highlight=False)
    print_scaling(config, device)
    free_bytes = free_memory(device)
    if free_bytes is not None and budget.loading > free_bytes:
        raise ConfigError(
            f"Policy and base need {in_bytes(budget.loading)} of memory while loading, but only {in_bytes(free_bytes)} "
            f"are free: stop other processes, or use a smaller checkpoint or a larger machine."
        )
    budget.require(None if free_bytes is None else free_bytes - budget.held)
    return 0


def print_scaling(config: Config, device: torch.device) -> None:
    """Print the time of an iteration on more processes, if iterations of this run in one process are recorded."""
    folder = run_path(config, "finetune")
    alone = config.workers.count == 1 and config.finetune.shards == 1 and replicas.count() == 1
    recorded = Recorded.of(RunFolder(folder).metrics()) if alone and folder.exists() else None
    if recorded is None:
        return
    title = f"Time of an iteration, from {recorded.iterations} iterations in {folder}"
    print_table(title, HEADER, scaling_rows(recorded, config.finetune.num_envs))
    output.print(
        "4 workers: finetune.shards=4 workers.count=4; overlapping: also finetune.staleness=1. 8 data-parallel: "
        "torchrun --nproc-per-node 8 -m robopolicy finetune ..., without the time to exchange gradients.",
        soft_wrap=True,
        highlight=False,
    )
    if device.type == "cpu":
        output.print("Times on a GPU cannot be computed from a run on a CPU: run a few iterations there first.")


def planned(config: Config) -> MemoryBudget:
    """Return the memory that fine-tuning would take, from tensor shapes alone if the checkpoint format allows it."""
    section = config.finetune
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    foreign = foreign_format(path)
    light = foreign if foreign is not None and foreign.from_shapes else None
    folder = checkpoint_in(path)
    with nullcontext() if light is None else shapes_only():
        base, other = (load_policy(path) if light is None else light.load(folder, weights=False) for _ in range(2))
        world = build_collection_world(config, base)
        policy = prepared(config, trainable(other, config.lerobot))
        budget = memory_of(config, policy, base, world, torch.device("cpu"))
    world.close()
    return budget


def print_memory(config: Config, policy: Trainable, base: Policy, world: World) -> None:
    """Print the memory needed to fine-tune a policy with a language model; raises ConfigError when less is available.

    Applies to LeRobot policies, token policies built from a checkpoint, and policies distilled from a LeRobot teacher.
    Prints nothing for other policies: they are small.
    """
    if not is_pretrained(base) and not any(foreign_format(path) for path in config.finetune.teacher_paths):
        return
    device = next(policy.parameters()).device
    budget = memory_of(config, policy, base, world, device)
    output.print(budget.text(), soft_wrap=True, highlight=False)
    budget.require(free_memory(device))


def memory_of(config: Config, policy: Trainable, base: Policy, world: World, device: torch.device) -> MemoryBudget:
    """Return the memory of one iteration in `world`, on the device of the policy and its base."""
    learning = narrowed(FinetuneConfig, config.finetune)
    algorithm = build_algorithm(learning)
    rows, length = world.batch_size * learning.shards, learning.rollout_length
    if Need.CRITIC not in algorithm.needs:
        rows, length = learning.groups * learning.group_size, -(-world.spec.horizon // policy.spec.chunk)
    takes_episodes = by_episode(algorithm, learning)
    minibatch = minibatch_rows(algorithm, learning, rows) * (length if takes_episodes else 1)
    stores = algorithm.replay is not None and isinstance(algorithm.replay(), StoresPairs)
    others_read = stores or bool(config.finetune.teacher_paths) or config.plan.model is not None
    images = needs_images(policy, None, algorithm, others=others_read)
    options: dict[str, Any] = {"micro_batch": learning.micro_batch, "optimiser": learning.optimiser, "images": images}
    options |= {"replicas": replicas.count(), "fsdp": learning.fsdp}
    if images and learning.packed_images:  # in the processor's memory
        options["packed"] = packed_image_fraction(world) if device.type == "cpu" else 0.0
    plan = partial(plan_memory, device=device, **options)
    holders = policy_copies(algorithm.needs, learning)
    with training_precision(learning.precision):
        budget = plan(policy, rows * length, minibatch, random_steps(algorithm, learning), holders)
    if paths := config.finetune.teacher_paths:
        budget = replace(budget, teacher=sum(weights_bytes(checkpoint_in(path)) for path in paths))
    if not (isinstance(base, Tunable) and config.lerobot.gradient_checkpointing):
        return budget
    # On the way back the activations of one step at a time are there again, as they are without checkpointing.
    plain_policy = base.tuned_by(replace(config.lerobot, gradient_checkpointing=False)).to_trainable()
    plain_policy.prepare_finetuning(config.finetune.finetuned_steps, train_encoder=config.finetune.train_encoder)
    with training_precision(learning.precision):
        step = plan(plain_policy, rows * length, minibatch, 1)
    return replace(budget, activations=budget.activations + step.activations, each=budget.each + step.each)
