"""A policy, recorded episodes and a critic that knows what they are worth, small enough for tests of improvers."""

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import TASK, Field
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.interface import Interface
from robopolicy.training.offline.improvers import OfflineContext

FIELDS = {"observation.state": Field((1,))}
ACTION = Field((1,), low=-1.0, high=1.0)
BEST = 0.5
"""The action that is paid most, everywhere."""


def recorded(count=40, length=6, seed=0) -> Episodes:
    draws = torch.Generator().manual_seed(seed)
    steps = count * length
    actions = 2 * torch.rand(steps, 1, generator=draws) - 1
    return Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={"observation.state": torch.rand(steps + count, 1, generator=draws)},
        actions=actions,
        lengths=torch.full((count,), length),
        tasks=("",) * count,
        rewards={"near": -(actions[:, 0] - BEST).square()},
        terminated=torch.ones(count, dtype=torch.bool),
    )


class Knows(OfflineAgent):
    """A critic that knows what actions are worth: two members, the second flatters."""

    def __init__(self):
        super().__init__()
        self.config = IqlConfig()
        self.optimisers = {}

    def fit_statistics(self, state):
        """Nothing to fit."""

    def update(self, batch, generator):
        """Nothing to learn."""
        return {}

    def act(self, state, generator=None):
        """What is best."""
        return torch.full((len(state), 2), BEST)

    def value(self, state):
        """What standing still is worth."""
        return torch.full((len(state),), -(BEST**2))

    def action_values(self, state, action):
        """Minus the squared distance from the best."""
        worth = -(action - BEST).square().mean(1)
        return torch.stack([worth, worth + 1])


def make_policy(seed=0, kind: PolicyKind = PolicyKind.DIFFUSION) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(kind=kind, chunk=2, prediction_steps=2, sampling_steps=3, min_sampling_std=0.3)
    data = recorded()
    values = {"observation.state": data.observation["observation.state"], "action": data.actions}
    return DenoisingPolicy(config, FIELDS, ACTION, fps=10.0, values=values, seed=seed).eval()


def imitated_policy(kind: PolicyKind = PolicyKind.DIFFUSION) -> DenoisingPolicy:
    """A policy that does what was recorded: anything."""
    policy, data = make_policy(kind=kind), recorded()
    optimiser = torch.optim.Adam(policy.parameters(), 2e-3)
    batches = data.sampler(1, 2, 128, torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(1)
    for _ in range(150):
        optimiser.zero_grad()
        policy.loss(next(batches), draws)["denoising"].mean().backward()
        optimiser.step()
    return policy.eval()


def lesson() -> OfflineContext:
    data = recorded()
    interface = Interface(FIELDS, ACTION, chunk=2)
    return OfflineContext(Knows(), recorded_decisions(data, interface, 0.9), interface)


def distance(policy) -> float:
    """How far noisy decisions are from the best action."""
    observation = {
        "observation.state": torch.rand(256, 1, 1, generator=torch.Generator().manual_seed(3)),
        TASK: [""] * 256,
    }
    return float((policy.act(observation, torch.Generator().manual_seed(4)).actions - BEST).square().mean())
