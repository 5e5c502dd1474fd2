"""Collecting whole episodes, in groups with the same start, with rows that are refilled as soon as they are free.

More episodes than rows are played by continuous batching: a row that ends takes the next request. What is unfinished
when enough episodes are done may be kept and gone on with at the next call, under the newer policy: every decision
remembers which version made it (APRIL, partial rollouts).

Episodes may branch: at given decisions a row's state is kept, and children go on from there with noise of their own.
What parent and children share is played once. The children's rows hold a copy of it that is masked out.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.narrowing import is_mapping
from robopolicy.core.player import Player, PolicyActor
from robopolicy.core.policy import Policy, Resumes
from robopolicy.core.progress import progress
from robopolicy.core.rollouts import FinalImages, Rollouts
from robopolicy.core.spec import require_fit
from robopolicy.core.vectors import StateVector
from robopolicy.core.world import Snapshot, Snapshots, World
from robopolicy.rl.collect import column


@dataclass(frozen=True)
class Request:
    """One episode to play. seed: of its start; group: whose outcomes it is compared with; task: index of the
    instruction, -1: whatever the seed says; state: one row's state to begin in instead.
    """

    seed: int
    group: int
    task: int = -1
    state: Snapshot | None = None


@dataclass(frozen=True)
class Branching:
    """at: decisions (from 0) at which every running episode splits; width: into how many, itself among them.

    step: how many steps of the decision the branches share (BranchGRPO's tree over the denoising chain; 0 shares the
    initial noise), None: they split before it and share nothing of it. Raises ConfigError unless width is at least 2
    and the decisions are distinct and from 0.
    """

    at: tuple[int, ...] = ()
    width: int = 2
    step: int | None = None

    def __post_init__(self):
        if self.width < 2 or any(step < 0 for step in self.at) or len(set(self.at)) != len(self.at):
            raise ConfigError(
                f"branch_width is {self.width}, branch_at {list(self.at)}: split in 2 or more, at 0 or later."
            )

    @property
    def leaves(self) -> int:
        """Episodes that one root becomes, if none ends before the last split."""
        return self.width ** len(self.at)


def groups_of(seeds: Sequence[int] | Array, sizes: int | Sequence[int], tasks: Sequence[int] = ()) -> list[Request]:
    """Return requests for one group per seed, `sizes` episodes each (ragged where a sequence is given).

    seeds: [G] of G groups; sizes: for all of them, or [G]; tasks: indices of instructions [G], or none. Raises
    ValueError where their numbers differ.
    """
    counts = [sizes] * len(seeds) if isinstance(sizes, int) else list(sizes)
    chosen = list(tasks) or [-1] * len(seeds)
    return [
        Request(int(seed), group, task)
        for group, (seed, count, task) in enumerate(zip(seeds, counts, chosen, strict=True))
        for _ in range(count)
    ]


@dataclass
class _Running:
    """One episode, waiting or in flight: how many decisions it has taken, and where it came from.

    snapshot, returned: state and return so far at the branch; parent: number of the episode it branched off, -1: none.
    """

    request: Request
    steps: int = 0
    snapshot: Snapshot | None = None
    returned: float = 0.0
    parent: int = -1
    number: int = -1
    branch_decision: int = -1


class EpisodePlayer:
    """Plays requests in the rows of a world; holds what is in flight between two calls of `play`.

    branching: where episodes split, None for nowhere; trace: keep what every control step led to, so that `Episodes.of`
    can be made of what a policy with chunks played. Raises SpecError where the policy does not fit the world, and
    ConfigError where rows are to split in a world that cannot save and restore them, or inside decisions of a policy
    that cannot go on from there, or at a step that a decision does not have.
    """

    def __init__(self, world: World, policy: Policy, branching: Branching | None = None, *, trace: bool = False):
        require_fit(policy.spec, world.spec)
        if branching is not None and branching.at and not isinstance(world, Snapshots):
            raise ConfigError(f"The world '{world.spec.name}' cannot save its rows, so episodes cannot branch in it.")
        self.world, self.policy = world, policy
        self.branching = branching or Branching()
        self.traced = StateVector.of(world.spec) if trace else None
        step = self.branching.step
        if step is not None and not isinstance(policy, Resumes):
            raise ConfigError(
                f"{type(policy).__name__} cannot go on inside a decision: set branch_sampling_step to null."
            )
        if step is not None and not 0 <= step < policy.spec.scored_steps:
            raise ConfigError(
                f"branch_sampling_step is {step}, a decision has {policy.spec.scored_steps} scored steps: choose one "
                "of them, from 0."
            )
        self.clear()

    def clear(self) -> None:
        """Drop what is in flight and waiting; the next call starts from fresh resets."""
        self.rows: list[_Running | None] = [None] * self.world.batch_size
        self.waiting: deque[_Running] = deque()
        self.player = Player(self.world, PolicyActor(self.policy, torch.Generator()))
        self.parts: list[dict[str, Any]] = []
        self.finished: set[int] = set()
        self.lineage: dict[int, tuple[int, int]] = {}
        self.shared: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.after: dict[int, dict[str, Tensor]] = {}
        self.count = 0
        self.returns = np.zeros(self.world.batch_size)

    @property
    def unfinished(self) -> int:
        """Number of episodes in flight or waiting."""
        return sum(row is not None for row in self.rows) + len(self.waiting)

    @torch.no_grad()
    def play(
        self,
        requests: Sequence[Request],
        generator: torch.Generator,
        *,
        enough: int | None = None,
        version: int = 0,
        deterministic: bool = False,
        label: str = "",
    ) -> Rollouts:
        """Play until `enough` episodes are done (default: all that are in flight or requested) and return those.

        Groups are numbered by the requests; rows of the result are in the order in which episodes were started.
        extras: `episode_return` [B, T], and `trace` where it is kept. What is not done stays in flight, or waiting, for
        the next call. An episode whose ancestor is still in flight waits for it.
        """
        self.waiting.extend(_Running(request, snapshot=request.state) for request in requests)
        actor = PolicyActor(self.policy, generator, deterministic=deterministic, scored=True)
        self.player.actor, steps_played = actor, iter(self.player)
        with progress(label, enough or self.unfinished) if label else nullcontext(_nothing) as advance:
            while self.unfinished and (enough is None or len(self._complete()) < enough):
                self._fill()
                self._branch()
                actor.kept = self._shared_latents(generator.device)
                played = next(steps_played)
                self.returns += played.step.reward.sum(-1)
                found = column(played, self.world.spec.instructions, generator.device, version)
                if self.traced is not None:
                    found["extras"]["trace"] = torch.as_tensor(self.traced.pack(played.step.trace)).to(generator.device)
                done, after = np.flatnonzero(played.ended), found.pop("images_after")
                self._keep(found, generator.device)
                for index in map(int, done):
                    running = self.rows[index]
                    assert running is not None
                    self.finished.add(running.number)
                    self.after[running.number] = {key: value[index].clone() for key, value in after.items()}
                    self.rows[index] = None
                advance(len(done))
        return self._assemble(sorted(self._complete()))

    def _fill(self) -> None:
        """Give waiting episodes to free rows: fresh starts and branches."""
        free = [index for index, row in enumerate(self.rows) if row is None]
        taken = [(index, self.waiting.popleft()) for index in free[: len(self.waiting)]]
        for index, running in taken:
            running.number = self.count
            self.lineage[self.count] = (running.parent, running.branch_decision)
            self.rows[index], self.count = running, self.count + 1
            self.returns[index] = running.returned
        starts = [(index, running.request) for index, running in taken if running.snapshot is None]
        played = len(starts)
        if not self.player.started and played < self.world.batch_size:
            # every row has to start once; those beyond the requests play along and are not recorded
            idle = sorted(set(range(self.world.batch_size)) - {index for index, _ in starts})
            starts += [(index, taken[-1][1].request) for index in idle]
        if starts:
            rows = np.array([index for index, _ in starts])
            tasks = np.array([request.task for _, request in starts])
            options = {"task": tasks} if (tasks >= 0).any() else None
            self.player.start([request.seed for _, request in starts], rows, options, count=played)
        kept = [(index, running.snapshot) for index, running in taken if running.snapshot is not None]
        if kept and isinstance(self.world, Snapshots):
            rows = np.array([index for index, _ in kept])
            self.player.restore(self.world, _joined([snapshot for _, snapshot in kept]), rows)

    def _branch(self) -> None:
        """Where it is time, keep the state and queue children that go on from it, before anything else waiting.

        A child does not split again where it began.
        """
        at = self.branching.at
        due = [
            (index, running)
            for index, running in enumerate(self.rows)
            if running is not None and running.steps in at and running.branch_decision != running.steps
        ]
        if not due:
            return
        assert isinstance(self.world, Snapshots)
        states = self.world.snapshot([index for index, _ in due])
        for place, (index, running) in enumerate(due):
            state, returned, step = states.take([place]), float(self.returns[index]), running.steps
            for _ in range(self.branching.width - 1):
                self.waiting.appendleft(
                    _Running(running.request, step, state, returned, running.number, branch_decision=step)
                )

    def _shared_latents(self, device: torch.device) -> tuple[dict[str, Tensor], Tensor] | None:
        """Return the steps that rows go on from, which have just branched off inside a decision, and how many."""
        step = self.branching.step
        due = {
            index: self.shared[running.parent, running.steps]
            for index, running in enumerate(self.rows)
            if running is not None and running.branch_decision == running.steps and step is not None
        }
        if not due or step is None:
            return None
        some = next(iter(due.values()))
        latents = {name: value.new_zeros((len(self.rows), *value.shape)) for name, value in some.items()}
        count = torch.full((len(self.rows),), -1, device=device)
        for index, found in due.items():
            count[index] = step
            for name, value in found.items():
                latents[name][index] = value
        return latents, count

    def _keep(self, column: dict[str, Any], device: torch.device) -> None:
        """Record the column's live rows as flat decisions with number, group and step of their episodes."""
        place: list[tuple[int, int, int]] = []
        rows: list[int] = []
        at, step = self.branching.at, self.branching.step
        for index, running in enumerate(self.rows):
            if running is not None:
                if step is not None and running.steps in at and running.branch_decision != running.steps:
                    kept = {name: value[index].clone() for name, value in column["latents"].items()}
                    self.shared[running.number, running.steps] = kept
                place.append((running.number, running.request.group, running.steps))
                rows.append(index)
                running.steps += 1
        column["extras"]["episode_return"] = torch.tensor(self.returns, dtype=torch.float32).to(device)
        chosen = torch.tensor(rows, device=device)
        part = _tree(lambda tensor: tensor[chosen], column)
        part["place"] = torch.tensor(place, device=device)
        self.parts.append(part)

    def _complete(self) -> set[int]:
        """Numbers of finished episodes all of whose ancestors are finished too, or were returned before."""
        if not self.branching.at:
            return self.finished
        running = {row.number for row in self.rows if row is not None}
        return {number for number in self.finished if not running & set(self._ancestors(number))}

    def _ancestors(self, number: int) -> list[int]:
        chain: list[int] = []
        while (number := self.lineage[number][0]) >= 0:
            chain.append(number)
        return chain

    def _assemble(self, numbers: list[int]) -> Rollouts:
        """Gather the decisions of `numbers`, and of what they share with ancestors, into [B, T, ...]; keep the rest."""
        flat = _join(self.parts)
        place = flat.pop("place")
        length = int(place[:, 2].max()) + 1
        position = torch.full((self.count, length), -1, dtype=torch.int64, device=place.device)
        position[place[:, 0], place[:, 2]] = torch.arange(len(place), device=place.device)
        group = torch.zeros(self.count, dtype=torch.int64, device=place.device)
        group[place[:, 0]] = place[:, 1]
        own = position >= 0
        for number in range(self.count):  # parents come before their children
            parent, step = self.lineage[number]
            if parent >= 0:
                position[number, :step] = position[parent, :step]
        chosen = torch.tensor(numbers, device=place.device)
        position, own = position[chosen], own[chosen]
        longest = int((position >= 0).any(0).sum())
        position, own = position[:, :longest], own[:, :longest]
        there = position >= 0

        def gather(tensor: Tensor) -> Tensor:
            found = tensor[position.clamp(min=0)]
            return torch.where(there.reshape(*there.shape, *[1] * (tensor.dim() - 1)), found, torch.zeros_like(found))

        padded = _tree(gather, flat)
        padded["mask"] = padded["mask"] & own[..., None]
        order = {number: row for row, number in enumerate(numbers)}
        lineage = [self.lineage[number] for number in numbers]
        parents = [order.get(parent, -1) for parent, _ in lineage]
        steps = [step if parent in order else -1 for parent, step in lineage]
        self._forget(flat, place, set(numbers))
        return Rollouts(
            **padded,
            episode=torch.arange(len(numbers), device=place.device),
            group=group[chosen],
            parent=torch.tensor(parents, device=place.device),
            branch_decision=torch.tensor(steps, device=place.device),
            branch_sampling_step=self._branch_sampling_steps(steps, place.device),
            whole=True,
            final_images=self._final_images(numbers, there),
        )

    def _final_images(self, numbers: list[int], there: Tensor) -> FinalImages | None:
        """Return the images that the episodes `numbers` end with; there: [B, T] bool, which decisions they have."""
        after = [self.after.pop(number) for number in numbers]
        if not after or not after[0]:
            return None
        place = torch.zeros(there.shape, dtype=torch.int64, device=there.device)
        row = torch.arange(len(numbers), device=there.device)
        place[row, there.sum(1) - 1] = row + 1
        place[:, -1] = row + 1  # a value after padding counts nowhere, but is asked for
        return FinalImages({key: torch.stack([each[key] for each in after]) for key in after[0]}, place)

    def _branch_sampling_steps(self, steps: list[int], device: torch.device) -> Tensor | None:
        """Return how many steps each row shares of the decision it branched at, None where branches share none."""
        kept = self.branching.step
        return None if kept is None else torch.tensor([kept if step >= 0 else 0 for step in steps], device=device)

    def _forget(self, flat: dict[str, Any], place: Tensor, returned: set[int]) -> None:
        """Drop what was returned, apart from what episodes still in flight or waiting share with it."""
        self.finished -= returned
        going_on = [row for row in [*self.rows, *self.waiting] if row is not None]
        if not going_on and not self.finished:
            self.parts, self.lineage, self.shared, self.count = [], {}, {}, 0
            return
        needed = {running.number for running in going_on if running.number >= 0} | self.finished
        for running in going_on:
            if running.parent >= 0:
                needed |= {running.parent, *self._ancestors(running.parent)}
        for number in list(needed):
            needed |= set(self._ancestors(number))
        kept = torch.isin(place[:, 0], torch.tensor(sorted(needed), device=place.device))
        rest = _tree(lambda tensor: tensor[kept], flat)
        rest["place"] = place[kept]
        self.parts = [rest] if bool(kept.any()) else []


def _nothing(steps: int = 1, note: str = "") -> None:
    """Advance no bar."""


def _joined(snapshots: Sequence[Snapshot | None]) -> Snapshot:
    """Put snapshots of single rows together."""
    parts = [snapshot for snapshot in snapshots if snapshot is not None]
    return Snapshot({name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays})


def _tree(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if is_mapping(value):
        return {key: _tree(function, item) for key, item in value.items()}
    return function(value)


def _join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in parts[0].items():
        values = [part[key] for part in parts]
        joined[key] = _join(values) if is_mapping(value) else torch.cat(values)
    return joined
