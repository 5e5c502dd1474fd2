"""Versions of a served policy: which one answers a session, and the way back from a new one that fails.

A new version is checked before it answers anybody: same fields, actions and rates, finite actions for a blank
observation and for the last ones received. It is then on probation: a share of the sessions (`canary`) get their next
chunk from it, while the old version stays loaded. Whenever it raises, hangs, answers NaN, or alarms in too many
episodes, the old version answers this request and all further ones. After `probation` seconds it is the current one.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from robopolicy.client.protocol import Limits
from robopolicy.client.training_ranges import TrainingRanges
from robopolicy.core.errors import RobopolicyError, ServingError
from robopolicy.core.modules import device_of
from robopolicy.core.origin import origin_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import Observation
from robopolicy.evaluation.intervals import wilson
from robopolicy.failures.watcher import Watcher
from robopolicy.inference.chunking import planner_of
from robopolicy.policies.loading import checkpoint_in
from robopolicy.policies.training_ranges import known_ranges
from robopolicy.serving.batching import Asker, InferenceQueue
from robopolicy.serving.configuration import ServerConfig
from robopolicy.serving.detection import Detection
from robopolicy.serving.sessions import Answer, RemainingActions, RobotSession
from robopolicy.serving.telemetry import Log, Metrics
from robopolicy.serving.warmup import warmed_up

ANSWERS_WITHIN = 3.0
"""Seconds that a version on probation may take for an answer, after which the old one gives it."""
REMEMBERED = 8
"""Number of recent observations that a new version must answer before it serves."""


@dataclass(frozen=True)
class ServerSettings(ServerConfig):
    """Settings of a server, with seed: of the policy's noise; deterministic: no exploration noise; keepalive: seconds
    between pings, and maximum silence of a client; limits: None for those that follow from the policy; device: device
    of the policy, None for its weights' present device; max_watched: sessions that failure detectors watch at once.
    """

    seed: int = 0
    deterministic: bool = True
    keepalive: float = 20.0
    limits: Limits | None = None
    device: torch.device | None = None
    max_watched: int = 256


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy with the hash of its weights ("" if unknown) and the failure detectors calibrated for it."""

    policy: Policy
    version: str = ""
    watcher: Watcher | None = None


class ServedPolicy:
    """A loaded version with its own inference thread.

    episodes, alarmed: episodes that it began, and those with an alarm.
    """

    def __init__(self, name: str, loaded: LoadedPolicy, settings: ServerSettings, metrics: Metrics):
        policy = self.policy = loaded.policy
        self.name, self.version = name, loaded.version
        self.label = f"{name} {loaded.version}".strip()
        self.ranges = TrainingRanges(
            known_ranges(policy), {key: each.names for key, each in policy.spec.observation.items()}
        )
        self.device = settings.device or device_of(policy)
        generators = Generators(settings.seed, self.device)
        rows = settings.max_watched
        watch = None if loaded.watcher is None else Detection(loaded.watcher, rows, generators["detect"]).watch
        self.plans = planner_of(policy, settings.chunking, settings.chunking_options)
        self.episodes = self.alarmed = 0

        def count(size: int) -> None:
            metrics.batches.inc()
            metrics.batch_size.observe(size)

        self.queue = InferenceQueue(
            policy,
            generators["serve"],
            max_batch_size=settings.max_batch_size,
            max_queue_size=settings.max_queue_size,
            deadline=settings.request_timeout,
            stall=settings.hang_timeout,
            deterministic=settings.deterministic,
            on_batch=count,
            plans=self.plans,
            watch=watch,
        )

    def metadata(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the description of the policy for clients, without the server's own entries."""
        spec, origin = self.policy.spec, origin_of(self.policy)
        return {
            "observation": {key: field.to_json() for key, field in spec.observation.items()},
            "action": spec.action.to_json(),
            "history": spec.history,
            "chunk": spec.chunk,
            "prediction": spec.prediction,
            "chunking": "" if self.plans is None else settings.chunking,
            "fps": spec.fps,
            "instructions": list(spec.instructions),
            "world": None if origin is None else origin.to_json(),
        }


class PolicyVersions:
    """The versions of one policy: the current one and, on probation, a candidate.

    load: loads the policy's checkpoint as it is on the disk now; path: of the checkpoint, None for a policy without.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedPolicy,
        settings: ServerSettings,
        metrics: Metrics,
        log: Log,
        load: Callable[[], LoadedPolicy] | None = None,
        path: Path | None = None,
    ):
        self.name, self.path = name, path
        self.settings, self.metrics = settings, metrics
        self.log = log
        self.current = ServedPolicy(name, loaded, settings, metrics)
        self.candidate: ServedPolicy | None = None
        self.failure = ""
        self._fingerprint = None if path is None else fingerprint(path)
        self._load, self._loading = load, asyncio.Lock()
        self._recent: deque[Observation] = deque(maxlen=REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()

    def choose(self, session: RobotSession) -> ServedPolicy:
        """Return the version that gives a session its next answer."""
        if self.candidate is not None and session.lot < self.settings.canary:
            return self.candidate
        return self.current

    async def infer(
        self, session: RobotSession, observation: Observation, left: RemainingActions | None, asker: Asker
    ) -> tuple[Answer, ServedPolicy]:
        """Return the answer to one observation and the version that gave it; raises as `InferenceQueue.infer`."""
        served, current = self.choose(session), self.current
        self._recent.append(observation)
        if served.version != session.version:
            session.version, session.decided = served.version, False
        if not session.decided:
            session.decided, session.alarmed = True, False
            served.episodes += 1
            self.metrics.episodes.labels(self.name, served.version).inc()
        arguments = (observation, session.generator, left, asker, session)
        try:
            answer = await served.queue.infer(*arguments)
        except Exception as error:
            if served is current:
                raise
            answer = await current.queue.infer(
                *arguments
            )  # if this fails too, the request is at fault, not the version
            if served is self.candidate:
                self.roll_back(f"{type(error).__name__}: {str(error)[:300]}")
            served = current
        if answer.failure is not None and answer.failure.alarms and not session.alarmed:
            session.alarmed = True
            served.alarmed += 1
            for name in answer.failure.alarms:
                self.metrics.alarms.labels(name, served.version).inc()
            self.log(
                "failure alarm", logging.WARNING, session=session.name, policy=served.label, **vars(answer.failure)
            )
            if served is self.candidate:
                low, _ = wilson(served.alarmed, max(served.episodes, served.alarmed))
                if low > self.settings.max_alarm_rate:
                    self.roll_back(f"alarms in {served.alarmed} of {served.episodes} episodes")
        self.metrics.answers.labels(self.name, served.version).inc()
        return answer, served

    async def reload(self) -> str:
        """Load the checkpoint again and put it on probation; return "" or the reason why it was not taken."""
        if self._load is None:
            return f"'{self.name}' was not loaded from a checkpoint."
        async with self._loading:
            try:
                loaded = await asyncio.to_thread(self._load)
                if loaded.version and loaded.version == (self.candidate or self.current).version:
                    self.log("policy unchanged", policy=self.current.label)
                    return ""
                served = ServedPolicy(self.name, loaded, self.settings, self.metrics)
                await self._check(served)
            except Exception as error:
                self.failure = str(error) if isinstance(error, RobopolicyError) else f"{type(error).__name__}: {error}"
                self.metrics.reloads.labels("refused").inc()
                self.log("policy refused", logging.ERROR, policy=self.name, reason=self.failure[:1000])
                return self.failure
            self._discard(self.candidate)
            self.candidate, self.failure = served, ""
            self.metrics.reloads.labels("taken").inc()
            self.log("policy on probation", policy=served.label, instead_of=self.current.label)
            self._start(self._promote(served))
            return ""

    async def _check(self, served: ServedPolicy) -> None:
        """Raise ServingError unless a new version fits the clients and answers recent observations."""
        old, new = self.current.metadata(self.settings), served.metadata(self.settings)
        different = [key for key in old if old[key] != new[key]]
        if different:
            raise ServingError(
                f"The new checkpoint differs in {', '.join(different)}: its {different[0]} is "
                f"{str(new[different[0]])[:200]}, not {str(old[different[0]])[:200]}. Start another server with it."
            )
        served.queue.start()
        try:
            await warmed_up(served.queue, self.log, asyncio.Event())
            slowest = 0.0
            for observation in list(self._recent):
                slowest = max(slowest, (await served.queue.infer(observation)).seconds)
        except BaseException:
            self._start(served.queue.stop())
            raise
        served.queue.deadline = min(self.settings.request_timeout, max(ANSWERS_WITHIN, 4 * slowest))

    def roll_back(self, reason: str) -> None:
        """Let the current version answer everybody again."""
        failed, self.candidate = self.candidate, None
        self.failure = reason
        if failed is not None:
            self.metrics.reloads.labels("rolled_back").inc()
            self.log("policy rolled back", logging.ERROR, policy=failed.label, to=self.current.label, reason=reason)
            self._discard(failed)

    async def _promote(self, served: ServedPolicy) -> None:
        """Make a version the current one after its probation, unless it failed; wait for its first episode."""
        await asyncio.sleep(self.settings.probation)
        while self.candidate is served and not served.episodes:
            await asyncio.sleep(1.0)
        if self.candidate is served:
            old, self.current = self.current, served
            self.candidate = None
            served.queue.deadline = self.settings.request_timeout
            self.metrics.reloads.labels("promoted").inc()
            self.log("policy promoted", policy=served.label, instead_of=old.label)
            self._discard(old)

    def _discard(self, served: ServedPolicy | None) -> None:
        if served is not None:
            self._start(_ended(served.queue))

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self, every: float) -> None:
        """Reload whenever the checkpoint on the disk changes, until cancelled."""
        assert self.path is not None
        while True:
            now = await asyncio.to_thread(fingerprint, self.path)
            if now != self._fingerprint:
                self._fingerprint = now
                await self.reload()
            await asyncio.sleep(every)

    async def stop(self, patience: float) -> None:
        """End all inference threads."""
        for task in self._tasks:
            task.cancel()
        for served in (self.current, self.candidate):
            if served is not None:
                await served.queue.stop(patience)

    def describe(self) -> Mapping[str, Any]:
        """Return the versions, JSON-ready."""

        def figures(served: ServedPolicy) -> dict[str, Any]:
            return {"version": served.version, "episodes": served.episodes, "alarmed": served.alarmed}

        return {
            "name": self.name,
            "current": figures(self.current),
            "candidate": None if self.candidate is None else figures(self.candidate),
            "canary": self.settings.canary,
            "last_failure": self.failure,
        }


async def _ended(queue: InferenceQueue) -> None:
    """Stop a queue once the requests that wait for it are answered, or dropped because it hangs."""
    while len(queue) and queue.trouble is None:
        await asyncio.sleep(0.05)
    await queue.stop()


def fingerprint(folder: Path) -> tuple[Any, ...]:
    """Return a value that changes when a checkpoint is replaced: real path, and sizes and times of its files."""
    try:
        place = Path(os.path.realpath(checkpoint_in(folder)))
        return (place, *sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in place.iterdir()))
    except (RobopolicyError, OSError) as error:  # it is being replaced
        return (str(error),)
