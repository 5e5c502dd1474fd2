"""Imagined beside real success on the same starts: what is chosen by, what counts, and when the worlds have parted."""

import numpy as np
import pytest
from evaluation_toys import LinePolicy, LineWorld

from robopolicy.core.errors import ConfigError
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.sim_vs_imagined import SimVsImagined

SEEDS = np.arange(64)


def worlds(gap: float | None = 0.2, watched: int = 64, by_real: bool = True) -> SimVsImagined:
    """An imagination in which slow policies arrive, and a real world whose episodes end too early for that."""
    return SimVsImagined(
        LineWorld(64, horizon=20), LineWorld(64, horizon=4), SEEDS, SEEDS[:watched], gap, by_real=by_real
    )


def test_the_lower_bound_of_what_is_real_is_what_is_chosen_by():
    figures = worlds().evaluate(LinePolicy(0.1), True)
    assert figures["success"] == 1.0 and 0.2 < figures["real_success"] < 0.8
    low, high = wilson(round(64 * figures["real_success"]), 64)
    assert (figures["real_low"], figures["real_high"], figures["score"]) == (low, high, low)
    assert figures["achieved"] == figures["real_success"] and figures["parted"] == 1.0
    assert figures["gap"] == pytest.approx(1 - figures["real_success"]) and 0 < figures["real_steps"] <= 4 * 64


def test_worlds_that_agree_have_not_parted():
    figures = worlds().evaluate(LinePolicy(0.2), True)
    assert figures["gap"] < 0.25 and worlds(gap=0.3).evaluate(LinePolicy(0.2), True)["parted"] == 0.0
    assert worlds(gap=None).evaluate(LinePolicy(0.05), True)["parted"] == 0.0


def test_by_imagination_alone_where_nobody_watches_or_it_is_asked_for():
    unwatched, asked = (
        worlds(watched=0).evaluate(LinePolicy(0.1), True),
        worlds(by_real=False).evaluate(LinePolicy(0.1), True),
    )
    assert set(unwatched) == {"success", "low", "high"}
    assert asked["real_success"] < asked["success"] and not {"score", "achieved"} & set(asked)


def test_a_target_is_confirmed_on_other_episodes_where_it_counts():
    asked = []

    def confirming(iteration: int, episodes: int) -> np.ndarray:
        asked.append((iteration, episodes))
        return 1000 + np.arange(episodes)

    def confirmed(watched: int, by_real: bool) -> dict[str, float]:
        imagined, real = LineWorld(64, horizon=20), LineWorld(64, horizon=4)
        both = SimVsImagined(imagined, real, SEEDS, SEEDS[:watched], 0.2, by_real=by_real, confirming=confirming)
        return both.confirm(LinePolicy(0.1), 7)

    real, imagined = confirmed(32, True), confirmed(32, False)
    assert asked == [(7, 32), (7, 64)]
    assert real["success"] < 1.0 == imagined["success"] and 0 < real["real_steps"] <= 4 * 32
    assert "real_steps" not in imagined and confirmed(0, True)["success"] == 1.0
    with pytest.raises(ConfigError, match="needs seeds for its confirmation"):
        worlds().confirm(LinePolicy(0.1), 7)
