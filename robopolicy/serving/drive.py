"""A simulated robot that takes its actions from a policy server, in real time; run it in a process of its own."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, ServingError, SpecError, did_you_mean
from robopolicy.core.history import begin, move
from robopolicy.core.player import Player
from robopolicy.core.progress import progress
from robopolicy.core.spec import TASK, Observation
from robopolicy.core.world import Rows, World


class Server(Protocol):
    """What `drive` needs of a client: `PolicyClient`, or a stand-in."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the server said of its policy when the connection was made."""
        ...

    def infer(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return {"actions": [C, A], ...} for one robot's observation."""
        ...


def drive(
    world: World,
    client: Server,
    seeds: Sequence[int] | np.ndarray,
    *,
    rate: float = 0.0,
    prefetch: int = 0,
) -> dict[str, Any]:
    """Run one episode per seed, as many at a time as the world has rows, and return what happened.

    rate: control steps per second in real time, 0 for as fast as possible; prefetch: ask for the next chunk this many
    steps before the current one ends (the robot goes on meanwhile, the answer's first steps are then skipped).
    Returns episodes, successes, steps, requests, wall_seconds, rate, prefetch, deadline_misses (control steps that
    came more than a tenth of a period late) and latency_ms {p50, p90, p99, max} of the requests. Every request carries
    the history the policy wants, taken at the control rate. Raises SpecError, ConfigError, ServingError (world and
    policy do not fit) and NonFiniteError (an action that must not reach a robot).
    """
    seeds = np.asarray(seeds, dtype=np.int64)
    _check(world, client.metadata, prefetch)
    clock = _Clock(rate)
    robots = _Robots(world, client, prefetch, clock)
    successes = steps = 0
    started = time.perf_counter()
    try:
        with progress("driving", len(seeds)) as advance:
            for first in range(0, len(seeds), world.batch_size):
                part = seeds[first : first + world.batch_size]
                won, count = robots.episodes(part)
                successes, steps = successes + won, steps + count
                advance(len(part), f"{successes}/{first + len(part)} succeeded")
    finally:
        robots.close()
    latency = np.array(robots.latencies) * 1e3
    return {
        "episodes": len(seeds),
        "successes": successes,
        "steps": steps,
        "requests": len(latency),
        "wall_seconds": time.perf_counter() - started,
        "rate": rate,
        "prefetch": prefetch,
        "deadline_misses": clock.misses,
        "latency_ms": {
            **{f"p{level}": float(np.percentile(latency, level)) for level in (50, 90, 99)},
            "max": float(latency.max()),
        },
    }


class _Clock:
    """Paces control steps; a step that is late is counted and shifts the following ones."""

    def __init__(self, rate: float):
        self.period = 1.0 / rate if rate > 0 else 0.0
        self.misses = 0
        self._next: float | None = None

    def start(self) -> None:
        """Begin an episode: its first control step is due whenever it is ready."""
        self._next = None

    def wait(self) -> None:
        """Sleep until the next control step is due, or count it as late."""
        now = time.perf_counter()
        if self._next is None:
            self._next = now
        if self.period and now > self._next + 0.1 * self.period:
            self.misses += 1
            self._next = now
        elif self._next > now:
            time.sleep(self._next - now)
        self._next += self.period


@dataclass
class _Plan:
    """What one robot does next: actions [C, A] from `position` on, and the request under way.

    frames: what the policy reads, key -> the last frames [1, H, *shape]; skipped: steps run since the request was made.
    """

    actions: np.ndarray
    frames: dict[str, np.ndarray] = field(default_factory=dict)
    position: int = 0
    request: Future[np.ndarray] | None = None
    skipped: int = 0


class _Robots:
    """The rows of a world and their plans, as an actor that asks the server for chunks and gives out single steps.

    Requests go through one thread, because a connection is one conversation.
    """

    def __init__(self, world: World, client: Server, prefetch: int, clock: _Clock):
        self.world, self.client, self.prefetch, self.clock = world, client, prefetch, clock
        self.history, self.keys = int(client.metadata["history"]), list(client.metadata["observation"])
        self.latencies: list[float] = []
        self.player = Player(world, self)
        self.reset()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="requests")

    def close(self) -> None:
        """Wait for the request under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def episodes(self, seeds: np.ndarray) -> tuple[int, int]:
        """Run one episode per seed [n <= B] until all have ended; returns how many succeeded and the steps run."""
        count, successes, steps = len(seeds), 0, 0
        self.player.start_wave(seeds)
        self.clock.start()
        for played in self.player:
            successes += int(played.step.success[played.ended].sum())
            steps += int(played.step.valid[:count].sum())
        return successes, steps

    def reset(self, rows: Rows = None) -> None:
        """Begin every robot anew, with nothing seen and nothing to do."""
        nothing = np.zeros((0, *self.world.spec.action.shape), np.float32)
        self.plans = [_Plan(nothing) for _ in range(self.world.batch_size)]

    def choose(self, observation: Observation) -> tuple[np.ndarray, None]:
        """Return every robot's next control step [B, 1, A], zero where no episode runs, once it is due."""
        actions = np.zeros((self.world.batch_size, 1, *self.world.spec.action.shape))
        running = self.player.running.nonzero()[0]
        for row in running:
            self._look(self.plans[row], observation, row)
        for row in running:
            actions[row, 0] = self._act(self.plans[row])
        self.clock.wait()
        return actions, None

    def _look(self, plan: _Plan, observation: Observation, row: int) -> None:
        """Add the newest frame to the robot's history and ask ahead if it is time."""
        for key in self.keys:
            newest = observation[key][row : row + 1, -1:]
            seen = plan.frames.get(key)
            plan.frames[key] = begin(newest, self.history) if seen is None else move(seen, newest)
        left = len(plan.actions) - plan.position
        if plan.request is None and left <= self.prefetch:
            plan.request, plan.skipped = self._thread.submit(self._ask, self._message(plan, observation, row)), 0

    def _act(self, plan: _Plan) -> np.ndarray:
        """Return the robot's next action, waiting for the server only when nothing is left to do."""
        if plan.position >= len(plan.actions):
            assert plan.request is not None
            plan.actions, plan.position, plan.request = plan.request.result(), plan.skipped, None
            if plan.position >= len(plan.actions):
                raise ConfigError(f"prefetch={self.prefetch} leaves nothing of chunks of {len(plan.actions)} steps.")
        action = plan.actions[plan.position]
        plan.position += 1
        if plan.request is not None:
            plan.skipped += 1
        return action

    def _message(self, plan: _Plan, observation: Observation, row: int) -> dict[str, Any]:
        message: dict[str, Any] = {key: frames[0] for key, frames in plan.frames.items()}
        if TASK in observation:
            message[TASK] = str(observation[TASK][row])
        return message

    def _ask(self, message: dict[str, Any]) -> np.ndarray:
        started = time.perf_counter()
        answer = self.client.infer(message)
        self.latencies.append(time.perf_counter() - started)
        actions = np.asarray(answer.get("actions"))
        shape = tuple(self.world.spec.action.shape)
        if actions.ndim != 1 + len(shape) or actions.shape[1:] != shape or not len(actions):
            raise ServingError(f"The server answered actions of shape {list(actions.shape)}, not [C, *{list(shape)}].")
        if not np.isfinite(actions).all():
            raise NonFiniteError("The server answered with NaN or infinity; no action was executed.")
        return actions


def _check(world: World, metadata: Mapping[str, Any], prefetch: int) -> None:
    """Raise unless the world shows what the policy behind the server reads."""
    missing = {"observation", "history", "chunk", "action"} - set(metadata)
    if missing:
        raise ServingError(f"The server does not describe its policy ({', '.join(sorted(missing))}): not one of ours?")
    for key, read in metadata["observation"].items():
        if key not in world.spec.observation:
            raise SpecError(
                f"The served policy needs '{key}', which '{world.spec.name}' does not show."
                f"{did_you_mean(key, world.spec.observation)} Add the camera or field to the world."
            )
        shape = world.spec.observation[key].shape
        if tuple(read["shape"]) != tuple(shape):
            raise SpecError(f"The served policy needs '{key}' as {list(read['shape'])}, the world shows {list(shape)}.")
    if tuple(metadata["action"]["shape"]) != tuple(world.spec.action.shape):
        raise SpecError(
            f"The served policy's actions have shape {list(metadata['action']['shape'])}, '{world.spec.name}' takes "
            f"{list(world.spec.action.shape)}: it was trained for another world."
        )
    if not 0 <= prefetch < metadata["chunk"]:
        raise ConfigError(f"prefetch is between 0 and {metadata['chunk'] - 1}, chunks have {metadata['chunk']} steps.")
