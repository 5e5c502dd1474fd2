"""Where results go, the seed, the device."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunSection:
    """Where results go (root/<verb>/<name>/<seed>), the seed behind every random number, and the device."""

    root: Path = Path("runs")
    """Folder of all runs: a run is ROOT/<verb>/<name>/<seed>."""
    name: str = ""
    """Name of the run; empty for the world's."""
    seed: int = 0
    """Behind every random number: on a CPU, one seed repeats a run exactly."""
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on; auto takes CUDA where there is one."""
    threads: int = 0
    """Threads of torch on the CPU, 0 for its own choice."""
    fresh: bool = False
    """Start over, where the same command would otherwise go on with what is there."""
    plugins: tuple[str, ...] = ()
    """Modules of your own, or dotted paths, that checkpoints may need: [my_package.my_module]."""
