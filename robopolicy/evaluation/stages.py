"""What the stages of a pipeline came to: one line each, whatever verb it was."""

from collections.abc import Mapping
from typing import Any

STAGES = ["stage", "verb", "success", "with noise", "interval", "world steps", "seconds"]
"""Columns of `stage_rows`."""
JUDGED = ("student", "tuned", "policy")
"""What verbs call the policy that they leave, where they judge one."""


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
