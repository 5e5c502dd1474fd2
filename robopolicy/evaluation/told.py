"""Tables of what a policy was told: success of every instruction, and under other words than the world's.

All read figures as result.json has them, so that a report can be rebuilt from the file alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def rate_in_words(figures: Mapping[str, Any]) -> str:
    """Return a success rate with its interval and its episodes."""
    bounds = f"[{figures['low']:.0%}, {figures['high']:.0%}]"
    return f"{figures['success_rate']:.0%} {bounds} of {figures['episodes']}"


def instruction_table(judged: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows: an instruction each, success in words of every judgement that tells instructions apart.

    judged: (label, figures), as `EvaluationResult.to_json` has them; None where none of them does.
    """
    apart = {
        label: figures["by_instruction"]
        for label, figures in judged
        if figures.get("by_instruction") and figures.get("reports_success", True)
    }
    if not apart:
        return None
    texts = sorted({text for found in apart.values() for text in found})
    rows = [
        [text, *(rate_in_words(found[text]) if text in found else "not asked" for found in apart.values())]
        for text in texts
    ]
    return ["instruction", *apart], rows


def control_table(controls: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: a control of a policy each, as `Control.to_json` has it."""
    header = ["policy", "told", "success, deterministic", "difference to the world's words"]
    rows = []
    for name, found in controls.items():
        for control, figures in found.items():
            rows.append([name, control.replace("_", " "), *_outcome(figures)])
    return header, rows


def difference_text(difference: Mapping[str, Any]) -> str:
    """Return a paired difference as `compare(...).to_json()` has it, in points of success or as a return."""
    by, low, high = (difference[key] for key in ("difference", "low", "high"))
    if difference.get("of") == "return":
        return f"{by:+.4g} of return [{low:+.4g}, {high:+.4g}]"
    return f"{100 * by:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def _outcome(figures: Mapping[str, Any]) -> tuple[str, str]:
    if "refused" in figures:
        return "refused", str(figures["refused"])
    difference = figures["difference"]
    of = f"return {figures['return_mean']:.4g}" if difference.get("of") == "return" else rate_in_words(figures)
    return of, difference_text(difference)
