"""TD3 and the agents of its family: two critics, smoothed targets, a deterministic actor that is moved less often.

Source: TD3, Fujimoto et al. 2018, arXiv:1802.09477. What keeps an actor with the data is each agent's own: of TD3+BC
(Fujimoto & Gu 2021, arXiv:2106.06860) it is the distance to the recorded action; ReBRAC has that penalty in the
critics' targets too; PRDC holds the actor to the nearest recorded action.
"""

import copy
from abc import abstractmethod
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
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
    """Actions in [-1, 1] from states."""

    def __init__(self, state: int, action: int, width: int, depth: int):
        super().__init__()
        self.state = Standardiser(state)
        self.members = Members(1, state, width, depth, action, "relu")

    def forward(self, state: Tensor) -> Tensor:
        """Return actions [B, A]."""
        return self.members(self.state(state)[None])[0].tanh()


class Td3(OfflineAgent):
    """An agent but for its `actor_loss`; actions are in [-1, 1]."""

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
            "actor": torch.optim.Adam(self.actor.parameters(), config.rate),
            "critics": torch.optim.Adam(self.critics.parameters(), config.rate),
        }

    @torch.no_grad()
    def start_small(self, seed: int) -> None:
        """Draw output layers from U(-1e-3, 1e-3), the actor's, and U(-3e-3, 3e-3), the critics'; slow copies alike.

        It begins in the middle of the box, with values that no target has to undo (ReBRAC, arXiv:2305.09836).
        """
        draws = torch.Generator().manual_seed(seed)
        starts = ((self.actor, self.slow_actor, 1e-3), (self.critics, self.slow_critics, 3e-3))
        for part, slow, bound in starts:
            part.members.weights[-1].uniform_(-bound, bound, generator=draws)
            slow.load_state_dict(part.state_dict())

    @abstractmethod
    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the loss [] of what the actor would do, [B, A], in the batch's states."""

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return what the next states are worth to the critics' targets, [B], if `action` [B, A] is taken there."""
        return self.slow_critics(batch.next_state, action).min(0).values

    def fit_statistics(self, state: Tensor) -> None:
        """Standardise states as these [N, S] are, everywhere alike."""
        for part in (self.actor, self.critics, self.slow_actor, self.slow_critics):
            part.state.fit(state)

    def target(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Return r + decay (1 - terminated) following(s', a' + clipped noise), [B]; of single steps discount decays."""
        config = self.config
        with torch.no_grad():
            noise = torch.randn(batch.action.shape, generator=generator, device=batch.action.device)
            # Target smoothing: a narrow peak of Q, often an error, must not set the target.
            noise = (POLICY_NOISE * noise).clamp(-NOISE_CLIP, NOISE_CLIP)
            action = (self.slow_actor(batch.next_state) + noise).clamp(-1, 1)
            return batch.backup(self.following(batch, action), config.discount)

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of the critics, and every `delay` of them one of the actor; returns figures by name, scalars.

        batch: B transitions, states [B, S] and actions [B, A] in [-1, 1].
        """
        values = self.critics(batch.state, batch.action)
        critic_loss = (values - self.target(batch, generator)).square().mean(1).sum()
        self.step("critics", critic_loss)
        self.updates += 1
        # The actor waits for critics that have settled: TD3's delayed updates, slow copies included.
        if self.updates % self.config.delay == 0:
            self.step("actor", self.actor_loss(batch, self.actor(batch.state)))
            follow(self.slow_actor, self.actor, self.config.tau)
            follow(self.slow_critics, self.critics, self.config.tau)
        return {"critic_loss": critic_loss.detach(), "value": values.detach().mean()}

    @torch.no_grad()
    def value(self, state: Tensor) -> Tensor:
        """Return the value [B] of acting without noise: the smaller Q."""
        return self.critics(state, self.actor(state)).min(0).values

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A]; it has no noise of its own."""
        return self.actor(state)

    def log_prob(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the log density [B], up to a constant, of a step Gaussian around what it would do."""
        return -0.5 * (action - self.actor(state)).square().sum(-1)

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments, and how often it was updated."""
        return {**super().tree(), "updates": self.updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.updates = tree["updates"]


def climb_and_stay(value: Tensor, action: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Return -alpha mean(Q) / mean|Q| + mean((action - anchor)^2), []: climb Q, as far from the anchor as it pays.

    value: Q [B] of `action` [B, A]; anchor: [B, A]. mean|Q| is held fixed, so that alpha means the same whatever the
    scale of rewards.
    """
    scale = alpha / value.abs().mean().detach().clamp_min(1e-6)
    return -(scale * value).mean() + (action - anchor).square().mean()


class Td3Bc(Td3):
    """TD3+BC: the actor climbs Q and stays with the data; actions are in [-1, 1]."""

    config: Td3BcConfig

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a)^2, [], for what the actor would do, [B, A]; means over all."""
        return climb_and_stay(self.critics(batch.state, action)[0], action, batch.action, self.config.alpha)


class ReBrac(Td3):
    """TD3+BC with the penalty for leaving the data in the critics' targets too; actions are in [-1, 1].

    Source: Tarasov et al. 2023, arXiv:2305.09836. Deviation: states are standardised, as for every agent here.

    The critics' penalty needs what was recorded next. Where a recording goes on unseen (its last step before a time
    limit, `next_known` False) that is not known, and the target has no penalty there; where the task ended nothing
    follows, penalty or value.
    """

    config: ReBracConfig

    def __init__(self, config: ReBracConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)

    def begin(self, data: Transitions) -> None:
        """See `OfflineAgent`; raises DataError where no transition knows what was done next, [N, A]."""
        super().begin(data)
        goes_on = ~data.terminated
        if self.config.beta_critic and bool(goes_on.any()) and not bool((goes_on & followed(data)[1]).any()):
            raise DataError("ReBRAC: no next action is known in this data; beta_critic=0 learns without.")

    def following(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return min Q'(s', a') - beta_critic |a' - a'_data|^2, [B], for a' [B, A]; raises DataError without data."""
        value = super().following(batch, action)
        if not self.config.beta_critic:
            return value
        recorded, known = followed(batch)
        distance = (action - recorded).square().sum(-1)
        return value - self.config.beta_critic * torch.where(known, distance, 0.0)

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return the mean of beta_actor |pi - a|^2 - min Q / mean|min Q|, [], for what the actor would do, [B, A]."""
        value = self.critics(batch.state, action).min(0).values
        # Q is brought to a mean size of 1: beta_actor means the same whatever the rewards. Detached, as it is a unit.
        scale = 1 / value.abs().mean().detach().clamp_min(1e-6)
        return (self.config.beta_actor * (action - batch.action).square().sum(-1) - scale * value).mean()


def followed(batch: Transitions) -> tuple[Tensor, Tensor]:
    """Return what was done next [N, A], and where that is known [N] bool; raises DataError where it is not recorded."""
    if batch.next_action is None:
        raise DataError("ReBRAC learns from next_action, and these transitions lack it; beta_critic=0 learns without.")
    return batch.next_action, torch.ones_like(batch.terminated) if batch.next_known is None else batch.next_known


class Index(Protocol):
    """Finds neighbours."""

    def query(self, x: Array, *, eps: float) -> tuple[Array, Array]:
        """Return distances [N] and rows [N] of neighbours of x [N, K], at most 1 + eps times as far as the nearest."""
        ...


def index_of(keys: Array) -> Index:
    """Return a k-d tree of keys [N, K]."""
    from scipy.spatial import cKDTree  # pyright: ignore

    return cast(Index, cKDTree(keys))


class Prdc(Td3):
    """TD3 whose actor is held to the nearest recorded action, of this state or of one like it; actions are in [-1, 1].

    Source: Ran et al. 2023, arXiv:2306.06569. Where data has the better action in a neighbouring state only, TD3+BC is
    held to the worse one; here the neighbour of (beta s, pi(s)) among the recorded (beta s, a) is what pulls.
    Deviation: output layers begin small, as ReBRAC's do, so that the first neighbours are not those of the corners of
    the box. The data is no part of what is saved: `begin` anew after `restore`.
    """

    config: PrdcConfig

    def __init__(self, config: PrdcConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.start_small(seed)
        self.index: Index | None = None
        self.recorded: Tensor | None = None

    def begin(self, data: Transitions) -> None:
        """Take the statistics of the data's states [N, S], and build the tree of (beta s, a), [N, S + A]."""
        super().begin(data)
        self.index, self.recorded = index_of(self._keys(data.state, data.action)), data.action

    def fit_statistics(self, state: Tensor) -> None:
        """Standardise states as these [N, S] are; a tree of states that were standardised otherwise is forgotten."""
        super().fit_statistics(state)
        self.index = self.recorded = None

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`; `begin` comes after."""
        super().restore(tree)
        self.index = self.recorded = None

    def nearest(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the recorded action [B, A] of the nearest neighbour of (beta s, a), states [B, S], actions [B, A].

        Raises DataError before `begin`.
        """
        if self.index is None or self.recorded is None:
            raise DataError("PRDC looks for neighbours in its data: call begin(data) first, after restore too.")
        slack = SLACK if self.config.index is NeighbourIndex.APPROXIMATE else 0.0
        _, found = self.index.query(self._keys(state, action), eps=slack)
        return self.recorded[torch.as_tensor(found, device=self.recorded.device)]

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a_near)^2, [], for what the actor would do, [B, A]; means over all."""
        near = self.nearest(batch.state, action)
        return climb_and_stay(self.critics(batch.state, action)[0], action, near, self.config.alpha)

    @torch.no_grad()
    def _keys(self, state: Tensor, action: Tensor) -> Array:
        keys = torch.cat([self.config.beta * self.actor.state(state), action], -1)
        return cast(Array, keys.cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
