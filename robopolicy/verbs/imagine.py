"""Fine-tunes a policy inside a world model, without a step in the real one, and watches both worlds on the way.

At every evaluation imagined and real success are measured on the same starts and logged; when they part, the run stops
and keeps what was best before (imagine.gap). Learning and the choice of a checkpoint see imagination alone; the real
episodes are for watching, and, with imagine.refresh_every, for keeping the model true where the policy goes.
Methods: denoising PPO inside the model (DiWA, arXiv:2508.03645; finetune.auxiliaries=[bc] keeps it near its base), GRPO
in it with keyframe starts and refreshes (WoVR: finetune.algorithm=grpo world.imagination.starts=keyframes), and
imagine.method=sft, imitation of synthesised successes (Ctrl-World, arXiv:2510.10125).
"""

import time
from dataclasses import replace
from typing import Any

from robopolicy.build import WORLD_MODEL, build_critic, build_world, choose_device, open_policy
from robopolicy.configuration import Config
from robopolicy.configuration.world import ImaginationSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Trainable, require_trainable
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.core.world import Renders
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.two_worlds import TwoWorlds
from robopolicy.runs import default_path, finish, finished, open_run, output
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import FinetuneResult, finetune
from robopolicy.training.imagined import ModelRefresh, synthesise_and_imitate
from robopolicy.verbs.evaluate import evaluation_seeds, judge, print_verdicts
from robopolicy.verbs.finetune import film, guidance_of, print_advice, summary
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Fine-tune inside a world model, with imagined and real success side by side",
    sections=("run", "world", "finetune", "imagine"),
    example="robopolicy imagine recipe=push_cube",
    target="finetune.policy",
)


def run(config: Config) -> int:
    """Fine-tune in imagination, judge base and tuned in both worlds."""
    folder = open_run(config, "imagine", VERB.sections)
    if finished(folder) is not None:
        output.print(f"{folder.path} is already fine-tuned; run.fresh=true starts over.")
        return 0
    section, chosen, device = config.finetune, config.imagine, choose_device(config.run)
    if chosen.refresh_every % section.checkpoint_every:
        raise ConfigError(
            f"imagine.refresh_every={chosen.refresh_every} must be a multiple of finetune.checkpoint_every="
            f"{section.checkpoint_every}: a model is refreshed where a run can be taken up again."
        )
    path = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    model = default_path(config, "worldmodel", "checkpoint", chosen.model, "imagine.model")
    base, policy = open_policy(path, device), require_trainable(open_policy(path, device))
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    inside = replace(config.world, name=WORLD_MODEL, model=model, simulator=config.world.name)
    training_world: Any = build_world(inside, base, batch_size=section.num_envs, seed=config.run.seed, device=device)
    episodes = max(chosen.watch, section.evaluate_episodes)
    uncut = ImaginationSection(debounce=config.world.imagination.debounce)  # judged are whole episodes, paired by seed
    judged = replace(inside, imagination=uncut)
    imagined_world: Any = build_world(judged, base, episodes=section.evaluate_episodes, device=device)
    real = build_world(config.world, base, episodes=episodes, device=device)
    validation = episode_seeds(config.run.seed, "validate", section.evaluate_episodes)
    watch = TwoWorlds(imagined_world, real, validation, validation[: chosen.watch], chosen.gap, device)
    refresh = None
    if chosen.refresh_every:
        refresh = ModelRefresh(
            [training_world.model, imagined_world.model],
            real,
            model.parent / "dataset",
            folder,
            chosen.refresh_every,
            chosen.refresh_episodes,
            chosen.refresh_steps,
            config.run.seed,
        )
    started = time.perf_counter()
    if chosen.method == "sft":
        tuned = imitate(config, policy, training_world, watch, folder)
    else:
        critic = build_critic(training_world, section, config.run.seed).to(device)
        tuned = finetune(
            policy,
            critic,
            training_world,
            narrowed(FinetuneConfig, section),
            folder,
            evaluate=watch.evaluate,
            seed=config.run.seed,
            guidance=guidance_of(config, training_world),
            after_checkpoint=refresh,
        )
    seconds = time.perf_counter() - started
    if tuned.stopped:
        output.print(f"Stopped: imagined and real success parted by more than {chosen.gap} at {tuned.iterations}.")
    seeds = evaluation_seeds(config, section.evaluate_episodes)
    candidates = {"base": base, "tuned": policy}
    verdicts = {name: judge(real, each, seeds, device, config.run.seed, name) for name, each in candidates.items()}
    imagined = {
        f"{name}, imagined": judge(imagined_world, each, seeds, device, config.run.seed, f"{name}, imagined")
        for name, each in candidates.items()
    }
    if section.videos and isinstance(real, Renders):
        film(config, real, {"base": base, "tuned in imagination": policy}, folder)
    for each in (training_world, imagined_world, real):
        each.close()
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


def imitate(
    config: Config, policy: Trainable, training_world: Any, watch: TwoWorlds, folder: RunFolder
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
