"""Latency and throughput of a policy server with and without recording, two server processes taking turns.

Robots ask at the pace of their chunks, each with a camera and a state, and to the server that records they report the
steps in between, as `drive` does; then as fast as answers come, with eight steps to report after each: far more than
robots can execute in that time. Both servers run all the time, and the idle one waits. Policies are not trained: their
answers take as long. Percentiles are of all rounds together; throughput is the median over rounds, and so is its ratio.
"""

import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.client.executed import executed_report
from robopolicy.client.policy_client import PolicyClient
from robopolicy.client.protocol import EXECUTED
from robopolicy.configuration import Config
from robopolicy.core.errors import ServingError
from robopolicy.core.spec import STATE, Field
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.verbs.bench import Benchmark, Table

ROBOTS = 4
FPS, CHUNK = 20.0, 8
IMAGE = 96
PACED, FAST = 12.0, 6.0
"""Seconds of a round at the pace of the robots, and as fast as answers come."""
FRONT = "observation.images.front"
ARMS = ("plain", "recording")
POLICIES: dict[str, dict[str, Any]] = {
    "transformer": {"denoiser": DenoiserKind.TRANSFORMER, "width": 128, "depth": 4},
    "mlp": {"width": 64},
}
"""A policy of the usual size, and one whose answers cost about as much as the report of eight steps."""
STARTS_WITHIN = 300.0


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return latencies [ms] and requests per second of both servers, all rounds, and what was recorded, by policy."""
    return {
        "policies": {
            name: _measured(root / name, settings, config.bench.rounds) for name, settings in POLICIES.items()
        },
        "rounds": config.bench.rounds,
        "robots": ROBOTS,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _measured(root: Path, settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the figures of one policy."""
    checkpoint = root / "checkpoint"
    fields = {STATE: Field((8,)), FRONT: Field((IMAGE, IMAGE, 3), "uint8", 0, 255)}
    policy = DenoisingPolicyConfig(**settings, chunk=CHUNK, prediction_steps=2 * CHUNK, sampling_steps=10)
    DenoisingPolicy(policy, fields, Field((7,), low=-1.0, high=1.0), fps=FPS).save(checkpoint)
    latencies: dict[str, list[float]] = {arm: [] for arm in ARMS}
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with served(checkpoint) as plain, served(checkpoint, f"serve.record={root / 'data'}") as recording:
        ports = dict(zip(ARMS, (plain, recording), strict=True))
        for number in range(rounds + 1):
            if number == 1:
                wait_for_writer(recording)
            for arm in ARMS if number % 2 else reversed(ARMS):
                seconds, _ = asked(ports[arm], PACED, CHUNK / FPS)
                _, count = asked(ports[arm], FAST, 0.0)
                if number:  # the first round starts the recording, and what is lazy
                    latencies[arm] += seconds
                    rates[arm].append(count / FAST)
        steps = {name: gauge(recording, f"robopolicy_{name}") for name in ("recorded_steps", "record_dropped_steps")}
    return {
        "arms": {arm: figures_of(latencies[arm], rates[arm]) for arm in ARMS},
        "ratio": float(np.median(np.divide(rates["recording"], rates["plain"]))),
        **steps,
    }


def figures_of(latencies: list[float], rates: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, the number of paced requests, and the median of requests per second."""
    percentiles = {f"p{level}": 1e3 * float(np.percentile(latencies, level)) for level in (50, 99)}
    return {**percentiles, "requests": len(latencies), "per_second": float(np.median(rates))}


@contextmanager
def served(checkpoint: Path, *settings: str) -> Iterator[int]:
    """Serve the checkpoint in a process of its own while the body runs; yields the port."""
    command = [sys.executable, "-m", "robopolicy", "serve", str(checkpoint), "serve.port=0", "run.threads=1", *settings]
    process = subprocess.Popen(
        [*command, "serve.exit_with_parent=true"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "ws://" not in line:
            raise ServingError(f"{' '.join(command)} did not start.")
        yield int(line.partition("ws://")[2].partition(":")[2].split()[0])
    finally:
        process.terminate()
        process.wait()


def gauge(port: int, name: str) -> int:
    """Return a number of a server's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith(f"{name} ")).split()[1]))


def wait_for_writer(port: int) -> None:
    """Wait until the process that writes has started, which takes long on a busy machine."""
    until = time.monotonic() + STARTS_WITHIN
    while not gauge(port, "robopolicy_recorded_steps") and time.monotonic() < until:
        time.sleep(1.0)


def asked(port: int, seconds: float, every: float) -> tuple[list[float], int]:
    """Let ROBOTS robots ask for `seconds`, one request `every` seconds, 0 for one after the other.

    Returns the seconds of all answers, and their number.
    """
    latencies: list[list[float]] = [[] for _ in range(ROBOTS)]
    errors: list[Exception] = []
    threads = [
        threading.Thread(target=caught(robot, errors), args=(port, seconds, every, index / ROBOTS, latencies[index]))
        for index in range(ROBOTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [each for part in latencies for each in part], sum(map(len, latencies))


def caught(function: Callable[..., None], errors: list[Exception]) -> Callable[..., None]:
    """Return a function that appends its error to a list."""

    def run(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)

    return run


def robot(port: int, seconds: float, every: float, offset: float, latencies: list[float]) -> None:
    """Ask as one robot, with an episode per call; append the seconds of every answer."""
    draws = np.random.default_rng(int(1000 * offset))
    slope = np.add.outer(np.arange(IMAGE), np.arange(IMAGE))[..., None]
    frames = [
        {
            STATE: draws.normal(size=8).astype(np.float32),
            FRONT: (slope + 4 * place + draws.integers(0, 8, (IMAGE, IMAGE, 3))).astype(np.uint8),
        }
        for place in range(CHUNK)
    ]
    step = {"action": np.zeros(7), "operator": "", "actor": 0, "segment": 0, "held": False, "plan_step": 0}
    report = executed_report([{**step, "observation": frame, "step": 0, "time": 0.0} for frame in frames])
    count = np.arange(CHUNK)
    with PolicyClient(port=port) as client:
        reports = bool(client.metadata["records"])
        due = time.perf_counter() + offset * every
        until = due + seconds
        while due < until:
            time.sleep(max(due - time.perf_counter(), 0.0))
            begin = time.perf_counter()
            client.infer({**frames[-1], **({EXECUTED: {}} if reports else {})})
            end = time.perf_counter()
            if reports:
                steps = count + CHUNK * len(latencies)
                client.infer({EXECUTED: {**report, "step": steps, "time": begin + 1e-6 * count}})
            latencies.append(end - begin)
            due = due + every if every else end
        client.reset()


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one line per policy and server."""
    header = [
        "policy",
        "server",
        "p50 ms",
        "p99 ms",
        "paced requests",
        "requests/s",
        "x plain",
        "steps recorded",
        "lost",
    ]
    lines = []
    for name, part in figures["policies"].items():
        for arm, row in part["arms"].items():
            is_plain = arm == ARMS[0]
            counts = part["recorded_steps"], part["record_dropped_steps"]
            more = ["", "", ""] if is_plain else [f"{part['ratio']:.2f}", *(f"{each:,}" for each in counts)]
            numbers = f"{row['p50']:.1f}", f"{row['p99']:.1f}", f"{row['requests']}", f"{row['per_second']:.1f}"
            lines.append([name, arm, *numbers, *more])
    title = f"{figures['robots']} robots, {figures['cores']} cores, load {figures['load']:.1f}"
    return [Table(title, header, lines)]


BENCHMARK = Benchmark("What does recording cost a policy server?", ("rounds",), benchmark, tables)
