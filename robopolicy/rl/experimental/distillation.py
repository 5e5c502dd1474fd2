"""Experimental distillation: divergences, and coefficients, advantages and credit by a teacher."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.context import AuxiliaryInputs, Coefficients, Context, Scored, require_input
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.objective import mean_of_elements
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def group_softmax(score: Tensor, members: Tensor, group: Tensor) -> Tensor:
    """Return the softmax of scores over the members of a group times their number, [b]: 1 for equal scores, else 0.

    score: [b]; members: [b] bool; group: [b]. Entries outside `members` get 0.
    """
    groups = Segments.of(group)
    highest = groups.maximum(score, members)[groups.index]
    weight = torch.where(members, (score - highest).exp(), 0.0)
    return weight / groups.sum(weight)[groups.index].clamp(min=1e-12) * groups.size(members)[groups.index]


@mechanism(Slot.COEFFICIENT, "scope", source="SCOPE, arXiv:2604.10688", needs=(Need.WHOLE_GROUPS, Need.TEACHER_SCORES))
def scope(scored: Scored, *, tau: float = 1.0, cap: float = 5.0) -> Coefficients:
    """Follow one's own successes, and the teacher in failures: c = w r for a success, w r (log teacher - log pi) else.

    w is a softmax over the successes (failures) of a group, times their number. Successes that the acting policy found
    unlikely weigh more, exp(x / tau) with x the mean of -log pi over an episode's steps (its log-perplexity); so do
    failures in which the teacher is sure, exp(-x / tau) with x of the teacher. r: the ratio, without a clip. The
    difference of log-probabilities is without gradient and cut at `cap`, an addition here. Perplexities of Gaussian
    steps need log-probabilities that are means over elements.
    """
    rollouts, mask = scored.rollouts, scored.mask
    teacher = rollouts.extras["teacher_logp"].gather(-1, scored.chosen)
    count = mask.sum((1, 2)).clamp(min=1)

    def surprise(logp: Tensor) -> Tensor:
        return -torch.where(mask, logp, 0.0).double().sum((1, 2)) / count

    success = rollouts.row_success
    acted = rollouts.logp_behaviour.gather(-1, scored.chosen)
    own_weight = group_softmax(surprise(acted) / tau, success, rollouts.group)
    teacher_weight = group_softmax(-surprise(teacher) / tau, ~success, rollouts.group)
    weight = (own_weight + teacher_weight).to(scored.logp.dtype)[:, None, None]
    gap = (teacher - scored.logp).clamp(-cap, cap)
    c = weight * scored.ratio * torch.where(success[:, None, None], torch.ones_like(gap), gap)
    return torch.where(mask, c, 0.0), {"teacher_gap": -gap[mask].mean()}


def divergence(student: Tensor, teacher: Tensor, form: str, top: int = 0, clip: float | None = None) -> Tensor:
    """Return a divergence of categorical distributions, [...] from log-probabilities [..., V].

    form: reverse, KL(student || teacher); forward, KL(teacher || student); or jsd, the mean of both to their mixture.
    top: compare only the student's `top` most likely tokens and one token for all others, as in the code of Vision-OPD
    (arXiv:2605.18740), 0 for all; clip: upper bound of every element of the sum. Raises ConfigError for an unknown
    form.
    """
    if top:
        places = student.topk(min(top, student.shape[-1] - 1), -1).indices
        student, teacher = (_with_rest(each, places) for each in (student, teacher))
    middle = torch.logaddexp(student, teacher) - torch.tensor(2.0, dtype=student.dtype).log()
    elements = {
        "reverse": lambda: student.exp() * (student - teacher),
        "forward": lambda: teacher.exp() * (teacher - student),
        "jsd": lambda: 0.5 * (student.exp() * (student - middle) + teacher.exp() * (teacher - middle)),
    }
    if form not in elements:
        raise unknown_option("distill.divergence", form, elements)
    terms = elements[form]()
    return (terms if clip is None else terms.clamp(max=clip)).sum(-1)


def _with_rest(logp: Tensor, places: Tensor) -> Tensor:
    """Return the log-probabilities at `places` [..., k] and that of all others together, [..., k + 1]."""
    rest = logp.scatter(-1, places, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, places), rest], -1)


def squared_distance(student: Mapping[str, Tensor], teacher: Tensor, form: str, top: int, clip: float | None) -> Tensor:
    """Return the KL of Gaussian steps of equal spread, averaged over the elements of their log-probability, [n, k].

    student: extras of its scores, "mean" [n, k, P, A], "std" and, unless all elements count, "logp_precision" [n, k, P,
    A]; teacher: its means. The KL is the same in both directions. Raises ConfigError for what only tokens have.
    """
    if form == "jsd" or top or clip is not None:
        raise ConfigError(
            "options.distill: divergence=jsd, top and clip_element compare probabilities of tokens, and this policy's "
            "steps are Gaussian: restore their defaults."
        )
    terms = (student["mean"] - teacher).square() / (2 * student["std"].detach().square().clamp(min=1e-6))
    return mean_of_elements(terms, student)


def capped_ratio(inputs: AuxiliaryInputs, cap: float | None) -> Tensor:
    """Return min(pi / pi before the update, cap) of every step, without gradient, [n, k]; ones for no cap."""
    if cap is None:
        return torch.ones_like(inputs.scores.logp)
    ratio = (inputs.scores.logp.detach() - require_input(inputs.proximal, "proximal")).clamp(-20, 20).exp()
    return ratio.clamp(max=cap)


def late_weight(position: Tensor, least: float, middle: float, width: float) -> Tensor:
    """Return least + (1 - least) sigmoid((position - middle) / width), shaped as position in [0, 1] (PW-OPSD)."""
    return least + (1 - least) * torch.sigmoid((position - middle) / width)


@mechanism(Slot.ALLOCATOR, "teacher_rollouts", source="BRTS, arXiv:2605.09725", needs=(Need.GROUPS, Need.SAME_STEPS))
class TeacherRollouts(Uniform):
    """Let the teacher play `samples` more episodes of every group, of which selection=[best_teacher_rollout] keeps one.

    They are marked by extras["helped"]: auxiliaries=[distill] treats them apart (options.distill.taught), and they
    count neither in the success that is reported nor for the sampler. Use coefficient=none, since group advantages
    would compare them with the student's.
    """

    depth = 0.0

    def __init__(self, *, samples: int = 4):
        self.samples = samples


@mechanism(
    Slot.ALLOCATOR,
    "guided_teacher_rollouts",
    source="BRTS, arXiv:2605.09725",
    needs=(Need.GROUPS, Need.SAME_STEPS, Need.STARTS, Need.DEMONSTRATIONS),
)
class GuidedTeacherRollouts(TeacherRollouts):
    """The same, and where the teacher always fails it plays once more from `depth` of a demonstration.

    In the paper the teacher then reads the right answer. Only successes of these stay.
    """

    def __init__(self, *, samples: int = 4, depth: float = 0.5):
        super().__init__(samples=samples)
        self.depth = depth


@mechanism(
    Slot.SELECTION,
    "best_teacher_rollout",
    source="BRTS, arXiv:2605.09725",
    needs=(Need.GROUPS, Need.SAME_STEPS, Need.TEACHER_OVERLAP),
)
def best_teacher_rollout(rollouts: Rollouts, context: Context) -> Tensor:
    """Keep one of the teacher's episodes of every group: successes first, and of equals the one nearest to the student.

    Nearness is the mean of extras["teacher_overlap"] over an episode's steps, for tokens the share of the most likely
    ones that both have in common. The student's episodes all stay. Returns keep [B] bool.
    """
    helped = rollouts.extras.helped
    taught_mask = torch.zeros_like(rollouts.group, dtype=torch.bool) if helped is None else helped[:, 0]
    mask = rollouts.mask & rollouts.alive[..., None]
    overlap = torch.where(mask, rollouts.extras["teacher_overlap"], 0.0).double().sum((1, 2))
    score = overlap / mask.sum((1, 2)).clamp(min=1) + 2 * rollouts.row_success
    is_best = Segments.of(rollouts.group).rank(-score, taught_mask) == 0
    if bool(taught_mask.any()):
        context.figures["teacher_success"] = float(rollouts.row_success[taught_mask & is_best].double().mean())
    return ~taught_mask | is_best


@mechanism(
    Slot.ADVANTAGE, "teacher_gap", source="on-policy distillation, arXiv:2306.13649", needs=(Need.TEACHER_SCORES,)
)
def teacher_gap(rollouts: Rollouts, context: Context, *, cap: float = 5.0) -> Tensor:
    """A = log teacher - log pi of the acting policy at every step, cut at `cap`: on-policy distillation as a reward.

    With coefficient=ppo it is clipped like any advantage, and credits such as prune weigh it; coefficient=opd has the
    same gradient in the first step. Returns A [B, T, K].
    """
    gap = (rollouts.extras["teacher_logp"] - rollouts.logp_behaviour).clamp(-cap, cap)
    return torch.where(rollouts.mask, gap, 0.0)


@mechanism(Slot.ADVANTAGE, "process_gap", source="VPD, arXiv:2605.15113", needs=(Need.IMPLICIT,))
def process_gap(rollouts: Rollouts, context: Context, *, scale: float = 10.0, cap: float = 5.0) -> Tensor:
    """A = scale times the process reward of every step, cut at `cap`: distillation from the model that gives it.

    With models=[learning_teacher] and scale = 1 / beta it is log q - log pi, so that the policy gradient is that of the
    reverse KL to q on own episodes. Reads extras["process"]; returns A [B, T, K].
    """
    return torch.where(rollouts.mask, (scale * rollouts.extras["process"]).clamp(-cap, cap), 0.0)


def partings(rollouts: Rollouts, agree: float) -> Tensor:
    """Return the number of an episode's steps up to each one where teacher and policy agreed by less than `agree`,
    [B, T, K].
    """
    bad = (rollouts.extras["teacher_overlap"] < agree) & rollouts.mask
    return bad.flatten(1).cumsum(1).reshape(bad.shape)


@mechanism(Slot.CREDIT, "prune", source="Prune-OPD, arXiv:2605.07804", needs=(Need.TEACHER_OVERLAP,))
def prune(
    rollouts: Rollouts,
    advantage: Tensor,
    context: Context,
    *,
    agree: float = 0.7,
    drop: float = 0.01,
    bonus: float = 0.5,
) -> Tensor:
    """Weigh a step by how well policy and teacher agreed so far: A (clip(1 - drop bad, 0, 1) + bonus).

    bad: number of the episode's steps up to this one whose extras["teacher_overlap"] is below `agree`. Where the two
    have parted, the teacher says little about what follows. A robot's chain has fewer steps than an answer, so `drop`
    should be larger than the authors' .01. Episodes that end there: allocator=until_parting. Takes and returns A [B, T,
    K].
    """
    weight = (1 - drop * partings(rollouts, agree)).clamp(0, 1) + bonus
    return advantage * weight.to(advantage.dtype)


@mechanism(
    Slot.ALLOCATOR, "until_parting", source="Prune-OPD, arXiv:2605.07804", needs=(Need.EPISODES, Need.TEACHER_OVERLAP)
)
class UntilParting(Uniform):
    """Play episodes only as far as policy and teacher mostly stay together: truncate them after L chunks.

    An episode stays together up to the chunk at which clip(1 - drop bad, 0, 1) of credit=[prune] is 0. L grows by
    `step` when at least a share `share` of an iteration's episodes stay together for L - step chunks, and falls by
    `step` after `patience` iterations in a row in which they do not, to no less than `step`. first: L of the first
    iteration. The authors' step is 100 tokens; agree and drop as in credit=[prune], with a larger drop for a robot's
    fewer steps. A truncated episode counts as no success, also in the figures of collection.
    """

    def __init__(
        self,
        *,
        first: int = 4,
        step: int = 2,
        share: float = 0.1,
        patience: int = 3,
        agree: float = 0.7,
        drop: float = 0.25,
    ):
        self.limit, self.step = first, step
        self.share, self.patience = share, patience
        self.agree, self.drop = agree, drop
        self.misses = 0

    def limits(self, index: Array) -> list[int]:
        """Return L for every initial state [n]."""
        return [self.limit] * len(index)

    def observe_rollouts(self, rollouts: Rollouts) -> None:
        """Move L by how far the episodes stayed together."""
        together = (1 - self.drop * partings(rollouts, self.agree)[..., -1] > 1e-9) & rollouts.alive
        reached = (together.sum(1) >= self.limit - self.step).float().mean()
        self.misses = 0 if float(reached) >= self.share else self.misses + 1
        if not self.misses:
            self.limit += self.step
        elif self.misses == self.patience:
            self.limit, self.misses = max(self.step, self.limit - self.step), 0

    def state(self) -> dict[str, Any]:
        """Return L and the number of misses in a row."""
        return {"limit": self.limit, "misses": self.misses}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore L and the number of misses in a row."""
        self.limit, self.misses = state["limit"], state["misses"]
