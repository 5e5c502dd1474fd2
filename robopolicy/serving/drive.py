"""A simulated robot that gets its actions from a policy server in real time; run it in its own process."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robopolicy.client.driver import Clock, Driver, Requests, Server, described_policy, latency_figures
from robopolicy.client.holding import holding, with_served_hold
from robopolicy.client.notices import Notices
from robopolicy.client.policy_description import limits_of
from robopolicy.client.supervision import supervised_by
from robopolicy.core.arrays import is_mapping
from robopolicy.core.errors import ServingError, SpecError, did_you_mean
from robopolicy.core.player import Player
from robopolicy.core.progress import progress
from robopolicy.core.spec import QUEUE, Field, Observation, require_fields
from robopolicy.core.world import Rows, Step, World
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.recording import RecordedStep, RobotRecorder
from robopolicy.serving.shared import SharedRobots, frames_of

STANDARD = RobotSettings()


def drive(
    world: World,
    client: Server,
    seeds: Sequence[int] | np.ndarray,
    *,
    rate: float = 0.0,
    robot: RobotSettings = STANDARD,
    notices: Notices | None = None,
    recorder: RobotRecorder | None = None,
    shared: SharedRobots | None = None,
) -> dict[str, Any]:
    """Run one episode per seed, as many at a time as the world has rows, and return the results.

    robot: see `RobotSettings`, and `Driver` for the meanings; rate: control steps per second in real time, during which
    a robot without an action holds still; 0 for as fast as possible: the world then waits for the server; notices:
    receives messages for the user; recorder: records every step; shared: alarms, operators and console, None for the
    policy alone. Returns episodes, successes, steps, requests, wall_seconds, rate, prefetch, latency_steps, held,
    clipped, stale and outside (see `Driver`), failures, deadline_misses (control steps more than a tenth of a period
    late) and latency_ms {p50, p90, p99, max} of the requests. Every request contains the history that the policy reads,
    sampled at the control rate. Raises SpecError, ConfigError, ServingError (world and policy do not fit, or the server
    fails for longer than patience) and NonFiniteError (an action that must not reach a robot).
    """
    seeds = np.asarray(seeds, dtype=np.int64)
    _check(world, client.metadata)
    clock = Clock(rate)
    settings = with_served_hold(robot, client.metadata)
    robots = _Robots(world, client, settings, clock, notices or Notices(), recorder, shared)
    successes = steps = 0
    start = time.perf_counter()
    try:
        with progress("driving", len(seeds)) as advance:
            for first in range(0, len(seeds), world.batch_size):
                part = seeds[first : first + world.batch_size]
                successes_now, count = robots.episodes(part)
                successes, steps = successes + successes_now, steps + count
                advance(len(part), f"{successes}/{first + len(part)} succeeded")
    finally:
        robots.close()
    counts = robots.counts
    return {
        "episodes": len(seeds),
        "successes": successes,
        "steps": steps,
        "requests": len(robots.requests.latencies),
        "wall_seconds": time.perf_counter() - start,
        "rate": rate,
        "prefetch": robots.drivers[0].prefetch,
        "latency_steps": robot.latency_steps,
        **{name: counts[name] for name in ("held", "clipped", "stale", "outside", "failures")},
        "deadline_misses": clock.misses,
        "latency_ms": latency_figures(robots.requests.latencies),
        **({} if shared is None else {"assistance": shared.figures()}),
    }


class _Robots:
    """The rows of a world, each with a driver, as an actor that returns single control steps."""

    def __init__(
        self,
        world: World,
        client: Server,
        settings: RobotSettings,
        clock: Clock,
        notices: Notices,
        recorder: RobotRecorder | None,
        shared: SharedRobots | None,
    ):
        self.world, self.clock = world, clock
        self.recorder, self.shared = recorder, shared
        self.requests, policy = Requests(client), described_policy(client.metadata)
        self.drivers = [
            Driver(
                client,
                hold=holding(
                    settings,
                    world.spec.action.names,
                    world.spec.action.size,
                    world.spec.action.unit,
                    {key: field.names for key, field in world.spec.observation.items()},
                ),
                limits=limits_of(replace(settings, unbounded=True), policy, world.spec.action.names),
                prefetch=settings.prefetch,
                latency_steps=settings.latency_steps,
                blend=settings.blend,
                turns=settings.periods,
                switches=settings.unblended,
                max_age=settings.max_observation_age,
                patience=settings.server_timeout,
                wait=clock.period == 0,
                requests=self.requests,
                notices=notices,
                session=str(row) if world.batch_size > 1 else "",
            )
            for row in range(world.batch_size)
        ]
        several = len(self.drivers) > 1
        self.supervised = [
            supervised_by(settings, driver, f"{settings.name} {row + 1}" if several else "")
            for row, driver in enumerate(self.drivers)
        ]
        self.player = Player(world, self)

    @property
    def counts(self) -> Counter[str]:
        """Sum of the counts of all drivers."""
        return sum((driver.counts for driver in self.drivers), Counter())

    def close(self) -> None:
        """Report the last steps to a server that records, and stop sending requests."""
        for robot, driver in zip(self.supervised, self.drivers, strict=True):
            robot.close()
            driver.close()
        self.requests.close()

    def episodes(self, seeds: np.ndarray) -> tuple[int, int]:
        """Run one episode per seed [n <= B] until all have ended; returns the number of successes and of steps."""
        count = len(seeds)
        successes = 0
        steps = 0
        self.player.start_batch(seeds)
        if self.shared is not None:
            self.shared.start(np.resize(seeds, self.world.batch_size), count)
        self.clock.start()
        for part in self.player:
            if self.shared is not None:
                self.shared.watch(part.step, part.running)
            successes += int(part.step.success[part.ended].sum())
            steps += int(part.step.valid[:count].sum())
            if self.recorder is not None:
                self._record(self.recorder, part.step, part.running[:count].nonzero()[0])
        return successes, steps

    def _record(self, recorder: RobotRecorder, step: Step, rows: np.ndarray) -> None:
        """Record a control step of the robots in `rows` [R], and the end of their episodes."""
        for row in rows:
            robot = f"robot {row + 1}"
            rewards = {name: float(values[row, 0]) for name, values in step.rewards.items()}
            done = RecordedStep(**self.drivers[row].executed, rewards=rewards, success=bool(step.success[row]))
            recorder.step(robot, done, self.drivers[row].task)
            if step.ended[row]:
                final = {key: step.observation[key][row, -1].copy() for key in done.observation}
                recorder.end(robot, final, terminated=bool(step.terminated[row]))

    def reset(self, rows: Rows = None) -> None:
        """Reset every robot: no frames, no remaining actions."""
        for driver in self.drivers:
            driver.reset()

    def choose(self, observation: Observation) -> tuple[np.ndarray, None]:
        """Return every robot's next control step [B, 1, A], zero for ended episodes, when it is due.

        Raises the server's error once it is fatal, or has lasted longer than patience.
        """
        actions = np.zeros((self.world.batch_size, 1, *self.world.spec.action.shape))
        if self.shared is not None:
            actions[:, 0] = self.shared.actions(observation, self.drivers, self.player.running)
            self.clock.wait()
            return actions, None
        running = self.player.running.nonzero()[0]
        frames = {row: frames_of(observation, row) for row in running}
        if isinstance(self.supervised[0], Driver):  # all requests are sent before the first answer is awaited
            for row in running:
                self.drivers[row].look(frames[row])
        for row in running:
            robot = self.supervised[row]
            actions[row, 0] = robot.act() if isinstance(robot, Driver) else robot.step(frames[row])
            robot.require_server()
        self.clock.wait()
        return actions, None


def _check(world: World, metadata: Mapping[str, Any]) -> None:
    """Raise an error unless the world provides the fields that the served policy reads."""
    policy = described_policy(metadata)
    observation = {key: field for key, field in metadata["observation"].items() if key != QUEUE}  # the driver's own
    for key, entry in observation.items():
        if key not in world.spec.observation:
            raise SpecError(
                f"The served policy needs '{key}', which '{world.spec.name}' does not "
                f"output.{did_you_mean(key, world.spec.observation)} Add the camera or field to the "
                f"world.{_home(metadata)}"
            )
        shape = world.spec.observation[key].shape
        if tuple(entry["shape"]) != tuple(shape):
            raise SpecError(
                f"The served policy needs '{key}' with shape {list(entry['shape'])}, but '{world.spec.name}' outputs "
                f"{list(shape)}: it was trained for another world.{_home(metadata)}"
            )
    if policy.shape != tuple(world.spec.action.shape):
        raise SpecError(
            f"The served policy's actions have shape {list(policy.shape)}, but '{world.spec.name}' takes "
            f"{list(world.spec.action.shape)}: it was trained for another world.{_home(metadata)}"
        )
    fields = {key: _declared(field) for key, field in observation.items()}
    require_fields(fields, _declared(metadata["action"]), world.spec, policy.fps)


def _home(metadata: Mapping[str, Any]) -> str:
    """Return advice on which world to drive in: the one that the served policy was trained in."""
    world_entry = metadata.get("world")
    if not is_mapping(world_entry) or not world_entry.get("name"):
        return " Set the world that it was trained for: world=NAME."
    return f" It was trained in '{world_entry['name']}', which is used if no world is set."


def _declared(described: Mapping[str, Any]) -> Field:
    """Return a field from a server's description, with names, unit and bounds as far as it gives them."""
    unsaid = Field(tuple(described["shape"])).to_json()
    try:
        field = Field.from_json({**unsaid, **{key: each for key, each in described.items() if each is not None}})
        for bound in (field.low, field.high):
            np.broadcast_to(bound, field.shape)
    except (TypeError, ValueError, KeyError) as error:
        raise ServingError(f"The server's description of its policy is invalid ({error}).") from error
    return field
