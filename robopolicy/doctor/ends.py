"""How episodes end: success and length in the recording, and in the world that plays the same actions.

Axes: E episode, T step, A action dimension, B row of the world.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.finite_values import listed
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health
from robopolicy.doctor.recording import stopped_short, truncated

REMEDY = "Same starts, other motion: control rate, substeps, action units or order differ from the recording."
LABELS = "Correct next.success, or open the world with the criterion of success that the recording used."


@dataclass(frozen=True)
class Ends:
    """What the world says when an episode's last recorded action is done: success, ended [E] bool; ran: [E] steps."""

    success: np.ndarray
    ended: np.ndarray
    ran: np.ndarray


def play_to_ends(world: World, seeds: np.ndarray, actions: np.ndarray, lengths: np.ndarray) -> Ends:
    """Play actions [E, T, A] from seeds [B], and look at each episode after its own length [E]."""
    rows, played = len(lengths), 0
    success, ended = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
    ran = np.zeros(rows, dtype=int)
    world.reset(seeds=seeds)
    for length in np.unique(lengths):
        part = np.zeros((world.batch_size, length - played, actions.shape[-1]))
        part[:rows] = actions[:, played:length]
        step, played = world.step(part), int(length)
        ran += step.valid[:rows].sum(1)
        here = lengths == length
        success[here], ended[here] = step.success[:rows][here], step.ended[:rows][here]
    return Ends(success, ended, ran)


def check_ends(episodes: Episodes, chosen: np.ndarray, ends: Ends, follows: np.ndarray, horizon: int) -> list[Finding]:
    """Compare the ends of the replayed episodes `chosen` [E]; follows: [E] bool, their motion is the recorded one."""
    findings = _check_success(episodes, chosen, ends, follows)
    lengths = episodes.lengths.cpu().numpy()
    short = follows & ~ends.ended & ~ends.success & (lengths[chosen] < (horizon or np.inf))
    if short.any():
        said = set(np.flatnonzero(stopped_short(episodes, horizon)).tolist()) - set(chosen[follows].tolist())
        which = np.array(sorted({*chosen[short].tolist(), *said}))
        findings.append(truncated(which, lengths, len(episodes), horizon))
    early = follows & (ends.ran < lengths[chosen])
    if early.any():
        first = int(np.flatnonzero(early)[0])
        text = (
            f"the world ends {early.sum()} of {len(chosen)} episodes before the recording does (episode "
            f"{chosen[first]}: {ends.ran[first]} of {lengths[chosen[first]]} steps)"
        )
        remedy = "It stops at success or has another time limit: set world.options as they were in the recording."
        findings.append(Finding("ends of episodes", Health.WARNING, text, remedy))
    return findings


def _check_success(episodes: Episodes, chosen: np.ndarray, ends: Ends, follows: np.ndarray) -> list[Finding]:
    if episodes.success is None:
        return []
    said = episodes.success[chosen].cpu().numpy()
    differ = said != ends.success
    agree = float(1 - differ.mean())
    text = f"{agree:.0%} of {len(chosen)} replays end like the recording"
    labels = differ & follows
    if labels.sum() > max(1, 0.05 * len(chosen)) and labels.sum() >= 0.5 * differ.sum():
        failed, won = _numbers(chosen[labels & ~said]), _numbers(chosen[labels & said])
        parts = [f"labelled as failed, but they succeed: episodes {failed}"] if failed else []
        parts += [f"labelled as success, but they fail: episodes {won}"] if won else []
        text = f"{text}; their motion is the recorded one, so the labels of success are wrong ({'; '.join(parts)})"
        return [Finding("success labels", Health.BAD, text, LABELS)]
    good = agree > 0.95 or (len(chosen) < 20 and agree >= 1 - 1 / len(chosen))
    return [
        Finding("replayed success", Health.GOOD if good else Health.BAD, text, "" if good else REMEDY),
    ]


def _numbers(values: Sequence[int] | np.ndarray) -> str:
    return listed([str(value) for value in values])
