"""Who acted in recorded steps, and what is worth imitating of them: interventions, recoveries, corrections.

An operator who sees a policy fail first goes back to where it knows its way, then does what it could not, and the
episode ends: recover, then correct, then end (RaC, Hu et al. 2025, arXiv:2509.07953). Two numbers of every step say so
in `Episodes`: `actor`, who acted, and `segment`, in what kind of segment; -1 where it is not known, as of recordings
that never said. Axes: N step, E episode.
"""

from enum import IntEnum

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.episodes import Episodes


class Acted(IntEnum):
    """Who acted."""

    UNKNOWN = -1
    POLICY = 0
    HUMAN = 1
    SCRIPT = 2


class Segment(IntEnum):
    """What an actor was about: its own way, or an intervention's way back or way on."""

    UNKNOWN = -1
    AUTONOMOUS = 0
    RECOVER = 1
    CORRECT = 2


def intervened(episodes: Episodes) -> Tensor | None:
    """Return which steps [N] bool recover or correct; None where the episodes do not say."""
    return None if episodes.segment is None else episodes.segment >= Segment.RECOVER


def before_intervention(episodes: Episodes) -> Tensor | None:
    """Return which steps [N] bool led to an intervention: no part of one, and one comes later in the episode."""
    inside = intervened(episodes)
    if inside is None:
        return None
    step = torch.arange(len(inside), device=inside.device)
    last = torch.full((len(episodes),), -1, device=inside.device)
    last = last.scatter_reduce(0, episodes.episode_of_step[inside], step[inside], "amax")
    return ~inside & (step < last[episodes.episode_of_step])


def worth_imitating(episodes: Episodes) -> Tensor | None:
    """Return which steps [N] bool to imitate; None, which is all of them, where the episodes do not say who acted.

    Those of people and scripts, all recoveries and corrections, and a policy's own on its way to a recorded success: in
    an episode that succeeded, behind the last intervention. Where it is not known who acted nothing speaks against it.
    """
    inside = intervened(episodes)
    before = before_intervention(episodes)
    actor = episodes.actor
    if inside is None or before is None or actor is None:
        return None
    success = episodes.success
    won = torch.zeros_like(inside) if success is None else success[episodes.episode_of_step]
    return inside | (actor != Acted.POLICY) | (won & ~before)


def last_of_turn(episodes: Episodes) -> Tensor:
    """Return the last step [N] int64 of everyone's turn: before the next hand-over, or of the episode.

    Hands change where an intervention begins or ends.
    """
    last = (episodes.starts + episodes.lengths - 1)[episodes.episode_of_step]
    inside = intervened(episodes)
    if inside is None or not len(inside):
        return last
    ends = torch.ones_like(inside)
    ends[:-1] = inside[1:] != inside[:-1]
    place = ends.nonzero()[:, 0]
    following = place[torch.searchsorted(place, torch.arange(len(inside), device=inside.device))]
    return torch.minimum(following, last)


def interventions_in_words(episodes: Episodes) -> str:
    """Return how much of the episodes is whose, in a sentence; "" where they do not say."""
    inside, before = intervened(episodes), before_intervention(episodes)
    if inside is None or before is None or episodes.segment is None:
        return ""
    count = len(set(integers(episodes.episode_of_step[inside])))
    kinds = {kind: int((episodes.segment == kind).sum()) for kind in Segment}
    return (
        f"Interventions: in {count} of {len(episodes)} episodes; {kinds[Segment.RECOVER]} steps recover, "
        f"{kinds[Segment.CORRECT]} correct, {int(before.sum())} led to one"
    )


def imitated_in_words(episodes: Episodes, everything: bool = False) -> str:
    """Return how many steps are imitated and what is left out, in a sentence; "" where they do not say who acted.

    everything: whether a policy learns from all steps whatever is worth imitating, as one with a world model inside.
    """
    worth = worth_imitating(episodes)
    if worth is None:
        return ""
    if everything:
        return "Learns from all steps: this kind of policy also learns what actions lead to"
    return (
        f"Imitates {int(worth.sum())} of {len(worth)} steps: recoveries, corrections, demonstrations, and the policy's "
        f"own that led to success; left out: {int((~worth).sum())} of its own that led to an intervention or to none"
    )
