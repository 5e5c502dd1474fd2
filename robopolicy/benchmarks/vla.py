"""PPO and DAgger on LeRobot's own policies after imitation, and a check that LeRobot loads the results.

A SmolVLA and a pi0 with random weights (`tiny_vla`) are first pre-trained to encode images, because their language
models are not pre-trained. Their action experts are then trained with LeRobot's own loss on demonstrations with camera
images, with a frozen vision-language model; and from there by PPO on the simulator's reward, or by DAgger with labels
of the scripted expert. They read the robot's joints, images and the instruction; only the critic and the scripted
expert read object positions. They are evaluated from the same initial states before and after. LeRobot's own classes
load the resulting checkpoint, and their actions from the same noise are compared with robopolicy's.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from rich.rule import Rule
from torch import Tensor

from robopolicy.benchmarks.rates import mean_text, rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from
from robopolicy.benchmarks.tiny_vla import Sizes, pi_of, taught_to_see, write_tiny
from robopolicy.building.policies import load_trainable
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.policy import TensorObservation, to_tensors
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import IMAGE_PREFIX, TASK
from robopolicy.core.storage import read_json, write_json
from robopolicy.nn.pretrained import quiet_logger
from robopolicy.runs import is_complete, output
from robopolicy.verbs import collect, evaluate, finetune, teach, train
from robopolicy.verbs.bench import Benchmark, Table

Composed = Callable[..., Config]
"""Settings -> what a stage of a row runs with: scene, root, seed and overrides are known."""
TAUGHT = "_taught"
ARMS = {
    "smolvla": "SmolVLA, PPO in its flow",
    "smolvla_taught": "SmolVLA, taught by the script",
    "pi0": "pi0, PPO in its flow",
    "pi0_taught": "pi0, taught by the script",
}
"""What bench.only names: a kind of policy, and how it learns on."""
SIZES = Sizes(read=(96, 4), acts=96)
CAMERA = "top"
COMPARED = 64
"""Observations on which scores and decisions are compared."""

SEEING = 400
"""Steps of learning to see."""

SCENE = "world.name=push_choice", f"world.cameras=[{CAMERA}]", f"world.image_size={SIZES.image}"
DEMONSTRATIONS = "collect.episodes=1200", "collect.noise=[0.3]", "collect.label_policy=expert", "collect.label_steps=1"
STUDENT = "policy.kind=lerobot", "policy.trainable=expert"
IMITATION = (
    *STUDENT,
    "train.cache_encoder_outputs=true",
    "train.fit.steps=8000",
    "train.batch_size=64",
    "train.evaluate_episodes=0",
)
TEACHING = (
    "teach.teacher=expert",
    "teach.cache_encoder_outputs=true",
    "teach.batch_size=64",
    "teach.episodes=200",
    "teach.fit.steps=1000",
    "teach.last_round_steps=16000",
    "teach.videos=0",
)
TUNING = (
    "lerobot.flow_noise_level=0.2",
    "lerobot.min_std=0.2",
    "finetune.time_limit=terminate",
    "finetune.learning_rate=3e-4",
    "finetune.clip=0.05",
    "finetune.epochs=3",
    "finetune.minibatch=640",
    "finetune.rollout_length=10",
    "finetune.critic_warmup=2",
    "finetune.iterations=80",
    "finetune.evaluate_every=10",
    "finetune.evaluate_episodes=200",
    "finetune.videos=0",
)


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"kinds": {arm: {seed: row}}}, after measuring the selected ones."""
    for arm in chosen_from(config, ARMS):
        for seed in config.bench.seeds:
            path = root / "rows" / arm / f"{seed}.json"
            if not path.exists():
                with pi_of(SIZES) if kind_of(arm) == "pi0" else nullcontext():
                    write_json(path, measure(config, root, arm, seed))
    rows = {arm: {path.stem: read_json(path) for path in sorted((root / "rows" / arm).glob("*.json"))} for arm in ARMS}
    return {"kinds": {arm: rows_of_arm for arm, rows_of_arm in rows.items() if rows_of_arm}}


def kind_of(arm: str) -> str:
    """Return the type of the LeRobot policy."""
    return arm.removesuffix(TAUGHT)


def measure(config: Config, root: Path, arm: str, seed: int) -> dict[str, Any]:
    """Run the missing stages of one arm, and return its row of results."""
    output.print(Rule(f"[bold]{ARMS[arm]}, seed {seed}", align="left"))
    run = f"run.root={root}", f"run.seed={seed}", f"run.threads={config.run.threads}"

    def composed(*settings: str) -> Config:
        return compose([*SCENE, *run, *settings, *config.bench.overrides])

    base = imitated(root, kind_of(arm), seed, composed)
    folder, results = (taught if arm.endswith(TAUGHT) else tuned)(root, kind_of(arm), base, seed, composed)
    setup = read_json(folder / "versions.json")
    return {
        **results,
        **compared(composed(), folder / "checkpoint"),
        **{key: setup[key] for key in ("threads", "commit", "packages", "python", "platform", "processor_count")},
    }


def imitated(root: Path, kind: str, seed: int, composed: Composed) -> Path:
    """Return the checkpoint of an imitation policy; missing recording and training are run."""
    data_run, base = root / "collect" / "data" / str(seed), root / "train" / kind / str(seed)
    if not is_complete(data_run):
        collect.run(composed("run.name=data", *DEMONSTRATIONS))
    if not is_complete(base):
        dataset, untrained = data_run / "dataset", root / "untrained" / kind / str(seed)
        path = untrained / "taught"
        if not path.exists():
            path = taught_to_see(
                write_tiny(kind, untrained, dataset, IMAGE_PREFIX + CAMERA, SIZES, seed), dataset, path, SEEING, seed
            )
        arguments = f"run.name={kind}", f"policy.path={path}", f"train.data={dataset}"
        train.run(composed(*IMITATION, *arguments))
    return base / "checkpoint"


def tuned(root: Path, kind: str, base: Path, seed: int, composed: Composed) -> tuple[Path, dict[str, Any]]:
    """Fine-tune `base` by PPO; return the run's folder and its results."""
    folder = root / "finetune" / kind / str(seed)
    if not is_complete(folder):
        finetune.run(composed(*TUNING, f"run.name={kind}", f"finetune.policy={base}"))
    result = read_json(folder / "result.json")
    return folder, {
        **{name: short(result[name]["deterministic"]) for name in ("base", "tuned")},
        **{f"{name}_with_noise": short(result[name]["stochastic"]) for name in ("base", "tuned")},
        **{name: result[name] for name in ("difference", "iterations", "env_steps", "seconds")},
    }


def taught(root: Path, kind: str, base: Path, seed: int, composed: Composed) -> tuple[Path, dict[str, Any]]:
    """Distil the scripted expert into `base`; return the run's folder and its results."""
    folder, evaluation_folder = (root / verb / kind / str(seed) for verb in ("teach", "evaluate"))
    if not is_complete(folder):
        teach.run(composed(*STUDENT, *TEACHING, f"run.name={kind}", f"policy.path={base}"))
    if not is_complete(evaluation_folder):
        episodes = composed(*TEACHING).teach.evaluate_episodes
        arguments = f"evaluate.policy={base}", f"evaluate.episodes={episodes}", "evaluate.videos=0"
        evaluate.run(composed(f"run.name={kind}", *arguments))
    result, before = read_json(folder / "result.json"), read_json(evaluation_folder / "result.json")["policy"]
    return folder, {
        "base": short(before["deterministic"]),
        "base_with_noise": short(before["stochastic"]),
        "tuned": short(result["student"]["deterministic"]),
        "tuned_with_noise": short(result["student"]["stochastic"]),
        "rounds": len(result["rounds"]),
        **{name: result[name] for name in ("env_steps", "seconds")},
    }


@torch.no_grad()
def compared(config: Config, checkpoint: Path) -> dict[str, float]:
    """Return the largest differences between LeRobot's classes and robopolicy's.

    score_difference: of the recomputed log-probability of one step of the flow; action_difference: of actions in the
    world's units.
    """
    policy = load_trainable(checkpoint, config.lerobot)
    world = build_world(config.world, policy, batch_size=COMPARED)
    observation = to_tensors(world.reset(seeds=episode_seeds(config.run.seed, "compared", COMPARED)))
    world.close()
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    second_scores = policy.log_prob(observation, decision.latents)
    decision_deterministic = policy.act(observation, torch.Generator().manual_seed(0), deterministic=True)
    lerobot_actions = lerobots_chunk(checkpoint, observation, decision_deterministic.latents["chain"][:, 0])
    return {
        "score_difference": float((second_scores.logp - decision.logp).abs().max()),
        "action_difference": float((lerobot_actions - decision_deterministic.actions).abs().max()),
    }


def lerobots_chunk(checkpoint: Path, observation: TensorObservation, noise: Tensor) -> Tensor:
    """Return the actions [N, C, A] of LeRobot's own classes from `noise`, in the world's units."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    with quiet_logger():
        config: Any = PreTrainedConfig.from_pretrained(checkpoint)
        policy: Any = get_policy_class(config.type).from_pretrained(checkpoint)
        preprocess, postprocess = make_pre_post_processors(config, str(checkpoint))
    frame: dict[str, Any] = {TASK: observation[TASK]}
    for key in config.input_features:
        value = cast(Tensor, observation[key])[:, -1]
        frame[key] = value.permute(0, 3, 1, 2).float() / 255 if value.ndim == 4 else value
    actions = policy.predict_action_chunk(preprocess(frame), noise=noise)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return success before and after, with and without exploration noise, and differences from LeRobot's classes."""
    success, difference_rows = [], []
    for arm, seed_rows in figures["kinds"].items():
        rows = list(seed_rows.values())
        rates = [spread_text(row[name]["success_rate"] for row in rows) for name in ("base", "tuned")]
        each = ", ".join(f"{rate_text(row['base'])} to {rate_text(row['tuned'])}" for row in rows)
        noisy = [spread_text(row[f"{name}_with_noise"]["success_rate"] for row in rows) for name in ("base", "tuned")]
        numbers = (
            mean_text((row["env_steps"] / 1e3 for row in rows), 0),
            mean_text((row["seconds"] / 60 for row in rows), 0),
        )
        success.append([ARMS[arm], *rates, each, *noisy, *numbers])
        worst = [max(row[name] for row in rows) for name in ("score_difference", "action_difference")]
        difference_rows.append([ARMS[arm], *(f"{value:.1e}" for value in worst)])
    header = ["policy", "base", "then", "each seed", "base, noise", "then, noise", "steps / 1e3", "minutes"]
    return [
        Table("push_choice seen by a camera: mean over seeds (range), each seed [Wilson 95 %]", header, success),
        Table(
            "Largest difference over all seeds",
            ["policy", "scores computed again", "LeRobot's own actions from the checkpoint"],
            difference_rows,
        ),
    ]


BENCHMARK = Benchmark(
    "Do PPO and a teacher improve a tiny SmolVLA and pi0 trained by imitation? Does LeRobot load the result?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
