"""Chains over schedules: acceptance by hand, the density that they visit, and windows that are never left."""

import numpy as np
import pytest

from robopolicy.benchmarks.small_worlds import FIELDS
from robopolicy.core.randomness import uniforms
from robopolicy.core.schedules import (
    NUMBERS,
    acceptance,
    best_schedules,
    draw_schedules,
    metropolis,
    numbers_needed,
    propose,
    sample_by_value,
)
from robopolicy.core.subgoals import START, plan_of
from robopolicy.core.temporal import Specification

TWO = "F[2,6](x > 1) & F[3,9](x < 0)"


def planned(text, horizon=12):
    return plan_of(Specification(text, FIELDS, 1.0), horizon)


@pytest.mark.checks("TGPO-STL")
def test_acceptance_by_hand():
    there, here = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.2, 0.1])
    np.testing.assert_allclose(acceptance(there, here, 0.1), [0.3679, 1.0, 1.0], atol=1e-4)


@pytest.mark.checks("TGPO-STL")
def test_a_chain_on_three_schedules_visits_them_by_the_exponential_of_their_values():
    plan = planned("F[1,3](x > 1)")
    energy = np.array([0.0, 0.1, 0.25])
    rows, steps = 4000, 60
    start = draw_schedules(plan, 0, uniforms(np.arange(rows), 1))
    draws = uniforms(np.arange(rows) + rows, steps * NUMBERS).reshape(rows, steps, NUMBERS)
    ends, values = metropolis(plan, start, lambda times: energy[times[..., 0] - 1], draws, temperature=0.1)
    visits = np.bincount(ends[:, 0], minlength=4)[1:] / rows
    np.testing.assert_allclose(visits, np.exp(energy / 0.1) / np.exp(energy / 0.1).sum(), atol=0.02)
    np.testing.assert_array_equal(values, energy[ends[:, 0] - 1])


@pytest.mark.checks("TGPO-STL")
@pytest.mark.parametrize("text", [TWO, "F[1,4]((x > 1) & F[2,3](x < 0))", "F[1,3](x > 1) | F[2,9](x < 0)"])
def test_a_schedule_outside_its_window_is_never_valued_nor_returned(text):
    plan = planned(text)

    def value(times):
        assert plan.fits(times).all()
        return times.sum(-1) / 10.0  # pulls at the upper ends

    for branch in range(plan.branches):
        drawn = draw_schedules(plan, branch, uniforms(np.arange(500), len(plan.goals)))
        assert plan.fits(drawn).all() and (plan.branch_of(drawn) == branch).all()
        own = [place for place, of in enumerate(plan.goal_branch) if of == branch]
        others = [place for place in range(len(plan.goals)) if place not in own]
        assert (drawn[:, others] == START).all()
        for place in own:  # every time of a window is drawn
            goal = plan.goals[place]
            offsets = set((drawn[:, place] - plan.after_parent(drawn, place)).tolist())
            assert offsets == set(range(goal.low, goal.high + 1))
    chosen = sample_by_value(plan, value, uniforms(np.arange(300), numbers_needed(plan)))
    assert plan.fits(chosen).all()
    again = sample_by_value(plan, value, uniforms(np.arange(300), numbers_needed(plan)))
    np.testing.assert_array_equal(chosen, again)


def test_proposals_are_symmetric():
    """From every pair of times, moves there and back are equally likely."""
    plan = planned("F[1,3]((x > 1) & F[0,2](x < 0))")
    counts = {}
    draws = uniforms(np.arange(20000), 3)
    for first in range(1, 4):
        for second in range(first, first + 3):
            times = np.full((20000, 2), (first, second))
            for moved in map(tuple, propose(plan, times, draws).tolist()):
                counts[(first, second), moved] = counts.get(((first, second), moved), 0) + 1
    inside = {here for here, _ in counts}
    for (here, there), count in counts.items():
        if there in inside:
            assert abs(count - counts.get((there, here), 0)) < 300


@pytest.mark.checks("TGPO-STL")
def test_the_best_of_several_has_the_largest_value_and_a_choice_follows_it():
    plan = planned("F[1,3](x > 1) | F[2,9](x < 0)")
    value = lambda times: np.where(times[..., 1] == START, -5.0, times[..., 1] / 10.0)  # noqa: E731
    draws = uniforms(np.arange(50), 64 * 2).reshape(50, 64, 2)
    best = best_schedules(plan, value, draws)
    assert (best[:, 0] == START).all() and (best[:, 1] == 9).mean() > 0.9 and best[:, 1].min() >= 7
    chosen = sample_by_value(plan, value, uniforms(np.arange(50), numbers_needed(plan)))
    assert (plan.branch_of(chosen) == 1).all()
