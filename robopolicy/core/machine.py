"""Hardware resources: CPU threads, off-screen rendering, free memory.

OpenMP reads its wait policy when torch is imported, and MuJoCo reads MUJOCO_GL when it is imported. Both are set
before, so this module imports neither at the top level.
"""

import ctypes
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from robopolicy.core import replicas
from robopolicy.core.former_names import keep_former_names

if TYPE_CHECKING:
    import torch

_bound: int | None = None
"""Limit set by `limit_threads` for this process."""
GIGABYTE = 1e9
MEMORY = Path("/proc/meminfo")


def configure_rendering() -> None:
    """Set MUJOCO_GL to an installed library on Linux without a display, unless the user has set it."""
    if sys.platform != "linux" or os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY"):
        return
    for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        os.environ["MUJOCO_GL"] = name
        return


def rendering_error_hint(error: Exception) -> str:
    """Return the remedy for an import error of MuJoCo's rendering, "" for any other error.

    MuJoCo loads the library named by MUJOCO_GL on import and fails in various ways if it is missing.
    """
    places = {frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(error.__traceback__)}
    loading = any(("/mujoco/" in place and "gl_context" in place) or "/OpenGL/" in place for place in places)
    if not loading and "module 'mujoco' has no attribute" not in str(error):
        return ""
    backend = os.environ.get("MUJOCO_GL", "")
    return (
        f"MuJoCo cannot load its rendering library (MUJOCO_GL={backend}: {error}). Set MUJOCO_GL to egl or osmesa, "
        "whichever is installed (Debian and Ubuntu: apt-get install libegl1 libgl1, or libosmesa6), or leave it "
        "unset."
    )


def configure_thread_waiting() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has set a wait policy.

    Spinning threads block other processes: with both of two cores busy, a training step of a small network took 30
    times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def limit_threads(count: int) -> None:
    """Limit all computation in this process to `count` threads; 0: one per core, and torch's own default.

    Sets torch's threads directly; simulators and video encoders read `usable_threads`. Libraries loaded later (pyarrow,
    scipy's linear algebra, Mesa's software rendering) and child processes read environment variables; lower values set
    by the user are kept.
    """
    global _bound
    earlier, _bound = _bound, count or None
    if not count:
        return
    import torch

    torch.set_num_threads(count)
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):
        limit = os.environ.get(name, "")
        if not limit.isdecimal() or int(limit) > count or int(limit) == earlier:
            os.environ[name] = str(count)


def usable_threads() -> int:
    """Return the number of threads this process may use: its cores, or fewer after `limit_threads`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if _bound is None else min(cores, _bound)


def free_memory(device: "torch.device") -> int | None:
    """Return the free bytes of a device, of the processor's memory those of each data-parallel process on this machine;
    None if the system does not report them.
    """
    if device.type == "cuda":
        import torch

        # What torch keeps for the next tensor is free as well.
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached_bytes
    if not MEMORY.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 // replicas.local_count() if "MemAvailable" in lines else None


def in_bytes(count: int) -> str:
    """Format a number of bytes in MB or GB."""
    if count < GIGABYTE:
        return f"{count / 1e6:.3g} MB"
    return f"{count / GIGABYTE:.2g} GB" if count < 10 * GIGABYTE else f"{count / GIGABYTE:.0f} GB"


keep_former_names(
    __name__,
    {
        "choose_graphics": "configure_rendering",
        "choose_waiting": "configure_thread_waiting",
        "graphics_trouble": "rendering_error_hint",
    },
)
