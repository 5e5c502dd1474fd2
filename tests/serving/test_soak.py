"""Sixteen robots for as long as wanted, while server, network and policy misbehave in every way that is known.

ROBOPOLICY_SOAK_SECONDS says for how long (60 unless set; half an hour says something about memory), and
ROBOPOLICY_SOAK_FIGURES names a file for the figures. No robot may ever be sent an action that is not its own, or one
beyond its limits; where it has none it holds still. One server bears everything but death, and its memory must not
grow; the other is killed and hangs besides, and is replaced, as whoever watches /livez would. Both load new versions of
their policy in between: good ones, some that fail once they serve, and some that cannot be read.
"""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from misbehaving import (
    CHANGE,
    FPS,
    HIGH,
    LOW,
    NETWORK_FAULTS,
    OUTSIDE,
    POLICY_FAULTS,
    RELOADS,
    Moody,
    run_moody,
    run_network,
    wanted,
)

from robopolicy.client.driver import ActionLimits, Driver
from robopolicy.client.policy_client import PolicyClient
from robopolicy.core.spec import STATE

SECONDS = float(os.environ.get("ROBOPOLICY_SOAK_SECONDS", "60"))
ROBOTS = 16
FAULT, REST = (1.0, 3.0), (1.0, 2.0)
"""Seconds for which something misbehaves, and for which nothing does."""

SPAWN = multiprocessing.get_context("spawn")


class Served:
    """A server that is replaced where it is dead or ill; spares: what it is spared of the faults."""

    def __init__(self, spares: tuple[str, ...]):
        self.faults = [("policy", name) for name in POLICY_FAULTS[1:] if name not in spares]
        self.faults += [("network", name) for name in NETWORK_FAULTS[1:]]
        self.faults += [("server", "killed")] if "killed" not in spares else []
        self.faults += [("reload", name) for name in RELOADS]
        self.mood, self.network, self.version = (SPAWN.Value("i", 0) for _ in range(3))
        self.back: list[float] = []
        self.port, self.lives, self.active = 0, 0, ""
        self.recent: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        here, there = SPAWN.Pipe()
        arguments = (there, self.mood, self.port, Moody, self.version)
        self.process = SPAWN.Process(target=run_moody, args=arguments, daemon=True)
        self.process.start()
        assert here.poll(120), "the server did not start"
        self.port, self.lives = here.recv(), self.lives + 1

    def healthy(self) -> bool:
        if not self.process.is_alive():
            return False
        address = f"http://127.0.0.1:{self.port}/livez"
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return True
        return False

    def watch(self) -> None:
        """Replace the server if it is dead or hangs."""
        if not self.healthy():
            self.process.kill()
            self.process.join(20)
            self.mood.value = 0
            self.start()

    def begin(self, kind: str, name: str) -> None:
        self.active = f"{kind} {name}"
        if kind == "server":
            os.kill(self.process.pid, signal.SIGKILL)
        elif kind == "reload":
            self.reload(name)
        elif kind == "policy":
            self.mood.value = POLICY_FAULTS.index(name)
        else:
            self.network.value = NETWORK_FAULTS.index(name)

    def reload(self, kind: str) -> None:
        """Load a new version and wait for what becomes of it; note the seconds until a failing one is taken back."""
        outcome = dict(zip(RELOADS, ("promoted", "rolled_back", "refused"), strict=True))[kind]
        before, begun = self.reloads(outcome), time.monotonic()
        self.version.value += (RELOADS.index(kind) - self.version.value) % len(RELOADS) or len(RELOADS)
        os.kill(self.process.pid, signal.SIGHUP)
        while self.reloads(outcome) == before:
            assert time.monotonic() - begun < 60, f"a {kind} version was never {outcome}"
            time.sleep(0.05)
        if outcome == "rolled_back":
            self.back.append(time.monotonic() - begun)

    def reloads(self, outcome: str) -> float:
        """Return how many versions became this, as the server counts them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if f'reloads_total{{outcome="{outcome}"}}' in line)

    def end(self) -> None:
        if self.active:
            self.recent[self.active] = time.monotonic()
        self.mood.value = self.network.value = 0
        self.active = ""

    def may_be_outside(self) -> bool:
        """Whether actions beyond all bounds may be about: while the policy answers them, and as long as they last."""
        name = "policy outside"
        return self.active == name or time.monotonic() - self.recent.get(name, -1e9) < 4.0

    def misbehave(self, until: float, chance: random.Random, done: Counter[str]) -> None:
        """One fault after the other, all of them in turns, with some rest after each; ends healthy."""
        waiting: list[tuple[str, str]] = []
        while time.monotonic() < until:
            waiting = waiting or chance.sample(self.faults, len(self.faults))
            self.begin(*waiting.pop())
            done[self.active] += 1
            time.sleep(chance.uniform(*FAULT))
            self.end()
            self.watch()
            time.sleep(chance.uniform(*REST))
        self.watch()

    def memory(self) -> float:
        """Return the resident memory of the process, MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Robot(threading.Thread):
    """A robot of 20 steps a second, whose every action is compared with what it may be."""

    def __init__(self, number: int, port: int, served: Served, until: float):
        super().__init__(name=f"robot {number}")
        self.number, self.served, self.until = number, served, until
        self.client = PolicyClient(port=port, timeout=1.5, patience=0.5)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.late = 0.0

    def run(self) -> None:
        limits = ActionLimits(low=LOW, high=HIGH, change=CHANGE)
        prefetch = 2 * (self.number // 2 % 2)
        with self.client, Driver(self.client, hold=np.zeros(2), limits=limits, prefetch=prefetch) as driver:
            self.steps(driver)
            self.counts.update(driver.counts)
            self.counts["answers"] = len(driver._requests.latencies)

    def steps(self, driver: Driver) -> None:
        step, last, due = 0, None, time.monotonic()
        while time.monotonic() < self.until:
            before, held = time.monotonic(), driver.counts["held"]
            action = driver.step({STATE: np.array([self.number, step], np.float64)})
            if last is not None:  # an episode's first action may be waited for
                self.late = max(self.late, time.monotonic() - before)
            self.judge(step, action, last, driver.counts["held"] > held, driver.late)
            step, last = step + 1, action
            if step % 400 == 0:
                driver.reset()
                last = None
            due = max(due + 1 / FPS, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))

    def judge(self, step: int, action: np.ndarray, last: np.ndarray | None, held: bool, late: int) -> None:
        """Note an action that is not what this step wants (or holding still), led there within the limits.

        late: steps that the robot has held still since the observation, and so has not used up of its plan.
        """
        targets = {"held": np.zeros(2)} if held else {"wanted": wanted(self.number, step - late)}
        if not held and self.served.may_be_outside():
            targets["outside"] = np.full(2, OUTSIDE)
        before = np.zeros(2) if last is None else last  # an episode's first action counts from where it holds still
        for name, target in targets.items():
            allowed = np.clip(target, before - CHANGE, before + CHANGE)
            if np.allclose(action, np.clip(allowed, LOW, HIGH), atol=1e-5):
                self.counts[f"judged {name}"] += 1
                return
        self.wrong.append(f"robot {self.number} step {step} held {held}: {action}, after {last}, not {targets}")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_no_robot_is_ever_sent_what_is_not_its_own_or_not_safe():
    begun = time.monotonic()
    steady, mortal = Served(("hang", "killed")), Served(())
    here, there = SPAWN.Pipe()
    states = [(steady.port, steady.network), (mortal.port, mortal.network)]
    network = SPAWN.Process(target=run_network, args=(there, states), daemon=True)
    network.start()
    assert here.poll(60)
    ports = here.recv()
    until = time.monotonic() + SECONDS
    robots = [Robot(n, ports[n % 2], (steady, mortal)[n % 2], until + 3) for n in range(ROBOTS)]
    for robot in robots:
        robot.start()
    done: Counter[str] = Counter()
    warm = time.monotonic() + min(120.0, SECONDS / 3)
    memory: list[float] = []
    troubles = [
        threading.Thread(target=served.misbehave, args=(until, random.Random(index), done))
        for index, served in enumerate((steady, mortal))
    ]
    for trouble in troubles:
        trouble.start()
    while any(trouble.is_alive() for trouble in troubles):
        time.sleep(1.0)
        if time.monotonic() > warm:
            memory.append(steady.memory())
    for robot in robots:
        robot.join(60)
    here.send("end")
    assert here.poll(30)
    spoiled = here.recv()
    counts = sum((robot.counts for robot in robots), Counter())
    figures = {
        "seconds": round(time.monotonic() - begun, 1),
        "robots": ROBOTS,
        "counts": dict(counts),
        "wrong": [text for robot in robots for text in robot.wrong],
        "longest step": round(max(robot.late for robot in robots), 3),
        "faults": dict(done),
        "messages": spoiled,
        "servers": {"steady": steady.lives, "mortal": mortal.lives},
        "seconds until a failing version was taken back": [round(each, 2) for each in steady.back + mortal.back],
        "memory MiB": {"after warm-up": memory[0], "at the end": memory[-1], "most": max(memory)},
    }
    if path := os.environ.get("ROBOPOLICY_SOAK_FIGURES"):
        Path(path).write_text(json.dumps(figures, indent=2))
    assert not any(robot.is_alive() for robot in robots)
    assert not figures["wrong"], figures["wrong"][:5]
    assert steady.lives == 1, "a server died of what its clients, its network or its policy did"
    assert counts["judged wanted"] > 0.2 * counts["steps"], "robots did hardly anything"
    assert all(robot.counts["judged wanted"] for robot in robots)
    assert max(memory) < 1.02 * memory[0], "memory grows"
    assert all(seconds < 5.0 for seconds in steady.back + mortal.back), "a failing version served for too long"
    for served in (steady, mortal):
        with PolicyClient(port=served.port, timeout=20) as client:
            answer = client.infer({STATE: np.array([3.0, 5.0])})["actions"]
            assert answer[:, 0] == pytest.approx(wanted(3, 5 + np.arange(len(answer)))[:, 0], abs=1e-5)
    for process in (network, steady.process, mortal.process):
        process.kill()
        process.join(20)
