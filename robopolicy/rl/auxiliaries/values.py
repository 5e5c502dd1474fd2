"""Losses that follow learned action values: the best of several decisions, or preferences between steps."""

import math
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.policy import FinishesChain
from robopolicy.nn.pieces import scores_of
from robopolicy.rl.context import AuxiliaryInputs, given, score_extra
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.weights import step_mean


@mechanism(Slot.AUXILIARY, "best_of_n", source="Digi-Q, arXiv:2502.15760; IDQL, arXiv:2304.10573", needs=(Need.VALUES,))
def best_of_n(
    inputs: AuxiliaryInputs, *, candidates: int = 8, decisions: int = 256, weight: float = 1.0, warmup: int = 2
) -> Tensor:
    """Imitate the best of N fresh decisions by the action values, where it beats the value of the state.

    On at most `decisions` states of a minibatch, because each of them is decided N times; not in the first `warmup`
    iterations, when the values say nothing yet. Decisions are chunks [N * n, C, A] of n states. Returns a scalar, 0
    where none is better. Raises ConfigError without a model of action values.
    """
    if inputs.context.iteration < warmup:
        return torch.zeros((), device=inputs.mask.device)
    model, policy = inputs.action_values, inputs.policy
    count = next(value for value in inputs.observation.values() if isinstance(value, Tensor)).shape[0]
    draws = inputs.context.generator
    chosen = torch.randperm(count, generator=draws, device=draws.device)[:decisions]
    here = {key: _at(value, chosen) for key, value in inputs.observation.items()}
    repeated = {key: _at(value, torch.arange(len(chosen)).repeat(candidates)) for key, value in here.items()}
    with torch.no_grad():
        decision = policy.act(repeated, draws)
        value = model.action_values(repeated, decision.actions).reshape(candidates, -1)
        best, winner = value.max(0)
        better = best > model.values(here)
    rows = winner * len(chosen) + torch.arange(len(chosen), device=winner.device)
    latents = {key: item[rows] for key, item in decision.latents.items()}
    mask = decision.mask[rows]
    logp = scores_of(policy, here, latents).logp
    # the mean over all states, as in the authors' code: the fewer are improved on, the weaker the push
    return -weight * (step_mean(mask) * torch.where(mask & better[:, None], logp, 0.0)).sum()


def step_preference_loss(better: Tensor, worse: Tensor, beta: float, clip: float) -> Tensor:
    """Return -log sigmoid(beta (log r of the better - of the worse)), [n], of log-ratios [n] to a frozen reference.

    The ratios r are clipped to 1 +- clip, so that a pair no longer pulls once both are far enough. Source: SPO.
    """
    low, high = math.log(1 - clip), math.log(1 + clip)
    return torch.nn.functional.softplus(-beta * (better.clamp(low, high) - worse.clamp(low, high)))


@mechanism(
    Slot.AUXILIARY,
    "spo",
    source="SPO, arXiv:2406.04314",
    needs=(Need.VALUES, Need.GAUSSIAN, Need.FINISHES, Need.BASE),
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
    """Prefer, among several next latents of the same step, the one whose predicted clean action is worth most.

    `children` are drawn from one latent of the policy's own chain, each finished without noise and judged by the action
    values; best and worst are kept if the softmax of their two values, in units of the spread among the children of a
    state, differs by more than `gap`. The loss is `step_preference_loss`, its reference the frozen base policy.
    Deviation: the whole remainder of the chain replaces a step-aware scorer. On at most `decisions` states n of a
    minibatch, not in the first `warmup` iterations; the latents are [children, n, P, A]. Returns a scalar, 0 where no
    pair is kept. Raises ConfigError without a model of action values.
    """
    if inputs.context.iteration < warmup:
        return torch.zeros((), device=inputs.mask.device)
    model = inputs.action_values
    policy = inputs.policy
    draws = inputs.context.generator
    assert isinstance(policy, FinishesChain)  # which Need.FINISHES asks for
    count, steps = inputs.mask.shape
    rows = torch.randperm(count, generator=draws, device=draws.device)[:decisions]
    step = torch.randint(steps, (len(rows),), generator=draws, device=draws.device)
    here = {key: _at(value, rows) for key, value in inputs.observation.items()}
    chain = inputs.latents["chain"][rows]
    one = {"chain": chain, "chosen": step[:, None]}
    normal = scores_of(policy, here, one)
    mean, spread = score_extra(normal, "mean")[:, 0], score_extra(normal, "std").detach()
    std = spread.expand(len(rows), *spread.shape[-3:])[:, 0].expand_as(mean)
    with torch.no_grad():
        reference = score_extra(scores_of(given(inputs.base, "base"), here, one), "mean")[:, 0]
    noise = torch.randn((children, *mean.shape), generator=draws, device=draws.device)
    latents = mean.detach() + std * noise
    repeated = {key: _at(value, torch.arange(len(rows)).repeat(children)) for key, value in here.items()}
    with torch.no_grad():
        actions = policy.finish_chain(repeated, latents.flatten(0, 1), (step + 1).repeat(children))
        value = model.action_values(repeated, actions).reshape(children, -1)
        best, worst = value.argmax(0), value.argmin(0)
        # The softmax of two values differs by tanh of half their distance.
        spread = (value - value.mean(0)).square().mean().sqrt() + 1e-6
        kept = torch.tanh((value.amax(0) - value.amin(0)) / (2 * spread)) > gap
    place = torch.arange(len(rows), device=mean.device)

    def log_ratio(child: Tensor) -> Tensor:
        drawn, variance = latents[child, place], 2 * std.square().clamp(min=1e-6)
        return (((drawn - reference).square() - (drawn - mean).square()) / variance).mean((-2, -1))

    loss = step_preference_loss(log_ratio(best), log_ratio(worst), beta, clip)
    return weight * torch.where(kept, loss, 0.0).sum() / kept.sum().clamp(min=1)


def _at(value: Any, index: Tensor) -> Any:
    return value[index] if isinstance(value, Tensor) else [value[row] for row in integers(index)]
