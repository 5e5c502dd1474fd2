"""Success against inference latency for every chunking method.

Flow policies predict twice as many steps as they execute; for `trained_rtc` the same policies are also trained to
continue given steps. Where the scripted expert is hard to imitate, they are trained on episodes of a fine-tuned policy.
Latency is simulated (`evaluate.latency_steps`), so results do not depend on the machine; all methods use the same
initial states. In `push_cube_moving` the goal moves during inference. Also measured: policies trained with latency on
the same recordings (`world.options.latency_steps`), before and after fine-tuning with that latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import pooled, rate_text, short
from robopolicy.benchmarks.runs import Variant, chosen_from, each_row, run_variant, settings_of
from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.storage import read_json, write_json
from robopolicy.evaluation.plots import success_beside_delay
from robopolicy.evaluation.report import Section
from robopolicy.evaluation.smoothness import SmoothnessMeter
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.inference.chunking import Delay, HasSeams, with_chunking
from robopolicy.runs import is_complete, output
from robopolicy.verbs import collect, finetune, train
from robopolicy.verbs.bench import Benchmark, Table

EPISODES = 200
SHARES = {"0": 0.0, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
"""Delays, as shares of a chunk."""
HALF = "1/2"

KINDS = ("synchronous", "prefetch", "ensembling", "bidirectional", "lerobot_rtc", "rtc", "trained_rtc")
GIVEN = "trained_rtc"
"""The chunking of a policy that has learned to go on from given steps."""
AHEAD, FINETUNED = "decides ahead", "tuned to decide ahead"
"""No chunkings, but policies that were taught for a delay."""
ANSWERED: dict[str, tuple[str, ...]] = dict.fromkeys((AHEAD, FINETUNED), ("0", HALF, "1"))
"""Delays at which a way is measured, where that is not all of them: each takes a policy of its own."""
DECAY = 0.5
"""Its policy.prefix_decay, chosen on seed 0: 0 cost success where nothing is given; 1, on pick_place, kept less."""


@dataclass(frozen=True)
class Course:
    """Training of a task's policy.

    chunk: number of executed steps, half of the predicted ones; cloned: whether the data are episodes of a fine-tuned
    policy instead of the expert's; data: settings of the recording.
    """

    chunk: int
    cloned: bool
    data: tuple[str, ...]


COURSES = {
    "push_t": Course(8, True, ("collect.episodes=1500",)),
    "pick_place": Course(8, False, ("collect.episodes=300", "collect.noise=['0.2']")),
    "push_cube_moving": Course(4, True, ("collect.episodes=1500",)),
}
TUNED = Variant("diffusion", ("finetune.target_success=0.95", "finetune.videos=0"))


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {chunking: {seed: {delay: success and smoothness}}}}}, after doing what is missing."""
    return {"tasks": each_row(config, root, chosen_from(config, dict.fromkeys((*KINDS, AHEAD, FINETUNED))), measure)}


def measure(config: Config, root: Path, task: str, kind: str, seed: int) -> dict[str, Any]:
    """Return success and smoothness at every delay; each is measured once and stored in root/task/kinds."""
    path = root / task / "kinds" / kind / f"{seed}.json"
    if path.exists():
        return read_json(path)
    chunk, results = course_of(task).chunk, dict[str, Any]()
    for share in ANSWERED.get(kind, tuple(SHARES)):
        steps = round(SHARES[share] * chunk)
        is_late, case = kind in ANSWERED, (config, root, task, seed)
        if is_late:
            place = decides_ahead(*case, steps) if kind == AHEAD else finetuned(*case, steps)
        else:
            place = trained(*case, kind == GIVEN)
        run_config = compose([*settings_of(*case), *([_latency(steps)] if is_late else [])])
        device = choose_device(run_config.run)
        policy = load_policy(place / "checkpoint", device)
        world = build_world(run_config.world, policy, episodes=EPISODES, device=device)
        acting = policy if is_late else with_chunking(policy, kind, Delay(steps, positions=("gripper",)))
        meter = SmoothnessMeter(
            acting.seams if isinstance(acting, HasSeams) else (0,), 0 if is_late else steps, policy.spec.action
        )
        seeds = episode_seeds(seed, "evaluate", EPISODES)
        result = evaluate_policy(
            world, acting, seeds, deterministic=True, generator_seed=seed, device=device, watch=meter
        )
        world.close()
        results[share] = {"steps": steps, **short(result.to_json()), "smoothness": meter.measured().to_json()}
    write_json(path, results)
    return results


def course_of(task: str) -> Course:
    """Return the training course of a task's policy; raises ConfigError for a task without one."""
    if task not in COURSES:
        raise ConfigError(
            f"bench.tasks: the benchmark delay has no task '{task}'.{did_you_mean(task, COURSES)} {', '.join(COURSES)}."
        )
    return COURSES[task]


def recorded(config: Config, root: Path, task: str, seed: int) -> Path:
    """Return the training dataset of a task, recorded if it is missing."""
    folder, shared_settings = root / task / "collect" / "ahead" / str(seed), settings_of(config, root, task, seed)
    if not is_complete(folder):
        course = course_of(task)
        play = list(course.data)
        if course.cloned:
            run_variant(config, root, task, "tuned", TUNED, seed)
            play.append(f"collect.policy={root / task / 'finetune' / 'tuned' / str(seed) / 'checkpoint'}")
        collect.run(compose([*shared_settings, "run.name=ahead", *play]))
    return folder / "dataset"


def trained(config: Config, root: Path, task: str, seed: int, given: bool) -> Path:
    """Return the run folder of a task's policy, trained if it is missing; given: train it to continue given steps as
    well.
    """
    name, chunk = "ahead_given" if given else "ahead", course_of(task).chunk
    size = f"policy.chunk={chunk}", f"policy.prediction_steps={2 * chunk}", "policy.finetuned_steps=null"
    settings = [*size, "policy.kind=flow", "policy.sampling_steps=5"]
    settings += [f"policy.prefix_steps={chunk}", f"policy.prefix_decay={DECAY}"] if given else []
    return _imitated(config, root, task, seed, name, settings)


def decides_ahead(config: Config, root: Path, task: str, seed: int, steps: int) -> Path:
    """Return the run folder of a policy with the recipe's settings and this latency, trained if it is missing."""
    chunk = course_of(task).chunk
    size = f"policy.chunk={chunk}", f"policy.prediction_steps={chunk}"
    return _imitated(config, root, task, seed, f"late_{steps}", [*size, _latency(steps)])


def finetuned(config: Config, root: Path, task: str, seed: int, steps: int) -> Path:
    """Return the run folder of such a policy after fine-tuning with its latency, run if it is missing."""
    name = f"late_{steps}"
    folder = root / task / "finetune" / name / str(seed)
    if not is_complete(folder):
        base = decides_ahead(config, root, task, seed, steps) / "checkpoint"
        output.print(Rule(f"[bold]{task}, seed {seed}: fine-tuned for a delay of {steps}", align="left"))
        settings = f"run.name={name}", f"finetune.policy={base}", _latency(steps), *TUNED.settings
        finetune.run(compose([*settings_of(config, root, task, seed), *settings]))
    return folder


def _imitated(config: Config, root: Path, task: str, seed: int, name: str, settings: list[str]) -> Path:
    folder = root / task / "train" / name / str(seed)
    if not is_complete(folder):
        data = recorded(config, root, task, seed)
        arguments = "train.fit.steps=12000", "train.evaluate_episodes=0", f"train.data={data}", f"run.name={name}"
        train.run(compose([*settings_of(config, root, task, seed), *settings, *arguments]))
    return folder


def _latency(steps: int) -> str:
    return f"world.options.latency_steps={steps}"


def at(seeds: Mapping[str, Any], delay: str) -> dict[str, float]:
    """Return the success over all seeds at a delay, of those that were measured at it."""
    return pooled([row[delay] for row in seeds.values()])


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task with one row per chunking."""
    header = ["chunking", *SHARES, f"kept at {HALF}", "jump at borders", "elsewhere"]
    result_tables: list[Table] = []
    for task, kinds in figures["tasks"].items():
        lines, count = list[list[str]](), max(map(len, kinds.values()))
        for kind, seeds in kinds.items():
            name = kind if len(seeds) == count else f"{kind} (seed {', '.join(seeds)})"
            rates = {delay: at(seeds, delay) for delay in _delays(seeds)}
            ratio = rates[HALF]["success_rate"] / max(rates["0"]["success_rate"], 1 / EPISODES)
            jumps = [_mean(seeds, name) for name in ("border_jump", "inner_jump")]
            cells = [rate_text(rates[delay]) if delay in rates else "" for delay in SHARES]
            lines.append([name, *cells, f"{100 * ratio:.0f} %", *jumps])
        title = f"{task}: success by inference latency in chunks of {COURSES[task].chunk} steps, {count} seeds of"
        result_tables.append(
            Table(f"{title} {EPISODES} episodes; mean jump of an action at a delay of {HALF}", header, lines)
        )
    return result_tables


def _delays(seeds: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the delays at which every seed was measured."""
    return tuple(delay for delay in SHARES if all(delay in row for row in seeds.values()))


def _mean(seeds: Mapping[str, Any], name: str) -> str:
    values = [row[HALF]["smoothness"][name] for row in seeds.values()]
    return f"{sum(values) / len(values):.3f}"


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of success against delay."""

    def point(seeds: Mapping[str, Any], delay: str) -> tuple[float, float, float, float]:
        rate = at(seeds, delay)
        return next(iter(seeds.values()))[delay]["steps"], rate["success_rate"], rate["low"], rate["high"]

    panels = {
        task: {kind: [point(seeds, delay) for delay in _delays(seeds)] for kind, seeds in kinds.items()}
        for task, kinds in figures["tasks"].items()
    }
    caption = "Control steps that a decision takes, up to a whole chunk, with Wilson 95 % intervals."
    return Section("Success against delay", caption, svg=success_beside_delay(panels))


BENCHMARK = Benchmark(
    "How much success does inference latency cost, and which method of handling it keeps most?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
    lambda figures, root: [picture(figures)],
    picture=picture,
)
