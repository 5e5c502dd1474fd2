"""Sections of a report about success classifiers: how one was tested, and success that one supplied."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from robopolicy.core.errors import DataError
from robopolicy.core.storage import read_object
from robopolicy.evaluation.intervals import percent
from robopolicy.evaluation.plots import THIRD, TUNED, as_svg, drawing, new_axes

Sections = Iterator[dict[str, Any]]
"""Arguments of `evaluation.report.Section`."""
ERRORS = {
    "precision": "precision",
    "false_accepts": "false accepts",
    "false_rejects": "false rejects",
    "early_accepts": "counted before success",
}
SUPPLIED = ("evaluation", "counted by the classifier", "simulator's own success", "false accepts", "false rejects")


def classifier_cards(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return label, value and note of the key metrics of a tested classifier."""
    return [
        (ERRORS[name], f"{figures['rate']:.1%}", f"{figures['low']:.1%} to {figures['high']:.1%}")
        for name in ("precision", "false_accepts", "false_rejects")
        if (figures := result[name])["total"]
    ]


def classifier_sections(result: Mapping[str, Any], folder: Path) -> Sections:
    """Yield the sections about a tested classifier: error rates, reliability, scores, mistakes."""
    frames, threshold = result["frames"], result["threshold"]
    rows = [
        [text, percent(result[name]), percent(frames[name]) if name in frames else ""] for name, text in ERRORS.items()
    ]
    proven = "is proven" if threshold["met"] else "is not proven"
    yield {
        "title": "Error rates",
        "caption": (
            "Exact 95 % intervals (Clopper and Pearson), on episodes that neither training nor calibration has seen. "
            f"Success counts after {result['hold']} consecutive frames with a probability above "
            f"{threshold['probability']:.3f}. A false-accept rate of at most {threshold['rate']:.0%} {proven} by the "
            f"calibration episodes, whose bound is {threshold['bound']:.1%}."
        ),
        "header": ("", "episodes", "frames"),
        "rows": rows,
    }
    yield {
        "title": "Reliability",
        "caption": (
            "Fraction of frames that show success, by predicted probability; the area of a marker is the number of "
            f"frames. Calibration error {frames['calibration_error']:.3f}, Brier score {frames['brier']:.3f}."
        ),
        "svg": reliability_diagram(frames["reliability"]),
    }
    if not (folder / "examples.json").exists():
        return
    examples = read_object(folder / "examples.json", DataError)
    yield {
        "title": "Scores along episodes",
        "caption": (
            "The hardest test episodes: failed ones with the highest scores, successful ones with the lowest. A marker "
            "is the labelled success, the dashed line is the threshold."
        ),
        "svg": score_curves(examples["scores"], threshold["probability"]),
    }
    mistakes = [
        [
            each["episode"],
            str(each["frame"]),
            "success" if each["label"] else "no success",
            f"{each['probability']:.3f}",
        ]
        for each in examples["mistakes"]
    ]
    if not mistakes:
        return
    image = ""
    path = folder / "mistakes.png"
    if path.is_file() and not path.is_symlink():
        encoded = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="mistakes" style="max-width:100%" src="data:image/png;base64,{encoded}">'
    yield {
        "title": "Most confident mistakes",
        "caption": "Single frames, from left to right as in the table below; one per episode, one row per camera.",
        "svg": image,
    }
    header = ("episode", "frame", "label", "probability")
    yield {"title": "Mistakes in numbers", "header": header, "rows": mistakes}


def supplied_section(evaluations: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return the section about evaluations whose success a classifier supplied; None if there are none.

    evaluations: (label, metrics), as in `EvaluationResult.to_json`.
    """
    rows: list[list[str]] = []
    tested: dict[str, str] = {}
    for label, metrics in evaluations:
        if "classifier" not in metrics:
            continue
        figures = metrics["classifier"]
        tested[figures["checkpoint"]] = percent(figures["tested"])
        own = [percent(figures[name]) if name in figures else "unknown" for name in ("own", *list(ERRORS)[1:3])]
        rows.append([label, f"{metrics['success_rate']:.1%}", *own])
    if not rows:
        return None
    said = "; ".join(f"{path} accepted {rate} of the failed test episodes" for path, rate in tested.items())
    caption = f"A success classifier decides success above: {said}. The table has its errors in these episodes."
    return {"title": "Success by a classifier", "caption": caption, "header": SUPPLIED, "rows": rows}


def classifier_text(label: str, metrics: Mapping[str, Any]) -> str:
    """Return a line for the terminal about success that a classifier supplied in an evaluation; "" without one."""
    if "classifier" not in metrics:
        return ""
    figures = metrics["classifier"]
    text = f"{label}: success is decided by the classifier {figures['checkpoint']}"
    if "own" not in figures:
        return f"{text}, which accepted {percent(figures['tested'])} of the failed test episodes"
    return (
        f"{text}; the simulator's own success is {percent(figures['own'])}; false accepts "
        f"{percent(figures['false_accepts'])}, false rejects {percent(figures['false_rejects'])}"
    )


def reliability_diagram(reliability: Sequence[Mapping[str, float]]) -> str:
    """Plot the fraction of successes by predicted probability, as SVG."""
    with drawing():
        figure, axes = new_axes(4.2, 3.6)
        axes.plot([0, 1], [0, 1], color="#9aa5b1", linewidth=1, linestyle="--")
        largest = max(each["frames"] for each in reliability)
        axes.plot([each["probability"] for each in reliability], [each["success"] for each in reliability], color=TUNED)
        axes.scatter(
            [each["probability"] for each in reliability],
            [each["success"] for each in reliability],
            s=[20 + 120 * each["frames"] / largest for each in reliability],
            color=TUNED,
        )
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("fraction of successes")
        return as_svg(figure)


def score_curves(scores: Sequence[Mapping[str, Any]], threshold: float) -> str:
    """Plot held probabilities along episodes, as SVG."""
    with drawing():
        figure, axes = new_axes(6.4, 3.2)
        for each in scores:
            colour = TUNED if each["successful"] else THIRD
            values = each["probabilities"]
            axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.2)
            place = each["first_success"]
            if place is not None and place < len(values):
                axes.plot([place + 1], [values[place]], marker="o", color=colour, markersize=5)
        axes.axhline(threshold, color="#5b6673", linewidth=1, linestyle="--")
        axes.plot([], [], color=TUNED, label="successful")
        axes.plot([], [], color=THIRD, label="failed")
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("control step")
        axes.set_ylabel("held probability")
        axes.legend(frameon=False)
        return as_svg(figure)
