"""Robots for tests of the console: points that walk, each with a camera, under shared control at a control rate."""

import threading
import time

import numpy as np

from robopolicy.core.spec import STATE, Field
from robopolicy.operators.assistance import Assistance
from robopolicy.operators.operator import Site
from robopolicy.serving.console.fleet import Fleet

ACTION = Field((3,), low=-1.0, high=1.0, unit="m/s, m/s, 0 to 1", names=("x_velocity", "y_velocity", "gripper"))


class WalkingRobots:
    """Robots whose policy walks in a circle; use it as a context manager, which runs them in a thread.

    rate: control steps per second. actions: newest action of every robot, [B, 3].
    """

    def __init__(self, robots: int = 8, rate: float = 20.0):
        begin = time.monotonic()
        self.assistance = Assistance(ACTION, robots, {}, clock=lambda: time.monotonic() - begin)
        self.fleet = Fleet(self.assistance, Site(ACTION, rate, robots), [f"robot {row + 1}" for row in range(robots)])
        self.alarms: list[tuple[int, str, int | None]] = []
        self.actions = np.zeros((robots, 3))
        self._place, self._rate, self._step = np.zeros((robots, 2)), rate, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        robots = len(self._place)
        self.assistance.start(np.arange(robots), np.arange(robots))
        for row in range(robots):
            self.fleet.begin(row)
        while not self._done.wait(1 / self._rate):
            self.step()

    def step(self) -> None:
        """Let all robots take a control step."""
        self._step += 1
        alarms, self.alarms = self.alarms, []
        self.assistance.next(alarms)
        angle = self._step / 12 + np.arange(len(self._place))[:, None] + np.arange(8) / 12
        plans = np.stack([np.cos(angle), np.sin(angle), np.sign(np.sin(angle / 2))], -1)
        observation = {STATE: self._place[:, None].astype(np.float32)}
        self.actions, _ = self.assistance.actions(observation, plans[:, 0])
        self._place = np.clip(self._place + 0.05 * self.actions[:, :2], -1, 1)
        for row, plan in enumerate(plans):
            index = {"float": 0.02 * (self._step % 60) * (1 + row / 8)}
            images = {"front": self._image(row)}
            self.fleet.show(row, images=images, plan=plan, action=self.actions[row], index=index, latency_ms=4.2)

    def _image(self, row: int) -> np.ndarray:
        image = np.full((48, 64, 3), 30, np.uint8)
        x, y = ((self._place[row] + 1) * (30, 22)).astype(int)
        image[y : y + 4, x : x + 4] = 255
        return image

    def __enter__(self) -> "WalkingRobots":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
