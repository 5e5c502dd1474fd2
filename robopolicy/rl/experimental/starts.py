"""Samplers of starts and an allocator, and hints: how far along a demonstration episodes begin.

With a hint, a start's group begins after a share of its demonstration (`Hints.depth`; 0: at the start itself), in a
state the expert was in. No action of the expert's is scored, so nothing has to be corrected for; success gets near
enough to be found, and the share shrinks as it is (reverse curricula). starts=N makes starts come back, so that
something is known of them.
"""

import math
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.starts import Beliefs, Uniform, information_gain


@mechanism(Slot.SAMPLER, "vade", source="VADE, arXiv:2511.18902")
class VadeSampler(Beliefs):
    """Thompson-sample every start's success rate p and take those from which most is gained; beliefs fade twice.

    visited, decay: what is kept of a start's counts at its next visit, after which its rate has been measured anew, and
    of everybody's at every round, because the policy moves on also where nobody looks.
    The paper's abstract names Beta beliefs, Thompson draws that maximise information gain, and decay on two scales; its
    formulas were not at hand. Gain is p (1 - p)^2, the information gain of arXiv:2509.25849: largest at 1/3, since
    what succeeds rarely has more to gain than what fails rarely.
    """

    def __init__(self, *, visited: float = 0.5, decay: float = 0.98):
        super().__init__(prior=1.0, decay=visited)
        self.everywhere = decay

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` starts [n] with the largest gain at a drawn rate."""
        a, b = self.beta(np.arange(pool))
        drawn = generator.beta(a, b)
        return np.argsort(-information_gain(drawn), kind="stable")[:count]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Let every belief fade, those of the starts played [n] faster, and add what came of them, each [n]."""
        kept = self.everywhere
        self.counts = {
            number: (kept * a + (1 - kept) * self.prior, kept * b + (1 - kept) * self.prior)
            for number, (a, b) in self.counts.items()
        }
        super().observe(index, successes, episodes, advantage)


@mechanism(Slot.SAMPLER, "sec", source="SEC, self-evolving curriculum, arXiv:2505.14970")
class SecSampler(Beliefs):
    """A bandit over categories (instructions: start i belongs to category i mod `categories`) paid in mean |A|.

    Q <- (1 - rate) Q + rate mean |A|; categories are drawn with softmax(Q / temperature), starts inside uniformly.
    """

    def __init__(self, *, categories: int = 4, rate: float = 0.3, temperature: float = 0.3):
        super().__init__(prior=1.0, decay=1.0)
        self.categories = categories
        self.rate = rate
        self.temperature = temperature
        self.values = np.zeros(categories)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return starts [n], their categories drawn by value."""
        scaled = (self.values - self.values.max()) / self.temperature
        share = np.exp(scaled) / np.exp(scaled).sum()
        order = generator.permutation(pool)
        weight = share[order % self.categories]
        # Efraimidis and Spirakis: the largest log(u) / weight are a weighted draw without replacement.
        keys = np.log(np.maximum(generator.random(pool), 1e-300)) / np.maximum(weight, 1e-12)
        return order[np.argsort(-keys, kind="stable")[:count]]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Move the value of every category played towards its mean |A|; arguments [n]."""
        super().observe(index, successes, episodes, advantage)
        for category in np.unique(index % self.categories):
            paid = advantage[index % self.categories == category].mean()
            self.values[category] += self.rate * (paid - self.values[category])

    def state(self) -> dict[str, Any]:
        """Return counts and values."""
        return {**super().state(), "values": self.values.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from counts and values."""
        super().restore(state)
        self.values = np.array(state["values"])


@mechanism(Slot.SAMPLER, "prompt_replay", source="Prompt Replay, arXiv:2603.21177")
class ReplaySampler(Beliefs):
    """Mix fresh starts with those whose last success rate was nearest to 0.5, each after a pause and not too often.

    share: of a batch that is replayed; near: how far from 0.5 still counts; cooldown: proposals before a start may come
    back; limit: how often it may.
    """

    def __init__(self, *, share: float = 0.5, near: float = 0.3, cooldown: int = 3, limit: int = 5):
        super().__init__(prior=1.0, decay=0.0)
        self.share = share
        self.near = near
        self.cooldown = cooldown
        self.limit = limit
        self.round = 0
        self.last = {}
        self.used = {}

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return starts [n], replayed ones first, then those used least."""
        self.round += 1
        # Ties are broken by chance: `sorted` is stable, and the order is a random one.
        order = generator.permutation(pool)
        distance = dict(zip(order.tolist(), np.abs(self.predict(order) - 0.5).tolist(), strict=True))
        rested = [
            number
            for number in order.tolist()
            if number in self.counts
            and distance[number] <= self.near
            and self.round - self.last[number] > self.cooldown
            and self.used[number] < self.limit
        ]
        ready = sorted(rested, key=distance.__getitem__)[: round(self.share * count)]
        fresh = sorted((number for number in order.tolist() if number not in ready), key=lambda n: self.used.get(n, 0))
        chosen = (ready + fresh)[:count]
        for number in chosen:
            self.last[number], self.used[number] = self.round, self.used.get(number, 0) + 1
        return np.array(chosen)

    def state(self) -> dict[str, Any]:
        """Return everything."""
        used = {str(key): [self.used[key], self.last[key]] for key in self.used}
        return {**super().state(), "round": self.round, "used": used}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on."""
        super().restore(state)
        self.round = state["round"]
        self.used = {int(key): value[0] for key, value in state["used"].items()}
        self.last = {int(key): value[1] for key, value in state["used"].items()}


@mechanism(Slot.ALLOCATOR, "dars", source="DARS, arXiv:2508.13755")
class Dars(Uniform):
    """Play once, then give starts with a success rate a < 0.5 more episodes, the more the rarer success is.

    Equal schedule, S = 2 a (1 - a): dN = (N / 2 - N S) / S, rounded up and capped at `most` episodes in all;
    hardness-weighted (weighted=true): dN = (2 (1 - a) N / 2 - N S) / S. Where nothing succeeded a is 0.5 / N.
    """

    def __init__(self, *, weighted: bool = False, most: int = 32):
        self.weighted, self.most = weighted, most

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return the additional episodes [n], at most up to `most` in all."""
        rate = np.where(rate <= 1e-6, 0.5 / sizes, rate)
        spread = np.maximum(2 * rate * (1 - rate), 1e-6)
        target = (2 * (1 - rate) if self.weighted else 1.0) * sizes / 2
        more = np.where(rate < 0.5, (target - sizes * spread) / spread, 0.0)
        return np.clip(np.ceil(more - 1e-9), 0, np.maximum(self.most - sizes, 0)).astype(int).tolist()


class _Rates:
    """Success rates per start and tenth of the demonstration, newest first with weight `fresh`."""

    def __init__(self, fresh: float = 0.5):
        self.fresh = fresh
        self.rates: dict[tuple[int, int], float] = {}

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Mix the new rates [n] in."""
        for number, share, found in zip(start.tolist(), depth.tolist(), rate.tolist(), strict=True):
            key = (number, _tenth_asked(share))
            self.rates[key] = (
                found if key not in self.rates else (1 - self.fresh) * self.rates[key] + self.fresh * found
            )

    def state(self) -> dict[str, Any]:
        """Return all rates."""
        return {"rates": [[*key, rate] for key, rate in self.rates.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from all rates."""
        self.rates = {(int(number), int(tenth)): rate for number, tenth, rate in state["rates"]}


def _tenth_asked(share: float) -> int:
    """Return which tenth was asked for where an episode began after `share` of a demonstration.

    It begins in the last recorded state up to there, so less than a tenth before it where ten states are recorded.
    """
    return math.ceil(10 * share - 1e-4)


@mechanism(Slot.HINT, "guide", source="Guide-GRPO, arXiv:2506.13923", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Guide:
    """Help only where all of an unhelped group failed: that start's next group begins `share` into the demonstration.

    The group after a helped one is unhelped again and decides anew. Deviations: the paper plays the helped group in the
    same iteration, here it is the start's next visit; its hint is text in the prompt, for which the ratio corrects, and
    a state that the episode begins in needs no correction.
    """

    def __init__(self, *, share: float = 0.5):
        self.share = share
        self.failed: set[int] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return `share`, [n], for starts whose newest group was unhelped and failed altogether, else 0."""
        return np.array([self.share if number in self.failed else 0.0 for number in start.tolist()])

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Remember the starts [n] whose newest group had no help, and no success."""
        for number, helped, found in zip(start.tolist(), (depth > 0).tolist(), rate.tolist(), strict=True):
            (self.failed.discard if helped or found > 0 else self.failed.add)(number)

    def state(self) -> dict[str, Any]:
        """Return the starts to help."""
        return {"failed": sorted(self.failed)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the starts to help."""
        self.failed = set(state["failed"])


@mechanism(Slot.HINT, "ad_hint", source="after ADHint, arXiv:2512.13095", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class AdaptiveHint(_Rates):
    """Skip the more of the demonstration, the harder the start: u most (1 - p) (1 - done / fades).

    p: the start's success rate, a moving average; u: uniform in [0, 1]; done: share of the run; fades: share of it
    after which no more help is given. As in the paper the share grows with difficulty under the present policy. Its
    further pieces have no counterpart: nothing of the demonstration is scored, so there are no gradients of hints to
    modulate or mask, and a group begins in one state, so no helped and unhelped episodes of one start are compared.
    Difficulty is the paper's success of unhelped rollouts; here a helped group counts as rate x (1 - depth).
    """

    def __init__(self, *, most: float = 0.8, fades: float = 0.8):
        super().__init__()
        self.most, self.fades = most, fades

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the shares [n]."""
        left = max(0.0, 1 - context.share / self.fades)
        rate = np.array([self.rates.get((number, 0), 0.0) for number in start.tolist()])
        # A start never seen counts as failing: it gets the most help.
        return draws.uniform(size=len(start)) * self.most * (1 - rate) * left

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Judge starts [n] by unhelped groups, and by helped ones in proportion to what they had to do themselves."""
        super().observe(start, np.zeros_like(depth), rate * (1 - depth))


@mechanism(Slot.HINT, "pivot", source="PivotRL, arXiv:2603.21383", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Pivot(_Rates):
    """Begin at pivots, demonstrated states of mixed outcome that are not easy: 0 < rate < easy.

    Candidates are the tenths of a demonstration. Those not tried yet come first, which finds their rates; then one of
    the pivots is drawn, and where there is none any candidate, since the policy changes. Deviations: the paper finds
    pivots once, with the policy as it came, here the newest group counts; it plays one step there, which is paid where
    it is as good as the demonstrated one, here the episode goes on to its end and its outcome pays.
    """

    def __init__(self, *, most: float = 0.9, easy: float = 0.9):
        super().__init__(fresh=1.0)
        self.most, self.easy = most, easy
        self.tried: set[tuple[int, int]] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the shares [n]."""
        return np.array([self._choose(number, draws) / 10 for number in start.tolist()])

    def _choose(self, number: int, draws: np.random.Generator) -> int:
        """Return which tenth of the demonstration from start `number` to skip."""
        candidates = range(int(10 * self.most + 1e-6) + 1)
        rates = {tenth: self.rates.get((number, tenth), 0.0) for tenth in candidates}
        untried = [tenth for tenth in candidates if (number, tenth) not in self.tried]
        pivots = [tenth for tenth, rate in rates.items() if 0 < rate < min(1.0, self.easy)]
        tenth = int(draws.choice(untried or pivots or list(candidates)))
        self.tried.add((number, tenth))
        return tenth

    def state(self) -> dict[str, Any]:
        """Return all rates, and what was tried."""
        return {**super().state(), "tried": sorted(self.tried)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from all rates, and what was tried."""
        super().restore(state)
        self.tried = {(int(number), int(tenth)) for number, tenth in state["tried"]}
