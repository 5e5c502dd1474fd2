"""Failure detectors on several tasks: which failures do they notice, how early, and after which planted faults?

Every base policy is watched by all detectors at once, in the same episodes (`robopolicy detect`). Half of the episodes
fit and calibrate, the other half are scored. AUROC is computed per seed among episodes that still run; detections and
false alarms are counted over the episodes of all seeds. A clock is the yardstick: failed episodes last longest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import spread_text
from robopolicy.benchmarks.runs import demonstrations, each_task, pretrained, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.faults import FAULTS
from robopolicy.core.storage import read_json
from robopolicy.evaluation.success import counted_rate
from robopolicy.evaluation.tables import percent
from robopolicy.runs import is_complete, output
from robopolicy.verbs import detect
from robopolicy.verbs.bench import Benchmark, Table

FALSE_ALARMS = 0.05
"""Share of successful episodes that may cause an alarm."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {seed: results of `robopolicy detect`}}}, after running what is missing under `root`."""
    return {"tasks": each_task(config, lambda task, seed: measure(config, root, task, seed))}


def measure(config: Config, root: Path, task: str, seed: int) -> dict[str, Any]:
    """Return the scores of all detectors of one task's base policy."""
    base, folder = pretrained(config, root, task, "diffusion", seed), root / task / "detect" / "base" / str(seed)
    if not is_complete(folder):
        output.print(Rule(f"[bold]{task}, seed {seed}: detectors", align="left"))
        arguments = [f"detect.policy={base / 'checkpoint'}", f"detect.false_alarms={FALSE_ALARMS}", "run.name=base"]
        arguments.append(f"detect.demonstrations={demonstrations(root, task, seed)}")
        arguments.append(f"detect.faults=[{','.join(FAULTS.ours)}]")
        detect.run(compose([*settings_of(config, root, task, seed), *arguments]))
    result = read_json(folder / "result.json")
    return {name: result[name] for name in ("success", "detectors", "faults", "calibrated_on")}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return two tables per task: failures detected among ordinary episodes, and after planted faults."""
    return [each for task, seeds in figures["tasks"].items() for each in _tables(task, list(seeds.values()))]


def _tables(task: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    names = [name for name in rows[0]["detectors"] if all(name in row["detectors"] for row in rows)]
    lines = [_line(name, [row["detectors"][name] for row in rows]) for name in names]
    times = list(rows[0]["detectors"][names[0]]["auroc"])
    header = ["detector", *(f"AUROC at {time}" for time in times), "detected [Wilson 95 %]", "false alarms", "lead, s"]
    header += [f"detected at {FALSE_ALARMS:.0%} false alarms", "lead there, s"]
    success = spread_text(row["success"]["success_rate"] for row in rows)
    seeds = "one seed" if len(rows) == 1 else f"{len(rows)} seeds"
    result = [Table(f"{task}, {seeds}, success of the policies {success}", header, lines)]
    faults = [fault for fault in rows[0]["faults"] if all(fault in row["faults"] for row in rows)]
    if faults:
        lines = [_fault_line(fault, names, [row["faults"][fault] for row in rows]) for fault in faults]
        title = (
            f"{task}: failures detected after a planted fault began, and median seconds from there to the alarm by seed"
        )
        result.append(Table(title, ["fault", "success", *names], lines))
    return result


def _line(name: str, seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    areas = [
        " / ".join("" if area is None else f"{area:.2f}" for area in (each["auroc"][time]["auroc"] for each in seeds))
        for time in seeds[0]["auroc"]
    ]
    equal = [each["equal_false_alarms"] for each in seeds]
    detection, false_alarms, equal_detection = (
        percent(_sum(part))
        for part in (
            [each["detected"] for each in seeds],
            [each["false_alarms"] for each in seeds],
            [each["detected"] for each in equal],
        )
    )
    leads = _seconds(seeds, "lead_seconds"), _seconds(equal, "lead_seconds")
    return [name, *areas, detection, false_alarms, leads[0], equal_detection, leads[1]]


def _fault_line(fault: str, names: Sequence[str], seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    success = percent(_sum([each[names[0]]["success"] for each in seeds]))
    cells = []
    for name in names:
        scores = [each[name] for each in seeds]
        rate = _sum([each["detected"] for each in scores])
        cells.append(f"{rate['count']} of {rate['total']}, {_seconds(scores, 'delay_seconds')}")
    return [fault, success, *cells]


def _sum(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rate over the episodes of all seeds, with its Wilson interval."""
    return counted_rate(sum(each["count"] for each in rates), sum(each["total"] for each in rates))


def _seconds(seeds: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the median of every seed."""
    return " / ".join("-" if each[key] is None else f"{each[key]:.1f}" for each in seeds)


BENCHMARK = Benchmark(
    "Which failures do detectors notice, how early, and after which faults?",
    ("tasks", "seeds", "overrides"),
    benchmark,
    tables,
)
