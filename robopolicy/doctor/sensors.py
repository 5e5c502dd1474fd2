"""Sensors at fault: elements of the observation that are dead, stuck, late, noisy, or wrong for single frames.

The world plays the recorded actions; where all else goes as recorded, an element that differs was measured wrongly.
Axes: E episode, T step, S observation element.
"""

from dataclasses import dataclass

import numpy as np

from robopolicy.core.finite_values import listed
from robopolicy.doctor.columns import TOLERANCE, near
from robopolicy.doctor.findings import Finding, Health

SPIKE, BRIEF = 0.2, 3
"""Standard deviations by which a spike leaves a motion that goes on unmoved, and for how many frames at most."""
RARE = 0.1
"""Share of the frames up to which they are spikes; more of them have another reason."""
LATEST = 8
"""Frames by which a sensor may be late."""
REMEDY = "This element was not measured at the time of its frame: look at the sensor, its driver and its queue."


@dataclass(frozen=True)
class Recorded:
    """What was recorded and what the world has shown for the same actions.

    frames, shown: [E, T + 1, S]; known: [E, T + 1] bool, frames to compare; scale: [S] standard deviations; names: of
    the S elements.
    """

    frames: np.ndarray
    shown: np.ndarray
    known: np.ndarray
    scale: np.ndarray
    names: tuple[str, ...]

    @property
    def error(self) -> np.ndarray:
        """|shown - recorded| in standard deviations, [E, T + 1, S]; 0 where not known."""
        return np.where(self.known[..., None], np.abs(self.shown - self.frames) / self.scale, 0.0)


def mend_spikes(recorded: Recorded) -> tuple[list[Finding], np.ndarray]:
    """Find elements that leave the world's motion for a few frames and come back to it; return mended frames, too.

    A motion that goes on as if nothing had been is not an action's fault. Elements that are late look alike where they
    seldom move; those are left to `faulty_sensors`.
    """
    error = recorded.error
    brief = _brief(error.max(-1) >= TOLERANCE, recorded.known)
    if brief.sum() > RARE * recorded.known.sum():
        return [], recorded.frames
    wrong = brief[..., None] & (error >= SPIKE)
    texts, frames = [], recorded.frames.copy()
    for column in np.flatnonzero(wrong.any((0, 1))):
        here = wrong[..., column]
        if _late(recorded, int(column)):
            continue
        episodes = [str(index) for index in np.flatnonzero(here.any(1))]
        size = float(error[..., column][here].max())
        texts.append(
            f"'{recorded.names[column]}' in {here.sum()} frames of {len(episodes)} episodes, by up to {size:.3g}"
        )
        frames[..., column] = np.where(brief, recorded.shown[..., column], frames[..., column])
    if not texts:
        return [], recorded.frames
    text = f"leaves the motion for single frames and comes back: {listed(texts)} standard deviations"
    remedy = "A sensor or driver wrote wrong numbers there: leave these frames' episodes out, or mend them."
    return [Finding("spikes", Health.BAD, text, remedy)], frames


def faulty_sensors(recorded: Recorded) -> tuple[list[Finding], list[int]]:
    """Find dead, late and stuck elements; return findings and the elements' numbers, which nothing can mend.

    An element is dead if the data holds one number where the world begins with many. All else needs a witness: another
    element that moves and agrees.
    """
    agrees, moves = _agreement(recorded), _moving(recorded)
    witness = bool((agrees & moves).any())
    found: dict[str, list[str]] = {"dead": [], "late": [], "stuck": []}
    lost: list[int] = []
    delays = {column: _late(recorded, int(column)) for column in np.flatnonzero(moves)}
    if _all_late(recorded, delays):
        delays = {}
    for column in np.flatnonzero(moves & (recorded.error >= TOLERANCE).any((0, 1))):
        name, values = f"'{recorded.names[column]}'", recorded.frames[..., column][recorded.known]
        starts = recorded.shown[:, 0, column]
        late = delays.get(column, 0)
        if np.ptp(values) == 0 and (witness or np.ptp(starts) > 0):
            found["dead"].append(f"{name} (always {values[0] + 0.0:.4g})")
        elif witness and late:
            found["late"].append(f"{name} by {late} {'step' if late == 1 else 'steps'}")
        elif witness and not agrees[column] and _stuck(recorded, int(column)):
            found["stuck"].append(name)
        else:
            continue
        lost.append(int(column))
    texts = {
        "dead": ("dead sensor", "never changes in the data, though it does in the world: "),
        "late": ("late sensor", "shows what was so earlier: "),
        "stuck": ("stuck sensor", "keeps its last value while the world's goes on: "),
    }
    findings = [
        Finding(texts[kind][0], Health.BAD, texts[kind][1] + listed(items), REMEDY)
        for kind, items in found.items()
        if items
    ]
    return findings, lost


def unlike_the_rest(recorded: Recorded) -> tuple[list[Finding], list[int]]:
    """Name elements that differ in a way that nothing explains, where at least as many others that move agree."""
    agrees, moves = _agreement(recorded), _moving(recorded)
    odd = np.flatnonzero(~agrees)
    if not len(odd) or (agrees & moves).sum() < len(odd):
        return [], []
    texts = []
    for column in odd:
        error = recorded.error[..., column][recorded.known]
        texts.append(f"'{recorded.names[column]}' by {np.median(error):.2g} standard deviations")
    text = f"differs from the world in no way that is known, while all other elements agree: {listed(texts)}"
    remedy = "Noise, another zero point in each episode, or another quantity: compare it with the world's by eye."
    return [Finding("unlike sensor", Health.BAD, text, remedy)], odd.tolist()


def _agreement(recorded: Recorded) -> np.ndarray:
    """Return [S] bool: elements that agree with the world in nearly every frame."""
    known = recorded.known
    first = np.zeros_like(known)
    first[:, 0] = known[:, 0]
    x = recorded.frames[known]
    y = recorded.shown[known]
    start = first[known]
    return np.array([near(x[:, i], y[:, i], recorded.scale[i], start) for i in range(x.shape[1])], dtype=bool)


def _moving(recorded: Recorded) -> np.ndarray:
    """Return [S] bool: elements that move within episodes of the world, by more than rounding."""
    shown = np.where(recorded.known[..., None], recorded.shown, recorded.shown[:, :1])
    spread = np.maximum(shown.reshape(-1, shown.shape[-1]).std(0), 1e-6)
    return (np.ptp(shown, axis=1) > 10 * TOLERANCE * spread).any(0)


def _late(recorded: Recorded, column: int) -> int:
    """Return by how many steps an element [E, T + 1] follows the world's, 0 where it does not or differs nowhere."""
    if not (recorded.error[..., column] >= TOLERANCE).any():
        return 0
    delays = range(1, min(LATEST, recorded.frames.shape[1] - 2) + 1)
    return next((steps for steps in delays if _follows(recorded, column, steps)), 0)


def _follows(recorded: Recorded, column: int, steps: int) -> bool:
    """Whether an element shows in nearly every frame what the world's was `steps` frames before."""
    x, y = recorded.frames[..., column], recorded.shown[..., column]
    earlier = np.concatenate([np.repeat(y[:, :1], steps, axis=1), y[:, :-steps]], axis=1)
    near = np.abs(x - earlier) < TOLERANCE * recorded.scale[column]
    return float(near[recorded.known].mean()) > 0.98


def _all_late(recorded: Recorded, delays: dict[int, int]) -> bool:
    """Whether everything that moves is late alike: then frames and actions are shifted, and no sensor is at fault."""
    late = set(delays.values()) - {0}
    return len(late) == 1 and all(_follows(recorded, column, min(late)) for column in delays)


def _stuck(recorded: Recorded, column: int) -> bool:
    """Whether an element repeats its last value in nearly every frame in which it differs from the world's."""
    x = recorded.frames[..., column]
    y = recorded.shown[..., column]
    known = recorded.known
    wrong = (np.abs(x - y) >= TOLERANCE * recorded.scale[column]) & known
    repeats = np.zeros_like(known)
    repeats[:, 1:] = x[:, 1:] == x[:, :-1]
    return not wrong[:, 0].any() and float(repeats[wrong].mean()) > 0.98


def _brief(wrong: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the frames [E, T + 1] of runs of at most BRIEF wrong ones between sound ones."""
    brief = np.zeros_like(wrong)
    for row in range(len(wrong)):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wrong[row] & known[row], [False]]).astype(int)))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            followed = end < wrong.shape[1] and known[row, end] and not wrong[row, end]
            if begin > 0 and end - begin <= BRIEF and followed:
                brief[row, begin:end] = True
    return brief
