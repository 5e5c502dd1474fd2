"""Tables of a sweep: each setting's mean and range over seeds, and its paired difference to the first setting.

All are computed from the result.json of the runs. Runs of one seed play the same evaluation episodes, so settings are
compared episode by episode, pooled over the seeds that both have finished. The intervals cover the choice of episodes,
not the variation of training, which the range over seeds shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.evaluation.intervals import Paired, compare_paired, compare_returns, wilson
from robopolicy.evaluation.plots import swept_settings
from robopolicy.evaluation.report import Card, Report, Section
from robopolicy.evaluation.success import EvaluationResult
from robopolicy.evaluation.tables import JUDGED, difference_text

FINISHED = "finished"
SUCCESS, RETURN = "success", "return"
USUAL = ("validation.reward_error", "success_rate")
"""Entries of result.json that are compared, if there is no evaluated policy: of worldmodel, and of collect."""
CAPTION = (
    "Mean and range over seeds. Intervals are Wilson's 95 % intervals of the pooled episodes; differences to the first "
    "setting are paired: the same seeds and initial states. Both cover the choice of episodes, not the variation "
    "between trainings, which the range shows."
)


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep. setting: the values that distinguish it, without the seed, as text; folder: its run folder;
    state: finished, failed or not run; reason: why it failed, "" if it did not; result: its result.json.
    """

    setting: str
    seed: int
    folder: Path
    state: str = "not run"
    reason: str = ""
    result: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Summary:
    """The finished runs of one setting. values: seed -> metric; interval: Wilson interval of the pooled episodes, None
    without success; difference: to the first setting, None where episodes do not pair; planned: number of its runs.
    """

    setting: str
    values: Mapping[int, float]
    interval: tuple[float, float] | None
    difference: Paired | None
    planned: int
    seconds: float | None

    @property
    def mean(self) -> float | None:
        """Mean over the finished seeds."""
        return float(np.mean(list(self.values.values()))) if self.values else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        values = list(self.values.values())
        return {
            "setting": self.setting,
            "mean": self.mean,
            "least": min(values, default=None),
            "greatest": max(values, default=None),
            "interval": self.interval,
            "difference": None if self.difference is None else self.difference.to_json(),
            "values": {str(seed): value for seed, value in self.values.items()},
            "planned": self.planned,
            "seconds": self.seconds,
        }


def metric_of(runs: Sequence[SweptRun], chosen: str = "") -> str:
    """Return the metric that the finished runs share: `chosen`, else success, return, or a usual entry; "" for none."""
    results = [run.result for run in runs if run.state == FINISHED]
    if chosen or not results:
        return chosen
    if all(_evaluation(result) is not None for result in results):
        evaluations = [_evaluation(result) for result in results]
        return SUCCESS if all(each is not None and each.reports_success for each in evaluations) else RETURN
    return next((name for name in USUAL if all(_entry(result, name) is not None for result in results)), "")


def value_of(result: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric in result.json, None if it is missing or no number."""
    if metric not in (SUCCESS, RETURN):
        return _entry(result, metric)
    evaluation = _evaluation(result)
    if evaluation is None:
        return None
    return evaluation.success_rate if metric == SUCCESS else float(evaluation.returns.mean())


def numbers_in(result: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the path of every number in result.json, except those of single episodes."""
    for key, value in result.items():
        path = f"{place}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from numbers_in(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path


def summaries(runs: Sequence[SweptRun], metric: str) -> list[Summary]:
    """Return one summary per setting, in order; differences are to the first setting."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    finished: dict[str, dict[int, Mapping[str, Any]]] = {
        each: {run.seed: run.result for run in runs if run.setting == each and run.state == FINISHED}
        for each in settings
    }
    return [
        Summary(
            setting=setting,
            values={s: v for s, each in done.items() if (v := value_of(each, metric)) is not None},
            interval=_pooled(list(done.values())) if metric == SUCCESS else None,
            difference=_paired(finished[settings[0]], done, metric) if setting != settings[0] else None,
            planned=sum(run.setting == setting for run in runs),
            seconds=_mean([_entry(each, "seconds") for each in done.values()]),
        )
        for setting, done in finished.items()
    ]


def table(found: Sequence[Summary], metric: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the summaries; columns without any entry are left out."""
    header = [
        "setting",
        metric or "metric",
        "range over seeds",
        "95 % interval",
        "difference to the first",
        "seeds",
        "s",
    ]
    percent = metric == SUCCESS

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}" if percent else f"{value:.4g}"

    rows = [
        [
            each.setting or "(as given)",
            text(each.mean),
            f"{text(min(each.values.values()))} to {text(max(each.values.values()))}" if len(each.values) > 1 else "",
            "" if each.interval is None else f"{each.interval[0]:.1%} to {each.interval[1]:.1%}",
            "" if each.difference is None else difference_text(each.difference.to_json()),
            f"{len(each.values)} of {each.planned}",
            "" if each.seconds is None else f"{each.seconds:.0f}",
        ]
        for each in found
    ]
    columns = [column for column in range(len(header)) if any(row[column] for row in rows)]
    return [header[column] for column in columns], [[row[column] for column in columns] for row in rows]


def run_rows(runs: Sequence[SweptRun], metric: str) -> list[list[str]]:
    """Return a row per run: setting, seed, state, metric, and folder."""
    rows: list[list[str]] = []
    for run in runs:
        value = value_of(run.result, metric) if metric else None
        text = "" if value is None else f"{value:.1%}" if metric == SUCCESS else f"{value:.4g}"
        rows.append([run.setting or "(as given)", str(run.seed), run.state, text, str(run.folder)])
    return rows


RUN_HEADER = ("setting", "seed", "state", "value", "folder")


def failures(runs: Sequence[SweptRun]) -> list[list[str]]:
    """Return a row per failed run: its setting and seed, and the reason of the failure."""
    failed = [run for run in runs if run.reason]
    return [[f"{run.setting}, seed {run.seed}" if run.setting else f"seed {run.seed}", run.reason] for run in failed]


FAILURE_HEADER = ("failed run", "reason")


def sweep_report(title: str, subtitle: str, runs: Sequence[SweptRun], metric: str, command: str) -> Report:
    """Return the page of a sweep: plot, table of settings, table of runs."""
    setting_summaries = summaries(runs, metric)
    report = Report(title=title, subtitle=subtitle)
    done = sum(run.state == FINISHED for run in runs)
    report.cards.append(Card("runs finished", f"{done} of {len(runs)}"))
    header, rows = table(setting_summaries, metric)
    if any(each.values for each in setting_summaries):
        values = {each.setting or "(as given)": list(each.values.values()) for each in setting_summaries}
        intervals = {
            each.setting or "(as given)": each.interval for each in setting_summaries if each.interval is not None
        }
        svg = swept_settings(values, intervals, metric)
        caption = "Circles are seeds, diamonds their means, bars the pooled 95 % interval."
        report.sections.append(Section("Settings", caption, svg=svg))
    report.sections.append(Section("Table", CAPTION, header=header, rows=rows))
    report.sections.append(Section("Runs", header=RUN_HEADER, rows=run_rows(runs, metric)))
    if failed := failures(runs):
        report.sections.append(Section("Failed runs", header=FAILURE_HEADER, rows=failed))
    report.details["command"] = command
    return report


def _evaluation(result: Mapping[str, Any]) -> EvaluationResult | None:
    """Return the evaluation, without exploration noise, of the policy that a run ended with, None without one."""
    policies = {**{name: result[name] for name in JUDGED if name in result}, **result.get("verdicts", {})}
    policy = next(iter(policies.values()), None)
    if not isinstance(policy, Mapping) or "per_episode" not in policy.get("deterministic", {}):
        return None
    return EvaluationResult.from_json(policy["deterministic"])


def _entry(result: Mapping[str, Any], path: str) -> float | None:
    entry: Any = result
    for part in path.split("."):
        entry = entry.get(part) if isinstance(entry, Mapping) else None
    return float(entry) if isinstance(entry, int | float) and not isinstance(entry, bool) else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _pooled(results: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    evaluations = [each for result in results if (each := _evaluation(result)) is not None]
    return (
        wilson(sum(each.successes for each in evaluations), sum(each.episodes for each in evaluations))
        if evaluations
        else None
    )


def _paired(
    first: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], metric: str
) -> Paired | None:
    """Return other - first over the seeds that both have finished, None unless all their episodes pair."""
    pairs = [(_evaluation(first[seed]), _evaluation(other[seed])) for seed in other if seed in first]
    outcomes: list[tuple[np.ndarray, np.ndarray]] = []
    for base, each in pairs:
        if base is None or each is None or base.world != each.world or not np.array_equal(base.seeds, each.seeds):
            return None
        outcomes.append((base.success, each.success) if metric == SUCCESS else (base.returns, each.returns))
    if not outcomes or metric not in (SUCCESS, RETURN):
        return None
    joined = [np.concatenate(each) for each in zip(*outcomes, strict=True)]
    return (compare_paired if metric == SUCCESS else compare_returns)(joined[0], joined[1])
