"""The gate under attack: acceptance of genuine and of planted bad candidates, whose true value is measured.

A policy records a log of its own episodes, and candidates are built from both (`gate_candidates`). Each is evaluated in
the simulator from the same initial states as the policy: it is good if the lower bound of its improvement is above 0,
bad if the upper bound is below 0, and undecided otherwise. Every evaluator of `robopolicy gate`, each computed from the
same log, gives its decision; combinations accept if all their evaluators do. Then ten rounds, mostly with planted
candidates, with the gate and without, measure the loss of success. No evaluator receives data from the simulator beyond
the log.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks.gate_candidates import BIASED, CANDIDATES, OFFERED, Material, flattering
from robopolicy.benchmarks.rates import rate_of, rate_text, spread_text
from robopolicy.benchmarks.runs import EXAMINED, chosen_from, each_task, logged, pretrained, settings_of
from robopolicy.building.evaluators import build_evaluators
from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.policy import Policy, Trainable, require_trainable
from robopolicy.core.randomness import numpy_generator
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import recorded_origin, write_dataset
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.evaluation.gate import Evaluator, Gate, ceiling_of, evaluator_result
from robopolicy.evaluation.intervals import compare_paired
from robopolicy.evaluation.ranking import spearman
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.runs import is_complete, output
from robopolicy.verbs import worldmodel
from robopolicy.verbs.bench import Benchmark, Table
from robopolicy.verbs.job import evaluation_seeds
from robopolicy.verbs.logged import split_data
from robopolicy.verbs.offline import learn_critic

SETTINGS = ("offline.evaluate_episodes=512", "gate.evaluators=[model,fqe,critic]")
"""Episodes of the log, and those that say what a candidate is worth; bench.overrides can say otherwise."""

JUDGES = ("model", "another model", "fqe", "critic")
MODELS = {"judge": 0, "judge_2": 1000, "other": 2000, "successes": 3000, BIASED: 4000}
"""World model -> what is added to its seed: two judge, and three are there to learn in."""

COMBINATIONS: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "another model": ("another model",),
    "both models": ("model", "another model"),
    "fqe": ("fqe",),
    "critic": ("critic",),
    "model and fqe": ("model", "fqe"),
    "model and critic": ("model", "critic"),
}
ARMS: dict[str, tuple[str, ...]] = {"gate off": (), "gate: model": COMBINATIONS["model"],
                                    "gate: both models": COMBINATIONS["both models"]}  # fmt: skip
"""How ten rounds are gated -> the judges."""

PARTS = {"candidates": "confusion", "rounds": "ten rounds"}
"""What bench.only names."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Attack:
    """A policy under attack: its evaluators by name, the simulator with the seeds of its initial states, and inputs of
    candidates.
    """

    config: Config
    material: Material
    judges: Mapping[str, Evaluator]
    world: World
    seeds: np.ndarray

    def success(self, policy: Policy, label: str) -> np.ndarray:
        """Return the success [E] bool of each real episode without exploration noise."""
        result = evaluate_policy(self.world, policy, self.seeds, device=choose_device(self.config.run), label=label)
        return result.success


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {seed: results}}}, measuring what is missing under `root`."""
    parts = chosen_from(config, PARTS)
    return {"tasks": each_task(config, lambda task, seed: measure(config, root, task, seed, parts))}


def measure(config: Config, root: Path, task: str, seed: int, parts: Sequence[str]) -> dict[str, Any]:
    """Return {"base", "candidates": {name: verdicts}, "rounds": {arm: records}} of one policy; finished parts are not
    repeated.
    """
    folder = root / task / "attack" / str(seed)
    makers: dict[Path, Callable[[Attack], Values]] = {folder / "base.json": base_values}
    if "candidates" in parts:
        makers |= {path_of(folder, name): partial(candidate_values, name) for name in CANDIDATES}
    if "rounds" in parts:
        makers |= {path_of(folder, arm): partial(ten_rounds, arm) for arm in ARMS}
    attack: Attack | None = None
    for path, find in makers.items():
        if not path.exists():
            attack = attack or prepared(config, root, task, seed)
            write_json(path, find(attack))
    if attack is not None:
        attack.world.close()
    run_config = compose([*SETTINGS, *settings_of(config, root, task, seed)])
    base = read_json(folder / "base.json")
    paths = {name: path_of(folder, name) for name in CANDIDATES if path_of(folder, name) in makers}
    return {
        "base": rate_of(sum(base["success"]), len(base["success"])),
        "candidates": {name: verdicts(run_config, base, read_json(path)) for name, path in paths.items()},
        "rounds": {arm: read_json(path_of(folder, arm)) for arm in ARMS if path_of(folder, arm) in makers},
    }


def path_of(folder: Path, name: str) -> Path:
    """Return the path of the stored results of a candidate or an arm."""
    return folder / f"{name.replace(', ', '_').replace(': ', '_').replace(' ', '_')}.json"


def prepared(config: Config, root: Path, task: str, seed: int) -> Attack:
    """Return a policy, its log, evaluators of the log and the inputs of candidates; what is missing is built first."""
    shared_settings = [*SETTINGS, *settings_of(config, root, task, seed)]
    device = choose_device(compose(shared_settings).run)
    path = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    log = logged(config, root, task, "diffusion", seed)
    model = partial(model_of, shared_settings, root / task, log, seed)
    models = ",".join(str(model(name)) for name in ("judge", "judge_2"))
    places = f"offline.dataset={log}", f"offline.policy={path}", f"gate.models=[{models}]"
    run_config = compose([*shared_settings, *places])
    policy = require_trainable(load_policy(path, device))
    training, held_out = split_data(run_config, policy, device)
    lesson = learn_critic(run_config, policy, training, RunFolder(root / task / "critic" / str(seed)), device)
    judges = build_evaluators(run_config, policy, held_out, device)
    episodes = run_config.offline.evaluate_episodes
    world = build_world(run_config.world, policy, episodes=episodes, device=device)
    material = Material(run_config, policy, lesson, model)
    return Attack(
        run_config, material, dict(zip(JUDGES, judges, strict=True)), world, evaluation_seeds(run_config, episodes)
    )


def model_of(shared: Sequence[str], root: Path, log: Path, seed: int, name: str) -> Path:
    """Return the checkpoint of a world model of the log or of data derived from it, trained if it is missing."""
    model_seed = seed + MODELS[name]
    folder = root / "worldmodel" / name / str(model_seed)
    if not is_complete(folder):
        data = log
        if name in ("successes", BIASED):
            data, episodes = root / "made" / f"{name}_{seed}", read_dataset(log)
            model_episodes = episodes.select(episodes.success) if name == "successes" else flattering(episodes)
            write_dataset(model_episodes, data, images="png", existing="replace", origin=recorded_origin(log))
        settings = f"worldmodel.data=[{data}]", "worldmodel.transitions=1", "worldmodel.include_base=false"
        worldmodel.run(compose([*EXAMINED, *shared, f"run.name={name}", f"run.seed={model_seed}", *settings]))
    return folder / "checkpoint"


def base_values(attack: Attack) -> Values:
    """Return the base policy's value, real and by every evaluator, and the upper limits of credible values."""
    ceilings = {name: ceiling_of(judge) for name, judge in attack.judges.items()}
    return {**asked(attack, attack.material.base, "the policy as it came"), "ceilings": ceilings}


def candidate_values(name: str, attack: Attack) -> Values:
    """Build a candidate, and return its real value and its value by every evaluator."""
    material, candidate = attack.material, CANDIDATES[name]
    policy = candidate.make(material, material.base, material.draws(name))
    values = asked(attack, policy, name)
    return {"family": candidate.family, "planted": candidate.planted, **values}


def asked(attack: Attack, policy: Policy, label: str) -> Values:
    """Return {"success": [E], "values": {evaluator: [S]}} of a policy."""
    success = attack.success(policy, f"truth: {label}")
    output.print(f"{label}: true success {success.mean():.1%}")
    values = {name: judge.values(policy).tolist() for name, judge in attack.judges.items()}
    return {"success": success.astype(int).tolist(), "values": values}


def verdicts(config: Config, base: Values, found: Values) -> dict[str, Any]:
    """Return a candidate's true improvement with its interval, and the decision of every evaluator."""
    comparison, section = compare_paired(np.array(base["success"]), np.array(found["success"])), config.gate
    judgements: dict[str, Any] = {}
    for name, values in found["values"].items():
        pair = np.array(values), np.array(base["values"][name])
        rules = section.margin, section.relative_margin, section.confidence, base["ceilings"][name]
        verdict = evaluator_result(name, *pair, *rules)
        judgements[name] = {"difference": verdict.difference, "low": verdict.low, "better": verdict.better}
    return {
        "family": found["family"],
        "planted": found["planted"],
        "true": {
            "success": comparison.tuned,
            "difference": comparison.difference,
            "low": comparison.low,
            "high": comparison.high,
        },
        "judges": judgements,
    }


def ten_rounds(arm: str, attack: Attack) -> Values:
    """Return {"base", "records"} of rounds in which each candidate is built from the incumbent."""
    config, material = attack.config, attack.material
    judges, section = [attack.judges[name] for name in ARMS[arm]], config.gate
    rules = {"margin": section.margin, "relative": section.relative_margin, "confidence": section.confidence}
    gate = Gate(judges, **rules) if judges else None
    order = numpy_generator(config.run.seed, "offered").permutation(len(OFFERED))
    incumbent: Trainable = material.base
    base = success = attack.success(incumbent, arm)
    records: list[dict[str, Any]] = []
    for number, place in enumerate(order, start=1):
        name = OFFERED[place]
        candidate = CANDIDATES[name].make(material, incumbent, material.draws(f"round {number}: {name}"))
        verdict = None if gate is None else gate.decide(candidate, incumbent)
        is_accepted = verdict is None or verdict.accepted
        if is_accepted:
            incumbent, success = candidate, attack.success(candidate, f"{arm}, round {number}")
        comparison = compare_paired(base, success)
        records.append(
            {
                "candidate": name,
                "planted": CANDIDATES[name].planted,
                "accepted": is_accepted,
                "gate": "" if verdict is None else verdict.line(f"round {number}"),
                "success": comparison.tuned,
                "difference": comparison.difference,
                "low": comparison.low,
                "high": comparison.high,
            }
        )
        output.print(f"{arm}, round {number}, {name}: accepted {is_accepted}, true success {comparison.tuned:.1%}")
    return {"base": rate_of(int(base.sum()), len(base)), "records": records}


def kind_of(true: Mapping[str, float]) -> str:
    """Return whether a candidate is good, bad or undecided, by the interval of its true improvement."""
    return "good" if true["low"] > 0 else "bad" if true["high"] < 0 else "undecided"


def confusion(rows: Sequence[Mapping[str, Any]], judges: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, for each kind of candidate (`kind_of`), the number that all of `judges` accept and the total."""
    counts = {"bad": [0, 0], "good": [0, 0], "undecided": [0, 0]}
    for row in rows:
        count = counts[kind_of(row["true"])]
        count[0] += all(row["judges"][name]["better"] for name in judges)
        count[1] += 1
    return {kind: (accepted_count, total) for kind, (accepted_count, total) in counts.items()}


def ranked(seeds: Iterable[Mapping[str, Any]], judge: str) -> list[float]:
    """Return, for each policy, Spearman's correlation of an evaluator's estimated improvements with the true ones."""
    rows = [list(seed["candidates"].values()) for seed in seeds if seed["candidates"]]
    return [
        float(
            spearman(
                np.array([row["true"]["difference"] for row in each]),
                np.array([row["judges"][judge]["difference"] for row in each]),
            )
        )
        for each in rows
    ]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return three tables per task: acceptance by evaluators, candidates by families, and ten rounds."""
    result_tables: list[Table] = []
    for task, seeds in figures["tasks"].items():
        rows = [row for seed in seeds.values() for row in seed["candidates"].values()]
        if rows:
            result_tables += [_judges_table(task, rows, list(seeds.values())), _families_table(task, rows)]
        rounds = [seed["rounds"] for seed in seeds.values() if seed["rounds"]]
        if rounds:
            result_tables.append(_rounds_table(task, rounds))
    return result_tables


def _judges_table(task: str, rows: Sequence[Mapping[str, Any]], seeds: Sequence[Mapping[str, Any]]) -> Table:
    header = ["judged by", "of the truly worse, accepted", "of the truly better", "of the undecided", "Spearman"]
    lines = [
        [
            name,
            *(_share(*confusion(rows, judges)[kind]) for kind in ("bad", "good", "undecided")),
            ", ".join(f"{rank:.2f}" for rank in ranked(seeds, name)) if judges == (name,) else "",
        ]
        for name, judges in COMBINATIONS.items()
    ]
    title = (
        f"{task}: {len(rows)} candidates of {len(seeds)} policies, in square brackets Wilson 95 % intervals; "
        "Spearman's correlation of judged with true improvements, policy by policy"
    )
    return Table(title, header, lines)


def _families_table(task: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ["candidates", "true improvement: mean (range)", "worse", "better", "undecided"]
    header += ["of the worse, accepted by the model", "by both models", "of the better, by the model", "by both models"]
    lines: list[list[str]] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        family_rows = [row for row in rows if row["family"] == family]
        gains = 100 * np.array([row["true"]["difference"] for row in family_rows])
        by_one, by_both = (confusion(family_rows, COMBINATIONS[name]) for name in ("model", "both models"))
        spread = f"{gains.mean():+.1f} ({gains.min():+.1f} to {gains.max():+.1f})"
        counts = [str(by_one[kind][1]) for kind in ("bad", "good", "undecided")]
        accepted_counts = [str(each[kind][0]) for kind in ("bad", "good") for each in (by_one, by_both)]
        lines.append([family, spread, *counts, *accepted_counts])
    return Table(f"{task}: what was offered, in points of success", header, lines)


def _rounds_table(task: str, rounds: Sequence[Mapping[str, Any]]) -> Table:
    header = ["ten rounds", "at first", "in the end: mean over seeds (range)", "each seed, in the end"]
    header += ["lowest on the way", "accepted", "planted ones accepted", "seeds surely worse than at first, ever"]
    lines: list[list[str]] = []
    for arm in ARMS:
        runs = [each[arm] for each in rounds if arm in each]
        records = [run["records"] for run in runs]
        ends = [each[-1]["success"] for each in records]
        lines.append(
            [
                arm,
                spread_text(run["base"]["success_rate"] for run in runs),
                spread_text(ends),
                ", ".join(rate_text(_rate(run, end)) for run, end in zip(runs, ends, strict=True)),
                ", ".join(f"{100 * min(record['success'] for record in each):.1f} %" for each in records),
                ", ".join(str(sum(record["accepted"] for record in each)) for each in records),
                ", ".join(str(sum(record["accepted"] and record["planted"] for record in each)) for each in records),
                f"{sum(any(record['high'] < 0 for record in each) for each in records)} of {len(records)}",
            ]
        )
    return Table(
        f"{task}: ten candidates in random order, six of them planted, each made of the incumbent", header, lines
    )


def _rate(run: Mapping[str, Any], success: float) -> dict[str, float]:
    episodes = int(run["base"]["episodes"])
    return rate_of(round(success * episodes), episodes)


def _share(accepted: int, count: int) -> str:
    return f"{accepted} of {count}: {rate_text(rate_of(accepted, count))}" if count else "none"


BENCHMARK = Benchmark(
    "Does the gate reject bad candidates and accept good ones, and what happens to a policy without it?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
)
