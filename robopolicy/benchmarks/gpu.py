"""Speed of a GPU next to the CPU, in minutes: physics, fine-tuning, a SmolVLA, world models, inference.

Parts are measured one after the other, each row is stored at once, and after eight minutes the remaining rows are
listed and skipped; the same command then measures them. A row that fails is reported with its reason, and the others
continue. Policies are hardly trained, so episodes last to their time limit. CPU rows use run.threads threads (0: all
cores). Without a CUDA device only the CPU rows are measured.
"""

import gc
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks import full_size, tiny_vla
from robopolicy.benchmarks.runs import chosen_from, few_iterations
from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import in_one_line
from robopolicy.core.examples import example_observation
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.storage import read_json, write_json
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.inference.comparison import time_decisions
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.runs import RESULT, is_complete, output
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from robopolicy.verbs import collect, train
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.registry import load_task
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import recorded_starts
from worldmodels.protocol import LearnedModel
from worldmodels.registry import WORLD_MODELS

SECONDS = 480.0
"""Time after which no further row begins."""
TRANSFORMER = (
    "policy.denoiser=transformer",
    "policy.width=128",
    "policy.depth=4",
    "policy.sampling_steps=10",
    "policy.finetuned_steps=null",
)
"""A diffusion policy as they are usually built, for the part inference."""
CAMERA = "top"
CHUNK = 8
"""Control steps of a call in the part physics."""
ONCE = (
    "finetune.critic_warmup=0",
    "finetune.evaluate_every=0",
    "finetune.target_kl=null",
)


@dataclass(frozen=True)
class Model:
    """A world model of the part world_models.

    recipe: of its data; cpu, gpu: training steps, and environments in imagination; settings: of the model.
    """

    recipe: str
    cpu: tuple[int, int]
    gpu: tuple[int, int]
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Size:
    """Sizes of the measurements.

    native, warp: environments of the part physics; tasks: its scenes; rounds: repetitions of short timings; states,
    cameras: (environments, policy calls of a rollout, minibatch), of states as on a CPU and as for a GPU; vla: the same
    on CPU and GPU; tiny_vla: a tiny SmolVLA in place of a full-size one; models: kinds of world model; rows:
    observations of a policy call; episodes, steps: of the policies' imitation, whose weights do not change the speed.
    """

    native: tuple[int, ...] = (256, 4096)
    warp: tuple[int, ...] = (256, 1024, 4096, 16384)
    tasks: tuple[str, ...] = ("push_t", "pick_place")
    rounds: int = 3
    states: tuple[tuple[int, int, int], ...] = ((256, 15, 2048), (4096, 4, 8192))
    cameras: tuple[int, int, int] = (256, 15, 2048)
    vla: tuple[tuple[int, int, int], ...] = ((4, 1, 4), (32, 8, 32))
    tiny_vla: bool = False
    models: Mapping[str, Model] = field(
        default_factory=lambda: {
            "ensemble": Model("push_t", (100, 1024), (100, 1024)),
            "pixel_diffusion": Model("push_t_pixels", (4, 16), (50, 256)),
        }
    )
    rows: tuple[int, ...] = (1, 64)
    engines: tuple[str, ...] = ("reference", "lean", "compiled")
    episodes: int = 16
    steps: int = 20


FULL = Size()
TINY = Size(
    native=(4,),
    warp=(4,),
    tasks=("push_t",),
    rounds=1,
    states=((8, 2, 16), (8, 2, 16)),
    cameras=(4, 2, 8),
    vla=((2, 1, 2), (2, 1, 2)),
    tiny_vla=True,
    models={
        "ensemble": Model("push_t", (2, 4), (2, 4)),
        "pixel_diffusion": Model("push_t_pixels", (1, 2), (1, 2), ("worldmodel.config.size=tiny",)),
    },
    rows=(1,),
    engines=("reference", "lean"),
    episodes=4,
    steps=4,
)

Row = dict[str, Any]
"""rate: what is compared, a second; other numbers, or error: why there is none."""


@dataclass(frozen=True)
class Lab:
    """Inputs shared by all parts. gpu: the CUDA device, None without one."""

    config: Config
    root: Path
    size: Size
    gpu: torch.device | None

    @property
    def devices(self) -> dict[str, torch.device]:
        """The CPU, and the GPU if there is one."""
        return {"CPU": torch.device("cpu"), **({} if self.gpu is None else {"GPU": self.gpu})}

    def composed(self, recipe: str, *settings: str) -> Config:
        """Return the configuration of a recipe with these settings."""
        run = f"run.root={self.root / 'runs'}", f"run.threads={self.config.run.threads}"
        return compose([f"recipe={recipe}", *run, *settings, *self.config.bench.overrides])

    def data(self, recipe: str) -> Path:
        """Return demonstrations of the recipe, recorded if they are missing."""
        folder = self.root / "runs" / "collect" / recipe / "0"
        if not (folder / RESULT).exists():
            collect.run(self.composed(recipe, f"run.name={recipe}", f"collect.episodes={self.size.episodes}"))
        return folder / "dataset"

    def base(self, recipe: str, name: str, *settings: str) -> Path:
        """Return the checkpoint of a hardly trained policy."""
        folder = self.root / "runs" / "train" / name / "0"
        if not is_complete(folder):
            given = f"run.name={name}", "run.device=cpu", f"train.data={self.data(recipe)}"
            short = f"train.fit.steps={self.size.steps}", "train.evaluate_episodes=0"
            train.run(self.composed(recipe, *given, *short, *settings))
        return folder / "checkpoint"


Measures = dict[str, Callable[[], Row]]
"""Label -> what measures its row. Rows with the same text before the colon are compared with their first one."""


def physics(lab: Lab) -> Measures:
    """Measure control steps with random actions, including observations and rewards, with native and GPU physics."""
    measures: Measures = {}
    engines = {"native": lab.size.native} | ({"warp": lab.size.warp} if lab.gpu is not None else {})
    for task in lab.size.tasks:
        for engine, counts in engines.items():
            for count in counts:
                label = f"{task}: {engine}, {count:,} environments"
                measures[label] = lambda task=task, engine=engine, count=count: played(lab, task, engine, count)
    return measures


def played(lab: Lab, name: str, engine: str, count: int) -> Row:
    """Return physics steps per second, seconds until the first chunk (warp compiles), and the largest differences of
    the state between two equal runs, and from native physics.
    """
    task = load_task(name)
    began = time.perf_counter()
    worlds = {engine: MujocoWorld(task, count, terminate_on_success=False, physics=engine)}
    compared = count == min(lab.size.warp) and engine != "native"
    if compared:
        worlds["native"] = MujocoWorld(task, count, terminate_on_success=False)
    actions = np.random.default_rng(0).uniform(-1, 1, (2 * lab.size.rounds, count, CHUNK, *task.action.shape))
    first = _states(worlds[engine], actions[0])
    row: Row = {"rate": 0.0, "seconds until ready": time.perf_counter() - began}
    row["difference of a repetition"] = float(np.abs(first - _states(worlds[engine], actions[0])).max())
    if compared:
        native = np.abs(first - _states(worlds["native"], actions[0]))
        row["median difference from native"] = float(np.median(native.max(axis=1)))
    seconds = []
    for chunk in actions[1:]:
        start = time.perf_counter()
        worlds[engine].step(chunk)
        seconds.append(time.perf_counter() - start)
    row["rate"] = count * CHUNK * task.substeps / min(seconds)
    for world in worlds.values():
        world.close()
    return row


def _states(world: MujocoWorld, actions: np.ndarray) -> np.ndarray:
    """Return the states [B, n] after actions [B, C, A] from the same starts."""
    world.reset(seeds=np.arange(world.batch_size))
    world.step(actions)
    return world.snapshot().arrays["state"]


def states(lab: Lab) -> Measures:
    """Measure an iteration of PPO on push_t: native physics and CPU learner, native and GPU learner, warp and GPU
    learner.
    """
    (small, large), recipe = lab.size.states, "push_t"
    rows = {f"{recipe}: native physics, CPU learner, {small[0]:,} environments": ("cpu", "native", small)}
    if lab.gpu is not None:
        for engine, sizes in (("native", small), ("native", large), ("warp", large)):
            label = f"{recipe}: {engine} physics, GPU learner, {sizes[0]:,} environments"
            rows[label] = "cuda", engine, sizes
    return {
        label: lambda device=device, engine=engine, sizes=sizes: iterated(lab, recipe, device, sizes, engine)
        for label, (device, engine, sizes) in rows.items()
    }


def cameras(lab: Lab) -> Measures:
    """Measure an iteration of PPO with a camera of 64 pixels; images are rendered by MuJoCo (EGL) in all rows."""
    recipe, sizes = "push_t_pixels", lab.size.cameras
    rows = {f"{recipe}: native physics, CPU learner": ("cpu", "native")}
    if lab.gpu is not None:
        rows |= {f"{recipe}: {engine} physics, GPU learner": ("cuda", engine) for engine in ("native", "warp")}
    return {
        label: lambda device=device, engine=engine: iterated(lab, recipe, device, sizes, engine)
        for label, (device, engine) in rows.items()
    }


def iterated(lab: Lab, recipe: str, device: str, sizes: tuple[int, int, int], engine: str) -> Row:
    """Return action chunks per second in the third iteration of fine-tuning, collection and update included."""
    base = lab.base(recipe, recipe)
    physics_setting, iterations = f"world.options.physics={engine}", "finetune.iterations=3"
    return _iteration(lab, recipe, base, device, sizes, physics_setting, iterations)


def _iteration(lab: Lab, recipe: str, base: Path, device: str, sizes: tuple[int, int, int], *settings: str) -> Row:
    count, calls, minibatch = sizes
    numbers = f"finetune.num_envs={count}", f"finetune.rollout_length={calls}", f"finetune.minibatch={minibatch}"
    config = lab.composed(recipe, f"run.device={device}", *ONCE, *numbers, *settings)
    folder = lab.root / "iterations"
    shutil.rmtree(folder, ignore_errors=True)
    metrics = few_iterations(config, base, folder, 0)
    shutil.rmtree(folder, ignore_errors=True)
    seconds = metrics["seconds_collect"], metrics["seconds_update"]
    return {"rate": count * calls / sum(seconds), "seconds collecting": seconds[0], "seconds learning": seconds[1]}


def smolvla(lab: Lab) -> Measures:
    """Measure an iteration of PPO on a SmolVLA with random weights; the CPU row collects and trains on fewer chunks."""
    small, large = lab.size.vla
    rows: dict[str, tuple[str, tuple[int, int, int], tuple[str, ...]]] = {"SmolVLA: CPU, fp32": ("cpu", small, ())}
    if lab.gpu is not None:
        rows["SmolVLA: GPU, fp32"] = "cuda", large, ()
        rows["SmolVLA: GPU, bf16"] = "cuda", large, ("finetune.precision=bf16",)
    return {
        label: lambda device=device, sizes=sizes, settings=settings: _vla_iteration(lab, device, sizes, settings)
        for label, (device, sizes, settings) in rows.items()
    }


def _vla_iteration(lab: Lab, device: str, sizes: tuple[int, int, int], settings: tuple[str, ...]) -> Row:
    folder = lab.root / "smolvla"
    once = "finetune.epochs=1", "finetune.iterations=2", *settings
    if lab.size.tiny_vla:
        recipe = "push_t_pixels"
        path = folder / "smolvla"
        if not path.exists():
            tiny_vla.write_tiny("smolvla", folder, lab.data(recipe), IMAGE_PREFIX + CAMERA, tiny_vla.Sizes(), 0)
        return _iteration(lab, recipe, path, device, sizes, *once)
    if not (folder / full_size.WRITTEN).exists():
        full_size.write_policy("smolvla", folder, lab.gpu or "cpu")
        (folder / full_size.WRITTEN).touch()
    return _iteration(lab, "none", folder, device, sizes, *full_size.SCENE, *once)


def world_models(lab: Lab) -> Measures:
    """Training steps and imagined control steps of a model of states and one of images."""
    measures: Measures = {}
    for kind, known in lab.size.models.items():
        sizes = {"CPU": known.cpu, "GPU": known.gpu}
        for place, measure in enumerate((_trained, _imagined)):
            for name, device in lab.devices.items():
                count = sizes[name][place]
                label = (f"{kind}, training: {name}", f"{kind}, imagination: {name}, {count:,} environments")[place]
                measures[label] = lambda measure=measure, kind=kind, device=device, count=count: measure(
                    lab, kind, device, count
                )
    return measures


def _model(lab: Lab, kind: str, device: torch.device) -> tuple[LearnedModel, Episodes]:
    """Return an untrained world model and the demonstrations."""
    known = lab.size.models[kind]
    config = lab.composed(known.recipe, f"worldmodel.kind={kind}", *known.settings)
    episodes = read_dataset(lab.data(known.recipe), cameras=config.world.cameras)
    world = build_world(config.world, batch_size=1)
    model = WORLD_MODELS.builds(kind).build(config.worldmodel.config, world.spec, episodes, 0).to(device)
    world.close()
    return model, episodes


def _trained(lab: Lab, kind: str, device: torch.device, count: int) -> Row:
    """Return training steps a second of the model's first stage."""
    model, episodes = _model(lab, kind, device)
    part, _ = next(iter(model.stages().values()))
    generators = Generators(0, device)
    batches = part.batches(episodes, generators["batches"])
    for steps in (max(1, count // 10), count):  # the first warms up
        start = time.perf_counter()
        fit(part, batches, FitConfig(steps=steps, log_every=10_000), generators, label=kind)
    return {"rate": count / (time.perf_counter() - start)}


@torch.no_grad()
def _imagined(lab: Lab, kind: str, device: torch.device, count: int) -> Row:
    """Return imagined control steps a second."""
    model, episodes = _model(lab, kind, device)
    world = ImaginedWorld(model.eval(), recorded_starts(episodes, model.context), count)
    actions = np.random.default_rng(0).uniform(-1, 1, (count, CHUNK, world.spec.action.size))
    rates: list[float] = []
    for _ in range(2):  # the first warms up
        world.reset(seeds=np.arange(count))
        start = time.perf_counter()
        valid = world.step(actions).valid.sum()
        rates.append(float(valid) / (time.perf_counter() - start))
    return {"rate": rates[-1]}


def inference(lab: Lab) -> Measures:
    """Measure policy calls of a diffusion transformer with ten steps; on a GPU `compiled` is one CUDA graph."""
    return {
        f"{count} at once: {name}, {engine}": lambda count=count, device=device, engine=engine: _called(
            lab, count, device, engine
        )
        for count in lab.size.rows
        for name, device in lab.devices.items()
        for engine in lab.size.engines
    }


def _called(lab: Lab, count: int, device: torch.device, engine: Any) -> Row:
    base = lab.base("push_t", "transformer", *TRANSFORMER)
    policy = with_engine(load_policy(base, device), InferenceConfig(engine))
    observation = example_observation(policy.spec, count, torch.Generator().manual_seed(0), device)
    timing = time_decisions({engine: policy}, observation, 10 * lab.size.rounds)[engine]
    return {"rate": count / timing.median, **timing.to_json()}


PARTS: dict[str, Callable[[Lab], Measures]] = {
    "physics": physics,
    "states": states,
    "cameras": cameras,
    "smolvla": smolvla,
    "world_models": world_models,
    "inference": inference,
}
UNITS = {
    "physics": "physics steps / s",
    "states": "decisions / s",
    "cameras": "decisions / s",
    "smolvla": "decisions / s",
    "world_models": "steps / s",
    "inference": "policy calls x rows / s",
}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"card", "size", "parts": {part: {label: row}}, "left_out"}, measuring rows that are not stored."""
    device = choose_device(config.run)
    gpu = device if device.type == "cuda" else None
    name = "tiny" if config.bench.tiny else "full"
    card = "" if gpu is None else torch.cuda.get_device_name(gpu)
    if gpu is None:
        output.print("There is no CUDA device: only the CPU rows are measured.")
    lab = Lab(config, root / name, TINY if config.bench.tiny else FULL, gpu)
    todo = [
        (part, label, measure) for part in chosen_from(config, PARTS) for label, measure in PARTS[part](lab).items()
    ]
    parts: dict[str, dict[str, Row]] = {part: {} for part, _, _ in todo}
    left_out, began = [], time.monotonic()
    with progress("bench gpu", len(todo)) as advance:
        for part, label, measure in todo:
            path = lab.root / "rows" / (card or "cpu") / part / f"{label.replace(': ', '_').replace(' ', '_')}.json"
            if not path.exists() and time.monotonic() - began > SECONDS:
                left_out.append(f"{part}, {label}")
            else:
                parts[part][label] = _stored(path, measure)
            advance(note=label)
    return {"card": card, "size": name, "threads": torch.get_num_threads(), "parts": parts, "left_out": left_out}


def _stored(path: Path, measure: Callable[[], Row]) -> Row:
    """Return a row, measured and stored if it is missing; a row that fails is not stored, and its reason is printed."""
    if path.exists():
        return read_json(path)
    try:
        row = measure()
        write_json(path, row)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {in_one_line(str(error))}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per part: rate, ratio to the first row with the same text before the colon, other numbers."""
    found = [
        Table(f"{part.replace('_', ' ')} on {figures['card'] or 'the CPU'}", _header(part), _lines(rows))
        for part, rows in figures["parts"].items()
        if rows
    ]
    if figures["left_out"]:
        lines = [[each] for each in figures["left_out"]]
        found.append(Table("Left out after eight minutes; the same command measures them", ["row"], lines))
    return found


def _header(part: str) -> list[str]:
    return ["row", UNITS[part], "x the first", "more"]


def _lines(rows: Mapping[str, Row]) -> list[list[str]]:
    first: dict[str, float] = {}
    lines = []
    for label, row in rows.items():
        if "error" in row:
            lines.append([label, "", "", row["error"]])
            continue
        reference = first.setdefault(label.partition(":")[0], row["rate"])
        more = ", ".join(f"{name} {value:.3g}" for name, value in row.items() if name != "rate")
        lines.append([label, f"{row['rate']:,.1f}", f"{row['rate'] / reference:.2f}" if reference else "", more])
    return lines


BENCHMARK = Benchmark(
    "How fast are physics, fine-tuning, world models and inference on this GPU, compared with the CPU?",
    ("only", "overrides", "tiny"),
    benchmark,
    tables,
)
