"""Memory and time of inference and fine-tuning for full-size SmolVLA and pi0, compared with the planned values.

Weights are random, which does not change the cost; classes, sizes and processors are LeRobot's. A row of fine-tuning
runs `robopolicy finetune` in a world with a camera: collection, log-probabilities, updates, evaluation. Memory is the
maximum that torch allocated on CUDA, next to the value that `finetune.dry_run=true` reports beforehand.
"""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.rule import Rule

from robopolicy.benchmarks.runs import chosen_from
from robopolicy.benchmarks.tiny_vla import Sizes, pi_processors, tokenizer_of, write_smolvlm
from robopolicy.building.policies import choose_device, load_trainable
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.examples import example_observation
from robopolicy.core.machine import in_bytes
from robopolicy.core.policy import Trainable
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.core.storage import read_json, write_json
from robopolicy.inference.comparison import time_decisions
from robopolicy.nn.precision import training_precision
from robopolicy.nn.pretrained import quiet_logger
from robopolicy.policies.lerobot.families import MASK
from robopolicy.runs import output
from robopolicy.verbs import finetune
from robopolicy.verbs.bench import Benchmark, Table

KINDS = {"smolvla": "SmolVLA", "pi0": "pi0, weights in bfloat16"}
CAMERA = "front"
SCENE = "world.name=push_cube", f"world.cameras=[{CAMERA}]", "world.image_size=256"
ROWS = 1, 8, 32
"""Decisions at once."""
OWN = Sizes(image=512, patch=16, seen=(768, 12), read=(960, 32), head=64, shared=3, acts=720, chunk=50, steps=10)
"""Of SmolVLA, as lerobot/smolvla_base has them; its language model's second half is not used."""
TEXT = {"intermediate_size": 2560, "vocab_size": 49280, "max_position_embeddings": 8192}
WRITTEN = "written"  # beside a policy that is whole
PI_SIDE = 224
"""What pi0 sees, px of a side."""
SHARED = {"n_action_steps": 10, "max_state_dim": 32, "max_action_dim": 32, "tokenizer_max_length": 48}
ONCE = (
    "finetune.num_envs=32",
    "finetune.rollout_length=8",
    "finetune.minibatch=32",
    "finetune.epochs=1",
    "finetune.iterations=2",
    "finetune.critic_warmup=0",
    "finetune.evaluate_every=0",
    "finetune.evaluate_episodes=2",
    "finetune.checkpoint_every=1000",
    "finetune.videos=0",
)
MANY = "finetune.num_envs=128", "finetune.minibatch=256", "finetune.micro_batch=16"
EIGHT = "finetune.precision=bf16", "finetune.optimiser=adamw8bit"
WAYS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "fp32": (("smolvla",), "its expert, fp32", ()),
    "checkpointing": (("smolvla",), "with checkpointing", ("lerobot.gradient_checkpointing=true",)),
    "micro": (("smolvla",), "in micro-batches of 4", ("finetune.micro_batch=4",)),
    "bf16": (("smolvla",), "computed in bf16", ("finetune.precision=bf16",)),
    "lora": (("smolvla",), "LoRA of rank 8, two scored steps", ("finetune.lora_rank=8", "finetune.scored_steps=2")),
    "many": (("smolvla",), "minibatch 256 of 1,024, micro-batches of 16, bf16, 8-bit Adam", (*MANY, *EIGHT)),
    "expert": (("pi0",), "its expert, bf16, micro-batches of 4", ("finetune.precision=bf16", "finetune.micro_batch=4")),
}
"""Row -> which policies it is of, what it is called, and its settings beside ONCE."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"device": .., "decisions": {kind: ..}, "finetuning": {kind: {method: ..}}}, measuring what is missing."""
    for kind in chosen_from(config, KINDS):
        _measure(config, root, kind)
    return {
        "device": _called(choose_device(config.run)),
        **{
            part: {kind: read_json(path) for kind in KINDS if (path := root / "rows" / f"{kind}_{part}.json").exists()}
            for part in ("decisions", "finetuning")
        },
    }


def _measure(config: Config, root: Path, kind: str) -> None:
    output.print(Rule(f"[bold]{KINDS[kind]}", align="left"))
    device, rows = choose_device(config.run), root / "rows"
    folder = root / "policies" / kind
    scene_settings = *SCENE, f"run.root={root}", f"run.device={config.run.device}", f"run.threads={config.run.threads}"
    if not (folder / WRITTEN).exists():
        write_policy(kind, folder, device)
        (folder / WRITTEN).touch()
    decisions, finetuning_path = rows / f"{kind}_decisions.json", rows / f"{kind}_finetuning.json"
    if not decisions.exists():
        write_json(
            decisions, _decisions(compose([*scene_settings, *config.bench.overrides]), folder, config.bench.rounds)
        )
    results = read_json(finetuning_path) if finetuning_path.exists() else {}
    for way, (kinds, _, settings) in WAYS.items():
        if kind in kinds and way not in results:
            run_settings = f"finetune.policy={folder}", f"run.name={kind}_{way}", "run.overwrite=true"
            results[way] = _finetuning(
                compose([*scene_settings, *ONCE, *settings, *run_settings, *config.bench.overrides]), device
            )
            write_json(finetuning_path, results)


def _decisions(config: Config, folder: Path, rounds: int) -> dict[str, Any]:
    """Return {"parameters": .., "tokens": of the prefix, precision: {rows: seconds, median and minimum}}."""
    device = choose_device(config.run)
    policy = load_trainable(folder, config.lerobot, device)
    policy.prepare_finetuning()
    results: dict[str, Any] = {
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "tuned": sum(weight.numel() for weight in policy.trainable_parameters()),
        "tokens": _tokens(policy, device),
        "chunk": policy.spec.prediction,
        "steps": policy.spec.scored_steps,
    }
    for precision in ("fp32", "bf16"):
        results[precision] = {}
        for rows in ROWS:
            observation = example_observation(policy.spec, rows, torch.Generator().manual_seed(0), device)
            with _clean(device) as peak, training_precision(precision):
                timing = time_decisions({"": policy}, observation, rounds)[""]
            results[precision][str(rows)] = {**timing.to_json(), "bytes": peak()}
    return results


def _tokens(policy: Trainable, device: torch.device) -> int:
    """Return the number of tokens that a policy call reads."""
    encode: Any = policy
    observation = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device)
    with torch.no_grad():
        return int(encode.encode(observation)[MASK].shape[1])


def _finetuning(config: Config, device: torch.device) -> dict[str, Any]:
    """Fine-tune and discard the weights; return time and memory of an iteration, and the planned values."""
    budget = finetune.planned(config)
    with _clean(device) as peak:
        finetune.run(config)
    folder = config.run.root / "finetune" / str(config.run.name) / str(config.run.seed)
    lines = [line for line in RunFolder(folder).metrics() if "seconds_update" in line][1:]  # the first warms up
    shutil.rmtree(folder)
    return {
        "decisions": budget.decisions,
        "minibatch": budget.minibatch,
        "planned": budget.ahead + budget.held,
        "loading": budget.loading,
        "tuned": budget.tuned,
        "bytes": peak(),
        **{name: sum(line[name] for line in lines) / len(lines) for name in ("seconds_collect", "seconds_update")},
        "kl": lines[-1]["kl"],
    }


@contextmanager
def _clean(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Free the memory of earlier rows; yields a function that returns the maximum of allocated bytes, None without
    CUDA.
    """
    gc.collect()
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def write_policy(kind: str, folder: Path, device: torch.device | str = "cpu") -> Path:
    """Write the files of `write_configuration` and random weights, drawn on `device`; return the folder."""
    from lerobot.policies.factory import get_policy_class

    with quiet_logger():
        config = write_configuration(kind, folder)
        with torch.device(device):
            policy: Any = get_policy_class(kind)(config)
        policy.to("cpu").save_pretrained(folder)
    return folder


def write_configuration(kind: str, folder: Path) -> Any:
    """Write all files of a policy for SCENE except its weights, and return LeRobot's configuration of it.

    kind: smolvla or pi0, at LeRobot's own sizes.
    """
    from lerobot.configs.types import FeatureType, PolicyFeature

    world = build_world(compose([*SCENE]).world)
    shapes = {STATE: world.spec.observation[STATE].shape, "action": world.spec.action.shape}
    instructions = world.spec.instructions
    world.close()
    camera = PolicyFeature(FeatureType.VISUAL, (3, 256, 256))
    inputs = {STATE: PolicyFeature(FeatureType.STATE, shapes[STATE]), IMAGE_PREFIX + CAMERA: camera}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, shapes["action"])}
    statistics = {key: {"mean": torch.zeros(shape), "std": torch.ones(shape)} for key, shape in shapes.items()}
    words = tokenizer_of(word for instruction in instructions for word in instruction.split())
    shared_config = {
        **SHARED,
        "chunk_size": OWN.chunk,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "push_to_hub": False,
    }
    make = _smolvla if kind == "smolvla" else _pi0
    config, processors = make(folder, words, shared_config, statistics)
    for part in (config, *processors):
        part.save_pretrained(folder)
    return config


def _smolvla(folder: Path, words: Any, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    path = write_smolvlm(folder / "smolvlm", words, OWN)
    _widened(path)
    config = SmolVLAConfig(
        **shared,
        vlm_model_name=str(path),
        num_vlm_layers=OWN.read[1] // 2,
        expert_width_multiplier=OWN.acts / OWN.read[0],
        resize_imgs_with_padding=(OWN.image, OWN.image),
        num_steps=OWN.steps,
    )
    return config, make_pre_post_processors(config, dataset_stats=known)


def _widened(path: Path) -> None:
    """Set the widths that `Sizes` does not contain in the SmolVLM config of a folder to full size."""
    config = read_json(path / "config.json")
    config["text_config"] |= TEXT
    config["vision_config"] |= {"intermediate_size": 4 * OWN.seen[0]}
    write_json(path / "config.json", config | {"scale_factor": 4})


def _pi0(folder: Path, words: Any, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    from lerobot.policies.pi0.configuration_pi0 import PI0Config

    words.save_pretrained(folder / "tokenizer")
    side = PI_SIDE, PI_SIDE
    config = PI0Config(**shared, dtype="bfloat16", image_resolution=side, num_inference_steps=OWN.steps)
    return config, pi_processors(config, known, folder / "tokenizer")


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return policy calls per second, and fine-tuning with measured and planned memory."""
    result_tables = []
    for kind, metrics in figures["decisions"].items():
        lines = []
        for precision in ("fp32", "bf16"):
            for rows, row in metrics[precision].items():
                each = int(rows) / (row["median_ms"] / 1e3)
                # A decision reads its tokens once, and those of its chunk at every step.
                tokens = each * (metrics["tokens"] + metrics["steps"] * metrics["chunk"])
                numbers = f"{row['median_ms']:.1f}", f"{each:,.1f}", f"{each * metrics['chunk']:,.0f}", f"{tokens:,.0f}"
                label = f"{rows} at once" + ", bf16" * (precision == "bf16")
                lines.append([label, *numbers, _told(row["bytes"])])
        weights = f"{metrics['parameters'] / 1e6:,.0f} million weights"
        size = f"{weights}, {metrics['tokens']} tokens read, {metrics['steps']} steps"
        header = ["decisions", "ms", "decisions / s", "actions / s", "tokens / s", "memory beside weights"]
        result_tables.append(Table(f"{KINDS[kind]} on {figures['device']}: {size}", header, lines))
    lines = []
    for kind, ways in figures["finetuning"].items():
        for way, row in ways.items():
            count = row["decisions"]
            speed = [f"{count / row[name]:,.1f}" for name in ("seconds_collect", "seconds_update")]
            memory_cells = _told(row["planned"]), _told(row["bytes"])
            lines.append(
                [f"{KINDS[kind]}: {WAYS[way][1]}", f"{count:,}", *speed, f"{row['tuned'] / 1e6:,.1f}", *memory_cells]
            )
    header = ["fine-tuning", "decisions", "collected / s", "learned / s", "weights that learn / 1e6", "planned", "held"]
    result_tables.append(Table(f"An iteration of PPO on {figures['device']}", header, lines))
    return result_tables


def _told(count: int | None) -> str:
    return "" if count is None else in_bytes(count)


BENCHMARK = Benchmark(
    "How fast are SmolVLA and pi0 at full size, how much memory do they need, and does the estimate match?",
    ("only", "rounds", "overrides"),
    benchmark,
    tables,
)
