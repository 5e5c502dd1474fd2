"""From states to cameras: distillation from a teacher with state access, compared with imitation and PPO on images.

All policies read the scene at 64 px and their own joints only. Arms: imitation of demonstrations with the expert's
noise-free actions as labels, then PPO on images; the same with an auxiliary loss by which the encoder predicts the
simulator's state; and DAgger on the student's own states, with the scripted expert as the teacher, or a policy
fine-tuned on the simulator's state.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import mean_text, rate_text, short, spread_text
from robopolicy.benchmarks.runs import Variant, chosen_from, each_row, run_variant, seen_by, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json, write_json
from robopolicy.runs import is_complete, output
from robopolicy.verbs import collect, finetune, teach, train
from robopolicy.verbs.bench import Benchmark, Table

CAMERAS = {"push_cube": ("top",), "push_t": ("top",), "pick_place": ("front", "wrist")}
"""By task; the top one elsewhere."""
SMALL = "policy.image.channels=[16,32,32]", "train.batch_size=128", "teach.batch_size=128", "world.image_size=64"
UNFILMED = "finetune.videos=0", "teach.videos=0"
TUNED = Variant("diffusion", UNFILMED)
"""The teacher that reads the state."""
DEMONSTRATIONS = "collect.episodes=400", "collect.label_policy=expert", "run.name=seen"
TELLING = (
    "train.auxiliary_keys=[observation.environment_state]",
    "train.auxiliary_weight=10",
    "policy.image.layer_norm=true",
)
"""What makes an encoder learn to tell the state, too."""

ARMS = {
    "imitation": "imitation of 400 demonstrations with clean labels",
    "ppo": "PPO on the images, from there",
    "telling": "imitation of the same, its encoder telling the state",
    "telling_ppo": "PPO on the images, from there",
    "expert": "student of the scripted expert",
    "tuned": "student of the fine-tuned policy",
}
"""What bench.only names."""
BEFORE = {"ppo": "imitation", "telling_ppo": "telling"}
"""What an arm begins with."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {arm: {seed: results}}}}, running what is missing under `root`."""
    return {"tasks": each_row(config, root, chosen_from(config, ARMS), measure)}


def measure(config: Config, root: Path, task: str, arm: str, seed: int) -> dict[str, Any]:
    """Return an arm's success, with the minutes of all its stages, stored in root/task/rows.

    An interrupted arm counts the minutes since it was resumed.
    """
    path = root / task / "rows" / arm / f"{seed}.json"
    if path.exists():
        return read_json(path)
    before = measure(config, root, task, BEFORE[arm], seed)["minutes"] if arm in BEFORE else 0.0
    output.print(Rule(f"[bold]{task}, seed {seed}: {ARMS[arm]}", align="left"))
    start = time.perf_counter()
    results = LEARN[arm](config, root, task, seed)
    results["minutes"] = before + (time.perf_counter() - start) / 60
    write_json(path, results)
    return results


def seeing(config: Config, root: Path, task: str, seed: int) -> list[str]:
    """Return the settings of policies with cameras."""
    camera_settings = seen_by(*CAMERAS.get(task, ("top",)))
    return [*SMALL, *UNFILMED, *camera_settings, *settings_of(config, root, task, seed)]


def imitation(
    config: Config, root: Path, task: str, seed: int, name: str = "seen", more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Imitate demonstrations with camera images; name: of the run, more: its settings."""
    shared_settings, place = seeing(config, root, task, seed), root / task / "train" / name / str(seed)
    data_folder = root / task / "collect" / "seen" / str(seed)
    if not is_complete(place):
        collect.run(compose([*DEMONSTRATIONS, *shared_settings]))
        train.run(compose([f"run.name={name}", f"train.data={data_folder / 'dataset'}", *more, *shared_settings]))
    return _figures(read_json(place / "result.json"), "policy", read_json(data_folder / "result.json")["steps"])


def ppo(config: Config, root: Path, task: str, seed: int, name: str = "seen") -> dict[str, Any]:
    """Fine-tune the imitation policy of the run of this name on images, with a frozen encoder."""
    place = root / task / "finetune" / name / str(seed)
    if not is_complete(place):
        policy = root / task / "train" / name / str(seed) / "checkpoint"
        arguments = "finetune.train_encoder=false", f"run.name={name}", f"finetune.policy={policy}"
        finetune.run(compose([*arguments, *seeing(config, root, task, seed)]))
    result = read_json(place / "result.json")
    return _figures(result, "tuned", result["env_steps"])


def taught_by_the_expert(config: Config, root: Path, task: str, seed: int) -> dict[str, Any]:
    """Distil the scripted expert."""
    return _taught(config, root, task, seed, "expert", "expert")


def taught_by_the_tuned(config: Config, root: Path, task: str, seed: int) -> dict[str, Any]:
    """Fine-tune a teacher that reads the state, and distil it."""
    result = run_variant(config, root, task, "teacher", TUNED, seed).result
    teacher = root / task / "finetune" / "teacher" / str(seed) / "checkpoint"
    results = _taught(config, root, task, seed, "tuned", str(teacher))
    return {
        **results,
        "env_steps": results["env_steps"] + result["env_steps"],
        "teacher": short(result["tuned"]["deterministic"]),
    }


def _taught(config: Config, root: Path, task: str, seed: int, name: str, teacher: str) -> dict[str, Any]:
    place = root / task / "teach" / name / str(seed)
    if not is_complete(place):
        teach.run(compose([f"run.name={name}", f"teach.teacher={teacher}", *seeing(config, root, task, seed)]))
    result = read_json(place / "result.json")
    return _figures(result, "student", result["env_steps"])


def _figures(result: Mapping[str, Any], who: str, steps: int) -> dict[str, Any]:
    rates = {mode: short(result[who][mode]) for mode in ("deterministic", "stochastic")}
    return {**rates, "env_steps": steps}


LEARN: dict[str, Callable[[Config, Path, str, int], dict[str, Any]]] = {
    "imitation": imitation,
    "ppo": ppo,
    "telling": partial(imitation, name="telling", more=TELLING),
    "telling_ppo": partial(ppo, name="telling"),
    "expert": taught_by_the_expert,
    "tuned": taught_by_the_tuned,
}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task, with one row per arm."""
    header = ["policy that sees", "success", "each seed [Wilson 95 %]", "with noise", "thousand steps", "minutes"]
    result_tables: list[Table] = []
    for task, arms in figures["tasks"].items():
        lines: list[list[str]] = []
        for arm, seeds in arms.items():
            rows = list(seeds.values())
            teachers = [row["teacher"]["success_rate"] for row in rows if "teacher" in row]
            note = f", which succeeds in {spread_text(teachers)}" if teachers else ""
            lines.append(
                [
                    ARMS[arm] + note,
                    spread_text(row["deterministic"]["success_rate"] for row in rows),
                    ", ".join(rate_text(row["deterministic"]) for row in rows),
                    spread_text(row["stochastic"]["success_rate"] for row in rows),
                    mean_text((row["env_steps"] / 1e3 for row in rows), 0),
                    mean_text((row["minutes"] for row in rows), 0),
                ]
            )
        cameras = " and ".join(CAMERAS.get(task, ("top",)))
        result_tables.append(Table(f"{task}, seen at 64 px by {cameras}: mean over seeds (range)", header, lines))
    return result_tables


BENCHMARK = Benchmark(
    "How well does a camera policy learn from a teacher with more information, compared with imitation and PPO "
    "on images?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
)
