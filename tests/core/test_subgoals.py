"""Sub-goals of formulas by hand, and all schedules together as the slow reference of robustness."""

import ast
from itertools import product

import numpy as np
import pytest

from robopolicy.benchmarks.small_worlds import FIELDS
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.core.subgoals import START, plan_of
from robopolicy.core.temporal import Specification


def planned(text, horizon=9):
    return plan_of(Specification(text, FIELDS, 1.0), horizon)


def goals(plan):
    return [
        (None if goal.formula is None else ast.unparse(goal.formula), goal.low, goal.high, goal.parent)
        for goal in plan.goals
    ]


def invariants(plan):
    return [(ast.unparse(each.formula), each.low, each.high, each.parent, each.until) for each in plan.invariants]


@pytest.mark.checks("TGPO-STL")
def test_goals_and_invariants_by_hand():
    plan = planned("F[1,3](x > 1) & F[3,6](x < 0) & G[0,6](x < 2)")
    assert goals(plan) == [("x > 1", 1, 3, START), ("x < 0", 3, 6, START)]
    assert invariants(plan) == [("x < 2", 0, 6, START, START)] and plan.branches == 1
    # Reach and stay: the invariant is counted from the sub-goal, and what is inside F from it, too.
    plan = planned("F[1,3]((x > 1) & G[0,2](x > 0) & F[2,4](x < -1))")
    assert goals(plan) == [("x > 1", 1, 3, START), ("x < -1", 2, 4, 0)]
    assert invariants(plan) == [("x > 0", 0, 2, 0, START)]
    # Until: the left side holds before the time of the right one.
    plan = planned("(x < 1) U[2,5] (x > 3)")
    assert goals(plan) == [("x > 3", 2, 5, START)] and invariants(plan) == [("x < 1", 0, 9, START, 0)]


@pytest.mark.checks("TGPO-STL")
def test_a_choice_opens_branches_and_negations_move_inwards():
    plan = planned("(!G[0,4](x < 1)) | (F[1,2](x > 2) & (x < 5))")
    assert plan.branches == 2 and plan.goal_branch == (0, 1)
    assert goals(plan) == [("~(x < 1)", 1, 4, START), ("x > 2", 1, 2, START)]
    assert invariants(plan) == [("x < 5", 0, 0, START, START)] and plan.invariant_branch == (1,)
    assert goals(planned("F(x > 1)")) == [("x > 1", 1, 9, START)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("G[0,3](F[0,2](x > 1))", "inside G would have to be met again"),
        ("!((x < 1) U[0,2] (x > 1))", "negated U"),
        ("G[0,3](x > 1)", "no sub-goal"),
        ("(F[0,1](x > 1)) U[0,2] (x > 1)", "left side of U"),
        ("F[20,30](x > 1)", "between the first and the last"),
        ("F[0,0](x > 1)", "between the first and the last"),
    ],
)
def test_formulas_without_a_schedule_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        planned(text)


def best_of_all_schedules(text, x):
    """The largest robustness of a schedule: the least margin of its sub-goals at their times and of its invariants."""
    specification = Specification(text, FIELDS, 1.0)
    horizon = len(x) - 1
    plan = plan_of(specification, horizon)
    frames = {STATE: np.array(x)[None, :, None]}
    margins = lambda formula: specification.margins(formula, frames, len(x))[0]  # noqa: E731
    best = -np.inf
    for branch in range(plan.branches):
        own = [place for place, of in enumerate(plan.goal_branch) if of == branch]
        for chosen in product(range(1, horizon + 1), repeat=len(own)):
            times = np.full((1, len(plan.goals)), START)
            times[0, own] = chosen
            if plan.fits(times)[0]:
                first, last = plan.spans(times)
                parts = [
                    margins(plan.goals[place].formula)[times[0, place]]
                    for place in own
                    if plan.goals[place].formula is not None
                ]
                for place, each in enumerate(plan.invariants):
                    parts += list(margins(each.formula)[first[0, place] : last[0, place] + 1])
                best = max(best, min(parts))
    return best


@pytest.mark.checks("TGPO-STL")
@pytest.mark.parametrize(
    "text",
    [
        "F[1,3](x > 0.5) & F[2,5](x < -0.5) & G[0,5](abs(x) < 1.5)",
        "F[1,2]((x > 0) & F[1,3](x < 0))",
        "F[1,3](G[0,2](x > 0))",
        "(x < 1) U[1,4] (x > 0.5)",
        "F[1,2](x > 1) | (F[2,4](x < 0) & G[1,3](x < 1))",
        "!(G[1,4](x < 0.5) | G[2,5](x > -0.5))",
        "F[1,2](F[1,2](x > 0))",
        "(x < 2) & F[1,4](abs(x) > 1)",
        "F[1,3]((x < 1) U[0,2] (x > 0.2))",
    ],
)
def test_the_best_schedule_is_the_robustness(text):
    draws = np.random.default_rng(0)
    for _ in range(25):
        x = draws.normal(size=7)
        specification = Specification(text, FIELDS, 1.0)
        expected = specification.robustness({STATE: x[None, :, None]}, np.array([7]))[0]
        assert best_of_all_schedules(text, x) == pytest.approx(expected)
