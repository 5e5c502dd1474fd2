"""Actions that a recorded motion requires, solved step by step in the world, and how the recorded ones differ.

Where a replay leaves the recording, the preceding action is wrong. Newton's method solves for the action that leads to
the recorded frame; with it the replay continues to the next wrong action. Axes: E episode, T step, A action dimension,
S observation element.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robopolicy.core.finite_values import join_names
from robopolicy.doctor.findings import Finding, Health
from robopolicy.doctor.motion import Motion

LEFT = 1e-3
"""Error in standard deviations above which a replay has left the recording; correct steps repeat to about 1e-6."""
ROUNDS, ITERATIONS = 10, 4
"""Maximum number of wrong actions solved per episode, and Newton iterations for each."""
NOTABLE = 0.05
"""Fraction of an action's spread above which it differs from the required one; EXACT: remaining error of a fit."""
EXACT = 0.02
ENOUGH = 8
"""Number of wrong steps above which a relation between recorded and required actions is not chance."""
LATEST = 8
"""Maximum lag of one action dimension, in steps."""

Play = Callable[[np.ndarray], np.ndarray]
"""Actions [E, T, A] -> frames [E, T + 1, S] from the recorded initial states."""


@dataclass(frozen=True)
class Needed:
    """Recorded, executed and required actions: [E, T, A] each.

    executed: the recorded ones clipped to the world's bounds; frames: [E, T + 1, S] as recorded; solved: [E, T] bool,
    steps up to which the replay follows the recording, so that their required action is known.
    """

    recorded: np.ndarray
    executed: np.ndarray
    actions: np.ndarray
    frames: np.ndarray
    solved: np.ndarray


def needed_actions(
    motion: Motion, play: Play, scale: np.ndarray, bounds: tuple[np.ndarray, np.ndarray], rounds: int = ROUNDS
) -> Needed:
    """Replace up to `rounds` wrong actions of each episode; scale: [S] standard deviations; bounds: lowest, highest
    [A].
    """
    actions = np.clip(motion.actions, *bounds)
    executed_actions, replaced = actions.copy(), np.zeros(actions.shape[:2], dtype=bool)
    solved = np.ones(actions.shape[:2], dtype=bool)
    given_up = np.zeros(len(actions), dtype=bool)
    first, rows = _first_wrong(motion, play(actions), scale), np.arange(len(actions))
    for _ in range(rounds):
        open_rows = (first > 0) & ~given_up
        step = np.maximum(first - 1, 0)
        given_up |= replaced[rows, step] & open_rows  # the needed action was looked for and leads elsewhere
        open_rows &= ~given_up
        if not open_rows.any():
            break
        solution = solve_step(actions, step, motion.frames[rows, step + 1], play, scale, bounds)
        actions[rows[open_rows], step[open_rows]] = solution[open_rows]
        replaced[rows[open_rows], step[open_rows]] = True
        first = _first_wrong(motion, play(actions), scale)
    for row in rows[first >= 0]:
        solved[row, max(first[row] - 1, 0) :] = False
    return Needed(motion.actions, executed_actions, actions, motion.frames, solved & motion.known[:, 1:])


def _first_wrong(motion: Motion, frames: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the first frame [E] in which an episode has left the recording, -1 if it never does."""
    error = (np.abs(frames - motion.frames) / scale).max(-1)
    diverged = (error >= LEFT) & motion.known
    return np.where(diverged.any(1), diverged.argmax(1), -1)


def solve_step(
    actions: np.ndarray,
    step: np.ndarray,
    target: np.ndarray,
    play: Play,
    scale: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return the actions [E, A] at `step` [E] that lead to the frames `target` [E, S], within `bounds` (Newton)."""
    rows, (low, high) = np.arange(len(actions)), bounds
    bounded = np.isfinite(low) & np.isfinite(high)
    reach = np.where(bounded, (high - low) / 4, 0.1)
    until = int(step.max()) + 1

    def respond(chosen: np.ndarray) -> np.ndarray:
        trial = actions[:, :until].copy()
        trial[rows, step] = chosen
        return play(trial)[rows, step + 1] / scale

    current = actions[rows, step]
    before = respond(current)
    columns = []
    for dimension, size in enumerate(reach):
        change = np.zeros_like(current)
        inward = current[:, dimension] + size > high[dimension]
        change[:, dimension] = np.where(inward, -size, size)
        columns.append((respond(current + change) - before) / change[:, dimension, None])
    inverse = np.linalg.pinv(np.stack(columns, -1), rcond=1e-6)
    best, least_error = current, np.abs(target / scale - before).max(-1)
    for _ in range(ITERATIONS):
        current = np.clip(current + np.einsum("eas,es->ea", inverse, target / scale - before), low, high)
        before = respond(current)
        error = np.abs(target / scale - before).max(-1)
        best, least_error = np.where((error < least_error)[:, None], current, best), np.minimum(error, least_error)
    return best


def explain_needed(
    needed: Needed, names: tuple[str, ...], elements: tuple[str, ...], all_actions: np.ndarray
) -> list[Finding]:
    """Describe the relation between recorded and required actions for each dimension; [] if there is none.

    elements: names of the S observation elements; all_actions: [N, A], every recorded action.
    """
    differs = _wrong(needed)
    dimensions = np.flatnonzero(differs.any((0, 1)))
    if differs.sum() < ENOUGH or not len(dimensions):
        return []
    relations = [_relation(needed, differs[..., i], int(i), elements, all_actions[:, i]) for i in dimensions]
    findings: dict[tuple[str, str], list[str]] = {}
    for i, each in zip(dimensions, relations, strict=True):
        if each is None:
            return []
        findings.setdefault((each[0], each[2]), []).append(f"'{names[i]}' {each[1]}")
    return [Finding(check, Health.BAD, join_names(texts, 6), remedy) for (check, remedy), texts in findings.items()]


def single_actions(needed: Needed, names: tuple[str, ...], episodes: np.ndarray) -> list[Finding]:
    """Report single wrong actions in an otherwise correct motion; episodes: [E], their indices in the data."""
    differs = _wrong(needed)
    texts = [
        f"'{names[i]}' of episode {episodes[row]} at step {step} is {needed.recorded[row, step, i]:.3g}, but the "
        f"motion needs {needed.actions[row, step, i]:.3g}"
        for row, step, i in zip(*differs.nonzero(), strict=True)
    ]
    remedy = "The robot did not execute these actions: exclude the episodes, or repair them."
    return [Finding("action spikes", Health.BAD, join_names(texts), remedy)] if texts else []


def only_some(needed: Needed, names: tuple[str, ...]) -> list[Finding]:
    """Report the action dimensions that differ from the required ones, when others agree."""
    differs = _wrong(needed)
    differing = differs.any((0, 1))
    if differs.sum() < ENOUGH or differing.all():
        return []
    texts = []
    for i in np.flatnonzero(differing):
        size = float(np.abs(needed.executed - needed.actions)[..., i][differs[..., i]].mean())
        texts.append(f"'{names[i]}' by {size:.2g} on average")
    text = f"only these action elements differ from what the motion needs: {join_names(texts)}"
    return [
        Finding(
            "inconsistent action", Health.BAD, text, "Check the recorder of these elements; the others are correct."
        )
    ]


def _wrong(needed: Needed) -> np.ndarray:
    """Return [E, T, A] bool: solved steps whose recorded action differs notably from the required one."""
    if not needed.solved.any():
        return np.zeros(needed.actions.shape, dtype=bool)
    spread = np.maximum(needed.actions[needed.solved].std(0), needed.executed[needed.solved].std(0))
    difference = np.abs(needed.executed - needed.actions)
    return needed.solved[..., None] & (difference > np.maximum(NOTABLE * spread, 1e-6))


def _relation(
    needed: Needed, wrong: np.ndarray, i: int, elements: tuple[str, ...], column: np.ndarray
) -> tuple[str, str, str] | None:
    """Return check, text and remedy for one dimension; wrong: [E, T] bool; column: [N], all its recorded values."""
    recorded_values, needed_values = needed.recorded[..., i], needed.actions[..., i]
    low, high = float(column.min()), float(column.max())
    span = f"{needed_values[needed.solved].min():.3g} to {needed_values[needed.solved].max():.3g}"
    if high - low < 1e-6:
        text = f"never changes in the data (always {low:.4g}), though the motion needs {span}"
        return "dead action", text, "The recorder did not record this element of the actions."
    slack = 1e-3 * (high - low)
    below = (recorded_values <= low + slack) & (needed_values < low)
    above = (recorded_values >= high - slack) & (needed_values > high)
    if (below | above)[wrong].all():
        text = f"is clipped to {low:.3g} to {high:.3g}, though the motion needs {span}"
        return "clipped actions", text, "Record the actions before they are clipped, or clip them on the robot as well."
    delay = _late_by(needed, recorded_values, needed_values)
    if delay:
        text = f"is stored {delay} {'step' if delay == 1 else 'steps'} too late"
        return "time shift", text, "Align it: an action belongs to the frame at which it was chosen."
    steps = needed.solved[:, 1:] & needed.solved[:, :-1]
    if _same(recorded_values[:, 1:], np.diff(needed_values, axis=1), steps):
        text = "contains differences from the previous action (deltas instead of absolute values)"
        return "action kind", text, "Integrate the differences, or record the command that the robot received."
    if _fit(np.diff(recorded_values, axis=1)[steps], needed_values[:, 1:][steps][:, None]) is not None:
        text = "contains a running sum (absolute values instead of deltas)"
        return (
            "action kind",
            text,
            ("Store the difference from one step to the next, or record the command that the robot received."),
        )
    return _state_in(needed, recorded_values, needed_values, elements)


def _state_in(
    needed: Needed, recorded: np.ndarray, wanted: np.ndarray, elements: tuple[str, ...]
) -> tuple[str, str, str] | None:
    """Return check, text and remedy if recorded actions [E, T] contain a state element, alone or added."""
    remedy = "Record the command that the robot received, or open the world with the same kind of action."
    rows = needed.solved
    if rows.sum() < ENOUGH:
        return None
    for frames, when in ((slice(1, None), "the next frame"), (slice(None, -1), "the same frame")):
        for k, element in enumerate(elements):
            state = needed.frames[:, frames, k][rows]
            fit = _fit(recorded[rows], state[:, None])
            if fit is not None and abs(fit[0] - 1) < EXACT:
                text = f"contains '{element}' of {when} (a reached position instead of a command)"
                return "action kind", text, remedy
    for k, element in enumerate(elements):
        state = needed.frames[:, :-1, k][rows]
        fit = _fit(recorded[rows], np.stack([state, wanted[rows]], -1))
        if fit is None or abs(fit[0]) * state.std() < NOTABLE * recorded[rows].std():
            continue
        kind = "absolute values instead of deltas" if fit[0] > 0 else "deltas instead of absolute values"
        return "action kind", f"has '{element}' {'added to' if fit[0] > 0 else 'subtracted from'} it ({kind})", remedy
    return None


def _late_by(needed: Needed, recorded: np.ndarray, wanted: np.ndarray) -> int:
    """Return the number of steps by which recorded values [E, T] lag the required ones, 0 if they do not."""
    for steps in range(1, min(LATEST, wanted.shape[1] - 1) + 1):
        both_solved = needed.solved[:, steps:] & needed.solved[:, :-steps]
        moves = both_solved & (np.abs(wanted[:, steps:] - wanted[:, :-steps]) > 1e-6)
        if moves.sum() >= ENOUGH and _same(recorded[:, steps:], wanted[:, :-steps], both_solved):
            return steps
    return 0


def _same(first: np.ndarray, second: np.ndarray, where: np.ndarray) -> bool:
    """Whether nearly all selected values [E, T] are equal, and there are enough of them."""
    if where.sum() < ENOUGH:
        return False
    is_near = np.abs(first - second)[where] < EXACT * max(float(first[where].std()), 1e-9)
    return float(is_near.mean()) > 0.95


def _fit(values: np.ndarray, features: np.ndarray) -> np.ndarray | None:
    """Return the weights [K] of a linear fit of values [n] on features [n, K], None unless it is exact."""
    spread = float(values.std())
    if len(values) < ENOUGH + features.shape[1] or spread < 1e-9 or (features.std(0) < 1e-9).any():
        return None
    design = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    weights, *_ = np.linalg.lstsq(design, values, rcond=None)
    residual = np.abs(values - design @ weights)
    return weights[:-1] if float(np.quantile(residual, 0.95)) < EXACT * spread else None
