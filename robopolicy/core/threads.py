"""CPU threads that wait politely: OpenMP reads its policy once, when torch is imported, so it is chosen before that."""

import os


def choose_waiting() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has chosen.

    Spinning threads starve whoever else needs the core: with both of two cores busy, a training step of a small network
    took 30 times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
