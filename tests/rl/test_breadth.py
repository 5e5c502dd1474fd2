"""Many episodes a start (BroRL): the probability of what succeeds rises in every update, which few do not promise."""

import pytest
import torch
from made_rollouts import make_rollouts, make_scored

from robopolicy.rl.coefficients import clipped
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.advantages import w_reinforce
from robopolicy.rl.objective import policy_loss

CHOICES, RIGHT, RATE = 64, 6, 0.5


def gains(size: int, draws: int) -> torch.Tensor:
    """Return by how much the probability of the right choices rises in one update from `size` episodes, [draws].

    A softmax over CHOICES of which RIGHT succeed; rewards are 1 and -1 without a baseline, as in the paper.
    """
    generator = torch.Generator().manual_seed(0)
    differences = []
    for _ in range(draws):
        logits = torch.randn(CHOICES, generator=generator, dtype=torch.float64).requires_grad_()
        chosen = torch.multinomial(logits.detach().softmax(-1), size, True, generator=generator)
        rollouts = make_rollouts([1] * size, [0] * size, (chosen < RIGHT).float().tolist(), steps=1)
        advantage = w_reinforce(rollouts, Context(generator), positive=1.0)[..., None].double()
        logp = logits.log_softmax(-1)[chosen][:, None, None]
        scored = make_scored(rollouts, rollouts.logp_behaviour, advantage)
        coefficient, _ = clipped(scored)
        (step,) = torch.autograd.grad(policy_loss(logp, coefficient, scored.mask.double() / size), logits)
        before, after = (logs.detach().softmax(-1)[:RIGHT].sum() for logs in (logits, logits - RATE * step))
        differences.append(after - before)
    return torch.stack(differences)


@pytest.mark.checks("BroRL")
def test_what_was_not_drawn_no_longer_takes_probability_from_what_is_right():
    few, many = gains(2, 100), gains(512, 60)
    assert 0.1 < float((few < 0).double().mean()) < 0.3, "with two episodes a fifth of the updates does harm"
    assert bool((many > 0).all())
    assert float(many.mean()) > 0.5 * float(few.mean()), "and not because the steps are small"
