"""Schedules of timed sub-goals: uniform ones, and those that a value function prefers by Metropolis-Hastings.

A schedule gives each sub-goal of a `Plan` its time; only some allocations are feasible, and which is learned. Chains of
Metropolis-Hastings have the density exp(V(start, schedule) / temperature): the value is their energy. Source: TGPO,
arXiv:2510.00225. All random numbers are given, so that an episode depends on its seed and the values alone. Axes: R
row, M sub-goal, N schedule.
"""

from collections.abc import Callable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.subgoals import START, Plan

ScheduleValue = Callable[[Array], Array]
"""Values [R, N] of the schedules [R, N, M] of R rows."""

STEPS = 60
"""Proposals of a chain."""
TEMPERATURE = 0.1
LONGEST_MOVE = 0.2
"""Largest change of a time by a proposal, as a fraction of the sub-goal's window."""
NUMBERS = 4
"""Random numbers of a proposal: which time is moved, how far, in which direction, and whether it is accepted."""


def draw_schedules(plan: Plan, branch: int, numbers: Array) -> Array:
    """Return times [..., M] of one branch, uniform in their windows; numbers: [..., M] in [0, 1)."""
    times = np.full(numbers.shape, START, np.int64)
    for place, goal in enumerate(plan.goals):
        if plan.goal_branch[place] == branch:
            base = plan.after_parent(times, place)
            high = np.minimum(goal.high, plan.horizon - base)
            low = np.minimum(goal.low, high)
            times[..., place] = base + low + np.floor(numbers[..., place] * (high - low + 1)).astype(np.int64)
    return times


def propose(plan: Plan, times: Array, numbers: Array) -> Array:
    """Return times [R, M] with one of each row moved by up to a fraction of its window; numbers: [R, 3 or more].

    Moves up and down are equally likely, so that proposals are symmetric; a proposal may leave its window (`fits`).
    """
    of_branch = times != START
    place = np.argmax(
        of_branch.cumsum(axis=1) > (numbers[:, 0] * of_branch.sum(axis=1)).astype(np.int64)[:, None], axis=1
    )
    longest = np.array([max(1, round(LONGEST_MOVE * (goal.high - goal.low))) for goal in plan.goals])[place]
    move = 1 + np.floor(numbers[:, 1] * longest).astype(np.int64)
    proposal = times.copy()
    rows = np.arange(len(times))
    proposal[rows, place] += np.where(numbers[:, 2] < 0.5, move, -move)
    # What is counted from a sub-goal moves with it, which keeps the proposal symmetric.
    for other, goal in enumerate(plan.goals):
        if goal.parent != START:
            shift = proposal[:, goal.parent] - times[:, goal.parent]
            proposal[:, other] += np.where(of_branch[:, other], shift, 0)
    return proposal


def metropolis(
    plan: Plan, times: Array, value: ScheduleValue, numbers: Array, temperature: float = TEMPERATURE
) -> tuple[Array, Array]:
    """Return the ends [R, M] of chains that begin at times [R, M], and their values [R].

    numbers: [R, steps, NUMBERS] in [0, 1). A proposal is accepted with min(1, exp((V' - V) / temperature)) if it lies
    in its windows, else never.
    """
    current = value(times[:, None])[:, 0]
    for step in range(numbers.shape[1]):
        proposal = propose(plan, times, numbers[:, step])
        fits = plan.fits(proposal)
        proposal_value = value(np.where(fits[:, None], proposal, times)[:, None])[:, 0]
        accepted = fits & (numbers[:, step, 3] < acceptance(proposal_value, current, temperature))
        times = np.where(accepted[:, None], proposal, times)
        current = np.where(accepted, proposal_value, current)
    return times, current


def acceptance(there: Array, here: Array, temperature: float) -> Array:
    """Return the probability [R] to go to a value `there` [R] from `here` [R]."""
    return np.exp(np.minimum(0.0, (there - here) / temperature))


def sample_by_value(plan: Plan, value: ScheduleValue, numbers: Array, temperature: float = TEMPERATURE) -> Array:
    """Return schedules [R, M]: the end of a chain in each branch, of which one is chosen by exp(V / temperature).

    numbers: [R, n] in [0, 1), with n = `numbers_needed`.
    """
    size = len(plan.goals) + STEPS * NUMBERS
    ends: list[Array] = []
    values: list[Array] = []
    for place in range(plan.branches):
        part = numbers[:, place * size : (place + 1) * size]
        start = draw_schedules(plan, place, part[:, : len(plan.goals)])
        steps = part[:, len(plan.goals) :].reshape(len(part), STEPS, NUMBERS)
        end, reached = metropolis(plan, start, value, steps, temperature)
        ends.append(end)
        values.append(reached)
    energy = np.stack(values, axis=1) / temperature
    weights = np.exp(energy - energy.max(axis=1, keepdims=True)).cumsum(axis=1)
    branch = (weights <= numbers[:, -1:] * weights[:, -1:]).sum(axis=1)
    return np.stack(ends, axis=1)[np.arange(len(numbers)), branch]


def numbers_needed(plan: Plan) -> int:
    """Return the random numbers per row that `sample_by_value` reads."""
    return plan.branches * (len(plan.goals) + STEPS * NUMBERS) + 1


def best_schedules(plan: Plan, value: ScheduleValue, numbers: Array) -> Array:
    """Return the schedules [R, M] of the largest values among uniform ones; numbers: [R, N, M] in [0, 1).

    The branches take turns among the N schedules.
    """
    times = np.stack(
        [draw_schedules(plan, place % plan.branches, numbers[:, place]) for place in range(numbers.shape[1])], axis=1
    )
    return times[np.arange(len(times)), value(times).argmax(axis=1)]
