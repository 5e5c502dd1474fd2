"""Learning from a teacher on one's own rollouts: its probabilities of what the student did, or what it would have done.

The teacher is another checkpoint (teacher=CHECKPOINT). It sees everything the world shows, so it may read what the
student does not: a privileged state, another camera (Vision-OPD).
"""

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import ScoredPolicy
from robopolicy.nn.pieces import loss_of, scores_of
from robopolicy.rl.context import AuxiliaryInputs, for_another_policy, given
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.weights import step_mean


@mechanism(Slot.AUXILIARY, "dagger", source="DAgger, arXiv:1011.0686", needs=(Need.TEACHER,))
def dagger(inputs: AuxiliaryInputs, *, weight: float = 1.0) -> Tensor:
    """Imitate what the teacher would do in the states that the student visits; the teacher may be any policy.

    Its chunks [n, C, A] become what the student's own regression loss is asked for, [n, P, A]: cut to P steps, or
    padded with steps that do not count. Returns a scalar. Raises ConfigError without a teacher.
    """
    decision = given(inputs.teacher, "teacher").act(inputs.observation, inputs.context.generator, deterministic=True)
    actions, length = decision.actions, inputs.policy.spec.prediction
    if actions.shape[1] < length:
        padding = actions[:, -1:].expand(-1, length - actions.shape[1], -1)
        valid = torch.arange(length, device=actions.device) < actions.shape[1]
        actions = torch.cat([actions, padding], 1)
    else:
        actions, valid = actions[:, :length], torch.ones(length, dtype=torch.bool, device=actions.device)
    batch = {
        "observation": inputs.observation,
        "actions": actions,
        "action_valid": valid.expand(len(actions), -1),
    }
    losses = loss_of(inputs.policy, batch, inputs.context.generator)
    return weight * torch.stack([item.mean() for item in losses.values()]).sum()


@mechanism(
    Slot.AUXILIARY,
    "distill",
    source="TIP, arXiv:2604.14084; Vision-OPD, arXiv:2605.18740",
    needs=(Need.TEACHER, Need.SAME_STEPS),
)
def distill(
    inputs: AuxiliaryInputs, *, weight: float = 1.0, share: float = 1.0, alpha: float = 1.0, gamma: float = 1.0
) -> Tensor:
    """Match the teacher's whole distribution at the student's steps: KL(student || teacher), averaged.

    share < 1 picks that share of the steps without replacement, with probability growing with
    (entropy / log V)^alpha (Jensen-Shannon divergence / log 2)^gamma (TIP): where the student is unsure and where it
    disagrees. Gaussian steps have equal spreads, so their KL is the squared distance of means and all of them count.
    Distributions are compared by extras of the scores: log_probabilities [n, k, V], or mean [n, k, P, A] and std.
    Returns a scalar. Raises ConfigError without a teacher, and where the two have neither in common.
    """
    policy = given(inputs.teacher, "teacher")
    assert isinstance(policy, ScoredPolicy)  # which Need.SAME_STEPS asks for
    with torch.no_grad():
        theirs = scores_of(policy, inputs.observation, for_another_policy(inputs.latents)).extras
    own = inputs.scores.extras
    if "log_probabilities" in own and "log_probabilities" in theirs:
        student, teacher = own["log_probabilities"], theirs["log_probabilities"]
        divergence = (student.exp() * (student - teacher)).sum(-1)
        mask = inputs.mask
        if share < 1:
            mask = _informative(student.detach(), teacher, mask, share, alpha, gamma, inputs.context.generator)
        return weight * (step_mean(mask) * torch.where(mask, divergence, 0.0)).sum()
    if "mean" in own and "mean" in theirs:
        spread = own["std"].detach().square().clamp(min=1e-6)
        divergence = ((own["mean"] - theirs["mean"]).square() / (2 * spread)).mean((-2, -1))
        return weight * (step_mean(inputs.mask) * torch.where(inputs.mask, divergence, 0.0)).sum()
    raise ConfigError("auxiliaries=[distill] needs a teacher of the student's kind; auxiliaries=[dagger] imitates any.")


def _informative(
    student: Tensor, teacher: Tensor, mask: Tensor, share: float, alpha: float, gamma: float, draws: torch.Generator
) -> Tensor:
    """Return which of the steps [n, k] TIP keeps; Gumbel keys draw without replacement."""
    vocabulary = torch.tensor(float(student.shape[-1]), device=student.device)
    entropy = -(student.exp() * student).sum(-1) / vocabulary.log()
    middle = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0))
    divergence = (
        0.5
        * ((student.exp() * (student - middle)).sum(-1) + (teacher.exp() * (teacher - middle)).sum(-1))
        / torch.log(torch.tensor(2.0))
    )
    score = alpha * entropy.clamp(min=1e-8).log() + gamma * divergence.clamp(min=1e-8).log()
    uniform = torch.rand(score.shape, generator=draws, device=draws.device).clamp(min=1e-12)
    keys = torch.where(mask, score - torch.log(-torch.log(uniform)), -torch.inf).flatten()
    count = max(1, round(share * int(mask.sum())))
    return (
        torch.zeros_like(keys, dtype=torch.bool).scatter(0, keys.topk(count).indices, True).reshape(mask.shape) & mask
    )
