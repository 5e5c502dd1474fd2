"""Auxiliary losses that learn from a teacher, keep a policy diverse or close to its base, or follow action values:
(inputs) -> scalar.

The teacher is another checkpoint (teacher=CHECKPOINT). It reads the world's full observation, so it may use inputs that
the student lacks: privileged state, another camera. The policy as its own teacher: `own_teacher`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.images import black_out
from robopolicy.core.policy import FinishesChain, ScoredPolicy
from robopolicy.nn.micro_batches import loss_of, scores_of
from robopolicy.rl.context import AuxiliaryInputs, latents_for_other_policy, require_input, score_extra
from robopolicy.rl.experimental import distillation
from robopolicy.rl.objective import mean_of_elements
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.weights import step_mean


@mechanism(Slot.AUXILIARY, "dagger", source="DAgger, arXiv:1011.0686", needs=(Need.TEACHER,))
def dagger(inputs: AuxiliaryInputs, *, weight: float = 1.0) -> Tensor:
    """Imitate the teacher's actions in the states that the student visits; the teacher may be any policy.

    Its chunks [n, C, A] become the targets of the student's own regression loss, [n, P, A]: shortened to P steps, or
    padded with masked steps. Returns a scalar. Raises ConfigError without a teacher.
    """
    return weight * torch.stack([item.mean() for item in _imitation_losses(inputs).values()]).sum()


@mechanism(Slot.AUXILIARY, "intervene", source="InT, arXiv:2601.14209", needs=(Need.TEACHER, Need.FIRST_ERRORS))
def intervene(inputs: AuxiliaryInputs, *, weight: float = 1.0, prefix: float = 1.0) -> Tensor:
    """Imitate the teacher at the first wrong decision of every failed episode, and the student before it.

    The wrong decision is extras["first_error"] of models=[q_ensemble,first_error]; what follows is not imitated. The
    sum over these chunks, divided by the number of all; the loss of a chunk is that of dagger. The student's decisions
    before it, extras["before_error"], add -prefix log pi, a mean over the minibatch's steps where others count as 0; 0
    leaves them as context. The paper imitates both first (coefficient=none) and goes on with RL; they may also be
    learned at once. Returns a scalar.
    """
    is_wrong, is_before = inputs.extras["first_error"], inputs.extras["before_error"]
    taught = [torch.where(is_wrong, item, 0.0).mean() for item in _imitation_losses(inputs).values()]
    own = inputs.step_weights * torch.where(inputs.mask & is_before[:, None], inputs.scores.logp, 0.0)
    return weight * (torch.stack(taught).sum() - prefix * own.sum())


def _imitation_losses(inputs: AuxiliaryInputs) -> Mapping[str, Tensor]:
    """Return the terms [n] of the student's loss on the teacher's chunks at these states."""
    decision = require_input(inputs.teacher, "teacher").act(
        inputs.observation, inputs.context.generator, deterministic=True
    )
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
    return loss_of(inputs.policy, batch, inputs.context.generator)


@mechanism(
    Slot.AUXILIARY,
    "distill",
    source="TIP, arXiv:2604.14084; Vision-OPD, arXiv:2605.18740; PW-OPSD, arXiv:2605.21606; BRTS, arXiv:2605.09725",
    needs=(Need.TEACHER, Need.SAME_STEPS, Need.POSITION),
)
def distill(
    inputs: AuxiliaryInputs,
    *,
    weight: float = 1.0,
    share: float = 1.0,
    divergence: str = "reverse",
    top: int = 0,
    clip_element: float | None = None,
    ratio_cap: float | None = None,
    position: tuple[float, float, float] | None = None,
    taught: float | None = None,
) -> Tensor:
    """Match the teacher's complete distribution at the student's steps, averaged.

    divergence: reverse, KL(student || teacher); forward, KL(teacher || student); or jsd. top: compare the student's
    `top` most likely tokens and all others as one (Vision-OPD; PW-OPSD's code has the teacher's, and no others), 0 for
    all; clip_element: upper bound of every element of the sum (PW-OPSD uses forward and .05). ratio_cap: weight a step
    by its ratio to the policy before the update, at most this (Vision-OPD: 2). position: (least, middle, width), weight
    a chunk at the fraction f of its episode by least + (1 - least) sigmoid((f - middle) / width) (PW-OPSD: .25, .3,
    .1). share < 1: only this fraction of the minibatch's steps counts, those with the largest 1 - (1 - h) (1 - d):
    where the student is uncertain or the teacher disagrees (TIP: .5, of each answer). h: the student's entropy over log
    V, cut at its 98 % quantile, and d: KL(student || teacher), both scaled to [0, 1] over the minibatch. taught: at
    steps of episodes that the teacher played (allocator=teacher_rollouts), this factor times the forward KL instead
    (BRTS: 10, in its code .05); the mean is over all steps together. Gaussian steps have equal standard deviations, so
    their KL is the squared distance of means in both directions, and h is 0. Distributions are compared by
    extras of the scores: log_probabilities [n, k, V], or mean [n, k, P, A] and std. Returns a scalar. Raises
    ConfigError without a teacher, if the two share neither extra, or for options that only tokens have.
    """
    policy = require_input(inputs.teacher, "teacher")
    assert isinstance(policy, ScoredPolicy)  # which Need.SAME_STEPS asks for
    with torch.no_grad():
        teacher_extras = scores_of(policy, inputs.observation, latents_for_other_policy(inputs.latents)).extras
    student_extras = inputs.scores.extras
    mask, step_weights = inputs.mask, inputs.step_weights
    if "log_probabilities" in student_extras and "log_probabilities" in teacher_extras:
        student, teacher = student_extras["log_probabilities"], teacher_extras["log_probabilities"]
        # Summed over the vocabulary and not sampled, so it has no variance of its own.
        distance = distillation.divergence(student, teacher, divergence, top, clip_element)
        on_taught = distance if taught is None else distillation.divergence(student, teacher, "forward", top)
    elif "mean" in student_extras and "mean" in teacher_extras:
        distance = on_taught = distillation.squared_distance(
            student_extras, teacher_extras["mean"], divergence, top, clip_element
        )
    else:
        raise ConfigError(
            "auxiliaries=[distill] needs a teacher of the student's policy kind; auxiliaries=[dagger] imitates any "
            "teacher."
        )
    if share < 1:
        if inputs.steps_per_row is not None:
            raise ConfigError(
                "options.distill.share below 1 compares all steps of a minibatch, which data-parallel processes "
                "divide: set it to 1, or train in one process."
            )
        mask = _informative(student_extras, teacher_extras, mask, share)
        step_weights = step_mean(mask)
    taught_mask = inputs.extras.helped
    if taught is not None and taught_mask is not None:
        distance = torch.where(taught_mask[:, None], taught * on_taught, distance)
    distance = distillation.capped_ratio(inputs, ratio_cap) * distance
    if position is not None:
        distance = distillation.late_weight(inputs.extras["position"], *position)[:, None] * distance
    return weight * (step_weights * torch.where(mask, distance, 0.0)).sum()


@torch.no_grad()
def _informative(
    student_extras: Mapping[str, Tensor], teacher_extras: Mapping[str, Tensor], mask: Tensor, share: float
) -> Tensor:
    """Return the `share` of the steps [n, k] in `mask`, at least one, that TIP keeps: see `distill`."""
    if not bool(mask.any()):
        return mask
    if "log_probabilities" in student_extras:
        student, teacher = student_extras["log_probabilities"], teacher_extras["log_probabilities"]
        disagreement = distillation.divergence(student, teacher, "reverse", 0)
        entropy = -(student.exp() * student).sum(-1) / math.log(student.shape[-1])
    else:
        disagreement = distillation.squared_distance(student_extras, teacher_extras["mean"], "reverse", 0, None)
        entropy = torch.zeros_like(disagreement)
    entropy = entropy.clamp(max=entropy[mask].double().quantile(0.98).to(entropy))
    score = 1 - (1 - _scaled(entropy, mask)) * (1 - _scaled(disagreement, mask))
    keys = torch.where(mask, score, -torch.inf).flatten()
    count = max(1, int(share * int(mask.sum()) + 1e-9))
    return (
        torch.zeros_like(keys, dtype=torch.bool).scatter(0, keys.topk(count).indices, True).reshape(mask.shape) & mask
    )


def _scaled(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values`, scaled so that those in `mask` reach from 0 to 1; zeros if these are all the same."""
    low, high = values[mask].min(), values[mask].max()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)


@mechanism(
    Slot.AUXILIARY,
    "velocity",
    source="AC-Flow, arXiv:2510.18072 (Wasserstein-2 to the reference velocity)",
    needs=(Need.GAUSSIAN, Need.BASE),
)
def stay_near_velocity(inputs: AuxiliaryInputs, *, weight: float = 0.1) -> Tensor:
    """Squared distance between the means of the policy's and the base's denoising steps, in units of their standard
    deviation.

    Two flows with the same noise stay within the summed distance of their velocities (Wasserstein-2). With
    policy.likelihood=matching it is the distance of the predictions (velocities) themselves. The means are [n, k, P,
    A]. Returns a scalar. Raises ConfigError without a base policy, or if scores have no means.
    """
    with torch.no_grad():
        base = score_extra(scores_of(require_input(inputs.base, "base"), inputs.observation, inputs.latents), "mean")
    mean, std = score_extra(inputs.scores, "mean"), score_extra(inputs.scores, "std")
    distance = (mean - base).square() / std.detach().square().clamp(min=1e-4)
    return weight * (inputs.step_weights * torch.where(inputs.mask, distance.mean((-2, -1)), 0.0)).sum()


@mechanism(Slot.AUXILIARY, "entropy", source="Williams & Peng 1991; ReinFlow, arXiv:2505.22094")
def entropy_bonus(inputs: AuxiliaryInputs, *, weight: float = 0.01) -> Tensor:
    """Negative mean entropy of the scored steps, which maintains exploration of tokens or learned noise.

    Entropies are those of the minibatch's steps [n, k], in nats. Returns a scalar. Raises ConfigError if the entropy is
    constant, as for denoising steps with fixed noise.
    """
    if not inputs.scores.entropy.requires_grad:
        raise ConfigError(
            "auxiliaries=[entropy]: this policy's noise is fixed, so its entropy is constant. Use tokens, or "
            "policy.kind=flow policy.flow_noise=learned."
        )
    return -weight * (inputs.step_weights * inputs.scores.entropy).sum()


@mechanism(Slot.AUXILIARY, "kl_base", source="estimators: joschu.net/blog/kl-approx", needs=(Need.BASE,))
def stay_near_base(inputs: AuxiliaryInputs, *, weight: float = 0.01, estimator: str = "k3") -> Tensor:
    """KL to the base policy on the sampled steps, by an estimator: k1, k2 or k3.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x with x = log pi - log pi_base. On data of the current policy, k2's
    gradient is that of the KL; k1's vanishes in expectation and is included for comparison. x: [n, k], limited to +-10.
    Returns a scalar. Raises ConfigError for an unknown estimator, and without a base policy.
    """
    return weight * (inputs.step_weights * _kl_to_base(inputs, estimator)).sum()


def _kl_to_base(inputs: AuxiliaryInputs, estimator: str) -> Tensor:
    """Return the estimates of `stay_near_base` at every step, 0 outside the mask, [n, k]."""
    with torch.no_grad():
        base = scores_of(require_input(inputs.base, "base"), inputs.observation, inputs.latents).logp
    x = (inputs.scores.logp - base).clamp(-10, 10)
    # k3: under pi the mean of exp(-x) = pi_base / pi is 1, so that of exp(-x) - 1 + x is KL(pi || pi_base).
    forms = {"k1": x, "k2": 0.5 * x.square(), "k3": torch.expm1(-x) + x}
    if estimator not in forms:
        raise unknown_option("kl_base.estimator", estimator, forms)
    return torch.where(inputs.mask, forms[estimator], 0.0)


@mechanism(
    Slot.AUXILIARY,
    "kl_by_difficulty",
    source="CLPO, arXiv:2509.25004",
    needs=(Need.BASE, Need.GROUPS, Need.GROUP_RATES),
)
def stay_near_where_easy(
    inputs: AuxiliaryInputs, *, weight: float = 0.01, hard: float = 0.3, factor: float = 0.5, estimator: str = "k3"
) -> Tensor:
    """KL to the base policy as in kl_base, times `factor` in groups whose success rate is at most `hard`.

    Where the policy fails it may go further. A group that was played again with help (allocator=retry_by_difficulty)
    is as hard as without it. Chunks are [n, ...]. Returns a scalar. Raises ConfigError as kl_base does.
    """
    scale = torch.where(inputs.extras["group_rate"] <= hard, factor, 1.0)[:, None]
    return weight * (inputs.step_weights * scale * _kl_to_base(inputs, estimator)).sum()


@mechanism(Slot.AUXILIARY, "kl_convex", source="ReMix (KL-convex constraint), arXiv:2507.06892", needs=(Need.BASE,))
def stay_between(inputs: AuxiliaryInputs, *, weight: float = 0.01, base: float = 0.5) -> Tensor:
    """KL to the base policy, for stability, and to the policy before the update, for flexibility.

        weight (base KL(pi || pi_base) + (1 - base) KL(pi || pi_before))

    Both use k3 = exp(-x) - 1 + x on the sampled steps, x = log pi - log of the other policy, [n, k], limited to +-10.
    Returns a scalar. Raises ConfigError without a base policy.
    """
    with torch.no_grad():
        first = scores_of(require_input(inputs.base, "base"), inputs.observation, inputs.latents).logp
    logp = inputs.scores.logp
    log_ratios = [(logp - other).clamp(-10, 10) for other in (first, require_input(inputs.proximal, "proximal"))]
    penalty = sum(part * (torch.expm1(-x) + x) for part, x in zip((base, 1 - base), log_ratios, strict=True))
    return weight * (inputs.step_weights * torch.where(inputs.mask, penalty, 0.0)).sum()


@mechanism(
    Slot.AUXILIARY,
    "best_of_n",
    source="Digi-Q, arXiv:2502.15760; IDQL, arXiv:2304.10573",
    needs=(Need.VALUES, Need.WHOLE_MINIBATCHES),
)
def best_of_n(
    inputs: AuxiliaryInputs, *, candidates: int = 8, decisions: int = 256, weight: float = 1.0, warmup: int = 2
) -> Tensor:
    """Imitate the best of N sampled chunks by action value, if its value exceeds that of the state.

    Uses at most `decisions` states of a minibatch because each is sampled N times; inactive in the first `warmup`
    iterations, when the values are not yet informative. Chunks are [N * n, C, A] of n states. Returns a scalar, 0 if
    none is better. Raises ConfigError without a model of action values.
    """
    if inputs.context.iteration < warmup:
        return torch.zeros((), device=inputs.mask.device)
    model, policy = inputs.action_values, inputs.policy
    count = next(value for value in inputs.observation.values() if isinstance(value, Tensor)).shape[0]
    draws = inputs.context.generator
    indices = torch.randperm(count, generator=draws, device=draws.device)[:decisions]
    observation = {key: _at(value, indices) for key, value in inputs.observation.items()}
    repeated_observation = {
        key: _at(value, torch.arange(len(indices)).repeat(candidates)) for key, value in observation.items()
    }
    with torch.no_grad():
        decision = policy.act(repeated_observation, draws)
        value = model.action_values(repeated_observation, decision.actions).reshape(candidates, -1)
        best, winner = value.max(0)
        better = best > model.values(observation)
    # Rows are ordered by candidate first: candidate c of state i is row c * n + i.
    rows = winner * len(indices) + torch.arange(len(indices), device=winner.device)
    latents = {key: item[rows] for key, item in decision.latents.items()}
    mask = decision.mask[rows]
    logp = scores_of(policy, observation, latents).logp
    # the mean over all states, as in the authors' code: the fewer are improved on, the weaker the push
    return -weight * (step_mean(mask) * torch.where(mask & better[:, None], logp, 0.0)).sum()


def step_preference_loss(better: Tensor, worse: Tensor, beta: float, clip: float) -> Tensor:
    """Compute -log sigmoid(beta (log r of the better - log r of the worse)), [n], from log-ratios [n] to a frozen
    reference.

    The ratios r are clipped to 1 +- clip, so that a pair has no gradient once both have moved far enough. Source: SPO.
    """
    low, high = math.log(1 - clip), math.log(1 + clip)
    return torch.nn.functional.softplus(-beta * (better.clamp(low, high) - worse.clamp(low, high)))


@mechanism(
    Slot.AUXILIARY,
    "masked_preference",
    source="OPA-DPO, arXiv:2501.09695",
    needs=(Need.IMAGES, Need.BASE, Need.EPISODES),
)
def masked_preference(inputs: AuxiliaryInputs, *, weight: float = 0.2, beta: float = 0.1, share: float = 0.3) -> Tensor:
    """Prefer a chunk of a better episode in view of its picture to the same chunk in view of a masked one.

        -log sigmoid(beta (D - D_masked)),   D = sum of log pi / pi_base over the chunk's steps

    for chunks with a positive advantage, divided by the number of all. Masked: a random `share` of the patches is
    black. The reference sees the same picture as the policy. The paper's pairs are whole answers to one picture; a
    robot has a picture for every chunk. Advantages are [n, K]. Returns a scalar.
    """
    base, latents = require_input(inputs.base, "base"), latents_for_other_policy(inputs.latents)
    draws = inputs.context.generator
    masked_view = {key: black_out(key, value, draws, share) for key, value in inputs.observation.items()}
    views = inputs.observation, masked_view
    with torch.no_grad():
        reference, masked_reference = (scores_of(base, view, latents).logp for view in views)
    ratio = inputs.scores.logp - reference
    masked_ratio = scores_of(inputs.policy, masked_view, latents).logp - masked_reference
    margin = beta * torch.where(inputs.mask, ratio - masked_ratio, 0.0).sum(-1)
    is_chosen = inputs.extras["advantage"].sum(-1) > 0
    return weight * torch.where(is_chosen, torch.nn.functional.softplus(-margin), 0.0).mean()


@mechanism(
    Slot.AUXILIARY,
    "spo",
    source="SPO, arXiv:2406.04314",
    needs=(Need.VALUES, Need.GAUSSIAN, Need.FINISHES, Need.BASE, Need.WHOLE_MINIBATCHES),
)
def step_preferences(
    inputs: AuxiliaryInputs,
    *,
    children: int = 4,
    decisions: int = 256,
    beta: float = 10.0,
    clip: float = 0.1,
    gap: float = 0.3,
    weight: float = 1.0,
    warmup: int = 2,
) -> Tensor:
    """Prefer, among several next latents of the same step, the one whose predicted clean action has the highest value.

    `children` are sampled from one latent of the policy's own chain, each completed without noise and evaluated by the
    action values. Best and worst are kept if the softmax of their two values, in units of the children's standard
    deviation (root mean square over the states), differs by more than `gap`. The loss is `step_preference_loss`, with
    the frozen base policy as reference. Deviation: completing the chain replaces a step-aware scorer, whose values need
    no units. Uses at most `decisions` states n of a minibatch; inactive in the first `warmup` iterations; the latents
    are [children, n, P, A]. Returns a scalar, 0 if no pair is kept. Raises ConfigError without a model of action
    values.
    """
    if inputs.context.iteration < warmup:
        return torch.zeros((), device=inputs.mask.device)
    model = inputs.action_values
    policy = inputs.policy
    draws = inputs.context.generator
    assert isinstance(policy, FinishesChain)  # which Need.FINISHES asks for
    rows = torch.randperm(len(inputs.mask), generator=draws, device=draws.device)[:decisions]
    # Of all steps of the chain: the minibatch's own may be a sample of them (scored_steps).
    steps = inputs.latents["chain"].shape[1] - 1
    step = torch.randint(steps, (len(rows),), generator=draws, device=draws.device)
    observation = {key: _at(value, rows) for key, value in inputs.observation.items()}
    one_step = {name: inputs.latents[name][rows] for name in ("chain", "executed") if name in inputs.latents}
    one_step["chosen"] = step[:, None]
    normal = scores_of(policy, observation, one_step)
    mean, spread = score_extra(normal, "mean")[:, 0], score_extra(normal, "std").detach()
    # As in the policy's log-probabilities: what is predicted beyond the executed steps has no value.
    elements = {"logp_precision": score_extra(normal, "logp_precision")[:, 0]}
    std = spread.expand(len(rows), *spread.shape[-3:])[:, 0].expand_as(mean)
    with torch.no_grad():
        reference = score_extra(scores_of(require_input(inputs.base, "base"), observation, one_step), "mean")[:, 0]
    noise = torch.randn((children, *mean.shape), generator=draws, device=draws.device)
    # Children are samples; gradients run through their log-densities alone.
    latents = mean.detach() + std * noise
    repeated_observation = {
        key: _at(value, torch.arange(len(rows)).repeat(children)) for key, value in observation.items()
    }
    with torch.no_grad():
        actions = policy.finish_chain(repeated_observation, latents.flatten(0, 1), (step + 1).repeat(children))
        value = model.action_values(repeated_observation, actions).reshape(children, -1)
        best, worst = value.argmax(0), value.argmin(0)
        # The softmax of two values differs by tanh of half their distance.
        spread = (value - value.mean(0)).square().mean().sqrt() + 1e-6
        has_gap = torch.tanh((value.amax(0) - value.amin(0)) / (2 * spread)) > gap
    place = torch.arange(len(rows), device=mean.device)

    def log_ratio(child: Tensor) -> Tensor:
        child_latents, variance = latents[child, place], 2 * std.square().clamp(min=1e-6)
        # log N(x; mean, std) - log N(x; reference, std): normalisers cancel, as the base has the policy's std.
        terms = ((child_latents - reference).square() - (child_latents - mean).square()) / variance
        return mean_of_elements(terms, elements)

    loss = step_preference_loss(log_ratio(best), log_ratio(worst), beta, clip)
    return weight * torch.where(has_gap, loss, 0.0).sum() / has_gap.sum().clamp(min=1)


def _at(value: Any, index: Tensor) -> Any:
    return value[index] if isinstance(value, Tensor) else [value[row] for row in integers(index)]
