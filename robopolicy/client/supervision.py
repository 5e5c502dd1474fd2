"""A robot under supervision: people at a console watch it, take it over and stop it (`Supervised`).

    with Driver(client) as driver, Supervised(driver, "ws://server:8080", name="arm 1") as robot:
        while running:                                  # at driver.fps
            send(robot.step(observe()))                 # instead of driver.step

After every control step the robot reports to the console, which answers with the mode: the policy acts, the robot holds
still, or an operator's action is executed, within the driver's limits. A thread does this, so that the network never
delays a step. A robot that has not heard from its console for `timeout` seconds holds still, since nobody could stop
it. Axes: A action dimension, P planned step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from .driver import Driver
from .errors import RobopolicyError
from .executed import ActingAgent, Segment
from .keys import IMAGE_PREFIX
from .policy_client import USES_PROXIES, proxy_for, server_url, tls_context
from .protocol import FAILURE, pack, unpack
from .settings import RobotSettings

PATH = "/robot"
"""Path of a console that robots connect to."""
ACTING = "autonomous"
"""Mode in which the policy acts; in any other one it does not."""
IMAGE_SECONDS = 0.15
"""Minimum seconds between two reports with camera images."""
LARGEST = 320
"""Larger images are reported with every second, third, ... pixel, so that neither side has more than this."""
RETRY = 0.5
"""Seconds before a lost console is tried again."""


class Supervised:
    """A driver whose robot is under supervision; use it as a context manager.

    console: address of the console, ws:// or wss://; name: of the robot, shown to people; api_key: of the console;
    timeout: seconds without an answer of the console after which the robot holds still; certificate: PEM file to verify
    a wss:// console. mode: the last one that was heard, "" without one; error: why there is no connection, None if
    there is. Raises ConfigError on an invalid address, ServingError on an unreadable certificate.
    """

    def __init__(
        self,
        driver: Driver,
        console: str,
        name: str,
        *,
        api_key: str | None = None,
        timeout: float = 1.0,
        certificate: Path | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.driver, self.name = driver, name
        self.timeout = timeout
        self.address = server_url(console, None, encrypted=certificate is not None).rstrip("/") + PATH
        self.mode = ""
        self.error: Exception | None = None
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._tls = tls_context(certificate) if self.address.startswith("wss://") else None
        self._clock = clock
        self._heard = -np.inf
        self._action: np.ndarray | None = None
        self._report: dict[str, Any] | None = None
        self._drawn, self._answer = -np.inf, None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._exchange, name="console", daemon=True)
        self._thread.start()

    def step(self, frames: Mapping[str, Any]) -> np.ndarray:
        """Take the robot's present observation and return its action [A], as `Driver.step`."""
        mode, operated = self._order()
        self.driver.look(frames, ask=mode == ACTING)
        if mode == ACTING:
            action = self.driver.act()
        elif operated is None:
            action = self.driver.override(None)
        else:
            action = self.driver.override(
                operated, actor=ActingAgent.HUMAN, segment=Segment.CORRECT, operator="console"
            )
        self._tell(frames, action, mode)
        return action

    def require_server(self) -> None:
        """Raise as the driver does, while its policy acts."""
        if self.mode == ACTING:
            self.driver.require_server()

    def close(self) -> None:
        """Disconnect from the console."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self) -> tuple[str, np.ndarray | None]:
        """Return the present mode, and an operator's action [A] if there is one."""
        with self._changed:
            if self._clock() - self._heard > self.timeout:
                return "", None
            return self.mode, self._action

    def _tell(self, frames: Mapping[str, Any], action: np.ndarray, mode: str) -> None:
        """Leave a report for the thread; one that was not sent yet is replaced."""
        answer, seconds = self.driver.answer
        report: dict[str, Any] = {"mode": mode, "action": action, "plan": self.driver.plan}
        if seconds is not None:
            report["latency_ms"] = 1000 * seconds
        if answer is not self._answer and isinstance(answer.get(FAILURE), Mapping):
            report["failure"] = dict(answer[FAILURE])
        self._answer = answer
        if self._clock() - self._drawn > IMAGE_SECONDS:
            self._drawn = self._clock()
            report["images"] = {
                key[len(IMAGE_PREFIX) :]: _smaller(np.asarray(value))
                for key, value in frames.items()
                if key.startswith(IMAGE_PREFIX)
            }
        with self._changed:
            waiting = self._report or {}
            # What was not sent yet and is not part of every report must not be lost.
            self._report = {**{key: waiting[key] for key in ("failure", "images") if key in waiting}, **report}
            self._changed.notify()

    def _exchange(self) -> None:
        """Send reports and take orders until closed; connect again whenever the console is lost."""
        while not self._closed:
            try:
                proxy = proxy_for(self.address)
                route: dict[str, Any] = {"proxy": None if proxy is None else proxy.url} if USES_PROXIES else {}
                with connect(
                    self.address, additional_headers=self._headers, ssl=self._tls, open_timeout=5, **route
                ) as connection:
                    connection.send(pack({"name": self.name}))
                    while self._send(connection):
                        self._take(unpack(connection.recv(timeout=self.timeout)))
                        self.error = None
            except (OSError, WebSocketException, RobopolicyError, ValueError, TypeError, KeyError) as error:
                self.error = error
            with self._changed:
                if not self._closed:
                    self._changed.wait(RETRY)

    def _send(self, connection: Any) -> bool:
        """Send the next report as soon as there is one; return False once closed."""
        with self._changed:
            while self._report is None and not self._closed:
                self._changed.wait()
            report, self._report = self._report, None
            if self._closed or report is None:
                return False
        connection.send(pack(report))
        return True

    def _take(self, order: dict[str, Any]) -> None:
        """Take an order of the console: {"mode": text, "action": [A], if an operator acts}."""
        action = order.get("action")
        values = None if action is None else np.asarray(action, dtype=np.float64)
        if values is not None and (values.shape != self.driver.policy.shape or not np.isfinite(values).all()):
            raise ValueError(f"the console sent an action of shape {list(values.shape)}")
        with self._changed:
            self.mode, self._action = str(order["mode"]), values
            self._heard = self._clock()


def supervised_by(settings: RobotSettings, driver: Driver, name: str = "") -> Supervised | Driver:
    """Return the driver under the supervision that the settings ask for, or the driver itself.

    name: instead of the settings' own. The console's key is that of the environment variable ROBOPOLICY_API_KEY.
    """
    if not settings.supervisor:
        return driver
    key = os.environ.get("ROBOPOLICY_API_KEY") or None
    return Supervised(driver, settings.supervisor, name or settings.name, api_key=key)


def _smaller(image: np.ndarray) -> np.ndarray:
    """Return an image [height, width, 3] of at most `LARGEST` pixels a side, contiguous."""
    every = max(1, -(-max(image.shape[:2]) // LARGEST))
    return np.ascontiguousarray(image[::every, ::every])
