"""One small experiment for each paper: does its claim show in the smallest world where it can?

papers.yaml has the experiments: a claim, the settings of a method and of the baseline that it is compared with, and the
metric that the claim is about. Both runs of a seed start from the same pre-trained policy, unless the claim is about
it, and the same initial states; baselines with equal settings are run once. Every run is one file,
<task>/runs/<label>/<seed>.json, so an interrupted benchmark resumes with what is missing. A claim that is not about the
outcome of one fine-tuning run names a function instead, `measured_by`, which measures both (`paper_measurements`,
`paper_runs`); its file is measured/<name>/<seed>.json.

Rule, in `evaluation.paper_effects`: a success rate is "shown" (or "reversed") if the 95 % interval of the difference,
pooled over seeds, excludes 0 and no seed contradicts it; another metric if the worst seed of one is better than the
best of the other.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.rule import Rule

from robopolicy.benchmarks.rates import rate_of, spread_text
from robopolicy.benchmarks.runs import (
    TUNED_BASES,
    chosen_from,
    demonstrations,
    pretrained,
    recipe_of,
    recorded_for,
    run_variant,
    settings_of,
)
from robopolicy.building.guidance import load_guidance
from robopolicy.building.policies import choose_device, load_trainable
from robopolicy.building.worlds import build_collection_world, build_critic, build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import DataError
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.registry import load_dotted
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.evaluation.instructions import PARAPHRASE, with_instruction
from robopolicy.evaluation.paper_effects import experiment_text
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.registry import Need
from robopolicy.runs import default_path, output
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune as learn
from robopolicy.verbs.bench import Benchmark, Table
from robopolicy.verbs.job import evaluation_seeds

FILE = Path(__file__).with_name("papers.yaml")

EPISODES = 400
"""Evaluation episodes of a run without exploration noise, and as many with it."""

COMMON = (
    "finetune.target_success=null",
    "finetune.evaluate_every=0",
    "finetune.checkpoint_every=1000",
    "finetune.world_options.substeps=5",
)
"""Settings of every run: the policy after the last iteration counts, not the best one on the way; cheap physics."""

REFERENCE = re.compile(r"<([\w ]+)>")
"""In settings, <demonstrations> is the base's dataset and <NAME> the checkpoint of the base policy NAME."""


def mean_of(name: str) -> Callable[[Mapping[str, Any]], float]:
    """Return a function of a run: the mean of a metric over the iterations that record it (DataError: none does)."""

    def mean(run: Mapping[str, Any]) -> float:
        values = [record[name] for record in run["records"] if name in record]
        if not values:
            raise DataError(f"No iteration recorded '{name}'.")
        return sum(values) / len(values)

    return mean


@dataclass(frozen=True)
class Metric:
    """What a claim is about. text: its name in tables; better: "over" or "under" the baseline; of: run -> value; a
    success rate is a mapping with its number of episodes.
    """

    text: str
    better: str
    of: Callable[[Mapping[str, Any]], Any]


METRICS = {
    "success": Metric("success after the last iteration", "over", lambda run: run["success"]),
    "success_with_noise": Metric("success after the last iteration, with noise", "over", lambda run: run["noisy"]),
    "success_while_learning": Metric("success of all collected episodes", "over", mean_of("success")),
    "signal": Metric("fraction of episodes with an advantage", "over", mean_of("signal")),
    "env_steps": Metric("control steps in the simulator", "under", lambda run: run["records"][-1]["env_steps"]),
    "length": Metric("control steps of a success", "under", lambda run: run["length"]),
    "worst_instruction": Metric("success of the worst instruction", "over", lambda run: run["worst_instruction"]),
    "agreement": Metric("same outcome in other words", "over", lambda run: run["agreement"]),
    "effective_sample_size": Metric("effective sample size", "over", mean_of("sequence_ess")),
    "gradient_norm": Metric("norm of the gradient", "under", mean_of("gradient_norm")),
    "kl": Metric("KL divergence of an iteration", "under", mean_of("kl")),
    "moved": Metric(
        "share of weights that differ from the base's", "under", lambda run: run["records"][-1]["moved_bf16"]
    ),
}
"""Metrics by the name that papers.yaml uses."""


@dataclass(frozen=True)
class Arm:
    """One set of runs. task; base: name of the pre-trained policy (`runs.BASES`); settings: on top of the recipe."""

    task: str
    base: str
    settings: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of its folder: arms with equal settings, in any order, share it and are run once."""
        identity = json.dumps([self.task, self.base, sorted(self.settings)])
        return hashlib.sha256(identity.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Experiment:
    """A paper's claim, and the two arms that differ in its method. names: of baseline and method in tables."""

    claim: str
    metric: str
    names: tuple[str, str]
    baseline: Arm
    method: Arm


@dataclass(frozen=True)
class Measurement:
    """A paper's claim that one function measures. names: of baseline and method in tables.

    metric: what the two values are; better: "over" or "under" the baseline; world: where they are measured; function:
    import path of (config, folder of the benchmark, seed) -> {"baseline": value, "method": value}, numbers or success
    rates with their episodes.
    """

    claim: str
    metric: str
    better: str
    world: str
    names: tuple[str, str]
    function: str


def read_experiments(path: Path = FILE) -> dict[str, Experiment | Measurement]:
    """Return the experiment of each paper by id."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    experiments: dict[str, Experiment | Measurement] = {}
    for paper, row in content["experiments"].items():
        if "measured_by" in row:
            names = row["baseline"], row.get("name", paper)
            better = row.get("better", "over")
            experiments[paper] = Measurement(
                row["claim"], row["metric"], better, row["world"], names, row["measured_by"]
            )
            continue
        scene = content["scenes"][row["scene"]]
        common = (*_settings_of_scene(content, row["scene"]), *row.get("both", ()))
        bases = dict.fromkeys(("against", "method"), row.get("base", scene["base"])) | row.get("bases", {})
        baseline, method = (
            Arm(scene["task"], base, last_of_each((*common, *row.get(part, ())))) for part, base in bases.items()
        )
        names = (row.get("baseline", scene["baseline"]), row.get("name", paper))
        experiments[paper] = Experiment(row["claim"], row.get("metric", "success"), names, baseline, method)
    return experiments


def _settings_of_scene(content: Mapping[str, Any], name: str) -> tuple[str, ...]:
    scene = content["scenes"][name]
    like = content["scenes"][scene["like"]]["settings"] if "like" in scene else ()
    return *like, *scene["settings"]


def arm_in(scene: str, *settings: str) -> Arm:
    """Return an arm with the task, base policy and settings of a scene of papers.yaml, and further settings."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    chosen = content["scenes"][scene]
    return Arm(chosen["task"], chosen["base"], last_of_each((*_settings_of_scene(content, scene), *settings)))


def last_of_each(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings without those that a later one of the same name replaces."""
    return tuple({setting.partition("=")[0]: setting for setting in settings}.values())


def checkpoint_of(config: Config, root: Path, task: str, base: str, seed: int) -> Path:
    """Return the checkpoint of a base policy, pre-trained and fine-tuned if it is missing."""
    if base in TUNED_BASES:
        run_variant(config, root, task, base, TUNED_BASES[base], seed)
        return root / task / "finetune" / base / str(seed) / "checkpoint"
    return pretrained(config, root, task, base, seed) / "checkpoint"


def composed(config: Config, root: Path, arm: Arm, seed: int) -> Config:
    """Return the configuration of an arm's run, with the paths that its settings name."""
    imitated = TUNED_BASES[arm.base].base if arm.base in TUNED_BASES else arm.base
    experts = demonstrations(root, arm.task, seed, recorded_for(arm.task, imitated)[0])

    def path_of(match: re.Match[str]) -> str:
        return str(experts if match[1] == "demonstrations" else checkpoint_of(config, root, arm.task, match[1], seed))

    policy = checkpoint_of(config, root, arm.task, arm.base, seed)
    settings = [REFERENCE.sub(path_of, setting) for setting in arm.settings]
    given = f"finetune.policy={policy}", f"finetune.expert_datasets=[{experts}]"
    return compose([*settings_of(config, root, arm.task, seed), *COMMON, *given, *settings])


def run_arm(config: Config, root: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """Return the outcome of an arm's run, after fine-tuning and evaluating it if it is missing."""
    path = root / arm.task / "runs" / arm.label / f"{seed}.json"
    if not path.exists():
        run_config = composed(config, root, arm, seed)
        output.print(Rule(f"{arm.task}, {arm.base}, seed {seed}: {' '.join(arm.settings)}", align="left"))
        write_json(
            path, {"settings": list(arm.settings), **tuned(run_config, compose([*recipe_of(arm.task)]).world.name)}
        )
    return read_json(path)


def measured_path(root: Path, measurement: Measurement, seed: int) -> Path:
    """Return the file with the values of a measurement."""
    return root / "measured" / measurement.function.rpartition(":")[2] / f"{seed}.json"


def measured(config: Config, root: Path, measurement: Measurement, seed: int) -> dict[str, Any]:
    """Return {"baseline": {"value": ...}, "method": {"value": ...}}, measured if it is missing."""
    path = measured_path(root, measurement, seed)
    if not path.exists():
        output.print(Rule(f"{measurement.function}, seed {seed}", align="left"))
        values = load_dotted(measurement.function, "measured_by")(config, root, seed)
        write_json(path, {part: {"value": values[part]} for part in ("baseline", "method")})
    return read_json(path)


def tuned(config: Config, task: str, change: Callable[[Trainable], None] | None = None) -> dict[str, Any]:
    """Fine-tune a policy and return its evaluation in the simulator of a task, the metrics of all iterations, and the
    processor time. change: of the policy, before it learns.
    """
    begin = time.process_time()
    section, device = config.finetune, choose_device(config.run)
    learning = narrowed(FinetuneConfig, section)
    folder = default_path(config, "train", "checkpoint", section.policy, "finetune.policy")
    policy = load_trainable(folder, config.lerobot, device)
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    if change is not None:
        change(policy)
    world = build_collection_world(config, policy, device)
    has_critic = Need.CRITIC in learning.resolved().needs
    critic = build_critic(world, section, config.run.seed).to(device) if has_critic else None
    guidance = load_guidance(config, world, None, policy)
    with TemporaryDirectory() as records_folder:
        run = RunFolder(Path(records_folder))
        learn(policy, critic, world, learning, run, seed=config.run.seed, guidance=guidance)
        records = run.metrics()
    world.close()
    judging = build_world(replace(config.world, name=task, data=None), policy, episodes=EPISODES, device=device)
    result = evaluated(config, judging, policy)
    judging.close()
    return {**result, "cpu_seconds": time.process_time() - begin, "records": records}


def evaluated(config: Config, world: World, policy: Policy) -> dict[str, Any]:
    """Return success rates without and with exploration noise, and metrics of the episodes without noise.

    Where goals have several wordings: also the rate of episodes whose outcome is the same in other words.
    """
    seeds = evaluation_seeds(config, EPISODES)
    plain, noisy = (evaluate_policy(world, policy, seeds, deterministic=mode) for mode in (True, False))
    successes = [int(result.success.sum()) for result in (plain, noisy)]
    by_instruction = {
        text: float(plain.success[[each == text for each in plain.instructions]].mean())
        for text in sorted(set(plain.instructions))
    }
    result = {
        "success": rate_of(successes[0], EPISODES),
        "noisy": rate_of(successes[1], EPISODES),
        "length": float(plain.lengths[plain.success].mean()) if successes[0] else float(plain.lengths.max()),
        "worst_instruction": min(by_instruction.values(), default=successes[0] / EPISODES),
    }
    if len(world.spec.instructions) > len(world.spec.goals):
        other = evaluate_policy(world, with_instruction(policy, PARAPHRASE, world.spec), seeds)
        result["agreement"] = rate_of(int((other.success == plain.success).sum()), EPISODES)
    return result


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Run what is missing, all experiments of a seed before the next seed, and return the results of all."""
    experiments = read_experiments()
    names = chosen_from(config, experiments)
    for seed in config.bench.seeds:
        for name in names:
            experiment = experiments[name]
            if isinstance(experiment, Measurement):
                measured(config, root, experiment, seed)
                continue
            for arm in (experiment.baseline, experiment.method):
                run_arm(config, root, arm, seed)
    return collected(root, names, config.bench.seeds)


def collected(root: Path, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Return {"experiments": {paper: results}} of the runs that are finished."""
    experiments = read_experiments()
    rows: dict[str, Any] = {}
    for name in names:
        if each := {str(seed): found for seed in seeds if (found := _results(root, experiments[name], seed))}:
            rows[name] = {**_described(experiments[name]), "seeds": each}
    return {"experiments": rows}


def _described(experiment: Experiment | Measurement) -> dict[str, Any]:
    """Return claim, metric, task, names of the arms and their settings."""
    row: dict[str, Any] = {"claim": experiment.claim}
    if isinstance(experiment, Measurement):
        row |= {"metric": experiment.metric, "better": experiment.better, "task": experiment.world}
        return row | {"names": list(experiment.names), "measured_by": experiment.function}
    metric = METRICS[experiment.metric]
    shared = [item for item in experiment.method.settings if item in experiment.baseline.settings]
    row |= {"metric": metric.text, "better": metric.better, "task": experiment.method.task}
    row |= {
        "base": ", ".join(dict.fromkeys((experiment.baseline.base, experiment.method.base))),
        "names": list(experiment.names),
        "settings": {"both": shared},
    }
    for part, arm in (("baseline", experiment.baseline), ("method", experiment.method)):
        row["settings"][part] = [item for item in arm.settings if item not in shared]
    return row


def _results(root: Path, experiment: Experiment | Measurement, seed: int) -> dict[str, Any] | None:
    """Return the results of both arms, None if one is missing; "identical" says that both learned the same."""
    if isinstance(experiment, Measurement):
        path = measured_path(root, experiment, seed)
        return {**read_json(path), "identical": False} if path.exists() else None
    arms = {"baseline": experiment.baseline, "method": experiment.method}
    paths = {part: root / arm.task / "runs" / arm.label / f"{seed}.json" for part, arm in arms.items()}
    if not all(path.exists() for path in paths.values()):
        return None
    runs = {part: read_json(path) for part, path in paths.items()}
    results: dict[str, Any] = {
        part: {
            "value": METRICS[experiment.metric].of(run),
            "success": run["success"],
            "noisy": run["noisy"],
            "env_steps": run["records"][-1]["env_steps"],
            "cpu_seconds": round(run["cpu_seconds"], 1),
        }
        for part, run in runs.items()
    }
    baseline, method = (_course(run) for run in runs.values())
    return {**results, "identical": baseline == method}


def _course(run: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return success and size of the gradient of every iteration, which differ if anything else does."""
    return [
        tuple(record.get(key) for key in ("env_steps", "success", "gradient_norm", "kl")) for record in run["records"]
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the table of all experiments."""
    header = ["paper", "claim", "compared", "metric", "baseline", "method", "effect"]
    lines = []
    for paper, row in figures["experiments"].items():
        rates = [_spread(list(row["seeds"].values()), part) for part in ("baseline", "method")]
        compared = f"{row['names'][1]} against {row['names'][0]}, {row['task']}"
        lines.append([paper, row["claim"], compared, row["metric"], *rates, experiment_text(row)])
    title = "Experiments of papers: success, or the metric of a measurement, mean over seeds (range)"
    return [Table(title, header, lines)]


def _spread(seeds: Sequence[Mapping[str, Any]], part: str) -> str:
    """Return mean and range of the success of an arm, or of its values where they are none."""
    values = [each[part].get("success", each[part]["value"]) for each in seeds]
    if isinstance(values[0], Mapping):
        return spread_text(each["success_rate"] for each in values)
    return f"{sum(values) / len(values):.3g} ({min(values):.3g} to {max(values):.3g})"


BENCHMARK = Benchmark(
    "Does the claim of each paper show in the smallest world where it can?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
