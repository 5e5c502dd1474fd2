"""Off-screen graphics for MuJoCo: it reads MUJOCO_GL once, at its first import, so the choice must come before that."""

import ctypes
import os
import sys


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
