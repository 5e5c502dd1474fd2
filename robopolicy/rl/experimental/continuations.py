"""Experimental allocators that continue episodes from played states: a tree search, corrections by a teacher, and one
budget for initial states and prefixes.

An added episode is a branch of the one that it continues (Rollouts.parent). What they share is scored once, and has the
mean of their advantages. Added episodes are marked by extras["helped"]: they count neither in the success that is
reported nor for the sampler. They need a world with snapshots, and one process that plays (shards=1, staleness=0).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array, integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.tree import owners
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.allocators import Mixed, chance_of_other
from robopolicy.rl.experimental.side_models import first_falls
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


@mechanism(
    Slot.ALLOCATOR,
    "correct",
    source="SCOPE, arXiv:2602.24110",
    needs=(Need.GROUPS, Need.VALUES, Need.TEACHER, Need.SAME_STEPS),
)
class Correct(Uniform):
    """Let the teacher go on from the first wrong decision of failed episodes; the corrected ones join their group.

    The wrong decision is the first after which the value of q_ensemble falls by at least `drop` (as in
    models=[first_error]), with the values of the iterations before; the first iteration has none. In the paper a
    process reward model finds the first wrong step. share: corrected episodes of a group, at most this fraction of its
    size; those with the longest correct beginning come first. The student's own beginning is learned from with the mean
    advantage of the failure and its correction, the teacher's part with ratios that start at 1. The thresholds were not
    found and are ours.
    """

    by_teacher = True

    def __init__(self, *, drop: float = 0.2, share: float = 0.25):
        self.drop, self.share = drop, share

    def continuations(
        self, rollouts: Rollouts, values: Tensor | None, turn: int, context: Context
    ) -> list[tuple[int, int]]:
        """Return the failures to correct, and their first wrong chunks, by values [B, T]; see `ContinuesEpisodes`."""
        if values is None or turn:
            return []
        error_mask = first_falls(rollouts, values, self.drop)
        has_error, chunk = error_mask.any(1), error_mask.long().argmax(1)
        groups = Segments.of(rollouts.group)
        limit = (self.share * groups.size()[groups.index] + 1e-9).floor()
        chosen_mask = has_error & (groups.rank(-chunk.double(), has_error) < limit)
        return [(row, int(chunk[row])) for row in integers(chosen_mask.nonzero().squeeze(1))]


def upper_bound(value: float, visits: int, prior: float, total: int, exploration: float) -> float:
    """Return Q + w p sqrt(N) / (1 + n), the bound by which a tree search descends (PUCT).

    value: Q of a child with n = visits and prior probability p; total: N visits of its parent; exploration: w.
    """
    return value + exploration * prior * math.sqrt(total) / (1 + visits)


def upper_confidence(value: float, visits: int, total: int, exploration: float) -> float:
    """Return Q + w sqrt(ln N / n), the bound of a search by upper confidence (UCT); arguments as in `upper_bound`."""
    return value + exploration * math.sqrt(math.log(total) / visits)


@mechanism(
    Slot.ALLOCATOR,
    "tree_search",
    source="MCTS-DPO, arXiv:2405.00451; iTool, arXiv:2501.09766; rStar-Math, arXiv:2501.04519",
    needs=(Need.GROUPS,),
)
class TreeSearch(Uniform):
    """Monte Carlo tree search over decisions: each of `rounds` rounds adds an episode to every group, where it tells
    most.

    The group's first episodes are the children of the root. A round descends from there to the child with the largest
    Q + exploration p sqrt(N) / (1 + n) and continues another episode from the first state with fewer than `width`
    children, at most `depth` decisions deep. Q: share of successes among the n episodes through a child; N: number of
    those through its parent; p: softmax over the children of the mean log-probability of their chunk. rate: only groups
    with at most this success rate are searched (iTool: below 1). bound=uct: rStar-Math's Q + exploration sqrt(ln N /
    n), with outcomes of -1 and 1 (there exploration is 2). guided: number of episodes that the score of
    models=[step_preference], between -1 and 1, counts for in Q, as a child's first ones; from the second iteration on.
    Deviations: an episode is played to its end, whose outcome takes the place of the language model's own evaluation of
    a leaf, and all its decisions join the tree; the paper expands up to 64 leaves of an answer. Pairs of siblings:
    coefficient=siblings.
    """

    by_teacher = False

    def __init__(
        self,
        *,
        rounds: int = 4,
        width: int = 2,
        depth: int = 4,
        exploration: float = 1.5,
        rate: float = 1.0,
        bound: str = "puct",
        guided: float = 0.0,
    ):
        if bound not in ("puct", "uct"):
            raise unknown_option("tree_search.bound", bound, ("puct", "uct"))
        self.expansions = rounds
        self.width, self.depth = width, depth
        self.exploration, self.rate = exploration, rate
        self.bound, self.guided = bound, guided

    def continuations(
        self, rollouts: Rollouts, values: Tensor | None, turn: int, context: Context
    ) -> list[tuple[int, int]]:
        """Return one leaf of every searched group; see `ContinuesEpisodes`.

        values: scores of chunks [B, T], which only a guided search reads. Raises ConfigError if they are missing.
        """
        if turn == self.expansions:
            return []
        if self.guided and values is None and context.iteration:
            raise ConfigError("options.tree_search.guided needs models=[step_preference], which scores chunks.")
        tree = _Tree(rollouts, values if self.guided else None)
        places: list[tuple[int, int]] = []
        members: dict[int, list[int]] = {}
        for row, group in enumerate(integers(rollouts.group)):
            members.setdefault(group, []).append(row)
        for rows in members.values():
            roots = [row for row in rows if int(rollouts.parent[row]) < 0]
            if not roots or tree.value(roots) > self.rate:
                continue
            place = self.leaf(tree, rows, 0)
            places += [] if place is None else [place]
        return places

    def leaf(self, tree: "_Tree", rows: list[int], chunk: int) -> tuple[int, int] | None:
        """Return the row and chunk from which the next episode continues, below the state of `rows` before `chunk`;
        None if there is nothing left to add.
        """
        children = tree.children(rows, chunk)
        if not children:
            return None
        if chunk and len(children) < self.width:
            return next(iter(children.values()))[0], chunk
        if chunk == self.depth:
            return None
        total = sum(map(len, children.values()))
        prior = tree.prior(children, chunk)

        def bound(child: int) -> float:
            value, visits = self.child_value(tree, child, chunk, children[child]), len(children[child])
            if self.bound == "uct":
                return upper_confidence(value, visits, total, self.exploration)
            return upper_bound(value, visits, prior[child], total, self.exploration)

        order = sorted(children, key=bound, reverse=True)
        leaves = (self.leaf(tree, children[child], chunk + 1) for child in order)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def child_value(self, tree: "_Tree", child: int, chunk: int, episodes: list[int]) -> float:
        """Return Q of the chunk that row `child` owns, by the outcomes of the episodes through it and its score."""
        low = -1.0 if self.bound == "uct" else 0.0
        value, count = low + (1 - low) * tree.value(episodes), len(episodes)
        if tree.score is None:
            return value
        score = low + (1 - low) * (1 + tree.score[child][chunk]) / 2
        return (self.guided * score + count * value) / (self.guided + count)


class _Tree:
    """Episodes [B, T] as lists: who owns a chunk, its mean log-probability and score [B, T] or None, numbers of chunks
    and outcomes [B].
    """

    def __init__(self, rollouts: Rollouts, score: Tensor | None = None):
        self.score = None if score is None else [[float(value) for value in row] for row in score.cpu()]
        logp = torch.where(rollouts.mask, rollouts.logp_behaviour, 0.0).sum(-1)
        logp = logp / rollouts.mask.sum(-1).clamp(min=1)
        self.owner = [integers(row) for row in owners(rollouts)]
        self.logp = [[float(value) for value in row] for row in logp.cpu()]
        self.length = integers(rollouts.alive.sum(1))
        self.success = integers(rollouts.row_success.long())

    def children(self, rows: list[int], chunk: int) -> dict[int, list[int]]:
        """Return the episodes through each chunk played in the state of `rows`, by the row that owns it."""
        children: dict[int, list[int]] = {}
        for row in rows:
            if chunk < self.length[row]:
                children.setdefault(self.owner[row][chunk], []).append(row)
        return children

    def value(self, rows: list[int]) -> float:
        """Return the share of successes."""
        return sum(self.success[row] for row in rows) / len(rows)

    def prior(self, children: Mapping[int, list[int]], chunk: int) -> dict[int, float]:
        """Return the softmax of the children's mean log-probabilities."""
        logits = {child: self.logp[child][chunk] for child in children}
        weights = {child: math.exp(value - max(logits.values())) for child, value in logits.items()}
        return {child: weight / sum(weights.values()) for child, weight in weights.items()}


@mechanism(Slot.ALLOCATOR, "prefixes", source="TRACE, arXiv:2606.11119", needs=(Need.GROUPS, Need.VALUES))
class Prefixes(Mixed):
    """Divide one budget between initial states and prefixes of played episodes, by the chance of another outcome.

    A share `first` of the episodes is given to initial states as in allocator=mixed. The others begin, one by one,
    where the chance grows most that one of them ends differently from those already through that state, 1 - [r V + (1 -
    r) (1 - V)]^k (`chance_of_other`): in the initial state or before any later chunk. r: their outcome; states with
    both outcomes gain nothing more; V of q_ensemble, whose target is backed up: all episodes through a state count.
    Before there are values V is (successes + 1) / (episodes + 2) of the group. most: maximum of episodes from one
    initial state; rounds: number of times that outcomes are looked at. Deviation: the paper's rounds are not known,
    ours are 2.
    """

    by_teacher = False

    def __init__(self, *, most: int = 32, first: float = 0.5, rounds: int = 2):
        super().__init__(most=most)
        self.first, self.looks = first, rounds
        self.budget = 0

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the sizes [n] of the first share; predicted: success rates [n]."""
        self.budget = group_size * len(predicted)
        return super().plan(predicted, max(1, round(self.first * group_size)))

    def continuations(
        self, rollouts: Rollouts, values: Tensor | None, turn: int, context: Context
    ) -> list[tuple[int, int]]:
        """Return the states, (row, chunk), that gain most by one more episode each, by values [B, T]; see
        `ContinuesEpisodes`.
        """
        rest = self.budget - len(rollouts.group)
        if turn == self.looks or rest <= 0:
            return []
        row, chunk, outcome, value = self._states(rollouts, values)
        count, groups = np.zeros(len(row), dtype=int), Segments.of(rollouts.group)
        sizes, group = np.array(integers(groups.size())), np.array(integers(groups.index))[row]
        places: list[tuple[int, int]] = []
        for _ in range(-(-rest // (self.looks - turn)) if len(row) else 0):
            gain = chance_of_other(outcome, value, count + 1) - chance_of_other(outcome, value, count)
            best = int(np.where(sizes[group] < self.most, gain, -np.inf).argmax())
            if sizes[group[best]] >= self.most:
                break
            count[best] += 1
            sizes[group[best]] += 1
            places.append((int(row[best]), int(chunk[best])))
        return places

    def _states(self, rollouts: Rollouts, values: Tensor | None) -> tuple[Array, Array, Array, Array]:
        """Return row, chunk, outcome and V of the states, [n], that all episodes left with the same outcome."""
        tree = _Tree(rollouts)
        members: dict[tuple[int, int], list[int]] = {}
        for row, group in enumerate(integers(rollouts.group)):
            for chunk in range(tree.length[row]):
                past = -1 - group if chunk == 0 else tree.owner[row][chunk - 1]
                members.setdefault((past, chunk), []).append(row)
        groups = Segments.of(rollouts.group)
        rate = ((groups.sum(rollouts.row_success.double()) + 1) / (groups.size() + 2))[groups.index]
        table = rate[:, None].expand(rollouts.shape) if values is None else values.clamp(0, 1).double()
        same = [(rows[0], chunk) for (_, chunk), rows in members.items() if tree.value(rows) in (0.0, 1.0)]
        row, chunk = np.array(same, dtype=int).reshape(-1, 2).T
        value = np.array([float(table[place]) for place in same])
        return row, chunk, np.array(tree.success, dtype=float)[row], value
