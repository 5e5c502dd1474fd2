"""Fine-tunes a pre-trained policy with RL (in its denoising chain or on its tokens), then judges it beside its base.

Progress is measured on validation seeds, the final judgement uses other seeds. Killed? Run the same command again: it
goes on from the last checkpoint and ends in the same place. world=worldmodel tunes in imagination.
"""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from robopolicy.building.origins import origin_of_section
from robopolicy.building.planning import planned_acting
from robopolicy.building.policies import as_seen_in, choose_device, load_policy, load_trainable, trainable
from robopolicy.building.worlds import build_controller, build_critic, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.learn import FinetuneSection
from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Policy, TakesAdapters, Trainable, require_trainable
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World, can_render
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import compare, evaluate_policy, require_success
from robopolicy.evaluation.video import beside, record_grid, write_video
from robopolicy.nn.precision import learning_in
from robopolicy.nn.shapes import shapes_only
from robopolicy.nn.sharing import share
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot import LeRobotPolicy, load_lerobot_policy
from robopolicy.policies.lerobot_reading import require_memory
from robopolicy.policies.loading import checkpoint_in, is_lerobot, weights_bytes
from robopolicy.policies.token.policy import TokenPolicy
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.preferences import StoresPairs, read_pairs
from robopolicy.rl.registry import Need
from robopolicy.runs import default_path, finish, finished, open_run, output
from robopolicy.training.collection import start_pool
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations, demonstrate
from robopolicy.training.finetune import FinetuneResult, finetune
from robopolicy.training.guidance import OF_THE_SAME_STEPS, Guidance
from robopolicy.training.memory import MemoryBudget, held_by, plan_memory, what_packing_leaves
from robopolicy.training.needs import keeps_images
from robopolicy.training.update import by_episode, minibatch_rows
from robopolicy.verbs.advice import Evidence, evident_cause, nothing_paid
from robopolicy.verbs.evaluate import Verdict, evaluation_seeds, judge, print_verdicts
from robopolicy.verbs.sources import began_from
from robopolicy.verbs.verb import Verb
from worldmodels.encoding import EncodedPolicy

VERB = Verb(
    summary="Fine-tune a policy with RL in its denoising chain or on its tokens",
    sections=("run", "world", "plan", "finetune", "lerobot"),
    example="robopolicy finetune recipe=push_cube run.seed=1",
    targets=("finetune.policy",),
    world_from={"finetune.policy": "train/checkpoint"},
    resumes=True,
)


def run(config: Config) -> int:
    """Fine-tune, or only say what that would take."""
    return dry_run(config) if config.finetune.dry_run else tune(config)


def tune(config: Config) -> int:
    """Fine-tune, judge base and tuned on the same seeds, film both."""
    folder = open_run(config, "finetune", VERB.sections)
    if finished(folder) is not None:
        output.print(f"{folder.path} is already fine-tuned; run.overwrite=true starts over.")
        return 0
    section, device = config.finetune, choose_device(config.run)
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    if is_lerobot(path):
        require_memory(checkpoint_in(path), device, copies=2)
    base = load_policy(path, device)
    if isinstance(base, EncodedPolicy):
        raise ConfigError(f"{path} reads a world model's latent: tune it in there, robopolicy imagine {path}.")
    policy = load_trainable(path, config.lerobot, device)
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    add_lora(policy, section.lora_rank)
    held = base.policy if isinstance(base, LeRobotPolicy) else base
    if isinstance(held, nn.Module):
        share(policy, held)
    world = build_world(config.world, base, batch_size=section.num_envs, device=device)
    say_memory(config, policy, base, world)
    judging = build_world(config.world, base, episodes=section.evaluate_episodes, device=device)
    remember_origin(policy, origin_of_section(config.world, world) or origin_of(base))
    require_target(section.target_success, judging)
    validation = episode_seeds(config.run.seed, "validate", section.evaluate_episodes)

    def evaluate(candidate: Policy, deterministic: bool) -> dict[str, float]:
        found = evaluate_policy(
            judging, candidate, validation, deterministic=deterministic, device=device, label="validate"
        )
        return found.figures()

    def confirm(candidate: Policy, iteration: int) -> dict[str, float]:
        fresh = confirming_seeds(config, iteration, section.evaluate_episodes)
        return evaluate_policy(judging, candidate, fresh, device=device, label="confirm").figures()

    clock = folder.clock()
    critic = build_critic(world, section, config.run.seed).to(device)
    tuned = finetune(
        policy,
        critic,
        world,
        narrowed(FinetuneConfig, section),
        folder,
        evaluate=evaluate,
        confirm=confirm,
        seed=config.run.seed,
        guidance=guidance_of(config, world, config.world.model, policy),
    )
    seconds = clock.seconds
    seeds = evaluation_seeds(config, section.evaluate_episodes)
    verdicts = {
        name: judge(judging, candidate, seeds, device, config.run.seed, name)
        for name, candidate in {"base": base, "tuned": policy}.items()
    }
    if section.videos and can_render(judging):
        film(config, judging, {"base": base, "fine-tuned": policy}, folder)
    for each in (world, judging):
        each.close()
    output.print(f"Ended after {tuned.iterations} iterations: {tuned.ended.value}.")
    print_verdicts(verdicts)
    seen = Evidence.of(folder.metrics(), tuned.best)
    print_advice(verdicts, section, world.spec.horizon, tuned.iterations, seen, config.world.name)
    result = {**began_from(path), **course_of(tuned), "env_steps": tuned.env_steps, "seconds": seconds}
    finish(config, folder, summary(verdicts) | result)
    output.print(f"Policy: {folder.checkpoint}\nReport: {report_for_run(folder.path)}")
    return 0


def dry_run(config: Config) -> int:
    """Print what fine-tuning would take, without doing it; raises ConfigError where there is less memory."""
    budget, device = planned(config), choose_device(config.run)
    output.print(budget.text(), soft_wrap=True, highlight=False)
    output.print(budget.whole(), soft_wrap=True, highlight=False)
    free = free_memory(device)
    if free is not None and budget.loading > free:
        raise ConfigError(
            f"Policy and base take {in_bytes(budget.loading)} while they are loaded, and {in_bytes(free)} are free: "
            "end what else runs there, or choose a smaller checkpoint or a larger machine."
        )
    budget.require(None if free is None else free - budget.held)
    return 0


def planned(config: Config) -> MemoryBudget:
    """Return what fine-tuning would take, from the shapes of its tensors where the policy is one of LeRobot's."""
    section = config.finetune
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    lerobots = is_lerobot(path)
    with shapes_only() if lerobots else nullcontext():
        base, other = ((load_lerobot_policy(path, weights=False) if lerobots else load_policy(path)) for _ in range(2))
        world = build_world(config.world, base, batch_size=section.num_envs)
        policy = trainable(other, config.lerobot)
        policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
        add_lora(policy, section.lora_rank)
        budget = memory_of(config, policy, base, world, torch.device("cpu"))
    world.close()
    return budget


def confirming_seeds(config: Config, iteration: int, episodes: int) -> Array:
    """Return the seeds [episodes] on which a target that was reached at `iteration` is confirmed."""
    return episode_seeds(config.run.seed, f"confirm/{iteration}", episodes)


def say_memory(config: Config, policy: Trainable, base: Policy, world: World) -> None:
    """Print what tuning a policy with a language model will take of memory; raises ConfigError where there is less.

    That is one of LeRobot's, or a token policy of a checkpoint, or one that learns from one of LeRobot's. Of others
    nothing is said: they are small.
    """
    teacher = config.finetune.teacher
    large = isinstance(base, LeRobotPolicy) or (isinstance(base, TokenPolicy) and base.config.token.model)
    if not large and (teacher is None or not is_lerobot(teacher)):
        return
    device = next(policy.parameters()).device
    budget = memory_of(config, policy, base, world, device)
    output.print(budget.text(), soft_wrap=True, highlight=False)
    budget.require(free_memory(device))


def memory_of(config: Config, policy: Trainable, base: Policy, world: World, device: torch.device) -> MemoryBudget:
    """Return what an iteration in `world` takes, on the device where the policy and its base are."""
    learning = narrowed(FinetuneConfig, config.finetune)
    algorithm = build_algorithm(learning)
    rows, length = world.batch_size, learning.rollout_length
    if Need.CRITIC not in algorithm.needs:
        rows, length = learning.groups * learning.group_size, -(-world.spec.horizon // policy.spec.chunk)
    whole = by_episode(algorithm, learning)
    minibatch = minibatch_rows(algorithm, learning, rows) * (length if whole else 1)
    stores = algorithm.replay is not None and isinstance(algorithm.replay(), StoresPairs)
    others = stores or config.finetune.teacher is not None or config.plan.model is not None
    images = keeps_images(policy, None, algorithm, others=others)
    chosen: dict[str, Any] = {"micro_batch": learning.micro_batch, "optimiser": learning.optimiser, "images": images}
    if images and learning.packed_images:  # in the processor's memory
        chosen["packed"] = what_packing_leaves(world) if device.type == "cpu" else 0.0
    plan = partial(plan_memory, device=device, **chosen)
    holders = held_by(algorithm.needs, learning)
    with learning_in(learning.precision):
        budget = plan(policy, rows * length, minibatch, learning.scored_steps, holders)
    if config.finetune.teacher is not None:
        budget = replace(budget, teacher=weights_bytes(checkpoint_in(config.finetune.teacher)))
    if not (isinstance(base, LeRobotPolicy) and config.lerobot.checkpointing):
        return budget
    # On the way back the activations of one step at a time are there again, as they are without checkpointing.
    plain = base.tuned_by(replace(config.lerobot, checkpointing=False)).to_trainable()
    plain.prepare_finetuning(config.finetune.finetuned_steps, train_encoder=config.finetune.train_encoder)
    with learning_in(learning.precision):
        step = plan(plain, rows * length, minibatch, 1)
    return replace(budget, activations=budget.activations + step.activations, each=budget.each + step.each)


def course_of(tuned: FinetuneResult) -> dict[str, Any]:
    """Return how long a run went on, and why it ended."""
    return {"iterations": tuned.iterations, "reached_target": tuned.reached_target, "ended": tuned.ended.value}


def require_target(target: float | None, world: World) -> None:
    """Raise ConfigError where a run should end at a rate of success that the world does not report."""
    if target is not None:
        require_success(world, "set finetune.target_success=null")


def film(config: Config, world: World, policies: Mapping[str, Policy], folder: RunFolder) -> None:
    """Write base_and_tuned.mp4: the policies by label beside one another, on the first of the judged starts."""
    device, seeds = choose_device(config.run), evaluation_seeds(config, config.finetune.evaluate_episodes)
    clips = [
        record_grid(world, policy, seeds[: config.finetune.videos], columns=4, label=label, device=device)
        for label, policy in policies.items()
    ]
    write_video(beside(*clips), folder.path / "base_and_tuned.mp4")


def guidance_of(
    config: Config, world: World, imagined: Path | None = None, policy: Trainable | None = None
) -> Guidance:
    """Load what the configured mechanisms lean on: a teacher, demonstrated states, successful episodes of experts.

    imagined: the world model's checkpoint in which `world` plays, None for another world; policy: which is tuned.
    """
    section, device = config.finetune, choose_device(config.run)
    needed = section.expert_rows or Need.EXPERTS in build_algorithm(narrowed(FinetuneConfig, section)).needs
    experts = experts_of(config, world) if needed else None
    teacher = None if section.teacher is None else teacher_of(config, section.teacher, world, policy)
    acting = planned_acting(config.plan, world, imagined, device)
    pairs = None if section.pairs is None else read_pairs(section.pairs)
    return Guidance(teacher, demonstrated(config, world), experts, acting, pairs)


def experts_of(config: Config, world: World) -> Episodes:
    """Read the successful episodes of finetune.experts, by default of what `collect` left."""
    paths = config.finetune.experts or (default_path(config, "collect", "dataset", None, "finetune.experts"),)
    experts = Episodes.concatenate([read_dataset(path, cameras=world.spec.cameras) for path in paths])
    shown = {key: field for key, field in world.spec.observation.items() if key in experts.observation_fields}
    require_recorded("the experts' data", experts, shown, world.spec.action)
    return experts if experts.success is None else experts.select(experts.success)


def teacher_of(config: Config, folder: Path, world: World, policy: Trainable | None) -> Policy:
    """Load a teacher of `policy`; where it shall score that one's steps, it is made ready to, as the policy was.

    Raises as `load_policy` does, and ConfigError where one of LeRobot's has no log-probabilities here.
    """
    teacher = as_seen_in(world, load_policy(folder, choose_device(config.run)))
    if not build_algorithm(narrowed(FinetuneConfig, config.finetune)).needs & OF_THE_SAME_STEPS:
        return teacher  # it is asked what it would do, as it is
    if isinstance(teacher, LeRobotPolicy):
        teacher = require_trainable(teacher.tuned_by(config.lerobot))
    if not (isinstance(teacher, DenoisingPolicy) and isinstance(policy, DenoisingPolicy)):
        return teacher
    if teacher.finetuning is None and teacher.schedule.steps == policy.schedule.steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobopolicyWarning)  # of what is saved: a teacher is not
            teacher.prepare_finetuning(policy.finetuned_steps)
    return teacher


def demonstrated(config: Config, world: World) -> Demonstrations | None:
    """Let the expert play the pool of starts, if a hint is configured to begin in its states."""
    section, spec = config.finetune, world.spec
    if section.hint is None:
        return None
    if not section.starts:
        raise ConfigError(f"finetune.hint={section.hint} needs starts that come back: set finetune.starts=N, say 64.")
    expert = build_controller(config.world, world, section.expert)
    seeds, tasks = start_pool(config.run.seed, section.starts, len(spec.instructions))
    return demonstrate(world, expert, seeds, tasks)


def add_lora(policy: Policy, rank: int) -> None:
    """Let adapters of a policy learn instead of its weights, with a rank; ConfigError for policies that have none."""
    if not rank:
        return
    if not isinstance(policy, TakesAdapters):
        raise ConfigError(f"finetune.lora_rank={rank}: {type(policy).__name__} has no adapters. Token policies have.")
    policy.add_lora(rank)


def print_advice(
    verdicts: Mapping[str, Verdict],
    section: FinetuneSection,
    horizon: int = 0,
    iterations: int | None = None,
    seen: Evidence | None = None,
    world: str = "",
) -> None:
    """Say why the tuned policy is no better than its base, as far as the run shows it, and what to try.

    horizon: control steps of an episode, 0 where none is known; iterations: how many there were, None for enough; seen:
    what the run recorded, None where nothing did; world: its name.
    """
    base, tuned = (verdicts[name].deterministic for name in ("base", "tuned"))
    if tuned.score > base.score:
        return
    failed = f"Fine-tuning did not raise {'success' if base.reports_success else 'the return'}."
    causes = "`robopolicy doctor DATA doctor.policy=CHECKPOINT` looks for other causes."
    critic = Need.CRITIC in build_algorithm(narrowed(FinetuneConfig, section)).needs
    unpaid = "" if seen is None else nothing_paid(seen, section, world)
    if not unpaid and critic and iterations is not None and iterations <= section.critic_warmup:
        output.print(
            f"{failed} The critic alone has learned so far: finetune.critic_warmup={section.critic_warmup} takes all "
            f"of {iterations} iterations. Set finetune.iterations above it, or finetune.critic_warmup=0."
        )
        return
    if seen is not None and seen.iterations:
        evident = evident_cause(seen, base, tuned, section, compare(base, tuned), world)
        if evident:
            output.print(f"{failed} {evident}", markup=False, soft_wrap=True)
            return
        more = f"finetune.num_envs={2 * section.num_envs}" if critic else f"finetune.groups={2 * section.groups}"
        largest = f" (a KL divergence of at most {max(seen.kl):.2g})" if seen.kl else ""
        output.print(
            f"{failed} Episodes were paid and steps stayed within their bounds{largest}: what was lucky may have been "
            f"learned by heart. Try {more} or finetune.epochs=2. {causes}",
            markup=False,
            soft_wrap=True,
        )
    elif critic:
        output.print(
            f"{failed} Often steps are too large: try finetune.clip=0.01 finetune.epochs=2, or, before the critic is "
            "ready, finetune.learning_rate=1e-4 finetune.critic_warmup=4 finetune.minibatch=256 or more "
            f"finetune.num_envs. {causes}"
        )
    else:
        output.print(
            f"{failed} Often steps are too large, and what was lucky is learned by heart: try a third of "
            f"finetune.learning_rate, finetune.epochs=2, or twice finetune.groups. {causes}"
        )
    # Where a time limit is no end, what would have come after it counts, and no episode shows that to the critic.
    ahead = 1 / max(1 - section.discount, 1e-9)
    if critic and horizon and ahead > horizon and section.time_limit == "cut":
        output.print(
            f"The critic looks 1 / (1 - finetune.discount) = {ahead:.0f} control steps ahead, further than an "
            f"episode lasts ({horizon}): try finetune.discount={max(0.5, 1 - 2 / horizon):.2g} or "
            "finetune.time_limit=end first."
        )


def summary(verdicts: dict[str, Verdict]) -> dict[str, Any]:
    """Return both verdicts and their paired difference."""
    difference = compare(verdicts["base"].deterministic, verdicts["tuned"].deterministic)
    return {**{name: verdict.to_json() for name, verdict in verdicts.items()}, "difference": difference.to_json()}
