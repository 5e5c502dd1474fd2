"""What can be set, section by section, with its default; the text below a key is its help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.joint_configuration import JointConfig
from robopolicy.policies.token.configuration import TokenConfig
from robopolicy.training.configuration import FinetuneConfig, FitConfig, PretrainConfig
from worldmodels.configuration import EnsembleConfig, PlanConfig
from worldmodels.pixel_diffusion.configuration import PixelDiffusionConfig
from worldmodels.rssm.configuration import RssmConfig
from worldmodels.video.configuration import VideoConfig


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


@dataclass(frozen=True)
class ImaginationSection:
    """When imagination is cut (the value beyond still counts), and what uncertainty costs."""

    steps: int | None = None
    """Cut after so many imagined steps, null for never."""
    uncertainty: float | None = None
    """Cut where a step's uncertainty exceeds this, in the model's units, null for never."""
    quantile: float | None = None
    """Cut where it exceeds this quantile of the uncertainty on held-out data, so that the limit adapts to the model."""
    penalty: float = 0.0
    """Reward lost per unit of uncertainty (MOPO)."""
    debounce: int = 1
    """Consecutive steps that must look successful before success is believed."""
    starts: Literal["simulator", "data", "keyframes"] = "simulator"
    """Where episodes begin: as the simulator would start them (paired with real episodes), in any step of the dataset
    world.data (default: the model's own), or in keyframes, those of its successes where progress is made.
    """

    def __post_init__(self):
        if self.quantile is not None and not 0 <= self.quantile <= 1:
            raise ConfigError(f"world.imagination.quantile is {self.quantile}: it is a share of steps, 0 to 1.")


@dataclass(frozen=True)
class WorldSection:
    """Where a policy acts."""

    name: str = "push_cube"
    """A task of ours, metaworld/<task>, gymnasium:<id>, worldmodel (set model), or demonstrations (set data), which are
    followed as far as the policy agrees with them.
    """
    batch_size: int = 128
    """Rows that are simulated side by side."""
    cameras: tuple[str, ...] = ()
    """Names of the cameras that observations show; policies that see bring their own."""
    image_size: int = 64
    """Height and width of a camera's image in pixels."""
    model: Path | None = None
    """Checkpoint of a world model, for name=worldmodel."""
    data: Path | None = None
    """A LeRobotDataset: what name=demonstrations follows, or what imagination starts in."""
    simulator: str = ""
    """Task whose starts imagined episodes have, empty for the one that the model was trained on."""
    imagination: ImaginationSection = field(default_factory=ImaginationSection)
    options: dict[str, Any] = field(default_factory=dict)
    """What else the world takes, such as world.options.style=3."""


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations, by the scripted expert, a controller of yours or a policy."""

    episodes: int = 200
    """How many, over all levels of noise."""
    noise: tuple[str, ...] = ("low",)
    """Levels of disturbance, each for an equal share of the episodes: none, low, medium, high, random, or the standard
    deviation of noise on every action as a share of half its range.
    """
    controller: str = ""
    """Dotted path package.module:factory of your own controller, empty for the expert."""
    policy: Path | None = None
    """Checkpoint of a policy that plays instead."""
    successes_only: bool = False
    """Drop failures; world models need them."""
    images: Literal["png", "video"] = "png"
    """How images are stored: png, exact, or video, small."""


@dataclass(frozen=True)
class PolicySection(DenoisingPolicyConfig):
    """What `train` builds: kind diffusion or flow; token, a language model over action tokens; or joint, a planner.

    A token policy reads `policy.token`, observation_keys, history, chunk and the normalisations; its image patches
    replace the encoder, and what is about chains and denoisers does not concern it. A joint model reads `policy.joint`
    alone.
    """

    token: TokenConfig = field(default_factory=TokenConfig)
    joint: JointConfig = field(default_factory=JointConfig)


@dataclass(frozen=True)
class TrainSection(PretrainConfig):
    """Pre-training by regression on demonstrations."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    episodes: int = 0
    """Use the first so many, 0 for all."""
    evaluate_episodes: int = 200
    """Episodes of the judgement at the end, 0 for none."""


@dataclass(frozen=True)
class FinetuneSection(FinetuneConfig):
    """RL in the denoising chain or on the tokens of a pre-trained policy."""

    policy: Path | None = None
    """Its checkpoint (default: what train wrote under the same name and seed)."""
    teacher: Path | None = None
    """Checkpoint of the policy that distillation learns from."""
    expert: str = ""
    """Dotted path of the controller whose states hints begin in, empty for the task's."""
    experts: tuple[Path, ...] = ()
    """Datasets whose successes auxiliaries=[experts] imitates on the side."""
    finetuned_steps: int | None = None
    """How many of the last denoising steps are tuned, null for policy.finetuned_steps, else half of them."""
    train_encoder: bool = True
    """Whether the encoders of its observations learn as well."""
    lora_rank: int = 0
    """Tune adapters of this rank instead of the weights (token policies), 0 for none."""
    num_envs: int = 256
    """Rows collected in parallel."""
    critic_width: int = 256
    """Width of the critic's layers."""
    critic_depth: int = 2
    """Hidden layers of the critic."""
    evaluate_episodes: int = 200
    """Episodes of every evaluation and of the judgement at the end."""
    videos: int = 8
    """Episodes in the film of base and tuned policy, 0 for none."""


@dataclass(frozen=True)
class WorldModelSection:
    """A world model, trained on datasets and fresh rollouts; each kind reads the section of its name."""

    kind: Literal["ensemble", "rssm", "pixel_diffusion", "video"] = "ensemble"
    """ensemble and rssm (states, minutes), pixel_diffusion (a camera's next frame), video (all cameras, far ahead)."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    rssm: RssmConfig = field(default_factory=RssmConfig)
    pixel_diffusion: PixelDiffusionConfig = field(default_factory=PixelDiffusionConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    data: tuple[Path, ...] = ()
    """LeRobotDatasets (default: what collect wrote under the same name and seed)."""
    policies: tuple[Path, ...] = ()
    """Checkpoints of policies that add rollouts."""
    transitions: int = 100_000
    """Control steps of data: what is missing is played by the expert at every level of noise and by policies, an equal
    share each.
    """
    styles: int = 0
    """In how many other looks the same training episodes are filmed as well (Sword), for models that see images."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[str, ...] = ("low", "medium", "high", "random")
    """Levels at which the expert adds rollouts, failures among them."""
    examine_rows: int = 512
    """Held-out episodes that the examination follows."""
    examine_steps: int = 20_000
    """Single steps on which it judges reward and success (a diffusion model of images takes minutes for the default).
    """


@dataclass(frozen=True)
class ImagineSection:
    """Fine-tuning inside a world model, watched in both worlds."""

    model: Path | None = None
    """Its checkpoint (default: what worldmodel wrote under the same name and seed)."""
    method: Literal["rl", "sft"] = "rl"
    """rl, the algorithm of the section finetune, or sft: synthesise rollouts, keep those that the model believes to
    succeed, imitate them.
    """
    watch: int = 200
    """Real episodes of every evaluation, for watching alone, 0 for none."""
    gap: float | None = 0.2
    """Stop once imagined success exceeds real success by so much and their intervals part, null for never."""
    refresh_every: int = 0
    """Iterations after which the model is trained on with new real episodes of the policy, 0 for never."""
    refresh_episodes: int = 128
    """How many of them join the data."""
    refresh_steps: int = 500
    """How many training steps follow."""
    rounds: int = 5
    """Of sft: how often it synthesises and imitates."""
    synthetic: int = 512
    """Of sft: rollouts a round."""
    imitate_steps: int = 500
    """Of sft: training steps a round."""

    def __post_init__(self):
        if self.gap is not None and self.gap <= 0:
            raise ConfigError(f"imagine.gap is {self.gap}: use a share of episodes such as 0.2, or null never to stop.")
        if min(self.watch, self.refresh_every) < 0 or min(self.refresh_episodes, self.rounds, self.synthetic) < 1:
            raise ConfigError("imagine: watch and refresh_every are at least 0, counts at least 1.")


@dataclass(frozen=True)
class PlanSection(PlanConfig):
    """A look ahead in a world model before every decision; of several, the one that it thinks best of is taken."""

    model: Path | None = None
    """Checkpoint of the world model, null for no planning."""
    candidates: int = 8
    horizon: int = 20


@dataclass(frozen=True)
class EvaluateSection:
    """Success over paired episodes, deterministic and stochastic."""

    policy: Path | None = None
    """Checkpoint."""
    base: Path | None = None
    """Checkpoint of a second policy on the same seeds; the difference is tested. Beside one that plans, the default is
    the same policy without planning.
    """
    instruction: str = ""
    """What the policy is told: empty for what the world asks for, wrong for another of its instructions, or any text; a
    policy that minds the language then fails.
    """
    episodes: int = 200
    """How many in each mode."""
    videos: int = 8
    """How many are filmed, 0 for none."""


@dataclass(frozen=True)
class RankSection:
    """Policies scored in world models and in the simulator, on the same starts."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of independently trained policies."""
    models: tuple[Path, ...] = ()
    """Checkpoints of world models of any kind (default: what worldmodel wrote under the same name and seed)."""
    noise: tuple[str, ...] = ("none", "low", "medium", "high", "random")
    """Levels at which the expert is ranked beside them, [] for none."""
    episodes: int = 200
    """Episodes of every policy in every world."""


@dataclass(frozen=True)
class ServeSection:
    """A policy server."""

    policy: Path | None = None
    """Checkpoint."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback it needs an api_key."""
    port: int = 8000
    """Port to listen on."""
    api_key: str = ""
    """What clients must show, or set the environment's ROBOPOLICY_API_KEY."""


@dataclass(frozen=True)
class DriveSection:
    """A simulated robot in its own process, driven by a policy server."""

    host: str = "127.0.0.1"
    """The server's address."""
    port: int = 8000
    """The server's port."""
    api_key: str = ""
    """The server's key, if it wants one."""
    episodes: int = 10
    """How many are driven."""
    rate: float = 0.0
    """Control steps a second, 0 for the world's own, -1 for as fast as the server answers."""


@dataclass(frozen=True)
class DoctorSection:
    """What to examine."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    policy: Path | None = None
    """Checkpoint (default: what train wrote under the same name and seed)."""
    episodes: int = 20
    """How many demonstrations are replayed."""


@dataclass(frozen=True)
class BenchSection:
    """Which benchmark, and on what."""

    name: str = "sims"
    """One of those above."""
    rounds: int = 13
    """Of sims: interleaved rounds."""
    tasks: tuple[str, ...] = ("push_cube", "pick_place")
    """Of algorithms, ranking and imagination."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of all but sims."""
    methods: tuple[str, ...] = ()
    """Presets (algorithms), checks (mechanisms), arms (edge_of_reach, imagination) or kinds of model (ranking); [] for
    all.
    """
    overrides: tuple[str, ...] = ()
    """Settings for every run, quoted: bench.overrides=['finetune.iterations=10']. What a method sets by itself
    outweighs them.
    """


@dataclass(frozen=True)
class AlgorithmsSection:
    """What to explain."""

    name: str = ""
    """A preset or mechanism, empty for a list of all."""


@dataclass(frozen=True)
class ReportSection:
    """What to report on."""

    run: Path | None = None
    """A run folder."""


@dataclass(frozen=True)
class DemoSection:
    """What the demo runs."""

    recipe: str = "push_t"
    """Name of the recipe."""
    episodes: int = 200
    """Of its judgements."""


@dataclass(frozen=True)
class Config:
    """Every section; a verb reads its own."""

    run: RunSection = field(default_factory=RunSection)
    world: WorldSection = field(default_factory=WorldSection)
    collect: CollectSection = field(default_factory=CollectSection)
    policy: PolicySection = field(default_factory=PolicySection)
    train: TrainSection = field(default_factory=TrainSection)
    finetune: FinetuneSection = field(default_factory=FinetuneSection)
    worldmodel: WorldModelSection = field(default_factory=WorldModelSection)
    imagine: ImagineSection = field(default_factory=ImagineSection)
    plan: PlanSection = field(default_factory=PlanSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    rank: RankSection = field(default_factory=RankSection)
    serve: ServeSection = field(default_factory=ServeSection)
    drive: DriveSection = field(default_factory=DriveSection)
    doctor: DoctorSection = field(default_factory=DoctorSection)
    bench: BenchSection = field(default_factory=BenchSection)
    algorithms: AlgorithmsSection = field(default_factory=AlgorithmsSection)
    report: ReportSection = field(default_factory=ReportSection)
    demo: DemoSection = field(default_factory=DemoSection)
    json: Path | None = None
