"""Local workers: every item once, whoever dies; errors with their text; nothing is left running."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from robopolicy.core import registry
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.pools import PoolSettings, WorkerDiedError, WorkerError, open_pool
from robopolicy.core.registry import load_dotted
from robopolicy.workers.local import LocalPool

pytestmark = pytest.mark.long  # interpreters start

HERE = f"{__name__}:"


def doubled(numbers: np.ndarray, wait: float = 0.0) -> dict:
    time.sleep(wait)
    return {"doubled": 2 * numbers, "process": os.getpid()}


def facts(values: dict) -> dict:
    """Return what a worker knows about itself and its item; writes to the arrays, as functions may."""
    values["a"] += 1
    return {
        "sum": values["a"].sum(),
        "niceness": os.nice(0),
        "process": os.getpid(),
        "trusts": registry.is_trusted("fractions:Fraction"),
        "plugin": "colorsys" in sys.modules,
        "heavy": sorted({"torch", "mujoco", "diffusers"} & set(sys.modules)),
    }


def refuse(text: str) -> None:
    raise ConfigError(text)


def fail(text: str) -> None:
    raise LookupError(text)


def warn(text: str) -> str:
    warnings.warn(text, RobopolicyWarning, stacklevel=1)
    return text


def die_once(marker: str, number: int) -> int:
    if number == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def pool():
    with open_pool("local", PoolSettings(count=2)) as opened:
        yield opened


def test_results_carry_the_index_of_their_item_and_shared_values_are_sent_once(pool):
    shared = pool.put(np.arange(3))
    items = [{"numbers": shared, "wait": 0.3}, {"numbers": np.ones(2)}, {"numbers": shared}, {"numbers": np.zeros(1)}]
    results = dict(pool.map(HERE + "doubled", items))
    assert sorted(results) == [0, 1, 2, 3]
    np.testing.assert_array_equal(results[0]["doubled"], [0, 2, 4])
    np.testing.assert_array_equal(results[1]["doubled"], [2, 2])
    processes = {each["process"] for each in results.values()}
    assert len(processes) == 2 and os.getpid() not in processes
    assert list(pool.map(HERE + "doubled", [])) == []


def test_a_value_is_freed_with_its_handle():
    with open_pool("local", PoolSettings(count=1)) as pool:
        assert isinstance(pool, LocalPool)
        for _ in range(3):
            handle = pool.put({"weights": np.zeros(15_432)})
            assert len(dict(pool.map(HERE + "sized", [{"value": handle}]))) == 1
            del handle
        assert not pool._values
        last = pool.put(1)
        assert dict(pool.map(HERE + "kept", [{"value": last}])) == {0: 1}


def sized(value: dict) -> int:
    return len(value["weights"])


def kept(value: int) -> int:
    """Return the number of values that the worker's loop holds."""
    frame = sys._getframe()
    while "connection" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return len(frame.f_locals["values"])


def test_the_error_of_an_item_arrives_with_its_text_and_the_pool_goes_on(pool):
    with pytest.raises(ConfigError, match=r"set finetune\.x=1"):
        list(pool.map(HERE + "refuse", [{"text": "set finetune.x=1"}]))
    with pytest.raises(WorkerError, match=r"LookupError: nothing there") as caught:
        list(pool.map(HERE + "fail", [{"text": "nothing there"}]))
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match="no module 'missing_entirely'"):
        list(pool.map("missing_entirely:function", [{}]))
    assert dict(pool.map(HERE + "die_once", [{"marker": os.devnull, "number": 5}])) == {0: 5}


def test_a_workers_warning_is_repeated_here(pool):
    with pytest.warns(RobopolicyWarning, match="much noise"):
        assert dict(pool.map(HERE + "warn", [{"text": "much noise"}])) == {0: "much noise"}


def test_a_killed_workers_item_runs_again(pool, tmp_path):
    items = [{"marker": str(tmp_path / "died"), "number": number} for number in range(4)]
    assert dict(pool.map(HERE + "die_once", items)) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (tmp_path / "died").exists()


def test_workers_that_always_die_on_an_item_end_the_job(pool):
    with pytest.raises(WorkerDiedError, match="killed by SIGABRT"):
        list(pool.map("os:abort", [{}]))


def test_an_abandoned_map_and_a_closed_pool_leave_no_process():
    pool = LocalPool(PoolSettings(count=2))
    running = pool.map("time:sleep", [])
    assert list(running) == []
    running = pool.map(HERE + "doubled", [{"numbers": np.ones(1)}, {"numbers": np.ones(1), "wait": 60.0}])
    next(running)
    processes = pool.processes
    assert len(processes) == 2 and all(map(alive, processes))
    pool.close()
    assert not any(map(alive, processes))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path, end):
    script = """
        import os, sys
        from robopolicy.core.pools import PoolSettings, open_pool
        with open_pool("local", PoolSettings(count=2)) as pool:
            items = [{"numbers": 1}, {"numbers": 1}, {"numbers": 1, "wait": 60.0}, {"numbers": 1, "wait": 60.0}]
            for place, (_, result) in enumerate(pool.map(sys.argv[1], items)):
                print(result["process"], flush=True)
                if place:
                    print(*pool.processes, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), HERE + "doubled"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline(), parent.stdout.readline()
        processes = [int(text) for text in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.send_signal(end)
        parent.wait(20)
    limit = time.monotonic() + 20
    while any(map(alive, processes)):
        assert time.monotonic() < limit, "a worker outlives its parent"
        time.sleep(0.05)


def test_a_worker_imports_only_what_it_needs(monkeypatch):
    monkeypatch.setattr(registry, "_plugins", {})  # of other tests
    with open_pool("local", PoolSettings(count=1)) as pool:
        [(_, loaded)] = pool.map(HERE + "heavy", [{}])
    assert loaded == []


def heavy() -> list[str]:
    return sorted({"torch", "mujoco", "hydra", "lerobot"} & set(sys.modules) - {__name__})


def test_an_unknown_pool_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'local'"), open_pool("locl", PoolSettings()):
        pass
    assert load_dotted("robopolicy.core.pools:POOLS", "Registry").names()[0] == "local"
