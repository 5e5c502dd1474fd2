"""Experimental samplers of initial states, an episode allocator, and hints, which start episodes inside a
demonstration.

With a hint, the group of an initial state starts after a fraction of its demonstration (`Hints.depth`; 0: at the
initial state itself), in a state that the expert visited. No expert action is scored, so no off-policy correction is
needed. Success becomes reachable, and the fraction decreases as it does (reverse curriculum). Initial states recur with
num_initial_states=N, so that statistics about them can accumulate.
"""

import math
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.context import Context
from robopolicy.rl.initial_states import Beliefs, Uniform, information_gain
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


@mechanism(Slot.SAMPLER, "vade", source="VADE, arXiv:2511.18902")
class VadeSampler(Beliefs):
    """Thompson-sample the success rate p of every initial state and take those with the largest gain; beliefs decay on
    two scales.

    visited: fraction of an initial state's counts kept at its next visit, when its rate has been remeasured; decay:
    fraction of all counts kept per round, because the policy changes everywhere. The paper's abstract names Beta
    beliefs, Thompson draws that maximise information gain, and decay on two scales; its formulas were not available.
    Gain is p (1 - p)^2, the information gain of arXiv:2509.25849: largest at 1/3, since rare successes allow more
    improvement than rare failures. gain: knapsack for that one; variance for p (1 - p) of the sampled rate; or
    expected_variance for its mean under the belief Beta(a, b), a b / ((a + b) (a + b + 1)), without a draw. Raises
    ConfigError for an unknown gain.
    """

    def __init__(self, *, visited: float = 0.5, decay: float = 0.98, gain: str = "knapsack"):
        super().__init__(prior=1.0, decay=visited)
        self.everywhere = decay
        if gain not in ("knapsack", "variance", "expected_variance"):
            raise unknown_option("vade.gain", gain, ("knapsack", "variance", "expected_variance"))
        self.gain = gain

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` initial states [n] with the largest gain."""
        return np.argsort(-self.gains(pool, generator), kind="stable")[:count]

    def gains(self, pool: int, generator: np.random.Generator) -> Array:
        """Return the gain of every initial state of the pool [pool]."""
        if self.gain == "expected_variance":
            order = generator.permutation(pool)
            a, b = self.beta(np.arange(pool))
            # Without a draw equal beliefs are equal gains: a hair of chance, far below any difference, decides.
            return a * b / ((a + b) * (a + b + 1)) + 1e-9 * order / pool
        rates = self.sampled_rates(pool, generator)
        return information_gain(rates) if self.gain == "knapsack" else rates * (1 - rates)

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Decay all beliefs, those of the played initial states [n] faster, and add their results, each [n]."""
        decay = self.everywhere
        self.counts = {
            number: (decay * a + (1 - decay) * self.prior, decay * b + (1 - decay) * self.prior)
            for number, (a, b) in self.counts.items()
        }
        super().observe(index, successes, episodes, advantage)


def draw_by_class(share: Array, classes: Array, count: int, generator: np.random.Generator) -> Array:
    """Draw `count` different initial states [n]: the class of each with chances `share` [C], then one of it uniformly.

    classes: [pool], the class of every initial state. A class of which none is left is drawn no more.
    """
    members = [generator.permutation(np.flatnonzero(classes == place)).tolist() for place in range(len(share))]
    indices: list[int] = []
    for _ in range(min(count, len(classes))):
        chances = np.where([bool(each) for each in members], np.maximum(share, 1e-12), 0.0)
        indices.append(members[generator.choice(len(share), p=chances / chances.sum())].pop())
    return np.array(indices, dtype=np.int64)


@mechanism(Slot.SAMPLER, "sec", source="SEC, self-evolving curriculum, arXiv:2505.14970")
class SecSampler(Beliefs):
    """Bandit over categories (instructions: state i belongs to category i mod `categories`) with reward mean |A|.

    Q <- (1 - rate) Q + rate mean |A| over a category's episodes; the category of each initial state is drawn with
    softmax(Q / temperature), the state within it uniformly among those not drawn yet.
    """

    def __init__(self, *, categories: int = 4, rate: float = 0.3, temperature: float = 0.3):
        super().__init__(prior=1.0, decay=1.0)
        self.categories = categories
        self.rate = rate
        self.temperature = temperature
        self.values = np.zeros(categories)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n], with categories drawn by value."""
        scaled = (self.values - self.values.max()) / self.temperature
        share = np.exp(scaled) / np.exp(scaled).sum()
        return draw_by_class(share, np.arange(pool) % self.categories, count, generator)

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Move the value of every played category towards its mean |A|; arguments [n]."""
        super().observe(index, successes, episodes, advantage)
        for category in np.unique(index % self.categories):
            members = index % self.categories == category
            # Of episodes, not of initial states: groups may differ in size.
            reward = np.average(advantage[members], weights=episodes[members])
            self.values[category] += self.rate * (reward - self.values[category])

    def state(self) -> dict[str, Any]:
        """Return counts and values."""
        return {**super().state(), "values": self.values.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore counts and values."""
        super().restore(state)
        self.values = np.array(state["values"])


@mechanism(Slot.SAMPLER, "prompt_replay", source="Prompt Replay, arXiv:2603.21177")
class ReplaySampler(Beliefs):
    """Mix new initial states with those whose last success rate was nearest to 0.5, with a cooldown and a maximum
    number of replays.

    share: fraction of a batch that is replayed, at most; rates: bounds of the success rates that are replayed, and
    groups without a success or a failure never are; cooldown: an initial state recurs after this many proposals at the
    earliest; limit: maximum number of replays. Defaults are those of the authors' code. Deviation: the visits of a
    second pass through the pool count as replays too.
    """

    def __init__(
        self,
        *,
        share: float = 0.5,
        rates: tuple[float, float] = (0.24, 0.7),
        cooldown: int = 5,
        limit: int = 5,
    ):
        super().__init__(prior=1.0, decay=0.0)
        self.share = share
        self.rates = rates
        self.cooldown = cooldown
        self.limit = limit
        self.round = 0
        self.last = {}
        self.used = {}

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n], replayed ones first, then the least used ones."""
        self.round += 1
        # Ties are broken by chance: `sorted` is stable, and the order is a random one.
        order = generator.permutation(pool)
        # Rates as they were: drawn towards 0.5 by a prior, those of small groups without a success would pass.
        rates = dict(zip(order.tolist(), self.observed(order).tolist(), strict=True))
        low, high = self.rates
        rested = [
            number
            for number, rate in rates.items()
            if 0 < rate < 1
            and low <= rate <= high
            and self.round - self.last[number] >= self.cooldown
            and self.used[number] <= self.limit
        ]
        ready = sorted(rested, key=lambda number: abs(rates[number] - 0.5))[: int(self.share * count + 1e-9)]
        unused = sorted((number for number in order.tolist() if number not in ready), key=lambda n: self.used.get(n, 0))
        indices = (ready + unused)[:count]
        for number in indices:
            self.last[number], self.used[number] = self.round, self.used.get(number, 0) + 1
        return np.array(indices)

    def state(self) -> dict[str, Any]:
        """Return the complete state."""
        usage = {str(key): [self.used[key], self.last[key]] for key in self.used}
        return {**super().state(), "round": self.round, "used": usage}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().restore(state)
        self.round = state["round"]
        self.used = {int(key): value[0] for key, value in state["used"].items()}
        self.last = {int(key): value[1] for key, value in state["used"].items()}


@mechanism(
    Slot.SAMPLER,
    "stages",
    source="CRAFT-GUI, arXiv:2508.11360; AceReason, arXiv:2505.16400; DRIVE, arXiv:2511.06307",
)
class Stages(Beliefs):
    """Stages in order of difficulty or domain: every `rounds` proposals, the next part of the pool is drawn from.

    by=difficulty: each initial state is proposed once first, which measures the base policy. CRAFT-GUI: the pool is
    sorted by these rates, from easy to hard, into `parts` of equal size; the last one lasts to the end. keep < 1:
    DRIVE's second stage instead, in which every `rounds` proposals keep the hardest fraction `keep` of those left, by
    their rates so far; with a large finetune.group_size. by=instruction: AceReason, which finishes one domain before
    the next: state i belongs to domain i mod `parts` (instructions). A stage with fewer initial states than
    finetune.groups plays fewer groups. A longer horizon for a later stage is a run that begins with the checkpoint of
    the one before.
    """

    def __init__(self, *, parts: int = 3, rounds: int = 20, keep: float = 1.0, by: str = "difficulty"):
        super().__init__(prior=1.0, decay=1.0)
        if by not in ("difficulty", "instruction"):
            raise unknown_option("stages.by", by, ("difficulty", "instruction"))
        self.parts = parts
        self.rounds = rounds
        self.keep = keep
        self.by = by
        self.proposals = 0
        self.order: list[int] = []

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n] of the present stage alone, or unseen ones."""
        if self.by == "instruction":
            domain = min(self.proposals // self.rounds, self.parts - 1)
            candidates = np.arange(domain % self.parts, pool, self.parts)
        else:
            unseen_starts = np.array([number for number in range(pool) if number not in self.counts], dtype=int)
            if len(unseen_starts):  # filled up with others, which are measured once more
                seen_starts = np.setdiff1d(np.arange(pool), unseen_starts)
                parts = generator.permutation(unseen_starts), generator.permutation(seen_starts)
                return np.concatenate(parts)[:count]
            candidates = self._of_difficulty(count, pool)
        self.proposals += 1
        # Fewer than `count` where the stage has no more: others would be of another stage.
        return generator.permutation(candidates)[:count]

    def _of_difficulty(self, count: int, pool: int) -> Array:
        stage, is_next = divmod(self.proposals, self.rounds)
        if not self.order or (self.keep < 1 and is_next == 0 and stage > 0):
            remaining_starts = np.array(self.order or range(pool))
            hardest_last = remaining_starts[np.argsort(-self.predict(remaining_starts), kind="stable")]
            total = len(remaining_starts)
            size = max(count, round(self.keep * total)) if self.keep < 1 else total
            self.order = [int(number) for number in hardest_last[total - min(size, total) :]]
        if self.keep < 1:
            return np.array(self.order)
        return np.array_split(np.array(self.order), self.parts)[min(stage, self.parts - 1)]

    def state(self) -> dict[str, Any]:
        """Return counts, number of proposals and the order."""
        return {**super().state(), "proposals": self.proposals, "order": self.order}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().restore(state)
        self.proposals, self.order = state["proposals"], list(state["order"])


def mixed_softmax(scores: Array, sharpness: float, explore: float) -> Array:
    """Return (1 - explore) softmax(sharpness * scores) + explore / n, over the last axis of scores [..., n]."""
    weight = np.exp(sharpness * (scores - scores.max(-1, keepdims=True)))
    return (1 - explore) * weight / weight.sum(-1, keepdims=True) + explore / scores.shape[-1]


def bin_of_rate(rate: float, edges: tuple[float, ...], margin: float, old: int | None) -> int:
    """Return the bin of a success rate between `edges`; it leaves `old` only if the rate is `margin` beyond an edge."""
    low, high = (int(np.searchsorted(edges, rate + shift, side="right")) for shift in (-margin, margin))
    return int(np.searchsorted(edges, rate, side="right")) if old is None else min(max(old, low), high)


@mechanism(Slot.SAMPLER, "group_dro", source="GDRO, arXiv:2601.19280")
class GroupDro(Beliefs):
    """Distributionally robust: draw more initial states of those bins of success rates that lose most.

    Bins between `edges` of the mean rate of the last `window` visits (.5 before the first); q = (1 - explore)
    softmax(sharpness S) + explore / bins, S <- decay S + (1 - decay) (mean loss / share of the batch), where the loss
    of an episode is 1 - success: GRPO's own, minus the mean of A times the ratio, is 0 on its own data. The paper draws
    by q; the authors' code weighs samples by q over share instead, and its rate of a visit is pass@k, 1 if any episode
    of the group succeeded, 0 before the first.
    """

    def __init__(
        self,
        *,
        edges: tuple[float, ...] = (0.4, 0.75),
        margin: float = 0.03,
        window: int = 50,
        decay: float = 0.88,
        sharpness: float = 0.65,
        explore: float = 0.01,
    ):
        super().__init__(prior=1.0, decay=1.0)
        self.edges = tuple(edges)
        self.margin = margin
        self.window = window
        self.score_decay = decay
        self.sharpness = sharpness
        self.explore = explore
        self.rates: dict[int, list[float]] = {}
        self.bins: dict[int, int] = {}
        self.scores: list[float | None] = [None] * (len(self.edges) + 1)

    def bin(self, number: int) -> int:
        """Return the bin of an initial state."""
        return self.bins.get(number, bin_of_rate(0.5, self.edges, 0.0, None))

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n], with bins drawn by q."""
        bins = np.array([self.bin(number) for number in range(pool)])
        scores = np.array([0.0 if score is None else score for score in self.scores])
        return draw_by_class(mixed_softmax(scores, self.sharpness, self.explore), bins, count, generator)

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Update the scores of the played bins and the bins of the played initial states; arguments [n]."""
        super().observe(index, successes, episodes, advantage)
        bins = np.array([self.bin(number) for number in index.tolist()])
        for place in map(int, np.unique(bins)):
            played = episodes[bins == place].sum()
            value = float((1 - successes[bins == place].sum() / played) / (played / episodes.sum()))
            old = self.scores[place]
            self.scores[place] = value if old is None else self.score_decay * old + (1 - self.score_decay) * value
        for number, rate in zip(index.tolist(), (successes / episodes).tolist(), strict=True):
            self.rates[number] = [*self.rates.get(number, []), rate][-self.window :]
            mean = float(np.mean(self.rates[number]))
            self.bins[number] = bin_of_rate(mean, self.edges, self.margin, self.bins.get(number))

    def state(self) -> dict[str, Any]:
        """Return the complete state."""
        starts = {str(number): [self.bins[number], *rates] for number, rates in self.rates.items()}
        return {**super().state(), "starts": starts, "scores": self.scores}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().restore(state)
        self.rates = {int(number): rates for number, (_, *rates) in state["starts"].items()}
        self.bins = {int(number): place for number, (place, *_) in state["starts"].items()}
        self.scores = list(state["scores"])


def largest_remainders(exact: Array, total: int) -> Array:
    """Round shares [n], whose sum is `total`, to integers of the same sum; the largest remainders are rounded up."""
    sizes = np.floor(exact + 1e-9).astype(int)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    return sizes


def cheapest_arms(value: Array, arms: Array, counts: Array, budget: int) -> Array:
    """Choose an arm for each bin, [n] indices, with the largest sum of values among those nearest to the budget.

    value: [bins, arms]; arms: group sizes [arms]; counts: number of groups in each bin [bins]. By dynamic programming
    over the sums of episodes.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for place, count in enumerate(counts.tolist()):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for total, (gain, chosen) in best.items():
            for arm, size in enumerate(arms.tolist()):
                candidate = gain + float(value[place, arm]), (*chosen, arm)
                key = total + count * size
                if key not in extended or candidate[0] > extended[key][0]:
                    extended[key] = candidate
        best = extended
    nearest = min(abs(total - budget) for total in best)
    return np.array(max(choice for total, choice in best.items() if abs(total - budget) == nearest)[1])


@mechanism(Slot.ALLOCATOR, "shadow_price", source="GDRO, arXiv:2601.19280", needs=(Need.STARTS,))
class ShadowPrice(Uniform):
    """Group sizes by a bandit in every bin of success rates, with a shadow price on episodes that holds their mean.

    Arms: group sizes from `least` to `most` times the mean n. An arm that was played gains its mean loss - price (size
    - n), and is drawn to by p = (1 - explore) softmax(sharpness gain) + explore / arms: of the choices nearest to the
    budget the one with the largest sum of log p is played. price <- price + rate (mean size - n). The loss is 1 -
    success rate, chosen here. closed_form: the paper's limit instead, sizes in proportion to the standard deviation
    sqrt(p (1 - p)) of outcomes. Predicted rates come from the sampler, so initial states must recur
    (num_initial_states=N).
    """

    def __init__(
        self,
        *,
        least: int = 2,
        most: float = 3.0,
        edges: tuple[float, ...] = (0.4, 0.75),
        sharpness: float = 0.65,
        explore: float = 0.01,
        rate: float = 0.05,
        closed_form: bool = False,
    ):
        self.least = least
        self.most = most
        self.edges = tuple(edges)
        self.sharpness = sharpness
        self.explore = explore
        self.rate = rate
        self.closed_form = closed_form
        self.price, self.gains = 0.0, np.zeros((len(self.edges) + 1, 0))
        self.played: tuple[Array, Array, int] | None = None

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return group sizes [n] for initial states with these predicted success rates."""
        budget, least = group_size * len(predicted), min(self.least, group_size)
        if self.closed_form:
            spread = np.sqrt(np.clip(predicted * (1 - predicted), 1e-9, None))
            raised = np.zeros(len(spread), bool)
            while True:
                # What the least takes beyond its share is missing in that of the others: the budget holds.
                shares = np.where(raised, 0.0, spread)
                exact = np.where(raised, least, (budget - least * raised.sum()) * shares / max(shares.sum(), 1e-12))
                if not (exact < least - 1e-9).any():
                    return largest_remainders(exact, budget).tolist()
                raised |= exact < least - 1e-9
        arms = np.arange(least, max(round(self.most * group_size), group_size) + 1)
        if self.gains.shape[1] != len(arms):
            self.gains = np.zeros((len(self.edges) + 1, len(arms)))
        bins = np.searchsorted(self.edges, predicted, side="right")
        present, place = np.unique(bins, return_inverse=True)
        value = np.log(mixed_softmax(self.gains[present], self.sharpness, self.explore))
        indices = cheapest_arms(value, arms, np.bincount(place), budget)[place]
        self.played = bins, indices, group_size
        return arms[indices].tolist()

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Learn from the measured success rates [n] of the groups just played; return zeros [n]."""
        if self.played is not None and len(self.played[0]) == len(rate):
            bins, indices, group_size = self.played
            for place, arm in {*zip(bins.tolist(), indices.tolist(), strict=True)}:
                members = (bins == place) & (indices == arm)
                loss = float((1 - rate[members]).mean())
                self.gains[place, arm] += loss - self.price * (float(sizes[members].mean()) - group_size)
            self.price += self.rate * (float(sizes.mean()) - group_size)
        return [0] * len(sizes)

    def state(self) -> dict[str, Any]:
        """Return the price and the arms' gains."""
        return {"price": self.price, "gains": self.gains.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the price and the arms' gains."""
        self.price, self.gains = state["price"], np.array(state["gains"])


@mechanism(Slot.ALLOCATOR, "dars", source="DARS, arXiv:2508.13755")
class Dars(Uniform):
    """Play once, then give initial states with a success rate a < 0.5 more episodes; rarer success gets more.

    S: mean |A| of a group, 2 a (1 - a) for advantages that are not divided by a deviation (dr_grpo), or with
    divided=true 2 sqrt(a (1 - a)) for those that are (grpo). Equal schedule: the sum N S is raised to that of N
    episodes at a = 1/2, by dN = (N S(1/2) - N S) / S episodes, rounded up and capped at `most` in total;
    hardness-weighted (weighted=true): dN = (2 (1 - a) N S(1/2) - N S) / S. Without any success a is 0.5 / N.
    """

    def __init__(self, *, weighted: bool = False, divided: bool = False, most: int = 32):
        self.weighted, self.divided = weighted, divided
        self.most = most

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return the additional episodes [n], up to `most` in total."""
        rate = np.where(rate <= 1e-6, 0.5 / sizes, rate)
        variance = np.maximum(rate * (1 - rate), 1e-6)
        spread, peak = (2 * np.sqrt(variance), 1.0) if self.divided else (2 * variance, 0.5)
        target = (2 * (1 - rate) if self.weighted else 1.0) * sizes * peak
        extra_episodes = np.where(rate < 0.5, (target - sizes * spread) / spread, 0.0)
        return np.clip(np.ceil(extra_episodes - 1e-9), 0, np.maximum(self.most - sizes, 0)).astype(int).tolist()


@mechanism(Slot.ALLOCATOR, "dart", source="DART-GUI, arXiv:2509.23866", needs=(Need.STARTS,))
class Dart(Uniform):
    """Fewer and shorter episodes where the policy succeeds: n = max(least, round(N (1 - rate))) of N = group_size.

    An initial state's episodes are truncated `margin` chunks after the longest of its last `recent` successes, if there
    are any. The authors' exact rules were not found; these are chosen here. Initial states must recur
    (num_initial_states=N).
    """

    def __init__(self, *, least: int = 2, margin: int = 2, recent: int = 16):
        self.least = least
        self.margin = margin
        self.recent = recent
        self.lengths: dict[int, list[int]] = {}

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return group sizes [n] for initial states with these predicted success rates."""
        return np.maximum(np.round(group_size * (1 - predicted)).astype(int), min(self.least, group_size)).tolist()

    def limits(self, index: Array) -> list[int]:
        """Return the number of chunks after which episodes from initial states [n] are truncated, 0 for none."""
        return [max(self.lengths[number]) + self.margin if number in self.lengths else 0 for number in index.tolist()]

    def observe_lengths(self, index: Array, chunks: Array, success: Array) -> None:
        """Record the lengths of episodes, in chunks, by initial state and success, each [B]."""
        for number, length in zip(index[success].tolist(), chunks[success].tolist(), strict=True):
            self.lengths[number] = [*self.lengths.get(number, []), length][-self.recent :]

    def state(self) -> dict[str, Any]:
        """Return the lengths of successes."""
        return {"lengths": {str(number): lengths for number, lengths in self.lengths.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the lengths of successes."""
        self.lengths = {int(number): lengths for number, lengths in state["lengths"].items()}


class _Rates:
    """Success rates per initial state and tenth of the demonstration; the newest result has weight `fresh`."""

    def __init__(self, fresh: float = 0.5):
        self.fresh = fresh
        self.rates: dict[tuple[int, int], float] = {}

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Update with the new rates [n]."""
        for number, share, new_rate in zip(start.tolist(), depth.tolist(), rate.tolist(), strict=True):
            key = (number, _tenth_asked(share))
            self.rates[key] = (
                new_rate if key not in self.rates else (1 - self.fresh) * self.rates[key] + self.fresh * new_rate
            )

    def state(self) -> dict[str, Any]:
        """Return all rates."""
        return {"rates": [[*key, rate] for key, rate in self.rates.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all rates."""
        self.rates = {(int(number), int(tenth)): rate for number, tenth, rate in state["rates"]}


def _tenth_asked(share: float) -> int:
    """Return the tenth that was requested if an episode started after the fraction `share` of a demonstration.

    It starts at the last recorded state up to there, i.e. less than a tenth earlier if at least ten states are
    recorded.
    """
    return math.ceil(10 * share - 1e-4)


@mechanism(Slot.HINT, "guide", source="Guide-GRPO, arXiv:2506.13923", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Guide:
    """Hints for initial states where a group without hint failed completely: their next group starts `share` into the
    demonstration.

    The group after a hinted one has no hint, and its result decides about the next hint. Deviations: the paper runs the
    hinted group in the same iteration, here it is the next visit of the initial state; its hint is text in the prompt,
    which the ratio corrects for, while a different initial state needs no correction.
    """

    def __init__(self, *, share: float = 0.5):
        self.share = share
        self.failed: set[int] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return `share`, [n], for initial states whose newest group was unhinted and failed completely, else 0."""
        return np.array([self.share if number in self.failed else 0.0 for number in start.tolist()])

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Record the initial states [n] whose newest group had neither a hint (demonstration prefix) nor a success."""
        for number, helped, success_rate in zip(start.tolist(), (depth > 0).tolist(), rate.tolist(), strict=True):
            (self.failed.discard if helped or success_rate > 0 else self.failed.add)(number)

    def state(self) -> dict[str, Any]:
        """Return the initial states that get a hint."""
        return {"failed": sorted(self.failed)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the initial states that get a hint."""
        self.failed = set(state["failed"])


@mechanism(Slot.HINT, "ad_hint", source="after ADHint, arXiv:2512.13095", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class AdaptiveHint(_Rates):
    """Skip more of the demonstration for harder initial states: u most (1 - p) (1 - done / fades).

    p: moving average of the success rate; u: uniform in [0, 1]; done: fraction of the run; fades: fraction of the run
    after which hints stop. As in the paper, the skipped fraction grows with difficulty under the current policy. Its
    other parts have no counterpart: no step of the demonstration is scored, so there are no hint gradients to modulate
    or mask. A group starts in one state, so hinted and unhinted episodes of one initial state are not compared.
    Difficulty is the paper's success of unhinted rollouts; here a hinted group counts as rate x (1 - depth).
    """

    def __init__(self, *, most: float = 0.8, fades: float = 0.8):
        super().__init__()
        self.most, self.fades = most, fades

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the skipped fractions [n]."""
        strength = max(0.0, 1 - context.share / self.fades)
        rate = np.array([self.rates.get((number, 0), 0.0) for number in start.tolist()])
        # A start never seen counts as failing: it gets the most help.
        return draws.uniform(size=len(start)) * self.most * (1 - rate) * strength

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Update the rates of initial states [n]; the success of a group with a hint is scaled by 1 - depth."""
        super().observe(start, np.zeros_like(depth), rate * (1 - depth))


@mechanism(Slot.HINT, "pivot", source="PivotRL, arXiv:2603.21383", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Pivot(_Rates):
    """Start at pivots, demonstrated states with mixed outcomes that are not easy: 0 < rate < easy.

    Candidates are the tenths of a demonstration. Untried ones come first, to measure their rates; then a pivot is
    drawn, or any candidate if there is none. once: as in the paper, a candidate's first group decides, else its newest,
    since the policy changes. The paper plays one step there, rewarded if it is as good as the demonstrated one:
    allocator=one_chunk, rewards=[as_demonstrated]. Otherwise the episode continues to its end.
    """

    def __init__(self, *, most: float = 0.9, easy: float = 0.9, once: bool = False):
        super().__init__(fresh=0.0 if once else 1.0)
        self.most, self.easy = most, easy
        self.tried: set[tuple[int, int]] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the skipped fractions [n]."""
        return np.array([self._choose(number, draws) / 10 for number in start.tolist()])

    def _choose(self, number: int, draws: np.random.Generator) -> int:
        """Choose the tenth of the demonstration of initial state `number` to skip."""
        candidates = range(int(10 * self.most + 1e-6) + 1)
        rates = {tenth: self.rates.get((number, tenth), 0.0) for tenth in candidates}
        untried = [tenth for tenth in candidates if (number, tenth) not in self.tried]
        pivots = [tenth for tenth, rate in rates.items() if 0 < rate < min(1.0, self.easy)]
        tenth = int(draws.choice(untried or pivots or list(candidates)))
        self.tried.add((number, tenth))
        return tenth

    def state(self) -> dict[str, Any]:
        """Return all rates and the tried candidates."""
        return {**super().state(), "tried": sorted(self.tried)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all rates and the tried candidates."""
        super().restore(state)
        self.tried = {(int(number), int(tenth)) for number, tenth in state["tried"]}
