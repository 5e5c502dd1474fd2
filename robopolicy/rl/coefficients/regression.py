"""Coefficients of weighted regression: on what was done, or on what a teacher says of it."""

import torch

from robopolicy.core.segments import Segments
from robopolicy.rl.coefficients.preference import episode_log_ratio
from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


@mechanism(Slot.COEFFICIENT, "pacs", source="PACS, implicit actor critic, arXiv:2509.02522", needs=(Need.WHOLE_GROUPS,))
def pacs(scored: Scored, *, beta: float = 1.0) -> Coefficients:
    """Supervised: the episode's centred log-ratio, as a logit, is to predict its success (binary cross-entropy).

    score_i = beta sum(log-ratio), leave-one-out centred in the group; c = beta w (label - sigmoid(centred)), carried
    through the centring. w gives the successes and the failures of a group the same weight, half its size each; it is 1
    where all ended alike.
    """
    rollouts = scored.rollouts
    total = beta * episode_log_ratio(scored)
    group = rollouts.group
    same = (group[:, None] == group[None]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    others = same.to(total.dtype) / same.sum(1, keepdim=True).clamp(min=1)
    centred = total - others @ total
    # centred = (I - others) total, so the cross-entropy's error goes back through the transpose: an episode also moves
    # for being in the others' baselines.
    label = rollouts.row_success.to(total.dtype)
    groups = Segments.of(group)
    size, won = groups.size()[groups.index], groups.sum(label)[groups.index]
    alike = torch.where(label > 0, won, size - won)  # episodes of the group with the same outcome
    balance = torch.where(alike < size, 0.5 * size / alike, 1.0)
    error = balance * (label - centred.sigmoid())
    carried = error - others.T @ error
    known = carried.abs() > 1e-6 * error.abs().max()  # Adam would make steps of what rounding leaves of equal outcomes
    c = beta * torch.where(known, carried, 0.0)
    return c[:, None, None].expand_as(scored.logp) * scored.mask, {"pacs_logit": centred.abs().mean()}


@mechanism(Slot.COEFFICIENT, "none", source="auxiliary losses alone")
def nothing(scored: Scored) -> Coefficients:
    """No policy gradient: the auxiliary losses do the learning."""
    return torch.zeros_like(scored.logp), {}


@mechanism(Slot.COEFFICIENT, "awr", source="AWR, arXiv:1910.00177")
def advantage_weighted(scored: Scored, *, temperature: float = 1.0, limit: float = 10.0) -> Coefficients:
    """Regression on one's own decisions, weighted: c = min(exp(A / temperature), limit); no ratio is needed.

    With policy.likelihood=matching the regression is denoising or flow matching.
    """
    weight = (scored.advantage / temperature).exp().clamp(max=limit)
    return weight, {"weight_mean": weight[scored.mask].mean()}


@mechanism(Slot.COEFFICIENT, "clipped_advantage", source="AC-Flow, arXiv:2510.18072", needs=(Need.MATCHING,))
def clipped_advantage(
    scored: Scored, *, limit: float = 2.0, temperature: float = 1.0, form: str = "exponential"
) -> Coefficients:
    """Matching of one's own decisions, weighted by the clipped advantage: c = w(clip(A, -limit, limit) / temperature).

    form: w is exponential, exp(x), which with A = R is the reward-weighted flow matching that AC-Flow extends; or
    positive, max(x, 0), which leaves out what was worse than expected. Neither pushes away from anything. Raises
    ConfigError for another form.
    """
    forms = {"exponential": torch.exp, "positive": torch.relu}
    if form not in forms:
        raise unknown_option("clipped_advantage.form", form, forms)
    weight = forms[form](scored.advantage.clamp(-limit, limit) / temperature)
    return weight, {"weight_mean": weight[scored.mask].mean()}


@mechanism(
    Slot.COEFFICIENT,
    "negative_aware",
    source="AFD, arXiv:2605.26105; DiffusionNFT, arXiv:2509.16117",
    needs=(Need.MATCHING,),
)
def negative_aware(scored: Scored, *, limit: float = 5.0) -> Coefficients:
    """Matching towards decisions that were better, away from those that were worse: c = clip(A, -limit, limit).

        L = limit / (2 beta) (w |v+ - u|^2 + (1 - w) |v- - u|^2),   w = (1 + clip(A) / limit) / 2
        v+ = (1 - beta) v' + beta v,   v- = (1 + beta) v' - beta v,   v' = v without gradient

    is AFD's loss of a prediction v and its target u, up to a factor, and has the gradient of clip(A) |v - u|^2 / 2
    whatever beta is. So a decision with A < 0 is unlearned as strongly as one with A > 0 is learned. Deviation:
    DiffusionNFT, which the loss is from, holds v' at the policy that acted; what holds this one is target_kl and
    auxiliaries=[velocity], AFD's nearness to the reference (which AFD weighs by w too).
    """
    return scored.advantage.clamp(-limit, limit), {}


@mechanism(Slot.COEFFICIENT, "opd", source="on-policy distillation, arXiv:2306.13649", needs=(Need.TEACHER_SCORES,))
def on_policy_distillation(scored: Scored, *, reward: float = 0.0, cap: float = 5.0) -> Coefficients:
    """Reverse KL to the teacher on the student's own decisions: c = log teacher - log pi, at most `cap` in size.

    reward: adds so much of PPO's coefficient, for learning from the outcome too. The teacher must speak of the same
    steps: the same tokens, or the same denoising schedule.
    """
    from robopolicy.rl.coefficients.ppo import ppo

    teacher = scored.rollouts.extras["teacher_logp"].gather(-1, scored.chosen)
    gap = teacher - scored.logp
    c = gap.clamp(-cap, cap)
    if reward:
        c = c + reward * ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    return torch.where(scored.mask, c, 0.0), {"teacher_gap": -gap[scored.mask].mean()}
