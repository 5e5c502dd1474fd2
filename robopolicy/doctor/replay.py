"""Plays recorded actions in the world from the recorded seeds: it must go where the data went, or the reason is found.

A world repeats a recording to about 1e-6 standard deviations, so that almost any break of convention shows, and the
break whose mending makes the replay exact again is its explanation.
"""

from dataclasses import dataclass, replace

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import NonFiniteError
from robopolicy.core.finite_values import element_names, listed
from robopolicy.core.progress import progress
from robopolicy.core.vectors import StateVector
from robopolicy.core.world import World
from robopolicy.doctor.columns import explain_columns
from robopolicy.doctor.explain import Explanation, Score, explain_exactly, explain_nearly, report
from robopolicy.doctor.findings import Finding, Health, name_factor
from robopolicy.doctor.motion import (
    Hypothesis,
    Motion,
    action_hypotheses,
    action_shifts,
    frame_shifts,
    frames_early,
    rate_hypotheses,
    scaled_actions,
)

TOLERANCE = 0.01
"""Standard deviations of the data within which a replay follows the recording."""
FOLLOWING = 0.8
"""Share of episodes that must follow; contact is chaotic, and few episodes may part ways late."""
EARLY = 15
"""Steps within which chaos cannot have grown: parting ways here has a reason."""
WINDOW = 30
"""Steps on which exact explanations are judged."""
SHORT = 6
"""Steps on which approximate ones are judged, before small errors have grown."""
REMEDY = "Same starts, other motion: control rate, substeps, action units or order differ from the recording."

SEEDLESS = (
    "The world ignores its seed (it draws from a global generator?): make reset(seed=) decide everything. Until then "
    "nothing can be replayed, and paired comparisons are not paired."
)


@dataclass(frozen=True)
class Played:
    """What the world did: frames [E, T + 1, S], success [E] bool at the end."""

    frames: np.ndarray
    success: np.ndarray


class Replayer:
    """Plays motions of E <= B episodes in a world of B rows.

    episodes: whose vector fields are compared; chosen: their indices [E]. Columns are scaled by their spread over all
    the data, so that errors are in standard deviations.
    """

    def __init__(self, world: World, episodes: Episodes, chosen: np.ndarray):
        assert episodes.seeds is not None
        self.world, self.spec = world, world.spec
        self.seeds = np.resize(episodes.seeds[chosen].cpu().numpy(), world.batch_size)
        fields = self.spec.observation
        self.keys = [key for key in StateVector.of(fields).keys if key in episodes.observation]
        self.names = tuple(name for key in self.keys for name in element_names(fields[key], key))
        self.groups = np.repeat(np.arange(len(self.keys)), [fields[key].size for key in self.keys])
        columns = np.concatenate([episodes.observation[key].cpu().numpy() for key in self.keys], axis=-1)
        largest = np.abs(columns).max(0)
        self.scale = np.maximum(np.maximum(columns.std(0), 1e-3 * largest), 1e-6)
        self.motion = _motion(episodes, columns, chosen)

    def play(self, motion: Motion) -> Played:
        """Play the actions from the recorded starts; an unknown first action is recovered from what followed it."""
        actions = motion.actions
        if np.isnan(actions[:, 0]).any():
            actions = actions.copy()
            actions[:, 0] = self._recovered(motion.frames[:, 1])
        return self._run(actions)

    def errors(self, motion: Motion, played: Played) -> np.ndarray:
        """Return |played - recorded| in standard deviations, [E, T + 1, S]; 0 where the recording is not known."""
        difference = np.abs(played.frames - motion.frames) / self.scale
        return np.where(motion.known[..., None], difference, 0.0)

    def judge(self, motion: Motion) -> Score:
        """Play a motion and compare it with the recorded frames; an error of 1 is no better than standing still."""
        if not motion.known[:, 2:].any():
            return Score(np.inf, False)
        try:
            error = self.errors(motion, self.play(motion))
        except NonFiniteError:
            return Score(np.inf, False)
        follows = error.max((1, 2)) < TOLERANCE
        moved = np.abs(motion.frames - motion.frames[:, :1]) / self.scale
        size, total = ((np.minimum(part, 3.0)[motion.known]).sum() for part in (error, moved))
        return Score(float(size / max(total, 1e-9)), bool(follows.mean() >= FOLLOWING))

    def repeats(self) -> bool:
        """Whether the world begins twice alike with the same seeds."""
        once = {key: np.copy(frames) for key, frames in self.world.reset(seeds=self.seeds).items() if key in self.keys}
        again = self.world.reset(seeds=self.seeds)
        return all(np.allclose(frames, again[key], rtol=0, atol=1e-6) for key, frames in once.items())

    def _run(self, actions: np.ndarray) -> Played:
        rows = len(actions)
        padded = np.zeros((self.world.batch_size, *actions.shape[1:]))
        padded[:rows] = actions
        first = self.world.reset(seeds=self.seeds)
        step = self.world.step(padded)
        parts = [
            np.concatenate([first[key][:rows, -1:], step.trace[key][:rows]], axis=1).astype(float) for key in self.keys
        ]
        return Played(np.concatenate(parts, axis=-1), step.success[:rows].copy())

    def _recovered(self, frames: np.ndarray) -> np.ndarray:
        """Return the actions [E, A] that lead from the starts to `frames` [E, S] in one step (Newton)."""
        field, rows = self.spec.action, len(frames)
        low, high = (np.broadcast_to(bound, field.shape).astype(float) for bound in (field.low, field.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        middle, reach = np.where(bounded, (low + high) / 2, 0.0), np.where(bounded, (high - low) / 4, 0.1)

        def respond(actions: np.ndarray) -> np.ndarray:
            return self._run(actions[:, None]).frames[:, 1] / self.scale

        actions = np.tile(middle, (rows, 1))
        at_rest = respond(actions)
        columns = [(respond(actions + step) - at_rest) / reach[i] for i, step in enumerate(np.diag(reach))]
        inverse = np.linalg.pinv(np.stack(columns, -1), rcond=1e-6)
        for _ in range(4):
            error = frames / self.scale - respond(actions)
            actions = np.clip(actions + np.einsum("eas,es->ea", inverse, error), low, high)
        return actions


def check_replay(episodes: Episodes, world: World) -> list[Finding]:
    """Play recorded actions open-loop from the recorded seeds; where the world goes elsewhere, find out why."""
    if episodes.seeds is None:
        text = "the dataset has no seeds, so its starts cannot be repeated"
        return [Finding("replay", Health.UNKNOWN, text, "Replay needs data recorded by 'robopolicy collect'.")]
    chosen = np.linspace(0, len(episodes) - 1, min(world.batch_size, len(episodes))).round().astype(int)
    replayer = Replayer(world, episodes, chosen)
    motion = replayer.motion
    played = replayer.play(motion)
    error = replayer.errors(motion, played).max(-1)
    findings, mended = _check_columns(replayer, error)
    if mended is None:
        return findings
    if mended is not motion:
        motion, played = mended, replayer.play(mended)
        error = replayer.errors(motion, played).max(-1)
    findings += _check_motion(replayer, motion, error, chosen)
    if episodes.success is not None:
        agree = float((episodes.success[chosen].cpu().numpy() == played.success).mean())
        text = f"{agree:.0%} of {len(chosen)} replays end like the recording"
        good = agree > 0.95 or (len(chosen) < 20 and agree >= 1 - 1 / len(chosen))
        health = Health.GOOD if good else Health.BAD
        findings.append(Finding("replayed success", health, text, "" if good else REMEDY))
    return findings


def _check_columns(replayer: Replayer, error: np.ndarray) -> tuple[list[Finding], Motion | None]:
    """Compare the starts, and find observation elements that are swapped, flipped or scaled.

    Returns findings and the motion to go on with, mended where needed; None if the starts cannot be explained.
    """
    motion = replayer.motion
    window = motion.cut(WINDOW)
    start = float(np.median(error[:, 0]))
    off = start >= TOLERANCE
    if not off and not _diverging(error[:, : WINDOW + 1]):
        return [_agreement("start of episodes", start)], motion
    played = replayer.play(window)
    whole = explain_columns(window.frames, played.frames, window.known, replayer.scale, replayer.names, replayer.groups)
    if whole is not None:
        findings, mend = whole
        health = _agreement("start of episodes", start) if not off else None
        return [*([health] if health else []), *findings], replace(motion, frames=mend(motion.frames))
    if not off:
        return [_agreement("start of episodes", start)], motion
    if not replayer.repeats():
        finding = _agreement("start of episodes", start, SEEDLESS)
        text = f"{finding.measured}, and the world begins otherwise each time with the same seeds"
        return [replace(finding, measured=text)], None
    at_start = np.zeros_like(window.known)
    at_start[:, 0] = True
    partly = explain_columns(window.frames, played.frames, at_start, replayer.scale, replayer.names, replayer.groups)
    if partly is not None:
        findings, mend = partly
        return findings, replace(motion, frames=mend(motion.frames))
    shifted = frames_early(window)
    if replayer.judge(shifted).exact:
        text = "observations are stored one step too early: the world reaches the first frame after the first action"
        remedy = "Align them: an action belongs to the frame it was decided on."
        return [Finding("time shift", Health.BAD, text, remedy)], frames_early(motion)
    remedy = (
        "Seeds or task version differ from the recording, or observations have other units: nothing can be replayed."
    )
    return [_agreement("start of episodes", start, remedy)], None


def _check_motion(replayer: Replayer, motion: Motion, error: np.ndarray, chosen: np.ndarray) -> list[Finding]:
    """Compare the motion, given errors [E, T + 1] after equal starts, and explain where it differs."""
    leaves, when = (error >= TOLERANCE).any(1), (error >= TOLERANCE).argmax(1)
    early = leaves & (when <= EARLY)
    finding = _agreement("replayed motion", float(np.median(error.max(1))), REMEDY)
    if finding.health is Health.GOOD:
        if early.any():
            text = f"{early.sum()} of {early.size} episodes go elsewhere: {listed([str(i) for i in chosen[early]])}"
            remedy = "Most of the data is sound: examine these episodes alone, or leave them out."
            health = Health.WARNING if early.mean() < 1 - FOLLOWING else Health.BAD
            return [Finding("replayed motion", health, text, remedy)]
        late = f"; {leaves.sum()} of {leaves.size} part ways late, as contact does" if leaves.any() else ""
        return [replace(finding, measured=finding.measured + late)]
    parted = int(np.median(when[leaves]))
    explanations = _explain(replayer, motion, max(WINDOW, parted + EARLY))
    if explanations:
        still = "replays still miss {error:.0%} of the motion"
        return [finding, *report(explanations, "replays follow the recording", still)]
    if not early.any():
        text = f"follows the data for {parted} steps, then parts from it"
        remedy = "Chaotic contact does this, and so do small differences in version or physics: the data cannot tell."
        return [Finding("replayed motion", Health.WARNING, text, remedy)]
    unknown = "no single break of sign, order, scale, time or rate explains it"
    return [replace(finding, measured=f"{finding.measured}; {unknown}")]


def _explain(replayer: Replayer, motion: Motion, steps: int) -> list[Explanation]:
    """Look for what explains the first `steps` steps exactly, then for what comes near it in the first few."""
    field, window = replayer.spec.action, motion.cut(steps)
    largest = np.abs(motion.actions).max((0, 1))
    hypotheses = [*action_hypotheses(field, largest), *action_shifts(), *frame_shifts()]
    hypotheses += rate_hypotheses(replayer.spec.fps)
    with progress("trying explanations", 2 * len(hypotheses)) as advance:

        def judge(changed: Motion) -> Score:
            advance()
            return replayer.judge(changed)

        found = explain_exactly(window, hypotheses, judge) or _other_scale(replayer, window)
        return found or explain_nearly(motion.cut(SHORT), hypotheses, judge)


def _other_scale(replayer: Replayer, window: Motion) -> list[Explanation]:
    """Search a factor that none of the usual ones is, common to all actions; [] unless it explains the motion."""
    from scipy.optimize import minimize_scalar

    def error(logarithm: float) -> float:
        return replayer.judge(scaled_actions(float(np.exp(logarithm)))(window.cut(SHORT))).error

    grid = np.linspace(-1.5, 1.5, 16)
    near, step = grid[np.argmin([error(value) for value in grid])], grid[1] - grid[0]
    options = {"xatol": 1e-6, "maxiter": 40}
    found = minimize_scalar(error, bounds=(near - step, near + step), method="bounded", options=options)
    factor = float(np.exp(found.x))
    mended = scaled_actions(factor)(window)
    remedy = "Divide by this factor in the data, or state the right unit where it is recorded."
    hypothesis = Hypothesis("action scale", f"every action is {name_factor(factor)}", remedy, scaled_actions(factor))
    score = replayer.judge(mended)
    return [Explanation((hypothesis,), mended, score)] if score.exact else []


def _diverging(error: np.ndarray) -> bool:
    """Whether too many episodes leave the recording, given errors [E, T + 1]."""
    return float((error.max(1) < TOLERANCE).mean()) < FOLLOWING


def _agreement(check: str, error: float, remedy: str = "") -> Finding:
    health = Health.GOOD if error < TOLERANCE else Health.BAD
    text = f"differs from the data by {error:.2g} standard deviations"
    return Finding(check, health, text, "" if health is Health.GOOD else remedy)


def _motion(episodes: Episodes, columns: np.ndarray, chosen: np.ndarray) -> Motion:
    """Lay the chosen episodes side by side, padded with their last action and frame."""
    lengths = episodes.lengths[chosen].cpu().numpy()
    starts, frame_starts = (values[chosen].cpu().numpy() for values in (episodes.starts, episodes.frame_starts))
    time = np.arange(int(lengths.max()) + 1)
    held = np.minimum(time, lengths[:, None])
    steps = starts[:, None] + np.minimum(time[:-1], lengths[:, None] - 1)
    known = time <= lengths[:, None]
    if episodes.final_known is not None:
        known[~episodes.final_known[chosen].cpu().numpy()[:, None] & (time == lengths[:, None])] = False
    actions = episodes.actions.cpu().numpy()[steps].astype(float)
    return Motion(actions, columns[frame_starts[:, None] + held].astype(float), known)
