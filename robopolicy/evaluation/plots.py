"""Plots for reports: one restrained style, colours that colour-blind readers can tell apart, SVG ready to embed."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.evaluation.image_quality import unit_of
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
    """Return the context in which a plot is drawn: our style. matplotlib takes a second to import: who draws, pays."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def learning_curve(records: Sequence[Mapping], base: Rate | None = None) -> str:
    """Draw success against environment steps: validation in both modes, the collected episodes faintly, the base."""
    with drawing():
        figure, axes = new_axes()
        collected = [(record["env_steps"], record["success"]) for record in records if "success" in record]
        if collected:
            axes.plot(*zip(*collected, strict=True), color=MUTED, linewidth=0.8, alpha=0.7, label="while collecting")
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
    """Draw success of the noise-free policy in imagination and for real, against the steps it has imagined."""
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
        parted = [row for row in rows if row.get("deterministic_parted")]
        if parted:
            axes.axvline(parted[0]["env_steps"], color=MUTED, linestyle="--", linewidth=1)
            axes.annotate("parted", (parted[0]["env_steps"], 0.03), color=MUTED, ha="right")
        axes.set(xlabel="imagined steps", ylabel="success", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower right")
        return as_svg(figure)


def taught_curve(records: Sequence[Mapping]) -> str:
    """Draw success of a student while it plays, with Wilson intervals, against the steps that were played before.

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
        axes.set(xlabel="environment steps that it has learned from", ylabel="student's success", ylim=(0, 1))
        return as_svg(figure)


def loss_curves(records: Sequence[Mapping], x: str = "step") -> str:
    """Draw every logged loss against the training step, on a logarithmic axis where all values are positive."""
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
    """Draw success so far of deployments by name against episodes, the floor, and faintly the share of the new policy.

    found: "running" and "shares" [E] of each.
    """
    with drawing():
        figure, axes = new_axes()
        for (name, each), colour in zip(found.items(), (TUNED, THIRD), strict=False):
            episodes = range(20, len(each["running"]) + 1)  # the first few say nothing
            axes.plot(episodes, each["running"][19:], color=colour, label=f"{name}: success so far")
            if name == "mixed":
                axes.plot(episodes, each["shares"][19:], color=MUTED, linewidth=1, label="share of the new policy")
        axes.axhline(floor, color=BASE, linestyle="--", linewidth=1, label="floor")
        axes.set(xlabel="episodes", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return as_svg(figure)


def success_bars(rates: Sequence[Rate]) -> str:
    """Draw success rates as points with their intervals, one row each."""
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


def ways_of_deciding(ways: Mapping[str, Mapping[str, Any]], chosen: str) -> str:
    """Draw the least milliseconds of every way, a row each, on a logarithmic axis; see `ways.way_rows`."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    with drawing():
        figure, axes = new_axes(height=0.32 * len(ways) + 0.9)
        for row, (name, found) in enumerate(reversed(list(ways.items()))):
            fill = TUNED if name == chosen else "none"
            axes.plot(found["least_ms"], row, "o", color=TUNED, markerfacecolor=fill, markersize=7)
            note = f"{found['times_as_fast']:.1f} times, error {found['error']:.2g}"
            axes.annotate(note, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.set_yticks(range(len(ways)), list(reversed(list(ways))))
        axes.set(xlabel="milliseconds", xscale="log", ylim=(-0.6, len(ways) - 0.4))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", visible=False)
        return as_svg(figure)


def ranking_scatter(real: Mapping[str, Rate], model: Mapping[str, Rate]) -> str:
    """Draw simulator against world model, one numbered point a policy with both intervals, and the line of agreement.

    The numbers, in the order of real success, are explained on the right.
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
            for left, text, side in ((1.06, str(index + 1), "right"), (1.08, name, "left")):
                axes.text(left, height, text, transform=axes.transAxes, ha=side, va="center", fontsize=9)
        axes.set(
            xlabel="success in the simulator",
            ylabel="success in the world model",
            xlim=(-0.03, 1.03),
            ylim=(-0.03, 1.03),
        )
        return as_svg(figure)


def open_loop_errors(figures: Mapping[str, Mapping[str, Mapping[str, float]]], key: str) -> str:
    """Draw how well a model follows recorded actions, against the horizon, beside other actions and copying.

    figures: horizon -> observation key -> {"model", "shuffled", "copy"}; PSNR and its like for images, else errors.
    """
    with drawing():
        figure, axes = new_axes()
        rows = [(int(horizon), found[key]) for horizon, found in figures.items() if key in found]
        steps, image = [horizon for horizon, _ in rows], key.startswith(IMAGE_PREFIX)
        for name, label, colour in (
            ("model", "world model", TUNED),
            ("shuffled", "world model told other actions", THIRD),
            ("copy", "first frame repeated", BASE),
        ):
            axes.plot(steps, [found[name] for _, found in rows], marker="o", color=colour, label=label)
        axes.set_xticks(steps)
        axes.set(xlabel="imagined steps", ylabel=unit_of(key) if image else "error in standard deviations")
        if not image:
            axes.set_ylim(0, None)
        axes.legend(frameon=False)
        return as_svg(figure)


def _place_labels(axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Write short labels below and right of points, pushed aside where they would overlap."""
    taken: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        place = x + 0.015, y - 0.03
        while any(abs(place[0] - other) < 0.03 and abs(place[1] - height) < 0.035 for other, height in taken):
            place = place[0] + 0.01, place[1] - 0.02
        taken.append(place)
        axes.text(*place, name, ha="left", va="center", fontsize=8)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(width: float = 6.4, height: float = 3.4) -> "tuple[Figure, Axes]":
    """Return a figure of so many inches with one set of axes."""
    figure = new_figure(width, height)
    return figure, figure.add_subplot()


def as_svg(figure: "Figure") -> str:
    """Return the figure as an <svg> element to embed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
