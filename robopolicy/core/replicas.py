"""Data-parallel processes of one training run, started by torchrun or `accelerate launch`.

Every process (rank) computes the same run: the same minibatches in the same order, each with its rows of them, and then
the same step with the sum of all gradients. Rank 0, the leader, alone collects, evaluates, writes files and prints.
Without a launcher there is one process, and everything here returns its argument.

All processes end together: values that may raise an error are exchanged before they are checked; a process that ends
closes its connections, which ends the others; and the first that ends reports the reason for all of them.

    torchrun --nproc-per-node 4 -m robopolicy finetune recipe=push_t
"""

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from robopolicy.core.errors import RobopolicyError

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for each process."""
PATIENCE = 365.0
"""Days for which a process waits for the others, for example while the leader evaluates; a dead one ends the wait."""
GRACE = {signal.SIGINT: 8.0, signal.SIGTERM: 2.0}
"""Seconds after a signal in which a process may end by itself, before it is ended."""


class ReplicaLostError(RobopolicyError):
    """Another process of the run has ended."""


@dataclass
class _Group:
    rank: int
    count: int
    store: Any
    streams: tuple[Any, Any]
    interrupted: bool = False


_group: _Group | None = None


def launched() -> int:
    """Return the number of processes that a launcher has started for this run, 1 without a launcher."""
    if any(name not in os.environ for name in LAUNCHED):
        return 1
    size = os.environ["WORLD_SIZE"]
    return max(1, int(size)) if size.isdecimal() else 1


def count() -> int:
    """Return the number of processes that train together."""
    return 1 if _group is None else _group.count


def rank() -> int:
    """Return the number of this process, from 0."""
    return 0 if _group is None else _group.rank


def leads() -> bool:
    """Whether this process collects, evaluates, writes files and prints."""
    return rank() == 0


def local_rank() -> int:
    """Return the number of this process among those on its machine, which selects its GPU."""
    return 0 if _group is None else int(os.environ.get("LOCAL_RANK", "0"))


def local_count() -> int:
    """Return the number of the run's processes on this machine, which share its memory."""
    return 1 if _group is None else int(os.environ.get("LOCAL_WORLD_SIZE", _group.count))


def join() -> None:
    """Connect to the other processes that the launcher has started; does nothing without a launcher.

    From then on only the leader prints.
    """
    global _group
    if launched() == 1 or _group is not None:
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    on_gpu = torch.cuda.is_available() and distributed.is_nccl_available()
    store, number, size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=number,
        world_size=size,
        timeout=timedelta(days=PATIENCE),
    )
    _group = _Group(number, size, store, (sys.stdout, sys.stderr))
    if number:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  until the process ends
    if threading.current_thread() is threading.main_thread():
        _watch_signals()


def leave() -> None:
    """Disconnect from the other processes, after the run."""
    global _group
    if _group is not None:
        from torch import distributed

        _group = None
        distributed.destroy_process_group()


def reports() -> bool:
    """Whether this process is the first to report how the run ended; if so, it prints again."""
    group = _group
    if group is None:
        return True
    try:
        is_first = group.store.add(f"robopolicy/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except RuntimeError:  # the launcher has gone
        is_first = leads()
    if is_first:
        sys.stdout, sys.stderr = group.streams
    return is_first


def was_interrupted() -> bool:
    """Whether Ctrl-C has reached this process, perhaps while it waited for another."""
    return _group is not None and _group.interrupted


def end(status: int) -> None:
    """End this process after an error, and with it all others; does nothing if there are no others."""
    if _group is None:
        return
    for stream in (*_group.streams, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # background threads and connections would delay the end


def _watch_signals() -> None:
    """End this process soon after SIGINT or SIGTERM, also where it waits for another process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _noted)
    threading.Thread(target=_obey, args=(reader,), daemon=True).start()


def _noted(number: int, frame: object) -> None:
    """Leave a signal to `_obey`, because the main thread may be waiting for another process."""


def _obey(reader: int) -> None:
    group = _group
    while group is not None:
        number = os.read(reader, 1)[0]
        if number not in GRACE:
            continue
        group.interrupted |= number == signal.SIGINT
        threading.Event().wait(GRACE[signal.Signals(number)])
        if reports():
            text = "Interrupted." if group.interrupted else str(lost())
            print(f"\n{text}" if group.interrupted else f"Error: {text}", file=sys.stderr)
        end(130 if group.interrupted else 143)


def lost() -> ReplicaLostError:
    """Return the error of a run that another process has ended without an error of its own."""
    return ReplicaLostError(
        f"One of the {count()} processes of this run has ended without an error message, so all have ended: it was "
        "killed, or the machine ran out of memory. Run the same command again: it resumes from the last checkpoint."
    )
