"""Physics worlds: a native batched MuJoCo engine, our manipulation tasks, and adapters to outside suites.

Importing this package loads nothing heavy; it only chooses MuJoCo's graphics library on a Linux machine without a
display, because MuJoCo reads that choice once, when it is first imported.
"""

import ctypes
import os
import sys


def choose_graphics() -> None:
    """Set MUJOCO_GL to a library that is installed, when Linux has no display and the user has not chosen."""
    if sys.platform != "linux" or os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY"):
        return
    for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        os.environ["MUJOCO_GL"] = name
        return


choose_graphics()
