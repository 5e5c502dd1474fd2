"""Recording demonstrations and rollouts: play a controller or a policy in a world, one seed per episode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError, SpecError
from robopolicy.core.policy import Policy, is_policy, to_tensors
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation, WorldSpec, validate_observation
from robopolicy.core.world import Controller, Step, World


def record(
    world: World,
    actor: Controller | Policy,
    seeds: Sequence[int] | np.ndarray,
    *,
    episodes: int | None = None,
    successes_only: bool = False,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
) -> Episodes:
    """Play the episodes of `seeds` and return them in that order, failures included unless `successes_only`.

    episodes: stop after this many (kept) episodes; the same ones are kept whatever the world's batch size. generator: a
    policy's noise (its device is where the policy computes); deterministic: a policy without exploration noise. Actions
    are stored as executed: clipped to the world's range. A policy's chunks run step by step where in-chunk images or
    success times are wanted. Raises DataError (seeds used up, nothing kept) and SpecError (actor and world do not fit).
    """
    spec = world.spec
    seeds = np.asarray(seeds, dtype=np.int64)
    wanted = len(seeds) if episodes is None else episodes
    if not len(seeds) or wanted < 1:
        raise DataError("Nothing to record: give at least one seed and ask for at least one episode.")
    if is_policy(actor) and generator is None:
        raise DataError("A policy draws noise: pass the generator it shall use.")
    rows = _Rows(world, actor, seeds)
    stepwise = bool(spec.cameras) or not spec.terminate_on_success
    exact = episodes is None and not successes_only
    with progress(f"recording {spec.name}", wanted) as advance:
        while rows.running.any():
            chunk = _decide(actor, rows.observation, spec, generator, deterministic)
            pieces = np.split(chunk, chunk.shape[1], axis=1) if stepwise else [chunk]
            for piece in pieces:
                if rows.running.any():
                    rows.run(piece)
            ended = rows.collect()
            kept = sum(item.success[-1] or not successes_only for item in ended)
            advance(kept, f"{rows.successes}/{rows.finished} succeeded")
            pending = rows.successes if successes_only else rows.finished
            if exact or pending + rows.running.sum() < wanted:
                rows.start_next()
    return _gather(rows, spec, wanted if episodes is not None else None, successes_only)


def record_until(steps: float, play: Callable[[int], Episodes]) -> Episodes:
    """Return the whole episodes of `play`, called with turn after turn, until they have so many control steps."""
    parts = [play(0)]
    while sum(part.step_count for part in parts) < steps:
        parts.append(play(len(parts)))
    return Episodes.concatenate(parts)


@dataclass
class _Recording:
    """One episode while it runs; lists of arrays along time."""

    position: int
    task: str
    observation: dict[str, list[np.ndarray]]
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: dict[str, list[np.ndarray]] = field(default_factory=dict)
    success: list[bool] = field(default_factory=list)
    terminated: bool = False


class _Rows:
    """Which episode runs in which row of the world, and what was recorded so far."""

    def __init__(self, world: World, actor: Controller | Policy, seeds: np.ndarray):
        self.world, self.actor, self.seeds = world, actor, seeds
        self.done: dict[int, _Recording] = {}
        self.current: list[_Recording | None] = [None] * world.batch_size
        self.finished = self.successes = self.launched = 0
        self.running = np.zeros(world.batch_size, dtype=bool)
        self.ended = np.zeros(world.batch_size, dtype=bool)
        self.observation: Observation = world.reset(seeds=np.resize(seeds, world.batch_size))
        actor.reset()
        count = min(len(seeds), world.batch_size)
        self._open(np.arange(count))

    def run(self, actions: np.ndarray) -> None:
        """Execute [B, C, A] and store what happened in the rows that still run."""
        low, high = np.asarray(self.world.spec.action.low), np.asarray(self.world.spec.action.high)
        executed = np.clip(actions, low, high)
        step = self.world.step(executed)
        self.observation = step.observation
        for row in self.running.nonzero()[0]:
            recording = self.current[row]
            assert recording is not None
            _append(recording, step, executed, row, self.world.spec)
        self.ended |= self.running & step.ended
        self.running &= ~step.ended

    def collect(self) -> list[_Recording]:
        """Take out the episodes that ended since the last call."""
        ended: list[_Recording] = []
        for row in self.ended.nonzero()[0]:
            recording = self.current[row]
            assert recording is not None
            self.done[recording.position] = recording
            self.current[row] = None
            ended.append(recording)
        self.ended[:] = False
        self.finished += len(ended)
        self.successes += sum(item.success[-1] for item in ended)
        return ended

    def start_next(self) -> None:
        """Give the next seeds, in order, to the rows that are free."""
        free = np.array([row for row, item in enumerate(self.current) if item is None], dtype=np.int64)
        rows = free[: len(self.seeds) - self.launched]
        if not len(rows):
            return
        self.observation = self.world.reset(rows, self.seeds[self.launched : self.launched + len(rows)])
        self.actor.reset(rows)
        self._open(rows)

    def _open(self, rows: np.ndarray) -> None:
        for row in rows:
            frames = {key: [self.observation[key][row, -1:].copy()] for key in self.world.spec.observation}
            task = str(self.observation[TASK][row]) if TASK in self.observation else ""
            self.current[row] = _Recording(self.launched, task, frames)
            self.launched += 1
        self.running[rows] = True


def _append(recording: _Recording, step: Step, actions: np.ndarray, row: int, spec: WorldSpec) -> None:
    count = int(step.valid[row].sum())
    for key, frames in recording.observation.items():
        image = key.startswith(IMAGE_PREFIX)
        frames.append(step.observation[key][row, -1:].copy() if image else step.trace[key][row, :count].copy())
    recording.actions.append(actions[row, :count])
    for name in spec.rewards:
        recording.rewards.setdefault(name, []).append(step.rewards[name][row, :count].copy())
    before = bool(recording.success) and recording.success[-1]
    recording.success += [before] * (count - 1) + [bool(step.success[row])]
    recording.terminated = bool(step.terminated[row])


def _decide(
    actor: Controller | Policy,
    observation: Observation,
    spec: WorldSpec,
    generator: torch.Generator | None,
    deterministic: bool,
) -> np.ndarray:
    """Return the actor's next chunk, [B, C, A]."""
    if not is_policy(actor):
        return np.asarray(actor.act(observation), dtype=np.float64)[:, None]
    assert generator is not None
    wanted = actor.spec
    if wanted.action.shape != spec.action.shape:
        raise SpecError(
            f"The policy's actions have shape {list(wanted.action.shape)}, '{spec.name}' takes "
            f"{list(spec.action.shape)}: this policy was trained for another world."
        )
    validate_observation(observation, wanted.observation, history=wanted.history)
    decision = actor.act(to_tensors(observation, generator.device), generator, deterministic=deterministic)
    return decision.actions.detach().cpu().numpy().astype(np.float64)


def _gather(rows: _Rows, spec: WorldSpec, wanted: int | None, successes_only: bool) -> Episodes:
    done = [rows.done[position] for position in sorted(rows.done)]
    kept = [item for item in done if item.success[-1]] if successes_only else done
    if wanted is not None and len(kept) < wanted:
        raise DataError(
            f"Only {len(kept)} of {wanted} episodes came out of {len(rows.seeds)} seeds on '{spec.name}': give more "
            f"seeds or a better actor."
        )
    kept = kept[:wanted]
    if not kept:
        raise DataError(f"None of {len(done)} episodes on '{spec.name}' succeeded: keep failures or better the actor.")

    def joined(parts: list[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    return Episodes(
        observation_fields=dict(spec.observation),
        action_field=spec.action,
        fps=spec.fps,
        observation={
            key: joined(
                [frame for item in kept for frame in item.observation[key]],
                torch.uint8 if key.startswith(IMAGE_PREFIX) else torch.float32,
            )
            for key in spec.observation
        },
        actions=joined([piece for item in kept for piece in item.actions]),
        lengths=torch.tensor([len(item.success) for item in kept]),
        tasks=tuple(item.task for item in kept),
        rewards={name: joined([piece for item in kept for piece in item.rewards[name]]) for name in spec.rewards},
        step_success=torch.tensor([value for item in kept for value in item.success]),
        terminated=torch.tensor([item.terminated for item in kept]),
        seeds=torch.from_numpy(rows.seeds[[item.position for item in kept]]),
        final_known=torch.ones(len(kept), dtype=torch.bool),
    )
