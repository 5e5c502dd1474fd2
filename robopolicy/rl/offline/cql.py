"""Conservative Q-learning, and Cal-QL: soft actor-critic whose critics are pushed down wherever no data holds them up.

Sources: CQL(H), Kumar et al. 2020, arXiv:2006.04779, with importance-weighted samples and a fixed weight; Cal-QL,
Nakamoto et al. 2023, arXiv:2303.05479. Left out: the Lagrangian that tunes the weight, the maximum over next actions.
"""

import math

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.configuration import CqlConfig
from robopolicy.rl.offline.sac import Sac


class Cql(Sac):
    """The agent; actions are in [-1, 1].

    With `calibrated`, the Q of the actor's samples counts as no less than the recorded return from the state on, where
    that is known: a time limit hides it (`outcome` minus infinity), and nothing is calibrated there.
    """

    config: CqlConfig

    def begin(self, data: Transitions) -> None:
        """See `OfflineAgent`; raises DataError where Cal-QL finds no outcome [N] known."""
        super().begin(data)
        if self.config.calibrated and not bool(recorded_outcome(data).isfinite().any()):
            raise DataError("Cal-QL: no recorded return is known, every episode is cut by a time limit: use CQL.")

    def regulariser(
        self, batch: Transitions, values: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return alpha times the sum over critics of the mean conservative gap, [], and figures by name, scalars.

        values: Q [N, B] of the batch's actions. SAC's own term (none by default) is added.
        """
        penalty, figures = super().regulariser(batch, values, generator)
        if not self.config.alpha:
            return penalty, figures
        count, samples = len(batch), self.config.samples
        with torch.no_grad():
            shape = (samples, *batch.action.shape)
            uniform = 2 * torch.rand(shape, generator=generator, device=batch.action.device) - 1
            here, here_density = self.actor.sample_several(batch.state, samples, generator)
            ahead, ahead_density = self.actor.sample_several(batch.next_state, samples, generator)
            # The box has volume 2^A.
            density = torch.full((samples, count), -batch.action.shape[1] * math.log(2.0), device=values.device)
            density = torch.cat([density, here_density, ahead_density])
        actions = torch.cat([uniform, here, ahead])
        # Every sample is judged in the state at hand, those of the next state's policy too.
        states = batch.state.expand(3 * samples, -1, -1).flatten(0, 1)
        sampled = self.critics(states, actions.flatten(0, 1)).unflatten(1, (3 * samples, count))
        if self.config.calibrated:
            known = recorded_outcome(batch)
            figures["calibrated"] = (sampled.detach()[:, samples:] < known).float().mean()
            # Calibrated are the actor's own actions; uniform ones are pushed down as in CQL.
            sampled = torch.cat([sampled[:, :samples], torch.maximum(sampled[:, samples:], known)], 1)
        # log integral exp Q, by importance sampling; the logarithm of the number of samples has no gradient.
        gap = (sampled - density).logsumexp(1) - values
        return penalty + self.config.alpha * gap.mean(1).sum(), {**figures, "conservative_gap": gap.detach().mean()}


def recorded_outcome(batch: Transitions) -> Tensor:
    """Return `outcome` [N]; raises DataError where it is not there at all."""
    if batch.outcome is None:
        raise DataError("Cal-QL learns from recorded returns, and these transitions lack `outcome`.")
    return batch.outcome
