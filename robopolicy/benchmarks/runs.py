"""Shared parts of benchmarks: recordings, pre-training, world models and fine-tuning, each in its own run folder.

An interrupted benchmark resumes where it stopped, and each of its runs can be examined separately.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.building.policies import choose_device, load_trainable
from robopolicy.building.worlds import build_collection_world, build_critic
from robopolicy.configuration import Config, compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.data.record import record
from robopolicy.rl.registry import Need
from robopolicy.runs import is_complete, output
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune as learn
from robopolicy.verbs import collect, finetune, train, worldmodel
from sims.experts import Noise, NoisyController
from sims.registry import load_task

TOKEN = (
    "policy.kind=token",
    "policy.token.bins=17",
    "policy.token.depth=3",
    "train.batch_size=128",
    "train.fit.learning_rate=1e-3",
)

COARSE = ("policy.token.bins=7", "policy.token.width=64", "policy.token.depth=2", "policy.token.feed_forward=128")
"""Of a token policy with few bins and a small model: it explores more, and learns within a dozen iterations."""

MASKED = "policy.token.decoding=masked", "train.fit.steps=300"
"""Of a token policy that decodes several tokens in one pass: of a chunk's eight, three passes in either schedule."""

LESS_NOISE = "policy.min_sampling_std=0.05", "policy.min_logprob_std=0.05"
"""Of flows that learn their noise, within bounds above these."""


@dataclass(frozen=True)
class Changes:
    """Settings of a pre-trained policy or a world model that differ from the recipes.

    always: settings for every task; tasks: task -> further settings.
    """

    always: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, task: str) -> tuple[str, ...]:
        """Return the settings that differ from the recipe of a task."""
        return *self.always, *self.tasks.get(task, ())


EXAMINED = "worldmodel.validation_episodes=64", "worldmodel.validation_steps=1000"
IMAGE_MODELS = {
    "pixel_diffusion": (
        "worldmodel.kind=pixel_diffusion",
        "world.cameras=[top]",
        "world.image_size=32",
        "worldmodel.config.edm.steps=1",
        "worldmodel.config.max_noise_fraction=1.0",
        "worldmodel.config.temperature=0.0",
        "worldmodel.config.unroll=4",
        "worldmodel.fit.steps=2500",
        "worldmodel.fit.learning_rate=1e-3",
        "worldmodel.transitions=20000",
        *EXAMINED,
    ),
    "video": (
        "worldmodel.kind=video",
        "world.cameras=[top,front]",
        "worldmodel.fit.steps=1500",
        "worldmodel.fit.learning_rate=1.5e-3",
        "worldmodel.transitions=20000",
        *EXAMINED,
    ),
}
"""Settings of world models that imagine images, each a quarter to half an hour of training. Where little is left to
chance, one step of diffusion (the expected image) is as true as three, twice as fast, and all that need be learned.
"""

TRANSFORMER = (
    "policy.denoiser=transformer",
    "policy.width=128",
    "policy.depth=4",
    "policy.finetuned_steps=null",
    "train.fit.steps=3000",
    "train.evaluate_episodes=0",
)
"""Diffusion policies as they are usually built, larger than those of our recipes."""

FEWER = {
    "push_cube": ("collect.episodes=40",),
    "pick_place": ("collect.episodes=6",),
    "push_t": ("collect.episodes=300",),
}
MORE = {
    "push_cube": ("collect.episodes=500",),
    "pick_place": ("collect.episodes=25",),
    "push_t": ("collect.episodes=3000", "train.fit.steps=12000"),
}
"""Settings by task."""

NOISY_LABELS = {
    "push_cube_pixels": (
        "collect.episodes=300",
        "collect.noise=[0.1]",
        'collect.label_policy=""',
        "train.fit.steps=3000",
    ),
}
"""What its recipe was before its expert's clean labels; the rows of `bench inference` learned from it."""

INSTRUCTED = "collect.episodes=800", "train.fit.steps=1600"
"""Of policies that read the instructions of push_choice: how many demonstrations and steps."""
READS = (
    "policy.kind=diffusion",
    "policy.prediction_steps=4",
    "policy.sampling_steps=5",
    "policy.min_sampling_std=0.3",
    "policy.min_logprob_std=0.3",
    "policy.text_encoder=film",
    *INSTRUCTED,
)
"""A diffusion policy that reads instructions, for push_choice, whose recipe has a token policy."""
ALL_WORDS = "world.options.phrasing=all"

BASES = {
    "diffusion": Changes(),
    "flow": Changes(("policy.kind=flow",)),
    "token": Changes((*TOKEN, "train.fit.steps=600"), {"pick_place": ("collect.episodes=150", "train.fit.steps=1500")}),
    "few": Changes((), FEWER),
    "many": Changes((), MORE),
    "hundred_steps": Changes((*TRANSFORMER, "policy.sampling_steps=100"), NOISY_LABELS),
    "ten_steps": Changes(("policy.sampling_steps=10", "policy.finetuned_steps=null"), NOISY_LABELS),
    "ten_steps_of_a_transformer": Changes((*TRANSFORMER, "policy.sampling_steps=10")),
    "hidden_words": Changes(("policy.word_dropout=0.1",)),
    "novice": Changes(("train.fit.steps=60",)),
    "token_novice": Changes((*TOKEN, "train.fit.steps=150")),
    "small_token": Changes((*TOKEN, *COARSE, "train.fit.steps=300")),
    "small_token_novice": Changes((*TOKEN, *COARSE, "train.fit.steps=100")),
    "masked_even": Changes((*TOKEN, *COARSE, *MASKED, "policy.token.decode_steps=3")),
    "masked_ascending": Changes((*TOKEN, *COARSE, *MASKED, "policy.token.decode_schedule=ascending")),
    "coarse_token": Changes((*TOKEN, COARSE[0], "train.fit.steps=800")),
    "matching": Changes(("policy.kind=flow", "policy.likelihood=matching")),
    "words": Changes((*READS, ALL_WORDS)),
    "mostly_plain": Changes((*READS, ALL_WORDS, "world.options.plain_share=0.98")),
    "rarely_plain": Changes((*READS, ALL_WORDS, "world.options.plain_share=0.01")),
    "mostly_plain_token": Changes((*COARSE, *INSTRUCTED, ALL_WORDS, "world.options.plain_share=0.9")),
    "reader": Changes(READS),
    "noisy_flow": Changes(("policy.kind=flow", "policy.flow_noise=learned", *LESS_NOISE)),
}
"""Pre-trained policies by name. few, many: how many demonstrations; novice: training stopped while success is rare.
Token policies need more than the dozen demonstrations of pick_place. hundred_steps, ten_steps...: of denoising.
hidden_words: words are dropped at random, so that a policy tolerates words that it never saw. coarse_token: a teacher
with the tokens of small_token; matching: a flow that scores any action. Of push_choice:
words heard all wordings equally often, mostly_plain and rarely_plain the plain one in 98 or 1 % of the episodes
(the token policy in 90 %), reader that one alone.
"""

RECIPES = {
    "push_cube_32px": ("recipe=push_cube_pixels", "world.image_size=32", "train.fit.steps=1500"),
    "push_cube_moving": ("recipe=push_cube", "world.name=push_cube_moving"),
    "stack": ("recipe=pick_place", "world.name=stack", "collect.episodes=40"),
}
"""Settings of tasks that have no recipe of their own."""

FORMER_PPO = {
    "push_t": (
        "finetune.world_options.substeps=null",
        "finetune.scored_steps=0",
        "finetune.rollout_length=15",
        "finetune.minibatch=2048",
        "finetune.critic_activation=mish",
        "finetune.iterations=100",
        "finetune.checkpoint_every=10",
        "finetune.evaluate_every=10",
    ),
    "pick_place": (
        "finetune.world_options.substeps=null",
        "finetune.scored_steps=0",
        "finetune.rollout_length=20",
        "finetune.minibatch=2048",
        "finetune.critic_warmup=3",
        "finetune.critic_activation=mish",
        "finetune.iterations=100",
        "finetune.checkpoint_every=10",
        "finetune.evaluate_every=10",
    ),
}
"""PPO settings of the published tables, for recipes that have faster ones now. Only the benchmark `recipes` runs a
recipe as it is.
"""

LOG = ("collect.episodes=512",)
"""Of a base's own episodes; bench.overrides can say otherwise."""


@dataclass(frozen=True)
class Variant:
    """Settings of fine-tuning. base: name of the pre-trained policy (`BASES`) from which it starts; settings: of
    `finetune`.
    """

    base: str
    settings: tuple[str, ...] = ()


LONGER = (
    "finetune.target_success=null",
    "finetune.evaluate_every=0",
    "finetune.videos=0",
    "finetune.world_options.substeps=5",
    "finetune.algorithm=grpo",
    "finetune.rewards=[success_only]",
    "finetune.controllers=[]",
    "finetune.iterations=60",
    "finetune.groups=32",
    "finetune.group_size=8",
    "finetune.epochs=3",
    "finetune.minibatch=8192",
    "finetune.learning_rate=6e-4",
    "finetune.clip=0.05",
    "finetune.clip_base=0.05",
    "finetune.target_kl=0.05",
)
"""Settings of policies tuned on push_choice."""

TUNED_BASES = {
    "warm": Variant("diffusion", ("finetune.target_success=0.7", "finetune.evaluate_every=1", "finetune.videos=0")),
    "red": Variant("reader", (*LONGER, "world.options.instructions=push the red*")),
    "blue": Variant("reader", (*LONGER, "world.options.instructions=push the blue*")),
    "both": Variant("reader", LONGER),
    "fluent": Variant("words", (*LONGER, ALL_WORDS)),
}
"""Policies that have been fine-tuned already: warm as far as this; of push_choice, red and blue on two instructions,
both on all four, each as long, and fluent on all in all wordings.
"""


@dataclass(frozen=True)
class Outcome:
    """Results of a fine-tuning run. result: result.json of base and tuned policy; records: metrics by iteration."""

    result: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


def recipe_of(task: str) -> tuple[str, ...]:
    """Return the settings of a task's own recipe."""
    return RECIPES.get(task, (f"recipe={task}",))


def settings_of(config: Config, root: Path, task: str, seed: int, recipe: str = "") -> list[str]:
    """Return the settings that all runs of a benchmark on a task share; recipe: instead of the task's own."""
    recipe_settings = (f"recipe={recipe}",) if recipe else recipe_of(task)
    recipe_settings = *recipe_settings, *FORMER_PPO.get(recipe or task, ())
    run = f"run.root={root / task}", f"run.seed={seed}", f"run.threads={config.run.threads}"
    return [*recipe_settings, *run, *config.bench.overrides]


def pipeline_overrides(settings: Sequence[str]) -> str:
    """Return the argument that gives `settings` to every stage of a pipeline."""
    return f"pipeline.overrides=[{','.join(map(repr, settings))}]"


def seen_by(*cameras: str) -> tuple[str, ...]:
    """Return the settings of a policy that reads its own joints and these cameras only."""
    keys = ",".join(("observation.state", *(f"observation.images.{camera}" for camera in cameras)))
    return f"world.cameras=[{','.join(cameras)}]", f"policy.observation_keys=[{keys}]"


def demonstrations(root: Path, task: str, seed: int, name: str = "data") -> Path:
    """Return the dataset that `pretrained` records under root/task; name: of its run."""
    return root / task / "collect" / name / str(seed) / "dataset"


def recorded_for(task: str, base: str) -> tuple[str, list[str]]:
    """Return the run name of a base policy's demonstrations, and the settings of their recording."""
    settings = [setting for setting in BASES[base].of(task) if setting.startswith(("collect.", "world.options."))]
    return f"data_{base}" if settings else "data", settings


def pretrained(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the run folder of a base policy under root/task; missing recording and training are run."""
    recording, recording_settings = recorded_for(task, name)
    base = root / task / "train" / name / str(seed)
    if not is_complete(base):
        shared_settings = settings_of(config, root, task, seed)
        output.print(Rule(f"[bold]{task}, {name}, seed {seed}", align="left"))
        collect.run(compose([*shared_settings, f"run.name={recording}", *recording_settings]))
        data = demonstrations(root, task, seed, recording)
        train.run(compose([*shared_settings, f"run.name={name}", *BASES[name].of(task), f"train.data={data}"]))
    return base


def logged(config: Config, root: Path, task: str, name: str, seed: int) -> Path:
    """Return the dataset of a base policy's own episodes with exploration noise, recorded if it is missing."""
    run_folder = root / task / "collect" / f"log_{name}" / str(seed)
    if not is_complete(run_folder):
        policy = pretrained(config, root, task, name, seed) / "checkpoint"
        shared_settings = settings_of(config, root, task, seed)
        collect.run(compose([*LOG, *shared_settings, f"collect.policy={policy}", f"run.name=log_{name}"]))
    return run_folder / "dataset"


def modelled(config: Config, root: Path, task: str, label: str, seed: int, settings: Sequence[str]) -> Path:
    """Return the run folder of a world model under root/task, trained with `settings` if it is missing.

    A model with cameras records its own demonstrations; others share the demonstrations of the policies.
    """
    folder = root / task / "worldmodel" / label / str(seed)
    if not is_complete(folder):
        shared_settings = settings_of(config, root, task, seed)
        camera_settings = [setting for setting in settings if setting.startswith("world.")]
        output.print(Rule(f"[bold]{task}, world model {label}, seed {seed}", align="left"))
        data = f"data_{label}" if camera_settings else "data"
        collect.run(compose([*shared_settings, *camera_settings, f"run.name={data}"]))
        recordings = demonstrations(root, task, seed, data)
        arguments = [f"run.name={label}", f"worldmodel.data=[{recordings}]", "worldmodel.include_base=false"]
        worldmodel.run(compose([*shared_settings, *arguments, *settings]))
    return folder


def run_variant(config: Config, root: Path, task: str, label: str, variant: Variant, seed: int) -> Outcome:
    """Return the outcome of fine-tuning a variant, after running the missing steps under root/task."""
    run_folder = root / task / "finetune" / label / str(seed)
    if not is_complete(run_folder):
        if variant.base in TUNED_BASES:
            before = TUNED_BASES[variant.base]
            run_variant(config, root, task, variant.base, before, seed)
            base, imitated = root / task / "finetune" / variant.base / str(seed), before.base
        else:
            base, imitated = pretrained(config, root, task, variant.base, seed), variant.base
        output.print(Rule(f"[bold]{task}, {label}, seed {seed}", align="left"))
        experts = demonstrations(root, task, seed, recorded_for(task, imitated)[0])
        arguments = f"finetune.policy={base / 'checkpoint'}", f"finetune.expert_datasets=[{experts}]"
        overrides = [f"run.name={label}", *arguments, *variant.settings]
        finetune.run(compose([*settings_of(config, root, task, seed), *overrides]))
    return Outcome(read_json(run_folder / "result.json"), RunFolder(run_folder).metrics())


def few_iterations(config: Config, base: Path, folder: Path, seed: int) -> Mapping[str, Any]:
    """Fine-tune the checkpoint `base` with config and without evaluation; return the metrics of the last iteration."""
    section, device = config.finetune, choose_device(config.run)
    learning = narrowed(FinetuneConfig, section)
    policy = load_trainable(base, config.lerobot, device)
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    world = build_collection_world(config, policy, device)
    values = Need.CRITIC in learning.resolved().needs
    critic = build_critic(world, section, seed).to(device) if values else None
    run = RunFolder(folder)
    learn(policy, critic, world, learning, run, seed=seed)
    world.close()
    return run.metrics()[-1]


def chosen_from(config: Config, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return bench.only, by default all of `known`; raises ConfigError for an unknown name."""
    for name in config.bench.only:
        if name not in known:
            raise ConfigError(f"bench.only: there is no '{name}'.{did_you_mean(name, known)}")
    return config.bench.only or tuple(known)


def each_task(config: Config, measure: Callable[[str, int], Any]) -> dict[str, dict[str, Any]]:
    """Return {task: {seed: measure(task, seed)}} of bench.tasks and bench.seeds."""
    seeds = config.bench.seeds
    return {task: {str(seed): measure(task, seed) for seed in seeds} for task in config.bench.tasks}


def each_row(
    config: Config, root: Path, names: Sequence[str], measure: Callable[[Config, Path, str, str, int], Any]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {task: {name: {seed: result of `measure`}}} of bench.tasks, `names` and bench.seeds."""
    seeds = config.bench.seeds
    return {
        task: {name: {str(seed): measure(config, root, task, name, seed) for seed in seeds} for name in names}
        for task in config.bench.tasks
    }


def each_seed(measure: Callable[[int, Path], dict[str, Any]]) -> Callable[[Config, Path], dict[str, Any]]:
    """Return the results of a benchmark that is measured seed by seed.

    measure: (seed, folder for its files) -> results; they are stored in <root>/<seed>.json and measured once.
    """

    def benchmark(config: Config, root: Path) -> dict[str, Any]:
        results = {}
        for seed in config.bench.seeds:
            path = root / f"{seed}.json"
            if not path.exists():
                write_json(path, measure(seed, root / str(seed)))
            results[str(seed)] = read_json(path)
        return {"seeds": results}

    return benchmark


def expert(world: World, noise: float, seed: int) -> NoisyController:
    """Return the scripted expert of the task that `world` simulates, with Gaussian noise."""
    return NoisyController(load_task(world.spec.name).expert(), Noise(gaussian=noise), seed, world.spec.action)


def expert_episodes(world: World, levels: Sequence[float], episodes: int, seed: int) -> Episodes:
    """Return `episodes` of the scripted expert at each noise level, failures included, and close the world."""
    parts: list[Episodes] = []
    for level in levels:
        actor = expert(world, level, derive_seed(seed, f"noise {level}"))
        parts.append(record(world, actor, episode_seeds(seed, f"recorded/{level}", episodes)))
    world.close()
    return Episodes.concatenate(parts)
