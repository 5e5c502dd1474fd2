"""Fine-tunes a policy inside a world model, without a step in the real one, and watches both worlds on the way.

At every evaluation imagined and real success are measured on the same starts and logged; when they part, the run stops
and keeps what was best before (imagine.gap). Learning and the choice of a checkpoint see imagination alone; the real
episodes are for watching, and, with imagine.refresh_every, for keeping the model true where the policy goes.
Methods: denoising PPO inside the model (DiWA, arXiv:2508.03645; finetune.auxiliaries=[bc] keeps it near its base), GRPO
in it with keyframe starts and refreshes (WoVR: finetune.algorithm=grpo world.imagination.starts=keyframes), and
imagine.method=sft, imitation of synthesised successes (Ctrl-World, arXiv:2510.10125).
In a model without a decoder a policy reads the latent (train.encoder=CHECKPOINT trains one); for real, while it is
watched and ever after, it acts behind the model's encoder, which its checkpoint holds.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from robopolicy.build import (
    WORLD_MODEL,
    as_seen_in,
    behind,
    build_critic,
    build_world,
    choose_device,
    load_policy,
    save_encoder,
)
from robopolicy.configuration import Config
from robopolicy.configuration.world import ImaginationSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy, Trainable, require_trainable
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World, can_render
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.two_worlds import TwoWorlds
from robopolicy.policies import load_policy as load_alone
from robopolicy.runs import default_path, finish, finished, open_run, output
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import FinetuneResult, finetune
from robopolicy.training.imagined import ModelRefresh, synthesise_and_imitate
from robopolicy.verbs.evaluate import Verdict, evaluation_seeds, judge, print_verdicts
from robopolicy.verbs.finetune import film, guidance_of, print_advice, summary
from robopolicy.verbs.verb import Verb
from worldmodels.env import ImaginedWorld
from worldmodels.protocol import DecoderFree, LearnedModel

VERB = Verb(
    summary="Fine-tune inside a world model, with imagined and real success side by side",
    sections=("run", "world", "finetune", "imagine"),
    example="robopolicy imagine recipe=push_cube",
    target="finetune.policy",
)


@dataclass(frozen=True)
class Worlds:
    """training: imagined, cut where the settings say; imagined, real: whole episodes, paired by seed, to be judged."""

    training: ImaginedWorld
    imagined: ImaginedWorld
    real: World

    def in_reality(self, policy: Policy) -> Policy:
        """Return `policy` as it acts in the real world: behind the model's encoder, if the model has no decoder."""
        return behind(self.imagined.model, policy)

    def close(self) -> None:
        """Close all three."""
        for world in (self.training, self.imagined, self.real):
            world.close()


def run(config: Config) -> int:
    """Fine-tune in imagination, judge base and tuned in both worlds."""
    folder = open_run(config, "imagine", VERB.sections)
    if finished(folder) is not None:
        output.print(f"{folder.path} is already fine-tuned; run.overwrite=true starts over.")
        return 0
    section, chosen, device = config.finetune, config.imagine, choose_device(config.run)
    if chosen.refresh_every % section.checkpoint_every:
        raise ConfigError(
            f"imagine.refresh_every={chosen.refresh_every} must be a multiple of finetune.checkpoint_every="
            f"{section.checkpoint_every}: a model is refreshed where a run can be taken up again."
        )
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    model = default_path(config, "worldmodel", "checkpoint", chosen.model, "imagine.model")
    base, policy = load_policy(path, device), require_trainable(load_alone(path, device))
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    worlds = open_worlds(config, base, model, device)
    inside = {"base": as_seen_in(worlds.imagined, base), "tuned": policy}
    refresh = refresh_of(config, worlds, model, folder) if chosen.refresh_every else None
    started = time.perf_counter()
    tuned = learn(config, policy, worlds, folder, refresh)
    seconds = time.perf_counter() - started
    if tuned.stopped:
        output.print(f"Stopped: imagined and real success parted by more than {chosen.gap} at {tuned.iterations}.")
    if isinstance(worlds.imagined.model, DecoderFree):
        save_encoder(worlds.imagined.model, folder.checkpoint)
    outside = {"base": worlds.in_reality(base), "tuned": worlds.in_reality(policy)}
    verdicts = judge_all(config, worlds.real, outside)
    imagined = judge_all(config, worlds.imagined, {f"{name}, imagined": each for name, each in inside.items()})
    if section.videos and can_render(worlds.real):
        film(config, worlds.real, {"base": outside["base"], "tuned in imagination": outside["tuned"]}, folder)
    worlds.close()
    print_verdicts({**verdicts, **imagined})
    print_advice(verdicts)
    result = summary(verdicts) | {
        "imagined": {name: verdict.to_json() for name, verdict in imagined.items()},
        "base_checkpoint": str(path),
        "model": str(model),
        "iterations": tuned.iterations,
        "imagined_steps": tuned.env_steps,
        "env_steps": 0 if refresh is None else refresh.env_steps,
        "reached_target": tuned.reached_target,
        "parted": tuned.stopped,
        "seconds": seconds,
    }
    finish(config, folder, result)
    output.print(f"Policy: {folder.checkpoint}\nReport: {report_for_run(folder.path)}")
    return 0


def open_worlds(config: Config, base: Policy, model: Path, device: torch.device) -> Worlds:
    """Return the worlds to learn in and to judge in, as `base` sees them; `model` is a world model's checkpoint."""
    section, seed = config.finetune, config.run.seed
    inside = replace(config.world, name=WORLD_MODEL, model=model, simulator=config.world.name)
    training = build_world(inside, base, batch_size=section.num_envs, seed=seed, device=device)
    uncut = ImaginationSection(debounce=config.world.imagination.debounce)
    judged = replace(inside, imagination=uncut)
    imagined = build_world(judged, base, episodes=section.evaluate_episodes, device=device)
    episodes = max(config.imagine.watch, section.evaluate_episodes)
    assert isinstance(training, ImaginedWorld)
    assert isinstance(imagined, ImaginedWorld)
    real = build_world(config.world, behind(imagined.model, base), episodes=episodes, device=device)
    return Worlds(training, imagined, real)


def refresh_of(config: Config, worlds: Worlds, model: Path, folder: RunFolder) -> ModelRefresh:
    """Return what trains the model on, in both imagined worlds, with new real episodes of the policy."""
    chosen = config.imagine
    return ModelRefresh(
        [cast(LearnedModel, each.model) for each in (worlds.training, worlds.imagined)],
        worlds.real,
        model.parent / "dataset",
        folder,
        chosen.refresh_every,
        chosen.refresh_episodes,
        chosen.refresh_steps,
        config.run.seed,
        worlds.in_reality,
    )


def learn(
    config: Config, policy: Trainable, worlds: Worlds, folder: RunFolder, refresh: ModelRefresh | None
) -> FinetuneResult:
    """Fine-tune `policy` in the training world, watched in both others; it ends as the best that was believed."""
    section, chosen, device = config.finetune, config.imagine, choose_device(config.run)
    validation = episode_seeds(config.run.seed, "validate", section.evaluate_episodes)
    watch = TwoWorlds(
        worlds.imagined, worlds.real, validation, validation[: chosen.watch], chosen.gap, device, worlds.in_reality
    )
    if chosen.method == "sft":
        return imitate(config, policy, worlds.training, watch, folder)
    return finetune(
        policy,
        build_critic(worlds.training, section, config.run.seed).to(device),
        worlds.training,
        narrowed(FinetuneConfig, section),
        folder,
        evaluate=watch.evaluate,
        seed=config.run.seed,
        guidance=guidance_of(config, worlds.training),
        after_checkpoint=refresh,
    )


def judge_all(config: Config, world: World, policies: Mapping[str, Policy]) -> dict[str, Verdict]:
    """Return the verdict on each policy, by label, on the seeds that every verb judges on."""
    seeds, device = evaluation_seeds(config, config.finetune.evaluate_episodes), choose_device(config.run)
    return {name: judge(world, each, seeds, device, config.run.seed, name) for name, each in policies.items()}


def imitate(
    config: Config, policy: Trainable, training_world: World, watch: TwoWorlds, folder: RunFolder
) -> FinetuneResult:
    """Run the rounds of synthesis, filter and imitation."""
    chosen = config.imagine
    policy.requires_grad_(True)
    records = synthesise_and_imitate(
        policy,
        training_world,
        rounds=chosen.rounds,
        rollouts=chosen.synthetic,
        steps=chosen.imitate_steps,
        batch_size=chosen.imitate_batch_size,
        learning_rate=chosen.imitate_learning_rate,
        seed=config.run.seed,
        evaluate=watch.evaluate,
        run=folder,
    )
    last = records[-1]
    best = max(records, key=lambda record: record["deterministic_success"])
    return FinetuneResult(len(records) - 1, int(last["env_steps"]), False, best, bool(last["deterministic_stop"]))
