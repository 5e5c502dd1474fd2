"""TD3 and the agents of its family: two critics, smoothed targets, a deterministic actor with delayed updates.

Source: TD3, Fujimoto et al. 2018, arXiv:1802.09477. Each agent adds its own regularisation of the actor towards the
data. For TD3+BC (Fujimoto & Gu 2021, arXiv:2106.06860) it is the distance to the recorded action; ReBRAC has that
penalty in the critics' targets too; PRDC uses the nearest recorded action.
"""

import copy
from abc import abstractmethod
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.transitions import Transitions
from robopolicy.nn.blocks import Members, follow
from robopolicy.rl.offline.agent import Critics, OfflineAgent, Standardiser
from robopolicy.rl.offline.configuration import (
    NOISE_CLIP,
    POLICY_NOISE,
    SLACK,
    NeighbourIndex,
    PrdcConfig,
    ReBracConfig,
    Td3BcConfig,
    Td3Config,
)


class DeterministicActor(torch.nn.Module):
    """Deterministic actor: actions in [-1, 1] from states."""

    def __init__(self, state: int, action: int, width: int, depth: int):
        super().__init__()
        self.state = Standardiser(state)
        self.members = Members(1, state, width, depth, action, "relu")

    def forward(self, state: Tensor) -> Tensor:
        """Return actions [B, A]."""
        return self.members(self.state(state)[None])[0].tanh()


class Td3(OfflineAgent):
    """TD3 agent without its `actor_loss`; actions are in [-1, 1]."""

    def __init__(self, config: Td3Config, state: int, action: int, seed: int):
        super().__init__()
        self.config, self.updates = config, 0
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            self.actor = DeterministicActor(state, action, config.width, config.depth)
            self.critics = Critics(2, state, action, config.width, config.depth, config.layer_norm)
        self.slow_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.optimisers = {
            "actor": torch.optim.Adam(self.actor.parameters(), config.learning_rate),
            "critics": torch.optim.Adam(self.critics.parameters(), config.learning_rate),
        }

    @torch.no_grad()
    def start_small(self, seed: int) -> None:
        """Initialise output layers from U(-1e-3, 1e-3) for the actor and U(-3e-3, 3e-3) for the critics, and copy them
        to the target networks.

        Initial actions are then near the centre of the box, and initial values near 0 (ReBRAC, arXiv:2305.09836).
        """
        draws = torch.Generator().manual_seed(seed)
        starts = ((self.actor, self.slow_actor, 1e-3), (self.critics, self.slow_critics, 3e-3))
        for part, slow, bound in starts:
            part.members.weights[-1].uniform_(-bound, bound, generator=draws)
            slow.load_state_dict(part.state_dict())

    @abstractmethod
    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the loss [] of the actor's actions, [B, A], in the batch's states."""

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the value of the next states in the critics' targets, [B], if `action` [B, A] is taken there."""
        return self.slow_critics(batch.next_state, action).min(0).values

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]."""
        for part in (self.actor, self.critics, self.slow_actor, self.slow_critics):
            part.state.fit(state)

    def target(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Return r + decay (1 - terminated) following(s', a' + clipped noise), [B]; for single steps decay is the
        discount.
        """
        config = self.config
        with torch.no_grad():
            noise = torch.randn(batch.action.shape, generator=generator, device=batch.action.device)
            # Target smoothing: a narrow peak of Q, often an error, must not set the target.
            noise = (POLICY_NOISE * noise).clamp(-NOISE_CLIP, NOISE_CLIP)
            action = (self.slow_actor(batch.next_state) + noise).clamp(-1, 1)
            return batch.backup(self.following(batch, action), config.discount)

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of the critics, and every `delay` updates one of the actor; returns metrics by name, scalars.

        batch: B transitions, states [B, S] and actions [B, A] in [-1, 1].
        """
        values = self.critics(batch.state, batch.action)
        critic_loss = (values - self.target(batch, generator)).square().mean(1).sum()
        self.step("critics", critic_loss)
        self.updates += 1
        # The actor waits for critics that have settled: TD3's delayed updates, slow copies included.
        if self.updates % self.config.policy_delay == 0:
            self.step("actor", self.actor_loss(batch, self.actor(batch.state)))
            follow(self.slow_actor, self.actor, self.config.tau)
            follow(self.slow_critics, self.critics, self.config.tau)
        return {"critic_loss": critic_loss.detach(), "value": values.detach().mean()}

    @torch.no_grad()
    def value(self, state: Tensor) -> Tensor:
        """Return the value [B] of acting without noise: the minimum Q."""
        return self.critics(state, self.actor(state)).min(0).values

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A]; the actor has no noise of its own."""
        return self.actor(state)

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the log density [B], up to a constant, of a Gaussian around the actor's action."""
        return -0.5 * (action - self.actor(state)).square().sum(-1)

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments, and the number of updates."""
        return {**super().tree(), "updates": self.updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.updates = tree["updates"]


def ascend_near_anchor(value: Tensor, action: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Return -alpha mean(Q) / mean|Q| + mean((action - anchor)^2), []: increase Q while staying close to the anchor.

    value: Q [B] of `action` [B, A]; anchor: [B, A]. mean|Q| has no gradient, so that alpha is independent of the scale
    of rewards.
    """
    scale = alpha / value.abs().mean().detach().clamp_min(1e-6)
    return -(scale * value).mean() + (action - anchor).square().mean()


class Td3Bc(Td3):
    """TD3+BC agent: the actor maximises Q and imitates the data; actions are in [-1, 1]."""

    config: Td3BcConfig

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a)^2, [], for the actor's actions, [B, A]; means over all."""
        return ascend_near_anchor(self.critics(batch.state, action)[0], action, batch.action, self.config.alpha)


class ReBrac(Td3):
    """TD3+BC with the behaviour penalty also in the critics' targets; actions are in [-1, 1].

    Source: Tarasov et al. 2023, arXiv:2305.09836. Deviation: states are standardised, as for every agent here.

    The critics' penalty needs the next recorded action. Where it is unknown (the last step before a time limit,
    `next_known` False), the target has no penalty. Where the task ended, the target has neither penalty nor value.
    """

    config: ReBracConfig

    def __init__(self, config: ReBracConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)

    def begin(self, data: Transitions) -> None:
        """Implement `OfflineAgent.begin`; raises DataError if no transition has a known next action, [N, A]."""
        super().begin(data)
        goes_on = ~data.terminated
        if (
            self.config.beta_critic
            and bool(goes_on.any())
            and not bool((goes_on & next_recorded_action(data)[1]).any())
        ):
            raise DataError(
                "ReBRAC needs the next action, which no transition of this data has; with beta_critic=0 it is "
                "not needed."
            )

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return min Q'(s', a') - beta_critic |a' - a'_data|^2, [B], for a' [B, A]; raises DataError without data."""
        value = super().following(batch, action)
        if not self.config.beta_critic:
            return value
        next_data_action, next_known = next_recorded_action(batch)
        distance = (action - next_data_action).square().sum(-1)
        return value - self.config.beta_critic * torch.where(next_known, distance, 0.0)

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the mean of beta_actor |pi - a|^2 - min Q / mean|min Q|, [], for the actor's actions, [B, A]."""
        value = self.critics(batch.state, action).min(0).values
        # Q is brought to a mean size of 1: beta_actor means the same whatever the rewards. Detached, as it is a unit.
        scale = 1 / value.abs().mean().detach().clamp_min(1e-6)
        return (self.config.beta_actor * (action - batch.action).square().sum(-1) - scale * value).mean()


def next_recorded_action(batch: Transitions) -> tuple[Tensor, Tensor]:
    """Return the next recorded action [N, A], and where it is known [N] bool; raises DataError if it is not
    recorded.
    """
    if batch.next_action is None:
        raise DataError("ReBRAC needs next_action, which these transitions lack; with beta_critic=0 it is not needed.")
    return batch.next_action, torch.ones_like(batch.terminated) if batch.next_known is None else batch.next_known


class Index(Protocol):
    """Nearest-neighbour index."""

    def query(self, x: Array, *, eps: float) -> tuple[Array, Array]:
        """Return distances [N] and rows [N] of neighbours of x [N, K], at most 1 + eps times as far as the nearest."""
        ...


def index_of(keys: Array) -> Index:
    """Build a k-d tree of keys [N, K]."""
    from scipy.spatial import cKDTree  # pyright: ignore

    return cast(Index, cKDTree(keys))


class Prdc(Td3):
    """TD3 whose actor is regularised towards the nearest recorded action of the same or a similar state; actions are in
    [-1, 1].

    Source: Ran et al. 2023, arXiv:2306.06569. If only a neighbouring state has the better action, TD3+BC is regularised
    towards the worse one. Here the target is the neighbour of (beta s, pi(s)) among the recorded (beta s, a).
    Deviation: output layers are initialised small, as in ReBRAC, so that the first neighbours are not those of the
    corners of the box. The data is not saved: call `begin` again after `restore`.
    """

    config: PrdcConfig

    def __init__(self, config: PrdcConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)
        self.index: Index | None = None
        self.recorded: Tensor | None = None

    def begin(self, data: Transitions) -> None:
        """Fit the statistics of the data's states [N, S], and build the tree of (beta s, a), [N, S + A]."""
        super().begin(data)
        self.index, self.recorded = index_of(self._keys(data.state, data.action)), data.action

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]; a tree built with other statistics is
        dropped.
        """
        super().fit_statistics(state)
        self.index = self.recorded = None

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the state from `tree`; call `begin` afterwards."""
        super().restore(tree)
        self.index = self.recorded = None

    def nearest(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the recorded action [B, A] of the nearest neighbour of (beta s, a), states [B, S], actions [B, A].

        Raises DataError before `begin`.
        """
        if self.index is None or self.recorded is None:
            raise DataError("PRDC searches nearest neighbours in its data: call begin(data) first, also after restore.")
        slack = SLACK if self.config.index is NeighbourIndex.APPROXIMATE else 0.0
        _, neighbours = self.index.query(self._keys(state, action), eps=slack)
        return self.recorded[torch.as_tensor(neighbours, device=self.recorded.device)]

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a_near)^2, [], for the actor's actions, [B, A]; means over all."""
        nearest_action = self.nearest(batch.state, action)
        return ascend_near_anchor(self.critics(batch.state, action)[0], action, nearest_action, self.config.alpha)

    @torch.no_grad()
    def _keys(self, state: Tensor, action: Tensor) -> Array:
        keys = torch.cat([self.config.beta * self.actor.state(state), action], -1)
        return cast(Array, keys.cpu().numpy())  # pyright: ignore[reportUnknownMemberType]


keep_former_names(__name__, {"climb_and_stay": "ascend_near_anchor", "followed": "next_recorded_action"})
