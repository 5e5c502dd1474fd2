"""The `run` section of the configuration: output folder, random seed, device and CPU threads of a run."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.ranges import Natural, Seed


@dataclass(frozen=True)
class RunSection:
    """Where results go (root/<verb>/<name>/<seed>), the random seed, and the device."""

    root: Path = Path("runs")
    """Folder of all runs: a run is ROOT/<verb>/<name>/<seed>, its verb a command such as train or finetune."""
    name: str = ""
    """Name of the run; empty for the name of the world (environment)."""
    seed: Seed = 0
    """Seed of every random number generator: on a CPU of the same kind, with as many threads and the same versions
    (versions.json), it repeats a run exactly; elsewhere sums round otherwise, and single seeds differ by points.
    """
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on; auto takes CUDA where there is one."""
    threads: Natural = 2
    """CPU threads of torch, of simulators and of encoders of video; on every machine the same because results depend on
    torch's. 0 for one a core, which is faster for policies that see images. world.options.threads bounds a simulator of
    ours alone.
    """
    overwrite: bool = False
    """Start over, after removing the run's folder and all that lies in it; otherwise the same command resumes the run
    that is there.
    """
    plugins: tuple[str, ...] = ()
    """Modules of your own, or dotted paths, imported because checkpoints may need them: [my_package.my_module]."""
