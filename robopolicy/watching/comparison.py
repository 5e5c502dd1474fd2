"""Comparison of runs: curves in one plot, results in one table, differences paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robopolicy.configuration import read_yaml
from robopolicy.core.errors import DataError, RobopolicyError, in_one_line
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_object
from robopolicy.evaluation.intervals import compare_paired, compare_returns
from robopolicy.evaluation.plots import COLOURS, as_svg, drawing, new_figure
from robopolicy.evaluation.report import Section, evaluated_policies_in
from robopolicy.evaluation.tables import difference_text
from robopolicy.evaluation.trackers import flat, is_number
from robopolicy.runs import DESCRIPTION, RESULT
from robopolicy.watching.listing import METRICS, Run, outcome_of

AXES = ("env_steps", "iteration", "step", "round")
"""Possible x-axes of curves; the first that a record contains is used. Other counters end in _step."""
SUCCESS = "deterministic_success"
LOSSES = ("denoising", "flow", "tokens", "loss")
"""Default metrics next to SUCCESS."""
ACROSS = 2
"""Number of panels per row."""
POINTS = 1000
"""Maximum number of points per curve; longer curves are subsampled."""
LONGEST = 80
"""Maximum length of a setting's value in characters."""

Curve = tuple[str, list[float], list[float]]
"""Name of the step counter, its values, and the metric's values."""


@dataclass(frozen=True)
class Compared:
    """One run of a comparison: its label, logged records, result ({} until there is one) and settings."""

    name: str
    run: Run
    records: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    settings: Mapping[str, str]

    def curve(self, metric: str) -> Curve | None:
        """Return the curve of a metric; None if the run does not log it."""
        rows = [record for record in self.records if figure(record.get(metric)) is not None]
        if not rows:
            return None
        axis = axis_of(rows[0])
        pairs = [(figure(row.get(axis)), figure(row[metric])) for row in rows]
        points = [(place, value) for place, value in pairs if place is not None and value is not None]
        sampled_points = points[:: max(1, len(points) // POINTS)]
        return axis, [place for place, _ in sampled_points], [value for _, value in sampled_points]

    def judged(self) -> Mapping[str, Any] | None:
        """Return the last deterministic evaluation; None if there is none."""
        evaluations = [
            figures for label, figures in evaluated_policies_in(self.result) if label.endswith(", deterministic")
        ]
        return evaluations[-1] if evaluations and "per_episode" in evaluations[-1] else None


def figure(value: object) -> float | None:
    """Return a value of metrics.jsonl or result.json as a float; None if it is not a number."""
    return float(value) if is_number(value) else None


def axis_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record's step counter; "" if it has none."""
    return next((name for name in (*AXES, *record) if name in record and (name in AXES or name.endswith("_step"))), "")


def open_runs(runs: Sequence[Run]) -> list[Compared]:
    """Read the files of each run; labels contain what differs between runs. A damaged run has no records."""
    return [_opened(name, run) for name, run in zip(names(runs), runs, strict=True)]


def names(runs: Sequence[Run]) -> list[str]:
    """Return labels of verb, name and seed without the parts that all runs share; identifiers if labels are equal."""
    parts = [(run.verb, run.name, run.seed) for run in runs]
    indices = [index for index in range(3) if len({part[index] for part in parts}) > 1] or [1]
    labels = [" ".join(part[index] for index in indices) for part in parts]
    return labels if len(set(labels)) == len(labels) else [run.identifier for run in runs]


def _opened(name: str, run: Run) -> Compared:
    try:
        folder = RunFolder(run.path)
        result = read_object(run.path / RESULT, DataError) if (run.path / RESULT).exists() else {}
        records = folder.metrics() if (run.path / METRICS).exists() else []
        described = run.path / DESCRIPTION[0]
        values = flat(read_yaml(described)) if described.exists() else {}
        return Compared(name, run, records, result, {key: _shortened(value) for key, value in values.items()})
    except RobopolicyError:
        return Compared(name, run, [], {}, {})


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def metrics_of(runs: Sequence[Compared]) -> list[str]:
    """Return the names of all metrics that any of the runs logs."""
    skip = {*AXES, "learning_rate"}
    metric_names = {
        name: None
        for run in runs
        for record in run.records
        for name, value in record.items()
        if figure(value) is not None and name not in skip and not name.endswith("_step")
    }
    return sorted(metric_names)


def default_metrics(known: Sequence[str]) -> list[str]:
    """Return the default metrics: success and RL diagnostics, else losses, else the first four."""
    if success_metric := [name for name in (SUCCESS, "success") if name in known][:1]:
        return [*success_metric, *(name for name in ("kl", "reward_per_decision", "value_loss") if name in known)]
    return [name for name in LOSSES if name in known] or list(known[:4])


def curves(runs: Sequence[Compared], metrics: Sequence[str]) -> str:
    """Draw one panel per metric, one colour per run; "" if no run has logged any of them."""
    panels = {metric: [(run, run.curve(metric)) for run in runs] for metric in metrics}
    metric_curves = {metric: each for metric, each in panels.items() if any(curve for _, curve in each)}
    if not metric_curves:
        return ""
    columns = min(ACROSS, len(metric_curves))
    down = -(-len(metric_curves) // columns)
    with drawing():
        plot = new_figure(4.6 * columns + 0.6 * (columns == 1), 2.9 * down + 0.3)
        grid = plot.subplots(down, columns, squeeze=False)
        for axes, (metric, each) in zip(grid.flat, metric_curves.items(), strict=False):
            for (run, curve), colour in zip(each, COLOURS * len(each), strict=False):
                if curve is not None:
                    axis, places, values = curve
                    few = "o" if len(places) < 30 else None
                    axes.plot(places, values, color=colour, marker=few, markersize=3, linewidth=1.4, label=run.name)
                    axes.set_xlabel(axis.replace("_", " "))
            axes.set_title(metric.replace("_", " "), fontsize=10, loc="left")
            if metric.endswith("success"):
                axes.set_ylim(-0.02, 1.02)
        for axes in grid.flat[len(metric_curves) :]:
            axes.remove()
        if len(runs) > 1:
            lines = [axes.get_legend_handles_labels() for axes in grid.flat[: len(metric_curves)]]
            labels = {
                _plain(label): line for handles, texts in lines for line, label in zip(handles, texts, strict=True)
            }
            plot.legend(list(labels.values()), list(labels), frameon=False, loc="outside upper center", ncols=3)
        return as_svg(plot)


def _plain(label: str) -> str:
    """Escape a label for matplotlib: no mathtext, no leading underscore (hidden in legends)."""
    return label.replace("$", r"\$").lstrip("_") or "run"


def table(runs: Sequence[Compared]) -> Section:
    """Return the results side by side, with paired differences to the first run where the episodes match."""
    header = ("", *(run.name for run in runs))
    rows = [["state", *(run.run.state for run in runs)]]
    outcomes = [outcome_of(run.result) if run.result else run.run.outcome for run in runs]
    rows.append(["success", *(outcome.text if outcome else "-" for outcome in outcomes)])
    rows.append(["policy", *(outcome.policy if outcome else "-" for outcome in outcomes)])
    paired = [difference(runs[0], run) for run in runs[1:]]
    if runs[1:]:
        rows.append([f"difference to {runs[0].name}", "", *(text for text, _ in paired)])
        rows.append(["p (McNemar)", "", *(p for _, p in paired)])
    for label, key in (("world steps", "env_steps"), ("seconds", "seconds"), ("iterations", "iterations")):
        values = [figure(run.result.get(key)) for run in runs]
        rows.append([label, *("" if value is None else f"{value:,.0f}" for value in values)])
    caption = (
        "Success with Wilson 95 % intervals. Differences are given if both policies were evaluated on the same seeds "
        "in the same world; their intervals are paired (Newcombe)."
    )
    return Section("Results", caption if runs[1:] else "", header=header, rows=[row for row in rows if any(row[1:])])


def difference(first: Compared, other: Compared) -> tuple[str, str]:
    """Return the paired difference in success to `first` and its p-value, or the reason why there is none."""
    base, tuned_figures = first.judged(), other.judged()
    if base is None or tuned_figures is None:
        return "not evaluated yet", ""
    if base["world"] != tuned_figures["world"]:
        return "different worlds", ""
    try:
        pair = [by_seed(figures, "success") for figures in (base, tuned_figures)]
        if pair[0].keys() != pair[1].keys():
            return "different seeds: not paired", ""
        compared, outcome = compare_paired, "success"
        if not (base.get("reports_success", True) and tuned_figures.get("reports_success", True)):
            compared, outcome = compare_returns, "returns"
        pair = [by_seed(figures, outcome) for figures in (base, tuned_figures)]
        first_values, second_values = (np.array([each[seed] for seed in pair[0]]) for each in pair)
        comparison = compared(first_values, second_values, base["confidence"]).to_json()
    except (RobopolicyError, ValueError, TypeError, KeyError) as error:
        return f"damaged: {in_one_line(error, 60)}", ""
    return difference_text(comparison), f"{comparison['p_value']:.2g}" if "p_value" in comparison else ""


def by_seed(figures: Mapping[str, Any], name: str) -> dict[int, float]:
    """Return {seed: outcome of that episode}."""
    episodes = figures["per_episode"]
    return dict(zip(episodes["seeds"], episodes[name], strict=True))


def settings(runs: Sequence[Compared]) -> Section:
    """Return the settings in which the runs differ."""
    keys = sorted({key for run in runs for key in run.settings})
    rows = [[key, *(run.settings.get(key, "-") for run in runs)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Section("Settings that differ", header=("setting", *(run.name for run in runs)), rows=rows)
