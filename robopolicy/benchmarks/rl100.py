"""RL-100's pipeline by stage and seed, and for comparison improvement by critics of the same log without a world model.

`pipeline recipe=rl100` runs unchanged (`recipe=rl100_pixels` for policies with images). Then `offline` gets the same
log and the same imitation policy, with IQL's critic only: the best of several sampled chunks are imitated, or selected
while acting; fitted Q evaluation on held-out episodes of the log evaluates both. Every stage has a run folder and is
not repeated once it is done. Source of the pipeline: RL-100, arXiv:2510.14830.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import rate_text, spread_text
from robopolicy.benchmarks.runs import FORMER_PPO, each_task, pipeline_overrides
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.evaluation.tables import stage_summary
from robopolicy.runs import is_complete, output
from robopolicy.verbs import offline, pipeline
from robopolicy.verbs.bench import Benchmark, Table

ALONE = {
    "critics alone, imitated": ("gate.evaluators=[fqe]",),
    "critics alone, choosing": ("gate.evaluators=[fqe]", "offline.improve=idql", "offline.agent.expectile=0.7"),
}
"""Rows of policies that critics improved without a world model -> settings of `offline`."""
PIPELINES = {"push_cube_pixels": "rl100_pixels"}
"""Tasks whose policies see, and the recipe of their pipeline; of the others it is rl100."""
JUDGED = "imitation", *ALONE, "offline", "online", "one_step"
"""Stages that leave a policy."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {seed: {stage: summary}}}}, after running what is missing under `root`."""
    return {"tasks": each_task(config, lambda task, seed: measure(config, root, task, str(seed)))}


def measure(config: Config, root: Path, task: str, seed: str) -> dict[str, Any]:
    """Return the summary of every stage on one task and seed; see `stage_summary`."""
    folder = root / "pipeline" / task / seed
    given = *FORMER_PPO.get(task, ()), *config.bench.overrides
    shared_settings = [f"run.root={root}", f"run.seed={seed}", f"run.threads={config.run.threads}"]
    if not is_complete(folder):
        arguments = [f"pipeline.recipe={task}", pipeline_overrides(given)]
        pipeline.run(compose([f"recipe={PIPELINES.get(task, 'rl100')}", *shared_settings, *arguments]))
    result_of_pipeline = read_json(folder / "result.json")
    single_stages: dict[str, Any] = {}
    for row, settings in ALONE.items():
        name = f"{task}_{row.rpartition(' ')[-1]}"
        if not is_complete(root / "offline" / name / seed):
            output.print(Rule(f"[bold]{task}, seed {seed}: {row}", align="left"))
            offline_arguments = [
                f"offline.dataset={result_of_pipeline['folders']['log']}/dataset",
                f"offline.policy={result_of_pipeline['folders']['imitation']}/checkpoint",
                f"run.name={name}",
            ]
            offline.run(compose([f"recipe={task}", *shared_settings, *given, *settings, *offline_arguments]))
        result = read_json(root / "offline" / name / seed / "result.json")
        single_stages[row] = stage_summary("offline", result, result["seconds"])
    return {**result_of_pipeline["stages"], **single_stages}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return a table of stages for every task, and one of every policy with its Wilson interval."""
    result_tables: list[Table] = []
    each_policy: list[list[str]] = []
    for task, seeds in figures["tasks"].items():
        lines: list[list[str]] = []
        for stage in next(iter(seeds.values())):
            summaries = [each[stage] for each in seeds.values()]
            metrics = [each["policy"] for each in summaries if "policy" in each]
            rates = ["", ""]
            if metrics:
                rates = [
                    spread_text(each[mode]["success_rate"] for each in metrics)
                    for mode in ("deterministic", "stochastic")
                ]
            accepted_texts = [f"{each['accepted']}" for each in summaries if "accepted" in each]
            faster = [f"{each['times_faster']:.1f} times as fast" for each in summaries if "times_faster" in each]
            steps = [each["world_steps"] for each in summaries if each["world_steps"] is not None]
            lines.append(
                [
                    stage,
                    *rates,
                    f"{sum(steps) / len(steps):,.0f}" if steps else "",
                    f"{sum(each['seconds'] for each in summaries) / len(summaries) / 60:.1f}",
                    ", ".join(faster)
                    if faster
                    else f"{' / '.join(accepted_texts)} of 3 accepted"
                    if accepted_texts
                    else "",
                ]
            )
        header = ["stage", "success", "with exploration noise", "world steps", "minutes", "by seed"]
        episodes = next(iter(seeds.values()))["imitation"]["policy"]["deterministic"]["episodes"]
        seeds_text = "one seed" if len(seeds) == 1 else f"mean over {len(seeds)} seeds (lowest to highest)"
        title = f"{task}: {seeds_text}, {episodes} paired episodes"
        result_tables.append(Table(title, header, lines))
        for seed, stages in seeds.items():
            metrics_of_stage = {stage: stages[stage]["policy"]["deterministic"] for stage in JUDGED if stage in stages}
            rates = [rate_text(metrics_of_stage[stage]) if stage in metrics_of_stage else "" for stage in JUDGED]
            each_policy.append([f"`{task}`, seed {seed}", *rates])
    title = "How well each policy was measured: success [Wilson 95 %]"
    return [*result_tables, Table(title, ["run", *JUDGED], each_policy)]


BENCHMARK = Benchmark(
    "How much do gated rounds on a log, a second log and one-step distillation improve a policy trained by imitation?",
    ("tasks", "seeds", "overrides"),
    benchmark,
    tables,
    bulky=frozenset({"per_episode"}),
)
