"""The one configuration of every verb: sections with their defaults, composed by hydra.

`configs/recipe/<task>.yaml` holds what differs from the defaults for a task, `configs/world/<world>.yaml` names one.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.resources import resource
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.policies.denoising import DenoisingPolicyConfig
from robopolicy.policies.token_configuration import TokenConfig
from robopolicy.training.finetune import FinetuneConfig
from robopolicy.training.fit import FitConfig
from robopolicy.training.pretrain import PretrainConfig
from worldmodels.ensemble import EnsembleConfig
from worldmodels.pixel_networks import PixelDiffusionConfig
from worldmodels.rssm_dynamics import RssmConfig
from worldmodels.video_configuration import VideoConfig

GROUPS = ("recipe", "world")
OUTSIDE = ("gymnasium:", "metaworld/")
"""What names of worlds from outside suites begin with: `world=` takes them as they are."""


@dataclass(frozen=True)
class RunSection:
    """Where results go (root/<verb>/<name>/<seed>), the seed behind every random number, and the device."""

    root: Path = Path("runs")
    name: str = ""
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    fresh: bool = False


@dataclass(frozen=True)
class ImaginationSection:
    """How a world model is lived in: when imagination is cut (the value beyond still counts), and what doubt costs.

    steps: after so many; uncertainty: where a step's exceeds this; quantile: where it exceeds this quantile of the
    uncertainty on held-out data, so that it adapts to the model; penalty: reward lost per unit of uncertainty (MOPO);
    debounce: consecutive steps that must look successful; starts: simulator (paired with real episodes), data, any step
    of the dataset world.data (default: the model's own), or keyframes, those of its successes where progress is made.
    """

    steps: int | None = None
    uncertainty: float | None = None
    quantile: float | None = None
    penalty: float = 0.0
    debounce: int = 1
    starts: Literal["simulator", "data", "keyframes"] = "simulator"

    def __post_init__(self):
        if self.quantile is not None and not 0 <= self.quantile <= 1:
            raise ConfigError(f"world.imagination.quantile is {self.quantile}: it is a share of steps, 0 to 1.")


@dataclass(frozen=True)
class WorldSection:
    """Where a policy acts: a task of ours, metaworld/<task>, gymnasium:<id>, worldmodel with its checkpoint (model), or
    demonstrations with a dataset (data), which are followed as far as the policy agrees with them.
    """

    name: str = "push_cube"
    batch_size: int = 128
    cameras: tuple[str, ...] = ()
    image_size: int = 64
    model: Path | None = None
    data: Path | None = None
    simulator: str = ""
    imagination: ImaginationSection = field(default_factory=ImaginationSection)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations: one share of the episodes at each level of noise, by the expert, a controller or a policy.

    noise: levels by name (none, low, medium, high, random) or as the standard deviation of noise on every action, as a
    share of half its range; controller: dotted path package.module:factory of your own controller.
    """

    episodes: int = 200
    noise: tuple[str, ...] = ("low",)
    controller: str = ""
    policy: Path | None = None
    successes_only: bool = False
    images: Literal["png", "video"] = "png"


@dataclass(frozen=True)
class PolicySection(DenoisingPolicyConfig):
    """What `train` builds: kind diffusion or flow, or kind token, a language model over action tokens.

    A token policy reads `policy.token`, observation_keys, history, chunk and the normalisations; its image patches
    replace the encoder, and what is about chains and denoisers does not concern it.
    """

    token: TokenConfig = field(default_factory=TokenConfig)


@dataclass(frozen=True)
class TrainSection(PretrainConfig):
    """Pre-training by regression on the dataset `data` (default: what collect wrote under the same name and seed)."""

    data: Path | None = None
    episodes: int = 0
    evaluate_episodes: int = 200


@dataclass(frozen=True)
class FinetuneSection(FinetuneConfig):
    """PPO in the denoising chain of `policy` (default: what train wrote under the same name and seed).

    units: how many of the last denoising steps are tuned, null for all; worlds: rows collected in parallel; lora_rank:
    tune adapters of this rank instead of the weights (token policies), 0 for none; teacher: checkpoint of the policy
    that distillation learns from; expert: dotted path of the controller whose states hints begin in, "" for the task's;
    experts: datasets whose successes auxiliaries=[experts] imitates on the side.
    """

    policy: Path | None = None
    teacher: Path | None = None
    expert: str = ""
    experts: tuple[Path, ...] = ()
    units: int | None = None
    train_encoder: bool = True
    lora_rank: int = 0
    worlds: int = 256
    critic_width: int = 256
    critic_depth: int = 2
    evaluate_episodes: int = 200
    videos: int = 8


@dataclass(frozen=True)
class WorldModelSection:
    """A world model of a `kind`, trained on `data` (datasets) plus fresh rollouts of the expert at graded noise and of
    `policies`. Each kind reads the section of its name. styles: how many other looks the same training episodes are
    filmed in as well (Sword), for models that see pictures; examine_rows: episodes that the examination follows;
    examine_steps: single steps it judges the heads on (a diffusion model of pictures takes minutes for the defaults).
    """

    kind: Literal["ensemble", "rssm", "pixel_diffusion", "video"] = "ensemble"
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    rssm: RssmConfig = field(default_factory=RssmConfig)
    pixel_diffusion: PixelDiffusionConfig = field(default_factory=PixelDiffusionConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    data: tuple[Path, ...] = ()
    policies: tuple[Path, ...] = ()
    transitions: int = 100_000
    styles: int = 0
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[str, ...] = ("low", "medium", "high", "random")
    examine_rows: int = 512
    examine_steps: int = 20_000


@dataclass(frozen=True)
class ImagineSection:
    """Fine-tuning inside `model` (default: what worldmodel wrote under the same name and seed), watched in both worlds.

    method: rl, the algorithm of the section finetune, or sft: synthesise rollouts, keep those that the model believes
    to succeed, imitate them; watch: real episodes an evaluation, 0 for none; gap: stop once imagined success exceeds
    real success by so much and their intervals part; refresh_every: iterations after which refresh_episodes real
    episodes of the current policy join the data, and the model is trained on for refresh_steps (0: never); rounds,
    synthetic, imitate_steps: of sft, how often, how many rollouts, how many steps of imitation.
    """

    model: Path | None = None
    method: Literal["rl", "sft"] = "rl"
    watch: int = 200
    gap: float | None = 0.2
    refresh_every: int = 0
    refresh_episodes: int = 128
    refresh_steps: int = 500
    rounds: int = 5
    synthetic: int = 512
    imitate_steps: int = 500

    def __post_init__(self):
        if self.gap is not None and self.gap <= 0:
            raise ConfigError(f"imagine.gap is {self.gap}: use a share of episodes such as 0.2, or null never to stop.")
        if min(self.watch, self.refresh_every) < 0 or min(self.refresh_episodes, self.rounds, self.synthetic) < 1:
            raise ConfigError("imagine: watch and refresh_every are at least 0, counts at least 1.")


@dataclass(frozen=True)
class EvaluateSection:
    """Success of `policy` over paired episodes, in both modes; base: a second policy on the same seeds.

    instruction: what the policy is told, "" for what the world asks for, "wrong" for another of its instructions, or
    any text: a policy that minds the language then fails.
    """

    policy: Path | None = None
    base: Path | None = None
    instruction: str = ""
    episodes: int = 200
    videos: int = 8


@dataclass(frozen=True)
class RankSection:
    """Policies (checkpoints, and the expert at these levels of noise) scored in world models and in reality."""

    policies: tuple[Path, ...] = ()
    models: tuple[Path, ...] = ()
    noise: tuple[str, ...] = ("none", "low", "medium", "high", "random")
    episodes: int = 200


@dataclass(frozen=True)
class ServeSection:
    """A policy server. Binding beyond loopback needs an api_key (or the environment's ROBOPOLICY_API_KEY)."""

    policy: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""


@dataclass(frozen=True)
class DriveSection:
    """A simulated robot in its own process at `rate` control steps a second (0: the world's; -1: as fast as it can)."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    episodes: int = 10
    rate: float = 0.0


@dataclass(frozen=True)
class DoctorSection:
    """What to examine: a dataset and a policy (defaults: what collect and train wrote under the same name and seed)."""

    data: Path | None = None
    policy: Path | None = None
    episodes: int = 20


@dataclass(frozen=True)
class BenchSection:
    """Which benchmark: `sims` in interleaved rounds, `algorithms` on tasks, seeds and methods (() for all),
    `mechanisms` on seeds, where methods are the checks, `edge_of_reach` on seeds, where methods are the arms, `ranking`
    and `imagination` on tasks and seeds, where methods are kinds of model or the arms, and the others on seeds.

    overrides: settings for every run, quoted: bench.overrides=['finetune.iterations=10']. What a method sets by itself
    outweighs them.
    """

    name: str = "sims"
    rounds: int = 13
    tasks: tuple[str, ...] = ("push_cube", "pick_place")
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class AlgorithmsSection:
    """Which preset or mechanism to explain, empty for a list of all."""

    name: str = ""


@dataclass(frozen=True)
class ReportSection:
    """The run folder to report on."""

    run: Path | None = None


@dataclass(frozen=True)
class DemoSection:
    """The recipe that the demo runs, and how many episodes its judgements use."""

    recipe: str = "push_t"
    episodes: int = 200


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


def compose(overrides: list[str]) -> Config:
    """Compose defaults, world, recipe and `key=value` overrides, in this order of growing weight.

    `recipe=path/to/mine.yaml` and `world=path/to/mine.yaml` read your own file. Raises ConfigError naming the key.
    """
    defaults = to_plain(Config())
    store = ConfigStore.instance()
    store.store(name="defaults", node=defaults)
    prepared = [_prepare(override, defaults, store) for override in overrides]
    try:
        with initialize_config_dir(str(resource("configs")), version_base="1.3", job_name="robopolicy"):
            composed = hydra_compose("robopolicy", overrides=prepared)
    except HydraException as error:
        raise ConfigError(f"{error}") from error
    return from_plain(Config, OmegaConf.to_container(composed, resolve=True))  # pyright: ignore[reportArgumentType]


def to_yaml(config: Config, sections: tuple[str, ...]) -> str:
    """Return the given sections as YAML, as saved in a run folder."""
    plain = to_plain(config)
    return OmegaConf.to_yaml(OmegaConf.create({name: plain[name] for name in sections}))


def groups() -> dict[str, list[str]]:
    """Return the names that `recipe=` and `world=` accept."""
    return {group: sorted(path.stem for path in resource("configs", group).glob("*.yaml")) for group in GROUPS}


def describe_sections(names: tuple[str, ...]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (section, its one-line text, [(key, default), ...]) for the help pages."""
    config, described = Config(), []
    for name in names:
        section = getattr(config, name)
        text = " ".join((type(section).__doc__ or "").split("\n\n")[0].split())
        rows = [(item.name, str(to_plain(getattr(section, item.name)))) for item in dataclasses.fields(section)]
        described.append((name, text, rows))
    return described


def _prepare(override: str, defaults: Mapping[str, Any], store: ConfigStore) -> str:
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key == "world" and value.startswith(OUTSIDE):
        return f"++world.name={value}"
    if key in GROUPS:
        return f"{key}={_group_option(key, value, store)}"
    node: Any = defaults
    for depth, part in enumerate(key.split(".")):
        if not isinstance(node, Mapping) or (part not in node and not _is_open(key.split(".")[:depth])):
            place = ".".join(key.split(".")[:depth])
            known = [f"{place}.{name}" if place else name for name in node] if isinstance(node, Mapping) else []
            raise ConfigError(f"Unknown configuration key '{key}'.{did_you_mean(key, known)}")
        node = node.get(part, {})
    return f"++{key}={value}"


def _is_open(path: list[str]) -> bool:
    """Whether the section at `path` takes keys of the user's own (a dict field)."""
    kind: Any = Config
    for part in path:
        item = (
            {entry.name: entry for entry in dataclasses.fields(kind)}.get(part)
            if dataclasses.is_dataclass(kind)
            else None
        )
        if item is None:
            return not dataclasses.is_dataclass(kind)
        kind = item.type if not isinstance(item.type, str) else Any
    return not dataclasses.is_dataclass(kind)


def _group_option(group: str, value: str, store: ConfigStore) -> str:
    if not value.endswith((".yaml", ".yml")):
        known = groups()[group]
        if value not in known:
            raise ConfigError(
                f"{group}={value} is not known.{did_you_mean(value, known)} Or give a path to a .yaml file."
            )
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(f"{group}={value}: there is no such file.")
    package = "_global_" if group == "recipe" else group
    store.store(group=group, name=path.stem, package=package, node=OmegaConf.to_container(OmegaConf.load(path)))
    return path.stem
