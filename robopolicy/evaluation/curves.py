"""Learning curves of several methods beside one another, for benchmarks of algorithms."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from robopolicy.evaluation.plots import BASE, STYLE, as_svg, new_axes

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


def method_curves(curves: Mapping[str, Sequence[Curve]], base: float | None = None) -> str:
    """Draw success against environment steps, one colour a method: mean over seeds, band from lowest to highest."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(width=7.2, height=3.8)
        for (name, seeds), colour in zip(curves.items(), COLOURS * 3, strict=False):
            steps, mean, low, high = pooled_curve(seeds)
            axes.plot(steps, mean, color=colour, label=name)
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        if base is not None:
            axes.axhline(base, color=BASE, linestyle="--", linewidth=1, label="BC")
        axes.set(xlabel="environment steps", ylabel="success", ylim=(0, 1.02))
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return as_svg(figure)


def value_curves(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """Draw learned values against epochs on a symmetric logarithmic axis, one colour an arm, one line a seed.

    runs: arm -> seeds -> records with epoch, value and value_bound.
    """
    with matplotlib.rc_context(STYLE):
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
