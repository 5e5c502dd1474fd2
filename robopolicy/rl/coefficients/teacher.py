"""Learning from a teacher's probabilities of what the student did."""

import torch

from robopolicy.rl.context import Coefficients, Scored
from robopolicy.rl.registry import Need, Slot, mechanism


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
