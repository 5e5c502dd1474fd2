"""Staged rollout: replaces a known policy by a new one while success stays above a lower bound (StepMix and EpsMix).

A random draw selects the acting policy at every policy call (StepMix) or once per episode (EpsMix): the tuned policy
with probability `share`, else the base. After every batch of episodes, `share` becomes the largest value whose success
has a lower confidence bound above the floor, 0 if there is none. Success at any share is estimated from all episodes so
far, whatever their shares: the world's factor in an episode's probability is the same for all of them, and the
probabilities of the draws are known. With m of T draws for the tuned policy, and shares p_k of the n episodes played,

    p_share(m, T) = share^m (1 - share)^(T - m),   w = p_share / mean_k p_k,   V(share) = mean(w y),

the balance heuristic of multiple importance sampling (Veach and Guibas 1995). Episodes of the base alone have share 0,
so a good estimate of the base is what first permits a small share of the tuned policy.

Source: Li et al. 2023, arXiv:2306.06265, for finite problems. There, values of mixtures follow from counts of every
state and action, and StepMix uses the base for the first steps of an episode and the tuned policy for the others.
Deviations: success of complete episodes and importance weights instead of counts; one draw per policy call; Wilson's
bound at the effective number of episodes instead of Hoeffding's: the guarantee is as good as that approximation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows, World
from robopolicy.evaluation.episode_batches import play_episode_batch
from robopolicy.evaluation.intervals import wilson_bound

SHARES = np.linspace(0.0, 1.0, 101)
"""Candidate probabilities of the tuned policy."""

Coin = Literal["step", "episode"]
"""Interval at which the acting policy is drawn: at every policy call (StepMix), or once per episode (EpsMix)."""


class MixedPolicy:
    """A `Policy` that mixes two policies: a random draw at every policy call, or once per episode, selects `tuned` or
    `base`.

    share: probability of the tuned policy; log-probabilities are not computed. The draws use the policies' noise
    generator, so they belong to the episode. `coins` [D, B] contains the result of each policy call since all rows were
    reset. Raises ConfigError when the two policies have different chunks, actions or histories.
    """

    def __init__(self, base: Policy, tuned: Policy, share: float, coin: Coin):
        if (base.spec.chunk, base.spec.action.shape) != (tuned.spec.chunk, tuned.spec.action.shape):
            raise ConfigError(
                f"The base outputs chunks of {base.spec.chunk} steps with shape {base.spec.action.shape}, the other "
                f"policy {tuned.spec.chunk} with {tuned.spec.action.shape}: both must have the same chunk length and "
                "action shape."
            )
        if base.spec.history != tuned.spec.history:
            raise ConfigError(
                f"The base reads a history of {base.spec.history} frames, the other policy {tuned.spec.history}: "
                "both must be equal."
            )
        self.base = base
        self.tuned = tuned
        self.share = share
        self.coin = coin
        self.coins: list[torch.Tensor] = []
        self._thrown: torch.Tensor | None = None
        self._ended = torch.zeros(0, dtype=torch.bool)  # [B]: rows whose episode's coin is to be thrown anew

    @property
    def spec(self) -> PolicySpec:
        """The base's spec with the observation fields of both policies."""
        observation_fields = {**self.base.spec.observation, **self.tuned.spec.observation}
        return replace(self.base.spec, observation=observation_fields, scored_steps=0, steps_per_action=0)

    def reset(self, rows: Rows = None) -> None:
        """Reset both policies and repeat the per-episode draw. rows: indices [R], None for all."""
        self.base.reset(rows)
        self.tuned.reset(rows)
        if rows is None:
            self.coins, self._thrown = [], None
        elif self._thrown is not None:
            self._ended[torch.as_tensor(np.asarray(rows), dtype=torch.int64)] = True

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Call both policies and return the selected one's actions [B, C, A], without log-probabilities."""
        actions_of_both = [
            each.act(observation, generator, deterministic=deterministic).actions for each in (self.base, self.tuned)
        ]
        tuned_mask = uniform((len(actions_of_both[0]),), generator).cpu() < self.share
        if self._thrown is not None and self.coin == "episode":
            tuned_mask = torch.where(self._ended, tuned_mask, self._thrown)
        self._thrown, self._ended = tuned_mask, torch.zeros_like(tuned_mask)
        self.coins.append(tuned_mask)
        return Decision(
            torch.where(tuned_mask.to(actions_of_both[0].device)[:, None, None], actions_of_both[1], actions_of_both[0])
        )


@dataclass
class Deployment:
    """Chooses the largest safe probability (`share`) of the tuned policy from the episodes so far.

    floor: lower bound of success to keep; confidence: of the one-sided bound. Outcomes are added in batches of n
    episodes: see `tell`.
    """

    floor: float
    confidence: float = 0.95
    shares: list[float] = field(default_factory=list[float])
    heads: list[int] = field(default_factory=list[int])
    coins: list[int] = field(default_factory=list[int])
    success: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1 or not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"floor={self.floor} must be a success rate in [0, 1], and confidence={self.confidence} in [0.5, 1)."
            )

    def tell(self, share: float, heads: Sequence[int], coins: Sequence[int], success: Sequence[bool]) -> None:
        """Add n episodes played with `share`: of `coins` [n] draws, `heads` [n] selected the tuned policy."""
        self.shares += [share] * len(heads)
        self.heads += [int(each) for each in heads]
        self.coins += [int(each) for each in coins]
        self.success += [bool(each) for each in success]

    def estimate(self, shares: Array) -> tuple[Array, Array]:
        """Return the estimated success at each of `shares` [G], and the effective number of episodes behind it, [G]
        each.
        """
        heads, tails = np.array(self.heads), np.array(self.coins) - np.array(self.heads)
        distinct_shares, counts = np.unique(np.array(self.shares), return_counts=True)
        mixture = counts @ _likelihood(distinct_shares, heads, tails) / len(heads)
        weight = _likelihood(shares, heads, tails) / mixture
        value = np.clip((weight * np.array(self.success)).mean(1), 0.0, 1.0)
        return value, np.square(weight.sum(1)) / np.maximum(np.square(weight).sum(1), 1e-300)

    def lower(self, shares: Array) -> Array:
        """Return the lower confidence bounds [G] of success at `shares` [G]."""
        return wilson_bound(*self.estimate(shares), self.confidence)

    def choose(self) -> float:
        """Return the largest safe share, 0 if none is safe or there are no episodes yet."""
        if not self.success:
            return 0.0
        safe = SHARES[self.lower(SHARES) >= self.floor]
        return float(safe.max()) if len(safe) else 0.0


def _likelihood(shares: Array, heads: Array, tails: Array) -> Array:
    """Return share^heads (1 - share)^tails, [G, n] of G shares and n episodes; 0^0 is 1."""
    return np.power(shares[:, None], heads) * np.power(1 - shares[:, None], tails)


@dataclass(frozen=True)
class Deployed:
    """Results of a deployment of E episodes: success [E] in the order played, share [E] of each episode."""

    success: Array
    shares: Array
    floor: float

    @property
    def running(self) -> Array:
        """Success rate so far, [E]."""
        return self.success.cumsum() / np.arange(1, len(self.success) + 1)

    @property
    def margin(self) -> float:
        """Return the largest number of standard errors by which running success fell below the minimum; below 0 if it
        never did.

        Counted from the twentieth episode on, because few episodes are not informative; NaN for fewer.
        """
        count = np.arange(1, len(self.success) + 1)
        error = np.sqrt(max(self.floor * (1 - self.floor), 1e-9) / count)
        return float(((self.floor - self.running) / error)[19:].max()) if len(count) >= 20 else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        rate = float(self.success.mean())
        return {
            "success_rate": rate,
            "floor": self.floor,
            "worst_margin": None if math.isnan(self.margin) else self.margin,
            "share_at_last": float(self.shares[-1]),
            "running": [round(float(each), 4) for each in self.running],
            "shares": [round(float(each), 2) for each in self.shares],
        }


def deploy(
    world: World,
    base: Policy,
    tuned: Policy,
    seeds: Array,
    deployment: Deployment | None,
    *,
    coin: Coin = "step",
    floor: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Deployed:
    """Play an episode for each of `seeds` [E], in batches of the world's batch size, and return the results.

    The fraction of episodes with the new policy changes between batches, so unlike in an evaluation the batch size
    affects the result. deployment: chooses this fraction for every batch and receives its outcomes; None replaces the
    base at once. Both policies act without exploration noise. Raises ConfigError as `MixedPolicy` does.
    """
    shares: list[float] = []
    success: list[Array] = []
    for start in range(0, len(seeds), world.batch_size):
        wave = seeds[start : start + world.batch_size]
        share = 1.0 if deployment is None else deployment.choose()
        mixed = MixedPolicy(base, tuned, share, coin)
        wave_result = play_episode_batch(world, mixed, wave, seed, device=device)
        if deployment is not None:
            deployment.tell(share, *_thrown(mixed, wave_result.lengths), wave_result.success.tolist())
        shares += [share] * len(wave)
        success.append(wave_result.success)
    return Deployed(np.concatenate(success), np.array(shares), floor if deployment is None else deployment.floor)


def _thrown(mixed: MixedPolicy, lengths: Array) -> tuple[list[int], list[int]]:
    """Return the number of draws for the tuned policy and of all draws, in episodes of `lengths` [n] steps."""
    coins = torch.stack(mixed.coins)[:, : len(lengths)].numpy()
    if mixed.coin == "episode":
        return coins[0].astype(int).tolist(), [1] * len(lengths)
    decisions = np.minimum(-(-lengths // mixed.spec.chunk), len(coins))
    is_counted = np.arange(len(coins))[:, None] < decisions
    return (coins & is_counted).sum(0).tolist(), decisions.tolist()


def known_base(
    world: World, base: Policy, seeds: Array, coin: Coin, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Mapping[str, list[Any]]:
    """Play the base alone; return the heads, coins and success [n] for `Deployment.tell`, with a share of 0."""
    totals: dict[str, list[Any]] = {"heads": [], "coins": [], "success": []}
    for start in range(0, len(seeds), world.batch_size):
        base_policy = MixedPolicy(base, base, 0.0, coin)
        wave = play_episode_batch(world, base_policy, seeds[start : start + world.batch_size], seed, device=device)
        heads, coins = _thrown(base_policy, wave.lengths)
        for name, values in (("heads", heads), ("coins", coins), ("success", wave.success.tolist())):
            totals[name] += values
    return totals
