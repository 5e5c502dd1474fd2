"""CPU threads: how many a run computes on, and how they wait.

OpenMP reads how its threads wait once, when torch is imported, so that is chosen before.
"""

import os

_bound: int | None = None
"""What `limit_threads` has set for this process."""


def choose_waiting() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has chosen.

    Spinning threads starve whoever else needs the core: with both of two cores busy, a training step of a small network
    took 30 times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def limit_threads(count: int) -> None:
    """Let everything in this process compute on at most `count` threads; 0: one a core, and torch's own choice.

    torch is told directly; simulators and encoders of video ask `usable_threads`. Libraries that are loaded later
    (pyarrow, scipy's linear algebra, Mesa's software rendering) and processes that this one starts read environment
    variables, where a lower number of the user's stays.
    """
    global _bound
    earlier, _bound = _bound, count or None
    if not count:
        return
    import torch

    torch.set_num_threads(count)
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):
        chosen = os.environ.get(name, "")
        if not chosen.isdecimal() or int(chosen) > count or int(chosen) == earlier:
            os.environ[name] = str(count)


def usable_threads() -> int:
    """Return on how many threads this process may compute: its cores, or fewer where `limit_threads` said so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if _bound is None else min(cores, _bound)
