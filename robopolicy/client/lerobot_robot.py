"""A robot behind LeRobot's `Robot` interface: create by type, observe, drive, and stop it.

Every call to the robot has a deadline and runs in a thread that ends with the process: a hanging bus must not prevent
stopping the robot. LeRobot robots have no brake: a stop holds positions, sets velocities, forces and toggles to zero,
and disconnects, which disables torque if the robot's configuration says so.

`drive_robot` gets its actions from a policy server, at its own clock, until its time is over or an error occurs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NoAnswer  # one of its own before Python 3.11
from contextlib import closing, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .driver import Clock, Driver, Requests, Server, described_policy, latency_figures
from .element_mapping import ElementMapping
from .errors import ConfigError, RobopolicyWarning, ServingError, SpecError, did_you_mean, in_one_line
from .keys import TASK
from .notices import Notices
from .policy_description import limits_of
from .settings import AttachedRobot, RobotSettings
from .supervision import supervised_by

if TYPE_CHECKING:
    from lerobot.robots import Robot


Result = TypeVar("Result")

CONNECTS_WITHIN = 60.0
"""Maximum seconds for connecting a robot: cameras warm up."""

STOPS_WITHIN = 3.0
"""Maximum seconds for each part of a stop."""

MOVED = 0.02
"""Change of a vector element, in the policy's units, above which the robot counts as moved."""

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a drive: Ctrl-C, service stop, closed terminal."""

PACKAGES = ("lerobot_robot_", "lerobot_camera_")
"""Name prefixes of distributions that provide LeRobot robots and cameras."""


def make_lerobot_robot(kind: str | type, options: Mapping[str, Any]) -> Robot:
    """Create a LeRobot robot, not yet connected, by its type or its configuration class.

    options: fields of its configuration, {type: ...} for LeRobot's choice classes. Raises ConfigError on an unknown
    type, on invalid options, and when the robot cannot be created.
    """
    import draccus
    from lerobot.robots import RobotConfig, make_robot_from_config

    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if isinstance(kind, str):
        import lerobot.cameras
        import lerobot.robots

        failures = import_all([lerobot.robots, lerobot.cameras], PACKAGES)
        robot_types = RobotConfig.get_known_choices()
        if name not in robot_types:
            import_errors = "".join(f" {module} could not be imported: {error}." for module, error in failures.items())
            raise ConfigError(f"LeRobot has no robot '{name}'.{did_you_mean(name, robot_types)}{import_errors}")
        kind = robot_types[name]
    if not (isinstance(kind, type) and issubclass(kind, RobotConfig)):
        raise ConfigError(f"'{name}' is not a LeRobot RobotConfig: pass the class of the robot's configuration.")
    try:
        config: RobotConfig = draccus.decode(kind, dict(options))
        return make_robot_from_config(config)
    except Exception as error:  # LeRobot wraps what drivers raise; all of it is about what the user has named
        raise ConfigError(f"The robot '{name}' cannot be created with the options {dict(options)}: {error}") from error


def import_all(packages: Sequence[ModuleType], prefix: str | tuple[str, ...]) -> dict[str, str]:
    """Import what LeRobot's `packages` contain, and installed distributions whose name starts with `prefix`; return
    failed distribution -> error.
    """
    names = [
        f"{package.__name__}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(package.__path__)
        if module.ispkg
    ]
    distributions = {str(each.metadata.get("Name")) for each in importlib.metadata.distributions()}
    names += sorted(name for name in distributions if name.startswith(prefix))
    failures: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a device that nobody asked for may lack its driver
            failures[name] = f"{type(error).__name__}: {error}"
    return {name: text for name, text in failures.items() if name.startswith(prefix)}


def bgr_cameras(robot: Robot) -> tuple[str, ...]:
    """Return the cameras of a robot that are configured as BGR; policies read RGB."""
    configured = dict(getattr(getattr(robot, "config", None), "cameras", None) or {})
    camera_configs = {
        name: getattr(camera, "config", camera) for name, camera in (getattr(robot, "cameras", None) or {}).items()
    }
    modes = {name: getattr(config, "color_mode", None) for name, config in {**configured, **camera_configs}.items()}
    return tuple(name for name, mode in modes.items() if str(getattr(mode, "value", mode)).lower() == "bgr")


class AttachedLeRobot:
    """A LeRobot robot while it is driven; use it as a context manager, which stops it on exit.

    wire: creates the wiring from the robot's observation and action features; robot_timeout: maximum seconds for an
    observation or an action; frozen_camera_timeout: maximum seconds that a camera may repeat one image while the robot
    moves; settings: hold behaviour of elements for which neither name nor unit defines it, None for the wiring's own.
    Raises ServingError when the robot cannot be connected, does not answer or repeats a frozen image, ConfigError when
    it is not calibrated or the hold behaviour of an element is undefined, and the errors of `wire` and the wiring.
    """

    def __init__(
        self,
        robot: Robot,
        wire: Callable[[Mapping[str, Any], Mapping[str, Any]], ElementMapping],
        *,
        robot_timeout: float = 1.0,
        frozen_camera_timeout: float = 1.0,
        settings: RobotSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        wiring = wire(robot.observation_features, robot.action_features)
        self.robot, self.wiring = robot, wiring if settings is None else replace(wiring, settings=settings)
        self._stops = ~np.array(self.wiring.standing.keeps, dtype=bool)  # raises where nobody says how to stand still
        self.robot_timeout, self.frozen_camera_timeout = robot_timeout, frozen_camera_timeout
        self._bgr = bgr_cameras(robot)
        self._clock = clock
        self._calls, self._connected = _Calls(), False
        self._sent: np.ndarray | None = None
        self._shown: Mapping[str, Any] = {}
        self._pictures: dict[str, tuple[np.ndarray, float, np.ndarray]] = {}

    def __enter__(self) -> AttachedLeRobot:
        try:
            self._call("connect", lambda: self.robot.connect(calibrate=False), CONNECTS_WITHIN)
            self._connected = True
            if not self._call("report whether it is calibrated", lambda: self.robot.is_calibrated, CONNECTS_WITHIN):
                raise ConfigError(
                    f"{self.robot} is not calibrated. Calibrate it first: lerobot-calibrate "
                    f"--robot.type={self.robot.name} --robot.id={self.robot.id} with the options that it has here."
                )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def observe(self) -> dict[str, np.ndarray]:
        """Return the robot's present observation: the policy's fields -> frames [*shape], images RGB."""
        observation = self._call("return an observation", self.robot.get_observation, self.robot_timeout)
        if not isinstance(observation, Mapping):
            raise SpecError(
                f"{self.robot} returned {in_one_line(observation, 80)} instead of an observation with named values."
            )
        rgb_images = {
            name: np.ascontiguousarray(np.asarray(observation[name])[..., ::-1])
            for name in self._bgr
            if name in observation
        }
        self._shown = {**observation, **rgb_images}
        frames = self.wiring.frames(self._shown)
        self._require_fresh(frames)
        return frames

    def still(self) -> np.ndarray:
        """Return the action [A] that keeps the robot at its last observed position; see `ElementMapping.still`."""
        return self.wiring.still(self._shown, self._last)

    @property
    def placed(self) -> np.ndarray:
        """Mask [A] bool of the elements of the hold action with a known value; positions that were neither observed nor
        sent are unknown.
        """
        return self.wiring.placed(self._shown) | (self._sent is not None)

    @property
    def limits_itself(self) -> np.ndarray:
        """Mask of the action elements [A] bool that the robot limits itself: positions, by its max_relative_target."""
        limited = getattr(getattr(self.robot, "config", None), "max_relative_target", None) is not None
        return ~self._stops & limited

    @property
    def _last(self) -> np.ndarray:
        return np.zeros(len(self.wiring.action)) if self._sent is None else self._sent

    def send(self, action: np.ndarray) -> None:
        """Send `action` [A] to the robot, in the policy's units."""
        command, self._sent = self.wiring.command(action), action
        self._call("execute an action", lambda: self.robot.send_action(command), self.robot_timeout)

    def stop(self) -> None:
        """Stop the robot at its present position and disconnect it; failures are reported as a warning. May be called
        repeatedly.

        Signals are ignored meanwhile, so a second Ctrl-C cannot leave a robot moving.
        """
        if not self._calls.ended:
            with _undisturbed():
                self._stop()

    def _stop(self) -> None:
        failures: list[str] = []
        is_free = self._calls.rested(self.robot_timeout)
        if self._shown and self.placed.all() and (is_free or self._stops.any()):
            self._from_beside()  # a call that hangs, such as a camera's, must not keep a base driving
            failures += self._attempted(
                "set to its hold action", lambda: self.robot.send_action(self.wiring.command(self.still()))
            )
        self._from_beside()
        failures += self._attempted("disconnected", self.robot.disconnect)
        self._calls.end()
        if failures and self._connected:  # who never was connected need not be told to let go
            warnings.warn(
                f"{self.robot} could not be {'; nor '.join(failures)}. Switch off its power if it moves.",
                RobopolicyWarning,
                stacklevel=3,
            )

    def _from_beside(self) -> None:
        """If a call hangs, run the following calls in another thread."""
        if not self._calls.rested(0):
            self._calls.end()
            self._calls = _Calls()

    def _attempted(self, what: str, function: Callable[[], object]) -> list[str]:
        """Run one call of the stop procedure; return the failure, if any."""
        try:
            self._calls.call(function).result(STOPS_WITHIN)
        except Exception as error:
            return [f"{what} ({_said(error)})"]
        return []

    def _call(self, what: str, function: Callable[[], Result], seconds: float) -> Result:
        future = self._calls.call(function)
        try:
            return future.result(seconds)
        except (TimeoutError, NoAnswer) as error:
            reason = _said(error) if future.done() else f"no answer within {seconds:g} s"  # or a camera's own timeout
            raise ServingError(f"{self.robot} did not {what}: {reason}. It was stopped.") from error
        except Exception as error:
            raise ServingError(f"{self.robot} did not {what}: {_said(error)}. It was stopped.") from error

    def _require_fresh(self, frames: Mapping[str, np.ndarray]) -> None:
        """Raise ServingError when a camera has repeated one image for too long although the robot moved."""
        now = self._clock()
        place = np.concatenate([np.zeros(0), *(frames[field] for field in self.wiring.vectors)])
        for field, name in self.wiring.cameras.items():
            image = frames[field]
            picture, since, then = self._pictures.get(field, (None, now, place))
            if picture is None or not np.array_equal(picture, image):
                self._pictures[field] = image.copy(), now, place
            elif now - since > self.frozen_camera_timeout and (np.abs(place - then) > MOVED).any():
                raise ServingError(
                    f"Camera '{name}' has returned the same image for {now - since:.1f} s while the robot moved: it "
                    "is frozen. The robot was stopped."
                )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block signals while the body runs, in the main thread, where signals are handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Calls:
    """A thread that runs calls in order and ends with the process, even if a call hangs."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self.ended = False
        threading.Thread(target=self._work, name="robot", daemon=True).start()

    def rested(self, seconds: float) -> bool:
        """Wait at most `seconds` for the last call; return whether it has ended."""
        return self._last is None or bool(wait([self._last], seconds).done)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Start a call; the future returns its result or raises its error."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._last = future
        self._waiting.put(run)
        return future

    def end(self) -> None:
        """Accept no more calls."""
        self.ended = True
        self._waiting.put(None)

    def _work(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()


def _driver(
    robot: AttachedLeRobot, client: Server, settings: RobotSettings, requests: Requests, notices: Notices | None
) -> Driver:
    """Return the driver of a connected robot."""
    new_names = robot.wiring.renamed
    return Driver(
        client,
        hold=lambda frames, last: robot.still(),
        start=lambda frames, last: np.where(robot.placed, robot.still(), np.nan),
        limits=limits_of(settings, described_policy(client.metadata), robot.wiring.action, robot.limits_itself),
        prefetch=settings.prefetch,
        latency_steps=settings.latency_steps,
        blend=settings.blend,
        turns={new_names.get(name, name): turn for name, turn in settings.periods.items()},
        switches=[new_names.get(name, name) for name in settings.unblended],
        max_age=settings.max_observation_age,
        patience=settings.server_timeout,
        requests=requests,
        notices=notices,
    )


def drive_robot(
    robot: AttachedLeRobot,
    client: Server,
    *,
    episodes: int,
    rate: float,
    attached: AttachedRobot,
    settings: RobotSettings,
    notices: Notices | None = None,
    advance: Callable[[int, str], object] = lambda steps, note: None,
    executed: Callable[[Mapping[str, Any] | None], object] = lambda step: None,
) -> dict[str, Any]:
    """Drive a connected robot for `episodes` of `attached.seconds` each, and return the results.

    rate: control steps per second, 0 for the policy's; notices: receives messages for the user; advance: is called with
    each number of steps and a note; executed: receives `Driver.executed` of every step, None at the end of an episode.
    Returns the results of `drive` without successes, which robots do not report. Without an action to execute, the
    robot holds its position. Raises ConfigError on an invalid rate or duration, the robot's errors (see
    `AttachedLeRobot`), and the server's error once it is fatal or has lasted longer than patience; stopping the robot
    is left to the caller.
    """
    requests = Requests(client)
    driver = _driver(robot, client, settings, requests, notices)
    rate = driver.fps if rate == 0 else rate
    steps = round(attached.seconds * rate)
    if rate < 0 or steps < 1:
        raise ConfigError(
            f"A LeRobot robot needs a fixed control rate: rate={rate:g} and seconds={attached.seconds:g} make no "
            "episode."
        )
    clock, start = Clock(rate), time.perf_counter()
    task = {TASK: attached.task} if attached.task else {}
    with closing(requests), driver, supervised_by(settings, driver) as supervised:
        for _ in range(episodes):
            driver.reset()
            clock.start()
            for _ in range(steps):
                frames = robot.observe()
                before = driver.counts["held"]
                action = supervised.step({**frames, **task})
                if robot.placed.all() or driver.counts["held"] == before:  # else it stands still by itself
                    robot.send(action)
                executed(driver.executed)
                supervised.require_server()
                clock.wait()
                advance(1, f"{driver.counts['held']} held")
            executed(None)
    return {
        "episodes": episodes,
        "steps": driver.counts["steps"],
        "requests": len(requests.latencies),
        "wall_seconds": time.perf_counter() - start,
        "rate": rate,
        **{name: getattr(settings, name) for name in ("prefetch", "latency_steps")},
        **{name: driver.counts[name] for name in ("held", "clipped", "stale", "outside", "failures")},
        "deadline_misses": clock.misses,
        "latency_ms": latency_figures(requests.latencies),
    }
