"""Collection of complete episodes in groups with the same initial state, with continuous batching.

More episodes than rows are played by continuous batching: a row that ends takes the next request. Groups that are
unfinished when enough others are complete may be kept and continued at the next call under the newer policy: every
chunk records the policy version that chose it (partial rollouts, APRIL, arXiv:2509.18521).

Episodes may branch: at given chunks a row's state is saved, and children continue from there with their own noise.
Steps shared by parent and children are played once. The children's rows contain a copy of them that is masked out. The
growth of trees, i.e. the distribution of branches over running episodes and early stopping, follows TreePO,
arXiv:2508.17445. Its segments are action chunks here. Its third heuristic, to fall back to a random position of a
finished path when branches remain but no path runs, is not implemented: it would require storing every state.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array, is_mapping
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import accept_former_arguments, keep_former_names
from robopolicy.core.images import FrameStore, Keeping, store_for
from robopolicy.core.origin import prefix_errors
from robopolicy.core.player import Player, PolicyActor, PolicyOutput
from robopolicy.core.policy import Policy, ResumesDecision
from robopolicy.core.progress import progress
from robopolicy.core.randomness import uniform
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import require_fit
from robopolicy.core.world import Snapshot, Snapshots, World, plain_snapshot
from robopolicy.rl.branch_rules import BranchRule, forks, uncertainty
from robopolicy.rl.collect import column, store_images, stored_images
from robopolicy.rl.movement import StateSpread, changed_rows, newest_vectors


@dataclass(frozen=True)
class Request:
    """One episode to play. seed: of its initial state; group: episodes that its outcome is compared with; task: index
    of the instruction, -1: chosen by the seed; state: one row's state to start from instead; limit: number of chunks
    after which it is truncated, as by a time limit, 0: none.
    """

    seed: int
    group: int
    task: int = -1
    state: Snapshot | None = None
    limit: int = 0


@dataclass(frozen=True)
class Branching:
    """Branching of episodes. at: chunks (from 0) at which every running episode splits; width: number of resulting
    episodes, including itself.

    step: number of denoising steps of the chunk that the branches share (BranchGRPO's tree over the denoising chain; 0
    shares the initial noise); several values split after each of them, and every branch splits again; None: episodes
    split before the chunk and share nothing of it. uncertain: a group's branches at a chunk are distributed over its
    running episodes by the surprise of their last chunks (TreePO). rule: where episodes split instead of at fixed
    chunks, within the number of episodes requested. Raises ConfigError unless width is at least 2 and chunks and steps
    are distinct and non-negative.
    """

    at: tuple[int, ...] = ()
    width: int = 2
    step: int | tuple[int, ...] | None = None
    uncertain: bool = False
    rule: BranchRule | None = None

    def __post_init__(self):
        if self.width < 2 or any(step < 0 for step in self.at) or len(set(self.at)) != len(self.at):
            raise ConfigError(
                f"branch_width={self.width} must be at least 2, and branch_at={list(self.at)} at least 0."
            )
        if isinstance(self.step, tuple) and (not self.step or len(set(self.step)) != len(self.step)):
            raise ConfigError(
                f"branch_sampling_step={list(self.step)} must contain distinct steps, or be null for no branching."
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of shared steps at each split within the chunk, in order; -1: nothing is shared."""
        if self.step is None:
            return (-1,)
        return (self.step,) if isinstance(self.step, int) else tuple(sorted(self.step))

    @property
    def leaves(self) -> int:
        """Number of episodes from one root, if none ends before the last split."""
        return self.width ** (len(self.at) * len(self.steps))


def groups_of(seeds: Sequence[int] | Array, sizes: int | Sequence[int], tasks: Sequence[int] = ()) -> list[Request]:
    """Build requests for one group per seed, with `sizes` episodes each (ragged if a sequence is given).

    seeds: [G] of G groups; sizes: for all of them, or [G]; tasks: indices of instructions [G], or none. Raises
    ValueError if their numbers differ.
    """
    counts = [sizes] * len(seeds) if isinstance(sizes, int) else list(sizes)
    task_list = list(tasks) or [-1] * len(seeds)
    return [
        Request(int(seed), group, task)
        for group, (seed, count, task) in enumerate(zip(seeds, counts, task_list, strict=True))
        for _ in range(count)
    ]


def surprise(logp: Tensor, mask: Tensor) -> Array:
    """Compute the surprise of each chunk, [B]: the mean of -logp over masked steps [B, K], in nats; 0 if there are
    none.

    An uncertain policy assigns a low probability to the chosen steps.
    """
    return np.asarray(-(torch.where(mask, logp, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).cpu(), dtype=np.float64)


def allocate_branches(surprises: Sequence[float], branches: int) -> list[int]:
    """Distribute `branches` over n episodes in proportion to exp(surprise), [n].

    Rounded to integers by largest remainders (ties: the first), so that they sum to `branches`.
    """
    exact = np.exp(np.array(surprises) - max(surprises))
    exact = branches * exact / exact.sum()
    # 1e-9: a share of 2.9999999, which is 3 but for rounding, must not lose a branch.
    counts = np.floor(exact + 1e-9).astype(int)
    # counts - exact is minus the remainder, so the largest remainders come first.
    counts[np.argsort(counts - exact, kind="stable")[: branches - counts.sum()]] += 1
    return [int(count) for count in counts]


def allocate_branches_by_group(groups: Sequence[int], surprises: Sequence[float], each: int) -> list[int]:
    """Return the number of branches of each of n episodes, [n]: each group distributes `each` times its number of
    episodes.
    """
    branches = [each] * len(groups)
    for group in set(groups):
        members = [place for place, other in enumerate(groups) if other == group]
        counts = allocate_branches([surprises[place] for place in members], each * len(members))
        for place, count in zip(members, counts, strict=True):
            branches[place] = count
    return branches


@dataclass
class _Running:
    """One episode, waiting or in flight: number of chunks so far, and its origin.

    snapshot, returned: state and return so far, if it waits to continue from there; parent: number of the episode it
    branched off, -1: none, at chunk branch_decision, of which it shares branch_step steps, -1: none; number: its own,
    -1: not started; surprise: of its last chunk; still: number of consecutive chunks without movement; levels: the
    uncertainty of its chunks, for a branch rule; in_a_row: number of them, up to the last, after which it split; grows:
    whether a rule may split it.
    """

    request: Request
    steps: int = 0
    snapshot: Snapshot | None = None
    returned: float = 0.0
    parent: int = -1
    number: int = -1
    branch_decision: int = -1
    branch_step: int = -1
    surprise: float = 0.0
    still: int = 0
    levels: list[float] = field(default_factory=list[float])
    in_a_row: int = 0
    grows: bool = True

    @property
    def origin(self) -> tuple[int, int, int]:
        """Branch point: parent, chunk and step."""
        return self.parent, self.branch_decision, self.branch_step

    def tree(self) -> dict[str, Any]:
        """Return the state for `of`. The initial state of a request is the snapshot, or has been dropped."""
        state: Mapping[str, Array] = {} if self.snapshot is None else self.snapshot.arrays
        values = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("request", "snapshot")
        }
        return {
            "request": [self.request.seed, self.request.group, self.request.task, None, self.request.limit],
            "snapshot": {name: torch.as_tensor(value) for name, value in state.items()},
            "plain": values,
        }

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "_Running":
        """Rebuild the episode from `tree`."""
        state = {name: value.numpy() for name, value in tree["snapshot"].items()}
        return _Running(Request(*tree["request"]), snapshot=Snapshot(state) if state else None, **tree["plain"])


@dataclass(frozen=True)
class _State:
    """The state of an episode before a chunk: row `place` of `states`. returned: its return so far."""

    states: Snapshot
    place: int
    returned: float
    request: Request


Grow = Callable[[Rollouts], Sequence[tuple[int, int]]]
"""Map from the episodes of all groups so far to (row, chunk before which another episode continues), [] to end."""


class EpisodePlayer:
    """Plays requests in the rows of a world; keeps episodes in flight between two calls of `play`.

    branching: positions at which episodes split, None for no branching; max_idle_chunks: consecutive chunks without
    movement after which an episode is truncated, as by a time limit, 0 for never; images: storage mode of camera images
    (not, plain or packed). Raises SpecError if the policy does not match the world. Raises ConfigError if rows must
    split in a world without save and restore, or at a step that a chunk does not have. It is also raised for splits
    inside policy calls if the policy cannot continue from there.
    """

    @accept_former_arguments({"stop_still": "max_idle_chunks"})
    def __init__(
        self,
        world: World,
        policy: Policy,
        branching: Branching | None = None,
        *,
        max_idle_chunks: int = 0,
        images: Keeping = "plain",
    ):
        with prefix_errors(policy):
            require_fit(policy.spec, world.spec)
        if branching is not None and (branching.at or branching.rule) and not isinstance(world, Snapshots):
            raise ConfigError(
                f"The world '{world.spec.name}' does not support snapshots, so episodes cannot branch in it."
            )
        self.world, self.policy = world, policy
        self.branching, self.max_idle_chunks = branching or Branching(), max_idle_chunks
        self.compares_states = bool(max_idle_chunks or (self.branching.rule and self.branching.rule.lookahead))
        if self.compares_states and not world.spec.shows_vectors:
            raise ConfigError(
                "max_idle_chunks and branch_by=latr compare vector fields of observations, and the world "
                f"'{world.spec.name}' shows none: set max_idle_chunks=0, or another branch_by."
            )
        self.images: Keeping = images
        step, steps = self.branching.step, self.branching.steps
        if step is not None and not isinstance(policy, ResumesDecision):
            raise ConfigError(
                f"{type(policy).__name__} cannot resume a denoising chain at an intermediate step: set "
                "branch_sampling_step=null."
            )
        if step is not None and not 0 <= steps[0] <= steps[-1] < policy.spec.scored_steps:
            raise ConfigError(
                f"branch_sampling_step={step} does not exist: the policy has {policy.spec.scored_steps} denoising "
                "steps with log-probabilities; choose one of them, starting from 0."
            )
        self.clear()

    def clear(self) -> None:
        """Drop episodes in flight and waiting; the next call starts from new resets."""
        self.states: dict[tuple[int, int], _State] | None = None
        self._vacate()
        self.waiting: deque[_Running] = deque()
        self.parts: list[dict[str, Any]] = []
        self.finished: dict[int, int] = {}
        self.lineage: dict[int, tuple[int, int, int]] = {}
        self.shared: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.frames = store_for(self.images)
        self.count = 0
        self.spare: dict[int, list[Request]] = {}
        self.unplanned: set[int] = set()
        self.paths: dict[int, dict[int, Tensor]] = {}
        self.spread = StateSpread()
        self.scale = 0.0

    def _vacate(self) -> None:
        """Clear all rows: the world is reset at the next call."""
        self.rows: list[_Running | None] = [None] * self.world.batch_size
        self.player = Player(self.world, PolicyActor(self.policy, torch.Generator()))
        self.returns = np.zeros(self.world.batch_size)

    @property
    def unfinished(self) -> int:
        """Number of episodes in flight or waiting."""
        return sum(row is not None for row in self.rows) + len(self.waiting)

    @property
    def open_groups(self) -> set[int]:
        """Groups with an episode in flight or waiting."""
        return {row.request.group for row in [*self.rows, *self.waiting] if row is not None}

    @property
    def held(self) -> set[int]:
        """Groups that were requested and not yet returned: open ones, and surplus complete ones."""
        return self.open_groups | set(self.finished.values())

    @torch.no_grad()
    def play(
        self,
        requests: Sequence[Request],
        generator: torch.Generator,
        *,
        groups: int | None = None,
        version: int = 0,
        deterministic: bool = False,
        label: str = "",
        grow: Grow | None = None,
    ) -> Rollouts:
        """Play until `groups` groups are complete (default: all that are stored or requested) and return those.

        Groups with the lowest numbers are returned first; others stay for the next call, complete, in flight or
        waiting. Rows of the result are in the order in which episodes were started. grow: asked, once all are played,
        which episodes to continue from where, again and again until it names none; the state before every chunk is kept
        so long. extras: `episode_return` [B, T].
        """
        self.states = None if grow is None else {}
        self.spread = StateSpread()
        self.waiting.extend(self._roots(requests, groups, version))
        actor = PolicyActor(self.policy, generator, deterministic=deterministic, scored=True)
        self._play_waiting(actor, groups, version, label)
        while grow is not None and self._continue(grow(self._assemble(self._complete()))):
            self._play_waiting(actor, None, version, label)
        self.states = None
        complete = self._complete()[:groups]
        rollouts = self._assemble(complete)
        self._drop(torch.tensor(complete), 1)
        return rollouts

    def _play_waiting(self, actor: PolicyActor, groups: int | None, version: int, label: str) -> None:
        """Play what waits and what is in flight, until `groups` groups are complete (None: all)."""
        generator = actor.generator
        self.player.actor, steps_played = actor, iter(self.player)
        with progress(label, self.unfinished) if label else nullcontext(_nothing) as advance:
            while self.unfinished and (groups is None or len(self._complete()) < groups):
                self._fill()
                self._keep_states()
                self._branch()
                self._branch_by_rule(generator)
                actor.kept = self._shared_latents(generator.device)
                step = next(steps_played)
                self.returns += step.step.reward.sum(-1)
                new_column = column(step, self.world.spec.instructions, generator.device, version)
                if self.compares_states:
                    running = [index for index, row in enumerate(self.rows) if row is not None]
                    self.spread.add(new_column["observation"], running)
                self._observe_uncertainty(step.info, generator)
                ended_rows = (step.ended | self._stopped(new_column)) & ~self._dropped(new_column)
                store_images(new_column, self.frames, ended_rows)
                done = np.flatnonzero(ended_rows)
                self._keep(new_column, generator.device)
                for index in map(int, done):
                    running = self.rows[index]
                    assert running is not None
                    self.finished[running.number] = running.request.group
                    self.rows[index] = None
                    self._release(running)
                advance(len(done))

    def _keep_states(self) -> None:
        """Keep the states before the next chunk, if episodes are to continue from there."""
        running = [(index, row) for index, row in enumerate(self.rows) if row is not None]
        if self.states is None or not running:
            return
        assert isinstance(self.world, Snapshots)
        states = self.world.snapshot([index for index, _ in running])
        for place, (index, row) in enumerate(running):
            self.states[row.number, row.steps] = _State(states, place, float(self.returns[index]), row.request)

    def _continue(self, places: Sequence[tuple[int, int]]) -> bool:
        """Queue an episode for each of `places`, (row of the complete groups, chunk before which it begins); whether
        there are any.
        """
        assert self.states is not None
        groups = set(self._complete())
        numbers = sorted(number for number, group in self.finished.items() if group in groups)
        for row, chunk in places:
            number = numbers[row]
            while chunk < self.lineage[number][1]:  # played by an ancestor
                number = self.lineage[number][0]
            state = self.states[number, chunk]
            snapshot = state.states.take([state.place])
            self.waiting.append(_Running(state.request, chunk, snapshot, state.returned, number, -1, chunk))
        return bool(places)

    def suspend(self) -> int:
        """Move episodes in flight back to the front of the queue; the next call starts from new resets.

        If the world can save its rows, an episode continues from its current state, otherwise from its start. Returns
        the number of the latter.
        """
        flying = [(index, row) for index, row in enumerate(self.rows) if row is not None]
        states = plain_snapshot(self.world, [index for index, _ in flying]) if flying else None
        if states is not None:
            for place, (index, row) in enumerate(flying):
                row.snapshot, row.returned = states.take([place]), float(self.returns[index])
        elif flying:
            self._drop(torch.tensor([row.number for _, row in flying]), 0)
            flying = [(index, _Running(row.request)) for index, row in flying]
        # extendleft turns the order around; turned around before, rows keep theirs.
        self.waiting.extendleft(row for _, row in reversed(flying))
        self._vacate()
        return len(flying) if states is None else 0

    def tree(self) -> dict[str, Any]:
        """Return the state for `restore`, to continue suspended episodes."""
        return {
            "waiting": {str(place): running.tree() for place, running in enumerate(self.waiting)},
            "parts": _join(self.parts) if self.parts else {},
            "finished": [list(pair) for pair in self.finished.items()],
            "lineage": [[number, *self.lineage[number]] for number in self.lineage],
            "shared": {str(place): latents for place, latents in enumerate(self.shared.values())},
            "shared_at": [list(key) for key in self.shared],
            "frames": {} if self.frames is None else self.frames.tree(),
            "count": self.count,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.clear()
        self.waiting.extend(_Running.of(tree["waiting"][str(place)]) for place in range(len(tree["waiting"])))
        self.parts = [tree["parts"]] if tree["parts"] else []
        self.finished = dict(tree["finished"])
        self.lineage = {number: (parent, step, step_shared) for number, parent, step, step_shared in tree["lineage"]}
        self.shared = {(key[0], key[1]): tree["shared"][str(place)] for place, key in enumerate(tree["shared_at"])}
        self.frames = None if self.images == "not" else FrameStore.of(tree["frames"], packed=self.images == "packed")
        self.count = tree["count"]

    def rescore(self, score: Callable[[Rollouts], Tensor]) -> None:
        """Replace the log-probabilities of the n stored chunks, passed as [n, 1], by the results of `score`.

        score: rollouts -> [n, 1, K]. The executed part of an episode's last chunk is known only when the episode has
        ended. It can be scored only while the policy that acted is available.
        """
        if not self.parts:
            return
        flat = _join(self.parts)
        columns = _tree(lambda tensor: tensor[:, None], {key: value for key, value in flat.items() if key != "place"})
        number = torch.arange(len(flat["place"]), device=flat["place"].device)
        no_parent = torch.full_like(number, -1)
        images = stored_images(columns, self.frames)
        decisions = Rollouts(
            **columns, episode=number, group=number, parent=no_parent, branch_decision=no_parent, images=images
        )
        self.parts = [{**flat, "logp_behaviour": score(decisions)[:, 0]}]

    def _fill(self) -> None:
        """Assign waiting episodes to free rows: new initial states and branches."""
        free_rows = [index for index, row in enumerate(self.rows) if row is None]
        assignments = [(index, self.waiting.popleft()) for index in free_rows[: len(self.waiting)]]
        for index, running in assignments:
            # Numbered when they begin and not when they are queued: results come in the order of beginning.
            if running.number < 0:
                running.number, self.count = self.count, self.count + 1
                self.lineage[running.number] = running.origin
            self.rows[index], self.returns[index] = running, running.returned
        starts = [(index, running.request) for index, running in assignments if running.snapshot is None]
        start_count = len(starts)
        if not self.player.started and start_count < self.world.batch_size:
            # every row has to start once; those beyond the requests play along and are not recorded
            idle = sorted(set(range(self.world.batch_size)) - {index for index, _ in starts})
            starts += [(index, assignments[-1][1].request) for index in idle]
        if starts:
            rows = np.array([index for index, _ in starts])
            tasks = np.array([request.task for _, request in starts])
            options = {"task": tasks} if (tasks >= 0).any() else None
            self.player.start([request.seed for _, request in starts], rows, options, count=start_count)
        snapshots = [(index, running.snapshot) for index, running in assignments if running.snapshot is not None]
        if snapshots and isinstance(self.world, Snapshots):
            rows = np.array([index for index, _ in snapshots])
            self.player.restore(self.world, _joined([snapshot for _, snapshot in snapshots]), rows)

    def _splits(self, running: _Running) -> tuple[int, ...]:
        """Return the step counts after which an episode splits in the next chunk; if it branched off in this chunk,
        only later ones.
        """
        if running.steps not in self.branching.at:
            return ()
        first_step = running.branch_step if running.branch_decision == running.steps else None
        return tuple(step for step in self.branching.steps if first_step is None or step > first_step)

    def _branch(self) -> None:
        """At branch points, save the state and queue children that continue from it, before all other waiting
        episodes.
        """
        due = [(index, row) for index, row in enumerate(self.rows) if row is not None and self._splits(row)]
        if not due:
            return
        assert isinstance(self.world, Snapshots)
        states = self.world.snapshot([index for index, _ in due])
        child_count = self.branching.width - 1
        children = [child_count] * len(due)
        if self.branching.uncertain:
            children = allocate_branches_by_group(
                [row.request.group for _, row in due], [row.surprise for _, row in due], child_count
            )
        for place, (index, running) in enumerate(due):
            state = states.take([place])
            returned = float(self.returns[index])
            step = running.steps
            # Before everything else that waits: a child holds a saved state until it is played.
            for branch_step in self._splits(running) * children[place]:
                child = _Running(running.request, step, state, returned, running.number, -1, step, branch_step)
                self.waiting.appendleft(child)

    def _roots(self, requests: Sequence[Request], groups: int | None, version: int) -> list[_Running]:
        """Return the episodes that begin at once; the other requests of each group become spare, for its branches."""
        rule = self.branching.rule
        if rule is None:
            return [_Running(request, snapshot=request.state) for request in requests]
        if groups is not None:
            raise ConfigError("branch_by=arpo, aepo and latr complete their groups: set overprovision=0.")
        self.scale, self.paths = 0.0, {}
        members: dict[int, list[Request]] = {}
        for request in requests:
            members.setdefault(request.group, []).append(request)
        roots: list[_Running] = []
        for group, each in members.items():
            size = round(rule.share_of_group(version) * len(each))
            count = rule.first_roots(size) if size else 0
            roots += [_Running(request, snapshot=request.state) for request in each[:count]]
            self.spare[group] = each[count:size]
            roots += [_Running(request, snapshot=request.state, grows=False) for request in each[size:]]
        self.unplanned = set(members) if rule.measures_first else set()
        return roots

    def _observe_uncertainty(self, played: PolicyOutput, generator: torch.Generator) -> None:
        """Add the uncertainty of the chunk just played to the levels of every running episode."""
        if self.branching.rule is None:
            return
        running = [index for index, row in enumerate(self.rows) if row is not None]
        measure = forks if self.branching.rule.by_forks else uncertainty
        levels = measure(self.policy, played.seen, played.decision, generator)
        if not self.policy.spec.categorical:  # in units of the first chunks' spread
            self.scale = self.scale or max(float(levels[running].mean()), 1e-9)
            levels = levels / self.scale
        for index in running:
            row = self.rows[index]
            assert row is not None
            row.levels.append(float(levels[index]))

    def _branch_by_rule(self, generator: torch.Generator) -> None:
        """Ask the rule about every episode that has just made a decision, and queue a branch where it splits."""
        rule = self.branching.rule
        for index, row in enumerate(self.rows):
            if rule is None or row is None or not row.grows or row.steps <= max(row.branch_decision, 0):
                continue
            if row.parent >= 0 and row.steps - row.branch_decision <= max(rule.lookahead, default=0):
                continue
            group = row.request.group
            spare = [] if group in self.unplanned else self.spare.get(group)
            draw = float(uniform((1,), generator, generator.device)) if spare else 1.0
            if not spare or not rule.splits(row.levels, row.in_a_row, draw):
                row.in_a_row = 0
                continue
            assert isinstance(self.world, Snapshots)
            row.in_a_row += 1
            state, returned = self.world.snapshot([index]), float(self.returns[index])
            child = _Running(spare.pop(), row.steps, state, returned, row.number, -1, row.steps)
            child.levels, child.in_a_row = list(row.levels), row.in_a_row
            self.waiting.appendleft(child)

    def _dropped(self, column: dict[str, Any]) -> Array:
        """Drop branches [B] bool that are still like their parents some chunks after the split; others take their
        place.

        Compared are vector fields before this chunk and before the parent's of the same number (its last one, if it has
        ended), by the root mean square of their differences in standard deviations over all states of this call.
        """
        rule, dropped = self.branching.rule, np.zeros(len(self.rows), dtype=bool)
        if rule is None or not rule.lookahead:
            return dropped
        vectors = newest_vectors(column["observation"])
        states = torch.cat(list(vectors.values()), -1).cpu()
        values = self.spread.values()
        spread = torch.cat([values[key] for key in vectors]).cpu()
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            self.paths.setdefault(row.number, {})[row.steps] = states[index]
            if row.parent < 0 or row.steps - row.branch_decision not in rule.lookahead:
                continue
            path = self.paths[row.parent]
            difference = (states[index] - path[min(row.steps, max(path))]) / spread
            dropped[index] = float(difference.square().mean().sqrt()) < rule.alike
        for index in map(int, np.flatnonzero(dropped)):
            row = self.rows[index]
            assert row is not None
            self._drop(torch.tensor([row.number]), 0)
            self.spare[row.request.group].append(row.request)
            self.rows[index] = None
            self._release(row)
        self.player.running = self.player.running & ~dropped
        return dropped

    def _release(self, ended: _Running) -> None:
        """Let spare episodes begin: after a group's first episode as many as the rule says, all once none is left."""
        group = ended.request.group
        spare, rule = self.spare.get(group, []), self.branching.rule
        if rule is None or not spare:
            return
        count = rule.more_roots(len(spare) + 1, ended.levels) if group in self.unplanned else 0
        self.unplanned.discard(group)
        if not count and group not in self.open_groups:
            count = len(spare)
        self.waiting.extend(_Running(spare.pop(), snapshot=ended.request.state) for _ in range(count))

    def _stopped(self, column: dict[str, Any]) -> Array:
        """Count chunks without movement, and truncate episodes [B] bool with too many in a row, or at their limit."""
        stopped_rows = np.zeros(len(self.rows), dtype=bool)
        has_moved: Array | None = None
        if self.max_idle_chunks:
            has_moved = changed_rows(column["observation"], column["next_observation"], self.spread.values())
        for index, running in enumerate(self.rows):
            if running is not None and has_moved is not None:
                running.still = 0 if has_moved[index] else running.still + 1
                stopped_rows[index] = running.still >= self.max_idle_chunks
            if running is not None and running.request.limit:
                stopped_rows[index] |= running.steps + 1 >= running.request.limit
        if not stopped_rows.any():
            return stopped_rows
        cut_rows = torch.as_tensor(stopped_rows, device=column["truncated"].device)
        # Whoever ends by itself in this very decision keeps its own end, which may cut the bootstrap.
        column["truncated"] = column["truncated"] | cut_rows & ~column["terminated"] & ~column["horizon_end"]
        self.player.running = self.player.running & ~stopped_rows
        return stopped_rows

    def _shared_latents(self, device: torch.device) -> tuple[dict[str, Tensor], Tensor] | None:
        """Return the steps from which rows continue that have just branched off inside a policy call, and their
        number.
        """
        due = {
            index: self.shared[running.parent, running.steps]
            for index, running in enumerate(self.rows)
            if running is not None and running.branch_decision == running.steps and running.branch_step >= 0
        }
        if not due:
            return None
        example = next(iter(due.values()))
        latents = {name: value.new_zeros((len(self.rows), *value.shape)) for name, value in example.items()}
        count = torch.full((len(self.rows),), -1, device=device)
        for index, latents_of_parent in due.items():
            running = self.rows[index]
            assert running is not None
            count[index] = running.branch_step
            for name, value in latents_of_parent.items():
                latents[name][index] = value
        return latents, count

    def _keep(self, column: dict[str, Any], device: torch.device) -> None:
        """Record the column's active rows as flat chunks with number, group and step of their episodes."""
        place: list[tuple[int, int, int]] = []
        rows: list[int] = []
        surprises = surprise(column["logp_behaviour"], column["mask"]) if self.branching.uncertain else None
        for index, running in enumerate(self.rows):
            if running is not None:
                if surprises is not None:
                    running.surprise = float(surprises[index])
                # Children that share steps of this decision find its latents by the parent's number and decision.
                if max(self._splits(running), default=-1) >= 0:
                    latents = {name: value[index].clone() for name, value in column["latents"].items()}
                    self.shared[running.number, running.steps] = latents
                place.append((running.number, running.request.group, running.steps))
                rows.append(index)
                running.steps += 1
        if not rows:  # all were dropped
            return
        column["extras"]["episode_return"] = torch.tensor(self.returns, dtype=torch.float32).to(device)
        indices = torch.tensor(rows, device=device)
        part = _tree(lambda tensor: tensor[indices], column)
        part["place"] = torch.tensor(place, device=device)
        self.parts.append(part)

    def _complete(self) -> list[int]:
        """Return the numbers of complete groups that were not yet returned, sorted."""
        return sorted(set(self.finished.values()) - self.open_groups) if self.finished else []

    def _assemble(self, groups: list[int]) -> Rollouts:
        """Gather the chunks of `groups`, including those shared with ancestors, as [B, T, ...]; keep the rest."""
        flat = _join(self.parts)
        self.parts, device = [flat], flat["place"].device
        in_groups = torch.isin(flat["place"][:, 1], torch.tensor(groups, device=device))
        flat = dict(flat) if bool(in_groups.all()) else _tree(lambda tensor: tensor[in_groups], flat)
        place = flat.pop("place")
        numbers = sorted(number for number, group in self.finished.items() if group in set(groups))
        order = {number: row for row, number in enumerate(numbers)}
        row = torch.searchsorted(torch.tensor(numbers, device=device), place[:, 0].contiguous())
        # Where each decision of a row lies among the flat ones; -1 is padding, or a prefix that is filled in below.
        position = torch.full((len(numbers), int(place[:, 2].max()) + 1), -1, dtype=torch.int64, device=device)
        position[row, place[:, 2]] = torch.arange(len(place), device=device)
        own_mask = position >= 0
        lineage = [self.lineage[number] for number in numbers]
        parents = [order.get(parent, -1) for parent, *_ in lineage]
        steps = [step if parent in order else -1 for parent, step, _ in lineage]
        shared_steps = [max(count, 0) for *_, count in lineage]
        for child, (parent, step) in enumerate(zip(parents, steps, strict=True)):  # parents come before their children
            if parent >= 0:
                position[child, :step] = position[parent, :step]
        filled = position >= 0

        def gather(tensor: Tensor) -> Tensor:
            values = tensor[position.clamp(min=0)]
            return torch.where(
                filled.reshape(*filled.shape, *[1] * (tensor.dim() - 1)), values, torch.zeros_like(values)
            )

        padded = _tree(gather, flat)
        # A copied prefix is scored once, in the row that played it.
        padded["mask"] = padded["mask"] & own_mask[..., None]
        group = [self.finished[number] for number in numbers]
        if "after" in padded:  # a value after padding counts nowhere, but is asked for
            padded["after"][:, -1] = padded["after"][torch.arange(len(numbers)), filled.sum(1) - 1]
        images = stored_images(padded, self.frames)
        return Rollouts(
            **padded,
            episode=torch.arange(len(numbers), device=device),
            group=torch.tensor(group, device=device),
            parent=torch.tensor(parents, device=device),
            branch_decision=torch.tensor(steps, device=device),
            branch_sampling_step=None if self.branching.step is None else torch.tensor(shared_steps, device=device),
            whole=True,
            images=images,
        )

    def _drop(self, which: Tensor, by: int) -> None:
        """Drop episodes with these numbers (by 0) or groups (by 1), and their chunks."""
        flat = _join(self.parts)
        to_drop = torch.isin(flat["place"][:, by], which.to(flat["place"].device))
        dropped = set(flat["place"][to_drop, 0].unique().tolist())
        self.parts = [] if bool(to_drop.all()) else [_tree(lambda tensor: tensor[~to_drop], flat)]
        self._forget_frames()
        self.finished = {number: group for number, group in self.finished.items() if number not in dropped}
        self.lineage = {number: origin for number, origin in self.lineage.items() if number not in dropped}
        self.shared = {key: latents for key, latents in self.shared.items() if key[0] not in dropped}
        # Nothing held refers to a number any more, so they may begin anew.
        if not self.lineage:
            self.count = 0

    def _forget_frames(self) -> None:
        """Keep only the frames that stored chunks refer to."""
        chunks = dict(self.parts[0]) if self.parts else {}
        images = stored_images(chunks, self.frames)
        self.frames = store_for(self.images)
        if images is not None and self.frames is not None:
            self.parts = [{**chunks, "seen": images.seen, "after": images.after}]
            self.frames = FrameStore(images.frames, packed=self.frames.packed)


def _nothing(steps: int = 1, note: str = "") -> None:
    """Do not advance a progress bar."""


def _joined(snapshots: Sequence[Snapshot | None]) -> Snapshot:
    """Concatenate snapshots of single rows."""
    parts = [snapshot for snapshot in snapshots if snapshot is not None]
    return Snapshot({name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays})


def _tree(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if is_mapping(value):
        return {key: _tree(function, item) for key, item in value.items()}
    return function(value)


def _join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for key, value in parts[0].items():
        values = [part[key] for part in parts]
        columns[key] = _join(values) if is_mapping(value) else torch.cat(values)
    return columns


keep_former_names(
    __name__,
    {"shared_out": "allocate_branches", "shared_in_groups": "allocate_branches_by_group", "moved": "changed_rows"},
)
