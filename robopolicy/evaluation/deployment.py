"""Staged rollout: replaces a known policy by a new one while success stays above a lower bound (StepMix and EpsMix).

The base acts during the first h decisions of an episode and the tuned policy during all others. h is drawn once per
episode, so that the tuned policy acts during a `share` of an episode of D decisions on average: StepMix draws one of
the two whole numbers next to (1 - share) D, EpsMix 0 (the tuned policy acts throughout) or D (the base does). After
every batch of episodes, `share` becomes the largest value whose success has a lower confidence bound above the floor, 0
if there is none. Success at any share is estimated from all episodes so far, whatever their shares: the world's factor
in an episode's probability is the same for all of them, and the probabilities of the draws are known. An episode that
ended after T decisions while the base acted could have had any h >= T, hence

    p_share(episode) = P_share(h) if h < T, else P_share(h >= T),    w = p_share / mean_k p_k,    V(share) = mean(w y)

with the shares k of the n episodes played: the balance heuristic of multiple importance sampling (Veach and Guibas
1995). Switches that have never been tried contribute nothing to the mean, so V is then a lower bound of success: a
share is chosen only as far as what is known supports it, and the tuned policy takes over one decision after another.

Source: Li et al. 2023, arXiv:2306.06265, for finite problems, where values of mixtures follow from counts of every
state and action. Deviations: success of complete episodes and importance weights instead of counts; Wilson's bound at
the effective number of episodes instead of Hoeffding's: the guarantee is as good as that approximation.
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

Mix = Literal["step", "episode"]
"""Part of an episode that the tuned policy takes over: its last decisions (step, StepMix), or all (episode, EpsMix)."""


def switch_probabilities(shares: Array, decisions: int, mix: Mix) -> Array:
    """Return the probabilities P(h) that the base acts during the first h = 0 .. D decisions, [G, D + 1].

    shares: [G]; decisions: D, the largest number of decisions in an episode.
    """
    probabilities = np.zeros((len(shares), decisions + 1))
    if mix == "episode":
        probabilities[:, 0], probabilities[:, decisions] = shares, 1 - shares
        return probabilities
    # Rounded, because 0.7 * 10 must not be a little less than 7.
    expected = np.round((1 - shares) * decisions, 9)
    low = np.floor(expected).astype(int)
    rows = np.arange(len(shares))
    probabilities[rows, low] = 1 - (expected - low)
    probabilities[rows, np.minimum(low + 1, decisions)] += expected - low
    return probabilities


class MixedPolicy:
    """A `Policy` of which `base` acts during the first decisions of an episode, and `tuned` during all others.

    share: average fraction of `decisions`, the largest number of an episode, at which the tuned policy acts; see
    `switch_probabilities`. Log-probabilities are not computed. The draws use the policies' noise generator, so they
    belong to the episode. `switch` [B] is the number of decisions that the base acts. Raises ConfigError when the two
    policies have different chunks, actions or histories.
    """

    def __init__(self, base: Policy, tuned: Policy, share: float, decisions: int, mix: Mix):
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
        self._cumulative = torch.as_tensor(switch_probabilities(np.array([share]), decisions, mix)[0].cumsum())
        self.switch = torch.zeros(0, dtype=torch.int64)
        self._decision = torch.zeros(0, dtype=torch.int64)  # [B], decisions so far in the row's episode

    @property
    def spec(self) -> PolicySpec:
        """The base's spec with the observation fields of both policies."""
        observation_fields = {**self.base.spec.observation, **self.tuned.spec.observation}
        return replace(self.base.spec, observation=observation_fields, scored_steps=0, steps_per_action=0)

    def reset(self, rows: Rows = None) -> None:
        """Reset both policies and draw the switches of new episodes. rows: indices [R], None for all."""
        self.base.reset(rows)
        self.tuned.reset(rows)
        if rows is None:
            self._decision = self._decision[:0]
        elif len(self._decision):
            self._decision[torch.as_tensor(np.asarray(rows), dtype=torch.int64)] = 0

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Call both policies and return the selected one's actions [B, C, A], without log-probabilities."""
        actions_of_both = [
            each.act(observation, generator, deterministic=deterministic).actions for each in (self.base, self.tuned)
        ]
        count = len(actions_of_both[0])
        if not len(self._decision):
            self._decision = torch.zeros(count, dtype=torch.int64)
            self.switch = torch.zeros(count, dtype=torch.int64)
        draws = uniform((count,), generator).cpu().double()
        # The last sum may be a little below 1, and a switch beyond the last decision is none.
        drawn = torch.searchsorted(self._cumulative, draws, right=True).clamp(max=len(self._cumulative) - 1)
        self.switch = torch.where(self._decision == 0, drawn, self.switch)
        tuned_mask = (self._decision >= self.switch).to(actions_of_both[0].device)
        self._decision += 1
        return Decision(torch.where(tuned_mask[:, None, None], actions_of_both[1], actions_of_both[0]))


@dataclass
class Deployment:
    """Chooses the largest safe `share` of the tuned policy from the episodes so far.

    floor: lower bound of success to keep; decisions: largest number of decisions in an episode; confidence: of the
    one-sided bound. Outcomes are added in batches of n episodes: see `tell`. Raises ConfigError on values out of range.
    """

    floor: float
    decisions: int
    mix: Mix = "step"
    confidence: float = 0.95
    shares: list[float] = field(default_factory=list[float])
    switches: list[int] = field(default_factory=list[int])
    lengths: list[int] = field(default_factory=list[int])
    success: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1 or not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"floor={self.floor} must be a success rate in [0, 1], and confidence={self.confidence} in [0.5, 1)."
            )
        if self.decisions < 1:
            raise ConfigError(f"decisions={self.decisions} must be at least 1.")

    def tell(self, share: float, switches: Sequence[int], lengths: Sequence[int], success: Sequence[bool]) -> None:
        """Add n episodes played with `share`, of `lengths` [n] decisions, with the switch drawn for each [n]."""
        self.shares += [share] * len(switches)
        self.switches += [int(each) for each in switches]
        self.lengths += [int(each) for each in lengths]
        self.success += [bool(each) for each in success]

    def estimate(self, shares: Array) -> tuple[Array, Array]:
        """Return the estimated success at each of `shares` [G], and the effective number of episodes behind it, [G]
        each.
        """
        distinct_shares, counts = np.unique(np.array(self.shares), return_counts=True)
        mixture = counts @ self._likelihood(distinct_shares) / len(self.shares)
        weight = self._likelihood(shares) / mixture
        value = np.clip((weight * np.array(self.success)).mean(1), 0.0, 1.0)
        return value, np.square(weight.sum(1)) / np.maximum(np.square(weight).sum(1), 1e-300)

    def _likelihood(self, shares: Array) -> Array:
        """Return the probability of the draws of every episode so far at `shares` [G], [G, n]."""
        probabilities = switch_probabilities(shares, self.decisions, self.mix)
        at_least = probabilities[:, ::-1].cumsum(1)[:, ::-1]
        switches, lengths = np.array(self.switches), np.array(self.lengths)
        return np.where(switches < lengths, probabilities[:, switches], at_least[:, np.minimum(switches, lengths)])

    def lower(self, shares: Array) -> Array:
        """Return the lower confidence bounds [G] of success at `shares` [G]."""
        return wilson_bound(*self.estimate(shares), self.confidence)

    def choose(self) -> float:
        """Return the largest safe share, 0 if none is safe or there are no episodes yet."""
        if not self.success:
            return 0.0
        safe = SHARES[self.lower(SHARES) >= self.floor]
        return float(safe.max()) if len(safe) else 0.0


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
    floor: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Deployed:
    """Play an episode for each of `seeds` [E], in batches of the world's batch size, and return the results.

    The fraction of an episode with the new policy changes between batches, so unlike in an evaluation the batch size
    affects the result. deployment: chooses this fraction for every batch and receives its outcomes; None replaces the
    base at once. Both policies act without exploration noise. Raises ConfigError as `MixedPolicy` does.
    """
    shares: list[float] = []
    success: list[Array] = []
    mix = "episode" if deployment is None else deployment.mix
    for start in range(0, len(seeds), world.batch_size):
        wave = seeds[start : start + world.batch_size]
        share = 1.0 if deployment is None else deployment.choose()
        mixed = MixedPolicy(base, tuned, share, most_decisions(world, base), mix)
        wave_result = play_episode_batch(world, mixed, wave, seed, device=device)
        if deployment is not None:
            switches = mixed.switch[: len(wave)].tolist()
            lengths = _decisions(wave_result.lengths, base)
            deployment.tell(share, switches, lengths, wave_result.success.tolist())
        shares += [share] * len(wave)
        success.append(wave_result.success)
    return Deployed(np.concatenate(success), np.array(shares), floor if deployment is None else deployment.floor)


def most_decisions(world: World, policy: Policy) -> int:
    """Return the largest number of decisions of a policy in an episode of a world."""
    return -(-world.spec.horizon // policy.spec.chunk)


def _decisions(lengths: Array, policy: Policy) -> list[int]:
    """Return the numbers of decisions [n] in episodes of `lengths` [n] control steps."""
    return (-(-lengths // policy.spec.chunk)).tolist()


def known_base(
    world: World, base: Policy, seeds: Array, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Mapping[str, list[Any]]:
    """Play the base alone; return the switches, lengths and success [n] for `Deployment.tell`, with a share of 0."""
    totals: dict[str, list[Any]] = {"switches": [], "lengths": [], "success": []}
    for start in range(0, len(seeds), world.batch_size):
        wave = play_episode_batch(world, base, seeds[start : start + world.batch_size], seed, device=device)
        totals["switches"] += [most_decisions(world, base)] * len(wave.success)
        totals["lengths"] += _decisions(wave.lengths, base)
        totals["success"] += wave.success.tolist()
    return totals
