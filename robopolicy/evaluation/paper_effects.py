"""Effects of papers' methods in published figures (assets/figures), for the register `rl.papers`.

A figure is written as

    BENCHMARK: PATH over PATH      (a method's figure, and that of what it is compared with; higher is better)
    BENCHMARK: PATH under PATH     (lower is better)

Other papers have an experiment of their own in `bench papers`, whose rule is that of `experiment_text`.

A path leads through the benchmark's JSON file, keys separated by /, and * stands for every seed. At its end are success
rates with their episodes, which are pooled over seeds, or plain numbers.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from robopolicy.core.errors import DataError, did_you_mean
from robopolicy.core.storage import resource
from robopolicy.evaluation.wilson import rate_difference
from robopolicy.rl.papers import UNBUILT, Paper, papers

ABLATIONS = "mechanisms"
"""Benchmark of single mechanisms, in which `Paper.check` names an ablation."""

EXPERIMENTS = "papers"
"""Benchmark of one small experiment for each paper."""

SEEDS = 3
"""Seeds of a complete experiment."""


@cache
def published(benchmark: str) -> Mapping[str, Any]:
    """Load the published figures of a benchmark; {} if there are none."""
    path = resource("assets", f"figures/{benchmark}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def effect(paper: Paper) -> str:
    """Describe how much better the paper's method is than what it is compared with, and whether that is significant.

    Success rates: their difference pooled over seeds with Newcombe's 95 % interval, shown if it lies above 0, reversed
    if below. Other numbers: means over seeds, shown if the worst seed with the method is better than the best one
    without. Raises DataError if `paper.figure` leads nowhere.
    """
    if paper.check:
        name, _, variant = paper.check.partition("/")
        rows = published(ABLATIONS).get("checks", {}).get(name)
        if rows is None:
            return ""
        method, baseline = rows[variant or list(rows)[-1]], next(iter(rows.values()))
        return difference_text(*([row["last deterministic"]] for row in (method, baseline)))
    if not paper.figure:
        return _experiment_of(paper) or ("no figure" if paper.status not in UNBUILT else "")
    benchmark, _, paths = paper.figure.partition(": ")
    word = "over" if " over " in paths else "under"
    figures = published(benchmark)
    if not figures:
        return ""
    method, baseline = (values_at(figures, path) for path in paths.split(f" {word} "))
    if isinstance(method[0], Mapping) and "episodes" in method[0]:
        text = difference_text(method, baseline)
    else:
        text = numbers_text([_number(each) for each in method], [_number(each) for each in baseline], word)
    return f"{text} (bench {benchmark})"


def claim_of(paper: Paper) -> str:
    """Return the claim that the paper's experiment tests, "" if it has none."""
    return published(EXPERIMENTS).get("experiments", {}).get(paper.id, {}).get("claim", "")


def reversed_effects(preset: str) -> list[str]:
    """Return one clause for each paper of an algorithm preset whose effect was measured to be reversed."""
    of_preset = [
        paper
        for paper in papers()
        if f"algorithm={preset}" in (setting.partition(".")[2] for setting in paper.settings)
        or preset in (mechanism.partition("/")[2] for mechanism in paper.mechanisms)
    ]
    effects = [(paper.id, effect(paper)) for paper in of_preset]
    return [f"{name} claims an effect that was {text}" for name, text in effects if text.startswith("reversed")]


def _experiment_of(paper: Paper) -> str:
    """Return the effect in the paper's own experiment, "" if it has none."""
    row = published(EXPERIMENTS).get("experiments", {}).get(paper.id)
    return "" if row is None else f"{experiment_text(row)} (bench {EXPERIMENTS})"


def values_at(figures: Mapping[str, Any], path: str) -> list[Any]:
    """Return the values at the end of a path, one per seed; raises DataError naming the key that is missing."""
    nodes: list[Any] = [figures]
    for key in path.split("/"):
        if key == "*":
            nodes = [value for node in nodes for value in node.values()]
            continue
        for node in nodes:
            if key not in node:
                raise DataError(f"Published figures have no '{key}' in '{path}'.{did_you_mean(key, node)}")
        nodes = [node[key] for node in nodes]
    return nodes


def difference_text(method: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> str:
    """Return verdict and difference of two success rates in points, each pooled over seeds, with its interval."""
    difference, low, high = rate_difference(method, baseline)
    verdict = "shown" if low > 0 else "reversed" if high < 0 else "no effect shown"
    return f"{verdict}: {100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def numbers_text(method: Sequence[float], baseline: Sequence[float], word: str) -> str:
    """Return verdict and means with ranges over seeds, with and without the method; word: over or under."""
    sign = 1 if word == "over" else -1
    better, worse = ([sign * each for each in values] for values in (method, baseline))
    verdict = "shown" if min(better) > max(worse) else "reversed" if max(better) < min(worse) else "no effect shown"
    means = (f"{sum(each) / len(each):.3g} ({min(each):.3g} to {max(each):.3g})" for each in (method, baseline))
    return f"{verdict}: {' against '.join(means)}"


def _number(value: Any) -> float:
    """Return a number, or the rate of a success without its number of episodes."""
    return float(value["success"] if isinstance(value, Mapping) else value)


def experiment_text(row: Mapping[str, Any]) -> str:
    """Return result and difference of a paper's experiment; no result while it has fewer than three seeds.

    row: of assets/figures/papers.json. The difference of success rates is pooled over seeds; a seed whose difference
    has the other sign, or an interval with 0, leaves the effect not shown.
    """
    seeds = list(row["seeds"].values())
    method, baseline = ([each[part]["value"] for each in seeds] for part in ("method", "baseline"))
    if all(each["identical"] for each in seeds):
        text = "no effect shown: both learned the same"
    elif isinstance(method[0], Mapping):
        text = difference_text(method, baseline)
        signs = [after["success_rate"] - before["success_rate"] for after, before in zip(method, baseline, strict=True)]
        if min(signs) <= 0 <= max(signs):
            text = f"no effect shown: {text.partition(': ')[2]}"
    else:
        text = f"{numbers_text(method, baseline, row['better'])} ({row['metric']})"
    return text if len(seeds) >= SEEDS else f"{len(seeds)} of {SEEDS} seeds so far: {text.partition(': ')[2]}"
