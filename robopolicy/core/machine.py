"""What the machine has: CPU threads and how they wait, graphics that render off-screen, and free memory.

OpenMP reads how its threads wait once, when torch is imported, and MuJoCo reads MUJOCO_GL once, when it is imported:
both are chosen before, so that nothing here imports either at its top.
"""

import ctypes
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_bound: int | None = None
"""What `limit_threads` has set for this process."""
GIGABYTE = 1e9
MEMORY = Path("/proc/meminfo")


def choose_graphics() -> None:
    """Set MUJOCO_GL to a library that is installed, on Linux without a display, unless the user has chosen."""
    if sys.platform != "linux" or os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY"):
        return
    for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        os.environ["MUJOCO_GL"] = name
        return


def graphics_trouble(error: Exception) -> str:
    """Return what to do about an error that came of importing MuJoCo with its graphics, "" where another one did.

    MuJoCo loads the library that MUJOCO_GL names as it is imported, and fails in many ways where there is none.
    """
    places = {frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(error.__traceback__)}
    loading = any(("/mujoco/" in place and "gl_context" in place) or "/OpenGL/" in place for place in places)
    if not loading and "module 'mujoco' has no attribute" not in str(error):
        return ""
    chosen = os.environ.get("MUJOCO_GL", "")
    return (
        f"MuJoCo cannot load its graphics (MUJOCO_GL={chosen}: {error}). Set MUJOCO_GL=egl or osmesa to one that is "
        "installed (Debian and Ubuntu: apt-get install libegl1 libgl1, or libosmesa6), or leave it unset."
    )


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


def free_memory(device: "torch.device") -> int | None:
    """Return the free bytes of a device, None where the system does not say."""
    if device.type == "cuda":
        import torch

        # What torch keeps for the next tensor is free as well.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if not MEMORY.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def in_bytes(count: int) -> str:
    """Return a number of bytes in MB or GB."""
    if count < GIGABYTE:
        return f"{count / 1e6:.3g} MB"
    return f"{count / GIGABYTE:.2g} GB" if count < 10 * GIGABYTE else f"{count / GIGABYTE:.0f} GB"
