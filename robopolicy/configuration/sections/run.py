"""Where results go, and the world that a policy acts in: real, imagined or recorded."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.ranges import Count, Natural, NonNegative, Seed, Share
from robopolicy.core.structured import REGISTRY


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
    tracker: str = field(default="", metadata={REGISTRY: "robopolicy.evaluation.trackers:TRACKERS"})
    """Experiment tracker that also receives the metrics and videos: tensorboard, wandb (offline unless logged in),
    trackio, or an import path, package.module:name. Empty for none.
    """


WORLD_MODEL = "worldmodel"
DEMONSTRATIONS = "demonstrations"


@dataclass(frozen=True)
class ImaginationSection:
    """When imagination is cut (the value beyond still counts), and what uncertainty costs."""

    steps: Count | None = None
    """Cut after so many imagined steps, null for never."""
    uncertainty: NonNegative | None = None
    """Cut where a step's uncertainty exceeds this, in the model's units, null for never."""
    quantile: Share | None = None
    """Cut where it exceeds this quantile of the uncertainty on held-out data, so that the limit adapts to the model."""
    penalty: NonNegative = 0.0
    """Reward lost per unit of uncertainty (MOPO)."""
    debounce: Count = 1
    """Consecutive steps that must look successful before success is believed."""
    starts: Literal["simulator", "data", "keyframes"] = "simulator"
    """Where episodes begin: as the simulator would start them (paired with real episodes), in any step of the dataset
    world.data (default: the model's own), or in keyframes, those of its successes where progress is made.
    """


@dataclass(frozen=True)
class WorldSection:
    """Where a policy acts."""

    name: str = "push_cube"
    """One of those above, metaworld/<task>, gymnasium:<id>, worldmodel (set model), demonstrations (set data; followed
    as far as the policy agrees with them), or your own by its dotted path, package.module:Name. Where none is named,
    it is the world that the given policy or dataset comes from, with its options.
    """
    batch_size: Count = 128
    """Rows that are simulated side by side: how fast episodes are played, not how they end; every draw belongs to its
    episode.
    """
    cameras: tuple[str, ...] = ()
    """Names of the cameras that observations show; policies that see bring their own."""
    image_size: Any = None
    """Pixels of the cameras' images: 64 for height and width, [48,64], or by camera, {top: [48,64], wrist: 32}; null
    for the environment's own pictures as they are, and 64 where they are drawn. Policies that see bring their own.
    """
    model: Path | None = None
    """Checkpoint of a world model, for name=worldmodel."""
    data: Path | None = None
    """A LeRobotDataset: what name=demonstrations follows, or what imagination starts in."""
    simulator: str = ""
    """Task whose starts imagined episodes have, empty for the one that the model was trained on."""
    imagination: ImaginationSection = field(default_factory=ImaginationSection)
    options: dict[str, Any] = field(default_factory=dict)
    """What else the world takes, such as world.options.style=3; latency_steps=d, in any world, lets every decision be
    executed d control steps late, and shows what is decided and not yet done.
    """

    def __post_init__(self):
        if self.image_size is not None:
            from robopolicy.core.spec import image_sizes  # numpy, which help does not wait for

            by_camera = self.image_size if isinstance(self.image_size, dict) else self.cameras or ("camera",)
            image_sizes(by_camera, self.image_size)  # raises ConfigError where it is no size

    def imagined_by(self, model: Path) -> "WorldSection":
        """Return the section of this world in the imagination of the world model at `model`, on the same starts; what a
        model shows is its own.
        """
        return replace(self, name=WORLD_MODEL, model=model, simulator=self.name, cameras=(), image_size=None)
