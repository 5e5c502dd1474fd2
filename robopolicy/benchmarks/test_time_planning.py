"""Planning in a world model at test time, without further training: the same policy with and without it.

Policies and models share no data: a model is trained on recordings of its own seed. Of several candidates, each
imagined for some steps, the policy executes the one with the best predicted return; or actions are optimised (CEM), in
a model of states or of pictures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.benchmarks.ranking import MODELS
from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from, modelled, pretrained, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.evaluation.report import UNPLANNED
from robopolicy.verbs import evaluate
from robopolicy.verbs.bench import Benchmark, Table

FIRST_SEED = 100
"""Of the policies; world models take theirs from bench.seeds."""

CEM = "plan.kind=cem", "plan.horizon=16"
PLANS = {
    "8 candidates": (),
    "32 candidates": ("plan.candidates=32",),
    "CEM": CEM,
    "CEM from pictures": CEM,
}
"""Arm -> what it changes about planning. CEM has the policy's chunk among its samples."""

PICTURED = {"CEM from pictures": "latent_ensemble"}
"""Arms whose model sees the robot's vector and a camera, by kind of model; that of the others reads the state."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {plan: {seed: success in the simulator}}}}, after doing what is missing."""
    results: dict[str, Any] = {task: {plan: {} for plan in chosen_from(config, PLANS)} for task in config.bench.tasks}
    for task, plans in results.items():
        for plan, seeds in plans.items():
            for seed in config.bench.seeds:
                seeds[str(seed)] = measure(config, root, task, plan, seed)
    return {"tasks": results}


def measure(config: Config, root: Path, task: str, plan: str, seed: int) -> dict[str, Any]:
    """Return {"base" | "policy": {"deterministic" | "stochastic": rate}}: a policy without and with planning."""
    label = plan.replace(" ", "_")
    result = root / task / "evaluate" / label / str(seed) / "result.json"
    if not result.exists():
        policy = pretrained(config, root, task, "diffusion", FIRST_SEED + seed) / "checkpoint"
        base = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
        kind = PICTURED.get(plan, "ensemble")
        settings = *MODELS[kind].of(task), f"worldmodel.policies=[{base}]"
        model = modelled(config, root, task, kind, seed, settings) / "checkpoint"
        arguments = f"evaluate.policy={policy}", f"plan.model={model}", "evaluate.videos=0", *PLANS[plan]
        evaluate.run(compose([*settings_of(config, root, task, seed), f"run.name={label}", *arguments]))
    results = read_json(result)
    return {
        role: {mode: short(results[name][mode]) for mode in ("deterministic", "stochastic")}
        for role, name in {"base": UNPLANNED, "policy": "policy"}.items()
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one row per task and plan."""
    header = ["task, plan", "alone: mean over seeds (range)", "looking ahead", "each seed, looking ahead"]
    lines = []
    for task, plans in figures["tasks"].items():
        for plan, seeds in plans.items():
            rows = list(seeds.values())
            spreads = [
                spread_text(row[name]["deterministic"]["success_rate"] for row in rows) for name in ("base", "policy")
            ]
            lines.append(
                [f"{task}, {plan}", *spreads, ", ".join(rate_text(row["policy"]["deterministic"]) for row in rows)]
            )
    return [Table("Success in the simulator; in brackets Wilson 95 % intervals of each seed", header, lines)]


BENCHMARK = Benchmark(
    "Does planning in a world model increase a policy's success, without further training?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
)
