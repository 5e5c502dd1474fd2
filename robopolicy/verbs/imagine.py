"""Fine-tunes a policy inside a world model, using no real steps for learning, and tracks imagined and real success.

Every evaluation measures and logs imagined and real success from the same initial states. Learning uses imagination
only. The policy with the best real success is saved (imagine.select_by), and the run continues while that rises
(imagine.patience); the last lines and result.json state why it ended, and whether imagined and real success had
diverged by imagine.divergence_threshold. imagine.bc_weight keeps the policy close to its base, where a model with
little data is most accurate. imagine.refresh_every updates the model with new real episodes of the policy. Methods:
denoising PPO inside the model (DiWA, arXiv:2508.03645); GRPO in it with keyframe initial states and model updates
(WoVR: finetune.algorithm=grpo world.imagination.initial_states=keyframes); and imagine.method=sft, imitation of
synthesised successes (Ctrl-World, arXiv:2510.10125). With a decoder-free model the policy reads the latent
(train.encoder=CHECKPOINT trains one); in the real world it runs behind the model's encoder, which its checkpoint
contains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from robopolicy.building.behaviours import warnings_of
from robopolicy.building.guidance import load_guidance
from robopolicy.building.origins import origin_of_section
from robopolicy.building.planning import planned_acting
from robopolicy.building.policies import (
    adapt_policy_to_world,
    choose_device,
    load_policy,
    reads_latent,
    with_model_encoder,
)
from robopolicy.building.worlds import build_critic, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import ImaginationSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Policy, Trainable, require_trainable
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_object
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.evaluation.sim_vs_imagined import SimVsImagined
from robopolicy.evaluation.success import PolicyEvaluation, compare, compared
from robopolicy.policies import load_policy as load_alone
from robopolicy.runs import default_path, output
from robopolicy.training.acting import Acting
from robopolicy.training.configuration import FinetuneConfig, with_bc_toward_base
from robopolicy.training.finetune import FinetuneResult, finetune
from robopolicy.training.imagined import ModelRefresh, synthesise_and_imitate
from robopolicy.training.stopping import EndReason, StoppingRule, StoppingSettings
from robopolicy.verbs.advice import Evidence, evident_cause
from robopolicy.verbs.job import Job, Saved, confirming_seeds, print_evaluations, require_target, starting_checkpoint
from robopolicy.verbs.verb import Verb
from worldmodels.encoding import save_encoder
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import DecoderFree, LearnedModel
from worldmodels.readout import inner_model

WHERE = "in imagination", "in the real environment"

ADVICE = {
    EndReason.TARGET: "The success target was not above the base's success: set finetune.target_success=0.99, or null.",
    EndReason.DIVERGED: (
        "The world model is inaccurate on this policy: update it with the policy's episodes "
        "(imagine.refresh_every=10), use more data (worldmodel.include_base=true, worldmodel.transitions), or "
        "keep the policy close to its base (imagine.bc_weight=0.05)."
    ),
    EndReason.PATIENCE: (
        "Real and imagined success had not diverged, but success stopped improving: try finetune.learning_rate=1e-4 "
        "finetune.critic_warmup=4, more finetune.num_envs, or imagine.patience=8."
    ),
    EndReason.ITERATIONS: (
        "The run ended only because finetune.iterations was reached: increase it, or increase finetune.learning_rate."
    ),
}
"""Advice by stop reason, for runs whose target and best policy were measured in the real world."""
OF_IMITATION = {
    EndReason.DIVERGED: (
        "The world model is inaccurate on this policy, whose imagined successes are imitated: use more data "
        "(worldmodel.policies, worldmodel.transitions), or count success once several imagined outcomes agree "
        "(world.imagination.noises=4)."
    ),
    EndReason.PATIENCE: (
        "Real and imagined success had not diverged, but success stopped improving: try more imagined successes, "
        "imagine.rollouts_per_round=2048, or imagine.patience=8."
    ),
    EndReason.ITERATIONS: (
        "The run ended only because imagine.rounds was reached: increase it, or increase imagine.imitate_steps or "
        "imagine.rollouts_per_round."
    ),
}
"""The same where successes are imitated, imagine.method=sft."""
UNWATCHED = (
    "The policy was selected by imagined success only, which may be wrong. Select by real success: "
    "imagine.real_eval_episodes=200 "
    "imagine.select_by=real."
)

VERB = Verb(
    summary="Fine-tune inside a world model, tracking imagined and real success",
    sections=("run", "world", "workers", "plan", "finetune", "imagine"),
    example="robopolicy imagine recipe=push_cube",
    targets=("finetune.policy",),
    world_from={"finetune.policy": "train/checkpoint", "imagine.model": "worldmodel/checkpoint"},
    resumes=True,
)


@dataclass(frozen=True)
class Worlds:
    """Worlds of fine-tuning in imagination. training: imagined world, truncated as configured; imagined, real: complete
    episodes, paired by seed, for evaluation.
    """

    training: ImaginedWorld
    imagined: ImaginedWorld
    real: World

    def in_reality(self, policy: Policy) -> Policy:
        """Return the form of `policy` that acts in the real environment: with the model's encoder in front if the model
        has no decoder.
        """
        return with_model_encoder(self.imagined.model, policy)

    def close(self) -> None:
        """Close all three worlds."""
        for world in (self.training, self.imagined, self.real):
            world.close()


def run(config: Config) -> int:
    """Fine-tune in imagination and evaluate base and tuned policy in both worlds."""
    job = Job.open(config, "imagine", VERB.sections, "is already fine-tuned; run.overwrite=true starts over.")
    if job is None:
        return 0
    folder, device = job.folder, job.device
    section, imagine_section = config.finetune, config.imagine
    if imagine_section.refresh_every % section.checkpoint_every:
        raise ConfigError(
            f"imagine.refresh_every={imagine_section.refresh_every} must be a multiple of "
            f"finetune.checkpoint_every={section.checkpoint_every}: a model is refreshed only at a checkpoint."
        )
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    model = default_path(config, "worldmodel", "checkpoint", imagine_section.model, "imagine.model")
    base, policy = load_policy(path, device), require_trainable(load_alone(path, device))
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    remember_origin(policy, origin_of_section(config.world) or origin_of(base))
    worlds = open_worlds(config, base, model, device)
    require_target(section.target_success, worlds.real)
    imagined_policies = {"base": adapt_policy_to_world(worlds.imagined, base), "tuned": policy}
    refresh = refresh_of(config, worlds, model, folder) if imagine_section.refresh_every else None
    clock = folder.clock()
    finetuning = learn(config, policy, worlds, model, folder, refresh)
    seconds = clock.seconds
    encoder = inner_model(worlds.imagined.model)
    if isinstance(encoder, DecoderFree) and reads_latent(policy, encoder):
        save_encoder(encoder, folder.checkpoint)
    real_policies = {"base": worlds.in_reality(base), "tuned": worlds.in_reality(policy)}
    episodes = section.evaluate_episodes
    saved = Saved({"base": path, "tuned": folder.checkpoint}, like=path)
    verdicts = job.judge(worlds.real, real_policies, episodes, saved)
    imagined_verdicts = job.judge(
        worlds.imagined, {f"{name}, imagined": each for name, each in imagined_policies.items()}, episodes
    )
    films = {"base": real_policies["base"], "tuned in imagination": real_policies["tuned"]}
    job.film(worlds.real, films, episodes, section.videos)
    worlds.close()
    print_evaluations({**verdicts, **imagined_verdicts})
    output.print(closing_message(finetuning))
    evidence = Evidence.of(folder.metrics(), finetuning.best)
    print_advice(finetuning, verdicts, narrowed(FinetuneConfig, section), evidence, imagine_section.method == "sft")
    print_doubts(model, verdicts)
    result = compared(verdicts) | {
        "imagined": {name: verdict.to_json() for name, verdict in imagined_verdicts.items()},
        **starting_checkpoint(path),
        "model": str(model),
        **finetuning.course,
        "imagined_steps": finetuning.env_steps,
        "env_steps": 0 if refresh is None else refresh.env_steps,
        "watched_steps": real_steps(folder),
        "kept": dict(finetuning.best),
        "seconds": seconds,
    }
    job.finish(result)
    return 0


def open_worlds(config: Config, base: Policy, model: Path, device: torch.device) -> Worlds:
    """Return the worlds for learning and evaluation, with the fields that `base` reads; `model` is a world model's
    checkpoint.
    """
    section, seed = config.finetune, config.run.seed
    if section.shards > 1:
        raise ConfigError(
            f"finetune.shards={section.shards} applies to robopolicy finetune: imagined episodes are collected in this "
            "process. Set finetune.shards=1."
        )
    imagined_section = config.world.imagined_by(model)
    training = build_world(imagined_section, base, batch_size=section.num_envs, seed=seed, device=device)
    imagination = config.world.imagination
    uncut = ImaginationSection(debounce=imagination.debounce, success=imagination.success, noises=imagination.noises)
    judging_section = replace(imagined_section, imagination=uncut)
    imagined_world = build_world(judging_section, base, episodes=section.evaluate_episodes, device=device)
    episodes = max(config.imagine.real_eval_episodes, section.evaluate_episodes)
    assert isinstance(training, ImaginedWorld)
    assert isinstance(imagined_world, ImaginedWorld)
    real = build_world(config.world, with_model_encoder(imagined_world.model, base), episodes=episodes, device=device)
    return Worlds(training, imagined_world, real)


def refresh_of(config: Config, worlds: Worlds, model: Path, folder: RunFolder) -> ModelRefresh:
    """Return the hook that trains the model, in both imagined worlds, on new real episodes of the policy."""
    imagine_section = config.imagine
    in_reality = worlds.in_reality
    if imagine_section.refresh_uncertainty is not None:
        optimistic = replace(config.plan, uncertainty=imagine_section.refresh_uncertainty)
        exploring = planned_acting(optimistic, worlds.training, model, choose_device(config.run))
        if exploring is None:
            raise ConfigError(
                "imagine.refresh_uncertainty explores by planning: set plan.model to the same world model as "
                "imagine.model."
            )
        in_reality = lambda policy: exploring(worlds.in_reality(policy))  # noqa: E731
    return ModelRefresh(
        [cast(LearnedModel, inner_model(each.model)) for each in (worlds.training, worlds.imagined)],
        worlds.real,
        model.parent / "dataset",
        folder,
        imagine_section.refresh_every,
        imagine_section.refresh_episodes,
        imagine_section.refresh_steps,
        config.run.seed,
        in_reality,
    )


def learn(
    config: Config, policy: Trainable, worlds: Worlds, model: Path, folder: RunFolder, refresh: ModelRefresh | None
) -> FinetuneResult:
    """Fine-tune `policy` in the training world and evaluate it in the other two; it ends with the best weights
    according to `imagine.select_by`.

    model: checkpoint of the world model.
    """
    section, imagine_section = config.finetune, config.imagine
    device = choose_device(config.run)
    validation = episode_seeds(config.run.seed, "validate", section.evaluate_episodes)
    watch = SimVsImagined(
        worlds.imagined,
        worlds.real,
        validation,
        validation[: imagine_section.real_eval_episodes],
        imagine_section.divergence_threshold,
        device,
        worlds.in_reality,
        by_real=imagine_section.select_by == "real",
        confirming=partial(confirming_seeds, config),
    )
    if imagine_section.method == "sft":
        acting = planned_acting(config.plan, worlds.training, model, device)
        return imitate(config, policy, worlds.training, watch, folder, acting)
    tuning = with_bc_toward_base(narrowed(FinetuneConfig, section), imagine_section.bc_weight)
    return finetune(
        policy,
        build_critic(worlds.training, section, config.run.seed).to(device),
        worlds.training,
        tuning,
        folder,
        evaluate=watch.evaluate,
        confirm=watch.confirm,
        seed=config.run.seed,
        guidance=load_guidance(config, worlds.training, model, policy),
        after_checkpoint=refresh,
        stopping=StoppingSettings(imagine_section.patience),
    )


def imitate(
    config: Config,
    policy: Trainable,
    training_world: World,
    watch: SimVsImagined,
    folder: RunFolder,
    acting: Acting | None = None,
) -> FinetuneResult:
    """Run the rounds of synthesis, filtering and imitation; acting: wraps the acting policy, None for the policy
    itself.
    """
    imagine_section = config.imagine
    policy.requires_grad_(True)
    return synthesise_and_imitate(
        policy,
        training_world,
        rounds=imagine_section.rounds,
        rollouts=imagine_section.rollouts_per_round,
        steps=imagine_section.imitate_steps,
        batch_size=imagine_section.imitate_batch_size,
        learning_rate=imagine_section.imitate_learning_rate,
        seed=config.run.seed,
        evaluate=watch.evaluate,
        confirm=watch.confirm,
        course=StoppingRule(StoppingSettings(imagine_section.patience), config.finetune.target_success),
        run=folder,
        acting=acting,
    )


def real_steps(folder: RunFolder) -> int:
    """Return the number of real steps played for evaluation and model selection; none of them are used for learning."""
    names = "deterministic_real_steps", "stochastic_real_steps", "confirmed_real_steps"
    return int(sum(record.get(name, 0) for record in folder.metrics() for name in names))


def closing_message(tuned: FinetuneResult) -> str:
    """Return one line with the reason why the run ended and the policy that was saved."""
    best = tuned.best
    line = f"Stopped after {tuned.iterations} iterations: {tuned.ended.value}."
    if not best:
        return f"{line} No evaluation was made during training: the last policy is saved."
    prefix = f"{line} Saved the policy of iteration {best['iteration']:g}"
    if "deterministic_return" in best:
        figures = {name: best.get(f"deterministic_{name}return") for name in ("", "real_")}
        pairs = zip(figures.values(), WHERE, strict=True)
        return f"{prefix}: {', '.join(f'return {value:.4g} {place}' for value, place in pairs if value is not None)}."
    imagined_text = f"{best['deterministic_success']:.1%} in imagination"
    if "deterministic_real_success" not in best:
        return f"{prefix}: {imagined_text}, not evaluated in the real environment."
    real, low, high = (best[f"deterministic_real_{name}"] for name in ("success", "low", "high"))
    gap = 100 * best["deterministic_gap"]
    return f"{prefix}: real success {real:.1%} [{low:.1%}, {high:.1%}], {imagined_text} (gap {gap:+.1f} points)."


def print_advice(
    result: FinetuneResult,
    verdicts: Mapping[str, PolicyEvaluation],
    section: FinetuneConfig | None = None,
    seen: Evidence | None = None,
    imitates: bool = False,
) -> None:
    """Print why the tuned policy is no better than its base: the recorded cause if any, else advice by the stop reason.

    section: settings of the fine-tuning; seen: recorded metrics; None if unknown; imitates: whether imagined successes
    are imitated.
    """
    base, tuned_result = (verdicts[name].deterministic for name in ("base", "tuned"))
    if tuned_result.score > base.score:
        return
    metric = "success" if base.reports_success else "the return"
    advice = {**ADVICE, **(OF_IMITATION if imitates else {})}[result.ended]
    if "deterministic_score" not in result.best:
        advice = UNWATCHED
    target = None if section is None else section.target_success
    if result.ended is EndReason.TARGET and target is not None and base.score < target:
        advice = (
            "The target was reached on the validation initial states, but not on new ones: validate on more "
            "episodes, finetune.evaluate_episodes=1000, or increase finetune.target_success."
        )
    may_be_known = not imitates and result.ended is not EndReason.DIVERGED
    if may_be_known and section is not None and seen is not None and seen.iterations:
        difference = compare(base, tuned_result) if result.ended is not EndReason.TARGET else None
        advice = evident_cause(seen, base, tuned_result, section, difference, inside=" imagined") or advice
    output.print(f"On new initial states, {metric} did not increase. {advice}", markup=False, soft_wrap=True)


def print_doubts(model: Path, verdicts: Mapping[str, PolicyEvaluation]) -> None:
    """Print, if the tuned policy is no better than its base, what the evaluation of the world model at `model` said
    against it: recorded behaviours whose imagined success is another.
    """
    path = model.parent / "result.json"
    if verdicts["tuned"].deterministic.score > verdicts["base"].deterministic.score or not path.exists():
        return
    doubts = warnings_of(read_object(path).get("behaviours") or {})
    for doubt in doubts:
        output.print(doubt, markup=False, soft_wrap=True)
    if doubts:
        output.print(
            "So the world model may be the cause, and not the fine-tuning: train it longer (worldmodel.fit.steps) or "
            "on more data (worldmodel.transitions), and see what is read off its latent, if it is one of images, in "
            f"{model.parent / 'report.html'}.",
            markup=False,
            soft_wrap=True,
        )
