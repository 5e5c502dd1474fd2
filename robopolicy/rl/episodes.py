"""Collecting whole episodes, in groups with the same start, with rows that are refilled as soon as they are free.

More episodes than rows are played by continuous batching: a row that ends takes the next request. What is unfinished
when enough episodes are done may be kept and gone on with at the next call, under the newer policy: every decision
remembers which version made it (APRIL, partial rollouts).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.policy import Policy
from robopolicy.core.progress import progress
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import Observation, require_fit
from robopolicy.core.world import World
from robopolicy.rl.collect import decide


@dataclass(frozen=True)
class Request:
    """One episode to play. seed: of its start; group: whose outcomes it is compared with; task: index of the
    instruction, -1: whatever the seed says.
    """

    seed: int
    group: int
    task: int = -1


def groups_of(
    seeds: Sequence[int] | np.ndarray, sizes: int | Sequence[int], tasks: Sequence[int] = ()
) -> list[Request]:
    """Return requests for one group per seed, `sizes` episodes each (ragged where a sequence is given)."""
    counts = [sizes] * len(seeds) if isinstance(sizes, int) else list(sizes)
    chosen = list(tasks) or [-1] * len(seeds)
    return [
        Request(int(seed), group, task)
        for group, (seed, count, task) in enumerate(zip(seeds, counts, chosen, strict=True))
        for _ in range(count)
    ]


@dataclass
class _Running:
    """One episode in flight: its request, its number among all and how many decisions it has taken."""

    request: Request
    number: int
    steps: int = 0


class EpisodePlayer:
    """Plays requests in the rows of a world; holds what is in flight between two calls of `play`."""

    def __init__(self, world: World, policy: Policy):
        require_fit(policy.spec, world.spec)
        self.world, self.policy = world, policy
        self.clear()

    def clear(self) -> None:
        """Drop what is in flight and waiting; the next call starts from fresh resets."""
        self.rows: list[_Running | None] = [None] * self.world.batch_size
        self.waiting: deque[Request] = deque()
        self.observation: Observation | None = None
        self.parts: list[dict[str, Any]] = []
        self.finished: set[int] = set()
        self.count = 0
        self.returns = np.zeros(self.world.batch_size)

    @property
    def in_flight(self) -> int:
        """Number of unfinished episodes."""
        return sum(row is not None for row in self.rows)

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
        extras: `episode_return` [B, T]. What is not done stays in flight, or waiting, for the next call.
        """
        self.waiting.extend(requests)
        wanted = self.in_flight + len(self.waiting) if enough is None else enough
        wanted = min(wanted, self.in_flight + len(self.waiting))
        with progress(label, wanted) if label else nullcontext(_nothing) as advance:
            while len(self.finished) < wanted:
                self._fill()
                assert self.observation is not None
                step, column = decide(
                    self.world, self.policy, self.observation, generator, deterministic=deterministic, version=version
                )
                self.observation = step.observation
                self.returns += step.reward.sum(-1)
                self._keep(column, generator.device)
                done = [index for index, row in enumerate(self.rows) if row is not None and step.ended[index]]
                for index in done:
                    running = self.rows[index]
                    assert running is not None
                    self.finished.add(running.number)
                    self.rows[index] = None
                advance(len(done))
        return self._assemble()

    def _fill(self) -> None:
        free = [index for index, row in enumerate(self.rows) if row is None][: len(self.waiting)]
        if self.observation is None:
            # every row has to start once; those beyond the requests play along and are not recorded
            free = list(range(min(len(self.waiting), self.world.batch_size)))
        if not free:
            return
        taken = [self.waiting.popleft() for _ in free]
        for index, request in zip(free, taken, strict=True):
            self.rows[index] = _Running(request, self.count)
            self.count += 1
        rows, starts = (free, taken)
        if self.observation is None and len(free) < self.world.batch_size:
            missing = self.world.batch_size - len(free)
            rows, starts = list(range(self.world.batch_size)), taken + [taken[-1]] * missing
        options = None
        if any(request.task >= 0 for request in starts):
            options = {"task": np.array([request.task for request in starts])}
        self.observation = self.world.reset(
            rows=np.array(rows), seeds=[request.seed for request in starts], options=options
        )
        self.returns[rows] = 0.0
        self.policy.reset(np.array(rows))

    def _keep(self, column: dict[str, Any], device: torch.device) -> None:
        """Record the column's live rows as flat decisions with the number and step of their episodes."""
        live = [index for index, row in enumerate(self.rows) if row is not None]
        numbers, steps = [], []
        for index in live:
            running = self.rows[index]
            assert running is not None
            numbers.append((running.number, running.request.group))
            steps.append(running.steps)
            running.steps += 1
        column["extras"]["episode_return"] = torch.tensor(self.returns, dtype=torch.float32).to(device)
        rows = torch.tensor(live, device=device)
        part = _tree(lambda tensor: tensor[rows], column)
        part["place"] = torch.tensor(
            [(*number, step) for number, step in zip(numbers, steps, strict=True)], device=device
        )
        self.parts.append(part)

    def _assemble(self) -> Rollouts:
        """Scatter the decisions of finished episodes into [B, T, ...]; keep the others."""
        flat = _join(self.parts)
        place = flat.pop("place")
        done = torch.isin(place[:, 0], torch.tensor(sorted(self.finished), device=place.device))
        rest = _tree(lambda tensor: tensor[~done], flat)
        rest["place"] = place[~done]
        self.parts, self.finished = ([rest] if len(rest["place"]) else []), set()
        place = place[done]
        episodes, row = torch.unique(place[:, 0], return_inverse=True)
        length = int(place[:, 2].max()) + 1
        group = torch.zeros_like(episodes)
        group[row] = place[:, 1]

        def scatter(tensor: Tensor) -> Tensor:
            out = tensor.new_zeros((len(episodes), length, *tensor.shape[1:]))
            out[row, place[:, 2]] = tensor[done]
            return out

        padded = _tree(scatter, flat)
        alone = torch.full_like(episodes, -1)
        numbers = torch.arange(len(episodes), device=place.device)
        return Rollouts(**padded, episode=numbers, group=group, parent=alone, branch_step=alone, whole=True)


def _nothing(steps: int = 1, note: str = "") -> None:
    """Advance no bar."""


def _tree(function: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tree(function, item) for key, item in value.items()}
    return function(value)


def _join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in parts[0].items():
        values = [part[key] for part in parts]
        joined[key] = _join(values) if isinstance(value, Mapping) else torch.cat(values)
    return joined
