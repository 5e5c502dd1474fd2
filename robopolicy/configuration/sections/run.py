"""Sections for the location of results and for the world: simulator, world model or recording."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative, Seed
from robopolicy.core.structured import REGISTRY


@dataclass(frozen=True)
class RunSection:
    """Location of results (root/<verb>/<name>/<seed>), random seed, and device."""

    RENAMED: ClassVar[Mapping[str, str]] = {"fresh": "overwrite"}

    root: Path = Path("runs")
    """Folder of all runs: a run is ROOT/<verb>/<name>/<seed>, where the verb is a command such as train or finetune."""
    name: str = ""
    """Name of the run; empty for the name of the world (environment)."""
    inputs: str = ""
    """Name of the runs whose dataset, policy and world model this one reads by default; empty for its own name."""
    seed: Seed = 0
    """Seed of all random number generators. Runs repeat exactly on the same kind of CPU with the same number of threads
    and versions (versions.json). Elsewhere rounding differs, and results of single seeds vary by percentage points.
    """
    device: str = "auto"
    """Device: cpu, cuda, cuda:1 and so on; auto uses CUDA if available."""
    threads: Natural = 2
    """Number of CPU threads of torch, simulators and video encoders. The default is the same on every host because
    torch's results depend on it; 0 uses one per core, which is faster for policies with images. world.options.threads
    limits robopolicy's own simulators only.
    """
    overwrite: bool = False
    """Start over after deleting the run's folder and everything in it; otherwise the same command resumes an existing
    run.
    """
    plugins: tuple[str, ...] = ()
    """Python modules to import before checkpoints are loaded, for their custom classes: [my_package.my_module]."""
    tracker: str = field(default="", metadata={REGISTRY: "robopolicy.evaluation.trackers:TRACKERS"})
    """Experiment tracker that also receives the metrics and videos: tensorboard, wandb (offline unless logged in),
    trackio, or an import path, package.module:name. Empty for none.
    """


@dataclass(frozen=True)
class WorkersSection:
    """Worker processes that share the work; results do not depend on their number."""

    pool: str = field(default="local", metadata={REGISTRY: "robopolicy.core.pools:POOLS"})
    """Pool of workers: local (processes on this machine), ray (of a Ray cluster, needs the extra ray), slurm (one job
    per item, for sweeps and benchmarks, needs the extra slurm), or an import path, package.module:Class.
    """
    count: Count = 1
    """Number of workers. 1 with pool=local plays in this process. run.threads applies to each worker."""
    address: str = ""
    """Address of a running cluster, such as HOST:6379, or auto for the one that this machine belongs to; empty for this
    machine alone.
    """
    allow_unauthenticated: bool = False
    """Join a Ray cluster that requires no token. Everyone who reaches such a cluster can run code on it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of each worker: of Ray actors (num_gpus, num_cpus, ...) or of submitit's jobs (slurm_partition,
    gpus_per_node, timeout_min, ...). pool=local has none.
    """


WORLD_MODEL = "worldmodel"
DEMONSTRATIONS = "demonstrations"


@dataclass(frozen=True)
class ImaginationSection:
    """Truncation of imagined rollouts (the value beyond is bootstrapped), and the penalty on uncertainty."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "steps": "max_steps",
        "uncertainty": "max_uncertainty",
        "quantile": "uncertainty_quantile",
        "penalty": "uncertainty_penalty",
        "starts": "initial_states",
    }

    max_steps: Count | None = None
    """Truncate imagined episodes after this many steps, null for never."""
    max_uncertainty: NonNegative | None = None
    """Truncate imagined episodes when the uncertainty exceeds this value, in the model's units; null for never."""
    uncertainty_quantile: Fraction | None = None
    """Truncate imagined episodes when the uncertainty exceeds this quantile of the uncertainty on held-out data, so
    that the limit adapts to the model; null for never.
    """
    uncertainty_penalty: NonNegative = 0.0
    """Reward penalty per unit of uncertainty (MOPO)."""
    success: Literal["model", "state"] = "model"
    """What decides success: the model's prediction, or the task's own criterion on the imagined state (that which a
    model reads off its latent), which ranks policies better where the task has one.
    """
    debounce: Count = 1
    """Number of consecutive steps that must be predicted successful before success counts."""
    noises: Count = 1
    """Number of times that the same actions are imagined, each under noise of its own: success counts once all have
    succeeded, so that it does not hang on the model's noise. The time of imagination grows by this factor.
    """
    initial_states: Literal["simulator", "data", "keyframes"] = "simulator"
    """Initial states of imagined episodes: simulator (its initial states, paired with real episodes), any step of the
    dataset world.data (default: the model's own), or keyframes, the steps of its successful episodes at which progress
    is made.
    """


@dataclass(frozen=True)
class WorldSection:
    """The world (environment) in which a policy acts."""

    name: str = "push_cube"
    """Environment: one of those above, metaworld/<task>, gymnasium:<id>, worldmodel (set model), demonstrations (set
    data; recorded episodes are replayed until the policy's actions differ from them), or a custom one by its import
    path, package.module:Name. Default: the world of the given policy or dataset, with its options.
    """
    batch_size: Count = 128
    """Number of parallel environments. It affects speed, not results: random draws belong to episodes."""
    cameras: tuple[str, ...] = ()
    """Names of the cameras in observations; policies that read images set their own."""
    image_size: Any = None
    """Camera image size in pixels: 64 for height and width, [48,64], or per camera, {top: [48,64], wrist: 32}. null
    uses the environment's own images unchanged, or 64 if they are rendered. Policies that read images set their own.
    """
    model: Path | None = None
    """Checkpoint of a world model, for name=worldmodel."""
    data: Path | None = None
    """LeRobotDataset that name=demonstrations replays, or that imagined episodes start from."""
    simulator: str = ""
    """Task that provides the initial states of imagined episodes; empty for the one that the model was trained on."""
    imagination: ImaginationSection = field(default_factory=ImaginationSection)
    success: Path | None = None
    """Checkpoint of a success classifier (robopolicy success) that replaces the world's own success. In `offline` and
    `gate` it also relabels recorded episodes.
    """
    success_reward: bool = False
    """With world.success: reward only the classifier's success, with 1, instead of also keeping the world's other
    reward terms.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Additional options of the world, such as world.options.style=3. In any world: latency_steps=d executes every
    action chunk d control steps late and adds the waiting actions to the observation;
    faults=[slip,moved_goal,blackout,frozen_joint,protective_stop,latency,sensor_offset] plants one of them in a share
    fault_rate (.8) of the episodes, undisturbed=true shows every field without it too; trial_episodes=2 plays a scene
    twice; stl="F[1,2](x > 1)" asks for a formula. In MuJoCo: variation={colour: 1, mass: [0.5, 2]}, also light, camera,
    texture, distractors, size, friction: a value, or a range.
    """

    def __post_init__(self):
        if self.success is None and self.success_reward:
            raise ConfigError("world.success_reward needs a success classifier: set world.success=PATH.")
        if self.image_size is not None:
            from robopolicy.core.spec import image_sizes  # numpy, which help does not wait for

            by_camera = self.image_size if isinstance(self.image_size, dict) else self.cameras or ("camera",)
            image_sizes(by_camera, self.image_size)  # raises ConfigError where it is no size

    @property
    def with_own_success(self) -> "WorldSection":
        """This section without a success classifier: the world's own success counts."""
        return replace(self, success=None, success_reward=False)

    def varied_by(self, variation: Mapping[str, Any]) -> "WorldSection":
        """Return this section with these values of factors of variation, besides those that it has."""
        own = self.options.get("variation") or {}
        return replace(self, options={**self.options, "variation": {**own, **variation}})

    def imagined_by(self, model: Path) -> "WorldSection":
        """Return this section with the imagination of the world model at `model` as its world, from the same initial
        states; observations and success are the model's.
        """
        return replace(
            self.with_own_success, name=WORLD_MODEL, model=model, simulator=self.name, cameras=(), image_size=None
        )
