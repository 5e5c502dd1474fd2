"""Plots for reports and small panels for benchmarks: one style, colour-blind-safe colours, as SVG."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.evaluation.intervals import wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BASE = "#7a8799"
TUNED = "#0072b2"
THIRD = "#d55e00"
MUTED = "#9aa5b1"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8dee6",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#9aa5b1",
    "text.color": "#5b6673",
    "axes.labelcolor": "#5b6673",
    "xtick.color": "#5b6673",
    "ytick.color": "#5b6673",
    "svg.fonttype": "none",
    "svg.hashsalt": "robopolicy",  # the same plot is the same text in every process
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Rate:
    """A success rate with its interval."""

    label: str
    value: float
    low: float
    high: float


def drawing() -> AbstractContextManager[None]:
    """Return the context in which plots use the report style; matplotlib is imported only here, since that takes a
    second.
    """
    from matplotlib import rc_context

    return rc_context(STYLE)


def learning_curve(records: Sequence[Mapping], base: Rate | None = None) -> str:
    """Plot success against environment steps: validation in both modes, the collected episodes (faint), the base."""
    with drawing():
        figure, axes = new_axes()
        points = [(record["env_steps"], record["success"]) for record in records if "success" in record]
        if points:
            axes.plot(*zip(*points, strict=True), color=MUTED, linewidth=0.8, alpha=0.7, label="during collection")
        for mode, colour in (("deterministic", TUNED), ("stochastic", THIRD)):
            rows = [record for record in records if f"{mode}_success" in record]
            if not rows:
                continue
            steps = [row["env_steps"] for row in rows]
            axes.plot(
                steps, [row[f"{mode}_success"] for row in rows], color=colour, marker="o", markersize=3, label=mode
            )
            if all(f"{mode}_low" in row for row in rows):
                low, high = ([row[f"{mode}_{end}"] for row in rows] for end in ("low", "high"))
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        if base is not None:
            axes.axhline(base.value, color=BASE, linestyle="--", linewidth=1, label="base, deterministic")
            axes.axhspan(base.low, base.high, color=BASE, alpha=0.12, linewidth=0)
        axes.set(xlabel="environment steps", ylabel="success", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return as_svg(figure)


def imagined_and_real(records: Sequence[Mapping]) -> str:
    """Plot success of the deterministic policy in imagination and in the real world against imagined steps."""
    with drawing():
        figure, axes = new_axes()
        rows = [record for record in records if "deterministic_real_success" in record]
        steps = [row["env_steps"] for row in rows]
        for name, label, colour in (("deterministic_", "imagined", THIRD), ("deterministic_real_", "real", TUNED)):
            axes.plot(
                steps, [row[f"{name}success"] for row in rows], color=colour, marker="o", markersize=3, label=label
            )
            low, high = ([row[f"{name}{end}"] for row in rows] for end in ("low", "high"))
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        diverging_rows = [row for row in rows if row.get("deterministic_parted")]
        if diverging_rows:
            axes.axvline(diverging_rows[0]["env_steps"], color=MUTED, linestyle="--", linewidth=1)
            axes.annotate("parted", (diverging_rows[0]["env_steps"], 0.03), color=MUTED, ha="right")
        axes.set(xlabel="imagined steps", ylabel="success", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower right")
        return as_svg(figure)


def teaching_curve(records: Sequence[Mapping]) -> str:
    """Plot a DAgger student's success, with Wilson intervals, against the steps played before.

    records: of rounds in which the student played, with `steps`, `played_steps`, `student_episodes`,
    `student_successes`.
    """
    with drawing():
        figure, axes = new_axes()
        steps = [row["steps"] - row["played_steps"] for row in records]
        counts = [(row["student_successes"], row["student_episodes"]) for row in records]
        low, high = zip(*(wilson(*count) for count in counts), strict=True)
        axes.plot(steps, [done / count for done, count in counts], color=TUNED, marker="o", markersize=3)
        axes.fill_between(steps, low, high, color=TUNED, alpha=0.15, linewidth=0)
        axes.set(xlabel="environment steps trained on", ylabel="success of the student", ylim=(0, 1))
        return as_svg(figure)


def loss_curves(records: Sequence[Mapping], x: str = "step") -> str:
    """Plot every logged loss against the training step, on a logarithmic axis if all values are positive."""
    with drawing():
        figure, axes = new_axes()
        skip = {x, "learning_rate"}
        names = list(dict.fromkeys(key for record in records for key in record if key not in skip))
        positive = True
        for name, colour in zip(names, (TUNED, THIRD, "#009e73", "#cc79a7", BASE) * 3, strict=False):
            rows = [(record[x], record[name]) for record in records if name in record]
            positive &= all(value > 0 for _, value in rows)
            axes.plot(*zip(*rows, strict=True), color=colour, label=name)
        if positive:
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel="loss")
        axes.legend(frameon=False)
        return as_svg(figure)


def deployments(found: Mapping[str, Mapping[str, Any]], floor: float) -> str:
    """Plot running success of deployments by name against episodes, the minimum, and faintly the probability of the new
    policy.

    found: "running" and "shares" [E] of each deployment.
    """
    with drawing():
        figure, axes = new_axes()
        for (name, each), colour in zip(found.items(), (TUNED, THIRD), strict=False):
            episodes = range(20, len(each["running"]) + 1)  # the first few say nothing
            axes.plot(episodes, each["running"][19:], color=colour, label=f"{name}: success so far")
            if name == "mixed":
                axes.plot(
                    episodes, each["shares"][19:], color=MUTED, linewidth=1, label=("probability of the new policy")
                )
        axes.axhline(floor, color=BASE, linestyle="--", linewidth=1, label="floor")
        axes.set(xlabel="episodes", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return as_svg(figure)


def success_bars(rates: Sequence[Rate]) -> str:
    """Plot success rates as points with their intervals, one row each."""
    with drawing():
        figure, axes = new_axes(height=0.5 * len(rates) + 0.9)
        for row, rate in enumerate(reversed(rates)):
            colour = BASE if any(name in rate.label for name in ("base", "trained", "teacher", "reference")) else TUNED
            axes.plot([rate.low, rate.high], [row, row], color=colour, linewidth=6, alpha=0.3, solid_capstyle="round")
            axes.plot(rate.value, row, "o", color=colour, markersize=8)
            axes.annotate(
                f"{rate.value:.0%}", (rate.value, row), textcoords="offset points", xytext=(0, 9), ha="center"
            )
        axes.set_yticks(range(len(rates)), [rate.label for rate in reversed(rates)])
        axes.set(xlabel="success", xlim=(-0.05, 1.05), ylim=(-0.6, len(rates) - 0.3))
        axes.grid(axis="y", visible=False)
        return as_svg(figure)


def swept_settings(
    values: Mapping[str, Sequence[float]], intervals: Mapping[str, tuple[float, float]], metric: str
) -> str:
    """Plot a sweep: per setting one point per seed, their mean, and the pooled interval where there is one."""
    with drawing():
        figure, axes = new_axes(height=max(1.8, 0.42 * len(values) + 1.0))
        for place, (name, seed_values) in enumerate(reversed(list(values.items()))):
            if name in intervals:
                axes.plot(intervals[name], [place, place], color=TUNED, linewidth=5, alpha=0.2, solid_capstyle="butt")
            axes.plot(seed_values, [place] * len(seed_values), "o", color=BASE, markersize=4, alpha=0.8)
            if seed_values:
                axes.plot([float(np.mean(seed_values))], [place], "D", color=TUNED, markersize=6)
        axes.set_yticks(range(len(values)), list(values)[::-1])
        axes.set(xlabel=metric, ylim=(-0.6, len(values) - 0.4))
        return as_svg(figure)


def inference_methods(ways: Mapping[str, Mapping[str, Any]], chosen: str) -> str:
    """Plot the minimum milliseconds per policy call of every inference method, one row each, on a logarithmic axis; see
    `ways.way_rows`.
    """
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    with drawing():
        figure, axes = new_axes(height=0.32 * len(ways) + 0.9)
        for row, (name, metrics) in enumerate(reversed(list(ways.items()))):
            fill = TUNED if name == chosen else "none"
            axes.plot(metrics["least_ms"], row, "o", color=TUNED, markerfacecolor=fill, markersize=7)
            note = f"{metrics['times_as_fast']:.1f}x, error {metrics['error']:.2g}"
            axes.annotate(note, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.set_yticks(range(len(ways)), list(reversed(list(ways))))
        axes.set(xlabel="milliseconds", xscale="log", ylim=(-0.6, len(ways) - 0.4))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", visible=False)
        return as_svg(figure)


def ranking_scatter(real: Mapping[str, Rate], model: Mapping[str, Rate]) -> str:
    """Plot simulator against world model, one numbered point per policy with both intervals, and the line of equal
    success.

    A legend on the right lists the numbers, ordered by real success.
    """
    with drawing():
        figure, axes = new_axes(width=7.2, height=4.6)
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1)
        names = sorted(real, key=lambda name: (real[name].value, model[name].value))
        for name in names:
            x, y = real[name], model[name]
            axes.errorbar(
                x.value,
                y.value,
                xerr=[[max(0, x.value - x.low)], [max(0, x.high - x.value)]],
                yerr=[[max(0, y.value - y.low)], [max(0, y.high - y.value)]],
                fmt="o",
                color=TUNED,
                ecolor=MUTED,
                elinewidth=1,
            )
        _place_labels(axes, {str(index + 1): (real[name].value, model[name].value) for index, name in enumerate(names)})
        for index, name in enumerate(names):
            height = 1 - 0.055 * (index + 0.5)
            for label_x, text, side in ((1.06, str(index + 1), "right"), (1.08, name, "left")):
                axes.text(label_x, height, text, transform=axes.transAxes, ha=side, va="center", fontsize=9)
        axes.set(
            xlabel="success in the simulator",
            ylabel="success in the world model",
            xlim=(-0.03, 1.03),
            ylim=(-0.03, 1.03),
        )
        return as_svg(figure)


def open_loop_errors(figures: Mapping[str, Mapping[str, Mapping[str, float]]], key: str) -> str:
    """Plot a model's open-loop error on recorded actions against the horizon, with shuffled actions and copying for
    comparison.

    figures: horizon -> observation key -> {"model", "shuffled", "copy"}; PSNR and similar metrics for images, else
    errors.
    """
    from robopolicy.evaluation.image_quality import unit_of  # imports torch, which the pages of runs do without

    with drawing():
        figure, axes = new_axes()
        rows = [
            (int(horizon), errors_of_key[key]) for horizon, errors_of_key in figures.items() if key in errors_of_key
        ]
        steps, image = [horizon for horizon, _ in rows], key.startswith(IMAGE_PREFIX)
        for name, label, colour in (
            ("model", "world model", TUNED),
            ("shuffled", "world model with shuffled actions", THIRD),
            ("copy", "first frame repeated", BASE),
        ):
            axes.plot(steps, [errors[name] for _, errors in rows], marker="o", color=colour, label=label)
        axes.set_xticks(steps)
        axes.set(xlabel="imagined steps", ylabel=unit_of(key) if image else "error in standard deviations")
        if not image:
            axes.set_ylim(0, None)
        axes.legend(frameon=False)
        return as_svg(figure)


def _place_labels(axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Write short labels below and right of points, moved aside where they would overlap."""
    places: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        place = x + 0.015, y - 0.03
        while any(abs(place[0] - other) < 0.03 and abs(place[1] - height) < 0.035 for other, height in places):
            place = place[0] + 0.01, place[1] - 0.02
        places.append(place)
        axes.text(*place, name, ha="left", va="center", fontsize=8)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(width: float = 6.4, height: float = 3.4) -> "tuple[Figure, Axes]":
    """Return a figure of this size in inches with one set of axes."""
    figure = new_figure(width, height)
    return figure, figure.add_subplot()


def as_svg(figure: "Figure") -> str:
    """Return the figure as an <svg> element to embed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a8799")

Curve = Sequence[tuple[int, float]]
"""(environment steps, success) in order of time."""


def pooled_curve(curves: Sequence[Curve], points: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return environment steps [n] and the mean, lowest and highest success [n] over seeds at these steps.

    Success is interpolated between evaluations; a seed that stopped early, at its target, keeps its last value.
    """
    last = max(curve[-1][0] for curve in curves)
    steps = np.linspace(0, last, points)
    values = np.stack([np.interp(steps, *np.array(curve, dtype=float).T) for curve in curves])
    return steps, values.mean(0), values.min(0), values.max(0)


def method_curves(tasks: Mapping[str, Mapping[str, Sequence[Curve]]], bases: Mapping[str, float]) -> str:
    """Plot success against environment steps, one panel per task, one colour and style per method: mean over seeds,
    band from lowest to highest. bases: success after behaviour cloning, by task.
    """
    with drawing():
        figure = new_figure(1.6 + 4.3 * len(tasks), 3.8)
        panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        names = dict.fromkeys(name for curves in tasks.values() for name in curves)
        looks = dict(zip(names, product(("-", "-.", ":"), COLOURS), strict=False))
        lines: dict[str, Any] = {}
        for axes, (task, curves) in zip(panels, tasks.items(), strict=True):
            for name, seeds in curves.items():
                steps, mean, low, high = pooled_curve(seeds)
                style, colour = looks[name]
                (lines[name],) = axes.plot(steps / 1e6, mean, color=colour, linestyle=style, label=name)
                axes.fill_between(steps / 1e6, low, high, color=colour, alpha=0.12, linewidth=0)
            lines["BC"] = axes.axhline(bases[task], color=BASE, linestyle="--", linewidth=1, label="BC")
            axes.set(title=task, xlabel="million environment steps", ylim=(0, 1.02))
        panels[0].set_ylabel("success")
        handles = [lines[name] for name in (*names, "BC")]
        panels[-1].legend(handles=handles, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return as_svg(figure)


def imagination_curves(arms: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], columns: int = 4) -> str:
    """Plot success of deterministic policies in imagination and in the real world against imagined steps, one panel per
    arm, one line per seed.

    arms: title -> seeds -> records with env_steps, deterministic_success and deterministic_real_success.
    """
    with drawing():
        figure, panels = _panels(len(arms), columns)
        for axes, (title, seeds) in zip(panels.flat, arms.items(), strict=False):
            for index, records in enumerate(seeds):
                steps = [row["env_steps"] / 1e6 for row in records]
                for name, label, colour in (("", "imagined", THIRD), ("real_", "real", TUNED)):
                    values = [row[f"deterministic_{name}success"] for row in records]
                    axes.plot(steps, values, color=colour, alpha=0.8, label=label if index == 0 else None)
            axes.set(ylim=(0, 1.02))
            axes.set_title(title, fontsize=10)
        for row in panels:
            row[0].set_ylabel("success")
        figure.supxlabel("million imagined steps", fontsize=10, color=STYLE["axes.labelcolor"])
        panels[0, 0].legend(frameon=False, loc="lower right")
        return as_svg(figure)


def imagined_beside_real(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Plot success before and after fine-tuning in imagination, one panel per task, one row per arm. It shows the base
    and each seed's tuned policy in the simulator, and the tuned policies in imagination, connected to their real
    success.

    tasks: task -> arm -> {"base", "imagined": {"success_rate", ...} over all seeds, "each": real success of each seed}.
    """
    with drawing():
        counts = [len(arms) for arms in tasks.values()]
        figure = new_figure(7.2, 0.7 + 0.45 * len(tasks) + 0.3 * sum(counts))
        panels = figure.subplots(len(tasks), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
        for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
            for row, arm in enumerate(arms.values()):
                base, imagined_rate = (arm[name]["success_rate"] for name in ("base", "imagined"))
                mean_rate = sum(arm["each"]) / len(arm["each"])
                axes.plot([mean_rate, imagined_rate], [row, row], color=THIRD, linewidth=1.2, alpha=0.6, zorder=1)
                axes.scatter([base], [row], marker="|", s=90, color=BASE, linewidths=2, label="base, real")
                axes.scatter(arm["each"], [row] * len(arm["each"]), s=26, alpha=0.8, color=TUNED, label="tuned, real")
                axes.scatter([imagined_rate], [row], marker="D", s=24, color=THIRD, label="tuned, imagined")
            axes.set(xlim=(-0.02, 1.02), ylim=(len(arms) - 0.5, -0.5))
            axes.set_yticks(range(len(arms)), [name.replace("_", " ") for name in arms])
            axes.set_title(task, fontsize=10, loc="left")
        panels[-1].set_xlabel("success")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[:3], labels[:3], frameon=False, loc="outside upper right", ncols=3)
        return as_svg(figure)


def ranking_panels(rankings: Mapping[str, Sequence[Sequence[tuple[float, float]]]], columns: int = 4) -> str:
    """Plot success in a world model against success in the simulator, one panel per model, one colour per seed, one
    point per policy, and the line of equal success.

    rankings: title -> seeds -> policies' success in the simulator and in the model.
    """
    with drawing():
        figure, panels = _panels(len(rankings), columns)
        for axes, (title, seeds) in zip(panels.flat, rankings.items(), strict=False):
            axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1)
            for policies, colour in zip(seeds, COLOURS * len(seeds), strict=False):
                axes.scatter(*zip(*policies, strict=True), color=colour, alpha=0.7, s=18, linewidths=0)
            axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
            axes.set_title(title, fontsize=10)
        figure.supxlabel("success in the simulator", fontsize=10, color=STYLE["axes.labelcolor"])
        figure.supylabel("in the world model", fontsize=10, color=STYLE["axes.labelcolor"])
        return as_svg(figure)


def failure_indices(curves: Mapping[str, Sequence[Mapping[str, Any]]], columns: int = 4) -> str:
    """Plot the indices of failure detectors over the decisions of episodes, one panel per detector.

    curves: detector -> episodes, each with success and index, and the threshold per decision.
    """
    with drawing():
        figure, panels = _panels(len(curves), columns, share=False)
        for axes, (title, lines) in zip(panels.flat, curves.items(), strict=False):
            for line in lines:
                if "threshold" in line:
                    axes.plot(range(1, len(line["threshold"]) + 1), line["threshold"], color=MUTED, linestyle="--")
                    continue
                colour = COLOURS[0] if line["success"] else COLOURS[1]
                axes.plot(range(1, len(line["index"]) + 1), line["index"], color=colour, linewidth=1, alpha=0.6)
            axes.set_title(title, fontsize=10)
        figure.supxlabel("decision", fontsize=10, color=STYLE["axes.labelcolor"])
        return as_svg(figure)


def _panels(count: int, columns: int, share: bool = True) -> "tuple[Figure, np.ndarray]":
    """Return a figure and its panels [down, across], in rows as equal as possible, without panels beyond `count`.

    share: one vertical axis for all.
    """
    down = -(-count // columns)
    across = -(-count // down)
    figure = new_figure(0.5 + 2.6 * across, 0.4 + 2.4 * down)
    panels = figure.subplots(down, across, sharey=share, squeeze=False)
    for axes in panels.flat[count:]:
        axes.remove()
    return figure, panels


def speed_beside_success(panels: Mapping[str, Mapping[str, tuple[float, float, float, float]]]) -> str:
    """Plot milliseconds per policy call, on a logarithmic axis, next to success, one row per inference method.

    panels: title -> method -> (milliseconds, success, its lower and upper bound).
    """
    with drawing():
        counts = [len(points) for points in panels.values()]
        figure = new_figure(7.2, 0.7 + 0.45 * len(panels) + 0.24 * sum(counts))
        grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col", height_ratios=[n + 1 for n in counts])
        for (left_axes, right), (title, points) in zip(grid, panels.items(), strict=True):
            rows = range(len(points))
            ms, rates, lows, highs = (list(each) for each in zip(*points.values(), strict=True))
            left_axes.scatter(ms, rows, s=26, color=TUNED)
            left_axes.hlines(rows, min(ms), ms, color=MUTED, linewidth=0.8, alpha=0.5)
            around = [[rate - low for rate, low in zip(rates, lows, strict=True)]]
            around.append([high - rate for rate, high in zip(rates, highs, strict=True)])
            right.errorbar(rates, rows, xerr=around, fmt="o", color=TUNED, markersize=5, linewidth=1.2)
            left_axes.set(xscale="log", ylim=(len(points) - 0.5, -0.5))
            right.set(xlim=(-0.02, 1.02), ylim=(len(points) - 0.5, -0.5), yticks=[])
            left_axes.set_yticks(rows, list(points))
            left_axes.set_title(title, fontsize=10, loc="left")
        grid[-1, 0].set_xlabel("milliseconds per policy call")
        grid[-1, 1].set_xlabel("success")
        return as_svg(figure)


def success_beside_delay(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]]) -> str:
    """Plot success against control steps of latency, one panel per task, one colour per method of handling it.

    panels: title -> method -> (latency, success, its lower and upper bound) in order of latency.
    """
    with drawing():
        figure, grid = _panels(len(panels), 3)
        for axes, (title, ways) in zip(grid.flat, panels.items(), strict=False):
            for place, ((name, points), colour) in enumerate(zip(ways.items(), COLOURS * len(ways), strict=False)):
                delays, rates, lows, highs = (np.array(each) for each in zip(*points, strict=True))
                shift = 0.08 * (place - (len(ways) - 1) / 2)  # so that intervals do not hide one another
                around = [rates - lows, highs - rates]
                axes.errorbar(
                    delays + shift,
                    rates,
                    yerr=around,
                    color=colour,
                    linestyle="-" if place < len(COLOURS) else "--",
                    label=name,
                    marker="o",
                    markersize=3,
                    linewidth=1.2,
                )
            axes.set(ylim=(-0.02, 1.02), xticks=[int(point[0]) for point in next(iter(ways.values()))])
            axes.set_title(title, fontsize=10)
        figure.supxlabel("inference latency in control steps", fontsize=10, color=STYLE["axes.labelcolor"])
        figure.supylabel("success", fontsize=10, color=STYLE["axes.labelcolor"])
        figure.legend(*grid.flat[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4)
        return as_svg(figure)


def value_curves(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """Plot learned values against epochs on a symmetric logarithmic axis, one colour per arm, one line per seed.

    runs: arm -> seeds -> records with epoch, value and value_bound.
    """
    with drawing():
        figure, axes = new_axes(width=7.2, height=3.8)
        for (name, seeds), colour in zip(runs.items(), COLOURS, strict=False):
            for index, records in enumerate(seeds):
                epochs, values = [row["epoch"] for row in records], [row["value"] for row in records]
                axes.plot(epochs, values, color=colour, label=name if index == 0 else None)
        bounds = [row["value_bound"] for seeds in runs.values() for records in seeds for row in records]
        axes.axhline(max(bounds, default=0.0), color=BASE, linestyle="--", linewidth=1, label="highest possible value")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set(xlabel="epoch", ylabel="value")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return as_svg(figure)


keep_former_names(__name__, {"ways_of_deciding": "inference_methods", "taught_curve": "teaching_curve"})
