"""Success rates in tables: pooled over seeds with a Wilson interval, and their range over seeds.

They answer different questions. A Wilson interval is the precision with which the episodes measure one trained policy;
mean and range over seeds show the variation of training. Tables name which one a column contains.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from robopolicy.evaluation.intervals import wilson

Rate = Mapping[str, float]
"""success_rate, low, high (Wilson, 95 %) and episodes."""


def rate_of(successes: int, episodes: int) -> dict[str, float]:
    """Return a success rate with its Wilson interval."""
    low, high = wilson(successes, episodes)
    return {"success_rate": successes / episodes, "low": low, "high": high, "episodes": episodes}


def successes(rate: Rate) -> int:
    """Return the number of successful episodes: `successes` of an evaluation's summary, else computed from the rate."""
    return int(rate["successes"]) if "successes" in rate else round(rate["success_rate"] * rate["episodes"])


def pooled(measured: Sequence[Rate]) -> dict[str, float]:
    """Return the success rate over all seeds' episodes."""
    return rate_of(sum(map(successes, measured)), int(sum(row["episodes"] for row in measured)))


def short(rate: Rate) -> dict[str, float]:
    """Return the summary of an evaluation without its outcomes, for tables."""
    return rate_of(successes(rate), int(rate["episodes"]))


def rate_text(rate: Rate) -> str:
    """Return a rate with its Wilson interval, in percent: "93.5 % [89.2, 96.1]"."""
    return f"{100 * rate['success_rate']:.1f} % [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"


def spread_text(rates: Iterable[float]) -> str:
    """Return mean and range over seeds, in percent: "95.3 % (93.5 to 96.5)"."""
    values = 100 * np.asarray(list(rates), dtype=float)
    if len(values) == 1:
        return f"{values[0]:.1f} % (one seed)"
    return f"{values.mean():.1f} % ({values.min():.1f} to {values.max():.1f})"


def mean_text(values: Iterable[float], digits: int) -> str:
    """Return the mean, and for several seeds the value of each in brackets."""
    numbers = [float(value) for value in values]
    each = [f"{value:.{digits}f}" for value in numbers]
    return each[0] if len(each) == 1 else f"{np.mean(numbers):.{digits}f} ({', '.join(each)})"
