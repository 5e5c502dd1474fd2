"""Two peers of real-time chunking that need nothing of the network: averages of plans, and the most coherent of many.

Axes: B row, N sample, P predicted step, A action dimension; s chunk, d delay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.turns import turns_of
from robopolicy.inference.chunking import Delay, OverlappingPolicy, PredictsAhead, Underway


def ensembling(policy: Policy, delay: Delay, decay: float = 0.01) -> Policy:
    """Average all plans that say something of a step, with weights exp(-decay i), i = 0 the oldest; grippers and
    toggles as the newest one says.

    Temporal ensembling of ACT (arXiv:2304.13705), whose policy is asked in every step; here in every chunk. decay: a
    large one trusts old plans, a negative one new ones.
    """
    return OverlappingPolicy(policy, delay, Averaged(decay))


def bidirectional(policy: Policy, delay: Delay, samples: int = 16, decay: float = 0.5) -> Policy:
    """Draw several plans and take the one that is closest to what was planned before.

    Backward coherence of bidirectional decoding (arXiv:2408.17355): the sum over the overlap of decay^step times the
    distance. The paper also contrasts the samples with those of a weaker policy (forward contrast), which needs another
    checkpoint and is left out. Raises ConfigError for fewer than one sample, or a decay outside (0, 1].
    """
    if samples < 1 or not 0 < decay <= 1:
        raise ConfigError(f"samples is {samples} and decay {decay}: draw 1 plan or more, and decay is in (0, 1].")
    return OverlappingPolicy(policy, delay, Coherent(samples, decay))


@dataclass(frozen=True)
class Averaged:
    """`Plans` that average the next prediction with the average of those before."""

    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: Underway,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the averaged plan [B, P, A]; see `Plans`."""
        plan = policy.predict(observation, generator, deterministic=deterministic)
        overlap = underway.rest.shape[1]
        if not overlap:
            return plan
        # The plan of i decisions ago says something of the steps up to P - 1 - i s: so many plans are in the average.
        reach = torch.arange(overlap, 0, -1, device=plan.device)  # overlap - step
        count = torch.minimum(underway.decisions[:, None], (reach + underway.chunk - 1) // underway.chunk)
        # The share of the newest of `count` + 1, exp(-decay count) / sum_i exp(-decay i), without what overflows.
        sums = torch.exp(self.decay * torch.arange(int(count.max()) + 1, device=plan.device)).cumsum(0)
        share = (1 / sums[count])[..., None]
        # Angles that go round are averaged the short way round, near what the newest plan says; of what switches the
        # newest plan is taken: halfway between an open and a closed gripper lies neither.
        turns, newest = turns_of(policy.spec.action).like(plan), plan[:, :overlap]
        before = torch.where(turns.period > 0, newest - turns.shortest(newest - underway.rest), underway.rest)
        averaged = torch.where(turns.at_once > 0, newest, turns.within(share * newest + (1 - share) * before))
        return torch.cat([averaged, plan[:, overlap:]], 1)


@dataclass(frozen=True)
class Coherent:
    """`Plans` that choose among samples; see `bidirectional`."""

    samples: int
    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: Underway,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return each row's most coherent plan [B, P, A], the first sample where nothing was planned; see `Plans`."""
        many: TensorObservation = {
            key: [text for text in value for _ in range(self.samples)]
            if isinstance(value, list)
            else value.repeat_interleave(self.samples, 0)
            for key, value in observation.items()
        }
        drawn = policy.predict(many, generator, deterministic=deterministic).unflatten(0, (-1, self.samples))
        overlap = underway.rest.shape[1]
        apart = turns_of(policy.spec.action).like(drawn).shortest(drawn[:, :, :overlap] - underway.rest[:, None])
        distance = apart.norm(dim=-1)
        weights = self.decay ** torch.arange(overlap, device=distance.device)
        best = torch.where(underway.known, (weights * distance).sum(-1).argmin(1), 0)
        return drawn[torch.arange(len(drawn), device=best.device), best]
