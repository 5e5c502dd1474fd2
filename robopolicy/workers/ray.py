"""Workers of a Ray cluster: of one on this machine, which starts and ends with the pool, or of a running one.

    robopolicy evaluate CHECKPOINT workers.pool=ray workers.count=4
    robopolicy evaluate CHECKPOINT workers.pool=ray workers.address=HOST:6379 workers.count=64

Ray runs code for whoever reaches its ports. A cluster of ours therefore requires a token, listens on the loopback
address and has no dashboard, and a running cluster is joined only if it requires a token as well. Values and results
cross as numpy arrays through Ray's object store. If a worker dies, its item goes to the next free worker at once; the
replacement starts meanwhile.
"""

import contextlib
import importlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, RobopolicyNote, in_one_line, require_extra
from robopolicy.core.pools import PoolSettings, WorkerError, context, died, perform, received

MODE = "RAY_AUTH_MODE"
"""Environment variable with which Ray switches authentication on; those of the token and of its file follow."""
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable with which Ray allows nodes on other machines, on every system despite its name; with "0", Ray
listens on the loopback address alone."""
STARTS = 4
"""Number of times that a cluster is started before giving up: Ray itself waits for 30 seconds."""
PASSED_ON = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "HF_HUB_OFFLINE", "HF_HOME")
"""Environment variables that workers take from this process."""
PATIENCE = 60.0
"""Seconds without any worker after which a note reports the wait."""
DECISIVE = ("robopolicy", "torch", "numpy", "mujoco")
"""Packages of which workers must have the versions of this process, because results depend on them."""
QUIET = {
    "RAY_worker_niceness": "0",  # Ray starts workers at 15, so that they starve beside other processes
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers see the GPUs that this process sees
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
PROBE = """
import socket, sys, ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
try:
    address = canonicalize_bootstrap_address_or_die(sys.argv[1])
    socket.create_connection(address.rsplit(":", 1), 5).close()
    GcsClient(address=address)
except ray.exceptions.AuthenticationError:
    sys.exit(3)
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(4)
"""
"""Connects to the cluster at an address without a token; exit status 3: it requires one."""


class Actor:
    """One worker, a process of the cluster."""

    def __init__(self, environment: Mapping[str, str]):
        os.environ.update(environment)

    def ready(self) -> dict[str, Any]:
        """Return the process id and the versions of `DECISIVE`."""
        return {"process": os.getpid(), "host": os.uname().nodename, "packages": _versions()}

    def perform(self, _function: str, _given: Mapping[str, Any], /, **item: Any) -> dict[str, Any]:
        """Run one item; see `robopolicy.core.pools.perform`."""
        return perform(_function, _writable(item), _given)


class RayPool:
    """Pool of `settings.count` workers; settings.address: of a running cluster, "" to start one on this machine.

    Raises ConfigError if Ray is missing, the cluster cannot be joined, or it requires no token and
    settings.allow_unauthenticated is False.
    """

    def __init__(self, settings: PoolSettings):
        self.workers = settings.count
        self.processes: dict[Any, int] = {}
        """Worker -> process id, of those that have started."""
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}
        self._busy: dict[Any, tuple[Any, int]] = {}
        self._failures = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # Ray replaces a loopback address by that of the machine unless other machines are excluded.
        excluded = not settings.address or settings.address.startswith(("auto", "localhost", "127."))
        os.environ[CLUSTERS] = "0" if excluded else "1"
        if settings.address:
            _require_token(settings)
        else:
            os.environ |= {MODE: "token", **({} if _has_token() else {TOKEN: secrets.token_hex(32)})}
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self._ray: Any = require_extra("ray", "ray")
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            actor = self._ray.remote(Actor).options(**{"num_cpus": 1, **settings.options, "max_restarts": 0})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"workers.options: {in_one_line(error)}.") from error
        self._new = lambda: actor.remote(environment)
        self._joined = not self._ray.is_initialized()
        if self._joined:
            _refresh()
            self._join(settings)

    def _join(self, settings: PoolSettings) -> None:
        """Start a cluster on this machine, again if Ray gave up, or join the one at settings.address."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if settings.address:
            options |= {"address": settings.address}
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
            options |= {"address": "local", "num_cpus": settings.count, "include_dashboard": False}
            options |= {"_temp_dir": self._folder.name}
        for attempt in range(1, STARTS + 1):
            try:
                with _signals_kept():
                    self._ray.init(**options)
                return
            except Exception as error:
                self._ray.shutdown()
                if "timed out" not in str(error) or attempt == STARTS:
                    place = f"cluster at {settings.address} cannot be joined" if settings.address else "does not start"
                    raise ConfigError(f"Ray {place}: {in_one_line(error)}.") from error
                warnings.warn(
                    f"Ray did not start within its 30 seconds, as happens on a busy machine: trying again "
                    f"({attempt + 1} of {STARTS}).",
                    RobopolicyNote,
                    stacklevel=4,
                )

    def put(self, value: Any) -> Any:
        """Implement `Pool`."""
        return self._ray.put(value)

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Implement `Pool`."""
        given, deaths = self._ray.put(context()), Counter[int]()
        waiting = deque(range(len(items)))

        def assign() -> None:
            present = len(self._idle) + len(self._busy) + len(self._starting)
            for _ in range(min(self.workers, len(self._busy) + len(waiting)) - present):
                worker = self._new()
                self._starting[worker.ready.remote()] = worker
            while waiting and self._idle:
                worker, index = self._idle.pop(), waiting.popleft()
                self._busy[worker.perform.remote(function, given, **items[index])] = worker, index

        try:
            assign()
            while self._busy or waiting:
                for reference in self._arrived():
                    if reference in self._starting:
                        self._begin(reference)
                        assign()
                        continue
                    worker, index = self._busy.pop(reference)
                    try:
                        reply = self._ray.get(reference)
                    except self._ray.exceptions.RayTaskError as error:
                        raise WorkerError(f"A worker could not run its item: {in_one_line(error)}.") from error
                    except self._ray.exceptions.RayError as error:
                        self.processes.pop(worker, None)
                        deaths[index] += 1
                        waiting.appendleft(index)
                        died(deaths[index], "ran out of memory" if "memory" in str(error).lower() else "was killed")
                        assign()
                        continue
                    self._idle.append(worker)
                    assign()
                    yield index, received(_writable(reply))
        finally:
            self._end([worker for worker, _ in self._busy.values()])
            self._busy.clear()

    def close(self) -> None:
        """Implement `Pool`."""
        self._end([*(worker for worker, _ in self._busy.values()), *self._starting.values(), *self._idle])
        for each in (self._idle, self._busy, self._starting):
            each.clear()
        if self._joined:
            with _signals_kept():
                self._ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def _arrived(self) -> list[Any]:
        """Return the results and new workers that have arrived, at least one."""
        references, noted = [*self._busy, *self._starting], False
        while True:
            arrived, _ = self._ray.wait(references, num_returns=1, timeout=PATIENCE)
            if arrived:
                return arrived
            if not noted and not self._busy:
                noted = True
                warnings.warn(
                    f"No Ray worker has started for {PATIENCE:.0f} seconds: the machine is busy, or the cluster has no "
                    "free CPU. Still waiting.",
                    RobopolicyNote,
                    stacklevel=4,
                )

    def _begin(self, reference: Any) -> None:
        """Take a new worker into use. Raises ConfigError if workers cannot start or have other packages."""
        worker = self._starting.pop(reference)
        try:
            ready = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._failures += 1
            if self._failures < STARTS:
                return
            raise ConfigError(
                f"Ray workers cannot start: {in_one_line(error)}. Every node needs robopolicy."
            ) from error
        here = _versions()
        other = {name: there for name, there in ready["packages"].items() if there != here[name]}
        if other:
            different = ", ".join(f"{name} {version} instead of {here[name]}" for name, version in other.items())
            raise ConfigError(
                f"The node {ready['host']} has {different}, so results would differ: install the same versions there."
            )
        self._failures = 0
        self.processes[worker] = ready["process"]
        self._idle.append(worker)

    def _end(self, workers: Sequence[Any]) -> None:
        for worker in workers:
            self.processes.pop(worker, None)
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.kill(worker)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in DECISIVE}


def _writable(value: Any) -> Any:
    """Return a copy of nested values whose arrays may be written to; those of the object store may not."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_writable(each) for each in value)
    return value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refresh() -> None:
    """Let Ray read its environment variables again, if it was imported before they were set."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = os.environ[CLUSTERS] == "1"
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    """Whether Ray would find a token: in an environment variable, or in a file."""
    if os.environ.get(TOKEN):
        return True
    return Path(os.environ.get(TOKEN_FILE) or Path.home() / ".ray" / "auth_token").expanduser().is_file()


def _require_token(settings: PoolSettings) -> None:
    """Raise ConfigError unless this process has a token and the cluster at settings.address requires one."""
    if settings.allow_unauthenticated:
        return
    way_out = "or set workers.allow_unauthenticated=true if you trust everyone who can reach it."
    if not _has_token():
        raise ConfigError(
            f"A Ray cluster is joined only with its token, and there is none for workers.address={settings.address}: "
            f"set {TOKEN}=TOKEN in the environment (on the cluster: ray get-auth-token), {way_out}"
        )
    os.environ[MODE] = "token"
    require_extra("ray", "ray")
    environment = {name: value for name, value in os.environ.items() if name not in (TOKEN, TOKEN_FILE)}
    with tempfile.TemporaryDirectory() as home:  # without the token file in the home folder
        environment |= {MODE: "disabled", "HOME": home}
        command = [sys.executable, "-c", PROBE, settings.address]
        probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        raise ConfigError(
            f"The Ray cluster at {settings.address} requires no token, so everyone who reaches it can run code on it "
            f"and on its clients: start it with {MODE}=token, {way_out}"
        )
    if probe.returncode != 3:
        lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
        raise ConfigError(f"The Ray cluster at {settings.address} cannot be reached: {in_one_line(lines[-1])}.")
