"""Tables of a report: success by instruction, pipeline stages, inference methods.

All take results in the form of result.json, so that a report can be rebuilt from the file alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from robopolicy.core.faulty import NO_FAULT
from robopolicy.evaluation.intervals import percent, plus_minus

STAGES = ["stage", "verb", "success", "with noise", "interval", "world steps", "seconds"]
"""Columns of `stage_rows`."""
JUDGED = ("student", "tuned", "policy")
"""Names that verbs use for their resulting policy in an evaluation."""


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: bool = False) -> str:
    """Return a table as Markdown; bars inside cells are escaped. numbers: align all columns but the first right."""
    first, *lines = ([cell.replace("|", "\\|") for cell in row] for row in (header, *rows))
    rule = ["---", *["---:" if numbers else "---"] * (len(first) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (first, rule, *lines))


def rate_in_words(figures: Mapping[str, Any]) -> str:
    """Return a success rate with its interval and number of episodes as text."""
    bounds = f"[{figures['low']:.0%}, {figures['high']:.0%}]"
    return f"{figures['success_rate']:.0%} {bounds} of {figures['episodes']}"


def evaluation_text(figures: Mapping[str, Any]) -> str:
    """Return an evaluation's success rate with its interval, or its return where the world reports no success.

    figures: as in `EvaluationResult.summary`.
    """
    if not figures.get("reports_success", True):
        return f"return {figures['return_mean']:.4g} [{figures['return_low']:.4g}, {figures['return_high']:.4g}]"
    return f"{figures['success_rate']:.1%} [{figures['low']:.1%}, {figures['high']:.1%}]"


def instruction_table(judged: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows: one row per instruction, one column with the success of each evaluation that has several
    instructions.

    judged: (label, metrics), as in `EvaluationResult.to_json`. Returns None if no evaluation has several instructions.
    """
    rows = _success_by("by_instruction", judged)
    return None if rows is None else (["instruction", *rows[0]], sorted(rows[1]))


def task_table(judged: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows as `instruction_table`, one row per task in the order of the tasks, and one for all."""
    rows = _success_by("by_task", judged)
    if rows is None:
        return None
    metrics_of_label = dict(judged)
    total = ["all tasks", *(rate_in_words(metrics_of_label[label]) for label in rows[0])]
    return ["task", *rows[0]], [*rows[1], total]


def fault_table(judged: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows as `instruction_table`, one row per planted fault, and in how many episodes it began."""
    rows = _success_by("by_fault", judged)
    if rows is None:
        return None
    metrics = next(figures["by_fault"] for _, figures in judged if figures.get("by_fault"))
    begun_texts = {
        name: f"{each['began']} of {each['episodes']}" if name != NO_FAULT else "" for name, each in metrics.items()
    }
    return ["fault", "began", *rows[0]], [[row[0], begun_texts.get(row[0], ""), *row[1:]] for row in rows[1]]


def specification_table(
    judged: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows as `instruction_table`: episodes that fulfil the formula, and its mean robustness."""
    measured = {label: figures["specification"] for label, figures in judged if "specification" in figures}
    if not measured:
        return None
    rates = [f"{each['rate']:.1%} [{each['low']:.1%}, {each['high']:.1%}]" for each in _column(measured, "fulfilled")]
    means = [f"{each['mean']:.4g} [{each['low']:.4g}, {each['high']:.4g}]" for each in _column(measured, "robustness")]
    formula = next(iter(measured.values()))["formula"]
    return [formula, *measured], [["episodes that fulfil it", *rates], ["mean robustness", *means]]


def _column(measured: Mapping[str, Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [figures[name] for figures in measured.values()]


def _success_by(key: str, judged: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]] | None:
    """Return the labels of the evaluations that have metrics by `key`, and a row of success rates for each name."""
    metrics_of_label = {
        label: figures[key] for label, figures in judged if figures.get(key) and figures.get("reports_success", True)
    }
    if not metrics_of_label:
        return None
    names = dict.fromkeys(name for metrics_of_name in metrics_of_label.values() for name in metrics_of_name)
    rows = [
        [
            name,
            *(
                rate_in_words(metrics_of_name[name]) if name in metrics_of_name else "not requested"
                for metrics_of_name in metrics_of_label.values()
            ),
        ]
        for name in names
    ]
    return list(metrics_of_label), rows


def control_table(controls: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one control of a policy per row, as in `Control.to_json`."""
    header = ["policy", "instruction", "success, deterministic", "difference from the world's instructions"]
    rows = []
    for name, figures_of_control in controls.items():
        for control, figures in figures_of_control.items():
            rows.append([name, control.replace("_", " "), *_outcome(figures)])
    return header, rows


def variation_table(variations: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one factor of variation of a policy per row, below the scene as it is.

    variations: policy -> factor with its value -> summary of an evaluation, with its difference to the scene as it is.
    """
    header = ["policy", "factor", "deterministic", "difference"]
    rows = [
        [
            name,
            label,
            evaluation_text(figures),
            difference_text(figures["difference"]) if "difference" in figures else "",
        ]
        for name, figures_of_label in variations.items()
        for label, figures in figures_of_label.items()
    ]
    return header, rows


def element_table(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a world model's errors by element and horizon, as `evaluation.world_model.element_errors`."""
    horizons = sorted({horizon for row in errors.values() for horizon in row}, key=int)
    rows = [[name, *(_error(row.get(each)) for each in horizons)] for name, row in errors.items()]
    return ["element", *(f"{horizon} steps" for horizon in horizons)], rows


def _error(pair: Mapping[str, float] | None) -> str:
    return "" if pair is None else f"{pair['model']:.3g} ({pair['copy']:.3g})"


TOLERANCE = 0.01
"""Fraction of the steps of held-out data that count as unlike the rest of it, see `evaluation.coverage`."""
LARGEST = 0.1
"""Fraction of a policy's steps from which on a warning is due."""
UNLIKE = "Steps unlike those that the model has learned from"
COVERAGE = (
    f"Fraction of a policy's steps in the simulator that are farther from all of the model's data than {TOLERANCE:.0%} "
    "of the data held out is."
)


def coverage_table(models: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: one policy per line, with the fraction of its steps unlike the data of every model."""
    policies = dict.fromkeys(policy for shares in models.values() for policy in shares)
    lines = [[policy, *(plus_minus(shares.get(policy), ".1%") for shares in models.values())] for policy in policies]
    return ["policy", *models], lines


def coverage_warnings(models: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return one sentence for each model and policy whose steps are unlike the model's data too often."""
    return [
        f"{share:.0%} of the steps of {policy} are unlike all that {model} has learned from: its imagined success is a "
        "guess. Train the model with the policy's rollouts (worldmodel.policies)."
        for model, shares in models.items()
        for policy, share in shares.items()
        if share > LARGEST
    ]


def difference_text(difference: Mapping[str, Any]) -> str:
    """Return a paired difference from `compare(...).to_json()` as text, in points of success or as return."""
    by, low, high = (difference[key] for key in ("difference", "low", "high"))
    if difference.get("of") == "return":
        return f"{by:+.4g} of return [{low:+.4g}, {high:+.4g}]"
    return f"{100 * by:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def _outcome(figures: Mapping[str, Any]) -> tuple[str, str]:
    if "refused" in figures:
        return "not possible", str(figures["refused"])
    difference = figures["difference"]
    of = f"return {figures['return_mean']:.4g}" if difference.get("of") == "return" else rate_in_words(figures)
    return of, difference_text(difference)


def detector_rows(detectors: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, one per failure detector, as `failures.scoring.Scored.summary` describes it."""
    times = list(next(iter(detectors.values()))["auroc"])
    header = ["detector", *(f"AUROC at {time}" for time in times), "false alarms", "failures detected", "lead"]
    header += ["detected at equal false alarms", "lead there", "time"]
    return header, [
        [
            name,
            *(plus_minus(figures["auroc"][time]["auroc"], ".2f") for time in times),
            percent(figures["false_alarms"]),
            percent(figures["detected"]),
            f"{plus_minus(figures['lead_seconds'], '.1f')} s",
            percent(figures["equal_false_alarms"]["detected"]),
            f"{plus_minus(figures['equal_false_alarms']['lead_seconds'], '.1f')} s",
            f"{figures['milliseconds']:.2f} ms",
        ]
        for name, figures in detectors.items()
    ]


def detected_fault_rows(faults: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, one per planted fault: fault -> detector -> `failures.scoring.Scored.after_fault`.

    A cell has the share of failures detected after the fault began, and the median seconds from there to the alarm.
    """
    names = list(next(iter(faults.values())))
    rows = []
    for fault, figures in faults.items():
        success = next(iter(figures.values()))["success"]
        delays = [plus_minus(figures[name]["delay_seconds"], ".1f") for name in names]
        detected = [percent(figures[name]["detected"]) for name in names]
        cells = [f"{rate}, {delay} s" for rate, delay in zip(detected, delays, strict=True)]
        rows.append([fault, percent(success), *cells])
    return ["fault", "success", *names], rows


def route_rows(ways: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of `robopolicy route`, by policy, then router and best in hindsight."""
    header = ["", "success", "cost", "success - cost", "initial states"]
    return header, [
        [
            each["name"],
            percent(each["success"]),
            f"{each['cost']:.3g}",
            f"{each['success']['rate'] - each['cost']:.1%}",
            "" if each["routed"] is None else str(each["routed"]),
        ]
        for each in ways
    ]


def horizon_rows(attempts: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, one per attempt of `robopolicy analyze`: look-ahead, rollouts and what they reached."""
    header = ["k", "rollouts per decision", "k + log_A(rollouts)", "success", "return", "random play", "steps"]
    return header, [
        [
            str(each["k"]),
            str(each["rollouts"]),
            f"{each['horizon']:.1f}",
            percent(each["success"]),
            f"{each['return']:.3g}",
            percent(each["random_success"]),
            str(each["steps"]),
        ]
        for each in attempts
    ]


def stage_summary(verb: str, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return a stage's verb, seconds, steps in the world, and the evaluation of its resulting policy.

    world_steps: steps played for learning or recording, not for evaluation; None if the verb does not report them.
    Evaluations omit the outcomes of single episodes.
    """
    summary: dict[str, Any] = {"verb": verb, "seconds": seconds}
    summary["world_steps"] = result.get("env_steps", result.get("steps") if verb == "collect" else None)
    for name in ("accepted", "reached_target"):
        if name in result:
            summary[name] = result[name]
    if "seconds_student" in result:
        summary["times_faster"] = result["seconds_teacher"] / result["seconds_student"]
    metrics = next((result[name] for name in JUDGED if isinstance(result.get(name), Mapping)), None)
    if metrics is not None:
        summary["policy"] = {
            mode: {key: value for key, value in metrics[mode].items() if not isinstance(value, list)}
            for mode in ("deterministic", "stochastic")
        }
    return summary


def stage_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each stage, by name as in `stage_summary`, under the columns `STAGES`."""
    rows: list[list[str]] = []
    for name, stage in stages.items():
        verdict = stage.get("policy")
        rates = ["", "", ""]
        if verdict is not None:
            deterministic, noisy = verdict["deterministic"], verdict["stochastic"]
            rates = [
                f"{deterministic['success_rate']:.1%}",
                f"{noisy['success_rate']:.1%}",
                f"{deterministic['low']:.1%} to {deterministic['high']:.1%}",
            ]
        steps = stage["world_steps"]
        rows.append([name, stage["verb"], *rates, "" if steps is None else f"{steps:,}", f"{stage['seconds']:.0f}"])
    return rows


def ways_header(error: str = "std") -> tuple[str, ...]:
    """Return the header of `way_rows`; error: unit of the errors."""
    return "method", "median ms", "min ms", "speed-up", f"error / {error}", "block evaluations"


def way_rows(ways: Mapping[str, Mapping[str, Any]], chosen: str) -> list[list[str]]:
    """Return one row per inference method, the chosen one marked with an asterisk.

    ways: name -> median_ms, least_ms, times_as_fast, error, and block_share if some network blocks are not evaluated.
    """
    return [
        [
            f"{name} *" if name == chosen else name,
            f"{metrics['median_ms']:.2f}",
            f"{metrics['least_ms']:.2f}",
            f"{metrics['times_as_fast']:.1f}",
            f"{metrics['error']:.1e}" if 0 < metrics["error"] < 1e-3 else f"{metrics['error']:.3g}",
            f"{metrics['block_share']:.0%}" if "block_share" in metrics else "",
        ]
        for name, metrics in ways.items()
    ]
