"""`bench edge_of_reach`: what short imagined rollouts do to values in a perfect model, and what cures it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.benchmarks.edge_of_reach import ARMS, build_problem, measure
from robopolicy.configuration import Config
from robopolicy.core.storage import read_json, write_json
from robopolicy.evaluation.curves import value_curves
from robopolicy.evaluation.report import Report, Section
from robopolicy.runs import print_table
from robopolicy.training.imagined_values import ImaginedValuesConfig
from robopolicy.verbs.bench_runs import chosen_from, conclude

PROBLEMS = {
    "point": tuple(ARMS),
    "push_cube": tuple(arm for arm in ARMS if arm != "patched"),
}
"""Where, and which arms there; true values are known for the point alone."""

LENGTH = ImaginedValuesConfig(epochs=16, rollouts=1000, updates=250)


def benchmark(config: Config) -> dict[str, Any]:
    """Run what is missing, print a table a problem, write report.html and benchmark.json, return the figures."""
    root = config.run.root / "bench" / "edge_of_reach"
    names = chosen_from(config, ARMS)
    report = Report(title="The edge of reach", subtitle=f"{len(config.bench.seeds)} seeds, perfect dynamics")
    figures: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for problem, arms in PROBLEMS.items():
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms if arm in names}
        for seed in config.bench.seeds:
            for arm, found in runs.items():
                path = root / problem / arm / f"{seed}.json"
                if not path.exists():
                    write_json(path, measure(build_problem(problem, seed), arm, seed, LENGTH))
                found.append(read_json(path))
        header, lines = table_of(runs)
        svg = value_curves({arm: [run["records"] for run in found] for arm, found in runs.items()})
        caption = "Mean value where rollouts begin, one line a seed, on a logarithmic scale."
        report.sections.append(Section(problem, caption, svg=svg))
        report.sections.append(Section(f"{problem}: after learning", header=header, rows=lines))
        print_table(problem, header, lines)
        figures[problem] = runs
    conclude(config, root, report, figures)
    return figures


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a problem."""
    header = ["arm", "value, each seed", "times beyond what rewards allow", "real return, each seed", "edge of reach"]
    lines = []
    for arm, found in runs.items():
        values = "  ".join(f"{run['value']:,.3g}" for run in found)
        returns = "  ".join(f"{run['return']:.2f}" for run in found)
        worst = max(run["beyond_bound"] for run in found)
        edge = float(np.mean([run["edge_share"] for run in found]))
        lines.append([arm, values, f"{worst:,.3g}", returns, f"{edge:.0%}"])
    return header, lines
