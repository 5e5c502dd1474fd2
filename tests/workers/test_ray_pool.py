"""A real Ray on this machine: results equal to one process, though a worker is killed; nothing is open to others."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from test_collection_on_workers import tuned, weights
from test_evaluation_on_workers import evaluate, outcomes
from test_local_pool import alive, refuse  # noqa: F401 (workers import it)

from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.pools import PoolSettings, WorkerDiedError, WorkerError, open_pool
from robopolicy.core.registry import import_plugins
from robopolicy.workers import ray as ray_workers
from robopolicy.workers.ray import RayPool

pytest.importorskip("ray", reason="install it with: pip install 'robopolicy[ray]'")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

LOCAL = "test_local_pool:"


@pytest.fixture(scope="module")
def pool():
    import_plugins(["colorsys"])
    with open_pool("ray", PoolSettings(count=2)) as opened:
        assert isinstance(opened, RayPool)
        yield opened


def test_values_are_numpy_through_the_object_store_and_what_the_user_trusts_travels(pool):
    shared = pool.put({"a": np.arange(100_000)})
    results = dict(pool.map(LOCAL + "facts", [{"values": shared}] * 4))
    assert sorted(results) == [0, 1, 2, 3]
    for each in results.values():
        assert each["sum"] == np.arange(100_000).sum() + 100_000, "an item got the array of another"
        assert each["niceness"] == os.nice(0) and each["plugin"] and each["process"] != os.getpid()
        assert not each["trusts"] and not each["heavy"]
    arrays = dict(pool.map(LOCAL + "doubled", [{"numbers": np.ones(100_000)}]))[0]["doubled"]
    arrays += 1
    assert dict(pool.map(LOCAL + "doubled", []) or {}) == {}


def test_errors_keep_their_kind_and_text(pool):
    with pytest.raises(ConfigError, match=r"set finetune\.x=1"):
        list(pool.map(LOCAL + "refuse", [{"text": "set finetune.x=1"}]))
    with pytest.raises(WorkerError, match=r"LookupError: nothing there"):
        list(pool.map(LOCAL + "fail", [{"text": "nothing there"}]))


def test_a_killed_workers_item_runs_again_at_once(pool, tmp_path):
    items = [{"marker": str(tmp_path / "died"), "number": number} for number in range(4)]
    assert dict(pool.map(LOCAL + "die_once", items)) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (tmp_path / "died").exists()
    with pytest.raises(WorkerDiedError, match="3 workers died on the same item"):
        list(pool.map("os:abort", [{}]))


def listening(processes: set[int]) -> set[tuple[str, int]]:
    """Return the addresses (hexadecimal) and ports on which these processes accept connections."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                address, port = columns[1].split(":")
                found.add((address, int(port, 16)))
    return found


def descendants(process: int) -> set[int]:
    command = ["pgrep", "-P", str(process)]
    children = {int(each) for each in subprocess.run(command, capture_output=True, text=True).stdout.split()}
    return children.union(*(descendants(child) for child in children)) if children else set()


def test_ports_are_open_on_the_loopback_address_alone(pool):
    list(pool.map(LOCAL + "doubled", [{"numbers": np.ones(1)}]))
    ports = listening(descendants(os.getpid()) | {os.getpid()})
    assert len(ports) >= 3
    addresses = [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    others = {address for address in addresses if not address.startswith("127.")}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            others.add(probe.getsockname()[0])
        except OSError:
            pass
    if not others:
        pytest.skip("this machine has no address but the loopback one")
    reached = []
    for _, port in sorted(ports):
        for address in others:
            with socket.socket() as client:
                client.settimeout(2)
                if client.connect_ex((address, port)) == 0:
                    reached.append((address, port))
    assert not reached
    assert any(port for _, port in ports if socket.create_connection(("127.0.0.1", port), 2).close() is None)


def test_without_the_token_the_cluster_is_closed(pool):
    import ray

    address = ray.get_runtime_context().gcs_address
    settings = PoolSettings(count=1, address=address)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "disabled", "HOME": "/nonexistent", ray_workers.CLUSTERS: "0"}
    command = [sys.executable, "-c", ray_workers.PROBE, address]
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 3
    ray_workers._require_token(settings)  # with it, it is open


def test_a_cluster_without_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is none for workers\.address=127\.0\.0\.1:1"):
        RayPool(PoolSettings(address="127.0.0.1:1"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
    with pytest.raises(ConfigError, match="cannot be reached"):
        RayPool(PoolSettings(address="127.0.0.1:1"))
    monkeypatch.setattr(ray_workers, "PROBE", "import sys; sys.exit(0)")  # joined without a token
    with pytest.raises(ConfigError, match=r"requires no token.*workers\.allow_unauthenticated=true"):
        RayPool(PoolSettings(address="127.0.0.1:1"))


def test_a_start_that_takes_too_long_is_tried_again(monkeypatch):
    import ray

    tries = []

    def start(**options):
        tries.append(os.environ[ray_workers.CLUSTERS])
        raise Exception("The current node timed out during startup. This could happen ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.warns(RobopolicyNote, match="trying again"), pytest.raises(ConfigError, match="Ray does not start"):
        RayPool(PoolSettings(count=1))
    assert tries == ["0"] * ray_workers.STARTS


@pytest.fixture
def in_this_cluster(pool, monkeypatch):
    """Let commands use the workers of this file, which stay up."""
    monkeypatch.setattr(RayPool, "close", lambda self: None)
    monkeypatch.setattr(ray_workers, "RayPool", lambda settings: pool)
    return pool


def test_evaluation_equals_one_process_though_a_worker_is_killed(root, in_this_cluster, monkeypatch):
    assert evaluate(root, "one") == 0
    assert evaluate(root, "ray2", "workers.count=2", "workers.pool=ray") == 0
    assert outcomes(root, "evaluate", "ray2") == outcomes(root, "evaluate", "one")
    killed, real = [], RayPool.map

    def map_and_kill(self, function, items):
        for result in real(self, function, items):
            if not killed and self._busy:
                killed.append(self.processes[next(iter(self._busy.values()))[0]])
                os.kill(killed[0], signal.SIGKILL)
            yield result

    monkeypatch.setattr(RayPool, "map", map_and_kill)
    assert evaluate(root, "ray-killed", "workers.count=2", "workers.pool=ray") == 0
    assert killed and not alive(killed[0])
    assert outcomes(root, "evaluate", "ray-killed") == outcomes(root, "evaluate", "one")


def test_fine_tuning_with_shards_equals_one_process_though_a_worker_is_killed(root, in_this_cluster, monkeypatch):
    assert tuned(root, "shards-alone") == 0
    killed, real = [], RayPool.map

    def map_and_kill(self, function, items):
        for result in real(self, function, items):
            if not killed and self._busy and function.endswith("play_shard"):
                killed.append(self.processes[next(iter(self._busy.values()))[0]])
                os.kill(killed[0], signal.SIGKILL)
            yield result

    monkeypatch.setattr(RayPool, "map", map_and_kill)
    assert tuned(root, "shards-on-ray", "workers.count=2", "workers.pool=ray") == 0
    assert killed and weights(root, "shards-on-ray") == weights(root, "shards-alone")


def test_closing_ends_every_process_and_leaves_no_folder():
    script = """
        import sys, tempfile
        from robopolicy.core.pools import PoolSettings, open_pool
        with open_pool("ray", PoolSettings(count=1)) as pool:
            list(pool.map("math:sqrt", []))
            print(pool._folder.name, *pool.processes.values(), flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = process.stdout.readline().split()[0]
    helpers = descendants(process.pid)
    assert process.wait(300) == 0 and helpers
    assert not Path(folder).exists()
    limit = time.monotonic() + 60
    while any(map(alive, helpers)):
        assert time.monotonic() < limit, "a process of Ray outlives its command"
        time.sleep(0.1)


@pytest.mark.parametrize("everywhere", [False, True], ids=["on the loopback address", "on every address"])
def test_a_running_cluster_with_a_token_is_joined_and_stays_up(tmp_path, everywhere):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = f"""
        from robopolicy.core.pools import PoolSettings, open_pool
        for _ in range(2):
            with open_pool("ray", PoolSettings(count=1, address="{address}")) as pool:
                print(dict(pool.map("test_local_pool:warn", [{{"text": "a"}}, {{"text": "b"}}])))
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "cd" * 32, ray_workers.CLUSTERS: str(int(everywhere))}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # sockets need short names
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", address[10:]]
    command += ["--num-cpus", "1", "--include-dashboard", "false", "--temp-dir", folder.name]
    with (
        folder,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head,
    ):
        try:
            limit = time.monotonic() + 120
            while socket.socket().connect_ex(("127.0.0.1", int(address[10:]))):
                assert head.poll() is None and time.monotonic() < limit
                time.sleep(0.2)
            command = [sys.executable, "-c", textwrap.dedent(script)]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        finally:
            head.terminate()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["{0: 'a', 1: 'b'}"] * 2
