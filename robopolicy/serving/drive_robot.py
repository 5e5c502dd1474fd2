"""A robot that takes its actions from a policy server, by its own clock, until its time is over or something fails."""

import time
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.spec import TASK
from robopolicy.serving.action_limits import limits_of
from robopolicy.serving.attached import AttachedRobot
from robopolicy.serving.clock import Clock, latency_figures
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.driver import Driver, Requests, Server, described_policy
from robopolicy.serving.lerobot_robot import AttachedLeRobot
from robopolicy.serving.notices import Notices


def drive_robot(
    robot: AttachedLeRobot,
    client: Server,
    *,
    episodes: int,
    rate: float,
    attached: AttachedRobot,
    settings: RobotSettings,
    notices: Notices | None = None,
) -> dict[str, Any]:
    """Drive a connected robot for `episodes` of `attached.seconds` each, and return what happened.

    rate: control steps a second, 0 for the policy's; notices: where it is said what the user should know meanwhile.
    Returns what `drive` does, without successes, which no robot reports. Where nothing is left to do the robot stays
    where it is. Raises ConfigError on a rate or a time of no use, what the robot raises (see `AttachedLeRobot`), and
    what the server did wrong once it is hopeless, or away for longer than patience; the robot is the caller's to stop.
    """
    requests = Requests(client)
    renamed = robot.wiring.renamed
    driver = Driver(
        client,
        hold=lambda frames, last: robot.still(),
        start=lambda frames, last: np.where(robot.placed, robot.still(), np.nan),
        limits=limits_of(settings, described_policy(client.metadata), robot.wiring.action, robot.limits_itself),
        prefetch=settings.prefetch,
        latency_steps=settings.latency_steps,
        blend=settings.blend,
        turns={renamed.get(name, name): turn for name, turn in settings.turns.items()},
        switches=[renamed.get(name, name) for name in settings.switches],
        max_age=settings.max_age,
        patience=settings.patience,
        requests=requests,
        notices=notices,
    )
    rate = driver.fps if rate == 0 else rate
    steps = round(attached.seconds * rate)
    if rate < 0 or steps < 1:
        raise ConfigError(f"A robot runs by the clock: rate={rate:g} and seconds={attached.seconds:g} make no episode.")
    clock, started = Clock(rate), time.perf_counter()
    task = {TASK: attached.task} if attached.task else {}
    try:
        with progress("driving", episodes * steps) as advance:
            for _ in range(episodes):
                driver.reset()
                clock.start()
                for _ in range(steps):
                    frames = robot.observe()
                    before = driver.counts["held"]
                    action = driver.step({**frames, **task})
                    if robot.placed.all() or driver.counts["held"] == before:  # else it stands still by itself
                        robot.send(action)
                    driver.require_server()
                    clock.wait()
                    advance(1, f"{driver.counts['held']} held still")
    finally:
        requests.close()
    return {
        "episodes": episodes,
        "steps": driver.counts["steps"],
        "requests": len(requests.latencies),
        "wall_seconds": time.perf_counter() - started,
        "rate": rate,
        **{name: getattr(settings, name) for name in ("prefetch", "latency_steps")},
        **{name: driver.counts[name] for name in ("held", "clipped", "stale", "outside", "failures")},
        "deadline_misses": clock.misses,
        "latency_ms": latency_figures(requests.latencies),
    }
