"""Timed sub-goals of a formula of signal temporal logic (`plan_of`): what is to be reached when, and what holds.

    timed = plan_of(Specification("F[1,3](x > 1) & F[3,6](x < 0) & G[0,6](y < 2)", fields, fps=10), horizon=60)
    timed.goals       # reach x > 1 at a time in [10, 30], x < 0 at a time in [30, 60]
    timed.invariants  # y < 2 from 0 to 60

Negations are moved inwards and every disjunction over temporal operators opens branches, one of which is followed. In a
branch each `F`, and the right side of each `U`, is a sub-goal: it is to be met exactly at a time tau from its window,
which is counted from the sub-goal that contains it. Each `G`, and the left side of each `U`, is an invariant over an
interval. A formula is then fulfilled if all sub-goals of a branch are met at their times and no invariant is violated.
`G[..](F[..](p))` has no finite set of sub-goals and is refused. Source: TGPO, arXiv:2510.00225. Times are control
steps. Axes: R row, M sub-goal of any branch.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.temporal import Specification, temporal_operator

START = -1
"""Parent of what is counted from the episode's start; as a time: not part of the row's branch."""


@dataclass(frozen=True)
class SubGoal:
    """A formula without temporal operators that is to be met at a time tau with low <= tau - tau of `parent` <= high.

    formula: None is always met (the times of what it contains are counted from it); parent: index of a sub-goal.
    """

    formula: ast.expr | None
    low: int
    high: int
    parent: int = START


@dataclass(frozen=True)
class Invariant:
    """A formula without temporal operators that holds from low to high after the time of `parent`; with `until`, the
    index of a sub-goal, only before its time.
    """

    formula: ast.expr
    low: int
    high: int
    parent: int = START
    until: int = START


@dataclass(frozen=True)
class Branch:
    """Sub-goals and invariants of one way to fulfil a formula; indices are into its own goals."""

    goals: tuple[SubGoal, ...] = ()
    invariants: tuple[Invariant, ...] = ()

    def shifted(self, count: int) -> "Branch":
        """Return the branch behind `count` other sub-goals."""

        def index(place: int) -> int:
            return place if place == START else place + count

        return Branch(
            tuple(replace(goal, parent=index(goal.parent)) for goal in self.goals),
            tuple(replace(each, parent=index(each.parent), until=index(each.until)) for each in self.invariants),
        )

    def beside(self, other: "Branch") -> "Branch":
        """Return the conjunction of two branches."""
        later = other.shifted(len(self.goals))
        return Branch(self.goals + later.goals, self.invariants + later.invariants)


@dataclass(frozen=True)
class Plan:
    """All branches of a formula; goals and invariants are those of all branches, one after the other.

    goal_branch, invariant_branch: the branch of each; branches: their number B; horizon: the last time.
    """

    goals: tuple[SubGoal, ...]
    invariants: tuple[Invariant, ...]
    goal_branch: tuple[int, ...]
    invariant_branch: tuple[int, ...]
    branches: int
    horizon: int

    def after_parent(self, times: Array, place: int) -> Array:
        """Return the times that the window of sub-goal `place` is counted from, [...], of times [..., M]."""
        parent = self.goals[place].parent
        return np.zeros(times.shape[:-1], times.dtype) if parent == START else times[..., parent]

    def fits(self, times: Array) -> Array:
        """Return whether times [..., M] lie in their windows, [...] bool; those of other branches are START."""
        result = np.ones(times.shape[:-1], dtype=bool)
        for place, goal in enumerate(self.goals):
            time = times[..., place]
            offset = time - self.after_parent(times, place)
            inside = (offset >= goal.low) & (offset <= goal.high) & (time <= self.horizon)
            result &= inside | (time == START)
        return result

    def spans(self, times: Array) -> tuple[Array, Array]:
        """Return first and last time of every invariant, [R, I] each, for times [R, M]; of other branches: empty."""
        first = np.ones((len(times), len(self.invariants)), np.int64)
        last = np.zeros_like(first)
        branch = self.branch_of(times)
        for place, each in enumerate(self.invariants):
            base = np.zeros(len(times), np.int64) if each.parent == START else times[:, each.parent]
            end = base + each.high if each.until == START else times[:, each.until] - 1
            rows = branch == self.invariant_branch[place]
            first[rows, place] = (base + each.low)[rows]
            last[rows, place] = np.minimum(end, self.horizon)[rows]
        return first, last

    def branch_of(self, times: Array) -> Array:
        """Return the branch [R] that times [R, M] belong to: the first with a sub-goal that has a time, else 0."""
        if not self.goals:
            return np.zeros(len(times), np.int64)
        return np.asarray(self.goal_branch)[(times != START).argmax(axis=1)]


def plan_of(specification: Specification, horizon: int) -> Plan:
    """Return the plan of a formula in episodes of `horizon` control steps.

    Raises ConfigError for a formula that has no finite set of sub-goals, for a branch without a sub-goal, and for
    windows beyond the horizon.
    """
    branches = _Grounding(specification, horizon).branches(_inward(specification, specification.tree, negative=False))
    goals: list[SubGoal] = []
    invariants: list[Invariant] = []
    goal_branch: list[int] = []
    invariant_branch: list[int] = []
    for number, branch in enumerate(branches):
        if not branch.goals:
            raise specification.error("it has no sub-goal: schedules need an F or a U in every branch")
        indexed_branch = branch.shifted(len(goals))
        goals += indexed_branch.goals
        invariants += indexed_branch.invariants
        goal_branch += [number] * len(indexed_branch.goals)
        invariant_branch += [number] * len(indexed_branch.invariants)
    roots = [goal for goal in goals if goal.parent == START]
    if any(goal.high < 1 or goal.low > horizon for goal in roots):
        raise specification.error(f"a sub-goal must be met between the first and the last of {horizon} control steps")
    goals = [replace(goal, low=max(goal.low, 1)) if goal.parent == START else goal for goal in goals]
    return Plan(tuple(goals), tuple(invariants), tuple(goal_branch), tuple(invariant_branch), len(branches), horizon)


class _Grounding:
    """Branches of a formula whose negations are inside; see the module."""

    def __init__(self, specification: Specification, horizon: int):
        self.specification, self.horizon = specification, horizon

    def branches(self, node: ast.expr) -> list[Branch]:
        """Return the branches of a formula that is counted from the episode's start."""
        state, rest = self._split(node)
        state_branches = [] if state is None else [Branch(invariants=(Invariant(state, 0, 0),))]
        temporal_branches = [self._temporal(each) for each in rest]
        return _conjunctions([state_branches, *temporal_branches] if state_branches else temporal_branches)

    def _temporal(self, node: ast.expr) -> list[Branch]:
        """Return the branches of a disjunction, an F, a G or a U."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return [*self.branches(node.left), *self.branches(node.right)]
        if isinstance(node, ast.Call):
            name = temporal_operator(node.func)
            assert name is not None
            low, high = self.specification.interval(node.func, name, self.horizon + 1)
            inner = node.args[0]
            return self._reached(inner, low, high) if name == "F" else self._kept(inner, low, high)
        assert isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp)
        low, high = self.specification.interval(node.left.right, "U", self.horizon + 1)
        if _is_temporal(node.left.left):
            raise self.specification.error("the left side of U must not contain F, G or U")
        meanwhile = Invariant(node.left.left, 0, self.horizon, until=0)
        return [
            replace(branch, invariants=(meanwhile, *branch.invariants))
            for branch in self._reached(node.right, low, high)
        ]

    def _reached(self, node: ast.expr, low: int, high: int) -> list[Branch]:
        """Return the branches of F[low, high](node); the sub-goal itself is the first one."""
        state, rest = self._split(node)
        goal = Branch((SubGoal(state, low, high),))
        if not rest:
            return [goal]
        return [self._inside(goal, branch) for branch in _conjunctions([*map(self._temporal, rest)])]

    @staticmethod
    def _inside(goal: Branch, inner: Branch) -> Branch:
        """Return a branch that is counted from the sub-goal `goal`, together with it."""
        inner = inner.shifted(1)
        goals = tuple(replace(each, parent=0) if each.parent == START else each for each in inner.goals)
        invariants = tuple(replace(each, parent=0) if each.parent == START else each for each in inner.invariants)
        return Branch(goal.goals + goals, invariants)

    def _kept(self, node: ast.expr, low: int, high: int) -> list[Branch]:
        """Return the only branch of G[low, high](node)."""
        state, rest = self._split(node)
        invariants = [] if state is None else [Invariant(state, low, high)]
        for each in rest:
            if not isinstance(each, ast.Call) or temporal_operator(each.func) != "G":
                raise self.specification.error(
                    "F, U or a choice of these inside G would have to be met again at every time, which has no finite "
                    "set of sub-goals"
                )
            first, last = self.specification.interval(each.func, "G", self.horizon + 1)
            (branch,) = self._kept(each.args[0], low + first, high + last)
            invariants += branch.invariants
        return [Branch(invariants=tuple(invariants))]

    def _split(self, node: ast.expr) -> tuple[ast.expr | None, list[ast.expr]]:
        """Return the conjunction of the parts without temporal operators (None if there is none), and the others."""
        if not _is_temporal(node):
            return node, []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            (first, rest), (second, more) = self._split(node.left), self._split(node.right)
            states = [state for state in (first, second) if state is not None]
            joined = ast.BinOp(states[0], ast.BitAnd(), states[1]) if len(states) == 2 else next(iter(states), None)
            return joined, [*rest, *more]
        return None, [node]


def _conjunctions(parts: Sequence[Sequence[Branch]]) -> list[Branch]:
    """Return the branches of a conjunction of formulas with these branches."""
    result: list[Branch] = []
    for combination in product(*parts):
        branch = Branch()
        for each in combination:
            branch = branch.beside(each)
        result.append(branch)
    return result


def _is_temporal(node: ast.expr) -> bool:
    return any(
        isinstance(each, ast.MatMult) or (isinstance(each, ast.Call) and temporal_operator(each.func) is not None)
        for each in ast.walk(node)
    )


def _inward(specification: Specification, node: ast.expr, *, negative: bool) -> ast.expr:
    """Return a formula with its negations moved to parts without temporal operators."""
    if not _is_temporal(node):
        return ast.UnaryOp(ast.Invert(), node) if negative else node
    match node:
        case ast.UnaryOp(op=ast.Invert()):
            return _inward(specification, node.operand, negative=not negative)
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            sides = [_inward(specification, side, negative=negative) for side in (node.left, node.right)]
            conjunction = isinstance(node.op, ast.BitAnd) != negative
            return ast.BinOp(sides[0], ast.BitAnd() if conjunction else ast.BitOr(), sides[1])
        case ast.Call(func=operator, args=[inner]):
            part = _inward(specification, inner, negative=negative)
            return ast.Call(_swapped(operator) if negative else operator, [part], [])
        case _ if negative:
            raise specification.error("a negated U has no sub-goals: write what is to hold instead")
        case ast.BinOp(left=ast.BinOp(left=first, right=operator), right=second):
            sides = [_inward(specification, side, negative=False) for side in (first, second)]
            return ast.BinOp(ast.BinOp(sides[0], ast.MatMult(), operator), ast.MatMult(), sides[1])
        case _:
            raise specification.error(f"'{ast.unparse(node)}' cannot be scheduled")


def _swapped(operator: ast.expr) -> ast.expr:
    """Return G for F and F for G, with the same interval."""
    name = ast.Name("G" if temporal_operator(operator) == "F" else "F")
    return ast.Subscript(name, operator.slice) if isinstance(operator, ast.Subscript) else name
