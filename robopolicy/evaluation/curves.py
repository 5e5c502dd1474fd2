"""Small panels for benchmarks: learning curves and rankings of several methods or models beside one another."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robopolicy.evaluation.plots import BASE, MUTED, STYLE, THIRD, TUNED, as_svg, drawing, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a8799")

Curve = Sequence[tuple[int, float]]
"""(environment steps, success) in order of time."""


def pooled_curve(curves: Sequence[Curve], points: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return environment steps [n] and the seeds' mean, lowest and highest success [n] there.

    Between evaluations success is interpolated; a seed that stopped early, at its target, keeps its last value.
    """
    last = max(curve[-1][0] for curve in curves)
    steps = np.linspace(0, last, points)
    values = np.stack([np.interp(steps, *np.array(curve, dtype=float).T) for curve in curves])
    return steps, values.mean(0), values.min(0), values.max(0)


def method_curves(tasks: Mapping[str, Mapping[str, Sequence[Curve]]], bases: Mapping[str, float]) -> str:
    """Draw success against environment steps, a panel a task, one colour a method: mean over seeds, band from lowest
    to highest. bases: success after behaviour cloning, by task.
    """
    with drawing():
        figure = new_figure(1.6 + 4.3 * len(tasks), 3.8)
        panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for axes, (task, curves) in zip(panels, tasks.items(), strict=True):
            for (name, seeds), colour in zip(curves.items(), COLOURS * 3, strict=False):
                steps, mean, low, high = pooled_curve(seeds)
                axes.plot(steps / 1e6, mean, color=colour, label=name)
                axes.fill_between(steps / 1e6, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.axhline(bases[task], color=BASE, linestyle="--", linewidth=1, label="BC")
            axes.set(title=task, xlabel="million environment steps", ylim=(0, 1.02))
        panels[0].set_ylabel("success")
        panels[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return as_svg(figure)


def imagination_curves(arms: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], columns: int = 4) -> str:
    """Draw success of noise-free policies in imagination and for real, against the steps imagined, a panel an arm, a
    line a seed.

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
    """Draw success before and after fine-tuning in imagination, a panel a task, a row an arm: the base policy and the
    tuned one of every seed in the simulator, and the tuned ones in imagination, joined to what they truly reach.

    tasks: task -> arm -> {"base", "imagined": {"success_rate", ...} over all seeds, "each": real success of each seed}.
    """
    with drawing():
        counts = [len(arms) for arms in tasks.values()]
        figure = new_figure(7.2, 0.7 + 0.45 * len(tasks) + 0.3 * sum(counts))
        panels = figure.subplots(len(tasks), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
        for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
            for row, arm in enumerate(arms.values()):
                base, imagined = (arm[name]["success_rate"] for name in ("base", "imagined"))
                reached = sum(arm["each"]) / len(arm["each"])
                axes.plot([reached, imagined], [row, row], color=THIRD, linewidth=1.2, alpha=0.6, zorder=1)
                axes.scatter([base], [row], marker="|", s=90, color=BASE, linewidths=2, label="base, real")
                axes.scatter(arm["each"], [row] * len(arm["each"]), s=26, alpha=0.8, color=TUNED, label="tuned, real")
                axes.scatter([imagined], [row], marker="D", s=24, color=THIRD, label="tuned, imagined")
            axes.set(xlim=(-0.02, 1.02), ylim=(len(arms) - 0.5, -0.5))
            axes.set_yticks(range(len(arms)), [name.replace("_", " ") for name in arms])
            axes.set_title(task, fontsize=10, loc="left")
        panels[-1].set_xlabel("success")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[:3], labels[:3], frameon=False, loc="outside upper right", ncols=3)
        return as_svg(figure)


def ranking_panels(rankings: Mapping[str, Sequence[Sequence[tuple[float, float]]]], columns: int = 4) -> str:
    """Draw success in a world model against success in the simulator, a panel a model, a colour a seed of it, a point a
    policy, and the line on which the two agree.

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


def _panels(count: int, columns: int) -> "tuple[Figure, np.ndarray]":
    """Return a figure and its panels [down, across], as even rows as there can be, without those beyond `count`."""
    down = -(-count // columns)
    across = -(-count // down)
    figure = new_figure(0.5 + 2.6 * across, 0.4 + 2.4 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in panels.flat[count:]:
        axes.remove()
    return figure, panels


def speed_beside_success(panels: Mapping[str, Mapping[str, tuple[float, float, float, float]]]) -> str:
    """Draw milliseconds a decision, on a logarithmic axis, and success beside it, a row a way of deciding.

    panels: title -> way -> (milliseconds, success, its lower and upper bound).
    """
    with drawing():
        counts = [len(points) for points in panels.values()]
        figure = new_figure(7.2, 0.7 + 0.45 * len(panels) + 0.24 * sum(counts))
        grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col", height_ratios=[n + 1 for n in counts])
        for (left, right), (title, points) in zip(grid, panels.items(), strict=True):
            rows = range(len(points))
            ms, rates, lows, highs = (list(each) for each in zip(*points.values(), strict=True))
            left.scatter(ms, rows, s=26, color=TUNED)
            left.hlines(rows, min(ms), ms, color=MUTED, linewidth=0.8, alpha=0.5)
            around = [[rate - low for rate, low in zip(rates, lows, strict=True)]]
            around.append([high - rate for rate, high in zip(rates, highs, strict=True)])
            right.errorbar(rates, rows, xerr=around, fmt="o", color=TUNED, markersize=5, linewidth=1.2)
            left.set(xscale="log", ylim=(len(points) - 0.5, -0.5))
            right.set(xlim=(-0.02, 1.02), ylim=(len(points) - 0.5, -0.5), yticks=[])
            left.set_yticks(rows, list(points))
            left.set_title(title, fontsize=10, loc="left")
        grid[-1, 0].set_xlabel("milliseconds a decision")
        grid[-1, 1].set_xlabel("success")
        return as_svg(figure)


def success_beside_delay(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]]) -> str:
    """Draw success against control steps of delay, a panel a task, one colour a way of living with it.

    panels: title -> way -> (delay, success, its lower and upper bound) in order of the delays.
    """
    with drawing():
        figure, grid = _panels(len(panels), 3)
        for axes, (title, ways) in zip(grid.flat, panels.items(), strict=False):
            for place, ((name, points), colour) in enumerate(zip(ways.items(), COLOURS * len(ways), strict=False)):
                delays, rates, lows, highs = (np.array(each) for each in zip(*points, strict=True))
                apart = 0.08 * (place - (len(ways) - 1) / 2)  # so that intervals do not hide one another
                around = [rates - lows, highs - rates]
                axes.errorbar(
                    delays + apart,
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
        figure.supxlabel("control steps that a decision takes", fontsize=10, color=STYLE["axes.labelcolor"])
        figure.supylabel("success", fontsize=10, color=STYLE["axes.labelcolor"])
        figure.legend(*grid.flat[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4)
        return as_svg(figure)


def value_curves(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """Draw learned values against epochs on a symmetric logarithmic axis, one colour an arm, one line a seed.

    runs: arm -> seeds -> records with epoch, value and value_bound.
    """
    with drawing():
        figure, axes = new_axes(width=7.2, height=3.8)
        for (name, seeds), colour in zip(runs.items(), COLOURS, strict=False):
            for index, records in enumerate(seeds):
                epochs, values = [row["epoch"] for row in records], [row["value"] for row in records]
                axes.plot(epochs, values, color=colour, label=name if index == 0 else None)
        bounds = [row["value_bound"] for seeds in runs.values() for records in seeds for row in records]
        axes.axhline(max(bounds, default=0.0), color=BASE, linestyle="--", linewidth=1, label="highest possible")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set(xlabel="epoch", ylabel="value")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return as_svg(figure)
