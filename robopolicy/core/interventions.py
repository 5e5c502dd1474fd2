"""Interventions, recoveries and corrections in recorded steps: the actor of every step, and the steps to imitate.

An operator who intervenes in a failing policy first returns to familiar states, then performs what the policy could
not, and the episode ends: recover, correct, end (RaC, Hu et al. 2025, arXiv:2509.07953). `Episodes` stores two codes
per step: `actor` (who acted) and `segment` (kind of segment); -1 means unknown, e.g. in recordings without this
information. Axes: N step, E episode.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from robopolicy.client.executed import ActingAgent as ActingAgent
from robopolicy.client.executed import Segment as Segment
from robopolicy.core.arrays import integers
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.former_names import keep_former_names


def intervention_mask(episodes: Episodes) -> Tensor | None:
    """Return the mask [N] bool of steps that recover or correct; None if the episodes lack this information."""
    return None if episodes.segment is None else episodes.segment >= Segment.RECOVER


def before_intervention(episodes: Episodes) -> Tensor | None:
    """Return the mask [N] bool of steps that led to an intervention: outside one, with one later in the episode."""
    in_intervention = intervention_mask(episodes)
    if in_intervention is None:
        return None
    step = torch.arange(len(in_intervention), device=in_intervention.device)
    last = torch.full((len(episodes),), -1, device=in_intervention.device)
    last = last.scatter_reduce(0, episodes.episode_of_step[in_intervention], step[in_intervention], "amax")
    return ~in_intervention & (step < last[episodes.episode_of_step])


def imitation_mask(episodes: Episodes) -> Tensor | None:
    """Return the mask [N] bool of steps to imitate; None (imitate all) if the episodes do not record who acted.

    Includes steps of humans and scripts, all recoveries and corrections, and a policy's own steps after the last
    intervention of a successful episode. Steps with an unknown actor are included, those of nobody are not.
    """
    in_intervention = intervention_mask(episodes)
    before = before_intervention(episodes)
    actor = episodes.actor
    if in_intervention is None or before is None or actor is None:
        return None
    success = episodes.success
    in_success = torch.zeros_like(in_intervention) if success is None else success[episodes.episode_of_step]
    worth = in_intervention | (actor != ActingAgent.POLICY) | (in_success & ~before)
    return worth & (actor != ActingAgent.NOBODY)


KINDS = ("demonstration", "autonomous", "recover", "correct")
"""Kinds of steps to imitate: of demonstrations, a policy's own that led to success, of recoveries, of corrections."""


def kinds_of_steps(episodes: Episodes) -> Tensor:
    """Return the kind of every step [N] int64, as an index in `KINDS`; without information, all are demonstrations."""
    kinds = torch.zeros(episodes.step_count, dtype=torch.int64, device=episodes.device)
    if episodes.actor is None or episodes.segment is None:
        return kinds
    kinds[episodes.actor == ActingAgent.POLICY] = KINDS.index("autonomous")
    kinds[episodes.segment == Segment.RECOVER] = KINDS.index("recover")
    kinds[episodes.segment == Segment.CORRECT] = KINDS.index("correct")
    return kinds


def sampling_shares(counts: Mapping[str, int], shares: Mapping[str, float]) -> dict[str, float]:
    """Return the share of samples of each kind in counts, the number of its steps: as in `shares`, and the rest divided
    among the kinds that it does not name, in proportion to their steps.

    A kind without steps has no share; the others are then increased in proportion. Raises ConfigError for an unknown
    kind, DataError if none is left.
    """
    if unknown_names := [name for name in shares if name not in counts]:
        raise ConfigError(
            f"train.shares: there is no kind of step '{unknown_names[0]}'.{did_you_mean(unknown_names[0], counts)}"
        )
    named_shares = {name: shares[name] for name, count in counts.items() if count and name in shares}
    other_counts = {name: count for name, count in counts.items() if count and name not in shares}
    rest, total = 1 - sum(shares.values()), sum(other_counts.values())
    other_shares = {name: rest * count / total for name, count in other_counts.items()}
    result = dict.fromkeys(counts, 0.0) | named_shares | other_shares
    if not (share_sum := sum(result.values())) > 0:
        raise DataError(f"train.shares leaves no step to imitate: there are {dict(counts)} steps of these kinds.")
    return {name: share / share_sum for name, share in result.items()}


def shares_of_kinds(episodes: Episodes, worth: Tensor, shares: Mapping[str, float]) -> dict[str, float]:
    """Return `sampling_shares` of the steps in `worth` [N] bool."""
    counts = torch.bincount(kinds_of_steps(episodes)[worth], minlength=len(KINDS))
    return sampling_shares(dict(zip(KINDS, integers(counts), strict=True)), shares)


def imitation_weights(episodes: Episodes, worth: Tensor, shares: Mapping[str, float]) -> Tensor:
    """Return the probability of every step [N] float64 with which it is sampled; worth: [N] bool, steps to imitate."""
    kinds = kinds_of_steps(episodes)
    counts = torch.bincount(kinds[worth], minlength=len(KINDS))
    portions = torch.tensor(list(shares_of_kinds(episodes, worth, shares).values()), dtype=torch.float64)
    return torch.where(worth, (portions.to(kinds.device) / counts.clamp(min=1))[kinds], 0.0)


def last_step_of_turn(episodes: Episodes) -> Tensor:
    """Return the last step [N] int64 of the current turn: before the next hand-over, or the end of the episode.

    A hand-over is the start or end of an intervention.
    """
    last = (episodes.starts + episodes.lengths - 1)[episodes.episode_of_step]
    in_intervention = intervention_mask(episodes)
    if in_intervention is None or not len(in_intervention):
        return last
    ends = torch.ones_like(in_intervention)
    ends[:-1] = in_intervention[1:] != in_intervention[:-1]
    place = ends.nonzero()[:, 0]
    following = place[torch.searchsorted(place, torch.arange(len(in_intervention), device=in_intervention.device))]
    return torch.minimum(following, last)


def intervention_counts(episodes: Episodes) -> dict[str, int]:
    """Return the number of episodes with interventions and of takeovers, and the steps in which somebody intervened,
    those of them that recover, and those in which nobody acted; {} if the episodes lack this information.
    """
    in_intervention, actor = intervention_mask(episodes), episodes.actor
    if in_intervention is None or actor is None:
        return {}
    begins = in_intervention.clone()
    begins[1:] &= ~in_intervention[:-1] | (episodes.episode_of_step[1:] != episodes.episode_of_step[:-1])
    return {
        "episodes": len(set(integers(episodes.episode_of_step[in_intervention]))),
        "takeovers": int(begins.sum()),
        "steps": int(in_intervention.sum()),
        "recovering_steps": int((episodes.segment == Segment.RECOVER).sum()),
        "waiting_steps": int((actor == ActingAgent.NOBODY).sum()),
    }


def interventions_in_words(episodes: Episodes) -> str:
    """Summarise interventions in one sentence; "" if the episodes lack this information."""
    in_intervention, before = intervention_mask(episodes), before_intervention(episodes)
    if in_intervention is None or before is None or episodes.segment is None:
        return ""
    count = len(set(integers(episodes.episode_of_step[in_intervention])))
    kinds = {kind: int((episodes.segment == kind).sum()) for kind in Segment}
    return (
        f"Interventions: in {count} of {len(episodes)} episodes; {kinds[Segment.RECOVER]} steps recover, "
        f"{kinds[Segment.CORRECT]} correct, {int(before.sum())} of the policy's own steps led to an intervention"
    )


def imitated_in_words(episodes: Episodes, everything: bool = False, shares: Mapping[str, float] | None = None) -> str:
    """Summarise which steps are imitated and which are left out in one sentence; "" if the episodes do not record who
    acted.

    everything: whether the policy trains on all steps regardless, e.g. because it contains a world model; shares: of
    the samples by kind of step, if they are set.
    """
    worth = imitation_mask(episodes)
    if worth is None:
        return ""
    if everything:
        return "Trains on all steps, because this kind of policy contains a world model"
    if shares:
        texts = [f"{name} {share:.0%}" for name, share in shares_of_kinds(episodes, worth, shares).items() if share]
        return f"Samples by kind of step: {', '.join(texts)}"
    return (
        f"Imitates {int(worth.sum())} of {len(worth)} steps: recoveries, corrections, demonstrations, and the "
        f"policy's own steps that led to success; excluded: {int((~worth).sum())} of the policy's own steps that led "
        "to an intervention or to failure"
    )


keep_former_names(
    __name__,
    {
        "Acted": "ActingAgent",
        "worth_imitating": "imitation_mask",
        "intervened": "intervention_mask",
        "last_of_turn": "last_step_of_turn",
    },
)
