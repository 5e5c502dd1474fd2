"""Inference speed of a policy by method, and its cost: action error and lost success.

Three policies per task: a transformer with 100 denoising steps, as diffusion policies are usually trained, where block
caching and better samplers can save time; the same network with ten steps; and the recipe's own network with ten steps,
which is distilled to one and two. All methods of a policy alternate in one process, with batch size one. Success is
measured from the same initial states, except for methods with the same actions as the reference, for which the table
has the largest difference of actions instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch.utils.flop_counter import FlopCounterMode

from robopolicy.benchmarks.rates import mean_text, pooled, rate_text, short
from robopolicy.benchmarks.runs import chosen_from, demonstrations, each_row, pretrained, settings_of
from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import PolicySpec
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.world import Rows
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.evaluation.plots import speed_beside_success
from robopolicy.evaluation.report import Section
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.inference.caching import CachePlan, FirstBlockCaching
from robopolicy.inference.calibration import Calibration, calibrate
from robopolicy.inference.comparison import EXACT, action_error, noise_free_actions, time_decisions
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.inference.schedules import CacheConfig, make_plan
from robopolicy.nn.branches import Caching
from robopolicy.nn.configuration import Prediction
from robopolicy.nn.schedules import DiffusionSchedule
from robopolicy.policies.denoising import DenoisingPolicy, require_denoising
from robopolicy.rl.offline.decisions import observations_at
from robopolicy.runs import is_complete
from robopolicy.verbs import distill
from robopolicy.verbs.bench import Benchmark, Table

EPISODES = 200
OBSERVATIONS = 256
CALIBRATED = 32
LEAN, COMPILED = InferenceConfig("lean"), InferenceConfig("compiled")
REFERENCE = "reference"
BUDGETS = (5, 10, 20)
"""Updates a block of BAC's plans; its union adds to them."""
CHANGES = (0.05, 0.2)
"""Of the first block's output, at which first-block caching computes the others again."""

RemembersBlocks = Callable[[Calibration], Caching]


@dataclass(frozen=True)
class Arm:
    """An inference method.

    config: the engine and sampler; cache: scheduler of the block cache; students: denoising steps of the distilled
    policy, 0 for the policy itself; peer: diffusers' own loop.
    """

    config: InferenceConfig = InferenceConfig()  # noqa: RUF009 (frozen)
    cache: RemembersBlocks | None = None
    student: int = 0
    peer: bool = False


def _cached(scheduler: str, budget: int, **settings: int) -> RemembersBlocks:
    return lambda found: make_plan(found, CacheConfig(scheduler, budget, **settings))


def _at_the_cost_of_bac(scheduler: str, budget: int) -> RemembersBlocks:
    """Return a plan with the same steps for all blocks, with as many block evaluations as BAC's plan of this budget."""

    def plan(found: Calibration) -> CachePlan:
        share = make_plan(found, CacheConfig("bac", budget)).share
        return make_plan(found, CacheConfig(scheduler, max(3, round(share * found.steps))))

    return plan


def _when_the_first_changes(threshold: float) -> RemembersBlocks:
    return lambda _: FirstBlockCaching(threshold)


def _sampled(engine: InferenceConfig, sampler: str, steps: int, precision: str = "fp32") -> Arm:
    return Arm(replace(engine, sampler=sampler, steps=steps, precision=cast(Any, precision)))


HUNDRED: dict[str, Arm] = {
    REFERENCE: Arm(),
    "diffusers loop": Arm(peer=True),
    "lean": Arm(LEAN),
    "compiled": Arm(COMPILED),
    **{f"BAC {budget}": Arm(LEAN, _cached("bac", budget)) for budget in BUDGETS},
    "BAC 10 without its union": Arm(LEAN, _cached("bac", 10, top_blocks=0)),
    **{f"uniform at the cost of BAC {budget}": Arm(LEAN, _at_the_cost_of_bac("uniform", budget)) for budget in BUDGETS},
    "shared 10": Arm(LEAN, _cached("shared", 10)),
    "shared at the cost of BAC 10": Arm(LEAN, _at_the_cost_of_bac("shared", 10)),
    "TaylorSeer 10": Arm(LEAN, _cached("uniform", 10, order=1)),
    "TaylorSeer, shared 10": Arm(LEAN, _cached("shared", 10, order=1)),
    **{f"first block, {threshold}": Arm(LEAN, _when_the_first_changes(threshold)) for threshold in CHANGES},
    **{f"DDIM {steps}": _sampled(LEAN, "ddim", steps) for steps in (20, 10, 5)},
    **{f"DPM++ {steps}": _sampled(LEAN, "dpm++", steps) for steps in (10, 5)},
    "bf16": Arm(replace(LEAN, precision="bf16")),
    "compiled DDIM 10": _sampled(COMPILED, "ddim", 10),
    "compiled DDIM 5": _sampled(COMPILED, "ddim", 5),
}
FEWER: dict[str, Arm] = {
    REFERENCE: Arm(),
    "diffusers loop": Arm(peer=True),
    "lean": Arm(LEAN),
    "compiled": Arm(COMPILED),
    "two steps, distilled": Arm(LEAN, student=2),
    "one step, distilled": Arm(LEAN, student=1),
    "one step, distilled, compiled": Arm(COMPILED, student=1),
}
POLICIES = {
    "hundred_steps": HUNDRED,
    "ten_steps_of_a_transformer": FEWER,
    "ten_steps": {**FEWER, "DDIM 5": _sampled(LEAN, "ddim", 5)},
}


class DiffusersLoop:
    """The same network in diffusers' usual loop: its scheduler object is called at every step.

    With `clip_sample` off if the policy has none; noise-free (DDIM, eta 0), for diffusion policies.
    """

    def __init__(self, policy: DenoisingPolicy):
        schedule = policy.schedule
        if not isinstance(schedule, DiffusionSchedule):
            raise ConfigError("The loop with diffusers' scheduler supports diffusion policies only.")
        names = {Prediction.EPSILON: "epsilon", Prediction.SAMPLE: "sample", Prediction.VELOCITY: "v_prediction"}
        self.policy, self.training_steps = policy, schedule.training_steps
        make: Any = DDIMScheduler
        self.scheduler: Any = make(
            schedule.training_steps,
            beta_schedule=schedule.beta_schedule,
            clip_sample=schedule.clip is not None,
            clip_sample_range=schedule.clip or 1.0,
            prediction_type=names[schedule.prediction],
            timestep_spacing=schedule.spacing.value,
        )

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy."""
        return self.policy.spec

    def reset(self, rows: Rows = None) -> None:
        """No memory to clear for any rows [R]."""

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return an action chunk for every row [B]; see `core.policy.Policy`."""
        policy, scheduler = self.policy, self.scheduler
        condition = policy.encode(observation)
        rows = len(next(iter(condition.values())))
        x = torch.randn((rows, *policy.noise_shape), generator=generator, device=generator.device)
        scheduler.set_timesteps(policy.schedule.steps)
        for timestep in scheduler.timesteps:
            time = ((timestep + 1).to(x) / self.training_steps).expand(rows)
            prediction = policy.network.denoise(x, time, condition)
            x = scheduler.step(prediction, timestep, x, eta=0.0, use_clipped_model_output=True).prev_sample
        return Decision(policy.to_actions(x))


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {policy: {seed: {arm: results}}}}}, running what is missing.

    Times are measured again in every call, unless bench.rounds is 0.
    """
    tasks = each_row(config, root, chosen_from(config, POLICIES), measure)
    return {"tasks": tasks, "rounds": config.bench.rounds}


def measure(config: Config, root: Path, task: str, name: str, seed: int) -> dict[str, Any]:
    """Return the results of every arm of a policy of one seed, measured together and stored in root/task/arms."""
    path = root / task / "arms" / name / f"{seed}.json"
    earlier_rows: dict[str, Any] = read_json(path) if path.exists() else {}
    if earlier_rows and not config.bench.rounds:
        return earlier_rows
    arms, run_config = POLICIES[name], compose(settings_of(config, root, task, seed))
    ways = made(config, root, task, name, seed, choose_device(run_config.run))
    observation = recorded(root, task, seed, ways[REFERENCE].inner)
    first = {key: value[:1] for key, value in observation.items()}
    times = time_decisions({label: way.policy for label, way in ways.items()}, first, max(1, config.bench.rounds))
    if set(earlier_rows) == set(arms):
        rows = {label: {**row, **times[label].to_json()} for label, row in earlier_rows.items()}
        write_json(path, rows)
        return rows
    reference_actions = noise_free_actions(ways[REFERENCE].policy, observation)
    rows = dict[str, Any]()
    for label, way in ways.items():
        error = action_error(noise_free_actions(way.policy, observation), reference_actions)
        rows[label] = {**times[label].to_json(), "error": error, "flops": flops(ways, label, arms, first)}
        if isinstance(way.caching, CachePlan):
            rows[label] |= {"share": way.caching.share, "masks": way.caching.masks}
        if label == REFERENCE or error > EXACT:
            rows[label]["success"] = judged(run_config, way.lean(arms[label]), seed)
    write_json(path, rows)
    return rows


@dataclass(frozen=True)
class Way:
    """A method ready to run: the policy, the denoising policy inside it, and its cached blocks."""

    policy: Policy
    inner: DenoisingPolicy
    caching: Caching | None = None

    def lean(self, arm: Arm) -> Policy:
        """Return a policy with equal actions (to 1e-5) that is not compiled for every batch size."""
        if arm.config.engine != "compiled":
            return self.policy
        return with_engine(self.inner, replace(arm.config, engine="lean"), self.caching)


def made(config: Config, root: Path, task: str, name: str, seed: int, device: torch.device) -> dict[str, Way]:
    """Return every arm of a policy; missing training, calibration and distillation are run."""
    arms, base = POLICIES[name], pretrained(config, root, task, name, seed)
    policy = loaded(base, device)
    observation = recorded(root, task, seed, policy)
    few = {key: value[:CALIBRATED] for key, value in observation.items()}
    cached = any(arm.cache is not None for arm in arms.values())
    calibration = calibrate(policy, few, torch.Generator(device).manual_seed(seed)) if cached else None
    ways: dict[str, Way] = {}
    for label, arm in arms.items():
        inner = loaded(distilled(config, root, task, name, seed, arm.student), device) if arm.student else policy
        caching = None if arm.cache is None or calibration is None else arm.cache(calibration)
        ways[label] = Way(DiffusersLoop(inner) if arm.peer else with_engine(inner, arm.config, caching), inner, caching)
    return ways


def loaded(run: Path, device: torch.device) -> DenoisingPolicy:
    """Return the policy of a run folder."""
    return require_denoising(load_policy(run / "checkpoint", device), f"{run} contains no denoising policy.")


def distilled(config: Config, root: Path, task: str, name: str, seed: int, steps: int) -> Path:
    """Return the run folder of a policy distilled to this many steps, distilled if it is missing."""
    label = f"{name}_in_{steps}"
    folder = root / task / "distill" / label / str(seed)
    if not is_complete(folder):
        teacher = pretrained(config, root, task, name, seed) / "checkpoint"
        settings = (
            f"run.name={label}",
            f"distill.policy={teacher}",
            f"distill.steps={steps}",
            "distill.evaluate_episodes=0",
        )
        distill.run(compose([*settings_of(config, root, task, seed), *settings]))
    return folder


def recorded(root: Path, task: str, seed: int, policy: DenoisingPolicy) -> TensorObservation:
    """Return observations [N, H, ...] of the demonstrations that the policy was trained on."""
    episodes = read_dataset(demonstrations(root, task, seed), cameras=policy.spec.cameras)
    draws = torch.Generator().manual_seed(seed)
    steps = torch.randperm(episodes.step_count, generator=draws)[:OBSERVATIONS]
    frames = steps + episodes.episode_of_step[steps]
    keys = list(policy.spec.observation)
    device = policy.action_low.device
    return observations_at(episodes.to(device), frames.to(device), policy.spec.history, keys)


def flops(ways: Mapping[str, Way], label: str, arms: Mapping[str, Arm], first: TensorObservation) -> int:
    """Return the multiplications and additions of a policy call for one observation, as counted by torch.

    Compiled code is not counted; its numbers are those of the code before compilation.
    """
    policy = ways[label].lean(arms[label])
    noise_free_actions(policy, first)  # tables that are computed once are not counted
    with FlopCounterMode(display=False) as counter:
        noise_free_actions(policy, first)
    return int(counter.get_total_flops())


def judged(config: Config, policy: Policy, seed: int) -> dict[str, float]:
    """Return the success of a policy without exploration noise, from the initial states that all policies share."""
    device = choose_device(config.run)
    world = build_world(config.world, policy, episodes=EPISODES, device=device)
    seeds = episode_seeds(seed, "evaluate", EPISODES)
    result = evaluate_policy(world, policy, seeds, deterministic=True, generator_seed=seed, device=device)
    world.close()
    return short(result.to_json())


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task and policy, with one row per arm."""
    header = ["way", "ms", "x reference", "x diffusers", "MFLOP", "block evaluations", "action error / std", "success"]
    result_tables: list[Table] = []
    for task, policies in figures["tasks"].items():
        for name, seeds in policies.items():
            rows = list(seeds.values())
            lines = [[label, *row_of([seed[label] for seed in rows], rows)] for label in rows[0]]
            of_seeds = f"success over {'one seed' if len(rows) == 1 else f'{len(rows)} seeds'} of {EPISODES} episodes"
            title = f"{task}, {name.replace('_', ' ')}: one decision of one observation; {of_seeds}"
            result_tables.append(Table(title, header, lines))
    return result_tables


def row_of(arm: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """Return the cells of an arm; arm: its results of every seed, rows: those of all arms."""
    speed_ratios = {
        other: mean_text((row[other]["least_ms"] / each["least_ms"] for row, each in zip(rows, arm, strict=True)), 1)
        for other in (REFERENCE, "diffusers loop")
    }
    success = "as the reference"
    if "success" in arm[0]:
        success = rate_text(pooled([each["success"] for each in arm]))
    error = sum(each["error"] for each in arm) / len(arm)
    return [
        mean_text((each["least_ms"] for each in arm), 2),
        *speed_ratios.values(),
        f"{sum(each['flops'] for each in arm) / len(arm) / 1e6:.1f}",
        mean_text((100 * each["share"] for each in arm), 0) + " %" if "share" in arm[0] else "",
        f"{error:.3f}" if error > 1e-3 else f"{error:.0e}",
        success,
    ]


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of milliseconds and success."""
    panels: dict[str, dict[str, tuple[float, float, float, float]]] = {}
    for task, policies in figures["tasks"].items():
        for name, seeds in policies.items():
            rows = list(seeds.values())
            points = panels[f"{task}, {name.replace('_', ' ')}"] = {}
            for label in rows[0]:
                judged_as = label if "success" in rows[0][label] else REFERENCE
                each = [row[judged_as]["success"] for row in rows]
                rate = pooled(each)
                ms = sum(row[label]["least_ms"] for row in rows) / len(rows)
                points[label] = ms, rate["success_rate"], rate["low"], rate["high"]
    caption = "A row a way of computing it, with Wilson 95 % intervals of success."
    return Section("Milliseconds a decision, and success", caption, svg=speed_beside_success(panels))


BENCHMARK = Benchmark(
    "How fast is a policy call with each inference method, and how much success does it cost?",
    ("tasks", "seeds", "only", "rounds", "overrides"),
    benchmark,
    tables,
    lambda figures, root: [picture(figures)],
    picture=picture,
)
