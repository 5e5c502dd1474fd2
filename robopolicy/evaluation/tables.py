"""Tables of a report: what a policy was told, stages of a pipeline, ways of computing the same decisions.

All read figures as result.json has them, so that a report can be rebuilt from the file alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

STAGES = ["stage", "verb", "success", "with noise", "interval", "world steps", "seconds"]
"""Columns of `stage_rows`."""
JUDGED = ("student", "tuned", "policy")
"""What verbs call the policy that they leave, where they judge one."""


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


def stage_summary(verb: str, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return of a stage's result its verb, seconds, steps in the world, and the verdict on the policy that it left.

    world_steps: those that were played to learn or to record, not to judge; None where the verb does not say. Verdicts
    are without the outcomes of single episodes.
    """
    found: dict[str, Any] = {"verb": verb, "seconds": seconds}
    found["world_steps"] = result.get("env_steps", result.get("steps") if verb == "collect" else None)
    for name in ("accepted", "reached_target"):
        if name in result:
            found[name] = result[name]
    if "seconds_student" in result:
        found["times_faster"] = result["seconds_teacher"] / result["seconds_student"]
    judged = next((result[name] for name in JUDGED if isinstance(result.get(name), Mapping)), None)
    if judged is not None:
        found["policy"] = {
            mode: {key: value for key, value in judged[mode].items() if not isinstance(value, list)}
            for mode in ("deterministic", "stochastic")
        }
    return found


def stage_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each stage, by name as `stage_summary` tells it, under the columns `STAGES`."""
    rows: list[list[str]] = []
    for name, told in stages.items():
        verdict = told.get("policy")
        rates = ["", "", ""]
        if verdict is not None:
            plain, noisy = verdict["deterministic"], verdict["stochastic"]
            rates = [
                f"{plain['success_rate']:.1%}",
                f"{noisy['success_rate']:.1%}",
                f"{plain['low']:.1%} to {plain['high']:.1%}",
            ]
        steps = told["world_steps"]
        rows.append([name, told["verb"], *rates, "" if steps is None else f"{steps:,}", f"{told['seconds']:.0f}"])
    return rows


def ways_header(error: str = "std") -> tuple[str, ...]:
    """Return the header of `way_rows`; error: in what errors are measured."""
    return "way", "median ms", "least ms", "times as fast", f"error / {error}", "block evaluations"


def way_rows(ways: Mapping[str, Mapping[str, Any]], chosen: str) -> list[list[str]]:
    """Return a row each way, the chosen one with an asterisk.

    ways: name -> median_ms, least_ms, times_as_fast, error, and block_share where some blocks of a network are not
    evaluated.
    """
    return [
        [
            f"{name} *" if name == chosen else name,
            f"{found['median_ms']:.2f}",
            f"{found['least_ms']:.2f}",
            f"{found['times_as_fast']:.1f}",
            f"{found['error']:.1e}" if 0 < found["error"] < 1e-3 else f"{found['error']:.3g}",
            f"{found['block_share']:.0%}" if "block_share" in found else "",
        ]
        for name, found in ways.items()
    ]
