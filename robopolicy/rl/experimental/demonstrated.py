"""Experimental auxiliary losses on demonstrated actions that the policy can score: (inputs) -> scalar.

They differ from auxiliaries=[experts] in how strongly an unlikely action is imitated. Tokens have probabilities;
denoising policies with likelihood=matching have a surrogate.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.policy import RecoversLatents, ScoredPolicy, Scores, TensorObservation
from robopolicy.nn.micro_batches import scores_of
from robopolicy.rl.context import AuxiliaryInputs, require_input, score_extra
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def demonstrated_chunks(inputs: AuxiliaryInputs) -> tuple[TensorObservation, dict[str, Tensor], Tensor]:
    """Return the next batch of expert data as observation, latents of its chunks [n, ...] and a mask of steps [n, K].

    Tokens of control steps after the end of an episode are outside the mask.
    """
    batch, policy = next(require_input(inputs.experts, "experts")), inputs.policy
    assert isinstance(policy, RecoversLatents)  # which Need.SCORES_ACTIONS asks for
    spec = policy.spec
    latents = policy.steps_of(batch["actions"][:, : spec.chunk], inputs.context.generator)
    valid = batch["action_valid"][:, : spec.chunk]
    per_action = spec.steps_per_action if spec.categorical else 0
    mask = valid.repeat_interleave(per_action, 1) if per_action else valid[:, :1].expand(-1, spec.scored_steps)
    return batch["observation"], latents, mask


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the masked entries [n, K], a scalar."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


@mechanism(
    Slot.AUXILIARY,
    "one_step",
    source="OTR, arXiv:2509.26313",
    needs=(Need.CATEGORICAL, Need.SCORES_ACTIONS, Need.EXPERTS, Need.WHOLE_MINIBATCHES),
)
def one_step(inputs: AuxiliaryInputs, *, weight: float = 0.1, draws: int = 8, beta: float = 0.0) -> Tensor:
    """Imitate demonstrated tokens by policy gradient: draw tokens from the policy, and pay those that are equal.

        loss = -mean over draws of R log pi(drawn),   R = 1 if drawn = demonstrated, else beta <= 0

    In expectation the gradient by the logits is -(1 - beta) pi(y) (e_y - pi), imitation weighed by the probability of
    the demonstrated token y: what the policy would hardly do is hardly imitated. A drawn continuous action is never
    equal to a demonstrated one, so this is for tokens. The paper's numbers were not found; these are ours, and draws
    are at the policy's own temperature. The paper trains with this loss alone: coefficient=none. Returns a scalar, [].
    """
    observation, latents, mask = demonstrated_chunks(inputs)
    scores = scores_of(inputs.policy, observation, latents)
    log_probabilities = score_extra(scores, "log_probabilities")
    shape = log_probabilities.shape[:-1]
    probabilities = log_probabilities.detach().exp().flatten(0, 1)
    samples = torch.multinomial(probabilities, draws, replacement=True, generator=inputs.context.generator)
    samples = samples.reshape(*shape, draws)
    reward = torch.where(samples == latents["tokens"][..., None], 1.0, beta)
    return -weight * masked_mean((reward * log_probabilities.gather(-1, samples)).mean(-1), mask)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "total_variation": lambda r: r,
    "pearson": lambda r: r - r.square() / 4,
    "hellinger": lambda r: r / (1 + r),
    "jensen_shannon": lambda r: math.log(2) + torch.log1p(-(-r).exp() / 2),
}
"""Functions phi of an implicit reward r, increasing with slope 1 at 0, and (but the first) with a falling slope."""


@mechanism(
    Slot.AUXILIARY,
    "f_imitation",
    source="SFT-DPO-unified, arXiv:2507.00018",
    needs=(Need.SCORES_ACTIONS, Need.EXPERTS, Need.BASE, Need.WHOLE_MINIBATCHES),
)
def f_imitation(
    inputs: AuxiliaryInputs, *, weight: float = 0.1, divergence: str = "pearson", beta: float = 1.0
) -> Tensor:
    """Imitate demonstrated actions less, the further they have risen above the base policy: -mean phi(r).

    r = beta log(pi / pi_base) of a chunk, the mean over its steps, is the implicit reward of DPO. phi, by the
    divergence that the policy is kept near its base in: total_variation r, which is plain imitation; pearson r - r^2 /
    4; hellinger r / (1 + r); jensen_shannon log(2 - exp(-r)). r is held above -1/2, where the last two would end. The
    paper, which could not be read, derives such losses and uses small learning rates; these forms are derived here.
    Returns a scalar, []. Raises ConfigError for an unknown divergence.
    """
    if divergence not in FORMS:
        raise unknown_option("f_imitation.divergence", divergence, FORMS)
    observation, latents, mask = demonstrated_chunks(inputs)

    def log_probs(policy: ScoredPolicy) -> Scores:
        return scores_of(policy, observation, latents)

    with torch.no_grad():
        base = log_probs(require_input(inputs.base, "base")).logp
    change = torch.where(mask, log_probs(inputs.policy).logp - base, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    reward = (beta * change).clamp(min=-0.5)
    return -weight / beta * masked_mean(FORMS[divergence](reward), mask.any(1))
