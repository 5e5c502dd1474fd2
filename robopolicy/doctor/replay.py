"""Replay of recorded actions in the world from the recorded seeds: it must reproduce the data, or the cause is searched
for.

A world repeats a recording to about 1e-6 standard deviations, so almost any convention error shows. The error whose
correction makes the replay exact again is the explanation. Success and length of the episodes are compared as well.

Axes: E episode, T step, A action dimension, B row of the world.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import NonFiniteError
from robopolicy.core.finite_values import element_names, join_names
from robopolicy.core.progress import progress
from robopolicy.core.vectors import StateVector
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health, name_factor
from robopolicy.doctor.motion import (
    LATEST,
    Explanation,
    Hypothesis,
    Motion,
    Score,
    action_hypotheses,
    explain_exactly,
    explain_nearly,
    long_shifts,
    observations_early,
    rate_hypotheses,
    report,
    scaled_actions,
    short_shifts,
)
from robopolicy.doctor.needed import explain_needed, needed_actions, only_some, single_actions, solve_step
from robopolicy.doctor.recording import spikes, stopped_short, truncated
from robopolicy.doctor.sensors import SensorRecording, despike, explain_columns, faulty_sensors, inconsistent_sensors

REMEDY = "Same initial states, other motion: control rate, substeps, action units or order differ from the recording."
LABELS = "Correct next.success, or open the world with the success criterion of the recording."
TOLERANCE = 0.01
"""Tolerance in standard deviations of the data within which a replay follows the recording."""
FOLLOWING = 0.8
"""Fraction of episodes that must follow; contact is chaotic, and a few episodes may diverge late."""
EARLY = 15
"""Number of steps within which chaos cannot have grown: divergence here has a cause."""
WINDOW = 30
"""Number of steps on which exact explanations are evaluated."""
ENOUGH = 12
"""Minimum number of agreeing frames, over all episodes, for an exact explanation."""
SHORT = 6
"""Number of steps on which approximate explanations are evaluated, before small errors have grown."""
SEEDLESS = (
    "The world ignores its seed (does it use a global random generator?): make reset(seed=) determine the initial "
    "state. Until then episodes cannot be replayed, and paired comparisons are invalid."
)


@dataclass(frozen=True)
class Ends:
    """State of the world after an episode's last recorded action: success, ended [E] bool; ran: [E] steps."""

    success: np.ndarray
    ended: np.ndarray
    ran: np.ndarray


def play_to_ends(world: World, seeds: np.ndarray, actions: np.ndarray, lengths: np.ndarray) -> Ends:
    """Play actions [E, T, A] from seeds [B], and evaluate each episode after its own length [E]."""
    rows, position = len(lengths), 0
    success, is_ended = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
    ran = np.zeros(rows, dtype=int)
    world.reset(seeds=seeds)
    for length in np.unique(lengths):
        part = np.zeros((world.batch_size, length - position, actions.shape[-1]))
        part[:rows] = actions[:, position:length]
        step, position = world.step(part), int(length)
        ran += step.valid[:rows].sum(1)
        finishing = lengths == length
        success[finishing], is_ended[finishing] = step.success[:rows][finishing], step.ended[:rows][finishing]
    return Ends(success, is_ended, ran)


def check_ends(episodes: Episodes, chosen: np.ndarray, ends: Ends, follows: np.ndarray, horizon: int) -> list[Finding]:
    """Compare the ends of the replayed episodes `chosen` [E]; follows: [E] bool, whether the motion reproduces the
    recording.
    """
    findings = _check_success(episodes, chosen, ends, follows)
    lengths = episodes.lengths.cpu().numpy()
    short = follows & ~ends.ended & ~ends.success & (lengths[chosen] < (horizon or np.inf))
    if short.any():
        stopped_episodes = set(np.flatnonzero(stopped_short(episodes, horizon)).tolist()) - set(
            chosen[follows].tolist()
        )
        indices = np.array(sorted({*chosen[short].tolist(), *stopped_episodes}))
        findings.append(truncated(indices, lengths, len(episodes), horizon))
    ends_early = follows & (ends.ran < lengths[chosen])
    if ends_early.any():
        first = int(np.flatnonzero(ends_early)[0])
        text = (
            f"the world ends {ends_early.sum()} of {len(chosen)} episodes earlier than the recording (episode "
            f"{chosen[first]}: {ends.ran[first]} of {lengths[chosen[first]]} steps)"
        )
        remedy = "The world stops at success or has another time limit: set world.options as in the recording."
        findings.append(Finding("ends of episodes", Health.WARNING, text, remedy))
    return findings


def _check_success(episodes: Episodes, chosen: np.ndarray, ends: Ends, follows: np.ndarray) -> list[Finding]:
    if episodes.success is None:
        return []
    data_success = episodes.success[chosen].cpu().numpy()
    differ = data_success != ends.success
    agree = float(1 - differ.mean())
    text = f"{agree:.0%} of {len(chosen)} replays end like the recording"
    labels = differ & follows
    if labels.sum() > max(1, 0.05 * len(chosen)) and labels.sum() >= 0.5 * differ.sum():
        false_failures, false_successes = (
            _numbers(chosen[labels & ~data_success]),
            _numbers(chosen[labels & data_success]),
        )
        parts = [f"labelled as failed, but they succeed: episodes {false_failures}"] if false_failures else []
        parts += [f"labelled as success, but they fail: episodes {false_successes}"] if false_successes else []
        text = f"{text}; their motion matches the recording, so the success labels are wrong ({'; '.join(parts)})"
        return [Finding("success labels", Health.BAD, text, LABELS)]
    agrees = agree > 0.95 or (len(chosen) < 20 and agree >= 1 - 1 / len(chosen))
    return [
        Finding("replayed success", Health.GOOD if agrees else Health.BAD, text, "" if agrees else REMEDY),
    ]


def _numbers(values: Sequence[int] | np.ndarray) -> str:
    return join_names([str(value) for value in values])


@dataclass(frozen=True)
class Played:
    """Result of a replay: frames [E, T + 1, S], success [E] bool at the end."""

    frames: np.ndarray
    success: np.ndarray


class Replayer:
    """Replays motions of E <= B episodes in a world of B rows.

    episodes: data whose vector fields are compared; chosen: their indices [E]. Columns are scaled by their spread over
    all the data, so errors are in standard deviations.
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
        action = self.spec.action
        self.low, self.high = (
            np.broadcast_to(bound, action.shape).astype(float) for bound in (action.low, action.high)
        )

    def play(self, motion: Motion) -> Played:
        """Play the actions from the recorded initial states; an unknown first action is solved from the frames after
        it.
        """
        actions = motion.actions
        for step in range(int(np.isnan(actions[0]).any(-1).sum())):
            actions = actions.copy()
            actions[:, step] = np.where(np.isfinite(self.low + self.high), (self.low + self.high) / 2, 0.0)
            steps, target = np.full(len(actions), step), motion.frames[:, step + 1]
            actions[:, step] = solve_step(actions, steps, target, self.frames, self.scale, (self.low, self.high))
        return self._run(actions)

    def frames(self, actions: np.ndarray) -> np.ndarray:
        """Play actions [E, T, A] from the recorded initial states and return the frames [E, T + 1, S]."""
        return self._run(actions).frames

    def ignore(self, columns: list[int]) -> None:
        """Exclude elements from all comparisons from now on."""
        self.scale[columns] = np.inf

    def recorded(self, motion: Motion, played: "Played") -> SensorRecording:
        """Combine a motion with the replayed frames for comparison."""
        return SensorRecording(motion.frames, played.frames, motion.known, self.scale, self.names)

    def errors(self, motion: Motion, played: Played) -> np.ndarray:
        """Return |played - recorded| in standard deviations, [E, T + 1, S]; 0 where the recording is not known."""
        difference = np.abs(played.frames - motion.frames) / self.scale
        return np.where(motion.known[..., None], difference, 0.0)

    def judge(self, motion: Motion) -> Score:
        """Play a motion and compare it with the recorded frames; an error of 1 is no better than not moving."""
        if not motion.known[:, 2:].any():
            return Score(np.inf, False)
        try:
            error = self.errors(motion, self.play(motion))
        except NonFiniteError:
            return Score(np.inf, False)
        follows = error.max((1, 2)) < TOLERANCE
        enough = motion.known[:, 2:].sum() >= ENOUGH
        displacement = np.abs(motion.frames - motion.frames[:, :1]) / self.scale
        size, total = ((np.minimum(part, 3.0)[motion.known]).sum() for part in (error, displacement))
        return Score(float(size / max(total, 1e-9)), bool(enough and follows.mean() >= FOLLOWING))

    def repeats(self) -> bool:
        """Whether two resets with the same seeds give the same initial state."""
        first_start = {
            key: np.copy(frames) for key, frames in self.world.reset(seeds=self.seeds).items() if key in self.keys
        }
        second_start = self.world.reset(seeds=self.seeds)
        return all(np.allclose(frames, second_start[key], rtol=0, atol=1e-6) for key, frames in first_start.items())

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


def check_replay(episodes: Episodes, world: World) -> list[Finding]:
    """Play recorded actions open-loop from the recorded seeds; where the world diverges, search for the cause."""
    if episodes.seeds is None:
        text = "the dataset has no seeds, so its initial states cannot be reproduced"
        return [Finding("replay", Health.UNKNOWN, text, "Replay needs data recorded by 'robopolicy collect'.")]
    indices = _chosen(episodes, world.batch_size)
    replayer = Replayer(world, episodes, indices)
    replay = replayer.play(replayer.motion)
    glitches, motion = _without_spikes(replayer, replay)
    lengths = episodes.lengths[indices].cpu().numpy()
    ends = play_to_ends(world, replayer.seeds, motion.actions, lengths)
    motion = _until_end(replayer, motion, replay, ends)
    findings, corrected = _check_columns(replayer, motion, replayer.errors(motion, replay))
    findings = [*glitches, *findings]
    if corrected is None:
        return findings
    if corrected is not motion:
        motion, replay = corrected, replayer.play(corrected)
    error = replayer.errors(motion, replay).max(-1)
    findings += _check_motion(replayer, motion, error, indices, episodes.actions.cpu().numpy())
    return findings + check_ends(episodes, indices, ends, (error < TOLERANCE).all(1), world.spec.horizon)


def _chosen(episodes: Episodes, rows: int) -> np.ndarray:
    """Return the indices of at most `rows` episodes, spread over the data; those with spikes come first."""
    rows = min(rows, len(episodes))
    spiked_episodes = sorted(
        {episode for episodes_of_spike in spikes(episodes).values() for episode in episodes_of_spike}
    )[: max(rows // 2, 1)]
    even = np.linspace(0, len(episodes) - 1, rows).round().astype(int).tolist()
    spare = (episode for episode in (*even, *range(len(episodes))) if episode not in spiked_episodes)
    return np.array(sorted({*spiked_episodes, *itertools.islice(dict.fromkeys(spare), rows - len(spiked_episodes))}))


def _without_spikes(replayer: Replayer, played: Played) -> tuple[list[Finding], Motion]:
    """Find and remove spikes, unless elements differ in a simpler way: a swapped element may look like spikes."""
    motion, window = replayer.motion, replayer.motion.cut(WINDOW)
    world_frames = played.frames[:, : window.frames.shape[1]]
    if (
        explain_columns(window.frames, world_frames, window.known, replayer.scale, replayer.names, replayer.groups)
        is not None
    ):
        return [], motion
    findings, frames = despike(replayer.recorded(motion, played))
    return findings, replace(motion, frames=frames)


def _until_end(replayer: Replayer, motion: Motion, played: Played, ends: Ends) -> Motion:
    """Exclude frames after the world has ended episodes, if these follow the recording until then."""
    before = np.arange(motion.known.shape[1]) <= ends.ran[:, None]
    shortened = replace(motion, known=motion.known & before)
    follows = (replayer.errors(shortened, played) < TOLERANCE).all((1, 2))
    return shortened if follows.mean() >= FOLLOWING else motion


def _check_columns(replayer: Replayer, motion: Motion, errors: np.ndarray) -> tuple[list[Finding], Motion | None]:
    """Compare the initial states, and find observation elements that are swapped, flipped, scaled or badly measured.

    errors: [E, T + 1, S]. Returns findings and the motion to continue with, corrected if necessary; None if the initial
    states cannot be explained.
    """
    window, error = motion.cut(WINDOW), errors.max(-1)
    start = float(np.median(error[:, 0]))
    off = start >= TOLERANCE
    if not off and not _diverging(error[:, : WINDOW + 1]):
        return [_agreement("start of episodes", start)], motion
    replay = replayer.play(window)
    explanation = explain_columns(
        window.frames, replay.frames, window.known, replayer.scale, replayer.names, replayer.groups
    )
    if explanation is not None:
        findings, mend = explanation
        health = _agreement("start of episodes", start) if not off else None
        return [*([health] if health else []), *findings], replace(motion, frames=mend(motion.frames))
    full_replay = replayer.play(motion)
    findings, faulty_columns = faulty_sensors(replayer.recorded(motion, full_replay))
    if faulty_columns:
        replayer.ignore(faulty_columns)
        other_findings, corrected = _check_columns(replayer, motion, replayer.errors(motion, full_replay))
        return [*findings, *other_findings], corrected
    if not off:
        return [_agreement("start of episodes", start)], motion
    if not replayer.repeats():
        finding = _agreement("start of episodes", start, SEEDLESS)
        text = f"{finding.measured}, and the world starts differently each time with the same seeds"
        return [replace(finding, measured=text)], None
    at_start = np.zeros_like(window.known)
    at_start[:, 0] = True
    partly = explain_columns(window.frames, replay.frames, at_start, replayer.scale, replayer.names, replayer.groups)
    if partly is not None:
        findings, mend = partly
        return findings, replace(motion, frames=mend(motion.frames))
    for shift in (observations_early(steps) for steps in range(1, LATEST + 1)):
        if replayer.judge(shift.mend(window)).exact:
            reason = "the world reaches the first frame later"
            return [Finding(shift.check, Health.BAD, f"{shift.text}: {reason}", shift.remedy)], shift.mend(motion)
    findings, faulty_columns = inconsistent_sensors(replayer.recorded(motion, full_replay))
    if faulty_columns:
        replayer.ignore(faulty_columns)
        return findings, motion
    remedy = (
        "Seeds or task version differ from the recording, or observations have other units: episodes cannot be "
        "replayed."
    )
    return [_agreement("start of episodes", start, remedy)], None


def _check_motion(
    replayer: Replayer, motion: Motion, error: np.ndarray, chosen: np.ndarray, all_actions: np.ndarray
) -> list[Finding]:
    """Compare the motion, given errors [E, T + 1] after equal initial states, and explain where it differs.

    chosen: [E], indices of the episodes in the data; all_actions: [N, A], the data's.
    """
    diverged = error >= TOLERANCE
    leaves, when = np.asarray(diverged.any(1)), np.asarray(diverged.argmax(1))
    is_early = leaves & (when <= EARLY)
    finding = _agreement("replayed motion", float(np.median(error.max(1))), REMEDY)
    if finding.health is Health.GOOD:
        return _check_few(replayer, motion, leaves, when, chosen, finding)
    median_step = int(np.median(when[leaves]))
    explanations = _explain(replayer, motion, max(WINDOW, median_step + EARLY), all_actions)
    if explanations:
        return [finding, *explanations]
    if not is_early.any():
        text = f"follows the data for {median_step} steps, then diverges"
        remedy = (
            "Chaotic contact can cause this, and so can small differences in version or physics: the data cannot "
            "tell which."
        )
        return [Finding("replayed motion", Health.WARNING, text, remedy)]
    reason = "no single error of sign, order, scale, timing or rate explains it"
    return [replace(finding, measured=f"{finding.measured}; {reason}")]


def _check_few(
    replayer: Replayer, motion: Motion, leaves: np.ndarray, when: np.ndarray, chosen: np.ndarray, finding: Finding
) -> list[Finding]:
    """Examine the diverging episodes [E] bool, from frame `when` [E] on, when most of the data is correct."""
    is_early = leaves & (when <= EARLY)
    single_findings: list[Finding] = []
    if leaves.any():
        bounds = (replayer.low, replayer.high)
        requirement = needed_actions(motion, replayer.frames, replayer.scale, bounds, rounds=4)
        single_findings = single_actions(requirement, element_names(replayer.spec.action, "action"), chosen)
    if is_early.any():
        numbers = join_names([str(i) for i in chosen[is_early]])
        text = f"{is_early.sum()} of {is_early.size} episodes diverge early: {numbers}"
        remedy = "Most of the data is correct: check only these episodes, or exclude them."
        health = Health.WARNING if is_early.mean() < 1 - FOLLOWING else Health.BAD
        return [Finding("replayed motion", health, text, remedy), *single_findings]
    late_text = (
        f"; {leaves.sum()} of {leaves.size} diverge late, as contact causes"
        if leaves.any() and not single_findings
        else ""
    )
    return [replace(finding, measured=finding.measured + late_text), *single_findings]


def _explain(replayer: Replayer, motion: Motion, steps: int, all_actions: np.ndarray) -> list[Finding]:
    """Search for exact explanations of the first `steps` steps, then for approximate ones of the first few.

    all_actions: [N, A], the data's.
    """
    field, window = replayer.spec.action, motion.cut(steps)
    largest = np.abs(motion.actions).max((0, 1))
    hypotheses = [*action_hypotheses(field, largest), *short_shifts(), *rate_hypotheses(replayer.spec.fps)]
    names = element_names(field, "action")
    with progress("testing explanations", 2 * len(hypotheses)) as advance:

        def judge(changed: Motion) -> Score:
            advance()
            return replayer.judge(changed)

        exactly, nearly = "replays follow the recording", "replays still miss {error:.0%} of the motion"
        if explanations := explain_exactly(window, [*hypotheses, *long_shifts()], judge, 1):
            return report(explanations, exactly, nearly)
        requirement = needed_actions(window, replayer.frames, replayer.scale, (replayer.low, replayer.high))
        if related := explain_needed(requirement, names, replayer.names, all_actions):
            return related
        if explanations := explain_exactly(window, hypotheses, judge) or _other_scale(replayer, window):
            return report(explanations, exactly, nearly)
        if related := only_some(requirement, names):
            return related
        return report(explain_nearly(motion.cut(SHORT), hypotheses, judge), exactly, nearly)


def _other_scale(replayer: Replayer, window: Motion) -> list[Explanation]:
    """Search for an unusual scale factor common to all actions; [] unless it explains the motion."""
    from scipy.optimize import minimize_scalar

    def error(logarithm: float) -> float:
        return replayer.judge(scaled_actions(float(np.exp(logarithm)))(window.cut(SHORT))).error

    grid = np.linspace(-1.5, 1.5, 16)
    nearest_value, step = grid[np.argmin([error(value) for value in grid])], grid[1] - grid[0]
    options = {"xatol": 1e-6, "maxiter": 40}
    result = minimize_scalar(
        error, bounds=(nearest_value - step, nearest_value + step), method="bounded", options=options
    )
    factor = float(np.exp(result.x))
    corrected = scaled_actions(factor)(window)
    remedy = "Divide by this factor in the data, or set the correct unit in the recorder."
    hypothesis = Hypothesis("action scale", f"every action is {name_factor(factor)}", remedy, scaled_actions(factor))
    score = replayer.judge(corrected)
    return [Explanation((hypothesis,), corrected, score)] if score.exact else []


def _diverging(error: np.ndarray) -> bool:
    """Whether too many episodes leave the recording, given errors [E, T + 1]."""
    return float((error.max(1) < TOLERANCE).mean()) < FOLLOWING


def _agreement(check: str, error: float, remedy: str = "") -> Finding:
    health = Health.GOOD if error < TOLERANCE else Health.BAD
    text = f"differs from the data by {error:.2g} standard deviations"
    return Finding(check, health, text, "" if health is Health.GOOD else remedy)


def _motion(episodes: Episodes, columns: np.ndarray, chosen: np.ndarray) -> Motion:
    """Stack the chosen episodes, padded with their last action and frame."""
    lengths = episodes.lengths[chosen].cpu().numpy()
    starts, frame_starts = (values[chosen].cpu().numpy() for values in (episodes.starts, episodes.frame_starts))
    time = np.arange(int(lengths.max()) + 1)
    frame_steps = np.minimum(time, lengths[:, None])
    steps = starts[:, None] + np.minimum(time[:-1], lengths[:, None] - 1)
    valid = time <= lengths[:, None]
    if episodes.final_known is not None:
        valid[~episodes.final_known[chosen].cpu().numpy()[:, None] & (time == lengths[:, None])] = False
    actions = episodes.actions.cpu().numpy()[steps].astype(float)
    return Motion(actions, columns[frame_starts[:, None] + frame_steps].astype(float), valid)
